"""Stage 2: self-distillation.

Paper: section "Training the translator", equation (3.3); appendix "Training protocol". Several
translators of one pair, one for each learning rate, are trained in lockstep and share the two
no-gradient passes over every conversation. The translator of lowest held-out KL over all rates and
steps is kept; the initial translator counts as step 0.
"""

import contextlib
import hashlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.phases import counted
from kvlingo_mlx.reporting.measure import plain
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.checkpoints import KEEP_EVERY, Checkpoint
from kvlingo_mlx.training.forward import Trainable
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.recipe import MATCHING, Recipe
from kvlingo_mlx.training.runtime import Pair, Readings
from kvlingo_mlx.training.watch import complaints

# The share of the time that validations take, where the time is limited.
VALIDATING = 0.1
COUNTERS = ("step", "tokens", "seconds", "validating", "warned")  # kept of a distillation
RUN_FACTS = ("rate", "held_out", "diverged_at", "kl_sum", "kl_steps")


class DivergedError(KVLingoError):
    """No run's loss is finite any more."""


class Samples(Protocol):
    """A training stream (``data.Stream``): samples, each a function of its index, and others."""

    def sample(self, index: int) -> Sample: ...

    def held_out(self, count: int = 64) -> Sequence[Sample]: ...


@dataclass
class Run:
    """One translator in training."""

    rate: float
    translator: Trainable
    held_out: float = math.inf  # its KL (or reconstruction error) on the held-out conversations
    diverged_at: int | None = None  # the step at which a loss stopped being finite
    loss: float = math.nan
    kl: float = math.nan
    kl_sum: float = 0.0  # over the steps since the last validation
    kl_steps: int = 0


@dataclass(frozen=True)
class Best:
    """The translator of lowest held-out KL (or reconstruction error) so far."""

    rate: float
    step: int
    held_out: float
    tensors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Report:
    """The progress of a training, for a progress bar and the log.

    ``share`` is how much of it is done, by steps or by time.
    """

    step: int
    share: float
    loss: float
    kl: float
    held_out: float
    tokens_per_second: float
    seconds: float


