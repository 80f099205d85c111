"""Runs that end with a first token, and how they are timed: warmed up, in turns, within a limit."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generate_step, generation_stream

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.engine.fill import take_over
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.reporting.measure import seconds

MAX_WARM_UP = 5
LONG = 1.0  # seconds of warming up, after which the extra cost of a first run does not matter


def again(cache: Sequence[Any]) -> list[Any]:
    """Shallow copies of caches: a timed step writes where the step before it did."""
    return [copy.copy(c) for c in cache]


def first_token(
    target: LanguageModel,
    tokens: Sequence[int],
    cache: list[Any] | None,
    step_size: int = 2048,
    count: int = 1,
) -> int:
    """Run ``tokens`` from a cache and decode ``count`` tokens; return the last one."""
    options: dict[str, Any] = {"prompt_cache": cache, "prefill_step_size": step_size}
    steps = generate_step(mx.array(list(tokens)), target.model, max_tokens=count, **options)
    *_, (token, _) = steps
    return int(token)


def recorded(plan: Plan) -> list[KVStates]:
    """What the source writes of a plan's prefix, chunk by chunk."""
    assert plan.translator is not None
    kept = plan.translator.config.state_maps
    return list(capture.prefill(plan.source, plan.read, plan.step_size, kept=kept))


def translation(plan: Plan, states: Sequence[KVStates] | None = None) -> Callable[[], list[Any]]:
    """A function that fills a fresh cache, as a switch does once the source has read the prompt.

    The target reads its native part itself. ``states`` are the source's, else they are recorded.
    """
    read = recorded(plan) if states is None else states

    def run() -> list[Any]:
        with mx.stream(generation_stream):
            return take_over(plan, read).cache

    return run


def prompt_of(source: LanguageModel, target: LanguageModel, count: int, *, text: bool) -> list[int]:
    """Token ids of a prompt: the bundled dialogues one after the other, or random ids.

    A mixture of experts touches fewer experts on text than on random ids.

    Raises:
        ValueError: There are fewer than 2 tokens, or they are beyond a model's context.
    """
    if count < 2:
        raise ValueError(f"a prompt of {count} tokens leaves nothing to hand over; give 2 or more")
    rows = min(source.geometry.embedding_rows, target.geometry.embedding_rows)
    rng = random.Random(0)
    tokens = [rng.randrange(rows) for _ in range(0 if text else count)]
    for dialogue in dialogues.held_out(count) if text else ():  # each has more than one token
        turns = "\n".join(str(turn["content"]) for turn in dialogue.conversation())
        tokens += target.tokenizer.encode(turns + "\n", add_special_tokens=not tokens)
        if len(tokens) >= count:
            break
    for model in (source, target):
        model.check_tokens(tokens[:count])
    return tokens[:count]


def switch_times(
    target: LanguageModel,
    actions: Mapping[str, Callable[[], list[Any]]],
    last: int,
    *,
    trials: int = 5,
) -> dict[str, list[float]]:
    """Seconds to the first token after ``last``, by ways to make a cache of all before it."""
    runs = {
        name: (lambda make=make: first_token(target, [last], make()))
        for name, make in actions.items()
    }
    return interleaved(runs, trials)


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    trials: int,
    progress: Callable[[], None] = lambda: None,
    out_of_time: Callable[[], bool] = lambda: False,
    spent: Mapping[str, float] | None = None,
    samples: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of several runs: all are warmed up, then timed in turns.

    Each run is timed at least once; further rounds end when ``out_of_time`` returns True. ``spent``
    are seconds that some runs have run already. ``samples`` is filled as times come in.
    """
    for name, run in runs.items():
        _warm_up(run, (spent or {}).get(name, 0.0))
    samples = {name: [] for name in runs} if samples is None else samples
    for trial in range(trials):
        if trial and out_of_time():
            break
        for name, run in runs.items():
            samples[name].append(seconds(run))
        progress()
    return samples


def _warm_up(action: Callable[[], object], spent: float) -> None:
    """Run until two consecutive times agree within 5 %, at most five times and for ``LONG``."""
    last = 0.0
    for _ in range(MAX_WARM_UP):
        if spent > LONG:
            return
        now = seconds(action)
        if abs(now - last) <= 0.05 * last:
            return
        last, spent = now, spent + now


class OutOfTime(BaseException):
    """The time limit is reached; no child of Exception, so that no library catches it."""


class Stopwatch:
    """The time that is left for measuring; a limit of None is no limit."""

    def __init__(self, limit: float | None) -> None:
        self._end = None if limit is None else time.perf_counter() + limit

    def left(self) -> float:
        """The seconds that are left; negative once the limit is passed."""
        return float("inf") if self._end is None else self._end - time.perf_counter()

    def over(self) -> bool:
        return self.left() <= 0

    def part(self, of: int) -> Stopwatch:
        """One with an equal share of the remaining time, for one of ``of`` measurements."""
        return Stopwatch(None if self._end is None else self.left() / of)

    @contextlib.contextmanager
    def limiting(self) -> Iterator[None]:
        """Raise :class:`OutOfTime` in the block once the limit is passed, between two steps.

        A step is what Python calls as one: the evaluation of an array, a prefill's chunk. Only the
        main thread has such a limit.
        """
        if self._end is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def ring(*_: object) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(self.left(), 1e-6))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
