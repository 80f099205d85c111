"""benchmarks/made_pairs.py: records are made once, and judge as whole readings do."""

from __future__ import annotations

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
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.format import translator_folder
from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
SMALL, LARGE, MIXTURE = "tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe"
L2S, S2L = "large to small", "small to large"
Parsed = Callable[..., Namespace]


@pytest.fixture
def made_pairs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("made_pairs")


@pytest.fixture
def parsed(made_pairs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parsed:
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
        rows = []
        for model in (first, other):
            logits = np.array(model.model(mx.array([tokens]))[0], np.float64)
            own = logits[len(sample.prefix) - 1 : -1]
            rows.append(own - np.log(np.exp(own).sum(axis=-1, keepdims=True)))
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
    made_pairs: ModuleType, parsed: Parsed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no pair is given; name one, as SMALL:LARGE, by --pairs or --as-is"),
        (f"--pairs {SMALL}", f"{SMALL} is not SMALL:LARGE"),
        ("--as-is tiny-none-s:x", "tiny-none-s --out tests/zoo/models/tiny-none-s"),
        (f"--pairs {SMALL}:{LARGE} --rotary 16", "rotary was 32, is 16"),
        (f"--as-is {SMALL}:{LARGE} --maps head-wise-mlp --steps 0", "give --steps 1 or more"),
    ],
)
def test_what_is_refused(
    parsed: Parsed, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed("--pairs", f"{SMALL}:{LARGE}")
    with pytest.raises(SystemExit) as stopped:
        parsed(*words.split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
