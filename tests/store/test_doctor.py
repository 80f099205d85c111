"""kvlingo-mlx doctor: each fault injected, each told with what to do."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlingo_mlx import backend
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.store import diagnosis
from tests.support.fixtures import Patch, Printed

TOKEN = "hf_averysecrettokenofsomebody"


@pytest.fixture
def reach() -> Callable[[str], bool]:
    """The function that knocks at the Hub's door, before it is replaced."""
    return diagnosis._reach


@pytest.fixture(autouse=True)
def offline(reach: Callable[[str], bool], monkeypatch: Patch) -> None:
    """Nobody is asked, and whatever this machine has installed is as it should be."""
    monkeypatch.setattr(diagnosis.blas, "missed", lambda: None)
    monkeypatch.setattr(diagnosis, "_reach", lambda endpoint: False)
    installed = {"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-cpu": "0.32.4"}
    set_installed(monkeypatch, installed)


def set_installed(monkeypatch: Patch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    wanted = ["mlx[cpu]<0.33,>=0.32.4", "mlx-lm<0.33,>=0.32.2", 'torch>=2.8; extra == "cuda"']
    monkeypatch.setattr(diagnosis.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(diagnosis.metadata, "version", version)


def told(capsys: Printed, status: int) -> str:
    capsys.readouterr()
    assert run(["doctor"]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_nothing_is_wrong(store: Path, capsys: Printed, monkeypatch: Patch) -> None:
    shutil.copytree(TRANSLATORS, store)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    out = told(capsys, 0)
    assert out.endswith("all checks passed\n")
    assert f"{store}, 6 translators" in out
    assert "0.32.2 (tested <0.33,>=0.32.2)" in out
    assert "not reached" in out and "there is one" in out and TOKEN not in out
    assert run(["doctor", "--json", "-"]) == 0
    text = capsys.readouterr().out
    results = json.loads(text)["results"]
    assert (
        TOKEN not in text
        and {"name": "MLX builds", "value": "mlx-cpu", "problem": None, "grade": None} in results
    )


FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "two builds": (
        {"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"},
        "wrong: MLX builds: mlx-cpu and mlx-cuda-13 own the same libmlx; keep one: pip uninstall",
    ),
    "old": ({"mlx": "0.32.4", "mlx-lm": "0.31.3"}, "wrong: mlx-lm: 0.31.3 is not among the tested"),
    "new": ({"mlx": "0.33.0", "mlx-lm": "0.32.2"}, "wrong: mlx: 0.33.0 is not among the tested"),
    "missing": ({"mlx": "0.32.4"}, 'wrong: mlx-lm: install it: pip install "mlx-lm<0.33,>=0.32.2"'),
}


@pytest.mark.parametrize(("installed", "text"), FAULTS.values(), ids=FAULTS)
def test_versions_and_clashes(
    installed: dict[str, str], text: str, capsys: Printed, monkeypatch: Patch
) -> None:
    set_installed(monkeypatch, installed)
    assert text in told(capsys, 1)


def test_damaged_translators_and_leftovers(store: Path, capsys: Printed) -> None:
    shutil.copytree(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l", store / "sound")
    shutil.copytree(store / "sound", store / "cut")
    (store / "cut" / "translator.safetensors").write_bytes(b"\0" * 20)
    (store / ".gone.old-abcdefgh" / "old").mkdir(parents=True)
    (store / ".gone.new-abcdefgh").mkdir()
    (store / ".gone.lock").touch()
    out = told(capsys, 1)
    assert f"wrong: cut: {store / 'cut' / 'translator.safetensors'}: is damaged" in out
    assert f"rm -r {store / 'cut'}\n" in out and "wrong: sound" not in out
    assert f"move {store / '.gone.old-abcdefgh' / 'old'} back to its name" in out
    assert f"a stopped import left it: rm -r {store / '.gone.new-abcdefgh'}" in out
    assert out.endswith(f"3 of {out.count(chr(10)) - 4} checks failed\n")


def test_the_machine(capsys: Printed, monkeypatch: Patch) -> None:
    def usage(path: Any) -> Any:
        return SimpleNamespace(free=10**6)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    monkeypatch.setattr(diagnosis.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(diagnosis.blas, "in_effect", lambda: "bundled BLAS")
    monkeypatch.setattr(diagnosis.blas, "missed", lambda: "install a better one")
    out = told(capsys, 1)
    assert "wrong: open files: too few for models in many files: ulimit -n" in out
    assert "wrong: disk of the store: nearly full" in out
    assert "offline (HF_HUB_OFFLINE)" in out and "slow: BLAS: install a better one" in out
    assert out.endswith(" checks failed; 1 thing is slow\n")
    monkeypatch.setattr(diagnosis.blas, "missed", lambda: None)
    monkeypatch.setattr(diagnosis.blas, "choice", lambda: None)  # as KVLINGO_BLAS=0 has it
    assert "slow: BLAS: KVLINGO_BLAS=0 chose the BLAS" in told(capsys, 1)


def test_a_device_that_does_not_compute(capsys: Printed, monkeypatch: Patch) -> None:
    def broken(a: Any, b: Any) -> Any:
        raise RuntimeError("no metal device")

    monkeypatch.setattr(diagnosis.mx, "matmul", broken)
    assert "wrong: device: it does not compute (no metal device); install MLX anew" in told(
        capsys, 1
    )
    monkeypatch.setattr(diagnosis.mx, "matmul", lambda a, b: diagnosis.mx.zeros((4, 4)))
    assert "wrong: device: it computes a product wrongly" in told(capsys, 1)


def test_reaching_the_hub(reach: Callable[[str], bool]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert reach(endpoint)
    assert not reach(endpoint) and not reach("nonsense")


def tf32(a: Any, b: Any) -> Any:
    """A product of numbers rounded to the 10 bits of TF32."""
    rounded = [(x.view(diagnosis.mx.uint32) + 0x1000 & 0xFFFFE000).view(x.dtype) for x in (a, b)]
    return rounded[0] @ rounded[1]


def test_products_in_tf32_are_told_from_true_ones(capsys: Printed, monkeypatch: Patch) -> None:
    assert backend.float32_error() < 2e-6 < backend.EXACT < 1e-4 < backend.float32_error(tf32)
    monkeypatch.setattr(diagnosis, "float32_error", lambda: backend.float32_error(tf32))
    out = told(capsys, 0)
    assert "inexact: float32 products: errors of " in out and "MLX multiplies in TF32" in out
    assert out.endswith("\n1 thing is inexact\n")


@pytest.mark.parametrize("given", [None, "1"])
def test_tf32_is_off_unless_it_is_asked_for(given: str | None) -> None:
    """In what MLX reads, and in every record."""
    code = """
import ctypes, json, kvlingo_mlx.backend
from kvlingo_mlx.reporting import measure
get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
found = measure.environment()
print(json.dumps([get(b"MLX_ENABLE_TF32").decode(), found["tf32"], found["float32_error"]]))
"""
    given_environment = {k: v for k, v in os.environ.items() if k != backend.TF32}
    given_environment |= {} if given is None else {backend.TF32: given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given_environment, capture_output=True, check=True
    )
    read, recorded, error = json.loads(done.stdout)
    assert read == recorded == (given or "0") and 0 < error < 2e-6
