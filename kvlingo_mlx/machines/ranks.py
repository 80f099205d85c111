"""The ranks of ``mlx.launch``: what they tell one another.

Messages are waited for, and never within a gradient. All ranks come to them in the same order. A
rank that ends in an error ends the others, by the launcher.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.generate import generation_stream

from kvlingo_mlx.errors import KVLingoError, MalformedConversationError, UnsupportedModelError
from kvlingo_mlx.group import ALONE, Group, launched
from kvlingo_mlx.threads import unit, working

T = TypeVar("T")
ARRAY = "ndarray"  # what stands for an array in JSON
SHORT = 56  # bytes that fit into the message that tells a length
SHOWN = 60  # characters of a fact in which ranks differ
ENDED = "another rank has ended; what it printed says why"
LOST = "[ring] connection to a peer was lost"  # what MLX says of it, if it does
ENDS_S = 30.0  # in which the launcher ends a rank after another one has ended
OWN_FOLDER = re.compile("rank-[0-9]+-of-([0-9]+)")  # a rank's part of a saved conversation
_messages = itertools.count(0x6B76_6C67)  # which all ranks count alike


@functools.cache
def here() -> Group:
    """The ranks of ``mlx.launch``; a group of one where one program runs alone."""
    if not launched():
        return ALONE
    try:
        found = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise KVLingoError(
            f"the ranks of mlx.launch cannot reach one another ({error!s:.120}); start at least "
            "2 (mlx.launch -n 2), and look at the hosts' addresses"
        ) from None
    return Ranks(found.rank(), found.size()) if found.size() > 1 else ALONE


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
        return list(map(decoded, _exchanged(encoded(value))))

    def firsts(self, find: Callable[[], T]) -> T:
        found: T = decoded(_exchanged(encoded(find()) if self.leads else b"")[0])
        return found

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        every = self.gathered({name: [digest_of(f), f[:SHOWN]] for name, f in facts().items()})
        for name in dict.fromkeys(name for each in every for name in each):
            said = [each.get(name, ["", "none"]) for each in every]
            for rank, (digest, fact) in enumerate(said):
                if digest != said[0][0]:
                    raise KVLingoError(
                        f"rank {rank} has another {name} than rank 0 ({fact}, and not "
                        f"{said[0][1]}); give all machines the same, and start again"
                    )

    def wait(self) -> None:
        _exchanged(b"")

    def firsts_tokens(self, sampler: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Each rank has random numbers of its own, and two devices may round a tie apart."""

        def sample(logprobs: mx.array) -> mx.array:
            chosen = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
            return mx.distributed.all_sum(chosen if self.leads else mx.zeros_like(chosen))

        return sample

    def settle(self) -> None:
        mx.synchronize(generation_stream)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the others hear of it
            problem = error
        every = self.gathered("" if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(every):
            if text:
                raise KVLingoError(f"rank {rank} failed: {text}")

    def refuse(self, given: Mapping[str, bool]) -> None:
        for name in (name for name, is_given in given.items() if is_given):
            raise UnsupportedModelError(
                f"{name} cannot be used with a model that {self.size} ranks hold together; leave "
                "one of them out"
            )


def digest_of(value: Any) -> str:
    """Sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def lost(error: Exception) -> KVLingoError | None:
    """What to say of an error where it shows that another rank has ended; else None.

    This waits for the launcher to end this rank: else it would stand beside the line that says why.
    """
    if str(error) not in (ENDED, LOST):
        return None
    time.sleep(ENDS_S)
    return KVLingoError(ENDED)


def own_folder(place: str | os.PathLike[str], group: Group) -> Path:
    """Where this process keeps a conversation: the folder, or a rank's own in it.

    Raises:
        MalformedConversationError: Another number of ranks saved it.
    """
    folder = Path(place)
    names = [OWN_FOLDER.fullmatch(each.name) for each in folder.glob("*")]
    sizes = {int(name[1]) for name in names if name is not None}
    if others := sizes - {group.size}:
        raise MalformedConversationError(
            f"{folder} was saved by {min(others)} ranks of mlx.launch, each its part; start as "
            "many, with the same models shared in the same way"
        )
    if not group.several:
        return folder
    if any(each.is_file() for each in folder.glob("*.json")):
        raise MalformedConversationError(
            f"{folder} was saved by one process, and these models are held by several; give "
            "another folder, or whole models"
        )
    return folder / f"rank-{group.rank}-of-{group.size}"


@unit
def _exchanged(own: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of the ranks; one message where they are few.

    Raises:
        KVLingoError: Another rank has ended.
    """
    try:
        heads = _rows(len(own).to_bytes(8, "little") + own[:SHORT], 8 + SHORT)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        fit = max(sizes) <= SHORT
        bodies = [head[8:] for head in heads] if fit else _rows(own, max(sizes))
    except RuntimeError as error:
        if str(error) != LOST:
            raise
        raise KVLingoError(ENDED) from None
    return [body[:size] for body, size in zip(bodies, sizes, strict=True)]


def _rows(own: bytes, width: int) -> list[bytes]:
    """Every rank's bytes, each padded to ``width``.

    Raises:
        RuntimeError: Another rank has ended. MLX may then give what happens to be there: an earlier
            message, even. So each has a mark of its own.
    """
    row = np.zeros((1, 1 + -(-width // 4)), np.int32)
    row[0, 0] = mark = next(_messages) % 2**31
    row.view(np.uint8)[0, 4 : 4 + len(own)] = np.frombuffer(own, np.uint8)
    every = np.array(mx.distributed.all_gather(mx.array(row)))
    if (every[:, 0] != mark).any():
        raise RuntimeError(LOST)
    return [each[1:].tobytes() for each in every]


def encoded(value: Any) -> bytes:
    """A JSON value with arrays in it, as bytes: nothing that could run."""
    arrays: list[np.ndarray] = []

    def stand_in(array: Any) -> dict[str, int]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} cannot be sent to other ranks")
        arrays.append(array)
        return {ARRAY: len(arrays) - 1}

    text = json.dumps(value, default=stand_in).encode()
    if not arrays:
        return text
    with io.BytesIO() as file:
        np.savez(file, np.frombuffer(text, np.uint8), *arrays)
        return file.getvalue()


def decoded(blob: bytes) -> Any:
    """What :func:`encoded` was given; tuples come back as lists."""
    if not blob.startswith(b"PK"):  # as a zip file does
        return json.loads(blob or b"null")
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:

        def array(found: dict[str, Any]) -> Any:
            return file[f"arr_{found[ARRAY] + 1}"] if set(found) == {ARRAY} else found

        return json.loads(file["arr_0"].tobytes(), object_hook=array)
