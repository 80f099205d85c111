"""One model's cache line: the tokens it holds, who wrote them, and how it grows and shrinks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import (
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from kvlingo_mlx import caches, capture
from kvlingo_mlx.conversation.recording import Recording, part_of
from kvlingo_mlx.conversation.spans import Span, common_prefix, cut, grown
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import KVStates
from kvlingo_mlx.translators.base import Translator


class Line:
    """The tokens that one model holds, in stock mlx-lm caches.

    Attributes:
        name: What the conversation calls the model.
        model: The model.
        cache: Its caches, one a layer.
        tokens: Ids of the tokens they hold.
        spans: Who wrote them.
        native: What the model's own projections wrote, until the other lines have it.
        records: Whether to keep that.
    """

    def __init__(self, name: str, model: LanguageModel, *, records: bool) -> None:
        self.name, self.model, self.records = name, model, records
        self._clear()

    def _clear(self) -> None:
        self.cache: list[Any] = make_prompt_cache(self.model.model)
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.native = Recording()
        self._mark: tuple[int, list[Any]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its caches and of what it keeps for others."""
        return caches.nbytes(self.cache) + self.native.nbytes

    def copy(self) -> Line:
        """One that goes its own way."""
        made = Line(self.name, self.model, records=self.records)
        made.cache = [_copy(cache) for cache in self.cache]
        made.tokens, made.spans = list(self.tokens), list(self.spans)
        made.native, made._mark = self.native.copy(), self._mark
        return made

    def common(self, tokens: Sequence[int]) -> int:
        """How many leading tokens it shares with ``tokens``."""
        return common_prefix(self.tokens, tokens)

    # ---- shrinking ------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember this length: rings can be trimmed no further back once they are full."""
        rings = [isinstance(cache, RotatingKVCache) for cache in self.cache]
        if any(rings):
            copies = [_copy(c) if ring else None for c, ring in zip(self.cache, rings, strict=True)]
            self._mark = len(self), copies

    def trim(self, length: int) -> int:
        """Give up the tokens from position ``length`` on; returns how many are left.

        Those may be fewer: where a ring has forgotten what its window now needs, the line
        goes back to its mark, or to nothing.
        """
        if length >= len(self):
            return len(self)
        if can_trim_prompt_cache(self.cache):
            trim_prompt_cache(self.cache, len(self) - length)
        elif self._mark is not None and self._mark[0] <= length:
            length, kept = self._mark
            for index, ring in enumerate(kept):
                if ring is not None:
                    self.cache[index] = _copy(ring)
                else:
                    self.cache[index].trim(len(self) - length)
        else:
            self._clear()
            return 0
        if self._mark is not None and self._mark[0] > length:
            self._mark = None
        self.tokens = self.tokens[:length]
        self.spans = cut(self.spans, length)
        self.native.trim(length)
        return length

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Leave the line as long as its tokens say, whatever interrupts its growth."""
        try:
            yield
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """Take back what some caches have written beyond the tokens."""
        beyond = [cache.offset - len(self) for cache in self.cache]
        if any(more < 0 or (more and not cache.is_trimmable())
               for more, cache in zip(beyond, self.cache, strict=True)):  # fmt: skip
            self._clear()
            return
        for more, cache in zip(beyond, self.cache, strict=True):
            cache.trim(more)

    # ---- growing --------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], step_size: int) -> None:
        """Run ``tokens`` after what the line holds, in chunks."""
        with self.whole(), self.tapped() as take, mx.stream(generation_stream):
            for start in range(0, len(tokens), step_size):
                chunk = list(tokens[start : start + step_size])
                self.model.model(mx.array(chunk)[None], cache=self.cache)
                states = take()
                mx.eval([c.state for c in self.cache], [] if states is None else states.arrays)
                self.wrote(chunk, states)
                mx.clear_cache()

    def wrote(self, tokens: Sequence[int], states: KVStates | None) -> None:
        """Book tokens that the model has run, and what its projections wrote of them."""
        self.tokens += tokens
        self.spans = grown(self.spans, len(self), self.name)
        if states is not None:
            self.native.add(states)

    @contextlib.contextmanager
    def tapped(self) -> Iterator[Any]:
        """Yields a function that returns what was written since its last call, or None."""
        if not self.records:
            yield lambda: None
            return
        with capture.tap_keys_and_values(self.model, capture.Log) as take:
            yield lambda: take(len(self))

    def take_over(
        self, tokens: Sequence[int], states: KVStates, source: Line, translator: Translator,
        step_size: int, *, keep: bool = False,
    ) -> None:  # fmt: skip
        """Append what another line's model wrote of ``tokens``, translated; lazily.

        ``states`` begin where this line ends. ``keep`` records the translation as this model's
        own, to be translated again.
        """
        kept = self.model.geometry.first_kept(len(self) + len(tokens))
        with self.whole(), mx.stream(generation_stream):
            # A ring that all this passes by takes its window in one piece, at last.
            passed = min((first for first in kept if first > len(self)), default=states.end)
            for start in (*range(states.start, passed, step_size), passed):
                if start == states.end:
                    break
                stop = states.end if start == passed else min(start + step_size, passed)
                part = part_of(states, start, stop)
                moved = capture.move(part, source.model, translator.config.capture)
                translated = translator(moved, kept)
                caches.append(self.cache, translated, self.model)
                if keep:
                    self.native.add(translated.states(len(self.cache)))
                mx.async_eval(caches.arrays(self.cache))
            begun = len(self)
            self.tokens += tokens
            for span in source.spans:  # what it wrote itself, unless the strategy is naive
                if span.stop > begun:
                    stop = min(span.stop, len(self))
                    self.spans = grown(self.spans, stop, span.writer, span.passes + 1)


def _copy(cache: Any) -> Any:
    """A cache that shares its numbers with another and its future with none."""
    made = object.__new__(type(cache))
    made.__dict__ = {
        name: mx.array(value) if isinstance(value, mx.array) else value
        for name, value in vars(cache).items()
    }
    return made
