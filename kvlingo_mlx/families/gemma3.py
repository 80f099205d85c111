"""Gemma-3 with its vision tower, which mlx-lm leaves out: the text model alone has a cache."""

from __future__ import annotations

from kvlingo_mlx.families.gemma3_text import FAMILY

__all__ = ["FAMILY"]
