"""The scripts of benchmarks/: records made once, rivals that do what is said, missed promises."""

import ast
import importlib
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.conditions import native, prefill_layers
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.prompts import encode
from tests.support import ROOT
from tests.support.fixtures import Pair, Patch, Printed
from tests.support.guards import logs
from tests.support.native_caches import logits

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(p for f in ("benchmarks", "examples", "tools") for p in (ROOT / f).rglob("*.py"))
SMALL, LARGE, MIXTURE = "tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe"
L2S, S2L = "large to small", "small to large"
Parsed = Callable[..., Namespace]


@pytest.fixture
def made_pairs(monkeypatch: Patch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("made_pairs")


@pytest.fixture
def parsed(made_pairs: ModuleType, monkeypatch: Patch, tmp_path: Path) -> Parsed:
    """The arguments of a command line whose work lies in a folder of the test."""

    def parse(*words: Any) -> Namespace:
        told = ["made_pairs.py", *map(str, words), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", told)
        return made_pairs.parsed()

    return parse


def test_alone_is_what_whole_readings_say(made_pairs: ModuleType) -> None:
    """Against logits of the whole text at once, in float64."""
    first, other = kv.load(SMALL), kv.load(LARGE)
    talks = dialogues.held_out(2, seed=4, facts=(4, 6))
    samples = [recall_sample(first, talk) for talk in talks]
    found = made_pairs.alone(first, other, samples)
    assert found.kl != made_pairs.alone(other, first, samples).kl
    hits = []
    for sample, kl, value_kl in zip(samples, found.kl, found.value_kl, strict=True):
        tokens = [*sample.prefix, *sample.continuation]
        own = slice(len(sample.prefix) - 1, -1)
        rows = [logs(model, None, tokens)[own] for model in (first, other)]
        each = (np.exp(rows[0]) * (rows[0] - rows[1])).sum(axis=-1)
        values = [place for places in sample.recalled for place in places]
        assert kl == pytest.approx(each.mean(), rel=1e-3)
        assert value_kl == pytest.approx(each[values].mean(), rel=1e-2, abs=1e-5)
        best = rows[1].argmax(axis=-1)
        hits += [
            all(best[place] == sample.continuation[place] for place in places)
            for places in sample.recalled
        ]
    assert list(found.hits) == hits
    assert max(np.abs(made_pairs.alone(first, first, samples).kl)) < 1e-9 < min(found.kl)


def test_records_are_made_once(
    made_pairs: ModuleType, parsed: Parsed, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Through the front door, of a pair whose caches tell the directions apart."""
    record = tmp_path / "records.jsonl"
    words = (
        f"--as-is {SMALL}:{MIXTURE} --seeds 0 --facts 3 4 --fit-dialogues 3 --steps 1 --batch 1 "
        f"--dialogues 2 --documents 4 --tokens 256 --json {record}"
    )
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(made_pairs, "HELD_OUT", 1)
    try:
        parsed(*words.split())
        made_pairs.main()
        found = [json.loads(line) for line in record.read_text().splitlines()]
        assert [r["config"]["direction"] for r in found] == [L2S, S2L] * 2
        assert all(0 < r["results"]["sides"]["keys"]["linear"] < 1 for r in found[:2])
        found = found[2:]
        sizes = {"small": 4 * 256 * 4, "large": 6 * 256 * 4}
        for (source, target), entry in zip(
            (("large", "small"), ("small", "large")), found, strict=True
        ):
            expected = {"source": sizes[source], "target": sizes[target]}
            assert entry["results"]["bytes_per_token"] == expected
            scores = entry["results"]["scores"]
            assert list(scores) == [
                "native", "prefix hidden", "closed form", "closed form, shuffled",
                "self-distilled", "self-distilled, shuffled",
            ]  # fmt: skip
            assert scores["native"]["kl"] == 0 and scores["native"]["hits"] > 0.8
            assert scores["prefix hidden"]["hits"] < 0.3
        made = list((tmp_path / "work" / "translators").glob(f"*/{translator_folder.CONFIG_FILE}"))
        assert len(made) == 4

        def never(*words: Any) -> dict:
            raise AssertionError("judged again")

        monkeypatch.setattr(made_pairs, "of_pair", never)
        made_pairs.main()
        assert len(record.read_text().splitlines()) == 4
        parsed(*words.split(), "--lr", "0.02")
        with pytest.raises(AssertionError, match="judged again"):
            made_pairs.main()
    finally:
        signal.signal(signal.SIGTERM, handler)


sys.path.insert(0, str(ROOT / "benchmarks"))
ways = pytest.importorskip("peer_ways")


@pytest.fixture(scope="module")
def tokens(pair: Pair) -> list[int]:
    (talk,) = dialogues.held_out(1, seed=3, facts=(12, 12))
    return list(encode(pair[1], talk.messages, enable_thinking=False))


def test_what_reads_all_is_native(pair: Pair, tokens: list[int]) -> None:
    """Speculative prefill that keeps every token, and the last 100 % of a prompt."""
    source, target = pair
    own = logits(target, native(target)(tokens), tokens[-1])
    for way in (ways.speculative(source, target, 1.0), ways.truncated(target, 1.0)):
        run = way(tokens)
        for _ in range(2):  # the source's cache is as it was
            assert np.allclose(logits(target, run(), tokens[-1]), own, atol=1e-3)
    half = ways.speculative(source, target, 0.5)(tokens)()
    kept = half[0].offset
    assert 0.4 * len(tokens) < kept < 0.65 * len(tokens)
    assert np.abs(logits(target, half, tokens[-1]) - own).max() > 0.1  # negative control


def test_attention_is_that_of_transformers(pair: Pair, tokens: list[int]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = pair[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source.path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = reference(torch.tensor([tokens]), output_attentions=True).attentions
    start = len(tokens) - ways.LOOK
    most = torch.stack(found)[:, 0].amax(dim=(0, 1))[start:, :start].mean(dim=0).numpy()
    cache = prefill_layers(source, tokens[:start], 2048, len(source.attentions))
    mine = ways.attention(source, cache, tokens[start:], start, ways.LOOK)
    assert mine.shape == most.shape and np.abs(mine - most).max() < 1e-4


def test_a_mapper_is_applied_by_the_peer(pair: Pair, tokens: list[int]) -> None:
    """An identity mapper within one model gives that model's own cache."""
    theirs = pytest.importorskip("veloxquant_mlx.transfer")
    source = pair[0]
    spec = theirs.ModelKVSpec.from_model(source.model)
    layer = source.geometry.layers[0]
    heads, width = layer.kv_heads, layer.key_dim
    one = mx.eye(heads * width).reshape(heads * width, heads, width).transpose(1, 0, 2)
    none = mx.zeros((heads, width))
    maps = [theirs.LayerMap(t, [t], one, none, one, none) for t in range(len(source.attentions))]
    mapper = theirs.CrossModelMapper(spec, spec, theirs.MapperConfig(k=1), maps)
    cache = ways.mapped(source, source, mapper)(tokens)()
    own = logits(source, native(source)(tokens), tokens[-1])
    assert np.allclose(logits(source, cache, tokens[-1]), own, atol=1e-3)


@pytest.fixture
def ratios(monkeypatch: Patch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ratios

    return ratios


def test_a_missed_ratio_fails_loudly(
    ratios: ModuleType, monkeypatch: Patch, capsys: Printed, tmp_path: Path
) -> None:
    made = {
        "good": ratios.Ratio("a / b", 1.05, lambda n: {"ratios": [0.9, 1.0, 7.0]}),
        "bad": ratios.Ratio("c / d", 1.05, lambda n: {"ratios": [1.0, 1.1, 1.2]}),
        "slow": ratios.Ratio("e / f", 5.0, lambda n: {"ratios": [4.0] * n}, at_least=True),
    }
    monkeypatch.setattr(ratios, "RATIOS", made)
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--trials", "2", "--json", str(record)])
    assert ratios.main() == 1
    done = capsys.readouterr()
    assert done.err == "missed: bad, slow\n"
    good, bad, slow = done.out.splitlines()[:3]
    assert good.startswith("ok") and "<= 1.05:  1.000 (0.900 to 7.000)" in good
    assert bad.startswith("MISSED") and "1.100 (1.000 to 1.200)" in bad
    assert slow.startswith("MISSED") and ">= 5.00" in slow
    assert json.loads(record.read_text())["results"]["slow"]["ratios"] == [4.0, 4.0]
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--only", "good"])
    assert ratios.main() == 0


def test_memory_and_maps_can_be_measured_small(ratios: ModuleType) -> None:
    assert ratios.memory(1, tokens=96, step=32)["ratios"][0] > 0
    assert len(ratios.head_wise(2, tokens=8, layers=2)["ratios"]) == 2


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvlingo_mlx"):
            raise
        pytest.skip(f"needs {error.name}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_scripts_take_of_the_package_is_there(script: Path) -> None:
    """Most are never run here, and mypy reads the laboratory alone."""
    tree, modules = ast.parse(script.read_text()), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvlingo_mlx"):
            for alias in node.names:
                found = getattr(imported(node.module or ""), alias.name, None)
                found = imported(f"{node.module}.{alias.name}") if found is None else found
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, place = modules.get(node.value.id), f"line {node.lineno}: {ast.unparse(node)}"
            assert module is None or hasattr(module, node.attr), place
