"""The spread over seeds beside the error over items: the paper's own rows, NumPy, and the verb."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.commands import run
from benchmarks.paper.reproducing import comparisons
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import BY_LABEL, GEMMA3, LARGE, SMALL
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny
from tests.support.fixtures import Folders, Models, Patch, Printed

TALKS = [
    {"messages": talk.conversation()} for talk in dialogues.held_out(4, facts=(2, 3), questions=2)
]


def test_tables_are_numpys(monkeypatch: Patch) -> None:
    """Medians over a family's cells, and means over benchmarks, seed by seed."""
    rng, drawn = np.random.default_rng(0), dict[Cell, np.ndarray]()

    def planted(asked: list[Cell], *rest: object) -> dict[Cell, list[Mean]]:
        for cell in asked:
            drawn.setdefault(cell, rng.uniform(size=3))
        return {cell: [Mean(v, v / 10, 5) for v in drawn[cell]] for cell in asked}

    monkeypatch.setattr(comparisons.scores, "by_seed", planted)
    table = comparisons.make(BY_LABEL["tab:seedsd"], Work(Path("room")))
    rows = {line.names[0]: line.values for line in table.lines}
    rulers = np.array([v for c, v in drawn.items() if (c.pair in (SMALL, LARGE))
                       and c.benchmark == "ruler"])  # fmt: skip
    assert len(rulers) == 2 * 2 * 2 * 4 * 2  # pairs, ways, translators, rungs, modes
    assert rows["RULER"][0] == pytest.approx(np.median(rulers.std(axis=1, ddof=1)))
    assert rows["RULER"][1] == pytest.approx(np.median(rulers[:, 0]) / 10)
    assert rows["CoQA"][4] is not None and rows["CoQA"][6] is None
    drawn.clear()
    first = comparisons.make(BY_LABEL["tab:seedsets"], Work(Path("room"))).lines[-1]
    several = np.array([v for cell, v in drawn.items() if (cell.pair, cell.way, cell.who) == (
        GEMMA3, "small to large", "mixing+greedy")])  # fmt: skip
    assert several.shape == (11, 3)  # the rows of the paper's table
    seed, middle, *others = first.values
    means = several.mean(axis=0)
    assert [seed.value, *others] == pytest.approx(means)  # type: ignore[union-attr]
    assert (middle.value, middle.error) == pytest.approx(  # type: ignore[union-attr]
        (means.mean(), means.std(ddof=1))
    )


def test_eval_shows_both(
    models: Models, folders: Folders, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    """Each seed as it is alone, from a journal too; one that knows averages alone is redone."""
    monkeypatch.setenv("COLUMNS", "200")
    pair = models["dense"], models["wide"]
    places = []
    for i in range(3):
        made = kv.fit(*pair, [Sample(tuple(tiny.random_tokens(90 + i)), ())])
        places.append(str(made.save(tmp_path / f"t{i}")))
    data, record, journal = (tmp_path / name for name in ("talks.jsonl", "r.jsonl", "s.jsonl"))
    data.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    line = ["eval", "--source", str(folders["dense"]), "--target", str(folders["wide"]), "--data",
            str(data), "--tasks", "continuation", "--baselines", "none", "--out", str(journal),
            "--json", str(record), "--limit", "4"]  # fmt: skip

    def results(*more: str) -> dict[str, Any]:
        record.unlink(missing_ok=True)
        assert run([*line, *more]) == 0
        return json.loads(record.read_text())["results"]

    both = f"mine={','.join(places)}", f"one={places[0]}"
    whole = results(*both)
    told, kept = capsys.readouterr().out, whole["seeds"]["continuation"]
    assert list(kept) == ["mine"] and "sd of seeds" in told and "error of items" in told
    kls = [table["no reasoning"]["kl"]["value"] for table in kept["mine"]]
    (row,) = [text for text in told.splitlines() if "continuation: kl" in text and "mine" in text]
    for number in (*kls, np.mean(kls), np.std(kls, ddof=1)):
        assert f"{number:.3f}" in row
    assert f"{kept['mine'][0]['no reasoning']['kl']['error']:.3f}" in row
    assert len(set(kls)) == 3 and len(whole["items"]["continuation"]["mine"][0]["seeds"]) == 3
    alone = results(*(f"t{i}={place}" for i, place in enumerate(places)))
    assert "sd of seeds" not in capsys.readouterr().out and "seeds" not in alone
    for i, table in enumerate(kept["mine"]):
        own = alone["means"]["continuation"][f"t{i}"]["no reasoning"]["kl"]
        assert table["no reasoning"]["kl"] == pytest.approx(own)
    before = journal.read_text()
    assert results(*both)["seeds"] == whole["seeds"] and journal.read_text() == before
