"""Several lines over one context, and the plans that read or translate the spans they lack."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.directions import Directions, Given
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.healing import IDLE_S, Pace
from kvlingo_mlx.engine.line import Line, Source, Steps
from kvlingo_mlx.engine.line_set import LineSet, Look, Step, Switch
from kvlingo_mlx.engine.offers import (
    Known,
    Offer,
    alike,
    furthest,
    next_start,
    offers_of,
    wrote_itself,
)
from kvlingo_mlx.engine.positioned import PositionedLine
from kvlingo_mlx.engine.reading import Reading
from kvlingo_mlx.engine.recording import Run
from kvlingo_mlx.engine.rules import Rules
from kvlingo_mlx.engine.spans import cut, translated
from kvlingo_mlx.errors import MissingTranslatorError, UnsupportedModelError
from kvlingo_mlx.loading.grading import watched
from kvlingo_mlx.loading.notes import tell_of_length, to_get
from kvlingo_mlx.loading.pairing import check_positions
from kvlingo_mlx.loading.translators import name_of
from kvlingo_mlx.machines import group_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit, working
from kvlingo_mlx.translators.base import Translator


class Exchange(LineSet):
    """The lines of a conversation, and how each line gets what the others have.

    Lines of one tokenizer exchange whole tokens. Lines of two tokenizers share the messages'
    contents: each keeps its own model's rendering, whose boilerplate that model reads itself.

    Attributes:
        several: Whether their models have several tokenizers.
        known: The readings with which a line was last brought up to date, if there are several.
        last: The last switch, or None.
        active: The name of the line that was brought up to date last, or None.
        barred: Ordered pairs of models between which nothing is translated for now.
        asleep: Models whose weights are not in memory. Their lines are not brought up to date after
            others' answers, and no guard compares them.
        waits: Whether a translated chunk is computed within its step, so that the work of others
            has its turn in between; off, all chunks are queued at once.
        paces: How fast each model reads between two answers, by its name.
    """

    def __init__(
        self, models: Mapping[str, LanguageModel], translators: Iterable[Given], rules: Rules
    ) -> None:
        rules.check(models)
        self.rules, self.step_size = rules, rules.prefill_step_size
        self.heals, self.heal_share = rules.heal is not None, rules.heal_share
        self.on_doubt = rules.on_doubt
        self.several = len({model.tokenizer_fingerprint for model in models.values()}) > 1
        self.known: Known | None = None
        records = len(models) > 1 and rules.switching != "reprefill"
        self.lines = {name: self._open(name, m, records) for name, m in models.items()}
        self.last: Switch | None = None
        self.active: str | None = None
        self.use(Directions(models, translators, rules))
        self.barred: frozenset[tuple[str, str]] = frozenset()
        self.asleep: frozenset[str] = frozenset()
        self.waits = False
        self.group = group_of(models.values())
        self.paces = {name: Pace(self.group) for name in models}

    def use(self, directions: Directions) -> None:
        """Use these translators, which decide what lines record of recurrent layers."""
        self.directions = directions
        for name, line in self.lines.items():
            line.inputs, line.states = directions.read_of(name)

    @unit
    def copy(self) -> Exchange:
        """An independent copy; models, translators and arrays are shared."""
        made = copy.copy(self)
        made.lines = {name: line.copy() for name, line in self.lines.items()}
        return made

    @property
    def models(self) -> list[LanguageModel]:
        """The models of all lines."""
        return [line.model for line in self.lines.values()]

    def _open(self, name: str, model: LanguageModel, records: bool) -> Line:
        kind: type[Line] = Line
        if self.several:
            with contextlib.suppress(UnsupportedModelError):  # it can still be a source
                check_positions(model)
                kind = PositionedLine
        return kind(name, model, records=records)

    def used_by(self, name: str, sources: Collection[str]) -> tuple[Translator, ...]:
        """The loaded translators from ``sources`` into a line."""
        loaded = self.directions.loaded.items()
        return tuple(t for (source, target), t in loaded if target == name and source in sources)

    def heal(self, name: str, *, answers: bool) -> int:
        """Let a line's model read a chunk of about :data:`IDLE_S` in the place of its translation.

        Returns how many tokens are left; nothing is read where none are.
        """
        line = self.line(name)
        if line.left(answers):
            read = functools.partial(line.heal, answers=answers)
            self.paces[name].read(read, IDLE_S, self.step_size)
        return line.left(answers)

    # ---- switching ------------------------------------------------------------------------

    def bring(
        self, name: str, tokens: Sequence[int], mark: int | None = None, known: Known | None = None
    ) -> Generator[None, None, Switch]:
        """Make a line hold ``tokens``: translate what others wrote, read the rest natively.

        Each chunk is a step. ``mark`` is a length to which the line may have to return. ``known``
        has the readings of the same conversation by models of other tokenizers.

        Raises:
            MissingTranslatorError: Other models wrote a part that cannot be translated; nothing
                has changed.
        """
        clock, self.known = Clock(), known
        steps = self._bring(name, tokens, mark, known, clock)
        plan, kept, found = yield from clock.during(steps)
        self.last = self._switch(self.line(name), plan, kept, clock, found)
        return self.last

    def _bring(
        self, name: str, tokens: Sequence[int], mark: int | None, known: Known | None, clock: Clock
    ) -> Generator[None, None, tuple[list[Step], int, Guarded | None]]:
        """:meth:`bring`; returns the steps, where they began, and what the guard found."""
        line = self.line(name)
        switched = self.active not in (None, name)
        whole = switched and self.rules.switching != "alternated"
        kept = line.kept(0 if whole else line.common(tokens))
        plan = self._plan(line, tokens, kept, known)
        if self.rules.guard and switched:
            plan, kept = self._watched(line, tokens, plan, kept)
        found = yield from self.carried_out(line, plan, kept, tokens, clock, mark)
        self.active = name
        self.forget()
        return found

    def _switch(
        self, line: Line, plan: Sequence[Step], kept: int, clock: Clock, found: Guarded | None
    ) -> Switch:
        """What was done to bring a line from ``kept`` tokens to the end of a plan."""
        starts = [kept, *(step.stop for step in plan)]
        lengths = [step.stop - start for step, start in zip(plan, starts, strict=False)]
        now = sum(n for n, step in zip(lengths, plan, strict=True) if step.source is not None)
        before = cut(line.spans, kept)
        ahead = translated(before) - translated(cut(before, line.counted))
        sources = {s.writer for s in before if s.passes and s.stop > line.counted}
        sources |= {step.source.name for step in plan if step.source is not None}
        used = self.used_by(line.name, sources)
        return Switch(
            *(line.name, kept - ahead, now + ahead, sum(lengths) - now),
            *(clock.passed, clock.seconds["translate"], clock.seconds["native"]),
            ahead,
            max((self.directions.native(t.config) for t in used), default=0),
            found,
            tuple(sorted(sources)),
        )

    # ---- a guard --------------------------------------------------------------------------

    def _watched(
        self, line: Line, tokens: Sequence[int], plan: list[Step], kept: int
    ) -> tuple[list[Step], int]:
        """A plan by which the line reads the tokens that its guard compares, and where it begins.

        Without such tokens these are the same ``plan`` and the tokens that it ``kept``.
        These are the first that follow what the active line holds, or the last of all if there are
        fewer: so that model has little to read, and a translation before them to be judged. They
        are at most half of all.
        """
        assert self.active is not None
        source, guard = self.lines[self.active], watched(self.rules.guard, len(tokens))
        pair = source.name, line.name
        if source.name in self.asleep or pair in self.barred or not self.directions.stored(*pair):
            return plan, kept
        start = max(0, min(source.common(tokens), len(tokens) - guard))
        stop = min(start + guard, len(tokens))
        begun = line.kept(min(kept, start))
        before = self._plan(line, tokens[:start], begun)
        taken = any(step.source is not None for step in before) or translated(
            cut(line.spans, begun)
        )
        if not taken or start == stop:
            return plan, kept
        look, after = Look(source, start, stop, prefix=start), self._plan(line, tokens, stop)
        return [*before, Step(stop, look=look), *after], begun

    def take(self, line: Line, step: Step, tokens: Sequence[int], clock: Clock | None) -> Steps:
        """Append one step; what another tokenizer's model wrote goes to its own positions."""
        if step.source is not None:
            translator = self.translator(step.source, line)
            tell_of_length(translator.config, step.stop + 1, name_of(translator.path))
        if step.alignment is None:
            yield from super().take(line, step, tokens, clock)
            return
        assert isinstance(line, PositionedLine) and isinstance(step.source, Line)
        more = tokens[len(line) : step.stop]
        line.take_across(more, step.alignment, step.source, translator, self.step_size)
        if clock is not None:
            with working():
                mx.eval(caches.arrays(line.cache))
            clock.lap("translate")
        yield

    def translator(self, source: Source, line: Line) -> Translator:
        """The loaded translator of a direction."""
        found = self.directions.translator(source.name, line.name)
        assert found is not None
        return found

    def native_layers(self, translator: Translator) -> int:
        return self.directions.native(translator.config)

    def reaches(self, source: Source, line: Line, stop: int) -> bool:
        assert isinstance(source, Line)
        return any(a <= len(line) and b == stop for a, b in self._given(source, line, stop))

    def _plan(
        self, line: Line, tokens: Sequence[int], begun: int, known: Known | None = None
    ) -> list[Step]:
        """The steps that bring the line from position ``begun`` to the end of ``tokens``.

        Raises:
            MissingTranslatorError: Other models wrote a part that cannot be translated.
            UnsupportedModelError: Other models wrote a part, and this line's model cannot take over
                from another tokenizer.
        """
        steps: list[Step] = []
        offers = self._offers(line, begun, tokens, known)
        while begun < len(tokens):
            steps.append(self._next(line, len(tokens), begun, *offers))
            begun = steps[-1].stop
        return steps

    def _offers(
        self, line: Line, begun: int, tokens: Sequence[int], known: Known | None
    ) -> tuple[list[Offer], list[Offer]]:
        """What other lines offer of ``tokens`` from ``begun`` on, and what has no translator."""
        given: list[Offer] = []
        missing: list[Offer] = []
        for other in self.lines.values():
            pair = other.name, line.name
            if other is line or pair in self.barred or self.rules.switching == "reprefill":
                continue
            found = self.directions.stored(*pair) is not None
            if not (found or self.directions.missing(*pair)):
                continue  # two names of one model
            most = other.common(tokens) if alike(other, line) else len(other)
            runs = self._given(other, line, most) if found else wrote_itself(other, most)
            more = offers_of(other, line, tokens, begun, known, runs)
            (given if found else missing).extend(more)
        return given, missing if self.rules.on_missing == "error" else []

    def _next(
        self, line: Line, length: int, begun: int, given: Sequence[Offer], missing: Sequence[Offer]
    ) -> Step:
        """The step from position ``begun`` on: its source, or None to read, and where it stops."""
        if found := furthest(given, begun):
            offer, alignment = found
            return Step(alignment.target[1], offer.source, None if offer.alike else alignment)
        for offer in missing:
            if offer.holds(begun):
                if not (offer.alike or isinstance(line, PositionedLine)):
                    check_positions(line.model)
                raise no_translator(offer.source, line)
        return Step(next_start([*given, *missing], begun, length))

    def _given(self, source: Line, line: Line, most: int) -> list[Run]:
        """What one line can take over from another, of that one's first ``most`` tokens.

        A mapped state is that of the last token that is taken over, so it must be known there.
        """
        hybrid = source.model.geometry.recurrent
        states = hybrid and self.directions.maps_states(source.name, line.name)
        return source.native.runs(most, kept=states)

    def follow(self, tokenizer: str, reading: Reading, mark: int | None) -> Steps:
        """Translate as much as possible of what each line of a tokenizer lacks of a reading.

        Nothing waits for the results. Lines that were put away stay away. Those of other tokenizers
        get what they lack when they are next asked. ``mark`` is as for :meth:`bring`.
        """
        for name, line in self.lines.items():
            if self.key(name) != tokenizer or line.away or name in self.asleep:
                continue
            tokens, common = reading.tokens, line.common(reading.tokens)
            same = reading.tokenizer.chat_template == line.model.tokenizer.chat_template
            if reading.messages and not same and common < len(line):
                continue  # by another template: it would lose its own prompt's tokens
            if line.trim(common) == len(tokens):
                continue
            try:
                plan = self._plan(line, tokens, len(line))
            except (MissingTranslatorError, UnsupportedModelError):
                continue
            steps = list(itertools.takewhile(lambda step: step.source is not None, plan))
            yield from self.grow(line, steps, tokens, mark, Clock() if self.waits else None)

    @unit
    def forget(self) -> None:
        """Drop the recorded states that every line that could take them has.

        Of another tokenizer that is the active line, which holds all that was said.
        """
        for line in self.lines.values():
            needed = []
            for other in self.lines.values():
                if other is line or self.directions.stored(line.name, other.name) is None:
                    continue
                if alike(line, other):
                    needed.append(other.kept(other.common(line.tokens)))
                else:
                    needed.append(len(line) if other.name == self.active else 0)
            line.native.forget(min(needed, default=len(line)))

    # ---- memory ---------------------------------------------------------------------------

    def put_away(self, name: str, where: str) -> int:
        """Put a line's arrays away and wait until that is done; return the bytes freed.

        Raises:
            ValueError: There is no such model.
            OSError: The file cannot be written; the line is as it was.
        """
        line = self.line(name)
        before = line.cache_bytes
        stored = line.put_away(where)
        if stored is not None:
            stored.settle()
        return before - line.cache_bytes

    def put_others_away(self, name: str) -> None:
        """Put away the lines that do not decode, if ``offload`` asks for it, without waiting.

        If a file cannot be written, the next switch tries again.
        """
        if self.rules.offload is None:
            return
        for line in self.lines.values():
            if line.name != name:
                line.put_away(self.rules.offload)


def no_translator(source: Line, target: Line) -> MissingTranslatorError:
    return MissingTranslatorError(
        f"no translator from {source.name} ({source.model.name}) to {target.name} "
        f"({target.model.name}); {to_get(source.model.name, target.model.name)}, or let the "
        "model read what is missing with on_missing='reprefill' (-c on_missing=reprefill)"
    )
