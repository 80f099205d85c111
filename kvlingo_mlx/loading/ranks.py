"""The ranks of ``mlx.launch`` as a group that shares work on whole models: fits, scores, training.

Communication is done at once, on the CPU, and never within a gradient. All ranks come to it in the
same order. A rank that ends in an error ends the others, by the launcher.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading import sharding
from kvlingo_mlx.threads import working

T = TypeVar("T")
ARRAY = "ndarray"  # what stands for an array in JSON


@functools.cache
def here() -> Group:
    """The ranks of this program, or a group of one."""
    found = sharding.group()
    return Group() if found is None else Ranks(found.rank(), found.size())


def check_alone(what: str) -> None:
    """Refuse (KVLingoError) on several ranks what each of them would do anew."""
    if here().size > 1:
        raise KVLingoError(f"{what} runs in one process; start it without mlx.launch")


class Ranks(Group):
    """The ranks that ``mlx.launch`` started."""

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over all ranks, the same bits on each: a ring adds in one order."""
        with working(), mx.stream(mx.cpu):  # the only device that has float64
            wide = {"dtype": mx.float64} if numbers.dtype == np.float64 else {}
            found = mx.distributed.all_sum(mx.array(numbers, **wide), stream=mx.cpu)
            mx.eval(found)
        self.wait()  # a rank that has ended would leave a sum that is none
        return np.array(found)

    def add(self, tensors: Iterable[mx.array]) -> list[mx.array]:
        return [mx.array(total) for total in self.totals(np.array(t) for t in tensors)]

    def gathered(self, value: T) -> list[T]:
        return list(map(decoded, sharding.gathered_bytes(encoded(value))))

    def firsts(self, find: Callable[[], T]) -> T:
        found: T = decoded(sharding.gathered_bytes(encoded(find()) if self.leads else b"")[0])
        return found

    def agree(self, told: Callable[[], Mapping[str, str]]) -> None:
        sharding.agree(told())

    def wait(self) -> None:
        sharding.gathered_bytes(b"")


# ---- values as bytes: nothing that could run -----------------------------------------------------


def encoded(value: Any) -> bytes:
    """A JSON value with arrays in it, as bytes."""
    arrays: list[np.ndarray] = []

    def stand_in(array: Any) -> dict[str, int]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} cannot be sent to other ranks")
        arrays.append(array)
        return {ARRAY: len(arrays) - 1}

    text = json.dumps(value, default=stand_in).encode()
    with io.BytesIO() as file:
        np.savez(file, np.frombuffer(text, np.uint8), *arrays)
        return file.getvalue()


def decoded(blob: bytes) -> Any:
    """What :func:`encoded` was given; tuples come back as lists."""
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:

        def array(found: dict[str, Any]) -> Any:
            return file[f"arr_{found[ARRAY] + 1}"] if set(found) == {ARRAY} else found

        return json.loads(file["arr_0"].tobytes(), object_hook=array)
