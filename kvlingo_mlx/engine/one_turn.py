"""A hand-over as a conversation of one turn: two lines that nobody keeps."""

import functools
import secrets
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import prefill_between
from kvlingo_mlx.caches.entries import pin
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.engine.line import Given, Line, Source
from kvlingo_mlx.engine.line_set import LineSet, Look, Step, Switch
from kvlingo_mlx.engine.plan import HandoverRequest, Plan
from kvlingo_mlx.engine.responses import GenerationResponse, Heard
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.engine.turn import Decoding, Part, Turn, tokens_alone
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote import stream
from kvlingo_mlx.remote.model import RemoteModel
from kvlingo_mlx.remote.order import Order, wanted_states
from kvlingo_mlx.threads import finished, wired, working
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.translators.base import Translator

TARGET, DRAFT = "target", "draft"


class OneTurn(LineSet):
    """The lines of a plan's models, for one answer.

    Args:
        plan: How the prompt is read.
        request: What was asked for; None for a line of the prompt alone.
        source: What the target's line takes over from, if it exists already.
        clock: Times the phases.

    Attributes:
        plan: The same; by the target alone if a guard has led to that.
    """

    keeps = False

    def __init__(
        self,
        plan: Plan,
        request: HandoverRequest | None = None,
        *,
        source: Source | None = None,
        clock: Clock | None = None,
    ) -> None:
        asked = request or HandoverRequest()
        self.plan, self.clock = plan, clock or Clock(plan.loaded_at)
        self.group, self.step_size = plan.group, plan.step_size
        self.heals, self.heal_share = asked.heal is not None, asked.heal_share
        self.on_doubt = asked.on_doubt
        self.way, self.own_phase = plan.way, "prefill" if plan.way == "native" else "native"
        self.lines = {TARGET: Line(TARGET, plan.target, records=False)}
        self.source = source_of(plan, self.clock) if source is None else source
        shared = plan.draft is plan.source and plan.aligned is None and self.source is not None
        if shared and isinstance(self.source, Line):
            self.lines[DRAFT] = self.source  # the draft model reads the prompt only once
        elif plan.draft is not None:
            self.lines[DRAFT] = Line(DRAFT, plan.draft, records=False)

    @property
    def target(self) -> Line:
        """The target's line."""
        return self.lines[TARGET]

    def translator(self, source: Source, line: Line) -> Translator:
        assert self.plan.translator is not None
        return self.plan.translator

    def native_layers(self, translator: Translator) -> int:
        return self.plan.native.layers

    def gave_up(self) -> None:
        self.plan = replace(self.plan, way="native", translator=None, native=Native(), guard=0)
        self.way, self.own_phase = "native", "prefill"

    def source_reads(self, look: Look, tokens: Sequence[int], clock: Clock) -> mx.array:
        """Let the source read on, since nobody keeps its line."""
        source, heard = look.source, list[mx.array]()
        finished(source.read(tokens[len(source) : look.start], self.step_size))
        finished(source.read(tokens[look.start : look.stop], look.stop - look.start, heard.append))
        clock.lap("prefill")
        return heard[0]

    def steps(self) -> list[Step]:
        """The target's head, what is translated, its tail, and what a guard compares."""
        plan, length, look = self.plan, len(self.plan.prefix), None
        if plan.way == "native":
            return [Step(length)]
        span, last = plan.span, length - plan.guard
        if plan.guard:
            assert isinstance(self.source, Line)
            look = Look(self.source, last, length, length)
        taken = Step(span.stop, self.source, amid=plan.native.amid(span))
        steps = [Step(span.start), taken, Step(last), Step(length, look=look)]
        before = [0, *(step.stop for step in steps)]
        return [step for step, begun in zip(steps, before, strict=False) if step.stop > begun]

    def filled(self) -> Generator[None, None, Guarded | None]:
        """Grow the target's line; what the guard found."""
        plan, line, found = self.plan, self.target, None
        try:
            if plan.aligned is not None and self.source is not None:
                with mx.stream(generation_stream):
                    line.hold([], None, self._filled_across(plan.aligned, self.source))
                validate_cache(line.cache, plan.target, plan.aligned.num_entries)
            elif plan.way == "native" or self.source is not None:
                # What is read amid others stands behind them before it takes its places.
                room = len(plan.prefix) + min(plan.native.middle, plan.step_size)
                caches.reserve(line.cache, plan.target, room)
                _, _, found = yield from self.carried_out(
                    line, self.steps(), 0, plan.prefix, self.clock
                )
        finally:
            if isinstance(self.source, Given):
                self.source.close()
        return found

    def _filled_across(self, aligned: AlignedPrefix, source: Source) -> list[Any]:
        """The target's cache between two tokenizers (section "Cross-tokenizer cache translation").

        Each model renders the prompt by its own template. The source's tokens are translated chunk
        by chunk, one cache entry each. The target then prefills all tokens between them in one
        pass. A cache that has not one entry per token cannot be trimmed into this prefix.
        """
        target, translator = self.plan.target, self.translator(source, self.target)
        positions = mx.array(aligned.positions + aligned.shift)
        cache, step_size = self.target.cache, self.step_size
        caches.reserve(cache, target, aligned.num_entries)
        read = aligned.source_ids[: aligned.num_read]
        for states in source.written(read, 0, step_size, translator.config):
            self.clock.lap("prefill")
            if states is None:
                continue  # a chunk that was read, and nothing yet
            slots = aligned.between(states.start, states.end)
            if slots.start < slots.stop:
                chosen = states.gathered(mx.array(aligned.rows[slots] - states.start), slots.start)
                caches.append(cache, translator(chosen), target, positions[slots])
                del chosen
            del states
            with working():
                mx.eval(caches.arrays(cache))
            self.clock.lap("translate")
        ids = [aligned.target_ids[position] for position in aligned.own]
        places = (aligned.own + aligned.shift).tolist()
        prefill_between(target, cache, ids, places, mx.array(aligned.visible), step_size)
        self.clock.lap("native")
        return cache if aligned.is_identity else pin(cache)

    def bring(
        self, name: str, tokens: Sequence[int], mark: int | None = None, known: Any = None
    ) -> Generator[None, None, Switch]:
        """Grow the target's line from the source's, or let the target read the prompt itself."""
        guarded = yield from self.filled()
        if isinstance(self.source, Line):
            self.source.records = False
        self.source = None  # its cache is not held while the target decodes, but for a draft's
        seconds, plan, number = self.clock.seconds, self.plan, self.plan.num_translated
        return Switch(
            name, 0, number, len(plan.prefix) - number, self.clock.passed,
            translate_s=seconds["translate"], read_s=seconds["native"],
            native_layers=plan.native.layers if number else 0, guarded=guarded,
            prefill_s=seconds["prefill"],
        )  # fmt: skip

    def origin(self, name: str) -> LanguageModel:
        return self.plan.source

    def used_by(self, name: str, sources: Collection[str]) -> tuple[Translator, ...]:
        return () if self.plan.translator is None else (self.plan.translator,)

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
        progress = AnswerInProgress.to_text(self, TARGET, plan.tokens, plan.header)
        turn = Turn(self, progress, max_tokens, decoding, self.clock.started)
        text = functools.partial(plan.target.tokenizer.decode, plan.tokens)
        heard = Heard(plan.target, text, chat=plan.header is not None)
        steps = turn.answer_by([Part(TARGET)], None, lambda text: (None for _ in ()))
        with wired(plan.target.model):
            for response in tokens_alone(steps, heard):
                response.received = self.clock.received
                yield response


