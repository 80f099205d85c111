"""Lines from which an answer is decoded, and the steps that bring one of them up to date."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine import guarding
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.healing import HEAL_SHARE, Interleaved
from kvlingo_mlx.engine.line import Line, Source, Steps
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.engine.spans import unhealed
from kvlingo_mlx.group import Group
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.alignment import TokenAlignment
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class Look:
    """The positions that a guard compares: a line reads them, and its ``source`` too.

    ``prefix`` is the number of tokens that count as the translated prompt's length. ``heard`` gets
    the line's own hidden states.
    """

    source: Line
    start: int
    stop: int
    prefix: int
    heard: list[mx.array] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A step of a plan: the positions up to ``stop`` are read, or taken over from ``source``.

    Between two tokenizers, ``alignment`` says which source tokens stand for these positions.
    ``look`` compares what the models make of a step that is read. Of what it takes over, a line
    then reads the positions ``amid`` itself.
    """

    stop: int
    source: Source | None = None
    alignment: TokenAlignment | None = None
    look: Look | None = None
    amid: Sequence[int] = ()


@dataclass(frozen=True)
class Switch:
    """The work that brought a line up to date before its model's last step.

    ``kept``, ``translated``, ``read`` and the prompt's last token, which begins the answer and is
    counted in ``read_tokens`` of a response, are together the whole prompt.
    """

    name: str  # the model
    # Tokens that its line held from before: the model's own, and those that were translated for an
    # earlier answer of this model
    kept: int
    # Tokens that were translated for this answer: now, or since this model's last answer, as
    # ``eager`` does it
    translated: int
    read: int  # tokens that the model read itself now
    seconds: float  # seconds for all of this
    translate_s: float = 0.0  # the part of them that translation took
    read_s: float = 0.0  # the part of them that reading took
    ahead: int = 0  # those of ``translated`` that were translated before the answer was asked for
    native_layers: int = 0  # cache layers in which the model read the translated tokens itself
    # What the guard found, if one was asked for and something is translated
    guarded: Guarded | None = None
    sources: tuple[str, ...] = ()  # the models whose tokens these translated ones are
    prefill_s: float = 0.0  # the part of the seconds in which another model read for it


