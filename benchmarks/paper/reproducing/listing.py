"""What there is to reproduce, what each takes, and what was reproduced already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import BY_LABEL, ENTRIES, Entry
from benchmarks.paper.reproducing.results import kept
from benchmarks.paper.reproducing.tables import Pair, meaning, tables
from benchmarks.paper.reproducing.trained import wanted

TINY_ROOM = "tiny"
JUDGED = ("repliqa", "longmemeval", "mt_bench_101", "multichallenge")
MACHINES = {
    "tab:cost": "an NVIDIA GPU",
    "app:tab:vllm": "an NVIDIA GPU and vLLM",
    "app:tab:moespeed": "Apple silicon",
    "app:tab:budget": "an NVIDIA GPU, or Apple silicon for our own table",
    "fig:cost": "an NVIDIA GPU",
}


@dataclass(frozen=True)
class Listed:
    """One entry of the list.

    Attributes:
        label, title, maker: The entry's.
        models: The released models that it needs.
        trainings: How many translators it needs.
        benchmarks: The benchmarks that it scores.
        judge: Whether a judge scores some of them.
        machine: What it must run on; empty for any that holds both models.
        state: What there is of it in the room.
    """

    label: str
    title: str
    maker: str
    models: tuple[str, ...]
    trainings: int
    benchmarks: tuple[str, ...]
    judge: bool
    machine: str
    state: str

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        parts = []
        if self.models:
            parts.append(", ".join(self.models))
        if self.trainings:
            parts.append(_count(self.trainings, "training"))
        if self.benchmarks:
            parts.append(_count(len(self.benchmarks), "benchmark"))
        if self.judge:
            parts.append("a judge")
        if self.machine:
            parts.append(self.machine)
        return "; ".join(parts) or "nothing"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(room: Path) -> list[Listed]:
    """Every table and figure of the paper, in its order."""
    return [_listed(entry, room) for entry in ENTRIES]


def named(labels: Sequence[str]) -> list[Entry]:
    """Entries by their labels.

    Raises:
        ValueError: There is no such label; close ones are named.
    """
    from difflib import get_close_matches

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
    if entry.label in tables() and entry.maker not in ("seeds", "missing", "protocol"):
        table = tables()[entry.label]
        rows = (meaning(table.names(row)) for row in range(len(table.rows)))
        found += [row["pair"] for row in rows if "pair" in row and "scratch" not in str(row)]
    return [(a + entry.suffix, b + entry.suffix) for a, b in dict.fromkeys(found)]


def cells_of(entry: Entry) -> list[Cell]:
    """The scores of an entry; none for entries of another kind."""
    return list(entry.grid().cells()) if entry.maker == "scores" else []


def trainings_of(entry: Entry) -> int:
    """How many translators an entry needs; a sweep counts once."""
    if entry.maker == "scores":
        return len({one for cell in cells_of(entry) for one in wanted(cell)})
    each = len(entry.who) * len(entry.seeds)
    if entry.maker == "perplexity":
        return len(tables()[entry.label].rows) * each
    if entry.maker in ("turns", "signs"):
        return 2 * len(entry.pairs) * each
    if entry.maker == "seeds":
        families = entry.extra.get("families", {}).values()
        pairs = [pair for pairs, readers, _ in families for pair in pairs for _ in readers]
        return 2 * (len(pairs) or 2 * len(entry.extra["sets"])) * len(entry.seeds)
    if entry.maker == "curves":
        if entry.label == "tab:lrs":
            rows = tables()[entry.label].rows
            return sum(cell is not None for row in rows for cell in row[3:])
        return len(entry.extra.get("norms") or tables()[entry.label].rows)
    return 0


# The options that matter to entries of each maker, beside those that matter to all.
_MODELS = frozenset(("models", "data"))
_TRAINED = _MODELS | {"translators", "text", "steps", "device", "seeds"}
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
        if set(_scored(entry)) & set(JUDGED):
            used.add("judge")
    return [name for name in given if name not in used]


def _scored(entry: Entry) -> list[str]:
    """The benchmarks of an entry."""
    found = [c.benchmark for c in cells_of(entry) if c.what not in ("mean", "compute")]
    return list(dict.fromkeys(found or (name.split(" ")[0] for name in entry.what)))


def _listed(entry: Entry, room: Path) -> Listed:
    scored = _scored(entry)
    models = dict.fromkeys(model for pair in pairs_of(entry) for model in pair)
    return Listed(
        entry.label,
        entry.title,
        entry.maker,
        tuple(models),
        trainings_of(entry),
        tuple(scored),
        bool(set(scored) & set(JUDGED)),
        MACHINES.get(entry.label, ""),
        state(entry, room),
    )


def state(entry: Entry, room: Path) -> str:
    """The status of an entry: reproduced, made on tiny models, or what it needs."""
    if entry.maker == "missing":
        return f"needs {entry.why}"
    if entry.maker == "protocol":
        return f"described in {entry.why}"
    if (record := kept(room, entry)) is not None:
        sizes = ", ".join(f"{name} {number}" for name, number in record["size"].items())
        return f"done {record['date']}" + (f" (at most {sizes})" if sizes else "")
    if kept(room / TINY_ROOM, entry) is not None:
        return "done on tiny models"
    return "not done"
