"""Entries that are read off the curves of trainings: held-out KL by step, rate, norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.tables import (
    LARGE_TO_SMALL,
    SMALL_TO_LARGE,
    Pair,
    meaning,
    tables,
)
from benchmarks.paper.reproducing.trained import Wanted, trained
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.training.checkpoints import log_of, read_log

STEPS = 5000  # of the paper's stage 2
BRANCH = "linear + MLP"
# The columns of table "lrs"; of Gemma the second is chosen greedily.
HEAD_WISE_FORMS = ("head_wise", *(f"head_wise+greedy+nu{nu}" for nu in (2, 4, 8)))
R2_FORMS = ("mixing", "mixing+r2", "mixing+r2+nu2", "mixing+r2+nu4", *HEAD_WISE_FORMS)
GREEDY_FORMS = ("mixing", "mixing+greedy", *R2_FORMS[2:])
NORM_NAMES = {
    "Frobenius (uniform)": "frobenius",
    **{f"sink × {n}": f"sink_{n}" for n in (2, 4, 8, 16, 32)},
    "attention mass": "attention_mass",
    "attention Fisher": "attention_fisher",
}


def make(entry: Entry, work: Work) -> Result:
    """The result of an entry whose numbers are a training's."""
    if entry.label == "app:tab:moemlp":
        return _branches(entry, work)
    if entry.label == "tab:lrs":
        return _rates(entry, work)
    if entry.label == "app:tab:norms":
        return _norms(entry, work)
    return _curves(entry, work)


def held_out(curve: Sequence[dict[str, Any]], share: float) -> float | None:
    """The lowest held-out KL of a training's rates at ``share`` of its steps; None if beyond it."""
    last = curve[-1]["step"]
    line = min(curve, key=lambda line: abs(line["step"] - share * last))
    return min((kl for kl in line["held_out"] if kl is not None), default=None)


def rate(text: str) -> float:
    """A learning rate as the tables print it: ``3×10^-5`` or ``10^-4``."""
    factor, _, power = text.rpartition("10^")
    return float(f"{factor.rstrip('×') or 1}e{power}")


def _curve(work: Work, pair: Pair, one: Wanted) -> list[dict[str, Any]]:
    return read_log(log_of(trained(work, pair, one)))


def _branches(entry: Entry, work: Work) -> Result:
    """Linear maps, and linear maps with an MLP beside them (table "moemlp")."""
    table = tables()[entry.label]
    lines = []
    for row in range(len(table.rows)):
        names = table.names(row)
        said = meaning(names)
        small, large = said["pair"]
        ends = (small, large) if said["way"] == SMALL_TO_LARGE else (large, small)
        base = "linear_mlp" if names[1] == BRANCH else "mixing"
        one = Wanted(*ends, f"{base}+nu3+rate{rate(names[3]):g}", entry.seeds[0])
        folder = trained(work, said["pair"], one)
        curve = read_log(log_of(folder))
        shares = [step / STEPS for step in entry.extra["steps"]]
        hours = f"{curve[-1]['seconds'] / 3600:.2g} h"
        values: list[Value] = [*(held_out(curve, share) for share in shares), hours]
        shown = (names[0], names[1], f"{_numbers(folder) / 1e6:.3g}M", names[3])
        lines.append(Line(shown, tuple(values), table.values(row)))
    titles = ("way", *table.columns[: table.labels])
    notes = ("the paper's times are of 8 B200 GPUs; its parameters are of its own models",)
    return Result(titles, table.columns[table.labels :], tuple(lines), notes)


def _numbers(folder: Any) -> int:
    """The numbers of a translator."""
    _, weights = translator_folder.read(folder)
    return sum(int(array.size) for array in weights.arrays.values())


def _rates(entry: Entry, work: Work) -> Result:
    """Table "lrs": the rate that a sweep chooses, for each number that the paper has."""
    table = tables()[entry.label]
    lines = []
    for row in range(len(table.rows)):
        names, paper = table.names(row), table.values(row)
        said = meaning(names)
        small, large = said["pair"]
        known = {SMALL_TO_LARGE: (small, large), LARGE_TO_SMALL: (large, small)}
        ways = [known[said["way"]]] if "way" in said else list(known.values())
        chosen = GREEDY_FORMS if small.startswith("gemma") else R2_FORMS
        values: list[Value] = []
        for form, theirs in zip(chosen, paper, strict=True):
            rates = [_rate(work, said["pair"], Wanted(*ends, f"{form}+sweep", entry.seeds[0]))
                     for ends in (ways if theirs is not None else ())]  # fmt: skip
            values.append(", ".join(dict.fromkeys(rates)) or None)
        lines.append(Line(tuple(n for n in names if n), tuple(values), paper))
    return Result(table.columns[:2], table.columns[2:], tuple(lines))


def _rate(work: Work, pair: Pair, one: Wanted) -> str:
    """The learning rate that a translator was made with."""
    config = translator_folder.read_config(trained(work, pair, one))
    return f"{config.provenance['learning_rate']:.0e}"


def _norms(entry: Entry, work: Work) -> Result:
    """Closed forms of each norm, and what stage 2 makes of them (table "norms")."""
    table = tables()[entry.label]
    lines = []
    for row in range(len(table.rows)):
        name = table.names(row)[1]
        curve = _curve(work, _base(entry), _normed(entry, work, NORM_NAMES[name]))
        values = (held_out(curve, 0.0), held_out(curve, 1.0))
        lines.append(Line((name,), values, table.values(row)))
    notes = (
        "both columns are of one set of conversations here; the paper's are of two, to be read "
        "down and not across",
    )
    return Result(table.columns[:1], table.columns[1:], tuple(lines), notes)


def _curves(entry: Entry, work: Work) -> Result:
    """Held-out KL over steps from several norms (figure "norms")."""
    norms = entry.extra["norms"]
    curves = [_curve(work, _base(entry), _normed(entry, work, norm)) for norm in norms]
    steps = [line["step"] for line in curves[0]]
    lines = [
        Line((str(step),), tuple(held_out(curve, step / max(steps[-1], 1)) for curve in curves))
        for step in steps
    ]
    return Result(("step",), tuple(norms), tuple(lines))


def _base(entry: Entry) -> Pair:
    """The small and the large base model."""
    small, large = entry.pairs[0]
    return small + entry.suffix, large + entry.suffix


def _normed(entry: Entry, work: Work, norm: str) -> Wanted:
    """The translator from the large to the small model that begins with a norm's closed form."""
    small, large = _base(entry)
    steps = entry.extra["steps"]
    return Wanted(large, small, f"mixing+norm_{norm}+steps{steps}", entry.seeds[0])
