"""Gemma-4 with its towers, which mlx-lm leaves out: the text model alone has a cache."""

from __future__ import annotations

from kvlingo_mlx.families.gemma4_text import FAMILY

__all__ = ["FAMILY"]
