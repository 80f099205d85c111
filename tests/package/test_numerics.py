"""The numerics policy: what must be equal bit by bit, and how near the rest must be.

Parity with PyTorch in float32 (1e-5 a tensor, 1e-4 on logits, golden files) is in test_parity.
"""

from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, entries, errors


def test_chunks_are_as_the_whole(models: dict[str, LanguageModel]) -> None:
    """Any number of tokens a chunk; and one position further on, something else."""
    source, target = models["dense"], models["wide"]
    translator = kv.fit(source, target, [{"text": "the use of an other " * 20}])
    whole = entries(kv.hand_over(source, target, TOKENS, translator=translator))

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(step=st.integers(1, len(TOKENS)))
    def run(step: int) -> None:
        cache = kv.hand_over(source, target, TOKENS, translator=translator, prefill_step_size=step)
        assert errors(entries(cache), whole).max() < 1e-5  # the source's own grows with depth

    run()
    shifted = kv.hand_over(source, target, [TOKENS[-1], *TOKENS[:-1]], translator=translator)
    assert errors(entries(shifted), whole).min() > 0.01


def test_repeats_are_bit_equal(models: dict[str, LanguageModel]) -> None:
    """On a CPU: fits, hand-overs, answers."""
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("a GPU may sum in another order")
    source, target = models["dense"], models["moe"]
    records = [{"text": "the use of an other is it on " * 12}]
    fits = [kv.fit(source, target, records) for _ in range(2)]
    assert fits[0].digest == fits[1].digest
    held = [entries(kv.hand_over(source, target, TOKENS, translator=t)) for t in fits]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*held, strict=True))
    answers = [kv.generate(source, target, TOKENS, translator=t, max_tokens=8) for t in fits]
    assert answers[0] == answers[1]


def test_bfloat16_is_no_further_from_float32_than_pytorchs(tmp_path: Path) -> None:
    """Two-sided: at depth, two right runtimes differ by more than any fixed tolerance allows."""
    torch = pytest.importorskip("torch")
    from kvlingo_mlx.cuda import model as torch_model

    folder = tiny.write_tiny_model(
        tmp_path / "m", "qwen3", seed=2, layers=6, kv_heads=2, head_dim=32, dtype="bfloat16"
    )
    prefix = tuple(TOKENS[:-1])
    states = {}
    for name in ("float32", "bfloat16"):
        model = torch_model.load(str(folder), dtype=getattr(torch, name))
        with torch.no_grad():
            found = model.states(prefix, "post_rope")
        states[name] = [a.float().numpy() for a in (*found.keys, *found.values)]
    ours = kv.load(folder)
    assert ours.cache_dtype == mx.bfloat16
    translator = identity_of(ours)
    read = caches.read(kv.hand_over(ours, ours, TOKENS, translator=translator), ours)
    mine = [np.array(a.astype(mx.float32))[0] for a in read.arrays]
    theirs = errors(states["bfloat16"], states["float32"])
    assert (errors(mine, states["float32"]) <= 1.5 * theirs + 2e-3).all()
    assert theirs.max() < 0.1  # or the bound would say nothing
