"""DeepSeek-V3: latent attention, absorbed."""

from __future__ import annotations

from kvlingo_mlx.families.latent import AbsorbedFamily

FAMILY = AbsorbedFamily("deepseek_v3")
