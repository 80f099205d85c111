"""Kimi-K2: mlx-lm runs it by DeepSeek-V3's file."""

from __future__ import annotations

from kvlingo_mlx.families.latent import AbsorbedFamily

FAMILY = AbsorbedFamily("kimi_k2")
