"""Recall and KL against independent values, and controls that must differ."""

import json
import math
import random
import re
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.dialogues import ANSWER
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.compare import evaluate, outcome
from kvlingo_mlx.evaluation.error_bars import (
    Mean,
    over_clusters,
    over_items,
    over_sets,
    over_tokens,
)
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.needles import FACTS, MAGIC, STYLES, VARIANTS, make_item, recall
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import two_tokenizers
from tests.support.command_line import run
from tests.support.fixtures import Models, Patch


@pytest.fixture
def sample(models: Models) -> quality.RecallSample:
    talk = dialogues.dialogue(random.Random(3), 2, 2)
    return quality.recall_sample(models["dense"], talk)


def test_recalled_tokens_are_exactly_the_values(models: Models) -> None:
    tokenizer = models["dense"].tokenizer
    for seed in range(10):
        talk = dialogues.dialogue(random.Random(seed), 3, 3)
        sample = quality.recall_sample(models["dense"], talk)
        for fact, indices in zip(talk.asked, sample.recalled, strict=True):
            assert tokenizer.decode([sample.continuation[i] for i in indices]).strip() == fact.value
        text = tokenizer.decode(list(sample.continuation))
        assert text.startswith(talk.asked[0].say(ANSWER) + "<|im_end|>\n<|im_start|>user\n")
        assert tokenizer.decode(list(sample.prefix)).endswith("<think>\n\n</think>\n\n")


def test_kl_and_hits_against_float64(models: Models, sample: quality.RecallSample) -> None:
    """One forward pass over everything for native, one over the continuation for hidden."""
    model = models["dense"]
    score = quality.score(model, [sample], {"hidden": conditions.hidden(model)})

    def logs(tokens: list[int]) -> np.ndarray:
        cache = make_prompt_cache(model.model)
        out = np.array(model.model(mx.array(tokens)[None], cache=cache)[0], np.float64)
        out = out[-len(sample.continuation) - 1 : -1]
        return (
            out
            - np.log(np.exp(out - out.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - (out.max(-1, keepdims=True))
        )

    native = logs([*sample.prefix, *sample.continuation])
    alone = logs([sample.prefix[-1], *sample.continuation])
    kl = (np.exp(native) * (native - alone)).sum(-1)
    assert score["hidden"].kl[0] == pytest.approx(kl.mean(), rel=1e-4)
    values = [i for indices in sample.recalled for i in indices]
    assert score["hidden"].value_kl[0] == pytest.approx(kl[values].mean(), rel=1e-4)
    best = native.argmax(-1)
    hits = tuple(all(best[i] == sample.continuation[i] for i in row) for row in sample.recalled)
    assert score["native"].hits == hits


def test_shuffled_translator_is_another_one(models: Models, sample: quality.RecallSample) -> None:
    model = models["dense"]
    translator = kv.fit(model, model, [Sample(sample.prefix, ())])
    control = conditions.shuffled(translator)
    ours, theirs = translator.to_weights().arrays, control.to_weights().arrays
    assert all(not np.array_equal(ours[name], theirs[name]) for name in ours)
    assert {a.tobytes() for a in ours.values()} == {a.tobytes() for a in theirs.values()}
    makers = {"fitted": conditions.translated(model, model, translator),
                  "shuffled": conditions.translated(model, model, control)}  # fmt: skip
    scores = quality.score(model, [sample], makers)
    assert scores["shuffled"].kl[0] > 10 * scores["fitted"].kl[0]


def test_items() -> None:
    found = over_items([1.0, 0.0, 0.0, 1.0, 1.0])
    variance = (3 * 0.4**2 + 2 * 0.6**2) / 4
    assert found == Mean(pytest.approx(0.6), pytest.approx(math.sqrt(variance / 5)), 5)
    assert math.isnan(over_items([2.0]).error)
    assert str(over_items([0.25])) == "0.250" and str(Mean(0.25, 0.5, 2)) == "0.250 +- 0.500"
    with pytest.raises(ValueError, match="no scores"):
        over_items([])


def test_sets() -> None:
    found = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)])
    assert (found.value, found.error, found.count) == pytest.approx((0.4, 0.025, 40))
    weighted = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)], [1, 3])
    assert weighted.value == pytest.approx(0.5)
    assert weighted.error == pytest.approx(math.hypot(0.25 * 0.03, 0.75 * 0.04))


def test_clusters() -> None:
    """A question that is right at every length is one item, not three."""
    scores, questions = [1, 1, 1, 0, 0, 0], ["a", "a", "a", "b", "b", "b"]
    assert over_clusters(scores, questions) == over_items([1.0, 0.0])
    assert over_clusters(scores, range(6)) == over_items(scores)


