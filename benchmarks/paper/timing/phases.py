"""The names of what is timed, in code and in words, for whoever reads times; no MLX."""

from __future__ import annotations

SPEEDS = ("decode_source", "decode_native", "decode_translated")
# Their time ignores the prompt's length.
STEPS = ("target_step", "source_step", "eager_switch", *SPEEDS)
HYBRID = "hybrid "  # the prefix of a phase's name, before a number of layers
HEAL = "heal_"  # how the names begin of phases that end when the target's cache is its own
HEAL_IDLE, HEAL_INTERLEAVED = f"{HEAL}idle", f"{HEAL}interleaved"
HEAL_LAYERS = f"{HEAL}layers "  # before a number of layers
LABELS = {
    "source_prefill": "source prefill",
    "native": "target prefill, as mlx-lm",
    "native_single": "target prefill, one pass",
    "target_step": "target step",
    "source_step": "source step (source writes first token)",
    "switch": "switch",
    "eager_switch": "switch, translated eagerly",
    "accelerator": "accelerator",
    "heal_idle": "until native, healed idle",
    "heal_interleaved": "until native, healed between tokens",
}
SPEED_LABELS = {
    "decode_source": "source",
    "decode_native": "target, own cache",
    "decode_translated": "target, translated cache",
}


def label(phase: str, decoded: int | None = None) -> str:
    """The name of a phase in a table; of decoding, over so many tokens, or over one."""
    kind, _, rest = phase.partition(" ")
    if kind == "hybrid":
        return f"switch, {layers_of(rest)} native"
    if kind == "heal_layers":
        return f"until native, {layers_of(rest)} at once"
    if phase in SPEED_LABELS:
        return f"{SPEED_LABELS[phase]}, {'a token' if decoded is None else f'{decoded} tokens'}"
    return LABELS.get(phase, phase.replace("translate", "translation,"))


def layers_of(number: int | str) -> str:
    """A number of layers in words."""
    return f"{number} layer{'s' * (str(number) != '1')}"
