"""DeepSeek-V2: latent attention, expanded; mlx-lm rotates by YaRN whatever type is named."""

from __future__ import annotations

from kvlingo_mlx.families.latent import ExpandedFamily

FAMILY = ExpandedFamily("deepseek_v2", rope_type="yarn")
