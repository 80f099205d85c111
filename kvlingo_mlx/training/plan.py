"""What to train and how: a plan, the paper's defaults, and the config of the new translator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.format.assignment import by_depth, check_windows
from kvlingo_mlx.format.fingerprints import facts_of_models
from kvlingo_mlx.format.kinds import KindSpec, kind_named
from kvlingo_mlx.format.maps import check_head_ratio, check_states
from kvlingo_mlx.format.translator_config import (
    CAPTURES,
    TranslatorConfig,
    capture_point,
)
from kvlingo_mlx.stage1.closed_form import checked_ridge
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.stage1.selection import METHODS
from kvlingo_mlx.tokenization.aligned_prefix import check_capture, check_layers
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Best
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.recipe import Recipe, require
from kvlingo_mlx.training.runtime import Model, Pair
from kvlingo_mlx.training.watch import complaints
from kvlingo_mlx.version import __version__

MLP_STAGE1_RATE = 3e-3
MLP_STAGE1_SWEEP = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class TrainingPlan:
    """What to train and how; the defaults are the paper's, but for the ridge."""

    kind: str = "linear"  # one of ``format.kinds.NAMES``
    head_mixing: bool = True  # False for maps that stay within a head
    joint: bool = False  # one map over keys and values together
    capture: str | None = None  # the capture point of keys; the first one that both models have
    nu: int = 1  # source layers that each target layer reads
    assignment: str = "relative_depth"  # how these are chosen, or by r2
    state_maps: bool = False  # recurrent states are mapped, not what goes into them
    norm: str = "frobenius"  # of the closed form
    ridge: float | None = None  # as a share of its inputs' mean square; None: chosen for each map
    fit_samples: int = 400  # conversations for the closed form
    held_out: int = 64  # conversations that choose the learning rate
    hidden: int = 2048  # the hidden width of an MLP
    gated: bool = True  # whether an MLP has output gates
    # Native layers, from the first on, in stage 2 and whenever the translator is used; the maps
    # above them learn to work with them.
    native_layers: int = 0
    recipe: Recipe = field(default_factory=Recipe)  # of stage 2; with 0 steps stage 1 is kept
    # The recipe of stage 1 for an MLP without a linear map.
    stage1_recipe: Recipe = field(
        default_factory=lambda: Recipe(
            objective="reconstruction", learning_rates=(MLP_STAGE1_RATE,)
        )
    )
    seed: int = 0  # of an MLP's initial tensors

    def __post_init__(self) -> None:
        choices = (
            ("capture", self.capture or CAPTURES[0], CAPTURES),
            ("assignment", self.assignment, ("relative_depth", *METHODS)),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        spec = kind_named(self.kind, self.joint, self.head_mixing)
        norm_named(self.norm)
        checked_ridge(self.ridge)
        objective_named(self.recipe.objective, self.recipe.ce_weight)
        self._check_work(spec)
        require("source layers per target layer (--nu)", self.nu, 1)
        require("conversations for the closed form (fit_samples)", self.fit_samples, 1)
        require("held-out conversations (held_out)", self.held_out, 1)
        require("an MLP's hidden width (hidden)", self.hidden, 1)
        require("layers of the target's own (native_layers)", self.native_layers, 0)
        require("the seed (--seed)", self.seed, 0, 2**63 - 1)
        if self.state_maps and not spec.solved:
            raise ValueError(
                "maps of states (state_maps) begin with a closed form, and a translator of kind "
                f"{self.kind} has none; use linear or linear_mlp"
            )
        if self.joint and self.assignment in METHODS:
            raise ValueError(
                f"{self.assignment} chooses for keys and values apart, a joint map reads both; use "
                "relative_depth"
            )

    def _check_work(self, spec: KindSpec) -> None:
        """Refuse (ValueError) a plan that leaves an MLP untrained."""
        if self.recipe.steps or not spec.learnt:
            return
        if spec.solved:
            raise ValueError(
                "stage 2's steps (--steps) are 0, and stage 1 does not train the MLP of a "
                f"{self.kind}, which starts as nothing; give steps, or --kind linear"
            )
        if not self.stage1_recipe.steps:
            raise ValueError(
                "neither stage has steps (stage1_steps, --steps), and an MLP starts at random: "
                "give one of them some"
            )


def reconstruction(recipe: Recipe, rates: tuple[float, ...], steps: int) -> Recipe:
    """The recipe of an MLP's stage 1: that of stage 2 with other steps and rates.

    In a sweep one rate alone is the one that is used, and none are the paper's four. Appendix
    "Training protocol", MLP translators.
    """
    sweep = recipe.sweep and len(rates) != 1
    return replace(
        recipe,
        objective="reconstruction",
        ce_weight=1.0,
        steps=steps,
        learning_rates=rates or (MLP_STAGE1_SWEEP if sweep else (MLP_STAGE1_RATE,)),
        sweep=sweep,
    )


def provenance_of(
    plan: TrainingPlan,
    pair: Pair,
    fitted: Mapping[str, Any],
    best: Best | None,
    held_out: Sequence[Sample],
    curve: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a translator tells of its training; ``fitted`` are the facts of stage 1.

    ``best`` is the translator chosen in stage 2 on the ``held_out`` conversations, and ``curve``
    the log of that stage.
    """
    found: dict[str, Any] = {"stage": 1 if best is None else 2}
    if plan.native_layers:
        found["native_layers"] = plan.native_layers
    found |= fitted
    if best is not None:
        found |= {
            "objective": plan.recipe.objective,
            "steps": curve[-1]["step"],  # fewer than planned where the time was limited
            "batch": plan.recipe.batch,
            "learning_rate": best.rate,
            "best_step": best.step,
            "held_out": len(held_out),
            "held_out_kl": best.held_out,
            "held_out_kl_at_first": min(curve[0]["held_out"]),
        }
    if worries := complaints(curve):
        found["complaints"] = list(worries.values())
    # The prefixes of stage 1 and the held-out ones; stage 2 has the same mixture.
    prefixes = [fitted.get("longest_prefix", 0), *(len(s.prefix) for s in held_out)]
    return {
        **found,
        "longest_prefix": max(prefixes),
        **facts_of_models({"source": pair.source, "target": pair.target}),
        "assignment": plan.assignment,
        "seed": plan.seed,
        "kvlingo_mlx": __version__,
        **pair.versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def make_config(source: Model, target: Model, plan: TrainingPlan) -> TranslatorConfig:
    """The config of the translator to train.

    Raises:
        IncompatibleTranslatorError: The target has longer windows than the source, the source has
            no layer of a target layer's kind, or rotated keys are captured between two tokenizers.
        UnsupportedModelError: The tokenizers differ, and the target has windows.
        ValueError: Head-wise maps between head counts that do not divide, or no layer left to
            translate.
    """
    ends = source.spec(), target.spec()
    capture = capture_point(source, target, plan.capture)
    one = ends[0].fingerprint["tokenizer"] == ends[1].fingerprint["tokenizer"]
    if not one:
        check_capture(capture)
        check_layers(target.geometry.layers, target.name)
        if plan.native_layers:
            raise ValueError(
                f"native_layers is {plan.native_layers}, but between two tokenizers every layer "
                "is translated; leave it out"
            )
    if not plan.head_mixing:
        check_head_ratio(*ends)
    check_windows(source.geometry.layers, target.geometry.layers)
    if plan.state_maps:
        check_states(*ends)
    most = len(target.geometry.layers) - 1
    if plan.native_layers > most:
        raise ValueError(
            f"native_layers is {plan.native_layers}; give 0 to {most}, so that a layer of "
            f"{target.name} is left to translate"
        )
    assignment = by_depth(source.geometry.layers, target.geometry.layers, plan.nu)
    return TranslatorConfig(
        *ends,
        assignment,
        kind=plan.kind,
        head_mixing=plan.head_mixing,
        joint=plan.joint,
        capture=capture,
        alignment=None if one else "minimal_groups",
        state_maps=plan.state_maps,
        provenance={"native_layers": plan.native_layers} if plan.native_layers else {},
    )
