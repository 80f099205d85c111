"""Every test begins as in a new process, in which nothing was told yet."""

import pytest

from kvlingo_mlx.loading import notes


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_told", set())
