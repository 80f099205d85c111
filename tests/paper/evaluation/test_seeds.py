"""The spread over seeds beside the error over items: the paper's own rows, NumPy, and the verb."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.commands import run
from benchmarks.paper.evaluation.seeds import cells, medians, over_tasks
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation.compare import ALL, Outcome, evaluate, found, outcome
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny
from tests.support.fixtures import Folders, Models, Patch, Printed

TALKS = [
    {"messages": talk.conversation()} for talk in dialogues.held_out(4, facts=(2, 3), questions=2)
]


def planted(task: str, metrics: tuple[str, ...], values: dict[str, np.ndarray]) -> Outcome:
    """An outcome of one group; ``values`` are (seeds, metrics) by condition, errors a tenth."""

    def table(row: np.ndarray) -> dict[str, dict[str, Mean]]:
        return {ALL: {m: Mean(v, v / 10, 5) for m, v in zip(metrics, row, strict=True)}}

    tables = {name: table(rows.mean(0)) for name, rows in values.items()}
    seeds = {name: [table(row) for row in rows] for name, rows in values.items() if len(rows) > 1}
    return Outcome(task, metrics, 5, 9, tables, {}, seeds=seeds)


def test_tables_are_numpys() -> None:
    """Medians over cells, and a mean over tasks for each seed; a single seed has no row."""
    rng = np.random.default_rng(0)
    drawn = {task: {name: rng.uniform(size=(3, 2)) for name in ("a", "b", "c")} for task in "xyz"}
    one = {"native": rng.uniform(size=(1, 2))}
    outcomes = [planted(task, ("acc", "f1"), {**one, **drawn[task]}) for task in "xyz"]
    every = cells(outcomes)
    assert [(c.task, c.metric, c.condition) for c in every[:3]] == [
        ("x", "acc", "a"), ("x", "f1", "a"), ("x", "acc", "b")
    ]  # fmt: skip
    assert len(every) == 18
    for task in "xyz":
        for column, metric in enumerate(("acc", "f1")):
            scores = np.array([drawn[task][name][:, column] for name in "abc"])
            sd, error = medians(every)[task, metric]
            assert sd == pytest.approx(np.median(scores.std(axis=1, ddof=1)))
            assert error == pytest.approx(np.median(scores[:, 0]) / 10)
    for cell in over_tasks(outcomes):
        means = np.mean([drawn[task][cell.condition][:, 0] for task in "xyz"], axis=0)
        assert [seed.value for seed in cell.seeds] == pytest.approx(means)
        assert cell.seed_sd == pytest.approx(np.std(means, ddof=1))
        errors = [drawn[task][cell.condition][0, 0] / 10 for task in "xyz"]
        assert cell.item_error == pytest.approx(np.sqrt(np.sum(np.square(errors))) / 3)
    assert over_tasks([]) == [] and cells([planted("x", ("acc",), {"n": np.ones((1, 1))})]) == []


@pytest.fixture
def task(models: Models) -> probes.Task:
    return probes.continuation(models["dense"], TALKS, 4, 512)


def test_each_seed_is_scored_once_and_kept(
    models: Models, task: probes.Task, tmp_path: Path
) -> None:
    """From a real run: each seed's table is what it has alone; a journal of averages is redone."""
    model, path = models["dense"], tmp_path / "scores.jsonl"
    maps = [kv.fit(model, model, [Sample(tuple(tiny.random_tokens(90 + i)), ())]) for i in range(3)]
    three = lineup.translated("three", model, model, maps)
    line = [lineup.native(model), three]
    line += [lineup.translated(str(i), model, model, [made]) for i, made in enumerate(maps)]
    whole = outcome(task, evaluate(model, [task], line, Journal(path))[task.name])
    alone = [outcome(task, evaluate(model, [task], [c], Journal())[task.name]) for c in line[2:]]
    assert list(whole.seeds) == ["three"]
    for n, (mine, theirs) in enumerate(zip(whole.seeds["three"], alone, strict=True)):
        table = theirs.tables[str(n)]
        assert mine.keys() == table.keys()
        for group, means in table.items():
            for metric, mean in means.items():
                assert mine[group][metric].value == pytest.approx(mean.value, nan_ok=True)
                assert mine[group][metric].error == pytest.approx(mean.error, nan_ok=True)
    kls = [t["no reasoning"]["kl"].value for t in whole.seeds["three"]]
    (cell,) = [c for c in cells([whole]) if c.metric == "kl"]
    assert cell.seed_sd == pytest.approx(np.std(kls, ddof=1)) and len(set(kls)) == 3
    assert cell.mean == pytest.approx(whole.tables["three"]["no reasoning"]["kl"].value)
    record = found([whole], {})
    assert list(record["seeds"][task.name]) == ["three"]
    assert len(record["items"][task.name]["three"][0]["seeds"]) == 3
    assert "seeds" not in record["items"][task.name]["native"][0]
    again = outcome(task, evaluate(model, [task], line, Journal(path))[task.name])
    assert repr((again.seeds, again.tables)) == repr((whole.seeds, whole.tables))
    # A journal that knows the averages alone.
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    for entry in entries:
        entry.pop("seeds", None)
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    calls: list[int] = []

    def counted(make: conditions.CacheMaker) -> conditions.CacheMaker:
        return lambda tokens: (calls.append(1), make(tokens))[1]

    line[1] = lineup.Condition("three", tuple(map(counted, three.makers)), three.identity)
    redone = outcome(task, evaluate(model, [task], line, Journal(old))[task.name])
    assert len(calls) == 3 * len(task.items) and repr(redone.seeds) == repr(whole.seeds)


def test_eval_shows_both(
    models: Models, folders: Folders, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pair = models["dense"], models["wide"]
    places = []
    for i in range(3):
        made = kv.fit(*pair, [Sample(tuple(tiny.random_tokens(90 + i)), ())])
        places.append(str(made.save(tmp_path / f"t{i}")))
    data, record = tmp_path / "talks.jsonl", tmp_path / "r.jsonl"
    data.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    line = ["eval", "--source", str(folders["dense"]), "--target", str(folders["wide"]), "--data",
            str(data), "--tasks", "continuation", "--baselines", "none", "--out",
            str(tmp_path / "s.jsonl"), "--json", str(record), "--limit", "4"]  # fmt: skip
    assert run([*line, f"mine={','.join(places)}", f"one={places[0]}"]) == 0
    told = capsys.readouterr().out
    kept = json.loads(record.read_text())["results"]["seeds"]["continuation"]
    assert list(kept) == ["mine"] and "sd of seeds" in told and "error of items" in told
    kls = [table["no reasoning"]["kl"]["value"] for table in kept["mine"]]
    (row,) = [text for text in told.splitlines() if "continuation: kl" in text and "mine" in text]
    for number in (*kls, np.mean(kls), np.std(kls, ddof=1)):
        assert f"{number:.3f}" in row
    assert f"{kept['mine'][0]['no reasoning']['kl']['error']:.3f}" in row
    assert run([*line, f"one={places[0]}"]) == 0
    assert "sd of seeds" not in capsys.readouterr().out
