"""Answers that one model writes together: each step gives every one of them a token.

mlx-lm's own batch runs the model. Here answers join and leave it at any step, each with caches of
its own, and what the model's projections write is kept apart for each answer.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import GenerationBatch, StopSequences, generation_stream
from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.sample_utils import greedy_sampler

from kvlingo_mlx.caches.limits import can_merge
from kvlingo_mlx.engine.sampling import Choice, LogitsProcessor
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.models.capture import Ear
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import unit

NO_LIMIT = 2**62  # rows end themselves, since mlx-lm would drop their caches with their last token
CLEARED_EVERY = 256  # steps, as in mlx-lm's own loop


class Row:
    """One answer in a batch.

    Attributes:
        run: The tokens that the model has run since the answer joined: the prompt's last one, and
            every token that was given out.
        ended: Whether the answer's last token was given out.
        ready: Responses that are yet to be taken.
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[int], choice: Choice, most: int):
        self.run, self.ended = [tokens[-1]], False
        self.parts: list[KVStates] = []
        seeded = choice.seed is not None and choice.sampler is not None
        self.sampler = _Seeded(choice) if seeded else choice.sampler
        self.processors = list(map(self._guarded, choice.logits_processors or ()))
        self.context = list(tokens[:-1]) if self.processors else []
        self._most, self._tokenizer = most, model.tokenizer
        self._text, self.ready = model.tokenizer.detokenizer, list[MLXResponse]()
        self._failure: Exception | None = None
        self._began = time.perf_counter()

    def _guarded(self, processor: LogitsProcessor) -> LogitsProcessor:
        """A processor that ends this answer if it fails, not those beside it."""

        def called(tokens: mx.array, logits: mx.array) -> mx.array:
            try:
                return processor(tokens, logits)
            except Exception as error:  # whatever a user's function raises is this row's
                self.fail(error)
                return logits

        return called

    def fail(self, error: Exception) -> None:
        """Let :meth:`take` raise an error once what is ready has been taken."""
        self._failure = self._failure or error

    def give(self, token: int, logprobs: mx.array) -> None:
        """Add a token that the model has run, with the log probabilities it was chosen from."""
        if self.ended or self._failure is not None:
            return
        count, stop = len(self.run), token in self._tokenizer.eos_token_ids
        self.run.append(token)
        self.ended = stop or count == self._most
        if not stop:
            self._text.add_token(token)
        if self.ended:
            self._text.finalize()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        reason = ("stop" if stop else "length") if self.ended else None
        counts = (1, 1 / seconds, count, count / seconds, mx.get_peak_memory() / 1e9)
        self.ready.append(
            MLXResponse(self._text.last_segment, token, logprobs, False, *counts, reason)
        )

    @property
    def over(self) -> bool:
        """Whether the answer's last token was given out and taken."""
        return self.ended and not self.ready

    def take(self) -> MLXResponse | None:
        """The next response; None if the batch has to make a step before there is one."""
        if self.ready:
            return self.ready.pop(0)
        if self._failure is not None:
            raise self._failure
        return None


class _Seeded:
    """A sampler whose random numbers depend on its seed and step alone, not on its neighbours.

    MLX has one sequence of random numbers, which can be begun anew but not put back. So each step
    begins its own, and leaves a fresh one to the others.
    """

    def __init__(self, choice: Choice) -> None:
        assert choice.seed is not None and choice.sampler is not None
        self._sampler, self._seed, self._steps = choice.sampler, choice.seed, 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._steps += 1
        mx.random.seed((self._seed * 1_000_003 + self._steps) % 2**64)
        try:
            return self._sampler(logprobs)
        finally:
            mx.random.seed(int.from_bytes(os.urandom(8)))


