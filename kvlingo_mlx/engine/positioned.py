"""A cache line that can take over from models of another tokenizer.

The states that such a model wrote become cache entries, but not one entry per token of the line's
own model. Each entry stands at the true position of the token that it represents. So later entries
are appended, and existing entries stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream

from kvlingo_mlx import caches
from kvlingo_mlx.caches.entries import positioned
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.spans import grown
from kvlingo_mlx.models import capture
from kvlingo_mlx.threads import unit
from kvlingo_mlx.tokenization.alignment import TokenAlignment
from kvlingo_mlx.translators.base import Translator

INSIDE = -1  # marks a length inside a minimal group, whose entries stand for all of its tokens


class PositionedLine(Line):
    """A line that need not have one entry per token; its model has no windows."""

    def clear(self) -> None:
        super().clear()
        self._entries = [0]

    def _empty(self) -> list[Any]:
        return positioned(super()._empty())

    def copy(self) -> Self:
        made = super().copy()
        made._entries = list(self._entries)
        return made

    @property
    def entries(self) -> list[int]:
        """(T + 1,) the number of entries of the first 0 to T tokens, or ``INSIDE``.

        A token that the model ran itself has one entry; such tokens are counted on demand.
        """
        counted = len(self._entries) - 1
        if counted < len(self):
            held = self._entries[-1]
            self._entries += range(held + 1, held + 1 + len(self) - counted)
        return self._entries

    def kept(self, length: int) -> int:
        """The number of tokens that :meth:`trim` to ``length`` leaves: no group is divided."""
        length = min(length, len(self))
        while self.entries[length] == INSIDE:
            length -= 1
        return length

    def _shorten(self, length: int) -> None:
        if length:
            for cache in self._caches:
                cache.offset, cache.entries = length, self.entries[length]
            self._cut(length)
        else:
            self.clear()

    def _cut(self, length: int) -> None:
        super()._cut(length)
        self._entries = self._entries[: length + 1]

    @unit
    def take_across(
        self,
        tokens: Sequence[int],
        alignment: TokenAlignment,
        source: Line,
        translator: Translator,
        step_size: int,
    ) -> None:
        """Append what a model of another tokenizer wrote of a text, translated, without waiting.

        Args:
            tokens: The text in this line's tokens, which follow those of the line.
            alignment: Which source tokens, all of them recorded, stand for which target tokens;
                its target positions begin where this line ends.
            source: The line of the model that wrote them.
            translator: From that model to this one.
        """
        first, last = alignment.source
        positions = mx.array(alignment.assigned)
        held = self.entries[-1]
        with self.whole(), mx.stream(generation_stream):
            for start in range(first, last, step_size):
                stop = min(start + step_size, last)
                part = source.native.read(start, stop)
                translated = translator(capture.move(part, source.model, translator.config.capture))
                at = positions[start - first : stop - first]
                caches.append(self.cache, translated, self.model, at)
                mx.async_eval(caches.arrays(self.cache))
            for cache in self.cache:
                cache.offset = alignment.target[1]
            for _, end, begun, done in alignment.groups.tolist():
                self._entries += [INSIDE] * (done - begun - 1) + [held + end - first]
            self.tokens += tokens
            self.spans = grown(self.spans, len(self), source.name, 1)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"entries": self.entries}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """As of a :class:`Line`; one of stock caches has one entry per token."""
        super().restore(facts)
        self._entries = list(facts.get("entries", range(len(self) + 1)))
        for cache in self._caches:
            cache.entries = self._entries[-1]
