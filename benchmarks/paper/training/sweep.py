"""The sweep of learning rates: half a decade apart, until the best is none of the outermost.

Appendix "Training protocol". The rates of a window are trained together, in groups where memory is
short. While the best rate sits on an edge, a further one beyond that edge is trained over the same
samples. The rate of the lowest final held-out KL (or reconstruction error) wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Best, DivergedError, Interruption, Run, postponed
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Start, Trainer
from kvlingo_mlx.training.watch import complaints

Curve = Sequence[Mapping[str, Any]]

WIDTH = 5  # rates of the first window
LOWEST, HIGHEST = 1e-8, 1.0  # the paper's sweeps went from 3e-7 to 3e-2
COLUMNS = ("loss", "kl", "train_kl", "held_out")  # lists of a log's line, an entry for each rate


@dataclass(frozen=True)
class Trained:
    """The result of training one group of rates, or of a whole sweep."""

    best: Best
    curve: Curve  # the log's lines
    finals: Mapping[float, float]  # each rate's last held-out KL; infinite where it diverged

    @classmethod
    def of(cls, best: Best, runs: Sequence[Run], curve: Curve) -> Trained:
        """What a finished (or diverged) distillation leaves."""
        finals = {r.rate: r.held_out if r.diverged_at is None else math.inf for r in runs}
        return cls(best, list(curve), finals)


def window(centre: float, count: int = WIDTH) -> tuple[float, ...]:
    """An odd ``count`` of rates, half a decade apart, around ``centre``."""
    reach = count // 2
    return tuple(neighbour(centre, steps) for steps in range(-reach, reach + 1))


def neighbour(rate: float, steps: int) -> float:
    """The rate that lies ``steps`` half decades above; 1 and 3 take turns, as in the paper."""
    digit, _, exponent = f"{rate:.6e}".partition("e")
    if float(digit) in (1.0, 3.0):
        decades, odd = divmod(steps + (float(digit) == 3.0), 2)
        return float(f"{3 if odd else 1}e{int(exponent) + decades}")
    return float(f"{rate * 10 ** (steps / 2):.3g}") if steps else rate


def chosen(finals: Mapping[float, float]) -> float:
    """The rate of the lowest value: of equal ones the middle one; the lowest if all diverged."""
    rates = sorted(finals)
    if all(map(math.isinf, finals.values())):
        return rates[0]
    middle = (len(rates) - 1) / 2
    return min(rates, key=lambda rate: (finals[rate], abs(rates.index(rate) - middle)))


@dataclass
class Sweep:
    """A sweep in progress."""

    first: tuple[float, ...]  # the rates of the first window
    at_once: int  # the most rates that are trained together
    train: Callable[[int, tuple[float, ...]], Trained]  # or resumes, group number (from 0)
    begun: Callable[[int], tuple[float, ...]]  # the rates of a group that was begun earlier
    say: Callable[[str], None]
    finals: dict[float, float] = field(default_factory=dict)  # of all rates so far
    curves: list[tuple[Sequence[float], Curve]] = field(default_factory=list)  # of each group
    best: Best | None = None  # the best translator of all groups

    def run(self) -> Trained:
        """Train until the best rate is none of the outermost ones, or a limit is reached.

        Raises:
            KVLingoError: The training diverged at every rate.
        """
        while rates := self.begun(len(self.curves)) or self._next():
            self.say(f"sweep: training at {', '.join(f'{rate:g}' for rate in rates)}")
            found = self.train(len(self.curves), rates)
            if self.best is None or found.best.held_out < self.best.held_out:
                self.best = found.best  # the only translator that is held
            self.finals |= found.finals
            self.curves.append((list(found.finals), found.curve))
        if self.best is None or all(map(math.isinf, self.finals.values())):
            tried = ", ".join(f"{rate:g}" for rate in sorted(self.finals))
            raise KVLingoError(
                f"training diverged (the loss is not finite) at every learning rate: {tried}; try "
                "--dtype float32"
            )
        # Where no training is better than its start, that is kept, which has no rate of its own.
        best = self.best if self.best.step else replace(self.best, rate=chosen(self.finals))
        return Trained(best, joined(self.curves), self.finals)

    def _next(self) -> tuple[float, ...]:
        """The rates to be trained next: the rest of the window, then one beyond an edge."""
        if left := tuple(rate for rate in self.first if rate not in self.finals):
            return left[: self.at_once]
        best, lowest = chosen(self.finals), min(self.finals)
        beyond = neighbour(best, -1 if best == lowest else 1)
        at_edge = best in (lowest, max(self.finals))
        return (beyond,) if at_edge and LOWEST <= beyond <= HIGHEST else ()


def joined(groups: Sequence[tuple[Sequence[float], Curve]]) -> Curve:
    """The curves of several groups of rates as one, with a column for each rate, the lowest first.

    ``groups`` has for each group its rates, in the order of its columns, and its curve.
    """
    columns = sorted((rate, g, i) for g, (rates, _) in enumerate(groups)
                     for i, rate in enumerate(rates))  # fmt: skip
    by_step = [{line["step"]: line for line in curve} for _, curve in groups]

    def entry(step: int) -> dict[str, Any]:
        lines = [each.get(step, {}) for each in by_step]
        found = dict(next(filter(None, lines)))  # what has no column is the same in every group
        if "learning_rates" in found:
            found["learning_rates"] = [rate for rate, _, _ in columns]
        for name in set(COLUMNS) & set(found):
            found[name] = [lines[g][name][i] if name in lines[g] else None for _, g, i in columns]
        for name in {"seconds", "spent"} & set(found):
            found[name] = round(sum(line.get(name, 0.0) for line in lines), 3)
        return found

    return [entry(step) for step in sorted({step for each in by_step for step in each})]


@dataclass(frozen=True)
class SweepTrainer(Trainer):
    """A trainer that sweeps the rates of the stages whose recipes say so (``Recipe.sweep``)."""

    at_once: int | None = None  # the most rates trained together; None: what fits

    def _settings(self) -> dict[str, Any]:
        """Those of the package, by content alone, so that what was begun can move."""
        found = super()._settings()
        contents = [found.pop(name) for name in [*found] if name.startswith("contents of ")]
        for place in ("source's name", "target's name", "data"):
            found.pop(place, None)
        return {**found, "contents": contents}

    def needed(self) -> str:
        """A line that says what the training takes, and how many rates fit at a time."""
        if not self.plan.recipe.sweep:
            return super().needed()
        most, needed = self._group
        if most < (rates := len(self.plan.recipe.learning_rates)):
            needed += "\n" * bool(needed) + (
                f"sweep: of {rates} learning rates at most {most} are trained at a time; each "
                "group reads the same samples again"
            )
        return needed

    @cached_property
    def _group(self) -> tuple[int, str]:
        """How many rates are trained together, and what that takes.

        Raises:
            NotEnoughMemoryError: There is too little for one.
        """
        rates = len(self.plan.recipe.learning_rates)
        most = min(rates, self.at_once or rates)
        while self.plan.recipe.steps and self.lengths is not None:
            try:
                return most, self.pair.check_memory(self.config, self.lengths, most, self.plan)
            except NotEnoughMemoryError:
                if most == 1:
                    raise
                most -= 1
        return most, ""

    def distilled(
        self, stage: str, start: Start, recipe: Recipe, held_out: Sequence[Sample]
    ) -> tuple[Best, Curve]:
        """The best translator of a stage, over all rates of a sweep, and the log's lines."""
        if not recipe.sweep:
            return super().distilled(stage, start, recipe, held_out)
        named = lambda n: stage if n == 0 else f"{stage}-{n + 1}"  # noqa: E731

        def begun(number: int) -> tuple[float, ...]:
            kept = self.checkpoint(named(number), recipe)
            return tuple(
                run["rate"] for run in (self.group.firsts(kept.facts) or {}).get("runs", ())
            )

        with postponed() as stop:

            def train(number: int, rates: Sequence[float]) -> Trained:
                return self._trained(stop, named(number), start, recipe, held_out, rates)

            say = lambda text: self._tell(self.say, text)  # noqa: E731
            found = Sweep(recipe.learning_rates, self._group[0], train, begun, say).run()
        lowest, highest = min(found.finals), max(found.finals)
        if chosen(found.finals) in (lowest, highest):
            rates = f"{lowest:g} to {highest:g}"
            self._tell(self.warn, f"the best learning rate is at the edge of those tried, {rates}")
        if recipe.objective != "reconstruction":  # which has no KL to judge
            for text in complaints(found.curve).values():
                self._tell(self.warn, text)
        return found.best, found.curve

    def _trained(
        self, stop: Interruption, stage: str, start: Start, recipe: Recipe,
        held_out: Sequence[Sample], rates: Sequence[float],
    ) -> Trained:  # fmt: skip
        """One group of rates, trained together; of those that all diverged, what was best."""
        made = self.distillation(stage, start, recipe, held_out, rates)
        made.stop = stop
        try:
            best = made.run(lambda report: self.progress(stage.partition("-")[0], report))
        except DivergedError:
            if made.best is None:
                if self.group.leads:
                    self.checkpoint(stage, recipe).path.unlink(missing_ok=True)
                raise
            best = made.best
        return Trained.of(best, made.runs, made.curve)
