"""Damaged translator folders: a reader finds them sound, or refuses them with one line.

No other exception is allowed, and no hang. What is read must be what the format allows,
checked here with plain JSON and the safetensors library, and must survive being written.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import kvlingo_mlx as kv
from tests.support.damaged_folders import SOUND, Files, damaged, try_folder
from tests.support.processes import WITHOUT_TORCH
from tests.support.translator_folders import CARD, CONFIG, SELFTEST, TENSORS, frame, store

EXAMPLES = os.environ.get("KVLINGO_EXAMPLES")  # more of them by hand, and others each time
FUZZ = settings(
    max_examples=int(EXAMPLES or 250),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder in which every example may write."""
    with tempfile.TemporaryDirectory() as root:
        yield Path(root)


def test_the_bases_are_sound(room: Path) -> None:
    assert all(try_folder(room, files) for files in SOUND)
    assert all(set(files) == {CONFIG, TENSORS, SELFTEST} for files in SOUND)
    assert try_folder(room, {**SOUND[0], CARD: b"\xff\xfe"})


@FUZZ
@given(files=damaged())
def test_mutations_are_read_or_refused(room: Path, files: Files) -> None:
    """And loaded, or refused, in seconds."""
    begun = time.process_time()
    if try_folder(room, files):
        with contextlib.suppress(kv.MalformedTranslatorError, kv.IncompatibleTranslatorError):
            kv.load_translator(room / "fuzzed")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("name", [CONFIG, TENSORS, SELFTEST])
def test_no_truncation_is_read(room: Path, name: str) -> None:
    files = SOUND[1]
    cuts = {*range(64), *range(64, len(files[name]), 7), len(files[name]) - 1}
    for cut in sorted(cuts):
        assert not try_folder(room, files | {name: files[name][:cut]}), cut


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
    """A folder for every crafted file, and one that is sound; test_checkpoint has broken ones."""
    sound = store(tmp_path / "sound")
    folders = []
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