class LineSet(ABC):
    """Lines by name: those of a conversation, or the two of a hand-over.

    Attributes:
        lines: The lines.
        group: The processes that hold some of the models together.
        keeps: Whether the lines go on after the answer.
        way: How a prompt is read, as responses name it.
        own_phase: The phase as which a line's own reading counts.
        step_size: Tokens per prefill chunk.
        heals: Whether a line reads in the place of its translation while it answers.
        heal_share: The share of its speed that decoding keeps meanwhile.
        on_doubt: What is done about a translation in doubt.
        doubted: The lines whose translation a guard doubts, and which read in its place.
    """

    keeps, way, own_phase = True, "switch", "native"
    heals, heal_share, on_doubt = False, HEAL_SHARE, guarding.WARN
    doubted: frozenset[str] = frozenset()
    lines: dict[str, Line]
    group: Group
    step_size: int

    def line(self, name: str) -> Line:
        """The line of a model; ValueError if there is none."""
        if name not in self.lines:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(self.lines)}")
        return self.lines[name]

    def key(self, name: str) -> str:
        """The fingerprint of a model's tokenizer."""
        return self.line(name).model.tokenizer_fingerprint

    @abstractmethod
    def bring(
        self, name: str, tokens: Sequence[int], mark: int | None = None, known: Any = None
    ) -> Generator[None, None, Switch]:
        """Make a line hold ``tokens``; each chunk is a step."""

    @abstractmethod
    def translator(self, source: Source, line: Line) -> Translator:
        """The translator from a source into a line."""

    @abstractmethod
    def native_layers(self, translator: Translator) -> int:
        """The number of first layers that read for themselves what is translated."""

    def carried_out(
        self,
        line: Line,
        steps: Sequence[Step],
        kept: int,
        tokens: Sequence[int],
        clock: Clock,
        mark: int | None = None,
    ) -> Generator[None, None, tuple[list[Step], int, Guarded | None]]:
        """Keep a line's first ``kept`` tokens, append the steps, and judge the translation.

        ``mark`` is a length to which the line may have to return.
        Returns what was done in the end: the steps, where they began, and what the guard found.
        """
        with working():
            line.trim(kept)
        clock.lap("prepare")
        yield from self.grow(line, steps, tokens, mark, clock)
        found, look = None, next((step.look for step in steps if step.look), None)
        if look is not None:
            found = self._judged(line, look, tokens, clock)
            clock.lap("guard")
        if found is not None and found.doubts and self.on_doubt == guarding.REREAD:
            self.gave_up()
            own = unhealed(line.spans, answers=True)
            kept, steps = min(kept, own.start if own else 0), [Step(len(tokens))]
            with working():
                line.trim(kept)
            yield from self.grow(line, steps, tokens, mark, clock)
        with working():
            if not steps:  # each step is waited for
                mx.eval(caches.arrays(line.cache))
            validate_cache(line.cache, line.model, len(tokens))
        return list(steps), kept, found

    def grow(
        self,
        line: Line,
        steps: Sequence[Step],
        tokens: Sequence[int],
        mark: int | None,
        clock: Clock | None = None,
    ) -> Steps:
        """Append steps to a line, with marks at its present length and at ``mark``."""
        line.mark()
        for step in steps:
            if mark is not None and self._marked(line, step, mark):
                yield from self.take(line, replace(step, stop=mark), tokens, clock)
                line.mark()
            yield from self.take(line, step, tokens, clock)

    def take(self, line: Line, step: Step, tokens: Sequence[int], clock: Clock | None) -> Steps:
        """Append one step to a line; with a ``clock``, it is waited for and timed."""
        if step.source is None:
            hidden = None if step.look is None else step.look.heard.append
            yield from line.read(tokens[len(line) : step.stop], self.step_size, hidden)
            if clock is not None:
                clock.lap(self.own_phase)
            return
        translator = self.translator(step.source, line)
        layers = self.native_layers(translator)
        yield from line.take_over(
            tokens[: step.stop], step.source, translator, self.step_size,
            native_layers=layers, clock=clock,
        )  # fmt: skip
        if step.amid:
            yield from line.read_amid(step.amid, self.step_size)
            if clock is not None:
                clock.lap(self.own_phase)

    def _marked(self, line: Line, step: Step, mark: int) -> bool:
        """Whether a step is divided at a mark.

        A line with rings takes nothing over from another tokenizer and needs no mark there. Nor
        is it guarded.
        """
        if step.alignment is not None or step.look is not None:
            return False
        inside = len(line) < mark < step.stop
        return inside and (step.source is None or self.reaches(step.source, line, mark))

    def reaches(self, source: Source, line: Line, stop: int) -> bool:
        """Whether a line can take over exactly up to ``stop``."""
        return True

    def _judged(self, line: Line, look: Look, tokens: Sequence[int], clock: Clock) -> Guarded:
        """What a guard finds; warns, or lets the line read behind its translation, as asked."""
        config = self.translator(look.source, line).config
        theirs = look.source.model, self.source_reads(look, tokens, clock)
        with working():
            own = guarding.divergence(theirs, (line.model, look.heard[0]))
            divergence = self.group.firsts(lambda: own)
        found = guarding.judged(config, divergence, look.stop - look.start, look.prefix)
        self.doubted -= {line.name}
        if found.doubts and self.on_doubt == guarding.HEAL:
            self.doubted |= {line.name}
        elif found.doubts and self.on_doubt == guarding.WARN:
            guarding.warn(config, found)
        return found

    def source_reads(self, look: Look, tokens: Sequence[int], clock: Clock) -> mx.array:
        """What a guard's source makes of the compared tokens; its line stays what it is."""
        return look.source.hidden_beside(tokens[look.start : look.stop], look.start)

    def gave_up(self) -> None:  # noqa: B027
        """Note that a line reads what was translated for it."""

    def healing(self, line: Line) -> Interleaved:
        """What a line reads between two steps of its answer."""
        heals = self.heals or line.name in self.doubted
        read = functools.partial(line.heal, answers=not self.keeps)
        return Interleaved(read if heals else None, self.heal_share, self.group)

    @abstractmethod
    def used_by(self, name: str, sources: Collection[str]) -> tuple[Translator, ...]:
        """The translators from ``sources`` into a line."""

    def origin(self, name: str) -> LanguageModel:
        """The model from whose states a line's may be made, for messages."""
        return self.line(name).model

    def put_others_away(self, name: str) -> None:  # noqa: B027  (not all sets store lines)
        """Store the lines that do not decode, if that was asked for."""

    def chosen_together(self, choice: Choice) -> Choice:
        """How tokens are chosen, by the first process where several answer together."""
        return replace(choice, sampler=self.group.firsts_tokens(choice.sampler))
