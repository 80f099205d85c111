"""Gemma-4 without encoders: mlx-lm leaves its other senses out and runs it as any Gemma-4."""

from __future__ import annotations

from kvlingo_mlx.families.gemma4_text import FAMILY

__all__ = ["FAMILY"]
