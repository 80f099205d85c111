"""Checks that transformers runs a model as mlx-lm does.

A model for which they differ cannot be trained here: the translator would be trained for a model
that computes something else than the one on the Mac.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.cuda.families import TorchFamily
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.geometry import RopeSpec

# YaRN's magnitude scaling: transformers applies it only where both parameters are given, mlx-lm
# also with one of them.
MSCALES = ("mscale", "mscale_all_dim")
# RoPE types that transformers and mlx-lm compute alike, with the parameters that both read.
# ``llama_4_scaling_beta`` scales queries only, in the family that has it.
ROPES: dict[str, set[str]] = {
    "default": set(),
    "listed": {"frequencies"},
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
             "llama_4_scaling_beta", *MSCALES},
    "proportional": {"partial_rotary_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"},
}  # fmt: skip


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
    here, context = family.windows_here(model), config["max_position_embeddings"]
    both = zip(here, family.windows(config, len(here)), strict=True)
    for layer, windows in enumerate(both):
        # A window at least as long as the context is none.
        reach = [f"{w} tokens" if w is not None and w < context else "all" for w in windows]
        if reach[0] != reach[1]:
            raise UnsupportedModelError(
                f"layer {layer} attends to {reach[0]} in transformers and to {reach[1]} in "
                f"mlx-lm; set {family.no_windows} in its config.json"
            )


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
