"""What the paper's captions say of their numbers, beside what the entries ask.

``captions.jsonl`` is written by ``benchmarks.paper.reproducing.captions`` from the paper's LaTeX.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from benchmarks.paper.evaluation.suites import benchmark
from benchmarks.paper.reproducing import held_in_turn, statistics, texts
from benchmarks.paper.reproducing.captions import plain, said
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.comparisons import cells_of_families
from benchmarks.paper.reproducing.entries import BY_LABEL, ENTRIES, FAR, Entry
from benchmarks.paper.reproducing.scores import lengths_of, row_of, rungs_of
from benchmarks.paper.reproducing.tables import RUNGS
from benchmarks.paper.reproducing.trained import wanted

LINES = (Path(__file__).with_name("captions.jsonl")).read_text().splitlines()
CAPTIONS = {told["label"]: told for told in map(json.loads, LINES)}
DESCRIBED = {entry.label for entry in ENTRIES if entry.maker == "protocol"}
# Said of the rates that a table shows, which are swept at seed 42 here (a note of the page).
ELSEWHERE = {("tab:lrs", "seeds")}


def cells_of(entry: Entry) -> list[Cell]:
    if entry.maker == "seeds":
        return cells_of_families(entry)
    return list(entry.grid().cells()) if entry.maker == "scores" else []


def spanned(cells: list[Cell], what: str) -> str:
    """The rungs of a benchmark that cells are of, from the first to the last."""
    rungs = {rung for cell in cells if cell.benchmark == what for rung in rungs_of(cell.rung)}
    known = [r for r in RUNGS if r in rungs] if rungs else {"ruler": RUNGS[1:]}.get(what, RUNGS)
    return f"{known[0]}-{known[-1]}"


def asked(entry: Entry) -> dict[str, Any]:
    """The quantities of an entry, in the words of captions."""
    cells = cells_of(entry)
    scored = [cell for cell in cells if cell.what not in ("mean", "compute")]
    off, on = ({c.benchmark for c in scored if c.thinking == mode} for mode in (False, True))
    modes = {cell.thinking for cell in scored}
    averaged = entry.extra.get("sets", {}).get(FAR, entry.what)
    window = entry.extra.get("window", texts.WINDOW)
    found: dict[str, Any] = {
        "mean": sorted({what.split()[0] for what in averaged}),
        "means": {name: sorted(of) for name, of in entry.means.items()},
        "ruler": spanned(cells, "ruler"),
        "longmemeval": spanned(cells, "longmemeval"),
        "modes": [mode for mode in ("off", "on") if (mode == "on") in modes] or list(entry.modes),
        "on": sorted(on - off),
        "seeds": sorted({one.seed for cell in cells for one in wanted(cell)}) or [*entry.seeds],
        "documents": texts.WINDOWS, "prefix": window[0], "continuation": window[1],
        "conversations": held_in_turn.CONVERSATIONS, "questions": benchmark("xquad").draw,
        "capture": statistics.CKA["capture"], "cka_tokens": statistics.CKA["tokens"],
        "signed": texts.difference(-1.0, 1.0) == -2.0,
    }  # fmt: skip
    if entry.suite != "paper":
        row = row_of("boolq", entry)
        found |= {"shots": row.shots, "examples": row.limit}
    else:
        found["tokens"] = row_of("mmlu_pro", entry).tokens(False)
        found["rubric"] = row_of("repliqa", entry).name
    for name in ("arc_challenge", "mmlu_pro"):
        found[name] = entry.how.get(name, {}).get("items")
    return found


def told_of(label: str) -> dict[str, Any]:
    """What a caption states, with what it takes from the one that it refers to."""
    told = CAPTIONS[label]
    if (like := told.get("like")) in CAPTIONS:
        kept = ("mean", "ruler", "longmemeval", "rubric", "tokens", "modes")
        own = {"rubric"} if like.startswith("tab:qwen3") else set(kept)  # it has lengths of its own
        told = {name: told_of(like)[name] for name in own & told_of(like).keys()} | told
    return {name: value for name, value in told.items() if name not in ("kind", "label", "like")}


def differing(entry: Entry) -> set[str]:
    """The quantities of a caption that its entry does not ask."""
    ours, told = asked(entry), told_of(entry.label)
    if entry.maker in ("curves", "lengths"):  # of trainings alone
        told = {name: told[name] for name in told.keys() & {"seeds"}}
    other = {name for name, value in told.items() if ours[name] != value}
    return {name for name in other if (entry.label, name) not in ELSEWHERE}


@pytest.mark.parametrize("label", [label for label in CAPTIONS if label not in DESCRIBED])
def test_an_entry_asks_what_its_caption_says(label: str) -> None:
    entry = BY_LABEL[label]
    assert not differing(entry), (asked(entry), told_of(label))


@pytest.mark.parametrize(
    ("label", "changes", "noticed"),
    [
        ("tab:gemma4", {"how": {}}, {"ruler", "on"}),
        ("tab:xtok", {"how": {}}, {"longmemeval", "tokens", "rubric"}),
        ("tab:splitjoint", {"how": {}}, {"shots"}),
        ("tab:scratch", {"suite": "base"}, {"shots"}),
        ("tab:scratchppl", {"extra": {}}, {"continuation"}),
        ("tab:mla", {"seeds": (42, 43)}, {"seeds"}),
        ("tab:droidspeak_sweep", {"how": {}}, {"arc_challenge", "mmlu_pro"}),
        ("fig:xdepth_all_1", {"by": {}}, {"seeds"}),
        ("app:fig:moe", {"means": {}}, {"means"}),
        ("fig:gemma-4", {"what": ("mmlu_pro", "ruler")}, {"mean", "ruler"}),
        ("app:fig:reasoningboost", {"modes": ("off",)}, {"modes"}),
    ],
)
def test_what_asks_otherwise_is_noticed(
    label: str, changes: dict[str, Any], noticed: set[str]
) -> None:
    assert differing(replace(BY_LABEL[label], **changes)) == noticed


def test_captions_are_read() -> None:
    """A planted caption, with the LaTeX of the paper's."""
    told = said(plain(
        r"Mean score over MMLU-Pro, \mbox{ARC-C} and RULER over $4$/$8$/$16$k, reasoning-off, "
        r"except GSM8K. Three-seed mean of seed $42$; at $\nu=2$ seed~56; Table~\ref{tab:xtok} "
        r"reports MT-Bench-101 reasoning-on. Metrics as in Table~\ref{tab:xdepth}; $5$-shot."
    ))  # fmt: skip
    assert told == {
        "mean": ["arc_challenge", "gsm8k", "mmlu_pro", "ruler"], "ruler": "4k-16k",
        "on": ["gsm8k"], "seeds": [42, 56], "shots": 5, "like": "tab:xdepth",
    }  # fmt: skip


def test_lengths_that_are_asked() -> None:
    """RULER's that a cell is of; LongMemEval's from the shortest, which chooses its questions."""
    ruler, memory = benchmark("ruler"), benchmark("longmemeval")
    assert lengths_of(ruler, {"4k-16k"}) == [4096, 8192, 16384]
    assert lengths_of(ruler, {"4k", "32k"}) == [4096, 32768]
    assert lengths_of(ruler, {""}) == [4096, 8192, 16384, 32768]
    assert lengths_of(memory, {"oracle", "32k"}) == [8192, 16384, 32768]
    assert lengths_of(memory, {"oracle-16k"}) == [8192, 16384]
