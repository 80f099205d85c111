"""Every family: what is captured, written and decoded is the model's own, on a CPU to the bit."""

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.translators import build
from tests.support import hybrid_models, plain_models, tiny
from tests.support.fixtures import Models
from tests.support.identity import identity_of
from tests.support.native_caches import LENGTHS, STEPS, TOKENS, WINDOW, alike, held, logits, native
from tests.support.opened import ALIASES

# A scaled rotation, one of pairs, a temperature, sinks, a fused projection, layers without one.
THOROUGH = ("cohere2", "gpt_oss", "llama", "ministral3", "mistral", "olmo3", "phi3")
# Of these the chunks are of 7 tokens, and texts end before, at and beyond a window's wrap.
FEW_BITS = [f"{name} 4-bit" for name in (*tiny.FAMILIES, "gpt_oss", "phi3")]
AT_EVERY_LENGTH = (*tiny.FAMILIES, *THOROUGH, *FEW_BITS)


NAMES = dict.fromkeys(
    (*AT_EVERY_LENGTH, *hybrid_models.CONFIGS, *sorted(plain_models.CONFIGS), *ALIASES)
)


def numbers(cache: Any, tokens: int) -> list[np.ndarray]:
    """What a layer's cache holds of a text; of a hybrid's, tails and states as well."""
    if not caches.is_recurrent(cache):
        return [array[..., :tokens, :] for array in held(cache)]
    return [np.array(array.astype(mx.float32)) for array in caches.held(cache).values()]


def same(one: list[Any], other: list[Any]) -> list[bool]:
    """Whether two caches hold the same numbers, layer by layer."""
    return [
        all(map(np.array_equal, numbers(x, len(TOKENS) - 1), numbers(y, len(TOKENS) - 1)))
        for x, y in zip(one, other, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_identity_writes_the_models_own_cache(name: str, families: Models) -> None:
    """From every point of capture; equal caches decode alike, and others do not."""
    model = families[name]
    assert name not in ALIASES or model.geometry.model_type == name
    many = name in AT_EVERY_LENGTH
    step = 7 if many or name in hybrid_models.CONFIGS else 17  # beside the window's edge, of 16
    for length in LENGTHS if many else [len(TOKENS) - 5]:
        tokens, steps = TOKENS[:length], STEPS if many else 6
        own = native(model, tokens[:-1], step)
        entries = [numbers(cache, length - 1) for cache in own]
        expected = logits(model, own, tokens[-1], steps)
        assert np.isfinite(expected).all()
        for point in model.family.points:
            translator = identity_of(model, capture=point)
            options = {"translator": translator, "prefill_step_size": step}
            cache = kv.hand_over(model, model, tokens, **options)
            for mine, theirs, wanted in zip(cache, own, entries, strict=True):
                assert type(mine) is type(theirs)
                for a, b in zip(numbers(mine, length - 1), wanted, strict=True):
                    assert alike(a, b)
            if point == model.family.points[0]:
                assert alike(logits(model, cache, tokens[-1], steps), expected, 1e-4)
    if name in plain_models.CONFIGS:  # the negative control: keys rotated once more
        cache = kv.hand_over(model, model, tokens, **options)
        for layer, finish in zip(cache, model.finishes, strict=True):
            layer.keys = finish.rope(layer.keys, offset=1) * 1.0
        assert np.abs(logits(model, cache, tokens[-1], steps) - expected).max() > 1e-3


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *THOROUGH])
def test_native_layers(name: str, families: Models) -> None:
    """From none to all: the target's own below, translated above, to the bit."""
    model = families[name]
    source = kv.load(model.path)  # whose projections are tapped while the other reads
    exact, own = identity_of(model, capture=model.family.points[0]), native(model, TOKENS[:-1], 25)
    # Maps that no layer could be mistaken for native with.
    arrays = {name: 1.5 * array for name, array in exact.to_weights().arrays.items()}
    translator = build(exact.config, Weights("float32", arrays))
    made = [
        kv.hand_over(
            source, model, TOKENS, translator=translator, prefill_step_size=25, native_layers=j
        )
        for j in range(len(own) + 1)
    ]
    for j, cache in enumerate(made):
        assert same(cache, own) == [True] * j + [False] * (len(own) - j)
        assert same(cache, made[0]) == [False] * j + [True] * (len(own) - j)


def test_a_window_is_all_that_is_kept(families: Models) -> None:
    model = families["gemma3"]
    options = {"translator": identity_of(model), "prefill_step_size": 20}
    whole = kv.hand_over(model, model, TOKENS, **options)
    assert [c.keys.shape[2] for c in whole if isinstance(c, RotatingKVCache)] == [WINDOW] * 4


def test_a_window_larger_than_the_sources_is_refused(families: Models, tmp_path: Path) -> None:
    model_type, options = tiny.FAMILIES["gemma3"]
    folder = tiny.write_tiny_model(
        tmp_path / "wide", model_type, **options | {"sliding_window": 24}
    )
    with pytest.raises(
        IncompatibleTranslatorError, match="window of 24 tokens.* keeps the last 16"
    ):
        kv.fit(families["gemma3"], kv.load(folder), [{"text": "a b c"}])
