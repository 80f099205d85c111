"""A source on another machine: its caches are those of a local hand-over."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine.responses import summary
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator
from tests.support import ROOT, hybrid_models, tiny
from tests.support.command_line import fails
from tests.support.identity import identity_of
from tests.support.native_caches import entries, native
from tests.support.network import Network, Offered, offered
from tests.support.opened import quantised

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
SMALL = dict(layers=4, kv_heads=4, head_dim=16)
LARGE = dict(layers=6, kv_heads=4, head_dim=32)
QWEN3, UNMAPPED = ("qwen3", dict(layers=3, kv_heads=2, head_dim=32)), dict(state_maps=False)
End = tuple[str, dict[str, Any]]
# source, target, how the translator is made
PAIRS: dict[str, tuple[End, End | None, dict[str, Any]]] = {
    "qwen3": (("qwen3", SMALL), ("qwen3", LARGE), dict(nu=2, bias=True)),
    "head-wise": (("qwen3", SMALL), ("qwen3", LARGE), dict(head_mixing=False)),
    "moe": (("qwen3", SMALL), ("qwen3_moe", LARGE), dict(nu=2, capture="post_rope")),
    "windows": (
        ("gemma3_text", {**SMALL, "layers": 6}),
        ("gemma3_text", {**LARGE, "layers": 9, "sliding_window": 10}),
        dict(nu=1),
    ),
    "latent": (("deepseek_v3", SMALL), ("deepseek_v3", {**LARGE, "head_dim": 16}), dict(nu=1)),
    "bfloat16": (
        ("qwen3", {**SMALL, "dtype": "bfloat16"}),
        ("qwen3", {**LARGE, "dtype": "bfloat16", "kv_heads": 2}),
        dict(nu=2),
    ),
    # What recurrences are given is sent, no more; a map that reads both sides of a layer, or a
    # state, gets these.
    "states": (("granitemoehybrid", {}), None, {}),
    "tails": (("lfm2", {}), None, {}),
    "to states": (QWEN3, ("qwen3_5", {}), UNMAPPED),
    "from states": (("qwen3_5", {}), QWEN3, UNMAPPED),
    "to tails": (("granitemoehybrid", {}), ("lfm2", {}), UNMAPPED),
    "delta": (("qwen3_5", {}), ("qwen3_5_moe", {}), dict(state_maps=True)),
    "mamba": (("nemotron_h", {}), ("granitemoehybrid", {}), dict(state_maps=True)),
}
PLAIN = [*PAIRS][:6]
WAYS: list[dict[str, Any]] = [
    {},
    {"prefill_step_size": 7},
    {"prefill_step_size": 7, "native_layers": 2},
    {"prefill_step_size": 16, "native_head": 9, "native_tail": 3},
    {"prefill_step_size": 5, "native_layers": 1, "native_head": 6, "native_tail": 2},
]
PROMPT = tiny.random_tokens(61)


def opened(folder: Path, seed: int, kind: str, options: dict[str, Any]) -> LanguageModel:
    if kind in hybrid_models.CONFIGS:
        return kv.load(hybrid_models.write_hybrid_model(folder, kind))
    return kv.load(tiny.write_tiny_model(folder, kind, seed=seed, **options))


class Pair:
    """A source, on this machine and on another one, and a target; without one, the source."""

    def __init__(self, root: Path, name: str) -> None:
        first, second, how = PAIRS[name]
        self.source = self.target = opened(root / f"{name}-a", 31, *first)
        if second is None:
            self.translator = identity_of(self.source)
        else:
            self.target = opened(root / f"{name}-b", 32, *second)
            if "state_maps" in how:
                ends = self.source, self.target
                self.translator = hybrid_models.random_translator(*ends, **how)
            else:
                folders = (root / f"{name}-{end}" for end in "tab")
                self.translator = kv.load_translator(tiny.write_random_translator(*folders, **how))
        self.offered = Offered(self.source)

    def remote(self) -> Any:
        return kv.connect(self.offered.address)

    def caches(self, source: Any, **options: Any) -> list[np.ndarray]:
        options |= {"translator": self.translator}
        return entries(kv.hand_over(source, self.target, PROMPT, **options))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pair by its name, opened when it is first asked for."""
    root, found = tmp_path_factory.mktemp("remote"), {}

    def pair(name: str) -> Pair:
        if name not in found:
            found[name] = Pair(root, name)
        return found[name]

    yield pair
    for each in found.values():
        each.offered.stop()


