"""mlx-lm's plain families held to what the others are: decoding, hybrids, saved caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support.identity import identity_of
from tests.support.native_caches import LENGTHS, TOKENS, held, logits, native
from tests.support.opened import Opener, quantised

# A scaled rotation, one of pairs, a temperature, sinks, a fused projection, layers without one.
THOROUGH = ("cohere2", "gpt_oss", "llama", "ministral3", "mistral", "olmo3", "phi3")


@pytest.fixture(scope="module")
def models(plain: Opener, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """Those of ``THOROUGH``, and their 4-bit copies."""
    root = tmp_path_factory.mktemp("few-bits")
    floats = {name: plain(name) for name in THOROUGH}
    return floats | {f"{name} 4-bit": quantised(m, root / name) for name, m in floats.items()}


def same(one: list[Any], other: list[Any]) -> list[bool]:
    """Whether two caches hold the same numbers, layer by layer."""
    return [
        all(np.array_equal(a, b) for a, b in zip(held(x), held(y), strict=True))
        for x, y in zip(one, other, strict=True)
    ]


# ---- captured, written and decoded -------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*THOROUGH, "gpt_oss 4-bit", "phi3 4-bit"])
def test_identity_decodes_across_a_window(
    name: str, length: int, models: dict[str, LanguageModel]
) -> None:
    """20 tokens, from before, at and beyond a window's wrap; from every point."""
    model, tokens = models[name], TOKENS[:length]
    own = native(model, tokens[:-1], 7)
    expected = logits(model, native(model, tokens[:-1], 7), tokens[-1])
    for point in model.family.points:
        translator = identity_of(model, capture=point)
        cache = kv.hand_over(model, model, tokens, translator=translator, prefill_step_size=7)
        assert all(same(cache, own))
        if point == model.family.points[0]:
            assert np.array_equal(logits(model, cache, tokens[-1]), expected)


# ---- hybrids -----------------------------------------------------------------------------


def worsened(model: LanguageModel) -> Translator:
    """Maps of a model to itself that no layer could be mistaken for native with."""
    exact = identity_of(model, capture=model.family.points[0])
    arrays = {name: 1.5 * array for name, array in exact.to_weights().arrays.items()}
    return build(exact.config, Weights("float32", arrays))


@pytest.mark.parametrize("name", THOROUGH)
def test_native_layers(name: str, plain: Opener) -> None:
    """From none to all: the target's own below, translated above, to the bit."""
    model = plain(name)
    source = kv.load(model.path)  # whose projections are tapped while the other reads
    translator, own = worsened(model), native(model, TOKENS[:-1], 25)
    made = [
        kv.hand_over(
            source, model, TOKENS, translator=translator, prefill_step_size=25, native_layers=j
        )
        for j in range(len(own) + 1)
    ]
    for j, cache in enumerate(made):
        assert same(cache, own) == [True] * j + [False] * (len(own) - j)
        assert same(cache, made[0]) == [False] * j + [True] * (len(own) - j)


# ---- caches from files -------------------------------------------------------------------


@pytest.mark.parametrize("name", THOROUGH)
def test_a_saved_cache_is_read(name: str, plain: Opener, tmp_path: Path) -> None:
    """What was written, saved, loaded, read at any point that can be, and written once more."""
    model = plain(name)
    count = len(TOKENS) - 1
    own = native(model, TOKENS[:-1], 25)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), own)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    token = mx.array([TOKENS[-1:]])
    expected = np.array(model.model(token, cache=native(model, TOKENS[:-1], 25)))
    normed = model.finishes[0].norm_weight is not None
    for point in model.family.points:
        if point == "pre_norm" and normed:
            with pytest.raises(kv.UnsupportedModelError, match="pre_norm keys cannot be read"):
                caches.read(loaded, model, point)
            continue
        translator, target = identity_of(model, capture=point), caches.allocate(model, count)
        states = caches.read(loaded, model, point)
        caches.write(target, translator(states, model.geometry.first_kept(count)), model)
        for mine, theirs in zip(target, own, strict=True):
            assert type(mine) is type(theirs) and mine.offset == theirs.offset
            for a, b in zip(held(mine), held(theirs), strict=True):
                np.testing.assert_allclose(a, b, atol=0 if point == "post_rope" else 1e-5)
        found = np.array(model.model(token, cache=target))
        np.testing.assert_allclose(found, expected, atol=1e-4)
