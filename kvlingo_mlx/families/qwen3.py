"""Qwen3, dense: per-head k_norm before RoPE, one attention block a layer."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.families.base import Family


def _rope_scaling(config: dict[str, Any]) -> dict[str, Any] | None:
    """mlx-lm reads ``rope_scaling``, else transformers 5's ``rope_parameters``."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = config.get("rope_theta") or parameters.get("rope_theta")
    return {**scaling, "rope_theta": theta}


FAMILY = Family("qwen3", _rope_scaling)
