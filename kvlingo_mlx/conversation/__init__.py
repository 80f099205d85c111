"""One conversation, several models: each keeps its own cache line, and no span is read twice.

Alternated translation and generation (section 4.6, "Multi-turn cache translation"): a line is
made of spans that its model read or wrote itself and of spans that were translated, once, from
what another model wrote. At a switch only the spans that the incoming model lacks are
translated.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvlingo_mlx import caches
from kvlingo_mlx.conversation.line import Line
from kvlingo_mlx.conversation.spans import wrote
from kvlingo_mlx.conversation.transcript import Message, Transcript
from kvlingo_mlx.errors import IncompatibleTranslatorError, MissingTranslatorError
from kvlingo_mlx.generation import GenerationResponse, Model, check_numbers, timed, with_prefix
from kvlingo_mlx.loading import find_translator, load, load_translator
from kvlingo_mlx.pairing import check_pair, check_tokenizers, matches
from kvlingo_mlx.translators.base import Translator

STRATEGIES = ("alternated", "naive", "reprefill")
ON_MISSING = ("error", "reprefill")
THOUGHT = "</think>"  # what ends a reasoning trace


@dataclass(frozen=True)
class Switch:
    """What it took to bring a line up to date before its model's last step.

    Attributes:
        name: The model.
        kept: Tokens that its line held already.
        translated: Tokens translated.
        read: Tokens that it read itself, the last one of the prompt left out.
        seconds: How long that took.
    """

    name: str
    kept: int
    translated: int
    read: int
    seconds: float


class _Turn:
    """An answer on its way: the messages it answers, and what was written so far."""

    def __init__(self, messages: list[Message], prompt: list[int], most: int) -> None:
        self.messages, self.prompt, self.most = messages, prompt, most
        self.answer: list[int] = []
        self.text = ""
        self.ended = False
        self.started, self.first = time.perf_counter(), 0.0

    @property
    def left(self) -> int:
        """Tokens that it may still have; -1 for no limit."""
        return -1 if self.most == -1 else self.most - len(self.answer)

    def wrote(self, response: MLXResponse, switch: Switch) -> GenerationResponse:
        """Book a token; returns it with this turn's times."""
        if not self.answer:
            self.first = time.perf_counter() - self.started
        self.answer.append(int(response.token))
        self.text += response.text
        self.ended = response.finish_reason == "stop" or not self.left
        return timed(response, len(self.prompt), switch.seconds, self.first)


