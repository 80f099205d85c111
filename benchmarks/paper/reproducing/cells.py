"""What a number in a table or a figure is a score of, and the grid in which its numbers stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.paper.reproducing.forms import OWN, is_translator
from benchmarks.paper.reproducing.tables import LARGE_TO_SMALL, SMALL_TO_LARGE, Pair, Table, meaning

# Words of a column that do not name who reads.
_WAYS = {"large-to-small": LARGE_TO_SMALL, "small-to-large": SMALL_TO_LARGE}
_MODES = {"off": False, "on": True}
ENDS = ("source", "target")
POINTS = ("whole", "context", "trace")  # what of a prompt is handed over
# Maps that mix heads of several layers of a Qwen3 model of another depth were trained with this
# seed alone (table "lrs", captions of appendix "Cross-layer"); these others with the first alone.
WIDE_SEED, ONCE = 56, ("wide_mlp", "mixing_mlp", "mixing+post_rope")
OTHER_DEPTH = (("Qwen3-0.6B", "Qwen3-8B"), ("Qwen3-1.7B", "Qwen3-4B"))


@dataclass(frozen=True)
class Cell:
    """One score.

    Attributes:
        pair: The small and the large model.
        way: ``small to large`` or ``large to small``.
        what: The benchmark, perhaps with its rung: ``ruler 4k``.
        who: ``small`` or ``large`` (a model's own reading), a baseline, or a translator's form.
        thinking: Whether answers reason.
        point: What is handed over: the ``whole`` prompt, its ``context`` alone, or the prompt with
            the source's reasoning (``trace``).
        seeds: The seeds of the trainings over which it is averaged.
    """

    pair: Pair
    way: str
    what: str
    who: str
    thinking: bool = False
    point: str = "whole"
    seeds: tuple[int, ...] = ()

    @property
    def models(self) -> tuple[str, str]:
        """The source and the target; a model that reads by itself is its own target."""
        small, large = self.pair
        if self.who in OWN:
            own = small if self.who == "small" else large
            return own, own
        return (small, large) if self.way == SMALL_TO_LARGE else (large, small)

    @property
    def benchmark(self) -> str:
        """The benchmark without its rung."""
        return self.what.split(" ")[0]

    @property
    def rung(self) -> str:
        """The rung, such as ``4k``; empty for all of them."""
        return self.what.partition(" ")[2]


@dataclass(frozen=True)
class Row:
    """A row: the words that name it, its cells, and the paper's values where it has any."""

    names: tuple[str, ...]
    cells: tuple[Cell | None, ...]
    paper: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Grid:
    """The cells of an entry as they are laid out."""

    titles: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def cells(self) -> Iterator[Cell]:
        """All cells, each once."""
        found = (cell for row in self.rows for cell in row.cells if cell is not None)
        yield from dict.fromkeys(found)


def said_by(column: str) -> dict[str, Any]:
    """What a column says of its cells: ``closed``, ``on mixing``, ``small-to-large arc closed``.

    The last word says who reads; ``mixing@context`` hands over the context alone.
    """
    *words, last = column.split()
    who, _, point = last.partition("@")
    said: dict[str, Any] = {"who": who, "point": point or "whole"}
    for word in words:
        if word in _WAYS:
            said["way"] = _WAYS[word]
        elif word in _MODES:
            said["thinking"] = _MODES[word]
        else:
            said["what"] = word
    return said


def cell_of(said: dict[str, Any], seeds: tuple[int, ...], suffix: str = "") -> Cell | None:
    """The cell of which ``said`` tells; None if that is not all that a cell needs."""
    if not {"pair", "way", "what", "who"} <= said.keys():
        return None
    small, large = said["pair"]
    if said["who"] == "source" and said["what"] == "compute":
        return None  # it computes nothing at a switch
    if said["who"] in ENDS:
        ends = OWN if said["way"] == SMALL_TO_LARGE else OWN[::-1]
        said = {**said, "who": ends[ENDS.index(said["who"])]}
    named = {**said, "pair": (small + suffix, large + suffix)}
    # Which way goes unsaid for a model's own reading, so that both ways share its score.
    if said["who"] in OWN:
        named["way"] = SMALL_TO_LARGE
    return Cell(**named, seeds=_seeds_of(said["who"], named["pair"], seeds))


def _seeds_of(who: str, pair: Pair, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds of a reader's trainings: those that the paper has of what ``seeds`` names."""
    if not is_translator(who) or who.startswith("closed"):
        return ()
    if pair in OTHER_DEPTH and re.match(r"mixing\b.*\+nu\d", who):
        return (WIDE_SEED,)
    return seeds[:1] if who.startswith(ONCE) else seeds


def of_table(
    table: Table,
    columns: tuple[str, ...],
    default: dict[str, Any],
    seeds: tuple[int, ...],
    suffix: str,
) -> Grid:
    """The grid of a table of scores: its rows' words and ``columns`` say which score stands where.

    Args:
        table: The paper's table.
        columns: For each column of values, what :func:`said_by` understands; empty for a column
            that is no score. Where the rows say who reads, as ``rows`` of ``default``, the columns
            say the rest.
        default: What neither says.
        seeds: The seeds of trainings.
        suffix: The ending of the models' names that the table leaves out.
    """
    who = default.get("rows", ())
    shared = {name: value for name, value in default.items() if name != "rows"}
    rows = []
    for index in range(len(table.rows)):
        told = shared | meaning(table.names(index))
        if who and who[index]:
            told |= {"who": who[index]}
        rung = next((n for n in table.names(index)[1:] if n in ("4k", "8k", "16k", "32k")), None)
        if rung and "what" in shared:
            told["what"] = f"{shared['what']} {rung}"
        cells = []
        for column in columns:
            said = said_by(column) if column and not who else _without_who(column)
            cells.append(cell_of(told | said, seeds, suffix) if column else None)
        names = tuple(name for name in table.names(index) if name)
        rows.append(Row(names, tuple(cells), table.values(index)))
    titles = tuple(title or "" for title in table.columns[: table.labels])
    return Grid(titles, table.columns[table.labels :], tuple(rows))


def _without_who(column: str) -> dict[str, Any]:
    """What a column says where its row says who reads."""
    said = said_by(f"{column} nobody") if column else {}
    said.pop("who", None)
    return said


def of_figure(
    pairs: tuple[Pair, ...],
    ways: tuple[str, ...],
    what: tuple[str, ...],
    who: tuple[str, ...],
    modes: tuple[str, ...],
    seeds: tuple[int, ...],
) -> Grid:
    """The grid behind a figure of scores: a row for each pair, way and benchmark."""
    columns = tuple(
        f"{mode} {reader}" if len(modes) > 1 else reader for mode in modes for reader in who
    )
    rows = []
    for pair, way, benchmark in product(pairs, ways, what):
        cells = []
        for mode, reader in product(modes, who):
            said = said_by(f"{mode} {reader}")
            cells.append(cell_of(said | {"pair": pair, "way": way, "what": benchmark}, seeds))
        rows.append(Row((f"{pair[0]}, {pair[1]}", way, benchmark), tuple(cells)))
    return Grid(("pair", "way", "benchmark"), columns, tuple(rows))
