"""benchmarks/latents.py: models made once by the tools, records made once, and the page of them."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.format import translator_folder
from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
SMALL, LARGE, MIXTURE = "tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe"
L2S, S2L = "large to small", "small to large"
Parsed = Callable[..., Namespace]


@pytest.fixture
def latents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("latents")


@pytest.fixture
def parsed(latents: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parsed:
    """The arguments of a command line whose work lies in a folder of the test."""

    def parse(*words: Any) -> Namespace:
        told = ["latents.py", *map(str, words), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", told)
        return latents.parsed()

    return parse


def test_what_there_are_records_of(latents: ModuleType, parsed: Parsed) -> None:
    """Models alone first, then a whole table for each seed; each setting where it matters."""
    pairs = f"--pairs {SMALL}:{LARGE} --as-is {SMALL}:{MIXTURE} --ranks 24 40 --seeds 0 1"
    configs = [own for own, _ in latents.jobs(parsed(*pairs.split()))]
    alone, translated = configs[:6], configs[6:]
    assert [(c["model"], c["rank"]) for c in alone] == [
        (name, rank) for name in (SMALL, LARGE) for rank in (24, 40, None)
    ]
    assert all("steps" not in c and c["recovery_steps"] == 400 for c in alone)
    table = [(c["way"], c["rank"], c["direction"]) for c in translated if c["seed"] == 1]
    ways = [("latents", 24), ("latents", 40), ("keys and values", None), ("as they are", None)]
    assert table == [(*way, direction) for way in ways for direction in (L2S, S2L)]
    assert [c["seed"] for c in translated] == [0] * 8 + [1] * 8
    made = {c["way"] for c in translated if "recovery_steps" in c}
    assert made == {"latents", "keys and values"}
    assert len({json.dumps(c) for c in configs}) == len(configs)


def test_models_are_made_by_the_tools_and_once(
    latents: ModuleType, parsed: Parsed, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Both get the fine-tune: the conversion, and the model as it was."""
    pytest.importorskip("torch")
    words = f"--pairs {SMALL}:{LARGE} --ranks 16 --calibration 4 64 --recovery-steps 2 --facts 4 5"
    models = latents.Models(parsed(*words.split()))
    monkeypatch.setattr(latents, "HELD_OUT", 1)
    folders = {rank: models.recovered(SMALL, rank) for rank in (16, None)}
    started = {16: models.converted(SMALL, 16), None: zoo(SMALL)}
    kinds = {16: "converted_mla", None: "qwen3"}
    for rank, folder in folders.items():
        before, after = (kv.load(each) for each in (started[rank], folder))
        assert before.config["model_type"] == after.config["model_type"] == kinds[rank]
        moved = [
            float(
                mx.abs(
                    m.model.layers[0].mlp.up_proj.weight - n.model.layers[0].mlp.up_proj.weight
                ).max()
            )
            for m, n in [(before.model, after.model)]
        ]
        assert 0 < moved[0] < 0.1
    assert kv.load(folders[16]).config["kv_lora_ranks"] == [16] * 4
    assert not [p for p in models.work.glob("*.partial") if (p / "config.json").exists()]
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line[0] == "{"]
    assert [line["step"] for line in told] == [0, 2, 0, 2]
    assert told[2]["held_out_kl"] == 0 < told[0]["held_out_kl"]

    def never(*words: Any) -> None:
        raise AssertionError(f"made again: {words}")

    monkeypatch.setattr(latents, "tool", never)
    assert {rank: models.recovered(SMALL, rank) for rank in (16, None)} == folders
    with pytest.raises(AssertionError, match="made again"):
        models.converted(SMALL, 24)


