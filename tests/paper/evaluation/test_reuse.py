"""The source's cache unchanged: DroidSpeak on given data, and what each condition computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import droidspeak, reuse
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny
from tests.support.command_line import run
from tests.support.fixtures import Models, Pair, Patch, Printed
from tests.support.guards import logs

ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
PAIR = ["paper eval", "--source", ENDS[0], "--target", ENDS[1], "--tasks", "continuation"]
WORDS = "the sun is up and Anna knows the code of Ben or so they say in Paris today "


@pytest.fixture
def twins(tmp_path: Path) -> Pair:
    shape = {"layers": 4, "kv_heads": 2, "head_dim": 32}
    two = [kv.load(tiny.write_tiny_model(tmp_path / f"m{i}", "qwen3", seed=i, **shape))
           for i in range(2)]  # fmt: skip
    return two[0], two[1]


def entries(cache: list) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(c.keys[..., : c.offset, :]), np.array(c.values[..., : c.offset, :]))
            for c in cache]  # fmt: skip


@pytest.mark.parametrize("step_size", [2048, 5])
def test_reuse_is_between_verbatim_and_native(twins: Pair, step_size: int) -> None:
    source, target = twins
    tokens = tiny.random_tokens(17)
    own, theirs = (entries(conditions.native(m, step_size)(tokens)) for m in (target, source))
    for recomputed in range(5):
        found = entries(reuse.reused(source, target, recomputed, step_size)(tokens))
        expected = own[:recomputed] + theirs[recomputed:]
        for pair, wanted in zip(found, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(pair, wanted, strict=True))
    assert not np.array_equal(own[0][0], theirs[0][0])


def test_a_sweep_reads_a_prefix_once(twins: Pair, monkeypatch: Patch) -> None:
    """Two reads a prefix for the whole sweep, and the numbers are those of each alone, although
    every one of them goes on to write into its caches."""
    source, target = twins
    reads: list[tuple[LanguageModel, int]] = []
    prefill = conditions.prefill_layers

    def counted(model: LanguageModel, tokens: Any, step_size: int, layers: int) -> list:
        reads.append((model, layers))
        return prefill(model, tokens, step_size, layers)

    monkeypatch.setattr(reuse, "prefill_layers", counted)
    task = probes.continuation(target, [{"text": WORDS}, {"text": WORDS[9:] + "no"}], 2, 512)
    sweep = [f"droidspeak:{j}" for j in (0, 1, 3)]
    shared = reuse.Reuse(*twins)
    line = [lineup.native(target), *(reuse.baseline(spec, *twins, shared) for spec in sweep)]
    found = evaluate(target, [task], line, Journal())["continuation"]
    mine = [(model is source, layers) for model, layers in reads]
    assert mine.count((True, 4)) == 2 and mine.count((False, 3)) == 2
    for spec in reversed(sweep):
        condition = reuse.baseline(spec, source, target)
        alone = evaluate(target, [task], [condition], Journal())["continuation"][condition.name]
        assert alone == found[condition.name] and alone[0].scores["kl"] > 0
    reads.clear()
    samples = [Sample(tuple(tiny.random_tokens(20 + i)), (5, 6, 7)) for i in range(3)]
    kls = droidspeak.profile(source, target, samples)
    assert [(model is source, layers) for model, layers in reads] == [(False, 4), (True, 4)] * 3
    for j in range(5):
        total = 0.0
        for sample in samples:
            tokens = [sample.prefix[-1], *sample.continuation[:-1]]
            makers = conditions.native(target), reuse.reused(source, target, j)
            native, mine = (logs(target, made(sample.prefix), tokens) for made in makers)
            total += float((np.exp(native) * (native - mine)).sum(-1).mean())
        assert kls[j] == pytest.approx(total / 3, abs=1e-5)


def test_the_verb_counts_what_reuse_computes(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(droidspeak, "PROFILED", 2)
    options = [*PAIR, "--limit", "2", "--baselines", "droidspeak,droidspeak:0", "--json", "r.json"]
    assert run(options) == 0
    said = capsys.readouterr().out
    assert f"layers chosen on {droidspeak.PROFILED} samples" in said and "compute" in said
    results = json.loads(Path("r.json").read_text())["results"]
    kls = results["profile"]["kls"]
    chosen = min(j for j, kl in enumerate(kls) if kl <= 0.05 * kls[0])
    shares = results["compute"]["continuation"]
    assert shares[f"DroidSpeak, {chosen} of 4 recomputed"] == pytest.approx(chosen / 4)
    assert shares["DroidSpeak, 0 of 4 recomputed"] == 0.0 and shares["native"] == 1.0


def test_the_profiler_recomputes_no_more_than_it_must(tmp_path: Path) -> None:
    """A source that differs in its last layer's keys alone needs every layer recomputed."""
    shape = {"layers": 4, "kv_heads": 2, "head_dim": 32}
    folder = tiny.write_tiny_model(tmp_path / "m", "qwen3", seed=1, **shape)
    target, source = kv.load(folder), kv.load(folder)
    samples = [Sample(tuple(tiny.random_tokens(20)), tuple(tiny.random_tokens(6)))]
    assert droidspeak.choose(source, target, samples) == 0
    projection = source.model.layers[-1].self_attn.k_proj
    projection.weight = -4 * projection.weight[::-1]
    kls = droidspeak.profile(source, target, samples)
    assert kls[0] > 1e-4 and kls[:4] == pytest.approx([kls[0]] * 4, rel=1e-3) and kls[4] == 0.0
    assert droidspeak.choose(source, target, samples) == 4


def test_a_translations_share_by_hand(models: Models) -> None:
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
            share = reuse.shares(source, target, [condition], count)["t"]
            assert share == pytest.approx((sum(found[:native]) + maps) / sum(found))
