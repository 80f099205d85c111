"""A few of the random kills that ``kill_points.py`` makes by the thousand."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from tests.support import ROOT
from tests.support.kill_points import SHARES, Jobs


def test_nothing_is_lost() -> None:
    """In a process of its own: MLX does not survive a fork once it has computed."""
    jobs = [job for job in SHARES if job != "train-torch" or importlib.util.find_spec("torch")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_points", "--points", "4", "--jobs", *jobs],
        cwd=ROOT, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kills = {name: n for name, n in json.loads(done.stdout).items() if name.endswith("killed")}
    assert set(kills) == {f"{job}, killed" for job in jobs}


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    """The control: an import that wrote half of a file, and one that lost what it told of."""
    jobs = Jobs(tmp_path, random.Random(0))
    jobs.prepare()
    jobs._check_import(["imported 0"])
    with pytest.raises(AssertionError, match="told of is gone"):
        jobs._check_import(["imported 1"])
    (tmp_path / "imported" / translator_folder.WEIGHTS_FILE).write_bytes(b"")
    with pytest.raises(MalformedTranslatorError, match="truncated"):
        jobs._check_import([])
