"""The facts of ``translator_config.json``, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import KindSpec, kind_named

FORMAT_VERSION = 1
CAPTURES = ("pre_norm", "post_norm", "post_rope", "latent")
OF_MODELS = ("precision", "projections")  # what a provenance keeps for comparison with models


@dataclass(frozen=True)
class ModelSpec:
    """Who may sit on one side of a translator (format page, "Model spec")."""

    name: str
    revision: str | None
    model_type: str
    fingerprint: Mapping[str, str | None]
    layers: tuple[LayerGeometry, ...]


@dataclass(frozen=True)
class TranslatorConfig:
    """The facts of ``translator_config.json``."""

    source: ModelSpec
    target: ModelSpec
    assignment: Assignment
    kind: str = "linear"
    head_mixing: bool = True
    joint: bool = False
    capture: str = "pre_norm"
    alignment: str | None = None
    head_map: tuple[int, ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> KindSpec:
        """Its kind's row."""
        return kind_named(self.kind, self.joint, self.head_mixing)

    @property
    def nu(self) -> int:
        """Source layers that a target layer reads for its keys (the largest, if they differ)."""
        return max(len(layers) for layers in self.assignment.keys)

    @property
    def native_layers(self) -> int:
        """Cache layers that the target reads itself unless told otherwise: what `tune`
        chose, or what it was trained with."""
        return self.provenance.get("native_layers", 0)

    @property
    def longest_prefix(self) -> int | None:
        """Tokens of the longest prefix that it was fitted or tested on, if it tells."""
        longest = self.provenance.get("longest_prefix")
        return longest if type(longest) is int and longest > 0 else None

    def fitted_on(self, role: str) -> str | None:
        """The precision of the ``"source"`` or ``"target"`` that it was fitted on, if it tells.

        "bfloat16" or "4 bits", say. What has a receipt was trained on the floats of that.
        """
        for kept, name in (("precision", role), ("receipt", "dtype")):
            facts = self.provenance.get(kept)
            if isinstance(facts, dict) and isinstance(facts.get(name), str):
                return facts[name]
        return None

    @property
    def title(self) -> str:
        """What it is called in a message."""
        return f"the translator from {self.source.name} to {self.target.name}"

    @property
    def form(self) -> str:
        """What its maps compute, in words."""
        mixing = "head-mixing" if self.head_mixing else "head-wise"
        return f"{self.kind}, {mixing}{self.spec.note}"

    def to_json(self) -> dict[str, Any]:
        """The object that is written to ``translator_config.json``."""
        data = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.head_map is None:
            del data["head_map"]
        return data


class Captured(Protocol):
    """A loaded model, in either runtime: its family says where its keys can be captured."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> Any: ...


def capture_point(source: Captured, target: Captured, asked: str | None = None) -> str:
    """Where a translator between two models reads and writes keys: ``asked``, or the usual point.

    The usual one is the first that both have: before k_norm, or MLA's latents.

    Raises:
        IncompatibleTranslatorError: One model caches latents, the other does not.
        ValueError: The models cannot be captured at ``asked``.
    """
    theirs, ours = source.family.points, target.family.points
    common = [point for point in theirs if point in ours]
    if not common:
        raise IncompatibleTranslatorError(
            f"{source.name} is captured at {', '.join(theirs)}, {target.name} at "
            f"{', '.join(ours)}: latents (MLA) translate into latents only"
        )
    if asked is None:
        return common[0]
    if asked not in common:
        raise ValueError(
            f"capture is {asked!r}; for {source.name} and {target.name} it must be one of "
            f"{', '.join(common)}"
        )
    return asked


def unfoldable(config: TranslatorConfig) -> str | None:
    """Why a model cannot decode from its source's own cache by this translator; None if it can.

    Query folding takes a linear map of what the source caches, which is keys after RoPE
    (appendix "Decoding under a memory budget").
    """
    if config.alignment is not None:
        return "it is between two tokenizers, whose caches hold other tokens"
    if not config.spec.folds:
        return f"it is of kind {config.kind}, and only linear maps can be taken to the queries"
    if config.capture != "post_rope":
        return (
            f"it reads {config.capture} keys, and a cache holds post_rope ones; make one that "
            "reads those with `kvlingo-mlx fit --capture post_rope`"
        )
    return None
