"""Every family: what is captured, written and decoded is the model's own, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

import kvlingo_mlx as kv
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.identity import identity_of
from tests.support.native_caches import LENGTHS, TOKENS, WINDOW, held, logits, native
from tests.support.opened import quantised


@pytest.fixture(scope="session")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """One tiny model of each family, and its 4-bit copy, by name."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name, (model_type, options) in tiny.FAMILIES.items():
        found[name] = kv.load(tiny.write_tiny_model(root / name, model_type, **options))
        found[f"{name} 4-bit"] = quantised(found[name], root / f"{name}-4bit")
    return found


@pytest.fixture(params=[f"{n}{bits}" for n in tiny.FAMILIES for bits in ("", " 4-bit")])
def model(request: pytest.FixtureRequest, family_models: dict[str, LanguageModel]) -> LanguageModel:
    return family_models[request.param]


@pytest.mark.parametrize("step", [7])
@pytest.mark.parametrize("length", LENGTHS)
def test_identity_writes_the_models_own_cache(model: LanguageModel, step: int, length: int) -> None:
    """Decoding from equal caches can differ by their lengths (chunks of 7), or by their chunks."""
    tokens = TOKENS[:length]
    own = native(model, tokens[:-1], step)
    entries = [held(theirs) for theirs in own]
    decodes = step == 7 or length == max(LENGTHS)
    expected = logits(model, own, tokens[-1]) if decodes else None
    for point in model.family.points:
        translator = identity_of(model, capture=point)
        cache = kv.hand_over(model, model, tokens, translator=translator, prefill_step_size=step)
        for mine, theirs in zip(cache, entries, strict=True):
            for a, b in zip(held(mine), theirs, strict=True):
                np.testing.assert_array_equal(a, b)
        if decodes and point == model.family.points[0]:  # equal caches decode alike
            assert np.array_equal(logits(model, cache, tokens[-1]), expected)


def test_a_window_is_all_that_is_translated(family_models: dict[str, LanguageModel]) -> None:
    model = family_models["gemma3"]
    translator = identity_of(model)
    whole = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=20)
    (states,) = capture.prefill(model, TOKENS[:-1])
    kept = model.geometry.first_kept(len(TOKENS) - 1)
    found = translator(states, kept)
    for group in (*found.keys, *found.values):
        (layer,) = group.layers
        window = model.geometry.layers[layer].window
        assert group.states.shape[3] == (len(TOKENS) - 1 if window is None else WINDOW)
        assert group.start == kept[layer]
    assert [c.keys.shape[2] for c in whole if isinstance(c, RotatingKVCache)] == [WINDOW] * 4


def test_a_window_larger_than_the_sources_is_refused(
    family_models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    model_type, options = tiny.FAMILIES["gemma3"]
    folder = tiny.write_tiny_model(
        tmp_path / "wide", model_type, **options | {"sliding_window": 24}
    )
    with pytest.raises(
        IncompatibleTranslatorError, match="window of 24 tokens.* keeps the last 16"
    ):
        kv.fit(family_models["gemma3"], kv.load(folder), [{"text": "a b c"}])


def test_layers_read_their_own_kind(family_models: dict[str, LanguageModel]) -> None:
    model = family_models["gemma3"]
    translator = kv.fit(model, model, [{"text": "the you and use is of an other " * 24}], nu=2)
    kinds = [layer.attention for layer in model.geometry.layers]
    assert kinds == ["sliding", "sliding", "full", "sliding", "sliding"]
    # Two of the four local layers each; the single global layer has no other to read.
    assert translator.config.assignment.keys == ((0, 1), (1, 3), (2,), (3, 4), (3, 4))
    with pytest.raises(IncompatibleTranslatorError, match="sliding attention, the source only of"):
        kv.fit(family_models["qwen3"], model, [{"text": "a b c"}])
