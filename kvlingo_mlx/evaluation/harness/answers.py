"""Answers as they are written, token by token: where reasoning ends, and where the answer does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BEGINNING = 16  # tokens within which a reasoning trace begins, if there is one
MARGIN = 8  # tokens that may decode to nothing, or to a part of a character


class Ends:
    """Finds the end of the reasoning and the end of the answer in a generated text.

    Args:
        stops: The texts before which an answer ends.
        start: The mark that opens reasoning; empty if there is none.
        end: The mark that closes it.
        opened: Whether the prompt has opened reasoning already.
    """

    def __init__(self, stops: Sequence[str], start: str, end: str, opened: bool) -> None:
        self.stops, self.start, self.end, self.opened = list(stops), start, end, opened

    def reasons(self, text: str) -> bool:
        """Whether the text begins with reasoning."""
        return self.opened or (bool(self.start) and text.lstrip().startswith(self.start))

    def stopped(self, text: str) -> bool:
        """Whether a stop string ends the answer."""
        if self.reasons(text):
            _, closed, text = text.partition(self.end)
            return bool(closed) and self._first_stop(text.lstrip()) is not None
        return self._first_stop(text) is not None

    def cut(self, text: str) -> str:
        """The answer alone.

        An unfinished trace is returned as MLXLM does, but with the mark that the prompt opened it
        with, so that it can be told from an answer.
        """
        if self.reasons(text) and self.end in text:
            text = text.partition(self.end)[2]
            blank = len(text) - len(text.lstrip())
            return text[:blank] + text[blank:][: self._first_stop(text[blank:])]
        text = text[: self._first_stop(text)]
        _, closed, answer = text.partition(self.end) if self.end else ("", "", "")
        return answer if closed else (self.start if self.opened else "") + text

    def _first_stop(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self.stops]
        return min((place for place in places if place >= 0), default=None)


class Answer:
    """An answer that is being written.

    Args:
        tokenizer: Decodes tokens.
        ends: Where answers end.
        trace: The tokens of a reasoning trace that another model has written already.

    Attributes:
        tokens: The tokens so far, with those of ``trace``, without the end of the turn.
    """

    def __init__(self, tokenizer: Any, ends: Ends, trace: Sequence[int] = ()) -> None:
        self.tokens, self.ends = list(trace), ends
        self._decode = tokenizer.decode
        marks = [*ends.stops, ends.end]
        self._tail = max(len(mark.encode()) for mark in marks) + MARGIN
        self._reasons = ends.reasons(self.text)
        self._closed = bool(ends.end) and ends.end in self.text

    @property
    def text(self) -> str:
        """All of the text so far."""
        return self._decode(self.tokens) if self.tokens else ""

    def take(self, token: int) -> bool:
        """Add a token; returns whether it ends the answer.

        The last tokens alone are decoded, which is a hint: the whole text decides.
        """
        tail = self._taken(token)
        if self._reasons and not self._closed:
            return False
        return any(stop in tail for stop in self.ends.stops) and self.ends.stopped(self.text)

    def _taken(self, token: int) -> str:
        """Add a token; returns the text of the last ones."""
        self.tokens.append(token)
        if len(self.tokens) <= BEGINNING:
            self._reasons = self.ends.reasons(self.text)
        tail = self._decode(self.tokens[-self._tail :])
        self._closed = self._closed or (bool(self.ends.end) and self.ends.end in tail)
        return tail

    def found(self) -> str:
        """The answer, without reasoning and without what follows a stop string."""
        return self.ends.cut(self.text)
