"""The names of what is timed, for whoever reads times without taking them; no MLX."""

from __future__ import annotations

Layers = tuple[tuple[int, int], tuple[int, int]] | None  # (measured, full) for both models
SPEEDS = ("decode_source", "decode_native", "decode_translated")
# Their time ignores the prompt's length.
STEPS = ("target_step", "source_step", "eager_switch", *SPEEDS)
WHOLE = ("switch", "accelerator")  # ways to a first token that hold a translation
HYBRID = "hybrid "  # the prefix of a phase's name, before a number of layers
HEAL = "heal_"  # how the names begin of phases that end when the target's cache is its own
HEAL_IDLE, HEAL_INTERLEAVED = f"{HEAL}idle", f"{HEAL}interleaved"
HEAL_LAYERS = f"{HEAL}layers "  # before a number of layers
