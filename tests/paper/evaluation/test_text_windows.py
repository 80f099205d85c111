"""Windows of plain texts, against plain loops and the source's own losses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.commands import run
from benchmarks.paper.evaluation.windows import outcome, over_tokens, windows
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import lineup
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.error_bars import over_items
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import two_tokenizers
from tests.support.fixtures import Models, Patch
from tests.support.guards import logs

ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
PAIR = ["eval", "--source", ENDS[0], "--target", ENDS[1], "--tasks", "continuation"]
WORDS = "the sun is up and Anna knows the code of Ben or so they say in Paris today "


def losses(model: LanguageModel, tokens: list[int], read: int) -> list[float]:
    """The log losses of the tokens after the first ``read``, in float64, in one pass."""
    rows = logs(model, None, tokens)[read - 1 : -1]
    return [-row[token] for row, token in zip(rows, tokens[read:], strict=True)]


def test_windows_by_plain_loops(models: Models) -> None:
    """Which tokens they hold, in which order, and the perplexity over all of them."""
    model, size = models["dense"], (7, 3)
    records = [{"text": WORDS * count} for count in (1, 3, 2)] + [{"text": "a"}, {"text": ""}]
    expected: list[tuple[str, list[int]]] = []
    whole = [model.tokenizer.encode(record["text"]) for record in records]
    for number in range(100):
        for record, tokens in enumerate(whole):
            window = tokens[10 * number : 10 * number + 10]
            if len(window) == 10:
                expected.append((str(record), window))
    for limit in (2, 7, 1000):
        task = windows(model, records, limit, size, 512)
        found = [(i.cluster, [*i.prefix, *i.sample.continuation]) for i in task.items]
        assert found == expected[:limit] and all(len(i.prefix) == 7 for i in task.items)
        assert len({item.name for item in task.items}) == len(task.items)
    assert "2 of 5 texts are shorter than a window" in task.notes[0]
    line = [lineup.native(model), lineup.baseline("hidden", model, model, [])]
    table = outcome(task, evaluate(model, [task], line, Journal())["continuation"]).tables
    every = [loss for _, window in expected for loss in losses(model, window, 7)]
    native = table["native"]["text"]
    assert native["perplexity"].value == pytest.approx(math.exp(sum(every) / len(every)), rel=1e-4)
    assert native["gap"].value == 0.0 and native["gap"].count == 3
    ratio = table["prefix hidden"]["text"]["perplexity"].value / native["perplexity"].value
    assert table["prefix hidden"]["text"]["gap"].value == pytest.approx(math.log(ratio))


def test_a_window_begins_as_a_text_does(tmp_path: Path) -> None:
    model = kv.load(two_tokenizers.write_mistral(tmp_path / "m"))
    (start,) = model.tokenizer.encode("")
    text = model.tokenizer.encode(WORDS * 3, add_special_tokens=False)
    for record in ({"text": WORDS * 3}, {"text": model.tokenizer.bos_token + WORDS * 3}):
        task = windows(model, [record], 2, (6, 2), 512)
        assert [(*i.prefix, *i.sample.continuation) for i in task.items] == [
            (start, *text[:7]), (start, *text[7:14])
        ]  # fmt: skip


def test_the_command_cuts_windows(tmp_path: Path, monkeypatch: Patch) -> None:
    """On the zoo: the source alone is what it reads itself, the translated gap is between native's
    and hidden's."""
    monkeypatch.chdir(tmp_path)
    talks = list(dialogues.held_out(4, seed=9))
    texts = [" ".join(m["content"] for m in talk.messages) for talk in talks]
    lines = [json.dumps({"text": text}) for text in texts]
    Path("x.jsonl").write_text("\n".join(lines) + "\n\n")
    options = [*PAIR, "--data", "x.jsonl", "--window", "64+16", "--limit", "6", "--baselines",
               "hidden", "--json", "r.json"]  # fmt: skip
    assert run(options) == 0
    results = json.loads(Path("r.json").read_text())["results"]
    items, means = (results[name]["continuation"] for name in ("items", "means"))
    assert [i["cluster"] for i in items["native"]][:4] == ["0", "1", "2", "3"]
    gaps = {name: found["text"]["gap"]["value"] for name, found in means.items()}
    assert gaps["native"] == 0.0 < gaps["translated"] < gaps["prefix hidden"]
    assert means["source alone"]["text"]["kl"]["value"] is None
    source, target = (kv.load(name) for name in ENDS)
    for place in range(2):
        tokens = source.tokenizer.encode(texts[place])[:80]
        theirs, own = (np.mean(losses(model, tokens, 64)) for model in (source, target))
        scores = items["source alone"][place]["scores"]
        assert scores["nll"] == pytest.approx(theirs, rel=1e-3)
        assert scores["gap"] == pytest.approx(theirs - own, abs=2e-3)


def test_windows_of_one_text_are_one_cluster() -> None:
    """A mean over tokens, its error from the sums of each text's deviations."""
    rng = np.random.default_rng(3)
    means, tokens = rng.normal(size=9), rng.integers(1, 50, 9)
    clusters = ["a", "b", "a", "c", "c", "c", "d", "a", "b"]
    value, weight = (means * tokens).sum() / tokens.sum(), tokens.sum()
    squares = 0.0
    for cluster in "abcd":
        mine = np.array([name == cluster for name in clusters])
        squares += (tokens * (means - value))[mine].sum() ** 2
    found = over_tokens(means, tokens, clusters)
    assert found.value == pytest.approx(value) and found.count == 4
    assert found.error == pytest.approx(math.sqrt(4 / 3 * squares) / weight)
    single = over_tokens(means, [64] * 9, range(9))
    assert single.value == pytest.approx(over_items(means).value)
    assert single.error == pytest.approx(over_items(means).error)
    assert math.isnan(over_tokens(means, tokens, ["a"] * 9).error)
    with pytest.raises(ValueError, match="no scores"):
        over_tokens([], [], [])
