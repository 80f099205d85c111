"""What there is to reproduce, what each takes, and what was reproduced already."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.reproducing import sizes
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.comparisons import cells_of_families
from benchmarks.paper.reproducing.entries import BY_LABEL, ENTRIES, Entry
from benchmarks.paper.reproducing.models import PAGE, made_by
from benchmarks.paper.reproducing.results import kept
from benchmarks.paper.reproducing.tables import Pair, meaning, tables
from benchmarks.paper.reproducing.trained import wanted
from benchmarks.paper.training.sweep import WIDTH as WIDTH_OF_SWEEP

ALL = "all"
TINY_ROOM, TINY_DONE = "tiny", "done on tiny models"
NO_BREAK = "\N{NO-BREAK SPACE}"  # within an entry of the overview
JUDGED = ("repliqa", "longmemeval", "mt_bench_101", "multichallenge")
MACHINES = {
    "tab:cost": "an NVIDIA GPU",
    "app:tab:vllm": "an NVIDIA GPU and vLLM",
    "app:tab:moespeed": "Apple silicon",
    "app:tab:budget": "an NVIDIA GPU, or Apple silicon for our own table",
    "fig:cost": "an NVIDIA GPU",
}


# Letters of the overview, beside the trainings or hours of a label.
LEGEND = (
    "26t: trainings, or ~9h: hours by a step measured in --room; + done, - done tiny.",
    "J a judge, P plain text, N an NVIDIA GPU, V vLLM, M Apple silicon. GB: weights;",
    "gated: accept on the Hub, `hf auth login`. In full: --list LABEL.",
)
WIDTH = 80


@dataclass(frozen=True)
class Listed:
    """One entry of the list.

    Attributes:
        label, title, maker: The entry's.
        models: The released models that it needs.
        gigabytes: Their weights together.
        gated: Those of them whose licence must be accepted on the Hub.
        trainings: How many translators it needs; a sweep counts once.
        hours: Of these, by a step that was measured in the room; None if none was.
        benchmarks: The benchmarks that it scores.
        judge: Whether a judge scores some of them.
        data: What else it reads.
        machine: What it must run on; empty for any that holds both models.
        state: What there is of it in the room.
        differs: How its numbers are made otherwise than the paper's.
    """

    label: str
    title: str
    maker: str
    models: tuple[str, ...]
    gigabytes: float
    gated: tuple[str, ...]
    trainings: int
    hours: float | None
    benchmarks: tuple[str, ...]
    judge: bool
    data: tuple[str, ...]
    machine: str
    state: str
    differs: tuple[str, ...]

    @property
    def whole(self) -> list[tuple[str, str]]:
        """All there is to say of it, by name."""
        weights = f"{self.gigabytes:.0f} GB" if self.gigabytes else ""
        spent = "hours are known after a first training" if self.hours is None else ""
        found = {
            "command": self.command,
            "models": ", ".join((*self.models, weights)) if self.models else "",
            "gated": f"{', '.join(self.gated)}: accept on the Hub" if self.gated else "",
            "made": f"{', '.join(self.made)}: as {PAGE} tells" if self.made else "",
            "trainings": f"{self.trainings}; {spent or f'about {self.hours:.3g} hours'}"
            if self.trainings else "",
            "benchmarks": ", ".join(self.benchmarks),
            "judge": "--judge MODEL (the paper's is Qwen3.6-27B)" if self.judge else "",
            "data": "; ".join(self.data),
            "machine": self.machine,
            "differs": "; ".join(self.differs),
            "state": self.state,
        }  # fmt: skip
        return [(name, text) for name, text in found.items() if text]

    @property
    def made(self) -> tuple[str, ...]:
        """Those of its models that nobody released."""
        return tuple(filter(made_by, self.models))

    @property
    def command(self) -> str:
        """What makes it; empty if nothing is measured."""
        if self.maker == "protocol":
            return ""
        models = " --models FOLDER" * bool(self.made)
        judge = " --judge MODEL" * self.judge
        text = " --text FILE" * any("--text" in each for each in self.data)
        files = "".join(f" {each}" for each in self.data if "--task-data" in each)
        return f"python -m benchmarks.paper {self.label}{models}{judge}{text}{files}"

    @property
    def short(self) -> str:
        """It in a few letters (``LEGEND``)."""
        spent = f"~{self.hours:.3g}h" if self.hours else f"{self.trainings}t" * bool(self.trainings)
        machine = {"an": "N", "Ap": "M"}.get(self.machine[:2], "") + "V" * ("vLLM" in self.machine)
        letters = "J" * self.judge + "P" * any("--text" in each for each in self.data) + machine
        done = "-" if self.state == TINY_DONE else "+" * self.state.startswith("done")
        return " ".join(filter(None, (self.label, spent, letters, done)))


def listed(room: Path) -> list[Listed]:
    """Every table and figure of the paper, in its order."""
    second = sizes.seconds_per_work(room)
    return [_listed(entry, room, second) for entry in ENTRIES]


def overview(rows: Sequence[Listed]) -> list[str]:
    """All entries in few lines of 80 columns, those of the same models together."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.maker == "protocol":
            name = "nothing is measured"
        elif row.made:
            name = "of models that are to be made (made-models.md)"
        else:
            by_size = sorted(row.models, key=sizes.gigabytes)
            short = [model.removeprefix("Qwen3-") for model in by_size]
            many = f"{len(short)} models" if len(short) > 4 else " ".join(short)
            name = f"{many}, {row.gigabytes:.0f} GB{', gated' * bool(row.gated)}"
        groups.setdefault(name, []).append(row.short)
    lines = []
    for name, found in groups.items():
        text = f"{name}: {', '.join(each.replace(' ', NO_BREAK) for each in found)}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in (*lines, *LEGEND)]


