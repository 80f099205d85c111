"""GLM-4 MoE Lite: latent attention, absorbed."""

from __future__ import annotations

from kvlingo_mlx.families.latent import AbsorbedFamily

FAMILY = AbsorbedFamily("glm4_moe_lite")
