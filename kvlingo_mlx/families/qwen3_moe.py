"""Qwen3 mixture of experts: Qwen3's attention; the experts are no concern of the cache.

mlx-lm builds a plain RoPE here whatever ``rope_scaling`` says, so scaled checkpoints
are described as what they run as.
"""

from __future__ import annotations

from kvlingo_mlx.families.base import Family

FAMILY = Family("qwen3_moe", scaled_rope=False)
