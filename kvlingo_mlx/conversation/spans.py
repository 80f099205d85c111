"""Which model wrote which positions of a cache line: spans in order and without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Span:
    """Positions ``start`` to ``stop`` of a line.

    Attributes:
        start: The first position.
        stop: One past the last position.
        writer: The name of the model that ran these tokens.
        passes: The number of translators between that model and this line: 0 where the line's own
            model wrote the tokens.
    """

    start: int
    stop: int
    writer: str
    passes: int = 0


def grown(spans: Sequence[Span], stop: int, writer: str, passes: int = 0) -> list[Span]:
    """``spans`` extended up to ``stop``, joined to the last span if its origin is the same."""
    start = spans[-1].stop if spans else 0
    if stop <= start:
        return list(spans)
    if spans and (spans[-1].writer, spans[-1].passes) == (writer, passes):
        return [*spans[:-1], replace(spans[-1], stop=stop)]
    return [*spans, Span(start, stop, writer, passes)]


def cut(spans: Sequence[Span], length: int) -> list[Span]:
    """The part of ``spans`` before position ``length``."""
    return [replace(s, stop=min(s.stop, length)) for s in spans if s.start < length]


def translated(spans: Sequence[Span]) -> int:
    """The number of positions that went through a translator."""
    return sum(span.stop - span.start for span in spans if span.passes)


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of leading elements (tokens, characters, messages) that two sequences share."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # eight times as fast as the loop
        return shorter
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def wrote(spans: Sequence[Span], position: int, length: int) -> bool:
    """Whether a position is among the first ``length`` and the line's own model wrote it."""
    return position < length and any(s.start <= position < s.stop and s.passes == 0 for s in spans)
