"""Hybrids: what recurrent layers keep is made anew from their inputs, to the bit."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
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


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_what_only_a_tail_needs_is_translated_for_its_tokens(
    hybrids: dict[str, LanguageModel], name: str
) -> None:
    """Queries, or Mamba-2's C: the last three tokens as W x has them, nothing before; no state
    depends on them."""
    model = hybrids[name]
    config = identity_of(model).config
    rng = np.random.default_rng(3)
    arrays = {
        f"{side}.{index}.weight": rng.standard_normal((layer.width(side), layer.width(side)))
        for index, layer in enumerate(model.geometry.layers)
        for side in ("keys", "values")
    }
    arrays = {key: (array / 8).astype(np.float32) for key, array in arrays.items()}
    translator = build(config, Weights("float32", arrays))
    (states,) = capture.prefill(model, TOKENS[:-1])
    first = model.geometry.layers[0]
    rows, count = late = first.late("keys") or (range(0), 0)
    told = hybrid_models.CONFIGS[name]
    if name == "qwen3_5":
        wanted_rows = range(2 * 16)
    else:  # x, B, C, of which the last two are as wide as all groups' states
        width = told["mamba_n_groups"] * told["mamba_d_state"]
        end = told["mamba_n_heads"] * told["mamba_d_head"] + 2 * width
        wanted_rows = range(end - width, end)
    assert late == (wanted_rows, 3)
    found = next(group for group in translator(states).keys if 0 in group.layers)
    own = np.array(found.states[found.layers.index(0), 0, 0])
    wanted = np.array(states.keys[0])[0].astype(np.float64) @ arrays["keys.0.weight"].T
    others = [row for row in range(first.key_dim) if row not in rows]
    np.testing.assert_allclose(own[:, others], wanted[:, others], atol=1e-4)
    np.testing.assert_allclose(own[-count:, rows], wanted[-count:, rows], atol=1e-4)
    assert not own[:-count, rows].any() and np.abs(wanted[:-count, rows]).min() > 0
    # The state is that of inputs whose late numbers are any others.
    module, values = model.attentions[0], states.values[0]
    changed = np.array(states.keys[0])
    changed[:, :, rows] = 7.0
    one, other = (
        model.family.followed(module, (None, None), keys, values)
        for keys in (states.keys[0], mx.array(changed))
    )
    np.testing.assert_array_equal(np.array(one[1]), np.array(other[1]))
    assert not np.array_equal(np.array(one[0]), np.array(other[0]))  # the tail has them
