"""The chunks that are read behind a translation, noted as they are read."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.engine import healing
from tests.support.fixtures import Patch


@dataclass(frozen=True)
class Chunk:
    """Where a chunk was read, of how many tokens, into which caches."""

    start: int
    tokens: int
    cache: Any


def noted(monkeypatch: Patch) -> list[Chunk]:
    """The chunks from now on, in order.

    How much is read in an answer's time must not depend on how busy this machine is: each look at
    the clock is a hundredth of a second after the last one.
    """
    found: list[Chunk] = []
    reread, looks = healing.reread, count()
    clock = SimpleNamespace(perf_counter=lambda: next(looks) / 100)

    def spy(model: Any, cache: Any, tokens: Any, start: int) -> None:
        found.append(Chunk(start, len(tokens), cache))
        reread(model, cache, tokens, start)

    monkeypatch.setattr(healing, "reread", spy)
    monkeypatch.setattr(healing, "time", clock)
    return found


def in_a_row(chunks: list[Chunk], start: int = 0) -> int:
    """The tokens of chunks that follow one another from a position on, none read twice."""
    for chunk in chunks:
        assert chunk.start == start
        start += chunk.tokens
    return sum(chunk.tokens for chunk in chunks)
