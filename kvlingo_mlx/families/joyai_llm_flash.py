"""JoyAI-LLM Flash: mlx-lm runs it by DeepSeek-V3's file."""

from __future__ import annotations

from kvlingo_mlx.families.latent import AbsorbedFamily

FAMILY = AbsorbedFamily("joyai_llm_flash")
