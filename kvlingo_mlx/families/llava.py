"""LLaVA: mlx-lm leaves its vision tower out and runs it by Mistral-3's file, by Llama's inside."""

from __future__ import annotations

from kvlingo_mlx.families.mistral3 import Mistral3

FAMILY = Mistral3("llava", relative_positions=False)
