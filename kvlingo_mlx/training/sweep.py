"""The sweep of learning rates: half a decade apart, until the best is none of the outermost.

Appendix "Training protocol". The rates of a window are trained together, in groups where memory is
short. While the best rate sits on an edge, a further one beyond that edge is trained over the same
samples. The rate of the lowest final held-out KL (or reconstruction error) wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.training.distill import Best, Run

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

    @property
    def tried(self) -> list[dict[str, float | None]]:
        """The rates and their last held-out KL, for a provenance; None where it diverged."""
        return [
            {"learning_rate": rate, "held_out": None if math.isinf(value) else value}
            for rate, value in sorted(self.finals.items())
        ]


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


def further(finals: Mapping[float, float]) -> tuple[float, ...]:
    """The rate to be tried next; none where the best one lies between others, or at the limits."""
    rates, best = sorted(finals), chosen(finals)
    beyond = neighbour(best, -1 if best == rates[0] else 1)
    at_edge = best in (rates[0], rates[-1])
    return (beyond,) if at_edge and LOWEST <= beyond <= HIGHEST else ()


@dataclass
class Sweep:
    """A sweep in progress."""

    first: tuple[float, ...]  # the rates of the first window
    at_once: int  # the most rates that are trained together
    train: Callable[[int, tuple[float, ...]], Trained]  # or resumes, group number (from 0)
    begun: Callable[[int], tuple[float, ...]]  # the rates of a group that was begun earlier
    say: Callable[[str], None]
    groups: list[Trained] = field(default_factory=list)  # the results so far
    best: Best | None = None  # the best translator of all groups

    def run(self) -> Trained:
        """Train until the best rate is none of the outermost ones, or a limit is reached.

        Raises:
            KVLingoError: The training diverged at every rate.
        """
        while rates := self.begun(len(self.groups)) or self._next():
            self.say(f"sweep: training at {', '.join(f'{rate:g}' for rate in rates)}")
            self._take(self.train(len(self.groups), rates))
        finals = self._finals()
        if self.best is None or all(map(math.isinf, finals.values())):
            tried = ", ".join(f"{rate:g}" for rate in sorted(finals))
            raise KVLingoError(
                f"training diverged (the loss is not finite) at every learning rate: {tried}; try "
                "--dtype float32"
            )
        # Where no training is better than its start, that is kept, which has no rate of its own.
        best = self.best if self.best.step else replace(self.best, rate=chosen(finals))
        return Trained(best, joined([(g.finals, g.curve) for g in self.groups]), finals)

    def _finals(self) -> dict[float, float]:
        return {rate: value for group in self.groups for rate, value in group.finals.items()}

    def _next(self) -> tuple[float, ...]:
        """The rates to be trained next: the rest of the window, then one beyond an edge."""
        finals = self._finals()
        left = tuple(rate for rate in self.first if rate not in finals)
        return left[: self.at_once] if left else further(finals)

    def _take(self, found: Trained) -> None:
        """Add a group; of the translators only the best is held."""
        if self.best is None or found.best.held_out < self.best.held_out:
            self.best = found.best
        self.groups.append(replace(found, best=replace(found.best, tensors={})))


def joined(groups: Sequence[tuple[Mapping[float, float], Curve]]) -> Curve:
    """The curves of several groups of rates as one, with a column for each rate, the lowest first.

    ``groups`` has for each group its rates, in the order of its columns, and its curve.
    """
    columns = {rate: (g, i) for g, (rates, _) in enumerate(groups) for i, rate in enumerate(rates)}
    lines: dict[int, dict[int, Mapping[str, Any]]] = {}
    for number, (_, curve) in enumerate(groups):
        for line in curve:
            lines.setdefault(line["step"], {})[number] = line

    def entry(step: int) -> dict[str, Any]:
        found = lines[step]
        first = next(iter(found.values()))
        made: dict[str, Any] = {"step": step}
        if "learning_rates" in first:
            made["learning_rates"] = sorted(columns)
        for name in COLUMNS:
            if name in first:
                ways = ((found.get(g, {}).get(name), i) for _, (g, i) in sorted(columns.items()))
                made[name] = [None if values is None else values[i] for values, i in ways]
        if "tokens" in first:
            made["tokens"] = first["tokens"]  # the same samples in every group
        for name in ("seconds", "spent"):
            if name in first:
                made[name] = round(sum(line[name] for line in found.values()), 3)
        return made

    return [entry(step) for step in sorted(lines)]
