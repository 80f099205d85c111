"""The processes of one run, which share its work; a single process is a group of one.

All of them run the same program. Each method does nothing for a group of one, so callers do not ask
whether there are others. ``mlx.launch`` starts ``machines.ranks.Ranks``, torchrun a ``TorchGroup``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the command line imports this file before anything heavy
    import numpy as np

T = TypeVar("T")
RANK = "MLX_RANK"  # which mlx.launch sets
PACK = 2**26  # bytes that are summed at once: messages are few, and a copy of them is small


def launched() -> bool:
    """Whether ``mlx.launch`` started this program."""
    return RANK in os.environ


def speaker() -> str:
    """What stands before an error: which process of ``mlx.launch`` has it."""
    return f"rank {os.environ[RANK]}: " if launched() else ""


def leads() -> bool:
    """Whether this is the process that prints and writes files: under ``mlx.launch`` the first."""
    return os.environ.get(RANK, "0") == "0"


@dataclass(frozen=True)
class Group:
    """This process's place among the processes of a run."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    @property
    def of_fits(self) -> Group:
        """The processes that share a closed form."""
        return self

    def owns(self, number: int) -> bool:
        """Whether an item of unknown cost is this process's, by its number."""
        return number % self.size == self.rank

    def stretch(self, items: Sequence[T]) -> Sequence[T]:
        """This process's stretch of items of like cost, in their order."""
        count = len(items)
        return items[self.rank * count // self.size : (self.rank + 1) * count // self.size]

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

    def totals(self, arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The sums of arrays of one type over all processes, a few arrays at a time."""
        if self.size == 1:
            yield from arrays
            return
        pack: list[np.ndarray] = []
        for array in arrays:
            if pack and sum(a.nbytes for a in pack) + array.nbytes > PACK:
                yield from self._packed(pack)
                pack = []
            pack.append(array)
        if pack:
            yield from self._packed(pack)

    def _packed(self, arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        import numpy as np

        flat, start = self.total(np.concatenate([array.ravel() for array in arrays])), 0
        for array in arrays:
            yield flat[start : start + array.size].reshape(array.shape)
            start += array.size

    def add(self, tensors: Iterable[Any]) -> list[Any]:
        """The sum of each of a runtime's tensors over all processes."""
        return list(tensors)

    def gathered(self, value: T) -> list[T]:
        """Every process's value, in their order: JSON values, and arrays among them."""
        return [value]

    def firsts(self, find: Callable[[], T]) -> T:
        """What the first process finds; a value as in :meth:`gathered`.

        Processes that share a disk each find it.
        """
        return find()

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Refuse (KVLingoError) to go on where processes differ in a fact, given by name."""

    def wait(self) -> None:
        """Wait until every process has arrived here."""

    def firsts_tokens(self, sampler: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """A sampler by which the first process's choice counts for all."""
        return sampler

    def settle(self) -> None:
        """Wait for the messages of a decoding step that mlx-lm has begun ahead."""

    def all_or_none(self) -> contextlib.AbstractContextManager[None]:
        """A context for what may fail in one process alone, as a check of memory: it fails in all.

        Its body sends nothing to others.
        """
        return contextlib.nullcontext()

    def refuse(self, given: Mapping[str, bool]) -> None:
        """Refuse (UnsupportedModelError) what cannot be used with such a model.

        Args:
            given: Whether each of some arguments is given by which processes could part.
        """


ALONE = Group()
