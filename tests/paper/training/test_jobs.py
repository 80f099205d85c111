"""A training of a label by torchrun, and what its processes tell."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("lm_eval")

import torch

from benchmarks.paper.commands import run
from benchmarks.paper.reproducing.entries import SMALL
from benchmarks.paper.reproducing.models import Models
from benchmarks.paper.reproducing.trained import Wanted, trained
from benchmarks.paper.reproducing.work import TINY, Heard, Work
from benchmarks.paper.training import jobs
from kvlingo_mlx.cuda import runtime
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.training.checkpoints import log_of, read_log
from kvlingo_mlx.training.command_line import Listeners
from tests.support import ROOT


def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands, listen = [], jobs._listen
    monkeypatch.setattr(jobs, "_listen", lambda c, heard: (commands.append(c), listen(c, heard)))
    few = {"batch": 3, "validate_every": 1, "fit_samples": 4, "held_out": 3}
    size, heard = replace(TINY, steps=2, training=few, max_prefix=64, answer=16), list[str]()
    made = []
    for processes in (1, 2):
        room, models = tmp_path / str(processes), Models(None, True, tmp_path)
        work = Work(room, models, size, device="cpu", processes=processes)
        work = replace(work, heard=Heard(progress=heard.append))
        folder = trained(work, SMALL, Wanted(*SMALL, "mixing", 42))
        assert read_log(log_of(folder))[-1]["step"] == 2
        made.append(translator_folder.read(folder)[1].arrays)
    assert ["--nproc-per-node=2" in command for command in commands] == [True]
    assert heard.count("tiny-qwen3-s--tiny-qwen3-l--mixing--42: stage2") == 4
    for name, array in made[0].items():
        np.testing.assert_allclose(made[1][name], array, atol=1e-5 * np.abs(array).max())


def test_a_process_that_fails_says_why() -> None:
    silent: Any = Listeners(print, print, print)
    told = "print('[noise]'); print('told: [\"failed\", \"no memory\"]'); raise SystemExit(1)"
    with pytest.raises(KVLingoError, match="^no memory$"):
        jobs._listen([sys.executable, "-c", told], silent)
    with pytest.raises(KVLingoError, match=r"torchrun failed:\n(.*\n)*ZeroDivisionError"):
        jobs._listen([sys.executable, "-c", "1 / 0"], silent)


def test_each_process_of_cuda_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes the current device for barriers, and refuses two processes on one."""
    done: list[tuple[str, str]] = []
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: done.append(("set", to)))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda by: done.append(("by", by)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert [runtime.join(place).rank for place in ("cuda", "cpu")] == [1, 1]
    assert done == [("set", "cuda:1"), ("by", "nccl"), ("by", "gloo")]


def test_processes_are_pytorchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["app:fig:norms", "--tiny", "--processes", "2", "--device", "mlx"]
    assert run(["reproduce", *words, "--room", str(tmp_path)]) == 2
    assert "add --device cuda or cpu" in capsys.readouterr().err
