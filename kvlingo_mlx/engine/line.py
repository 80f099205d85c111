"""One model's cache line: its tokens, who wrote them, and how it grows and shrinks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import read_amid
from kvlingo_mlx.engine import healing, hybrid
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.recording import Recording
from kvlingo_mlx.engine.spans import Span, common_prefix, cut, exact, grown, healed, unhealed
from kvlingo_mlx.engine.storage import PUT, Storage
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import unit, working
from kvlingo_mlx.translators.base import Translator

Listening = Callable[[], contextlib.AbstractContextManager[None]]
Steps = Generator[None, None, None]  # work; between two steps others may use the models
Hidden = Callable[[mx.array], None]
# A length, and copies of the caches that forget, rings and states, as they were at that length.
Mark = tuple[int, list[Any]]
MARKS = 2  # marks that are kept: one before the last message, one after it


@dataclass
class Behind:
    """How far a line that forgets has been healed, the caches that are filled, and their marks."""

    cache: list[Any]
    done: int = 0
    marks: list[Mark] = field(default_factory=list)


class Line:
    """The tokens that one model holds, in stock mlx-lm caches.

    Attributes:
        name: The model's name in the conversation.
        model: The model.
        tokens: Ids of the tokens in the caches.
        spans: Which model wrote which of them.
        native: The states that the model's own projections wrote, until the other lines have them.
        counted: How many of its tokens earlier answers of its model have counted.
        records: Whether to keep these states.
        inputs: Whether what goes into recurrences is kept of them.
        states: Whether recurrent states are, at the end of each span.
        passes_on: Whether what is recorded is dropped once another line has taken it over.
    """

    inputs, states, passes_on = True, False, False

    def __init__(self, name: str, model: LanguageModel, *, records: bool) -> None:
        self.name, self.model, self.records = name, model, records
        self.clear()

    @unit
    def clear(self) -> None:
        """Empty the line."""
        self._caches: list[Any] = self._empty()
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.native = Recording()
        self.counted = 0
        self._marks: list[Mark] = []
        self._away: Storage | None = None
        self._behind: Behind | None = None
        self._settle()

    def _empty(self) -> list[Any]:
        return make_prompt_cache(self.model.model)

    @unit
    def hold(
        self, tokens: Sequence[int], states: KVStates | None, cache: list[Any] | None = None
    ) -> None:
        """Begin with ``tokens`` that the model has read: what it wrote of them, and its caches.

        Without caches the line can be translated from, and not grow.
        """
        self._caches = self._caches if cache is None else cache
        if states is not None:
            self.native.add(states)
            self.tokens = list(tokens)
            self.spans = grown([], len(tokens), self.name)
            self._settle()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def cache(self) -> list[Any]:
        """The model's caches, one per layer; brought back if they were put away.

        Raises:
            KVLingoError: The stored arrays are damaged. The line is empty then.
        """
        if self._away is not None:
            self._return()
        return self._caches

    @unit
    def copy(self) -> Self:
        """An independent copy, which takes no memory until one of the two lines writes."""
        made = copy.copy(self)
        made._caches, made._marks = self._shared()
        made.tokens = [*self.tokens]
        made.native, made._behind = Recording([*self.native.parts]), None
        return made

    def _shared(self) -> tuple[list[Any], list[Mark]]:
        """Copies of its caches and marks, which share their arrays."""
        marks = [(n, [c and caches.shared(c) for c in rings]) for n, rings in self._marks]
        return list(map(caches.shared, self._caches)), marks

    def common(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that the line shares with ``tokens``."""
        return common_prefix(self.tokens, tokens)

    # ---- away -----------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """``empty``, ``resident``, or the place where the arrays are stored."""
        if not self.tokens:
            return "empty"
        return "resident" if self._away is None else self._away.where

    @property
    def away(self) -> bool:
        """Whether the arrays were put away, even if that is not finished."""
        return self._away is not None

    @property
    def resident(self) -> list[Any]:
        """Its caches, and those of its marks; they have no arrays while these are put away."""
        kept = [cache for _, marked in self._points for cache in marked if cache is not None]
        return [*self._caches, *kept]

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory that the line's caches take, wherever they are."""
        away = 0 if self._away is None else self._away.nbytes
        held = {id(array): array.nbytes for array in caches.arrays(self.resident)}
        return sum(held.values()) + away

    def _places(self) -> Iterator[tuple[str, Any, str]]:
        """A name for each array, the cache it belongs to, and its name there."""
        marked = [(f"mark{index}.", listed) for index, (_, listed) in enumerate(self._marks)]
        for prefix, listed in (("", self._caches), *marked) if self.tokens else ():
            for layer, cache in enumerate(listed):
                for part in caches.names(cache) if cache is not None else ():
                    yield f"{prefix}{layer}.{part}", cache, part

    @unit
    def put_away(self, place: str) -> Storage | None:
        """Store the line's arrays in a place until they are needed; None if the line is empty."""
        if self._away is not None and (self._away.place != place or self._away.failed):
            self._return()
        if self._away is None and self.tokens:
            self._behind = None
            held = {name: caches.held(cache)[part] for name, cache, part in self._places()}
            self._away = PUT[place](held)
            # Copies, since a mark may hold the caches themselves.
            self._caches, self._marks = self._shared()
            for _, cache, part in self._places():
                caches.put_part(cache, part, None)
            self._settle()
        return self._away

    def _return(self) -> None:
        assert self._away is not None
        try:
            arrays = self._away.take()
        except KVLingoError as error:
            self.clear()
            raise KVLingoError(
                f"the line of {self.name} is lost ({error}); ask again, and it is read anew"
            ) from None
        for name, cache, part in self._places():
            caches.put_part(cache, part, arrays[name])
        self._away = None
        self._settle()

    # ---- shrinking ------------------------------------------------------------------------

    @unit
    def mark(self) -> None:
        """Remember this length: a state, or a full ring, can return only to a mark."""
        marked = [length for length, _ in self._marks]
        if not self._forgets or len(self) in (0, *marked):
            return  # before ``self.cache``, which would bring stored arrays back
        self._marks = [*self._marks, (len(self), _kept_of(self.cache, caches.forgets))][-MARKS:]

    @property
    def _forgets(self) -> bool:
        """Whether some of its caches may be unable to go back to fewer tokens."""
        return any(map(caches.forgets, self._caches))

    def _settle(self) -> None:
        """Remember the recurrent states at the line's last token.

        A recurrent state does not store its length, so after an interruption it is restored. Ring
        caches store theirs; they are written in place, so keeping one would copy it at each growth.
        """
        recurrent = self.model.geometry.recurrent
        self._settled = _kept_of(self._caches, caches.is_recurrent) if recurrent else []

    @property
    def _points(self) -> list[Mark]:
        """Where a line can go back to: its marks, and its last token."""
        rings = any(map(caches.is_ring, self._caches))
        settled = any(cache is not None for cache in self._settled) and not rings
        return [*self._marks, *([(len(self), self._settled)] if settled else [])]

    def kept(self, length: int) -> int:
        """The number of tokens that :meth:`trim` to ``length`` leaves.

        They can be fewer than ``length``: a recurrent state, or a ring that has dropped tokens that
        its window would need, returns to a mark, or to nothing.
        """
        if length >= len(self):
            return len(self)
        if can_trim_prompt_cache(self._caches):
            return length
        return max((mark for mark, _ in self._marks if mark <= length), default=0)

    @unit
    def trim(self, length: int) -> int:
        """Drop the tokens from :meth:`kept` of ``length`` on; return how many are left."""
        kept = self.kept(length)
        if kept < len(self):
            self._shorten(kept)
        return kept

    def _shorten(self, length: int) -> None:
        """End all caches, some of which may be longer than others, at ``length``.

        Where they cannot, the line goes back to the last mark before, or to nothing.
        """
        counting = [cache for cache in self._caches if not caches.is_recurrent(cache)]
        both = [(cache.offset - length, cache) for cache in counting]
        points = [point for point in self._points if point[0] <= length]
        if not length or any(more < 0 for more, _ in both):
            self.clear()
        elif len(counting) == len(self._caches) and all(
            not more or cache.is_trimmable() for more, cache in both
        ):
            for more, cache in both:
                cache.trim(more)
            self._cut(length)
        elif points:
            self._back_to(points[-1])
            self._cut(points[-1][0])
        else:
            self.clear()

    def _back_to(self, point: Mark) -> None:
        length, marked = point
        own = self._caches if length == len(self) else self.cache
        for index, cache in enumerate(marked):
            if cache is not None:
                own[index] = caches.shared(cache)
            else:
                own[index].trim(own[index].offset - length)

    def _cut(self, length: int) -> None:
        """Drop the bookkeeping of positions that the caches no longer hold."""
        if self._behind is not None and self._behind.done > length:
            self._behind = None
        self._marks = [mark for mark in self._marks if mark[0] <= length]
        self.tokens, self.counted = self.tokens[:length], min(self.counted, length)
        self.spans = cut(self.spans, length)
        self.native.trim(length)
        caches.give_back(self._caches)
        self._settle()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Keep the caches as long as the line's tokens, even if its growth is interrupted."""
        try:
            yield
        except BaseException:
            self.take_back()
            raise

    @unit
    def take_back(self) -> None:
        """Take back what some caches have written beyond the tokens, and the states kept of it.

        The rest is evaluated here, since no other thread can do that.
        """
        self._shorten(len(self))
        try:
            mx.eval(caches.arrays(self._caches))
        except RuntimeError:  # perhaps this failing evaluation was the interruption
            self.clear()

    # ---- healing --------------------------------------------------------------------------

    @unit
    def heal(self, most: int, *, answers: bool) -> int:
        """Read at most ``most`` tokens in the place of their translated entries.

        They are read from the front on, as a prefill does, so each sees its own model's entries
        only, but for what the model ran after translated ones. ``answers`` reads that again, too.
        Returns how many tokens were read; 0 where nothing is left to read.
        """
        if self._forgets:
            return self._heal_beside(most)
        found = unhealed(self.spans, answers)
        if found is None:
            return 0
        start, stop = found.start, min(found.stop, found.start + most)
        healing.reread(self.model, self.cache, self.tokens[start:stop], start)
        self.spans = healed(self.spans, start, stop, self.name)
        return stop - start

    def _heal_beside(self, most: int) -> int:
        """:meth:`heal` of a line that forgets, which it reads from its first token to its last.

        Rings and states cannot go back to what came before, so others are filled beside them, and
        take their places at the end of the line, with a mark where there was one. Until then the
        line is what it was; it grows as before, and a line that is shortened or put away begins
        anew.
        """
        if exact(self.spans):
            return 0
        if self._behind is None:
            self._behind = Behind(self._empty())
        behind = self._behind
        start = behind.done
        ends = [n for n, _ in self._marks if n > start]
        stop = min(start + most, len(self), *ends)
        cache = [
            b if caches.forgets(b) else c for b, c in zip(behind.cache, self.cache, strict=True)
        ]
        self._behind = None  # an interruption may leave some of its caches ahead of others
        healing.reread(self.model, cache, self.tokens[start:stop], start)
        self._behind, behind.done = behind, stop
        if stop in ends:
            behind.marks.append((stop, _kept_of(cache, caches.forgets)))
        if stop == len(self):
            self._caches, self._marks, self._behind = cache, behind.marks, None
            self.spans = [Span(0, stop, self.name)]
            self._settle()
        return stop - start

    def left(self, answers: bool) -> int:
        """The number of tokens that :meth:`heal` has yet to read."""
        if self._forgets:
            done = 0 if self._behind is None else self._behind.done
            return 0 if exact(self.spans) else len(self) - done
        return sum(span.stop - span.start for span in self.spans if span.unread(answers))

    # ---- growing --------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], step_size: int, hidden: Hidden | None = None) -> Steps:
        """Run ``tokens`` after the line's own; each chunk is a step.

        ``hidden`` gets the model's final hidden states of them, (T, width), evaluated.
        """
        ear, heard = self._ear(), list[mx.array]()
        with self.whole():
            for start in range(0, len(tokens), step_size):
                chunk = list(tokens[start : start + step_size])
                with working(), mx.stream(generation_stream):
                    with _listening(ear):
                        if hidden is None:
                            self.model.model(mx.array(chunk)[None], cache=self.cache)
                        else:
                            heard.append(hidden_states(self.model, chunk, self.cache))
                    self.wrote(chunk, ear, evaluate=heard)
                    mx.clear_cache()
                yield
        if hidden is not None:
            hidden(mx.concatenate(heard))

    @unit
    def hidden_beside(self, tokens: Sequence[int], start: int) -> mx.array:
        """The model's hidden states (T, width) of ``tokens`` from position ``start`` on, evaluated.

        The line stays what it is. None of its caches may forget.
        """
        with mx.stream(generation_stream), caches.lent(self.cache, start):
            hidden = hidden_states(self.model, tokens, self.cache)
            mx.eval(hidden, caches.arrays(self.cache))
        return hidden

    @contextlib.contextmanager
    def decoding(self, first: int) -> Iterator[tuple[list[int], Listening]]:
        """Book the tokens that the model runs: ``first``, and those that the caller puts in a list.

        Yields the list, and a second context, in which the model must run. Outside it, any
        other caller may run the model. If the caller closes the generator early, the tokens stay
        booked; if anything else ends it early, the line is as it was.
        """
        run, ear, mixed = [first], self._ear(), not exact(self.spans)
        with self.whole():
            try:
                yield run, lambda: _listening(ear)
            except GeneratorExit:
                self.wrote(run, ear, mixed)
                raise
            self.wrote(run, ear, mixed)

    @unit
    def wrote(
        self,
        tokens: Sequence[int],
        heard: capture.Ear | Sequence[KVStates] | None,
        mixed: bool | None = None,
        evaluate: Sequence[mx.array] = (),
    ) -> None:
        """Book tokens that the model has run, and the states that its projections wrote of them.

        ``mixed`` says whether it attended to translated entries; None is what the line holds now.
        ``evaluate`` are further arrays that are waited for.

        Raises:
            RuntimeError: The number of recorded tokens differs.
        """
        start, parts = len(self), [heard.take(0)] if isinstance(heard, capture.Ear) else heard or ()
        written = sum(part.num_tokens for part in parts)
        if self.records and written != len(tokens):
            raise RuntimeError(f"{written} tokens were recorded, not {len(tokens)}")
        for part in parts:  # for others; recurrent states where the line can go back to, or end
            ends = self.states and part is parts[-1]
            kept = capture.recurrent_states(self.model, self._caches) if ends else {}
            states = replace(part, start=start, kept=kept)
            self.native.add(states)
            self.native.thin([length for length, _ in self._marks])
            start, evaluate = states.end, [*evaluate, *states.arrays]
        # Another thread may need all of it, and MLX could not evaluate there; of recurrent layers
        # nothing has needed the last token's tail yet.
        mx.eval(caches.arrays(self._caches), evaluate)
        self.tokens += tokens
        self.spans = grown(self.spans, len(self), self.name, mixed=mixed)
        self._settle()

    def adopt(self, tokens: Sequence[int], cache: list[Any], parts: Sequence[KVStates]) -> None:
        """Go on with caches in which the model has run ``tokens``, of which it wrote ``parts``."""
        self._caches = cache
        self.wrote(tokens, parts)

    def _ear(self) -> capture.Ear | None:
        return capture.Ear(self.model, inputs=self.inputs) if self.records else None

    def written(
        self, tokens: Sequence[int], start: int, step_size: int, config: TranslatorConfig
    ) -> Iterator[KVStates | None]:
        """What this line's model writes of ``tokens`` from ``start`` on, as a translator reads it.

        One span per chunk, in order; chunks end at multiples of ``step_size``. What the line lacks
        of ``tokens`` it reads; None stands for a chunk that it has read.
        """
        while start < len(tokens):
            stop = min(len(tokens), (start // step_size + 1) * step_size)
            if len(self) <= start:
                yield from self.read(tokens[len(self) : stop], step_size)
            stop = min(stop, len(self))  # what it has comes first, and may be refused
            stop = self.native.one_point(start, stop)
            with working(), mx.stream(generation_stream):
                states = self.model.all_heads(self.native.read(start, stop))
                if self.passes_on:
                    self.native.forget(stop)
                moved = capture.move(states, self.model.full, config.capture)
            del states
            yield moved
            del moved
            start = stop

    def take_over(
        self,
        tokens: Sequence[int],
        source: Source,
        translator: Translator,
        step_size: int,
        *,
        native_layers: int = 0,
        clock: Clock | None = None,
    ) -> Steps:
        """Append the rest of ``tokens``, translated from what another line's model writes of them.

        Each chunk is a step. The first ``native_layers`` layers read the tokens themselves.
        With a ``clock``, each chunk is waited for, and its times are booked; else nothing is
        waited for.

        Raises:
            ValueError: The source lacks the beginning, as a ring does.
        """
        upper, begun = translator.above(native_layers), len(self)
        lap = (lambda phase: None) if clock is None else clock.lap
        kept = self.model.geometry.first_kept(len(tokens))
        read, done = begun, max(begun, min(kept[native_layers:], default=0))
        with self.whole():
            for states in source.written(tokens, begun, step_size, translator.config):
                lap("prefill")
                if states is None:
                    yield
                    continue
                if done < states.start < len(tokens):  # a gap in the caches would hold zeros
                    raise ValueError(
                        f"the source holds nothing before position {states.start}, and {done} is "
                        "to be translated; prefill the source"
                    )
                done = max(done, states.end)
                with working(), mx.stream(generation_stream):
                    if native_layers:
                        own, read = tokens[read : states.end], states.end
                        hybrid.read_layers(self.model, own, self.cache, step_size, native_layers)
                        lap("native")
                    ours = upper(states, kept)
                    caches.append(self.cache, ours, self.model)
                    mx.async_eval(caches.arrays(self.cache))
                    del states, ours
                    if clock is not None:
                        mx.eval(caches.arrays(self.cache))
                lap("translate")
                yield
            self.tokens += tokens[begun:]
            for span in source.spans:  # the source's own
                if span.stop > begun:
                    stop = min(span.stop, len(self))
                    self.spans = grown(self.spans, stop, span.writer, span.passes + 1)
            self._settle()

    def read_amid(self, positions: Sequence[int], step_size: int) -> Steps:
        """Read some of the tokens, in the place of their translated entries; each chunk is a step.

        Healing reads them once more, behind its own entries only.
        """
        for start in range(0, len(positions), step_size):
            part = positions[start : start + step_size]
            with working(), mx.stream(generation_stream):
                read_amid(self.model, self.cache, [self.tokens[n] for n in part], part)
            yield

    # ---- as numbers -----------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON, in which something else stands for each array."""
        return {
            "tokens": self.tokens,
            "counted": self.counted,
            "spans": [vars(span) for span in self.spans],
            "caches": [vars(cache) for cache in self.cache],
            "marks": [(n, [cache and vars(cache) for cache in held]) for n, held in self._marks],
            "native": self.native.facts(),
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Become the line of an equal model that gave ``facts``.

        Raises:
            ValueError, KeyError, TypeError: They do not fit together, or do not fit this model.
        """
        self.clear()
        self._caches = self._with(facts["caches"])
        self._marks = [(length, self._with(held)) for length, held in facts["marks"]]
        self.tokens, self.counted = facts["tokens"], facts["counted"]
        self.spans = [Span(**known) for known in facts["spans"]]
        self.native.restore(facts["native"])
        self._settle()

    def _with(self, attributes: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        """Caches with these attributes, and None where there are none."""
        made = self._empty()
        for layer, known in enumerate(attributes):
            if known is None:
                made[layer] = None
            else:
                vars(made[layer]).update(known)
        return made


class Given:
    """A source whose states exist already, or arrive from another machine, in order."""

    def __init__(self, model: LanguageModel, states: Iterable[KVStates], tokens: int) -> None:
        self.name, self.model, self._states = "source", model, states
        self.spans = [Span(0, tokens, self.name)]

    def written(
        self, tokens: Sequence[int], start: int, step_size: int, config: TranslatorConfig
    ) -> Iterator[KVStates]:
        """The states of ``tokens`` from ``start`` on; the chunks are those that are given."""
        for states in self._states:
            begun, stop = max(states.start, start), min(states.end, len(tokens))
            if begun < stop:
                with working():
                    yield capture.move(states.part(begun, stop), self.model, config.capture)
            del states

    def close(self) -> None:
        """End what is arriving."""
        if isinstance(self._states, Generator):
            self._states.close()


# What a line can take over from, by ``written``: another line, or a model on another machine.
Source = Line | Given


def _kept_of(cache: Sequence[Any], which: Callable[[Any], bool]) -> list[Any]:
    """Copies of some of a line's caches, by layer, and None for the others."""
    return [caches.shared(each) if which(each) else None for each in cache]


def _listening(ear: capture.Ear | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if ear is None else ear.listening()