def named(labels: Sequence[str]) -> list[Entry]:
    """Entries by their labels; ``all`` alone stands for all that are measured.

    Raises:
        ValueError: There is no such label; close ones are named.
    """
    from difflib import get_close_matches

    if [*labels] == [ALL]:
        return [entry for entry in ENTRIES if entry.maker != "protocol"]
    found = []
    for label in labels:
        if label not in BY_LABEL:
            close = get_close_matches(label, BY_LABEL, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "see `reproduce --list`"
            raise ValueError(f"the paper has no table or figure {label!r}; {hint}")
        found.append(BY_LABEL[label])
    return found


def pairs_of(entry: Entry) -> list[Pair]:
    """The pairs of models of an entry, each once."""
    if entry.maker == "scores":
        return list(dict.fromkeys(cell.pair for cell in entry.grid().cells()))
    found = [*entry.pairs]
    if entry.label in tables() and entry.maker not in ("seeds", "protocol"):
        table = tables()[entry.label]
        rows = (meaning(table.names(row)) for row in range(len(table.rows)))
        found += [row["pair"] for row in rows if "pair" in row and "scratch" not in str(row)]
    return [(a + entry.suffix, b + entry.suffix) for a, b in dict.fromkeys(found)]


def cells_of(entry: Entry) -> list[Cell]:
    """The scores of an entry; none for entries of another kind."""
    if entry.maker == "seeds":
        return cells_of_families(entry)
    return list(entry.grid().cells()) if entry.maker == "scores" else []


def trainings_of(entry: Entry, sweeps: bool = False) -> int:
    """How many translators an entry trains beyond a closed form.

    A sweep counts once, or ``sweeps`` counts each of its first five rates.
    """
    if cells := cells_of(entry):
        every = {one for c in cells for one in wanted(c) if not one.form.startswith("closed")}
        return sum(WIDTH_OF_SWEEP if sweeps and o.swept and not o.first else 1 for o in every)
    who = [one for one in entry.who if one not in ("target", "closed")]
    each = len(who) * len(entry.seeds)
    if entry.maker == "perplexity":
        return 2 * len(pairs_of(entry)) * each
    if entry.maker in ("turns", "signs"):
        return 2 * len(entry.pairs) * each
    if entry.maker == "curves":
        if entry.label == "tab:lrs":
            rows = tables()[entry.label].rows
            return sum(cell is not None for row in rows for cell in row[3:])
        return len(entry.extra.get("norms") or tables()[entry.label].rows)
    return 0


# The options that matter to entries of each maker, beside those that matter to all.
_MODELS = frozenset(("models", "data"))
_TRAINED = _MODELS | {"translators", "text", "steps", "device", "processes", "seeds"}
_SCORED = _TRAINED | {"task_data", "items"}
USED: dict[str, frozenset[str]] = {
    "scores": _SCORED,
    "seeds": _SCORED,
    "signs": _SCORED,
    "turns": _SCORED,
    "perplexity": _SCORED,
    "curves": _TRAINED,
    "statistics": _MODELS,
    "lengths": _MODELS,
}


def unused(entries: Sequence[Entry], given: Sequence[str]) -> list[str]:
    """Those of the ``given`` options that change nothing for any of the entries."""
    used: set[str] = set()
    for entry in entries:
        used |= USED.get(entry.maker, frozenset())
        if entry.extra.get("made"):
            used.add("text")
        if set(_scored(entry)) & set(JUDGED):
            used |= {"judge", "judge_prompts"}
    return [name for name in given if name not in used]


def _scored(entry: Entry) -> list[str]:
    """The benchmarks of an entry."""
    found = [c.benchmark for c in cells_of(entry) if c.what not in ("mean", "compute")]
    return list(dict.fromkeys(found or (name.split(" ")[0] for name in entry.what)))


def _listed(entry: Entry, room: Path, second: float | None) -> Listed:
    scored, pairs, cells = _scored(entry), pairs_of(entry), cells_of(entry)
    models = tuple(dict.fromkeys(model for pair in pairs for model in pair))
    trainings = trainings_of(entry)
    return Listed(
        entry.label,
        entry.title,
        entry.maker,
        models,
        sum(map(sizes.gigabytes, models)),
        tuple(model for model in models if model in sizes.GATED),
        trainings,
        sizes.hours(pairs, trainings_of(entry, sweeps=True), second),
        tuple(scored),
        bool(set(scored) & set(JUDGED)),
        tuple(sizes.data_of(entry, cells, trainings)),
        MACHINES.get(entry.label, ""),
        state(entry, room),
        entry.differs,
    )


def state(entry: Entry, room: Path) -> str:
    """The status of an entry: reproduced, made on tiny models, or what it needs."""
    if entry.maker == "protocol":
        return f"described in {entry.why}"
    if (record := kept(room, entry)) is not None:
        sizes = ", ".join(f"{name} {number}" for name, number in record["size"].items())
        return f"done {record['date']}" + (f" (at most {sizes})" if sizes else "")
    if kept(room / TINY_ROOM, entry) is not None:
        return TINY_DONE
    return "not done"
