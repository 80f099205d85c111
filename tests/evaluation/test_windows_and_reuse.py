"""Windows of plain texts, DroidSpeak on given data, and what each condition computes."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import droidspeak
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate, outcome
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import geometries
from kvlingo_mlx.timing.ceilings import Costs
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny, two_tokenizers
from tests.support.command_line import fails, run

ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
PAIR = ["paper eval", "--source", ENDS[0], "--target", ENDS[1], "--tasks", "continuation"]
WORDS = "the sun is up and Anna knows the code of Ben or so they say in Paris today "


# ---- windows ---------------------------------------------------------------------------------


def losses(model: LanguageModel, tokens: list[int], read: int) -> list[float]:
    """The log losses of the tokens after the first ``read``, in float64, in one pass."""
    logits = np.array(model.model(mx.array(tokens)[None])[0].astype(mx.float32), np.float64)
    found = []
    for place in range(read, len(tokens)):
        row = logits[place - 1]
        top = row.max()
        found.append(top + math.log(np.exp(row - top).sum()) - row[tokens[place]])
    return found


def test_windows_by_plain_loops(models: dict[str, LanguageModel]) -> None:
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


def test_the_verb_cuts_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("window", "lines", "told"),
    [
        ("256", [{"text": "x"}], "window is '256'; give two numbers of tokens: 256+64"),
        ("0+4", [{"text": "x"}], "window is '0+4'"),
        ("4+x", [{"text": "x"}], "window is '4+x'"),
        ("40000+960", [{"text": "x"}], "takes 40960 tokens, and the shorter of the two contexts"),
        ("256+64", [{"text": ""}, {"text": "x"}], "no text of the data has the 320 tokens"),
        ("2+2", [{"text": WORDS}, {"messages": [{"role": "user", "content": "x"}]}],
         "record 2 of the data is a conversation, and window cuts plain texts"),
        ("2+2", [{"text": 5}], "x.jsonl, line 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_windows(
    window: str, lines: list[Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    fails([*PAIR, "--data", "x.jsonl", "-c", f"window={window}"], told, capsys)


# ---- DroidSpeak ------------------------------------------------------------------------------


@pytest.fixture
def twins(tmp_path: Path) -> tuple[LanguageModel, LanguageModel]:
    shape = {"layers": 4, "kv_heads": 2, "head_dim": 32}
    two = [kv.load(tiny.write_tiny_model(tmp_path / f"m{i}", "qwen3", seed=i, **shape))
           for i in range(2)]  # fmt: skip
    return two[0], two[1]


def test_a_sweep_reads_a_prefix_once(
    twins: tuple[LanguageModel, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads a prefix for the whole sweep, and the numbers are those of each alone, although
    every one of them goes on to write into its caches."""
    source, target = twins
    reads: list[tuple[LanguageModel, int]] = []
    prefill = conditions.prefill_layers

    def counted(model: LanguageModel, tokens: Any, step_size: int, layers: int) -> list:
        reads.append((model, layers))
        return prefill(model, tokens, step_size, layers)

    monkeypatch.setattr(conditions, "prefill_layers", counted)
    task = probes.continuation(target, [{"text": WORDS}, {"text": WORDS[9:] + "no"}], 2, 512)
    sweep = [f"droidspeak:{j}" for j in (0, 1, 3)]
    found = evaluate(target, [task], lineup.line_up(*twins, {}, sweep), Journal())["continuation"]
    mine = [(model is source, layers) for model, layers in reads]
    assert mine.count((True, 4)) == 2 and mine.count((False, 3)) == 2
    for spec in reversed(sweep):
        condition = lineup.baseline(spec, source, target, [])
        alone = evaluate(target, [task], [condition], Journal())["continuation"][condition.name]
        assert alone == found[condition.name] and alone[0].scores["kl"] > 0
    reads.clear()
    samples = [Sample(tuple(tiny.random_tokens(20 + i)), (5, 6, 7)) for i in range(3)]
    kls = droidspeak.profile(source, target, samples)
    assert [(model is source, layers) for model, layers in reads] == [(False, 4), (True, 4)] * 3
    for j in range(5):
        total = 0.0
        for sample in samples:
            logs = []
            for made in (conditions.native(target), conditions.reused(source, target, j)):
                cache = made(sample.prefix)
                tokens = mx.array([[sample.prefix[-1], *sample.continuation[:-1]]])
                row = np.array(target.model(tokens, cache=cache)[0].astype(mx.float32), np.float64)
                logs.append(row - np.log(np.exp(row).sum(-1, keepdims=True)))
            total += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())
        assert kls[j] == pytest.approx(total / 3, abs=1e-5)