def test_windows_of_one_text_are_one_cluster() -> None:
    """By loops: a mean over tokens, its error from the sums of each text's deviations."""
    rng = np.random.default_rng(3)
    means, tokens = rng.normal(size=9), rng.integers(1, 50, 9)
    clusters = ["a", "b", "a", "c", "c", "c", "d", "a", "b"]
    whole, weight = 0.0, 0
    for mean, count in zip(means, tokens, strict=True):
        whole, weight = whole + mean * count, weight + count
    value, squares = whole / weight, 0.0
    for cluster in "abcd":
        total = 0.0
        for mean, count, name in zip(means, tokens, clusters, strict=True):
            total += count * (mean - value) if name == cluster else 0.0
        squares += total**2
    found = over_tokens(means, tokens, clusters)
    assert found.value == pytest.approx(value) and found.count == 4
    assert found.error == pytest.approx(math.sqrt(4 / 3 * squares) / weight)
    single = over_tokens(means, [64] * 9, range(9))
    assert single.value == pytest.approx(over_items(means).value)
    assert single.error == pytest.approx(over_items(means).error)
    assert math.isnan(over_tokens(means, tokens, ["a"] * 9).error)
    with pytest.raises(ValueError, match="no scores"):
        over_tokens([], [], [])


def words(messages) -> int:
    return sum(len(message["content"].split()) for message in messages)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [150, 1000, 4000])
def test_length_and_needles(name: str, length: int) -> None:
    variant = VARIANTS[name]
    item = make_item(3, variant, length, words)
    assert length - 20 < words(item.messages) <= length
    text = item.messages[0]["content"]
    found = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text)
    assert len(found) == variant.keys * variant.values == len(set(found))
    question = text.rsplit("\n", 1)[1]
    wanted = {value for key, value in found if key in question}
    assert wanted == set(item.references)
    assert len(item.references) == variant.queries * variant.values


def test_depths_are_true_and_spread() -> None:
    items = [make_item(i, VARIANTS["single"], 2000, words) for i in range(40)]
    for item in items:
        text = item.messages[0]["content"]
        at = text.index("One of the special") / len(text)
        assert at == pytest.approx(item.depths[0], abs=0.03)
    depths = sorted(item.depths[0] for item in items)
    assert depths[0] < 0.15 and depths[-1] > 0.85


def test_same_index_same_item() -> None:
    """At several lengths the same question, so that rungs can be clustered by it."""
    draws = [make_item(i, VARIANTS["multi-key"], 500, words, seed=s)
             for i, s in ((1, 0), (1, 0), (2, 0), (1, 1))]  # fmt: skip
    assert draws[0] == draws[1]
    assert len({draw.messages[0]["content"] for draw in draws}) == 3
    short, long = (make_item(5, VARIANTS["multi-query"], n, words) for n in (300, 3000))
    assert short.references == long.references and short.depths == long.depths


def test_the_users_own_text() -> None:
    text = "First one here. Second one there! Is this the third? Yes."
    item = make_item(0, VARIANTS["single"], 300, words, text=text)
    body = item.messages[0]["content"]
    assert body.count("Second one there!") > 10
    assert not any(s in body for s in ("gardener", "traveller"))


def test_zoo_style_speaks_the_zoos_words() -> None:
    item = make_item(0, VARIANTS["multi-key"], 200, words, style=FACTS)
    text = item.messages[0]["content"]
    statements = re.findall(r"The (\w+ of \w+) is (\w+)\.", text)
    asked = re.search(r"What is the (\w+ of \w+)\?", text).group(1)
    assert len(statements) == 4 and dict(statements)[asked] == item.references[0]
    assert STYLES == {"magic": MAGIC, "facts": FACTS}


def test_recall() -> None:
    assert recall("They are 1234567 and 7654321.", ["1234567", "7654321"]) == 1.0
    assert recall("It is 1234567", ["1234567", "7654321"]) == 0.5
    assert recall("OSLO", ["Oslo"]) == 1.0
    assert recall("", ["Oslo"]) == 0.0


ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
PAIR = ["eval", "--source", ENDS[0], "--target", ENDS[1], "--tasks", "continuation"]
WORDS = "the sun is up and Anna knows the code of Ben or so they say in Paris today "


def losses(model: LanguageModel, tokens: list[int], read: int) -> list[float]:
    """The log losses of the tokens after the first ``read``, in float64, in one pass."""
    logits = np.array(model.model(mx.array(tokens)[None])[0].astype(mx.float32), np.float64)
    found = []
    for place in range(read, len(tokens)):
        row = logits[place - 1]
        top = row.max()
        found.append(top + math.log(np.exp(row - top).sum()) - row[tokens[place]])
    return found


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
        task = probes.windows(model, records, limit, size, 512)
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
        task = probes.windows(model, [record], 2, (6, 2), 512)
        assert [(*i.prefix, *i.sample.continuation) for i in task.items] == [
            (start, *text[:7]), (start, *text[7:14])
        ]  # fmt: skip


def test_the_verb_cuts_windows(tmp_path: Path, monkeypatch: Patch) -> None:
    """On the zoo: the source alone is what it reads itself, the translated gap is between native's
    and hidden's."""
    monkeypatch.chdir(tmp_path)
    talks = list(dialogues.held_out(4, seed=9))
    texts = [" ".join(m["content"] for m in talk.messages) for talk in talks]
    lines = [json.dumps({"text": text}) for text in texts]
    Path("x.jsonl").write_text("\n".join(lines) + "\n\n")
    options = [*PAIR, "--data", "x.jsonl", "-c", "window=64+16", "--limit", "6", "--baselines",
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