def source_of(plan: Plan, clock: Clock) -> Source | None:
    """The source of a plan's states, empty yet; None where nothing is translated."""
    if plan.way != "accelerator" or plan.translator is None or not plan.prefix:
        return None
    if isinstance(plan.source, RemoteModel):
        return Given(plan.source, _sent(plan, clock), len(plan.prefix))
    return source_line(plan)


def source_line(plan: Plan) -> Line:
    """An empty line of a plan's source, whose states are dropped once the target has them."""
    assert plan.translator is not None
    config = plan.translator.config
    line = Line("source", plan.source, records=True)
    line.inputs, line.states, line.passes_on = not config.state_maps, config.state_maps, True
    return line


def _sent(plan: Plan, clock: Clock) -> stream.Spans:
    """The states of a source on another machine, as they arrive; ``clock`` gets their number."""
    assert isinstance(plan.source, RemoteModel) and plan.translator is not None
    source, config, span = plan.source, plan.translator.config, plan.span
    received = clock.received = stream.Received(source.address, len(span))
    if span:
        firsts = plan.target.geometry.first_kept(span.stop)
        wanted = wanted_states(config, plan.native.layers, firsts, span.start)
        asked = tuple(plan.read), plan.step_size, config.capture, wanted
        yield from stream.spans(
            source, Order(source.digest, secrets.token_hex(8), *asked), received
        )


def bring(plan: Plan, clock: Clock | None = None, source: Source | None = None) -> Line:
    """A target's line of a plan's prefix, grown from the source's, and evaluated.

    Between two tokenizers the line has caches and no tokens.
    """
    turn = OneTurn(plan, clock=clock, source=source)
    finished(turn.filled())
    return turn.target


def take_over(plan: Plan, states: Iterable[KVStates], clock: Clock | None = None) -> Line:
    """A target's line of a plan's prefix, from source states that exist already, evaluated."""
    return bring(plan, clock, Given(plan.source, states, len(plan.prefix)))
