"""Where a source reads beside a target that several ranks hold: counted by hand."""

from __future__ import annotations

import pytest

from kvlingo_mlx.loading.placement import Need, Rates, chosen

GB, G = 10**9, 10**9


@pytest.mark.parametrize(
    ("rates", "free", "placement"),
    [
        (Rates(10_000 * G, 5 * GB, 1e4), None, "sharded"),
        (Rates(10_000 * G, 0.1 * GB, 1e4), None, "replicated"),
        (Rates(10_000 * G, 0.1 * GB, 1e4), 5 * GB, "sharded"),
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
