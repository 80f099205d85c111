"""Mistral: no k_norm, one attention block a layer."""

from __future__ import annotations

from kvlingo_mlx.families.base import Family

FAMILY = Family("mistral")
