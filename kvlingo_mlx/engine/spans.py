"""Which model wrote which positions of a cache line: spans in order and without gaps."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Span:
    """Positions ``start`` to ``stop`` of a line."""

    start: int  # the first position
    stop: int  # one past the last position
    writer: str  # the name of the model that ran these tokens
    # The number of translators between that model and this line: 0 where the line's own model wrote
    # the tokens
    passes: int = 0
    # Whether the line's own model ran them after translated entries, to which it attended
    mixed: bool = False

    def unread(self, answers: bool) -> bool:
        """Whether the line's own model has yet to read it.

        ``answers`` counts what it ran itself after translated entries.
        """
        return bool(self.passes) or (answers and self.mixed)


def grown(
    spans: Sequence[Span], stop: int, writer: str, passes: int = 0, mixed: bool | None = None
) -> list[Span]:
    """``spans`` extended up to ``stop``, joined to the last span if its origin is the same.

    Without ``mixed``, what stands before says whether the model attended to translated entries.
    """
    start = spans[-1].stop if spans else 0
    if stop <= start:
        return list(spans)
    mixed = not exact(spans) if mixed is None else mixed
    return joined([*spans, Span(start, stop, writer, passes, mixed and not passes)])


def joined(spans: Sequence[Span]) -> list[Span]:
    """``spans``, of which neighbours of one origin are one."""
    found: list[Span] = []
    for span in spans:
        if found and replace(found[-1], start=span.start, stop=span.stop) == span:
            found[-1] = replace(found[-1], stop=span.stop)
        else:
            found.append(span)
    return found


def cut(spans: Sequence[Span], length: int) -> list[Span]:
    """The part of ``spans`` before position ``length``."""
    return [replace(s, stop=min(s.stop, length)) for s in spans if s.start < length]


def exact(spans: Sequence[Span]) -> bool:
    """Whether all entries are those that the line's own model would have made alone."""
    return not any(span.passes or span.mixed for span in spans)


def unhealed(spans: Sequence[Span], answers: bool) -> range | None:
    """The first stretch of neighbours that are :meth:`Span.unread`, or None."""
    for unread, found in itertools.groupby(spans, lambda span: span.unread(answers)):
        if unread:
            stretch = list(found)
            return range(stretch[0].start, stretch[-1].stop)
    return None


def healed(spans: Sequence[Span], start: int, stop: int, name: str) -> list[Span]:
    """``spans`` after the line's own model, ``name``, has read positions ``start`` to ``stop``."""
    before = cut(spans, start)
    after = [replace(s, start=max(s.start, stop)) for s in spans if s.stop > stop]
    return joined([*before, Span(start, stop, name, 0, not exact(before)), *after])


def translated(spans: Sequence[Span]) -> int:
    """The number of positions that went through a translator."""
    return sum(span.stop - span.start for span in spans if span.passes)


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of leading elements (tokens, characters, messages) that two sequences share."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # eight times as fast as the loop
        return shorter
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
