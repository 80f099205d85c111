"""Means with standard errors over evaluation items (appendix "Seeds and error bars")."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mean:
    """A mean, its standard error (NaN for fewer than two items), and the number of items."""

    value: float
    error: float
    count: int

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" +- {self.error:.3f}"
        return f"{self.value:.3f}{error}"


NOTHING = Mean(math.nan, math.nan, 0)


def over_items(scores: Sequence[float]) -> Mean:
    """The mean of per-item scores, with its standard error.

    The error is the sample standard deviation over the root of the number of items.

    Raises:
        ValueError: There are no scores.
    """
    values = np.asarray(scores, np.float64)
    if not values.size:
        raise ValueError("there are no scores to average")
    error = values.std(ddof=1) / math.sqrt(values.size) if values.size > 1 else math.nan
    return Mean(float(values.mean()), float(error), values.size)


def over_sets(means: Sequence[Mean], weights: Sequence[float] | None = None) -> Mean:
    """The weighted mean over disjoint sets of items; weighted errors add in squares.

    Args:
        means: The mean of each set.
        weights: The weights, which are scaled to sum to 1; equal by default.
    """
    share = np.ones(len(means)) if weights is None else np.asarray(weights, np.float64)
    share = share / share.sum()
    value = sum(w * mean.value for w, mean in zip(share, means, strict=True))
    square = sum((w * mean.error) ** 2 for w, mean in zip(share, means, strict=True))
    return Mean(float(value), math.sqrt(square), sum(mean.count for mean in means))


def over_clusters(scores: Sequence[float], clusters: Sequence[Hashable]) -> Mean:
    """The mean over clusters of items, such as one question asked at every length.

    The mean of each cluster counts as one item.
    """
    groups: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        groups.setdefault(cluster, []).append(score)
    return over_items([float(np.mean(group)) for group in groups.values()])
