"""The processes of one training; a single process is a group of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Group:
    """This process's place among the processes of a run."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, costs: Sequence[int]) -> list[int]:
        """The items of this process, chosen so that all processes have nearly equal ``costs``.

        Items are assigned longest first, each to the process with the least cost so far. Prefix
        lengths span three orders of magnitude, so equal counts would leave most processes waiting.
        """
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            least = min(range(self.size), key=lambda r: (loads[r], r))
            loads[least] += costs[index]
            if least == self.rank:
                mine.append(index)
        return sorted(mine)

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """The sum of ``numbers`` over all processes."""
        return numbers

    def add(self, tensors: Iterable[Any]) -> None:
        """Sum each of a runtime's tensors over all processes, in place."""

    def wait(self) -> None:
        """Wait until every process has arrived here."""