class Conversation:
    """Several models over one context.

    Args:
        models: By name, each a folder, a Hub id or a loaded model. Their tokenizers must agree.
        translators: Loaded, or folders or Hub ids; each serves the directions that its two
            models fit. What is missing is looked for in the local store.
        strategy: ``alternated``; for comparison ``naive``, which translates the whole prefix
            anew at every switch, translated spans included, and ``reprefill``.
        eager: Translate what one model wrote for all the others as soon as it is finished, so
            that a switch costs one decoding step. Off saves the other lines' memory.
        on_missing: ``error``, or ``reprefill`` to let a model read what no translator brings it.
        system: A system message to begin with.
        enable_thinking: The chat template's switch.
        verbatim: Go on from what was written, whatever the template makes of earlier turns: Qwen's
            strips their thinking, so that the answers after it must be read anew.
        prefill_step_size: Tokens per chunk.
        allow_mismatch: Accept translators made for other checkpoints of the same shape.

    Raises:
        ValueError: No models, or an argument without meaning.
        IncompatibleTranslatorError: The tokenizers differ, or a translator fits no direction.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        translators: Iterable[Translator | str | os.PathLike[str]] = (),
        *,
        strategy: str = "alternated",
        eager: bool = True,
        on_missing: str = "error",
        system: str | None = None,
        enable_thinking: bool | None = None,
        verbatim: bool = False,
        prefill_step_size: int = 2048,
        allow_mismatch: bool = False,
    ) -> None:
        for what, value, allowed in (
            ("strategy", strategy, STRATEGIES),
            ("on_missing", on_missing, ON_MISSING),
        ):
            if value not in allowed:
                raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(allowed)}")
        if not models:
            raise ValueError("a conversation needs a model; give models={'name': model}")
        if prefill_step_size < 1:
            raise ValueError(f"prefill_step_size is {prefill_step_size}; it must be at least 1")
        loaded = {name: load(model) for name, model in models.items()}
        for model in loaded.values():
            if strategy == "naive" and any(g.window is not None for g in model.geometry.layers):
                raise ValueError(
                    f"strategy is 'naive', but {model.name} has windows: its local layers keep too "
                    "little of a translated prefix to be translated again; use alternated"
                )
        for a, b in itertools.combinations(loaded.values(), 2):
            check_tokenizers(a, b)
        records = len(loaded) > 1 and strategy != "reprefill"
        self.lines = {name: Line(name, m, records=records) for name, m in loaded.items()}
        self.strategy, self.eager, self.on_missing = strategy, eager, on_missing
        self.enable_thinking, self.step_size = enable_thinking, prefill_step_size
        self.allow_mismatch = allow_mismatch
        start = [{"role": "system", "content": system}] if system is not None else []
        self.transcript = Transcript(start, verbatim=verbatim)
        self.last_switch: Switch | None = None
        self._active: str | None = None
        self._from: str | None = None
        self._found: dict[tuple[str, str], Translator | None] = {}
        self._assign(translators)

    def _assign(self, translators: Iterable[Translator | str | os.PathLike[str]]) -> None:
        """Give each translator the directions that it serves."""
        for given in translators:
            translator = given if isinstance(given, Translator) else load_translator(given)
            config, tolerance = translator.config, self.allow_mismatch
            pairs = [
                (a.name, b.name)
                for a, b in itertools.permutations(self.lines.values(), 2)
                if matches(config.source, a.model, allow_mismatch=tolerance)
                and matches(config.target, b.model, allow_mismatch=tolerance)
            ]
            if not pairs:
                raise IncompatibleTranslatorError(
                    f"the translator from {config.source.name} to {config.target.name} fits no two "
                    f"of this conversation's models: {', '.join(self.lines)}"
                )
            for source, target in pairs:
                models = self.lines[source].model, self.lines[target].model
                check_pair(config, *models, allow_mismatch=tolerance)
                self._found[source, target] = translator

    def _translator(self, source: str, target: str) -> Translator | None:
        """The translator of a direction, or None; the local store is searched once."""
        if (source, target) not in self._found:
            models = self.lines[source].model, self.lines[target].model
            try:
                path = find_translator(*models, allow_mismatch=self.allow_mismatch)
            except MissingTranslatorError:
                self._found[source, target] = None
            else:
                self._found[source, target] = load_translator(path)
        return self._found[source, target]

    @property
    def messages(self) -> list[Message]:
        """Every message so far."""
        return [dict(message) for message in self.transcript.messages]

    def undo(self) -> None:
        """Take back the last message and its answer; what was before is not read again.

        Raises:
            ValueError: Nobody has answered yet.
        """
        self.transcript = self.transcript.undo()

    def branch(self) -> Conversation:
        """A conversation that goes on from here on its own; models and numbers are shared."""
        made = copy.copy(self)
        made.transcript = self.transcript.copy()
        made.lines = {name: line.copy() for name, line in self.lines.items()}
        made._found = self._found
        return made

    # ---- replies ----------------------------------------------------------------------------

    def reply(self, name: str, message: str | Sequence[Message], **options: Any) -> str:
        """One model's whole answer; arguments are those of :meth:`stream_reply`."""
        return "".join(response.text for response in self.stream_reply(name, message, **options))

    def stream_reply(
        self,
        name: str,
        message: str | Sequence[Message],
        *,
        prefill: str | None = None,
        first_token: str = "target",
        reasoning: str | None = None,
        max_tokens: int = 256,
        sampler: Any = None,
        logits_processors: list[Any] | None = None,
    ) -> Iterator[GenerationResponse]:
        """Let a model answer; yields a response a token.

        The message and the answer join the conversation when the answer ends, or when the
        caller stops asking for more of it. If anything fails before, the conversation stays as
        it was.

        Args:
            name: Who answers.
            message: What the user says, or several messages (a tool's result, say).
            prefill: Who reads the message: by default the model that answers, so that the
                context alone is handed over. Another one hands it over after the prompt.
            first_token: ``source`` lets ``prefill`` write the first token as well.
            reasoning: Who writes the reasoning trace, up to its end mark; ``name`` then writes
                the answer alone (appendix "Moving the switch point").
            max_tokens: Most tokens of the answer, a trace included; -1 for no limit.
            sampler: As in mlx-lm.
            logits_processors: As in mlx-lm; they see the whole conversation.

        Raises:
            ValueError: No model of that name, or a message that cannot be rendered.
            MissingTranslatorError: A span that only another model wrote cannot be translated.
        """
        line = self._line(name)
        if max_tokens == 0 or max_tokens < -1:
            raise ValueError(f"max_tokens is {max_tokens}; give a positive number, or -1")
        if first_token not in ("target", "source") or (first_token == "source" and not prefill):
            raise ValueError(
                f"first_token is {first_token!r}; it must be target, or source beside a prefill"
            )
        new = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        prompt = self.transcript.prompt(line.model, new, self.enable_thinking)
        line.model.check_tokens(prompt)
        turn = _Turn(new, prompt, max_tokens)
        options = {"sampler": sampler, "logits_processors": logits_processors}
        try:
            if prefill is not None and first_token == "target":
                self._bring(self._line(prefill), prompt[:-1])
            elif prefill is not None:
                yield from self._run(self._line(prefill), turn, 1, None, options)
            if reasoning is not None and not turn.ended:
                yield from self._run(self._line(reasoning), turn, -1, THOUGHT, options)
            if not turn.ended:
                yield from self._run(line, turn, -1, None, options)
        except GeneratorExit:
            self._finish(line, turn)
            raise
        self._finish(line, turn)

    def _run(
        self, line: Line, turn: _Turn, most: int, until: str | None, options: Mapping[str, Any]
    ) -> Iterator[GenerationResponse]:
        """One model's part of an answer: up to ``most`` tokens, or until its text holds a mark."""
        tokens = [*turn.prompt, *turn.answer]
        switch = self._bring(line, tokens[:-1])
        self.last_switch = switch
        line.mark()
        left = turn.left if most == -1 else min(most, turn.left) if turn.left != -1 else most
        run: list[int] = []
        text = ""
        streams: Any = [generation_stream]
        with line.whole(), line.tapped() as take, wired_limit(line.model.model, streams):
            responses = mlx_stream_generate(
                line.model.model, line.model.tokenizer, tokens[-1:], max_tokens=left,
                prompt_cache=line.cache, sampler=options["sampler"],
                logits_processors=with_prefix(options["logits_processors"], tokens[:-1]),
            )  # fmt: skip
            try:
                with contextlib.closing(responses):
                    for response in responses:
                        if not run:
                            check_numbers(response, line.model, line.model)
                        run.append(int(response.token))
                        text += response.text
                        yield turn.wrote(response, switch)
                        if until is not None and until in text:
                            break
            except GeneratorExit:
                line.wrote([*tokens[-1:], *run], take())
                raise
            # The loop has run every token that it gave out, a stop token included.
            line.wrote([*tokens[-1:], *run], take())

    def _finish(self, line: Line, turn: _Turn) -> None:
        """Let what was said join the conversation, and the other lines follow."""
        answer = {"role": "assistant", "content": turn.text}
        self.transcript.wrote([*turn.messages, answer], turn.prompt, turn.answer)
        if self.eager and self.strategy == "alternated":
            self._follow(turn.prompt + turn.answer)

    def _line(self, name: str) -> Line:
        if name not in self.lines:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(self.lines)}")
        return self.lines[name]

    # ---- lines ------------------------------------------------------------------------------

    def _bring(self, line: Line, tokens: Sequence[int]) -> Switch:
        """Make a line hold ``tokens``: translate what others wrote, read the rest natively."""
        started = time.perf_counter()
        kept = line.trim(self._kept(line, tokens))
        translated = read = 0
        while len(line) < len(tokens):
            source, stop = self._offer(line, tokens)
            begun = len(line)
            if source is None:
                line.read(tokens[begun:stop], self.step_size)
                read += stop - begun
            else:
                self._translate(source, line, tokens[begun:stop])
                translated += stop - begun
        mx.eval(caches.arrays(line.cache))
        self._forget()
        return Switch(line.name, kept, translated, read, time.perf_counter() - started)

    def _kept(self, line: Line, tokens: Sequence[int]) -> int:
        """How much of a line stays at a switch to it, by the strategy."""
        switched = self._active is not None and self._active != line.name
        previous, self._active = self._active, line.name
        if not switched or self.strategy == "alternated":
            return line.common(tokens)
        self._from = previous
        return 0

    def _offer(self, line: Line, tokens: Sequence[int]) -> tuple[Line | None, int]:
        """What to do next: whose states to translate, or none, and up to which position.

        Raises:
            MissingTranslatorError: Others wrote the next token, and none can be translated.
        """
        begun, best, stop = len(line), None, len(line)
        missing: Line | None = None
        later = len(tokens)
        if self.strategy == "reprefill":
            return None, later
        for other in self.lines.values():
            if other is line or (self.strategy == "naive" and other.name != self._from):
                continue
            shared = other.common(tokens)
            reach = min(other.native.reach(begun), shared)
            if self._translator(other.name, line.name) is None:
                missing = other if wrote(other.spans, begun, shared) else missing
            elif reach > stop:
                best, stop = other, reach
            elif (following := other.native.next_start(begun)) and following < shared:
                later = min(later, following)
        if best is not None:
            return best, stop
        if missing is not None and self.on_missing == "error":
            raise MissingTranslatorError(
                f"no translator from {missing.name} ({missing.model.name}) to {line.name} "
                f"({line.model.name}): pass one in translators, make one with `kvlingo-mlx fit`, "
                "or let the model read what is missing with on_missing='reprefill' "
                "(--on-missing reprefill)"
            )
        return None, later

    def _translate(self, source: Line, line: Line, tokens: Sequence[int]) -> None:
        translator = self._translator(source.name, line.name)
        assert translator is not None
        begun = len(line)
        states = source.native.read(begun, begun + len(tokens))
        keep = self.strategy == "naive"
        line.take_over(tokens, states, source, translator, self.step_size, keep=keep)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Translate for every other line what it lacks of ``tokens``, as far as it can be."""
        for line in self.lines.values():
            if line.trim(line.common(tokens)) == len(tokens):
                continue
            with contextlib.suppress(MissingTranslatorError):
                while len(line) < len(tokens):
                    source, stop = self._offer(line, tokens)
                    if source is None:
                        break
                    self._translate(source, line, tokens[len(line) : stop])
        self._forget()

    def _forget(self) -> None:
        """Let go of states that every line that could take them has."""
        if self.strategy == "naive":
            return
        for line in self.lines.values():
            others = [
                other.common(line.tokens)
                for other in self.lines.values()
                if other is not line and self._translator(line.name, other.name) is not None
            ]
            line.native.forget(min(others, default=len(line)))