# ---- Ctrl-C and SIGTERM, postponed until the work is kept -----------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interruption:
    """Whether a signal has asked this process to stop, and which one."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def error(self) -> BaseException:
        """The exception that ends the process as the signal would have done."""
        if self.signal == signal.SIGTERM:
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt()


@contextlib.contextmanager
def postponed() -> Iterator[Interruption]:
    """Record the first signal instead of raising it; a second one acts at once.

    Signals that the process ignores, for example under nohup, stay ignored. Only the main thread
    may handle signals.
    """
    received = Interruption()
    main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as before:

        def note(number: int, frame: object) -> None:
            received.signal = number
            before.close()

        for number in SIGNALS if main else ():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before.callback(signal.signal, number, signal.signal(number, note))
        yield received


# ---- the loop ---------------------------------------------------------------------------------


@dataclass
class Distillation:
    """A distillation in progress: the pair, its runs, its data and its checkpoint."""

    pair: Pair
    runs: list[Run]
    stream: Samples
    held_out: Sequence[Sample]
    recipe: Recipe
    checkpoint: Checkpoint | None = None
    group: Group = field(default_factory=Group)
    keep_every: float = KEEP_EVERY  # the most seconds of work that a kill may lose
    stop: Interruption = field(default_factory=Interruption)  # checked between two steps
    warn: Callable[[str], None] = lambda text: None  # gets each complaint about the curve once
    best: Best | None = None
    curve: list[Mapping[str, Any]] = field(default_factory=list)  # the log's lines
    warned: list[str] = field(default_factory=list)  # the names of complaints
    readings: Readings | None = None  # which stages share
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of all steps
    validating: float = 0.0  # seconds of all validations
    kept: tuple[int, float] = (-1, 0.0)  # the step last kept, and when that was
    judged: tuple[int, float] = (0, 0.0)  # the step last validated, and the seconds until then
    latest: tuple[float, float] = (0.0, 0.0)  # seconds of the last step and validation

    def run(self, progress: Callable[[Report], None] = lambda report: None) -> Best:
        """Train to the last step; returns the translator of lowest held-out KL.

        Raises:
            DivergedError: Every run has diverged; the message names the steps.
            KVLingoError: The disk is full.
            KeyboardInterrupt, SystemExit: ``stop`` was set; the state of this step is kept.
        """
        kept = self.group.firsts(lambda: self.checkpoint and self.checkpoint.read())
        if kept:
            self.restore(*kept)
            self._require_live()
        self.kept = self.step, time.monotonic()
        if not kept:
            self._judge({"step": 0})
        last = self.recipe.steps == 0
        while self.step < self.recipe.steps and not last:
            self._heed()
            started = time.perf_counter()
            self.advance()
            took = time.perf_counter() - started
            self.seconds, self.latest = self.seconds + took, (took, self.latest[1])
            last, due = self._due()
            if last or due:
                self._judge(self.entry())
            elif time.monotonic() - self.kept[1] >= self.keep_every:
                self.keep()
            progress(self.report())
        assert self.best is not None, "validated before the first step"
        return self.best

    # ---- a step ---------------------------------------------------------------------------

    def _heed(self) -> None:
        """Stop between two steps if any of the processes has received a signal."""
        # All stop at the same step, or some would wait forever.
        if self.group.total(np.array([float(bool(self.stop))])).item():
            if self.kept[0] != self.step:
                self.keep()
            raise self.stop.error()

    def advance(self) -> None:
        """One optimizer step of every run."""
        first, every = self.step * self.recipe.batch, self.recipe.reads
        numbers = range(first, first + self.recipe.batch)
        batch = [self.stream.sample(n if every is None else n % every) for n in numbers]
        costs = [len(s.prefix) + len(s.continuation) for s in batch]
        sums = np.zeros((len(self.live), 2))
        for index in self.group.share(costs):
            sums += self._losses(batch[index], self.live, 1.0 / self.recipe.batch)
        place = self._agreed([self.recipe.place(self.step, self.spent)])[0]
        for run, means in zip(self.live, sums / self.recipe.batch, strict=True):
            self._step(run, means, place)
        self.step += 1
        self.tokens += sum(costs)
        self._require_live()

    def _losses(self, sample: Sample, runs: Sequence[Run], scale: float = 0.0) -> np.ndarray:
        """The loss and the KL of each run (R, 2); ``scale`` times the gradient is added up."""
        recipe, pair = self.recipe, self.pair
        if recipe.objective == "reconstruction":
            spans = list(pair.spans(sample, self._config.capture))
            errors = [
                sum(pair.reconstruction(run.translator, span, scale) for span in spans)
                for run in runs
            ]
            return np.array([errors, errors]).T
        matches = bool(scale) and recipe.objective == MATCHING
        if self.readings is None:
            self.readings = Readings(pair, self._config, recipe.reads)
        reading = self.readings.of(sample, matches)
        if matches:
            errors = [pair.match(run.translator, reading, scale) for run in runs]
            return np.array([errors, errors]).T
        goal = (
            objective_named(recipe.objective, recipe.ce_weight) if scale else objective_named("kl")
        )
        found = [pair.loss(run.translator, reading, goal, scale) for run in runs]
        return np.array([[loss.value, loss.kl] for loss in found])

    @property
    def _config(self) -> TranslatorConfig:
        return self.runs[0].translator.config

    def _step(self, run: Run, means: np.ndarray, place: float) -> None:
        """One clipped AdamW step of a run, at a :meth:`Recipe.place`."""
        run.loss, run.kl = self.group.total(means).tolist()
        finite = run.translator.gather(self.group)
        if not (finite and math.isfinite(run.loss)):
            run.diverged_at = self.step + 1
            run.translator.forget()
            return
        run.kl_sum, run.kl_steps = run.kl_sum + run.kl, run.kl_steps + 1
        run.translator.update(run.rate * self.recipe.rate_factor(place), self.recipe.clip)

    @property
    def live(self) -> list[Run]:
        """The runs that have not diverged."""
        return [run for run in self.runs if run.diverged_at is None]

    def _require_live(self) -> None:
        """Raise DivergedError if every run has diverged."""
        if self.live:
            return
        if self.step == 0:
            raise KVLingoError(
                "the held-out loss is not finite before the first step: a model's states overflow; "
                "try --dtype float32"
            )
        if self.best is not None:
            self.keep()
        where = ", ".join(f"{run.rate:g} at step {run.diverged_at}" for run in self.runs)
        what = f"training diverged (the loss is not finite): learning rate {where}"
        if self.recipe.objective == "reconstruction":
            raise DivergedError(f"{what}, in the MLP's stage 1; try --dtype float32 or --seed")
        raise DivergedError(
            f"{what}; stage 1 is kept: give a lower --lr, and stage 2 starts again from there"
        )

    # ---- time -----------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """The seconds of all steps and validations."""
        return self.seconds + self.validating

    def _due(self) -> tuple[bool, bool]:
        """Whether this step is the last one, and whether it is to be validated."""
        recipe, cost = self.recipe, self.validating / len(self.curve)
        ends = self.step == recipe.steps
        due = self.step % recipe.validate_every == 0
        if recipe.seconds is not None:
            # There must be time for a step more and the last validation, of all runs that are left.
            runs = len(self.live) if self.judged[0] == 0 else 1
            rest = self.latest[0] + max(cost, runs * self.latest[1])
            ends = ends or self.spent + rest >= recipe.seconds
            due = due or self.spent - self.judged[1] >= cost / VALIDATING
        found = self._agreed([ends, due])
        return bool(found[0]), bool(found[1])

    def _agreed(self, numbers: Sequence[float]) -> list[float]:
        """The leading process's numbers: clocks differ, and all must do the same."""
        agreed: list[float] = self.group.total(np.array(numbers, float) * self.group.leads).tolist()
        return agreed

    # ---- a validation ---------------------------------------------------------------------

    def _judge(self, entry: Mapping[str, Any]) -> None:
        """Validate; record the result beside ``entry``, the best translator and a checkpoint."""
        started = time.perf_counter()
        self.validate()
        took = time.perf_counter() - started
        self.validating, self.latest = self.validating + took, (self.latest[0], took)
        self.judged = self.step, self._agreed([self.spent])[0]
        self.group.agree(self._digests)
        leading = self.leading()
        ended = self.step == self.recipe.steps or not self.recipe.sweep
        if self.best is None or (ended and leading.held_out < self.best.held_out):
            arrays = leading.translator.arrays()
            self.best = Best(leading.rate, self.step, leading.held_out, arrays)
        values = [run.held_out for run in self.runs]
        self.curve.append({**entry, "held_out": values, "spent": round(self.spent, 3)})
        for run in self.runs:
            run.kl_sum, run.kl_steps = 0.0, 0
        # An MLP's stage 1 measures the reconstruction error, and no KL to judge.
        found = {} if self.recipe.objective == "reconstruction" else complaints(self.curve)
        for name, text in found.items():
            if name not in self.warned and self.group.leads:
                self.warn(text)
            self.warned.append(name)
        self.keep()

    def _digests(self) -> dict[str, str]:
        """The translators in training, which every process has made by the same steps."""
        found = hashlib.sha256()
        for run in self.live:
            for array in run.translator.arrays().values():
                found.update(array.tobytes())
        return {f"translator at step {self.step}": found.hexdigest()}

    def validate(self) -> None:
        """Measure every run's KL (or reconstruction error) on the held-out conversations.

        Raises:
            KVLingoError: The result is not finite for any run.
        """
        measured = self.runs if self.step else self.runs[:1]  # all begin alike
        sums = np.zeros(len(measured))
        own = self.group.share([len(s.prefix) + len(s.continuation) for s in self.held_out])
        for index in counted("scoring held-out conversations", own):
            sums += self._losses(self.held_out[index], measured)[:, 1]
        found = (self.group.total(sums) / len(self.held_out)).tolist()
        for run, value in zip(
            self.runs, found if self.step else found * len(self.runs), strict=True
        ):
            run.held_out = value if math.isfinite(value) else math.inf
            if run.held_out == math.inf and run.diverged_at is None:
                run.diverged_at = self.step
        self._require_live()

    def leading(self) -> Run:
        """The run of lowest held-out KL among those that have not diverged."""
        return min(self.live or self.runs, key=lambda run: run.held_out)

    # ---- what is kept and said ------------------------------------------------------------

    def keep(self) -> None:
        """Write the state of this step, in the leading process."""
        if self.checkpoint is not None and self.group.leads:
            self.checkpoint.write(f"step {self.step}", *self.state())
        self.kept = self.step, time.monotonic()

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tensors and facts that :meth:`restore` goes on from."""
        assert self.best is not None, "validated before the first step"
        tensors = {f"best/{name}": array for name, array in self.best.tensors.items()}
        for number, run in enumerate(self.runs):
            tensors |= {f"{number}/{n}": array for n, array in run.translator.state().items()}
        facts = {name: getattr(self, name) for name in COUNTERS}
        runs = [{name: getattr(run, name) for name in RUN_FACTS} for run in self.runs]
        best = {"rate": self.best.rate, "step": self.best.step, "held_out": self.best.held_out}
        return tensors, {**facts, "curve": list(map(plain, self.curve)), "runs": runs, "best": best}

    def restore(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Become what gave :meth:`state`, in either runtime."""

        def under(prefix: str) -> dict[str, np.ndarray]:
            return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}

        for name in COUNTERS:
            setattr(self, name, facts[name])
        for number, (run, own) in enumerate(zip(self.runs, facts["runs"], strict=True)):
            run.translator.restore(under(f"{number}/"))
            for name in RUN_FACTS:
                setattr(run, name, own[name])
        self.curve, self.best = list(facts["curve"]), Best(**facts["best"], tensors=under("best/"))

    def entry(self) -> dict[str, object]:
        """A line of the log, but for what is validated."""
        told = self.recipe.objective != MATCHING  # whose steps see no prediction, and so no KL
        kls = [r.kl_sum / r.kl_steps if told and r.kl_steps else math.nan for r in self.runs]
        return {
            "step": self.step,
            "learning_rates": [run.rate for run in self.runs],
            "loss": [run.loss for run in self.runs],
            "kl": [run.kl for run in self.runs],
            "train_kl": kls,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
        }

    def report(self) -> Report:
        """The progress of the leading run."""
        run = self.leading()
        pace = self.tokens / max(self.seconds, 1e-9)
        share = self.recipe.place(self.step, self.spent) / max(1, self.recipe.steps)
        return Report(self.step, share, run.loss, run.kl, run.held_out, pace, self.seconds)
