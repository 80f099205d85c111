"""A few of the random kills that ``kill_points.py`` makes by the thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kill_points import SHARES, Jobs  # noqa: E402

from kvlingo_mlx import checkpoint  # noqa: E402


@pytest.mark.parametrize(("job", "kills"), {**dict.fromkeys(SHARES, 1), "import": 5}.items())
def test_nothing_is_lost(tmp_path: Path, job: str, kills: int) -> None:
    jobs = Jobs(tmp_path, random.Random(5))
    jobs.prepare()
    for _ in range(kills):
        jobs.survive(job)


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    """The control: a writer that empties the folder first."""
    jobs = Jobs(tmp_path, random.Random(0))
    jobs.prepare()
    (tmp_path / "imported" / checkpoint.WEIGHTS_FILE).write_bytes(b"")
    with pytest.raises(Exception, match="truncated"):
        jobs._check_import([])