def test_a_conversion_that_was_cut_off_is_made_anew(
    latents: ModuleType, parsed: Parsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = latents.Models(parsed("--pairs", f"{SMALL}:{LARGE}"))
    left = models.work / f"{SMALL}-rank-24.partial"
    left.mkdir(parents=True)
    (left / "model-layer-00000.safetensors").write_text("half")

    def convert(name: str, model: Path, out: Path, *words: Any) -> None:
        assert name == "convert_mla" and model == zoo(SMALL) and not out.exists()
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(latents, "tool", convert)
    made = models.converted(SMALL, 24)
    assert [path.name for path in made.iterdir()] == ["config.json"] and not left.exists()


def test_alone_is_what_whole_readings_say(latents: ModuleType) -> None:
    """Against logits of the whole text at once, in float64."""
    first, other = kv.load(SMALL), kv.load(LARGE)
    talks = dialogues.held_out(2, seed=4, facts=(4, 6))
    samples = [recall_sample(first, talk) for talk in talks]
    found = latents.alone(first, other, samples)
    assert found.kl != latents.alone(other, first, samples).kl
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
    assert max(np.abs(latents.alone(first, first, samples).kl)) < 1e-9 < min(found.kl)


def test_records_are_made_once(
    latents: ModuleType, parsed: Parsed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the front door, of a pair whose caches tell the directions apart."""
    record = tmp_path / "records.jsonl"
    words = (
        f"--as-is {SMALL}:{MIXTURE} --seeds 0 --facts 3 4 --fit-dialogues 3 --steps 1 --batch 1 "
        f"--dialogues 2 --json {record}"
    )
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(latents, "HELD_OUT", 1)
    try:
        parsed(*words.split())
        latents.main()
        found = [json.loads(line) for line in record.read_text().splitlines()]
        assert [r["config"]["direction"] for r in found] == [L2S, S2L]
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

        monkeypatch.setattr(latents, "of_pair", never)
        latents.main()
        assert len(record.read_text().splitlines()) == 2
        parsed(*words.split(), "--lr", "0.02")
        with pytest.raises(AssertionError, match="judged again"):
            latents.main()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no pair is given; name one, as SMALL:LARGE, by --pairs or --as-is"),
        (f"--pairs {SMALL}", f"{SMALL} is not SMALL:LARGE"),
        ("--as-is tiny-none-s:x", "tiny-none-s --out tests/zoo/models/tiny-none-s"),
        (f"--pairs {SMALL}:{LARGE} --rotary 16", "rotary was 32, is 16"),
        (f"--pairs {SMALL}:/COPY/{SMALL}", "have one name; rename a folder"),
    ],
)
def test_what_is_refused(
    parsed: Parsed, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SMALL).mkdir()
    parsed("--pairs", f"{SMALL}:{LARGE}")
    with pytest.raises(SystemExit) as stopped:
        parsed(*words.replace("/COPY", str(tmp_path)).split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# ---- the tools as processes ------------------------------------------------------------


@pytest.fixture
def terminating() -> Iterator[None]:
    """SIGTERM ends this process as it ends the benchmark."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    yield
    signal.signal(signal.SIGTERM, before)


def test_what_stops_the_benchmark_stops_its_tool_first(
    latents: ModuleType, terminating: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tool below keeps its work when told to stop, and tells its parent to stop."""
    (tmp_path / "keeper.py").write_text(
        "import os, pathlib, signal, sys\n"
        "def keep(*_):\n"
        "    pathlib.Path(sys.argv[1]).write_text('kept')\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, keep)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    monkeypatch.setattr(latents, "TOOLS", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        latents.tool("keeper", tmp_path / "work")
    assert stopped.value.code == 143 and (tmp_path / "work").read_text() == "kept"


def test_a_tool_that_fails_ends_the_benchmark(
    latents: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(latents, "TOOLS", tmp_path)
    with pytest.raises(SystemExit, match="failing.py failed with status 3"):
        latents.tool("failing")


# ---- the page --------------------------------------------------------------------------


def score(hits: float, kl: float) -> dict[str, float]:
    return {"hits": hits, "kl": kl, "value_kl": 2 * kl}


def entry(config: dict[str, Any], scores: dict[str, Any], **sizes: int) -> dict[str, Any]:
    machine = {"chip": "chip", "cores": 2, "system": "Linux", "versions": {"mlx": "1"}}
    results = {"scores": scores, "bytes_per_token": sizes}
    facts = {"command": "latents.py", "date": "2026-11-26", "environment": machine}
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
            own = {"pair": "s:l", "way": way, "rank": rank, "direction": S2L, "seed": seed}
            scores = {
                "native": score(0.95, 0), "closed form": score(0.1, closed),
                "self-distilled": score(0.85 + seed / 50, kl + seed / 50),
            }  # fmt: skip
            found.append(entry({**judged, **made, **trained, **own}, scores, source=1, target=1024))
    own = {"pair": "ms:ml", "way": "as they are", "rank": None, "direction": L2S, "seed": 0}
    scores = {"native": score(0.9, 0), "closed form": score(0.04, 0.25)}
    found.append(entry({**judged, **trained, **own}, scores, source=7, target=8))
    return found


def test_the_page_puts_the_papers_numbers_beside(
    latents: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rendering import latents as section

    monkeypatch.setattr(section, "records", lambda name: planted() if name == "latents" else [])
    page = section.latents()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    assert [
        "s",
        "latents of 24",
        "1,024",
        "0.040, 0.960",
        "1.5000, 0.0300",
        "3.0000, 0.0600",
    ] in rows
    assert [
        "s",
        "keys and values",
        "4,096",
        "0.990, 0.980",
        "0.0000, 0.0020",
        "0.0000, 0.0040",
    ] in rows
    spread = "-0.090 (-0.100 to -0.080)"
    kls = ["0.500", "0.200", "0.110 (0.100 to 0.120)", "0.050 (0.040 to 0.060)"]
    assert ["rank 24", "S to L", *kls, spread, spread] in rows
    # As printed in the paper.
    assert [
        "paper, 120k", "S to L", "1.651", "0.103", "0.109", "0.021",
        "-0.059 ± 0.013, -0.081 ± 0.012", "-0.087 ± 0.013, -0.061 ± 0.010",
    ] in rows  # fmt: skip
    assert sum(row[0].startswith("paper") for row in rows) == 4  # not beside what is as it is
    assert ["as they are", "L to S", "7 to 8", "closed form", "0.040", "0.2500"] in rows
    assert "### s and l, seeds of the data: 2" in page
    assert "### ms and ml, seeds of the data: 1" in page
    assert "Tiny models can say" in page and "cannot say" in page
    monkeypatch.setattr(section, "records", lambda name: [])
    assert section.latents() == ""
