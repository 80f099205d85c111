"""The model families that can be tapped and written.

A family that needs code has a file: ``qwen3_moe.py`` serves the model_type ``qwen3_moe``. Those
that differ in names alone are rows of ``plain.py``; ``refused.py`` knows why others are none.
"""

from __future__ import annotations

import importlib
import pkgutil

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families import plain
from kvlingo_mlx.families.base import Family
from kvlingo_mlx.families.refused import reason

SHARED = ("base", "latent", "plain", "refused")  # what families are made of


def known_families() -> list[str]:
    """The model types that have an adapter."""
    files = [m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED]
    return sorted({*files, *plain.FAMILIES}, key=str.lower)


def family_of(model_type: str) -> Family:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: There is none; the message says why, or lists those there are.
    """
    if model_type in plain.FAMILIES:
        return plain.FAMILIES[model_type]
    if model_type in known_families():
        return importlib.import_module(f"{__name__}.{model_type}").FAMILY
    why = reason(model_type)
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported{why and f': {why}'}; "
        f"supported families: {', '.join(known_families())}"
    )