def test_the_profiler_takes_given_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its choice is that on these data; records without a continuation do not count."""
    monkeypatch.chdir(tmp_path)
    talks = [{"messages": t.conversation()} for t in dialogues.held_out(3, seed=11)]
    lines = [{"messages": [{"role": "user", "content": "x"}]}, *talks]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = [*PAIR, "--limit", "2", "--baselines", "droidspeak,droidspeak:0", "--json", "r.json",
               "--profile-data", "p.jsonl"]  # fmt: skip
    assert run(options) == 0
    said = capsys.readouterr().out
    assert "layers chosen on 2 samples" in said and "compute" in said
    results = json.loads(Path("r.json").read_text())["results"]
    target = kv.load(ENDS[1])
    samples = droidspeak.given("p.jsonl", target, 2)
    kls = droidspeak.profile(kv.load(ENDS[0]), target, samples)
    chosen = min(j for j, kl in enumerate(kls) if kl <= 0.05 * kls[0])
    assert results["profile"] == {"kls": pytest.approx(kls), "samples": 2}
    shares = results["compute"]["continuation"]
    assert shares[f"DroidSpeak, {chosen} of 4 recomputed"] == pytest.approx(chosen / 4)
    assert shares["DroidSpeak, 0 of 4 recomputed"] == 0.0 and shares["native"] == 1.0
    Path("p.jsonl").write_text(json.dumps(lines[0]))
    fails(options, "no record of p.jsonl has both a prefix that fits", capsys)


# ---- compute ---------------------------------------------------------------------------------


def lazy_model(name: str) -> LanguageModel:
    """A model of true widths whose weights are never computed."""
    config = geometries.GEOMETRIES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    made = LanguageModel(
        module.Model(module.ModelArgs.from_dict(config)),
        None,
        config,
        name,  # type: ignore
    )
    made.__dict__["cache_dtype"] = mx.float32  # learning it would compute weights
    return made


@pytest.mark.parametrize(("name", "hidden", "inner"),
                         [("qwen3-0.6b", 1024, 3072), ("qwen3-1.7b", 2048, 6144)])  # fmt: skip
def test_shares_of_released_shapes_by_hand(name: str, hidden: int, inner: int) -> None:
    """In float64, by the widths of the public configs: 28 layers alike, 16 heads of 128, 8 of keys.

    26 of 28 layers are the paper's 0.93; the maps are its 7.5 and 24 times less than the weights.
    """
    count = 100
    weights = np.float64(2) * (hidden * 2048 * 2 + hidden * 1024 * 2 + 3 * hidden * inner)
    attention = sum(4.0 * 16 * 128 * (place + 1) for place in range(count))
    layers = Costs(lazy_model(name)).by_layer(count)
    assert layers == pytest.approx([weights * count + attention] * 28)
    assert round(sum(layers[:26]) / sum(layers), 2) == 0.93
    maps = 2.0 * 28 * 2 * 1024 * 1024
    assert 28 * weights / maps == pytest.approx(7.5 if hidden == 1024 else 24, rel=0.01)


def test_a_translations_share_by_hand(models: dict[str, LanguageModel]) -> None:
    """Maps above, whole layers below, for a dense target and a mixture of experts."""
    source, count = models["dense"], 40
    for name in ("wide", "moe"):
        target = models[name]
        translator = kv.fit(source, target, [Sample(tuple(tiny.random_tokens(90)), ())])
        config, found = target.config, []
        for layer in target.model.layers:
            linear = 0.0
            for _, module in layer.named_modules():
                if hasattr(module, "weight") and module.weight.ndim > 1:
                    shape = module.weight.shape
                    used = config["num_experts_per_tok"] if module.weight.ndim == 3 else 1
                    linear += 2.0 * used * shape[-1] * shape[-2]
            width = config["num_attention_heads"] * config["head_dim"]
            found.append(count * linear + sum(4.0 * width * (i + 1) for i in range(count)))
        outputs = target.geometry.layers[0].kv_heads * target.geometry.layers[0].key_dim
        for native in (0, 1, 2):
            condition = lineup.translated("t", source, target, [translator], native)
            maps = 2.0 * 2 * 64 * outputs * (len(found) - native) * count
            share = lineup.shares(target, [condition], count)["t"]
            assert share == pytest.approx((sum(found[:native]) + maps) / sum(found))
