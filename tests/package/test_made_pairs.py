"""benchmarks/made_pairs.py: models and records are made once; the page of them."""

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
from safetensors.numpy import load_file

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.format import translator_folder
from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
SMALL, LARGE, MIXTURE = "tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe"
L2S, S2L = "large to small", "small to large"
PRODUCTS = ("weight", "w1", "w2")
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


def test_head_wise_mlps_have_the_parameters_of_mixing_maps(
    made_pairs: ModuleType, parsed: Parsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once and four times, whatever the widths; records say how they began, without a form."""
    monkeypatch.setattr(made_pairs, "HELD_OUT", 1)
    maps = list(made_pairs.MLPS)
    words = (
        "--facts 3 4 --fit-dialogues 12 --dialogues 1 --batch 1 --seeds 5 --maps mixing "
        f"{' '.join(maps)} --steps 1 --mlp-steps 1 --mlp-lr 0.003"
    )
    # Three source layers of 2 heads beside one target layer of 4: no side is as wide as the other.
    zoo_here = ROOT / "tests" / "zoo"
    pair = f"tiny-qwen3-narrow:{SMALL}"
    args = parsed("--zoo", zoo_here, "--as-is", pair, *words.split(), "--nu", 3)
    owns = [own for own, _ in made_pairs.jobs(args) if own.get("direction") == S2L]
    told = [own.get("mlp") for own in owns if "seed" in own]
    assert told == [None] + [{"mlp_steps": 1, "mlp_lr": [0.003]}] * 2
    source, target = made_pairs.both({"pair": pair, "direction": S2L}, args)
    weights = []
    for name in ("mixing", *maps):
        before = {*args.work.rglob("translator.safetensors")}
        *_, (how, made) = made_pairs.translators(source, target, 5, name, args)
        assert how == "self-distilled" and made.config.head_mixing == (name == "mixing")
        new = {*args.work.rglob("translator.safetensors")} - before
        tensors = load_file(next(p for p in new if "closed-form" not in p.parent.name))
        weights.append(sum(t.size for n, t in tensors.items() if n.split(".")[-1] in PRODUCTS))
    assert weights[1:] == pytest.approx([weights[0], 4 * weights[0]], rel=0.02)


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


# ---- the page --------------------------------------------------------------------------


def score(hits: float, kl: float) -> dict[str, float]:
    return {"hits": hits, "kl": kl, "value_kl": 2 * kl}


def entry(config: dict[str, Any], scores: dict[str, Any], **sizes: int) -> dict[str, Any]:
    machine = {"chip": "chip", "cores": 2, "system": "Linux", "versions": {"mlx": "1"}}
    results = {"scores": scores, "bytes_per_token": sizes}
    facts = {"command": "made_pairs.py", "date": "2026-11-26", "environment": machine}
    return {**facts, "config": config, "results": results}


def planted() -> list[dict[str, Any]]:
    judged: dict[str, Any] = {"facts": [12, 28], "dialogues": 48}
    made = {"rotary": 32, "calibration": [64, 512], "recovery_steps": 400, "recovery_rate": 5e-4,
            "exchanges": 6}  # fmt: skip
    trained = {"nu": 1, "fit_dialogues": 200, "steps": 600, "batch": 4, "lr": [1e-2]}
    found = [
        entry({**judged, **made, "model": "s", "rank": 24},
              {"original": score(1, 0), "converted": score(0.04, 1.5),
               "recovered": score(0.96, 0.03)}, original=4096, converted=1024, recovered=1024),
        entry({**judged, **made, "model": "s", "rank": None},
              {"original": score(0.99, 0), "recovered": score(0.98, 0.002)},
              original=4096, recovered=4096),
    ]  # fmt: skip
    for seed in (0, 1):
        for way, rank, closed, kl in (
            ("latents", 24, 0.5, 0.1),
            ("keys and values", None, 0.2, 0.04),
        ):
            own = {"pair": "s:l", "way": way, "rank": rank, "maps": "mixing", "direction": S2L,
                   "seed": seed}  # fmt: skip
            scores = {
                "native": score(0.95, 0), "closed form": score(0.1, closed),
                "self-distilled": score(0.85 + seed / 50, kl + seed / 50),
            }  # fmt: skip
            found.append(entry({**judged, **made, **trained, **own}, scores, source=1, target=1024))
    own = {"pair": "ms:ml", "way": "as they are", "rank": None, "direction": L2S, "seed": 0}
    for maps, kl in (("mixing", 0.25), ("head-wise", 0.5)):
        scores = {"native": score(0.9, 0), "closed form": score(0.04, kl)}
        found.append(entry({**judged, **trained, **own, "maps": maps}, scores, source=7, target=8))
    scores = {"native": score(0.9, 0), "self-distilled": score(0.7, 0.125)}
    own |= {"maps": "head-wise-mlp", "mlp": {"mlp_steps": 500, "mlp_lr": [1e-3, 3e-3]}}
    found.append(entry({**judged, **trained, **own}, scores, source=7, target=8))
    compared = {"pair": "ms:ml", "direction": L2S, "facts": [4, 28], "documents": 64,
                "tokens": 16384}  # fmt: skip
    keys = {"linear": 0.75, "affine": 0.76, "mlp": 0.8, "rho": 0.94}
    values = {"linear": 0.5, "affine": 0.51, "mlp": 0.6, "rho": 0.83}
    heads = {"diagonal": 0.3, "null": [0.25, 0.01], "p": 0.001}
    found.append(entry(compared, {}))
    found[-1]["results"] = {"sides": {"keys": keys, "values": values}, "heads": {"keys": heads}}
    return found


def cells(page: str) -> list[list[str]]:
    """The rows of every table."""
    lines = [line for line in page.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_the_page_puts_the_papers_numbers_beside(
    made_pairs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rendering import made_pairs as section

    def shown(*, named: str, found: list[dict[str, Any]]) -> str:
        monkeypatch.setattr(section, "records", lambda name: found if name == named else [])
        return section.made_pairs()

    page = shown(named="made_pairs", found=planted())
    rows = cells(page)
    spread, kls = "-0.090 (-0.100 to -0.080)", ["0.110 (0.100 to 0.120)", "0.050 (0.040 to 0.060)"]
    for row in (
        ["s", "latents of 24", "1,024", "0.040, 0.960", "1.5000, 0.0300", "3.0000, 0.0600"],
        ["rank 24", "S to L", "0.500", "0.200", *kls, spread, spread],
        ["as they are, head-wise", "L to S", "7 to 8", "closed form", "0.040", "0.5000"],
        ["head-wise", "L to S", "0.500", "", "-0.860"],
        ["head-wise MLP, 1x", "L to S", "", "0.125", "-0.200"],
        ["ms and ml", "L to S", "K", "0.750", "0.800", "0.940", "0.300 (0.250)"],
        # As printed in the paper.
        ["paper, 120k", "S to L", "1.651", "0.103", "0.109", "0.021",
         "-0.059 ± 0.013, -0.081 ± 0.012", "-0.087 ± 0.013, -0.061 ± 0.010"],
        ["paper, WikiText: mixing", "S to L", "0.558", "0.101", ""],
        ["paper, Nemotron: head-wise MLP, 4x", "L to S", "", "0.069", ""],
    ):  # fmt: skip
        assert row in rows
    assert ["0.752", "0.805", "0.935"] in [r[3:6] for r in rows if r[0].startswith("paper, from")]
    budgets = [row for row in rows if row[0] in ("paper, 60k", "paper, 120k")]
    assert len(budgets) == 4  # not beside what is as it is
    assert "### s and l, seeds of the data: 2\n" in page
    assert "### ms and ml, seeds of the data: 1\n" in page
    some = [r for r in planted() if (r["config"].get("seed"), r["config"].get("rank")) != (1, 24)]
    assert "### s and l, seeds of the data: 1 to 2\n" in shown(named="made_pairs", found=some)
    apart = planted()
    apart[-2]["command"] = "made_pairs.py --maps head-wise-mlp"
    told = shown(named="made_pairs", found=apart).splitlines()
    commands = [line.split("`")[1] for line in told if line.startswith("`python ")]
    plain = "python benchmarks/made_pairs.py"
    assert commands == [plain] * 4 + [f"{plain} --maps head-wise-mlp"]  # each, once a section
    assert shown(named="other", found=planted()) == ""
