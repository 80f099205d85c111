"""Which of its experts a mixture touches while it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np

from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.ceilings import EXPERTS


def expert_layers(model: LanguageModel) -> list[nn.Module]:
    """The first of the experts' three projections, one for each layer that has experts."""
    return [
        module
        for name, module in model.model.named_modules()
        if isinstance(module, EXPERTS) and name.endswith("gate_proj")
    ]


@contextlib.contextmanager
def experts_touched(model: LanguageModel) -> Iterator[list[float]]:
    """Collect, for each pass and layer, the share of its experts that a model touches."""
    shares: list[float] = []
    firsts = expert_layers(model)
    classes = [type(m) for m in firsts]
    try:
        for module, cls in zip(firsts, classes, strict=True):
            module.__class__ = _counting(cls, shares)
        yield shares
    finally:
        for module, cls in zip(firsts, classes, strict=True):
            module.__class__ = cls


def _counting(cls: type[nn.Module], shares: list[float]) -> Any:
    class Counting(cls):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, indices: mx.array, **options: Any) -> mx.array:
            used = np.unique(np.array(indices)).size
            shares.append(used / self.weight.shape[0])
            return super().__call__(x, indices, **options)

    return Counting
