"""A hand-over as a conversation of one turn: two lines that nobody keeps."""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.engine import guarding
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.fill import bring, judged, read_alone, source_line
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.healing import HEAL_SHARE, Interleaved
from kvlingo_mlx.engine.line import Line, Steps
from kvlingo_mlx.engine.line_set import LineSet, Switch
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.engine.responses import GenerationResponse, Heard
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.engine.turn import Decoding, Part, Turn, tokens_alone
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import wired
from kvlingo_mlx.translators.base import Translator

TARGET, DRAFT = "target", "draft"


class OneTurn(LineSet):
    """The lines of a plan's models, for one answer.

    Attributes:
        plan: How the prompt is read; by the target itself if a guard has led to that.
    """

    keeps = False

    def __init__(
        self,
        plan: Plan,
        heal: str | None = None,
        share: float = HEAL_SHARE,
        on_doubt: str = guarding.WARN,
    ) -> None:
        self.plan, self.clock = plan, Clock(plan.loaded_at)
        self.group, self.step_size = plan.group, plan.step_size
        self._heals, self._share, self._on_doubt = heal is not None, share, on_doubt
        self.lines = {TARGET: Line(TARGET, plan.target, records=False)}
        self._source: Line | None = None
        if plan.draft is plan.source and plan.aligned is None and plan.translator is not None:
            self._source = self.lines[DRAFT] = source_line(plan)  # it reads the prompt only once
        elif plan.draft is not None:
            self.lines[DRAFT] = Line(DRAFT, plan.draft, records=False)

    @property
    def way(self) -> str:  # type: ignore[override]
        """``accelerator``, ``native`` or ``folded``."""
        return self.plan.way

    def origin(self, name: str) -> LanguageModel:
        return self.plan.source

    def used_by(self, name: str, sources: Collection[str]) -> tuple[Translator, ...]:
        return () if self.plan.translator is None else (self.plan.translator,)

    def healing(self, line: Line) -> Interleaved:
        reader = functools.partial(line.heal, answers=True)
        heals = self._heals and self.plan.way == "accelerator"
        return Interleaved(reader if heals else None, self._share, self.group)

    def bring(
        self,
        name: str,
        tokens: Sequence[int],
        mark: int | None = None,
        known: Any = None,
        then: int | None = None,
    ) -> Generator[None, None, Switch]:
        """Grow the target's line from the source's, or let the target read the prompt itself."""
        yield from ()
        self.clock.lap("prepare")
        self.lines[TARGET], guarded = self._brought()
        seconds, plan, number = self.clock.seconds, self.plan, self.plan.num_translated
        return Switch(
            name, 0, number, len(plan.prefix) - number, self.clock.passed,
            translate_s=seconds["translate"], read_s=seconds["native"],
            native_layers=plan.native.layers if number else 0, guarded=guarded,
            prefill_s=seconds["prefill"],
        )  # fmt: skip

    def _brought(self) -> tuple[Line, Guarded | None]:
        """The target's line, and what a guard found."""
        plan, clock = self.plan, self.clock
        if plan.way == "native":
            line = read_alone(plan)
            clock.lap("prefill")
            return line, None
        watch = plan.watch()
        line = bring(plan, clock, self._source, watch)
        if self._source is not None:
            self._source.records = False
        if watch is None:
            return line, None
        guarded = judged(plan, watch, self._on_doubt)
        clock.lap("guard")
        if guarded.doubts and self._on_doubt == guarding.REREAD:
            self.plan = plan.alone()
            line = read_alone(plan)
            clock.lap("prefill")
        self._heals |= bool(guarded.doubts) and self._on_doubt == guarding.HEAL
        return line, guarded

    def answered(
        self,
        choice: Choice,
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] | None,
        quantised: Mapping[str, Any] | None = None,
        num_draft_tokens: int = 2,
    ) -> Generator[GenerationResponse, None, None]:
        """The target's answer to the prompt, a response per token."""
        plan, draft = self.plan, self.lines.get(DRAFT)
        choice = self.chosen_together(choice)
        decoding = Decoding(choice, tools, quantised or {}, draft, num_draft_tokens)
        progress = AnswerInProgress.to_text(self, TARGET, plan.tokens)
        turn = Turn(self, progress, max_tokens, decoding, self.clock.started)
        heard = Heard(plan.target, lambda: plan.target.tokenizer.decode(plan.tokens), plan.chat)
        steps = turn.answer_by([Part(TARGET)], None, _nothing)
        with wired(plan.target.model):
            for response in tokens_alone(steps, heard):
                response.received = self.clock.received
                yield response


def _nothing(text: str) -> Steps:
    """Nobody goes on after the answer."""
    yield from ()