@pytest.mark.parametrize("name", PAIRS)
def test_the_caches_are_those_of_one_machine(pairs: Any, name: str) -> None:
    """To the bit."""
    pair = pairs(name)
    remote = pair.remote()
    for way in WAYS if name in PLAIN else WAYS[1:4]:
        own, theirs = pair.caches(pair.source, **way), pair.caches(remote, **way)
        for one, other in zip(own, theirs, strict=True):
            assert np.isfinite(one).all() and np.array_equal(one, other), way
    other = pair.caches(pair.source, native_layers=0, prefill_step_size=61)
    shuffled = [np.roll(a, 1, axis=2) for a in other]  # negative control
    assert not all(map(np.array_equal, shuffled, theirs))


def answered(source: Any, target: LanguageModel, translator: Translator, **options: Any) -> Any:
    return list(kv.stream_generate(source, target, PROMPT, translator=translator, max_tokens=9,
                                   prefill_step_size=16, **options))  # fmt: skip


def widths(translator: Translator, layers: int) -> dict[tuple[str, int], int]:
    """What is read of each layer, from the translator's config."""
    config = translator.config
    above = itertools.product(("keys", "values"), range(layers, len(config.target.layers)))
    return {
        (side, each): config.source.layers[each].width(side)
        for side, layer in above
        for each in getattr(config.assignment, side)[layer]
    }


