"""Means and standard errors against textbook formulas written out."""

from __future__ import annotations

import math

import pytest

from kvlingo_mlx.evaluation.error_bars import (
    Mean,
    over_clusters,
    over_items,
    over_sets,
)


def test_one_item_has_no_error() -> None:
    assert str(over_items([0.25])) == "0.250" and str(Mean(0.25, 0.5, 2)) == "0.250 +- 0.500"


def test_items() -> None:
    found = over_items([1.0, 0.0, 0.0, 1.0, 1.0])
    variance = (3 * 0.4**2 + 2 * 0.6**2) / 4
    assert found == Mean(pytest.approx(0.6), pytest.approx(math.sqrt(variance / 5)), 5)
    assert math.isnan(over_items([2.0]).error)
    with pytest.raises(ValueError, match="no scores"):
        over_items([])


def test_sets() -> None:
    found = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)])
    assert (found.value, found.error, found.count) == pytest.approx((0.4, 0.025, 40))
    weighted = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)], [1, 3])
    assert weighted.value == pytest.approx(0.5)
    assert weighted.error == pytest.approx(math.hypot(0.25 * 0.03, 0.75 * 0.04))


def test_clusters() -> None:
    """A question that is right at every length is one item, not three."""
    scores, questions = [1, 1, 1, 0, 0, 0], ["a", "a", "a", "b", "b", "b"]
    assert over_clusters(scores, questions) == over_items([1.0, 0.0])
    assert over_clusters(scores, range(6)) == over_items(scores)
