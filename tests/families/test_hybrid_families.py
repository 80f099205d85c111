"""Hybrids: what recurrent layers keep is made anew from their inputs, to the bit."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import hybrid_models
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, logits, native

STEPS = 40


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """One tiny hybrid of each family, and its 4-bit copy, by name."""
    root = tmp_path_factory.mktemp("hybrids")
    found = {}
    for name in hybrid_models.CONFIGS:
        found[name] = kv.load(hybrid_models.write_hybrid_model(root / name, name))
    return found


def parts(cache: Any) -> list[np.ndarray]:
    return [np.array(array.astype(mx.float32)) for array in caches.held(cache).values()]


@pytest.mark.parametrize("name", hybrid_models.CONFIGS)
@pytest.mark.parametrize("step", [7])
def test_identity_makes_the_models_own_states(
    hybrids: dict[str, LanguageModel], name: str, step: int
) -> None:
    model = hybrids[name]
    own = native(model, TOKENS[:-1], step)
    entries = list(map(parts, own))
    cache = kv.hand_over(
        model, model, TOKENS, translator=identity_of(model), prefill_step_size=step
    )
    for mine, theirs in zip(cache, own, strict=True):
        assert type(mine) is type(theirs)
    for mine, wanted in zip(map(parts, cache), entries, strict=True):
        assert len(mine) == len(wanted)
        for a, b in zip(mine, wanted, strict=True):
            end = min(a.shape[-2], b.shape[-2], len(TOKENS) - 1) if a.ndim == 4 else None
            np.testing.assert_array_equal(a[..., :end, :], b[..., :end, :])
    expected = logits(model, own, TOKENS[-1], STEPS)
    assert np.array_equal(logits(model, cache, TOKENS[-1], STEPS), expected)