@pytest.mark.parametrize(("name", "itemsize"), [("qwen3", 4), ("head-wise", 4), ("bfloat16", 2)])
def test_only_what_maps_read_is_sent(pairs: Any, name: str, itemsize: int) -> None:
    """The bytes are those of the layers that are read."""
    pair = pairs(name)
    for layers in (0, 3):
        (*_, last) = answered(pair.remote(), pair.target, pair.translator, native_layers=layers)
        found, tokens = last.received, len(PROMPT) - 1
        each = itemsize * sum(widths(pair.translator, layers).values())
        heads = -(-tokens // 16) * 8000  # of files
        assert found.tokens == tokens and each * tokens < found.bytes < each * tokens + heads
    assert len(maps_of(pair.translator.config)) == 12


def test_windows_are_sent_as_far_as_they_are_kept(pairs: Any) -> None:
    """The source's local layers come with the chunks that the target's windows reach into."""
    pair = pairs("windows")
    sent = answered(pair.remote(), pair.target, pair.translator)[-1].received.bytes
    source = pair.translator.config.source.layers
    read = {layer for side in pair.translator.config.assignment.keys for layer in side}
    assert sent < sum(4 * 60 * 2 * source[layer].kv_heads * source[layer].key_dim for layer in read)


def test_answers_are_those_of_one_machine(pairs: Any, tmp_path: Path) -> None:
    """Also with a source of 4 bits; the summary tells what came. Healing ends as ever."""
    pair = pairs("qwen3")
    small = quantised(pair.source, tmp_path / "4bit")
    with offered(small) as other:
        ways = (pair.source, pair.remote()), (small, kv.connect(other.address))
        for source, remote in ways:
            own = answered(source, pair.target, pair.translator)
            theirs = answered(remote, pair.target, pair.translator)
            assert [r.token for r in own] == [r.token for r in theirs]
            assert own[-1].received is None
            assert theirs[-1].received.address == remote.address
            assert f"MB from {remote.address} (the source's states, " in summary(theirs[-1])
    for heal in ("interleaved", "layers"):
        assert len(answered(pair.remote(), pair.target, pair.translator, heal=heal)) == 9
    cache = kv.hand_over(pair.remote(), pair.target, PROMPT, translator=pair.translator,
                         heal="idle")  # fmt: skip
    while cache.heal():
        pass
    alone = native(pair.target, PROMPT[:-1], 2048)
    for one, other in zip(cache, alone, strict=True):
        assert mx.allclose(one.keys[..., :60, :], other.keys[..., :60, :], atol=1e-4)


def test_a_draft_of_this_machine_and_any_step(pairs: Any) -> None:
    pair = pairs("qwen3")
    own = kv.generate(pair.source, pair.target, PROMPT, translator=pair.translator, max_tokens=12,
                      draft_model=pair.source)  # fmt: skip
    theirs = kv.generate(pair.offered.address, pair.target, PROMPT, translator=pair.translator,
                         max_tokens=12, draft_model=pair.source)  # fmt: skip
    assert own == theirs
    one = kv.generate(pair.offered.address, pair.target, PROMPT[:1], max_tokens=3)
    assert one == kv.generate(pair.source, pair.target, PROMPT[:1], max_tokens=3)


ASK = ["--target", "tiny-qwen3-l", "--no-thinking", "--prompt",
       "The home of Paul is Oslo. What is the home of Paul?"]  # fmt: skip
VERB = [sys.executable, "-m", "kvlingo_mlx.cli"]
RIGHT = {"KVLINGO_API_KEY": "right"}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The verb in a process of its own, and its port."""
    process = subprocess.Popen(
        [*VERB, "serve-prefill", "--source", "tiny-qwen3-s", "--port", "0", *options],
        cwd=ROOT, env={**os.environ, **RIGHT}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"tiny-qwen3-s reads for others at http://[\d.]+:(\d+) .*\n", line)
        assert found is not None, (line, process.poll())
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def test_two_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An answer, its record and summary; keys; Ctrl-C of both; a server that has gone."""
    record = tmp_path / "record.jsonl"
    with served("--host", "0") as (process, port):
        source = ["--source", f"127.0.0.1:{port}"]
        fails(["generate", *source, *ASK], "refuses: no key was given", capsys)
        for name, value in RIGHT.items():
            monkeypatch.setenv(name, value)
        assert run(["generate", *source, *ASK, "--json", str(record)]) == 0
        told = capsys.readouterr().out
        assert told.startswith("The home of Paul is Oslo.\n====")
        assert f"\nReceived: 0.1 MB from 127.0.0.1:{port} (the source's states, 4," in told
        received = json.loads(record.read_text())["results"]["received"]
        assert received["tokens"] == 26
        assert 26 * 4096 < received["bytes"] < 26 * 4096 + 2000
        fails(["generate", *source, *ASK, "--strategy", "native"], "does not need", capsys)
        fails(["generate", *source, *ASK, "-c", "memory_budget=true"], "is an address, and", capsys)
        fails(["generate", *source, *ASK, "-c", "guard=8"], "cannot be used with guard", capsys)

        network = Network(port, rate=2000.0)  # nearly a minute for all of it
        slow = subprocess.Popen(
            [*VERB, "generate", "--source", network.address, *ASK], cwd=ROOT, text=True,
            env={**os.environ, **RIGHT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        while network.passed < 6_000:
            time.sleep(0.05)
        slow.send_signal(signal.SIGINT)
        told, wrong = slow.communicate(timeout=120)
        assert (slow.returncode, told) == (130, "") and "Traceback" not in wrong, wrong
        network.close()
        assert run(["generate", *source, *ASK]) == 0  # the server lives on
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in wrong
        capsys.readouterr()
        fails(["generate", *source, *ASK], "cannot be reached (", capsys)