class _Group:
    """Rows whose caches are one: a row alone has its own caches, several have merged ones."""

    def __init__(self, model: LanguageModel, *, records: bool, inputs: bool, merges: bool) -> None:
        self._model, self.merges, self.rows = model, merges, list[Row]()
        self._ear = Ear(model, inputs=inputs) if records else None
        self._listening = contextlib.nullcontext if self._ear is None else self._ear.listening
        self._heard, self._merged = 0, False
        self._batch: GenerationBatch | None = None
        self.ahead: set[Row] = set()  # those that have a token which the model has yet to run

    def add(self, row: Row, cache: Sequence[Any]) -> None:
        """Run a row's first token, alone, give it what follows, and let it join the others.

        mlx-lm begins the next step before it hands out a token. The first token is waited for, so
        it is given before that.
        """
        self._hear()  # what the others wrote until now, before the rows change
        with self._listening():  # mlx-lm's batch of one row, which runs the row's first token
            first = GenerationBatch(
                self._model.model,
                [0],
                mx.array(row.run),
                list(cache),
                [row.context],
                [row.sampler or greedy_sampler],
                greedy_sampler,
                [row.processors],
                [StopSequences()],
                [NO_LIMIT],
            )
        if self._ear is not None:
            row.parts.append(self._ear.take(0))
        first_token: Any = first._next_tokens.item()
        row.give(int(first_token), first._next_logprobs[0])
        self.ahead.add(row)
        if self._batch is None:
            self._batch = first
        else:
            for batch in (first,) if self._merged else (self._batch, first):
                batch.prompt_cache = [type(c).merge([c]) for c in batch.prompt_cache]
            self._merged = True
            self._batch.extend(first)
        self.rows.append(row)

    def step(self) -> None:
        """Give every row its next token."""
        assert self._batch is not None
        with self._listening():
            given = self._batch.next()
        self._heard += 1
        for row, response in zip(self.rows, given, strict=True):
            if row not in self.ahead:
                row.give(response.token, response.logprobs)
        self.ahead.clear()

    def remove(self, row: Row) -> list[Any]:
        """Take a row out; return its caches, which hold what it has run."""
        assert self._batch is not None
        self._hear()
        index = self.rows.index(row)
        held = self._batch.prompt_cache
        cache = [each.extract(index) for each in held] if self._merged else list(held)
        self.rows.remove(row)
        self._batch.filter([n for n in range(len(self.rows) + 1) if n != index])
        mx.eval([each.state for each in cache])
        return cache

    def _hear(self) -> None:
        """Give each row what the model wrote for it since the rows last changed."""
        if self._ear is None or not self._heard:
            return
        states, self._heard = self._ear.take(0), 0
        for index, row in enumerate(self.rows):
            keys, values = (
                tuple(mx.contiguous(a[index : index + 1]) if a.size else a for a in side)
                for side in (states.keys, states.values)
            )
            row.parts.append(KVStates(keys, values, states.capture, 0))
            mx.eval(keys, values)


class Batch:
    """The answers that one model writes at present.

    Args:
        records: Whether to keep what its projections write, for other models.
        inputs: Whether what goes into recurrences is part of it.
        size: The most answers that are written together; :attr:`full` says whether there are.
        group: The processes that do all of this together, and so wait for the messages of a step
            that mlx-lm has begun before they send others.
    """

    def __init__(
        self, model: LanguageModel, *, records: bool, inputs: bool = True, size: int = 32,
        group: Group = ALONE,
    ) -> None:  # fmt: skip
        self._model, self._records, self._size = model, records, size
        self._inputs = inputs
        self._together = group
        self._groups: list[_Group] = []
        self._steps = 0

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    @property
    def full(self) -> bool:
        """Whether no further answer can join."""
        return len(self) >= self._size

    @unit
    def join(self, cache: Sequence[Any], tokens: Sequence[int], choice: Choice, most: int) -> Row:
        """Begin an answer after ``tokens``, all of which but the last are in ``cache``.

        The caches are written to while the answer is alone, and copied when another one joins it.
        ``most`` is the most tokens that it may have. Caches that mlx-lm cannot merge stay alone.
        """
        row = Row(self._model, tokens, choice, most)
        merges = can_merge(cache)
        group = next((group for group in self._groups if merges and group.merges), None)
        if group is None:
            group = _Group(self._model, records=self._records, inputs=self._inputs, merges=merges)
            self._groups.append(group)
        with self._decoding():
            group.add(row, cache)
        return row

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        with mx.stream(generation_stream):
            yield
        self._together.settle()

    @unit
    def step(self) -> None:
        """Give every answer its next token; an error ends all that were to get one together."""
        self._steps += 1
        with self._decoding():
            for group in list(self._groups):
                self._advance(group)
        if self._steps % CLEARED_EVERY == 0:
            mx.clear_cache()

    def _advance(self, group: _Group) -> None:
        try:
            group.step()
        except (RuntimeError, MemoryError) as error:
            self._groups.remove(group)
            for row in group.rows:
                row.fail(KVLingoError(f"{self._model.name} cannot go on: {error}"))

    @unit
    def leave(self, row: Row) -> tuple[list[Any], list[KVStates]] | None:
        """End an answer: its caches, and the states of what it ran; None if a step failed."""
        group = next((group for group in self._groups if row in group.rows), None)
        if group is None:
            return None
        with self._decoding():
            if row in group.ahead:
                self._advance(group)
                if group not in self._groups:
                    return None
            cache = group.remove(row)
        if not group.rows:
            self._groups.remove(group)
        return cache, row.parts
