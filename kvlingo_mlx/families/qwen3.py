"""Qwen3, dense: per-head k_norm before RoPE, one attention block a layer."""

from __future__ import annotations

from kvlingo_mlx.families.base import Family

FAMILY = Family("qwen3")
