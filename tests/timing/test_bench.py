"""Times of a switch: what is run, what is left out, and the command as a user runs it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate_step

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.timing import bench, switching
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch
from tests.support import tiny
from tests.support.command_line import fails, run
from tests.support.fixtures import Folders, Models, Patch, Printed

PROMPT = tiny.random_tokens(41)
PHASES = ["source_prefill", "translate float32", "target_step", "native"]


@pytest.fixture(scope="module")
def pair(models: Models) -> bench.BenchPair:
    ends = models["dense"], models["moe"]
    maps = kv.fit(*ends, [{"text": "one two three four five " * 9}])
    return bench.BenchPair(*ends, {"float32": maps})


def tuned(pair: bench.BenchPair, layers: int) -> bench.BenchPair:
    maps = pair.translator
    provenance = {**maps.config.provenance, "native_layers": layers}
    own = replace(maps, config=replace(maps.config, provenance=provenance))
    return replace(pair, translators={"float32": own})


def states(cache: Any) -> np.ndarray:
    return np.array(cache.keys_and_values()[0].astype(mx.float32))


@pytest.mark.parametrize("layers", [0, 2])
def test_the_phases_do_what_they_are_called(pair: bench.BenchPair, layers: int) -> None:
    """Those of a hand-over, with the native layers that are tuned; a step may be run again."""
    pair = tuned(pair, layers)
    ways: dict[str, Any] = bench.phases(pair, PROMPT, 16)
    assert list(ways) == PHASES
    whole = kv.hand_over(
        pair.source, pair.target, PROMPT, translator=pair.translator, prefill_step_size=16
    )
    for ours, theirs in zip(ways["translate float32"](), whole, strict=True):
        assert ours.offset == theirs.offset == len(PROMPT) - 1
        assert np.array_equal(states(ours), states(theirs))  # of the same chunks
    own = generate_step(mx.array(PROMPT), pair.target.model, prefill_step_size=16)
    assert ways["native"]() == next(own)[0]
    for way in ways.values():
        way()
        way()


def test_ways_to_a_first_token_are_made_of_phases() -> None:
    samples = {"source_prefill": [4.0], "translate float32": [1.0, 9.0, 2.0], "translate 8 bits":
               [50.0], "target_step": [3.0], "native": [20.0]}  # fmt: skip
    timed = bench.PhaseTimes(8, samples)
    assert timed.ways == {"switch": 5.0, "accelerator": 9.0, "native": 20.0}
    found = timed.as_json()
    assert found["summary"]["translate float32"] == {"median": 2.0, "min": 1.0, "iqr": 4.0}
    assert found["samples"] == samples and found["ways"] == timed.ways


def test_little_time_leaves_long_prompts_out(pair: bench.BenchPair, unhurried: None) -> None:
    for limit, lengths, rounds in ((0.0, [16], 1), (None, [16, 40], 3)):
        clock = Stopwatch(limit)
        timed, out = bench.run(pair, [40, 16], trials=3, clock=clock)
        assert [t.prompt_tokens for t in timed] == lengths
        assert out == [n for n in (16, 40) if n not in lengths]
        assert {len(s) for t in timed for s in t.samples.values()} == {rounds}


def test_no_step_outlasts_a_limit_by_more_than_itself(
    pair: bench.BenchPair, monkeypatch: Patch
) -> None:
    """A phase that never ends by itself: what was measured before it stands, and nothing rings."""
    steps, whole = [], bench.phases

    def endless(pair: bench.BenchPair, tokens: list[int], *more: Any) -> dict[str, Any]:
        def step() -> None:
            while len(tokens) > 20:
                steps.append(time.sleep(0.01))

        return whole(pair, tokens, *more) | {"target_step": step}

    monkeypatch.setattr(bench, "phases", endless)
    before, clock = signal.getsignal(signal.SIGALRM), Stopwatch(2.0)
    timed, out = bench.run(pair, [40, 12], trials=1, clock=clock)
    assert [t.prompt_tokens for t in timed] == [12] and out == [40] and steps
    assert clock.over() and signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(OutOfTime), Stopwatch(0.0).limiting():
        time.sleep(10)


def test_prompts(models: Models) -> None:
    small, large = (kv.load(zoo(f"tiny-qwen3-{size}")) for size in "sl")
    tokens = switching.prompt_of(small, large, 900, text=True)
    assert len(tokens) == 900 and " is " in large.tokenizer.decode(tokens)
    assert switching.prompt_of(small, large, 300, text=True) == tokens[:300]
    random = switching.prompt_of(small, large, 900, text=False)
    assert len(set(random)) > 2 * len(set(tokens))
    with pytest.raises(ValueError, match="a prompt of 1 tokens leaves nothing to hand over"):
        switching.prompt_of(small, large, 1, text=False)
    with pytest.raises(ValueError, match="context"):
        switching.prompt_of(models["dense"], models["moe"], 600, text=False)


def ends(folders: Folders) -> list[str]:
    return ["bench", "--source", str(folders["dense"]), "--target", str(folders["moe"])]


def test_bench_of_two_models(folders: Folders, tmp_path: Path, capsys: Printed) -> None:
    out, picture = tmp_path / "out.jsonl", tmp_path / "x.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    more = ["-c", "nu=2", "-p", "12,20,12", "--quantize", "8", "--json", str(out)]
    assert run([*ends(folders), "-n", "2", *more, *plot]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for line in ("random maps, nu = 2", "bundled text", "source reads", "translation, 8 bits",
                 "first step", "re-prefill", "switch, times sooner"):  # fmt: skip
        assert line in text, line
    record = json.loads(out.read_text())
    config, found = record["config"], record["results"]["switch"]
    assert record["kind"] == "bench" and config["weights"] == ["float32"] * 2
    assert (config["nu"], config["prefill_step_size"]) == (2, 2048)
    assert [t["prompt_tokens"] for t in found["timings"]] == [12, 20] and found["left_out"] == []
    for timing in found["timings"]:
        assert {len(samples) for samples in timing["samples"].values()} == {2}
        assert {*PHASES} - {"translate float32"} < {*timing["samples"]}
        assert "translate 8 bits" in timing["samples"]
    assert not plot or picture.stat().st_size > 1000


def test_a_limit_in_which_nothing_is_measured_is_refused(
    monkeypatch: Patch, capsys: Printed
) -> None:
    """While models are read, and after it; a line says which of them takes longer."""
    short = ["bench", "-p", "12"]
    over = "--time-limit is over before the models are read"
    fails([*short, "--time-limit", "1e-9"], over, capsys)
    monkeypatch.setattr(bench, "run", lambda *_, **__: ([], [12]))
    fails(short, "the shortest measurement takes longer; give more", capsys)


def test_lengths_are_those_that_both_models_can_hold(
    pair: bench.BenchPair, monkeypatch: Patch
) -> None:
    """Without a list; of a list all are, or it is refused."""
    ran: list[int] = []
    monkeypatch.setattr(bench, "phases", lambda pair, tokens, *_: ran.append(len(tokens)) or {})
    row = pair.caches_bytes(64)
    assert pair.shorter.context_length == 512
    for free, lengths in ((None, [64, 256]), (row, [64])):
        monkeypatch.setattr(bench.memory, "free", lambda free=free: free)
        ran.clear()
        bench.run(pair, None, trials=1, clock=Stopwatch(None))
        assert ran == lengths
    with pytest.raises(kv.NotEnoughMemoryError, match="take --prompt-tokens of less"):
        bench.run(pair, [300], trials=1, clock=Stopwatch(None))


def test_bench_without_a_translator_times_random_maps(folders: Folders, capsys: Printed) -> None:
    assert run([*ends(folders), "-n", "1", "-p", "12", "--quantize", "none"]) == 0
    done = capsys.readouterr()
    assert "random maps of the same shapes are timed" in done.err
    assert "random maps, nu = 1" in done.out and "bundled text" in done.out


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_the_cores_that_a_process_may_use() -> None:
    """A benchmark that is held to one core of a machine has one, whatever the machine has."""
    one = min(os.sched_getaffinity(0))
    said = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from kvlingo_mlx.reporting import measure\n"
        "print(measure.environment()['cores'])"
    )
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]
