"""Models that several tests of training share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvlingo_mlx.cuda.model import TorchModel


@pytest.fixture(scope="module")
def torch_models(folders: dict[str, Path]) -> dict[str, TorchModel]:
    """The tiny models through transformers, float32."""
    torch = pytest.importorskip("torch")
    from kvlingo_mlx.cuda import model as torch_model

    names = ("dense", "wide", "moe", "narrow", "narrow_moe")
    return {n: torch_model.load(str(folders[n]), dtype=torch.float32) for n in names}
