"""Damaged translator folders: a reader finds them sound, or refuses them with one line.

No other exception is allowed, and no hang. What is read must be what the format allows,
checked here with plain JSON and the safetensors library, and must survive being written.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import kvlingo_mlx as kv
from tests.support.damaged_folders import SOUND, Files, damaged, try_folder
from tests.support.translator_folders import (
    CARD,
    CONFIG,
    SELFTEST,
    TENSORS,
)

SEED = 20
EXAMPLES = os.environ.get("KVLINGO_EXAMPLES")  # more of them by hand, and others each time
FUZZ = settings(
    max_examples=int(EXAMPLES or 400),
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


@pytest.mark.parametrize("name", [CONFIG, TENSORS, SELFTEST])
def test_flipped_bits_are_read_or_refused(room: Path, name: str) -> None:
    rng = random.Random(SEED)
    files = SOUND[1]
    for at in range(0, len(files[name]), 3):
        blob = bytearray(files[name])
        blob[at] ^= 1 << rng.randrange(8)
        try_folder(room, files | {name: bytes(blob)})


def test_random_bytes_are_refused(room: Path) -> None:
    rng = random.Random(SEED)
    for _ in range(100):
        for name in (CONFIG, TENSORS, SELFTEST):
            files = SOUND[0] | {name: rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, 5000]))}
            assert not try_folder(room, files)
