"""What the tests of timing share."""

from __future__ import annotations

import contextlib

import pytest

from kvlingo_mlx.timing import tables


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that plans as ever, and does not end what has begun."""
    monkeypatch.setattr(tables.Clock, "limiting", lambda clock: contextlib.nullcontext())
