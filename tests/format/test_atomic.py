"""Folders replaced at once: what killed writers leave, one writer at a time, full disks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from kvlingo_mlx.format import atomic
from tests.support.translator_folders import contents, listing, write


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    write(tmp_path / "t", seed=1)
    for name in (".t.new-abcdefgh", ".t.old-abcdefgh/old", ".t.b.new-abcdefgh", ".t.mine"):
        (tmp_path / name).mkdir(parents=True)
    new = contents(write(tmp_path / "t", seed=2))
    assert listing(tmp_path) == [".t.b.new-abcdefgh", ".t.mine", "t"]
    assert contents(tmp_path / "t") == new


def test_one_writer_of_a_folder_at_a_time(tmp_path: Path) -> None:
    """Another process holds the folder: the second one waits, and then says who has it."""
    script = (
        "import sys, pathlib; from kvlingo_mlx.format import atomic\n"
        "with atomic.alone(pathlib.Path(sys.argv[1])):\n"
        "    sys.stdout.write('held\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "t")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout and holder.stdin and holder.stdout.readline() == "held\n"
        started = time.monotonic()
        with (
            pytest.raises(OSError, match=f"process {holder.pid} is writing t in .*; wait"),
            atomic.alone(tmp_path / "t", wait=0.2),
        ):
            raise AssertionError("two writers")
        assert time.monotonic() - started >= 0.2
        timer = threading.Timer(0.2, lambda: holder.communicate("\n"))
        timer.start()
        write(tmp_path / "t")  # waits
        timer.join()
    assert holder.returncode == 0 and listing(tmp_path) == ["t"]


def test_a_disk_that_is_too_small_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10))
    with pytest.raises(OSError, match=r"the disk is full: t needs 0\.0 MB and 0\.0 MB are free"):
        write(tmp_path / "new" / "t")
    assert listing(tmp_path) == []


class Usage:
    """What is left of a disk."""

    def __init__(self, free: int) -> None:
        self.free = free
