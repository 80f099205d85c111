"""Checks that transformers runs a model as mlx-lm does.

A model for which they differ cannot be trained here: the translator would be trained for a model
that computes something else than the one on the Mac.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.cuda.families import TorchFamily
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.geometry import RopeSpec

# YaRN's magnitude scaling: transformers applies it only where both parameters are given, mlx-lm
# also with one of them.
MSCALES = ("mscale", "mscale_all_dim")
# RoPE types that transformers and mlx-lm compute alike, with the parameters that both read.
ROPES = {
    "default": set(),
    "listed": {"frequencies"},
    "linear": {"factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        *MSCALES,
        "llama_4_scaling_beta",  # scales queries only, in the family that has it
    },
    "proportional": {"partial_rotary_factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


def check_agreement(family: TorchFamily, model: Any, config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that transformers runs differently from mlx-lm.

    ``config`` is the result of ``family.facts``.

    Raises:
        UnsupportedModelError: The two differ; the message names the model and the setting, window
            or RoPE in which they do.
    """
    try:
        misread.check(config["model_type"], config)
        _check_windows(family, model, config)
        ropes = {
            (family.rope(config, attention), family.rope_here(model, attention))
            for attention in family.attentions(model)
        }
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from None
    for ours, theirs in sorted(ropes, key=str):
        _check_rope(ours, theirs, name)


def _check_windows(family: TorchFamily, model: Any, config: Mapping[str, Any]) -> None:
    theirs = family.windows_here(model)
    ours = family.windows(config, len(theirs))
    context = config["max_position_embeddings"]
    for layer, pair in enumerate(
        zip(_narrow(ours, context), _narrow(theirs, context), strict=True)
    ):
        if pair[0] != pair[1]:
            here, there = (f"{w} tokens" if w is not None else "all" for w in reversed(pair))
            raise UnsupportedModelError(
                f"layer {layer} attends to {here} in transformers and to {there} in "
                f"mlx-lm; set {family.no_windows} in its config.json"
            )


def _narrow(windows: Sequence[int | None], context: int) -> list[int | None]:
    """The windows, with None for each one that is at least as long as the context."""
    return [w if w is not None and w < context else None for w in windows]


def _check_rope(ours: RopeSpec, theirs: RopeSpec, name: str) -> None:
    if ours != theirs:
        raise UnsupportedModelError(
            f"{name} has RoPE {_in_words(theirs)}, which mlx-lm runs as {_in_words(ours)}: a "
            "translator trained here would not fit it there; make its config.json say what "
            "mlx-lm runs"
        )
    parameters = dict(ours.scaling)
    alone = len([name for name in MSCALES if parameters.get(name)]) == 1
    if alone or ours.type not in ROPES or not set(parameters) <= ROPES[ours.type]:
        known = "; ".join(" ".join([kind, *sorted(ROPES[kind])]) for kind in ROPES)
        raise UnsupportedModelError(
            f"{name} has RoPE {_in_words(ours)}, which mlx-lm and transformers compute "
            f"differently; training knows these types and parameters: {known}"
        )


def _in_words(rope: RopeSpec) -> str:
    scaling = "".join(f", {name} {value}" for name, value in rope.scaling)
    return f"{rope.type!r} (base {rope.base:g}{scaling})"
