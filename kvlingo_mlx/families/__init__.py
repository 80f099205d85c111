"""The model families that can be tapped and written, one file each.

Files are found by name: ``qwen3_moe.py`` serves the model_type ``qwen3_moe``.
"""

from __future__ import annotations

import importlib
import pkgutil

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family

SHARED = ("base", "latent")  # what families are made of


def known_families() -> list[str]:
    """The model types that have an adapter file."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED)


def family_of(model_type: str) -> Family:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: There is none; the message lists those there are.
    """
    if model_type not in known_families():
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; "
            f"supported families: {', '.join(known_families())}"
        )
    return importlib.import_module(f"{__name__}.{model_type}").FAMILY
