"""Where a source reads beside a target that several ranks hold: counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.placement import Need, Rates, chosen, needs
from tests.support import tiny

GB, G = 10**9, 10**9


@pytest.mark.parametrize(
    ("rates", "free", "placement"),
    [
        (Rates(10_000 * G, 5 * GB, 1e4), None, "sharded"),  # Thunderbolt, and a slow GPU
        (Rates(10_000 * G, 0.1 * GB, 1e4), None, "replicated"),  # gigabit Ethernet
        (Rates(10_000 * G, 5 * GB, 20.0), None, "replicated"),  # messages that take 50 ms
        (Rates(10_000 * G, 0.1 * GB, 1e4), 5 * GB, "sharded"),  # no room for all of it
        (Rates(10_000 * G, 0.1 * GB, 1e4), 1 * GB, "sharded"),  # nor for a half: the least
    ],
)
def test_the_quickest_that_fits(rates: Rates, free: int | None, placement: str) -> None:
    """A 4B source of 36 layers, 32k tokens, two ranks: 8 GB, 8 GFLOPs a token."""
    tokens, states = 32_768, 147_456
    inner = 2 * 35 * 2560 * 2
    found = {
        "replicated": Need(8 * GB, 8 * G * tokens),
        "sharded": Need(4 * GB, 4 * G * tokens, (0.5 * states + inner) * tokens, 16 * 70 + 16),
        "first": Need(8 * GB, 8 * G * tokens, states * tokens, 16),
    }
    assert chosen(found, rates, free) == placement


def test_one_rank_reads_where_no_other_has_room_and_none_can_share() -> None:
    found = {"replicated": Need(8 * GB, 1.0), "first": Need(8 * GB, 1.0, 1e9, 16)}
    assert chosen(found, Rates(1.0, 1.0, 1.0), 4 * GB) == "replicated"  # loading it says what lacks
    assert chosen(found, Rates(1.0, 1.0, 1.0), None) == "replicated"


@pytest.mark.parametrize("ranks", [2, 4])
def test_counts_of_a_model_unlike_ours(tmp_path: Path, ranks: int) -> None:
    """36 layers, 8 KV heads of 128, bfloat16, a context of 40,960: by hand."""
    folder = tiny.write_tiny_model(
        tmp_path / "wide", "qwen3", seed=3, layers=36, kv_heads=8, head_dim=128, dtype="bfloat16",
        max_position_embeddings=40_960, num_attention_heads=16,
    )  # fmt: skip
    model = load(folder, lazy=True)
    hidden, tokens = model.model.args.hidden_size, 5000
    found = needs(model, ranks, tokens, 2048)
    states = 36 * 2 * 8 * 128 * 2 * tokens
    share = (ranks - 1) / ranks
    assert found["replicated"].sent == found["replicated"].messages == 0
    assert found["first"].sent == pytest.approx(2 * share * states)
    assert found["first"].messages == 3
    assert found["sharded"].sent == pytest.approx(
        share * states + 2 * share * 35 * 2 * hidden * 2 * tokens
    )
    assert found["sharded"].messages == 3 * 71
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found["replicated"].weights == pytest.approx(size, rel=0.01)
    assert found["sharded"].weights == found["replicated"].weights // ranks
    assert found["sharded"].work * ranks == found["replicated"].work == found["first"].work
    assert found["first"].work == pytest.approx(2 * found["first"].weights / 2 * tokens)
