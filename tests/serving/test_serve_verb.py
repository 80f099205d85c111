"""`kvlingo-mlx serve` as a program: its lines, its errors, its end."""

import builtins
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvlingo_mlx.cli import serve
from kvlingo_mlx.serving.settings import Settings
from tests.support import ROOT
from tests.support.command_line import fails
from tests.support.fixtures import Patch, Printed
from tests.support.processes import until
from tests.support.scripted_engine import TOLD

MODELS = ["--model", "small=tiny-qwen3-s", "--model", "large=tiny-qwen3-l"]
PROGRAM = (
    "import functools, sys\n"
    "from kvlingo_mlx import cli\n"
    "from kvlingo_mlx.serving import server, supervisor\n"
    "from tests.support.scripted_engine import ENGINE\n"
    "server.serve = functools.partial(server.serve, engine=ENGINE)\n"
    "supervisor.CRASHES = 3\n"
    "if __name__ == '__main__':\n"
    "    sys.argv[0] = 'kvlingo-mlx'\n"
    "    cli.main()\n"
)


@contextmanager
def program(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The verb in a process of its own, over an engine that runs scripts."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), "serve", *MODELS, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--conversations", str(folder), *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> str:
    """The address, as soon as the models are ready."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("small, large at http://127.0.0.1:")
    assert "ready: small, large" in process.stderr.readline()
    return re.findall(r"a chat at (http://\S+)/ ", line)[0]


def test_it_serves_until_ctrl_c_and_saves(tmp_path: Path) -> None:
    with program(tmp_path) as process:
        url = ready(process)
        body = {"model": "small", "messages": [{"role": "user", "content": "begin;say SECRET"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "SECRET"
        missing = {"model": "none", "prompt": "SECRET"}
        assert httpx.post(f"{url}/v1/completions", json=missing).status_code == 404
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in error and "SECRET" not in out + error
    assert (
        "small: 200, translate; 100 tokens of prompt (60 cached, 30 translated, 10 read)" in error
    )
    assert "POST /v1/completions was refused: 404" in error and "GET " not in error
    assert json.loads((tmp_path / TOLD).read_text().splitlines()[-1]) == ["stop"]


def test_ctrl_c_of_a_terminal_reaches_the_parent_alone(tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to all processes; the server saves all the same."""
    with program(tmp_path, "-c", "stop_timeout=0.5") as process:
        url = ready(process)
        body = {"model": "small", "prompt": "begin;say a;wait 600", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            all_processes(process, signal.SIGINT)
            _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "waiting for an answer to end, at most 0.5 s; Ctrl-C again ends them" in error
    assert json.loads((tmp_path / TOLD).read_text().splitlines()[-1]) == ["stop"]


def all_processes(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal as a terminal does."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    for pid in [*map(int, children.stdout.split()), process.pid]:
        os.kill(pid, number)


def test_a_server_that_cannot_begin_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("fatal there is no model /a, name another")
    with program(tmp_path) as process:
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (2, "error: there is no model /a, name another\n")


def test_a_server_that_crashes_is_started_again(tmp_path: Path) -> None:
    """Its clients see a closed connection; those that come meanwhile wait, and are answered."""
    with program(tmp_path) as process:
        url = ready(process)
        for script in ("signal SIGKILL", "begin;say a;signal SIGABRT"):
            body = {"model": "small", "prompt": script, "stream": True}
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=30)
            asked: dict[str, Any] = {"model": "small", "prompt": "begin;say a"}
            assert client.completions.create(**asked).choices[0].text == "a"
        assert "kvlingo_worker_restarts_total 2.0" in httpx.get(f"{url}/metrics").text
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads((tmp_path / TOLD).read_text().splitlines()[-1]) == ["stop"]
    for signal_name in ("SIGKILL", "SIGABRT"):
        assert f"the server crashed ({signal_name}); it is started again in " in error


def test_an_engine_that_hangs_ends_the_process(tmp_path: Path) -> None:
    with program(tmp_path, "-c", "worker_timeout=1") as process:
        url = ready(process)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json={"model": "small", "prompt": "hang"})
        assert httpx.get(f"{url}/health/live", timeout=60).is_success
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert "the server crashed (exit status 1)" in error


def test_a_server_that_crashes_again_and_again_ends(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("exit 3")
    with program(tmp_path) as process:
        _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "error: the server crashed 3 times in a row, last by exit status 3; see" in error


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    with program(tmp_path) as process:
        ready(process)
        process.kill()
        until((tmp_path / TOLD).exists)
    assert json.loads((tmp_path / TOLD).read_text()) == ["stop"]


def test_a_name_without_a_model_is_told_before_anything_listens(
    tmp_path: Path, capsys: Printed
) -> None:
    fails(["serve", "--model", "nomodel"], "nomodel does not exist; give a model's folder", capsys)
    fails(["serve", *MODELS, "--model", f"c={tmp_path}"], "has no config.json", capsys)
    (tmp_path / "config.json").write_text("{")
    fails(["serve", *MODELS, "--model", f"c={tmp_path}"], "is not valid JSON", capsys)


def test_a_port_in_use(capsys: Printed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = f"port {port} of 127.0.0.1 is in use; give another --port"
        fails(["serve", *MODELS, "--port", str(port)], told, capsys)


def test_without_the_extra(monkeypatch: Patch, capsys: Printed) -> None:
    for name in [name for name in sys.modules if name.startswith("kvlingo_mlx.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["kvlingo_mlx"], "serving", raising=False)
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "starlette":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    told = 'a server needs starlette and others (starlette.applications is missing): pip install "'
    fails(["serve", *MODELS], told, capsys)


def test_every_setting_is_an_option() -> None:
    options = {field.name.removesuffix("s") for field in dataclasses.fields(Settings)}
    fields = {field.name.removesuffix("s") for field in dataclasses.fields(serve.ServeOptions)}
    assert fields == options | {"config", "json_file"}
