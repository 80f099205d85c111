"""`kvlingo-mlx serve-prefill` and `generate --source HOST:PORT` as programs."""

from __future__ import annotations

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

import pytest

pytest.importorskip("starlette")

from kvlingo_mlx.cli import run
from tests.support import ROOT
from tests.support.command_line import fails
from tests.support.network import Network

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
        assert received["sent"] == "states" and received["tokens"] == 26
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
