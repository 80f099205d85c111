"""Scores of single items, kept as soon as they are known and never computed twice.

One JSON line describes a run's settings and gives it a key, their hash. Each later line holds one
item's scores under a run's key: averaged over seeds, and those of each seed if there are several.
So one file can hold many runs, an interrupted run continues where it stopped, and a changed model
or translator makes a different run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlingo_mlx.evaluation.lines import Lines
from kvlingo_mlx.format.geometry import canonical_json

Scores = dict[str, float]
Seeds = tuple[Scores, ...]  # an item's scores for each seed of a condition
KEY_LENGTH = 16


def averaged(seeds: Seeds) -> Scores:
    """The mean of each score over seeds (appendix "Seeds and error bars")."""
    return {name: float(np.mean([scores[name] for scores in seeds])) for name in seeds[0]}


class Journal:
    """A file of items' scores; the scores stay in memory if ``path`` is None.

    Raises:
        ValueError: The file is not such a journal, or cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.scores: dict[tuple[str, str], Seeds] = {}
        self.known: set[str] = set()
        self.lines = Lines(path, self._take, "an evaluation's journal")

    def run(self, settings: Mapping[str, Any]) -> str:
        """The key of a run with these settings."""
        key = hashlib.sha256(canonical_json(settings).encode()).hexdigest()[:KEY_LENGTH]
        if key not in self.known:
            self.lines.append({"run": key, "settings": settings})
            self.known.add(key)
        return key

    def find(self, key: str, item: str) -> Seeds:
        """An item's scores for each seed; empty if the run does not have them yet."""
        return self.scores.get((key, item), ())

    def keep(self, key: str, item: str, seeds: Seeds) -> None:
        """Add an item's scores; they are in the file when this returns."""
        more = {"seeds": seeds} if len(seeds) > 1 else {}
        self.lines.append({"run": key, "item": item, "scores": averaged(seeds), **more})
        self.scores[key, item] = seeds

    def _take(self, entry: dict[str, Any]) -> None:
        key = entry["run"]
        if "settings" in entry:
            self.known.add(key)
        else:
            seeds = entry.get("seeds") or [entry["scores"]]
            self.scores[key, entry["item"]] = tuple(dict(scores) for scores in seeds)
