"""Crafted folders that have crashed, hung or filled a reader, loaded in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import WITHOUT_TORCH
from tests.support.translator_folders import (
    BROKEN_FILES,
    CONFIG,
    SELFTEST,
    TENSORS,
    frame,
    store,
    unpack,
)

SCRIPT = """
import sys, time
import kvlingo_mlx as kv
from kvlingo_mlx.backend import mx
kv.load_translator(sys.argv[-1])
begun = time.process_time()
kv.load_translator(sys.argv[-1])
usual = time.process_time() - begun
for folder in sys.argv[1:]:
    begun = time.process_time()
    try:
        kv.load_translator(folder)
        verdict = "read"
    except kv.MalformedTranslatorError as error:
        verdict = "refused" if str(error).isprintable() else "unprintable"
    if time.process_time() - begun > 300 * usual:  # of the same processor, at the same task
        verdict = "slow"
    print(verdict, folder, flush=True)
"""


def sparse(folder: Path, name: str, size: int) -> None:
    """A sound header over a body of many zeros that take no room on the disk."""
    entry = {"dtype": "F32", "shape": [size // 4000, 1000], "data_offsets": [0, size]}
    header = {"keys.0.weight": entry}
    blob = frame(json.dumps(header).encode(), b"")
    with open(folder / name, "wb") as file:
        file.write(blob)
        file.truncate(len(blob) + size)


def as_link(folder: Path, name: str, goal: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(goal)


def as_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "60 GB in its header": lambda f: sparse(f, TENSORS, 60 * 10**9),
    "12 GB that the config does not have": lambda f: sparse(f, TENSORS, 12 * 10**9),
    "12 GB of probes": lambda f: sparse(f, SELFTEST, 12 * 10**9),
    "a link to /dev/zero": lambda f: as_link(f, TENSORS, "/dev/zero"),
    "a config that never ends": lambda f: as_link(f, CONFIG, "/dev/zero"),
    "a link to itself": lambda f: as_link(f, TENSORS, TENSORS),
    "a pipe": lambda f: as_pipe(f, TENSORS),
    "a config of brackets": lambda f: (f / CONFIG).write_bytes(b"[" * 10**6),
    "a config of digits": lambda f: (f / CONFIG).write_bytes(b'{"format_version": ' + b"9" * 10**6),
    "a config of one string": lambda f: (f / CONFIG).write_bytes(b'"' + b"\x1b" * 900_000 + b'"'),
    "a config in UTF-16": lambda f: (f / CONFIG).write_bytes("{}".encode("utf-16")),
}  # fmt: skip


@pytest.fixture
def crafted(tmp_path: Path) -> list[Path]:
    """A folder for every crafted file, and one that is sound."""
    sound = store(tmp_path / "sound")
    folders = []
    for number, damage in enumerate(BROKEN_FILES.values()):
        for name in (TENSORS, SELFTEST):
            folder = Path(shutil.copytree(sound, tmp_path / f"file-{number}-{name}"))
            (folder / name).write_bytes(damage(*unpack((sound / TENSORS).read_bytes())))
            folders.append(folder)
    for number, change in enumerate(FOLDERS.values()):
        folders.append(Path(shutil.copytree(sound, tmp_path / f"folder-{number}")))
        change(folders[-1])
    return [*folders, sound]


def test_a_process_survives_them_all(crafted: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + SCRIPT, *map(str, crafted)],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    verdicts = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [Path(path) for _, path in verdicts] == crafted
    assert {path: verdict for verdict, path in verdicts[:-1] if verdict != "refused"} == {}
    assert verdicts[-1][0] == "read"
