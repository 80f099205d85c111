"""Means and standard errors against textbook formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvlingo_mlx.evaluation.error_bars import (
    Mean,
    over_clusters,
    over_items,
    over_sets,
    over_tokens,
)


def test_items() -> None:
    found = over_items([1.0, 0.0, 0.0, 1.0, 1.0])
    variance = (3 * 0.4**2 + 2 * 0.6**2) / 4
    assert found == Mean(pytest.approx(0.6), pytest.approx(math.sqrt(variance / 5)), 5)
    assert math.isnan(over_items([2.0]).error)
    assert str(over_items([0.25])) == "0.250" and str(Mean(0.25, 0.5, 2)) == "0.250 +- 0.500"
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


def test_windows_of_one_text_are_one_cluster() -> None:
    """By loops: a mean over tokens, its error from the sums of each text's deviations."""
    rng = np.random.default_rng(3)
    means, tokens = rng.normal(size=9), rng.integers(1, 50, 9)
    clusters = ["a", "b", "a", "c", "c", "c", "d", "a", "b"]
    whole, weight = 0.0, 0
    for mean, count in zip(means, tokens, strict=True):
        whole, weight = whole + mean * count, weight + count
    value, squares = whole / weight, 0.0
    for cluster in "abcd":
        total = 0.0
        for mean, count, name in zip(means, tokens, clusters, strict=True):
            total += count * (mean - value) if name == cluster else 0.0
        squares += total**2
    found = over_tokens(means, tokens, clusters)
    assert found.value == pytest.approx(value) and found.count == 4
    assert found.error == pytest.approx(math.sqrt(4 / 3 * squares) / weight)
    single = over_tokens(means, [64] * 9, range(9))
    assert single.value == pytest.approx(over_items(means).value)
    assert single.error == pytest.approx(over_items(means).error)
    assert math.isnan(over_tokens(means, tokens, ["a"] * 9).error)
    with pytest.raises(ValueError, match="no scores"):
        over_tokens([], [], [])
