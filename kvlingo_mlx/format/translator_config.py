"""The contents of ``translator_config.json``, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import MAX_HEADS, LayerGeometry
from kvlingo_mlx.format.kinds import KindSpec, kind_named
from kvlingo_mlx.format.typed import WRITTEN

# The newest. Version 1 has no recurrent layers, version 2 no maps of their states. A translator is
# written in the first one that has all it needs.
FORMAT_VERSION = 3
CAPTURES = ("pre_norm", "post_norm", "post_rope", "latent")
Head = Annotated[int, range(MAX_HEADS + 1)]
Digest = Annotated[str, re.compile("[0-9a-f]{64}", re.ASCII)]  # a sha256
TIERS = ("geometry", "norms", "tokenizer")
OF_MODELS = ("precision", "projections")  # provenance entries that are compared with loaded models


@dataclass(frozen=True)
class ModelSpec:
    """One side of a translator: which models it accepts (docs/reference/translator-format.md)."""

    name: str
    revision: str | None
    model_type: str
    fingerprint: Annotated[Mapping[str, Digest | None], TIERS]
    layers: tuple[LayerGeometry, ...]

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """The description of a loaded model, of either runtime."""
        geometry = model.geometry
        both = model.norms_fingerprint, model.tokenizer_fingerprint
        known = dict(zip(TIERS, (geometry.fingerprint, *both), strict=True))
        return cls(model.name, model.revision, geometry.model_type, known, geometry.layers)


@dataclass(frozen=True)
class TranslatorConfig:
    """The contents of ``translator_config.json``."""

    source: ModelSpec
    target: ModelSpec
    assignment: Assignment
    kind: str = field(default="linear", metadata=WRITTEN)
    head_mixing: bool = field(default=True, metadata=WRITTEN)
    joint: bool = field(default=False, metadata=WRITTEN)
    capture: Annotated[str, CAPTURES] = field(default="pre_norm", metadata=WRITTEN)
    alignment: Annotated[str, ("minimal_groups",)] | None = field(default=None, metadata=WRITTEN)
    state_maps: bool = False
    head_map: tuple[Head, ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[ModelSpec, ModelSpec]:
        """The source and the target."""
        return self.source, self.target

    @property
    def spec(self) -> KindSpec:
        """The table row of the translator's kind."""
        return kind_named(self.kind, self.joint, self.head_mixing)

    @property
    def nu(self) -> int:
        """The number of source layers per target layer, for keys; the largest, if they differ."""
        return max(len(layers) for layers in self.assignment.keys)

    @property
    def nu_told(self) -> str:
        """``nu`` in words: of keys "and" of values, where they differ."""
        counts = (max(map(len, side)) for side in (self.assignment.keys, self.assignment.values))
        return " and ".join(map(str, dict.fromkeys(counts)))

    @property
    def native_layers(self) -> int:
        """The default number of native cache layers, chosen by `tune` or used in training."""
        return self.provenance.get("native_layers", 0)

    @property
    def longest_prefix(self) -> int | None:
        """The tokens of the longest prefix that was used in fitting or testing, if recorded."""
        longest = self.provenance.get("longest_prefix")
        return longest if type(longest) is int and longest > 0 else None

    def fitted_on(self, role: str) -> str | None:
        """The precision of the ``"source"`` or ``"target"`` used in fitting, if recorded.

        For example "bfloat16" or "4 bits". A translator with a receipt was trained on the float
        dtype that the receipt names.
        """
        for kept, name in (("precision", role), ("receipt", "dtype")):
            facts = self.provenance.get(kept)
            if isinstance(facts, dict) and isinstance(facts.get(name), str):
                return facts[name]
        return None

    @property
    def title(self) -> str:
        """The translator's name in messages."""
        return f"the translator from {self.source.name} to {self.target.name}"

    @property
    def form(self) -> str:
        """What the maps compute, in words."""
        mixing = "head-mixing" if self.head_mixing else "head-wise"
        states = ", recurrent states mapped" if self.state_maps else ""
        return f"{self.kind}, {mixing}{self.spec.note}{states}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``translator_config.json`` holds."""
        data = {"format_version": self.format_version, **asdict(self)}
        for role, spec in zip(("source", "target"), self.ends, strict=True):
            data[role]["layers"] = [layer.facts for layer in spec.layers]
        unset = {"head_map": self.head_map is None, "state_maps": not self.state_maps}
        return {key: value for key, value in data.items() if not unset.get(key)}

    @property
    def format_version(self) -> int:
        """The version as which it is written: the first that has all it needs."""
        recurrent = any(layer.recurrence for spec in self.ends for layer in spec.layers)
        return 3 if self.state_maps else 2 if recurrent else 1


def capture_point(source: Any, target: Any, asked: str | None = None) -> str:
    """The capture point of a translator between two loaded models: ``asked``, or the usual one.

    The usual one is the first that both models have: before k_norm, or MLA's latents.

    Raises:
        IncompatibleTranslatorError: One model caches latents and the other does not.
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
    """Why the target cannot decode from the source's own cache by this translator; None if it can.

    Query folding needs a linear map of what the source caches, which is keys after RoPE
    (appendix "Decoding under a memory budget").
    """
    if config.alignment is not None:
        return "it is between two tokenizers, whose caches hold other tokens"
    if any(g.recurrence for spec in config.ends for g in spec.layers):
        return "some layers keep a recurrent state, which holds no keys for queries to meet"
    if not config.spec.folds:
        return f"it is of kind {config.kind}, and only linear maps can be taken to the queries"
    if config.capture != "post_rope":
        return (
            f"it reads {config.capture} keys, and a cache holds post_rope ones; make one that "
            "reads those with `kvlingo-mlx fit -c capture=post_rope`"
        )
    return None
