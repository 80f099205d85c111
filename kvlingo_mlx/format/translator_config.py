"""The facts of ``translator_config.json``: what they mean, and reading them strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from kvlingo_mlx.errors import IncompatibleTranslatorError, malformed
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import LayerGeometry

FORMAT_VERSION = 1
SIDES = ("keys", "values")
KINDS = ("linear", "mlp", "linear_mlp")
MATRICES = ("weight", "w1", "w2")  # last names of tensors that are multiplied by
CAPTURES = ("pre_norm", "post_norm", "post_rope", "latent")
OF_MODELS = ("precision", "projections")  # what a provenance keeps for comparison with models
MAX_CONFIG_BYTES = 2**20
MAX_LAYERS, MAX_HEADS, MAX_DIM, MAX_WINDOW = 1024, 1024, 65536, 2**31


@dataclass(frozen=True)
class ModelSpec:
    """Who may sit on one side of a translator (docs/reference/translator-format.md)."""

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
    def nu(self) -> int:
        """Source layers that a target layer reads for its keys (the largest, if they differ)."""
        return max(len(layers) for layers in self.assignment.keys)

    @property
    def native_layers(self) -> int:
        """Cache layers that the target reads itself unless told otherwise: what its profile chose,
        or what it was trained with."""
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
        return f"{self.kind}, {mixing}" + (", keys and values joint" if self.joint else "")

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
    if config.kind != "linear":
        return f"it is of kind {config.kind}, and only linear maps can be taken to the queries"
    if config.capture != "post_rope":
        return (
            f"it reads {config.capture} keys, and a cache holds post_rope ones; make one that "
            "reads those with `kvlingo-mlx fit --capture post_rope`"
        )
    return None


# ---- what a config says about its tensors ---------------------------------------------


@dataclass(frozen=True)
class Map:
    """One map of a translator: its name in the file and the shape it computes.

    ``heads`` is the number of target heads of a head-wise map, else None; ``inputs``
    and ``outputs`` are the columns and rows of one matrix.
    """

    name: str
    layer: int
    heads: int | None
    inputs: int
    outputs: int


def maps_of(config: TranslatorConfig) -> list[Map]:
    """Every map that ``config`` promises, in layer order, keys before values."""
    if config.joint:
        return [_joint_map(config, t) for t in range(len(config.target.layers))]
    return [_map(config, side, t) for side in SIDES for t in range(len(config.target.layers))]


def _map(config: TranslatorConfig, side: str, t: int) -> Map:
    target = config.target.layers[t]
    sources = [config.source.layers[s] for s in config.assignment.side(side)[t]]
    name = f"{side}.{t}"
    if config.head_mixing:
        return Map(name, t, None, sum(s.width(side) for s in sources), target.width(side))
    inputs = sum(s.head_dim(side) for s in sources)
    return Map(name, t, target.kv_heads, inputs, target.head_dim(side))


def _joint_map(config: TranslatorConfig, t: int) -> Map:
    target = config.target.layers[t]
    sources = [config.source.layers[s] for s in config.assignment.keys[t]]
    inputs = sum(s.key_width + s.value_width for s in sources)
    return Map(f"joint.{t}", t, None, inputs, target.key_width + target.value_width)


def head_map_of(config: TranslatorConfig) -> tuple[int, ...]:
    """The source head that each target head reads, of a head-wise translator."""
    heads, sources = config.target.layers[0].kv_heads, config.source.layers[0].kv_heads
    if config.head_map is not None:
        return config.head_map
    return tuple(head // (heads // sources) for head in range(heads))


def check_head_ratio(source: ModelSpec, target: ModelSpec) -> None:
    """Refuse (ValueError) head counts that new head-wise maps cannot pair evenly."""
    for spec in (source, target):
        counts = sorted({layer.kv_heads for layer in spec.layers})
        if len(counts) > 1:
            raise ValueError(
                f"head-wise maps need one KV-head count per model, {spec.name} has layers of "
                f"{' and '.join(map(str, counts))}; use head-mixing ones"
            )
    heads, sources = target.layers[0].kv_heads, source.layers[0].kv_heads
    if heads % sources:
        raise ValueError(
            f"head-wise maps need target heads ({heads}) to be a multiple of source heads "
            f"({sources}); use head-mixing ones"
        )


def expected_shapes(config: TranslatorConfig, names: Iterable[str]) -> dict[str, tuple]:
    """Name and shape of every tensor a file of this config holds.

    ``names`` are those found in the file: they decide about biases and gates, which
    every layer has or none, and the first one about a hidden width (-1 stands for it).
    """
    found = set(names)
    shapes: dict[str, tuple] = {}
    for m in maps_of(config):
        lead = () if m.heads is None else (m.heads,)
        full = m.outputs * (m.heads or 1)
        if config.kind != "mlp":
            shapes[f"{m.name}.weight"] = (*lead, m.outputs, m.inputs)
        if config.kind != "linear":
            shapes[f"{m.name}.w1"] = (*lead, -1, m.inputs)
            shapes[f"{m.name}.b1"] = (*lead, -1)
            shapes[f"{m.name}.w2"] = (*lead, m.outputs, -1)
            shapes[f"{m.name}.b2"] = (*lead, m.outputs)
        if config.kind == "mlp" and any(name.endswith(".gate") for name in found):
            shapes[f"{m.name}.gate"] = (config.target.layers[m.layer].kv_heads,)
        if any(name.endswith(".bias") for name in found):
            shapes[f"{m.name}.bias"] = (full,)
    return shapes


def flops_of(sizes: Iterable[tuple[str, int]]) -> int:
    """Floating-point operations per token of tensors given by name and size.

    Two for every number of a matrix (appendix "Computational gains"); what biases, gates
    and GELU add is not counted.
    """
    return 2 * sum(size for name, size in sizes if name.rsplit(".", 1)[-1] in MATRICES)


# ---- strict reading --------------------------------------------------------------------


def parse_json(path: Path, blob: bytes) -> Any:
    """The value of strict JSON: no repeated keys, no NaN or Inf, no lone surrogates."""
    if len(blob) > MAX_CONFIG_BYTES:
        raise malformed(path, f"is too large; a config has at most {MAX_CONFIG_BYTES} bytes")
    try:
        data = json.loads(
            blob.decode("utf-8"),
            object_pairs_hook=no_duplicates,
            parse_constant=_finite,
            parse_float=_finite,
        )
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise malformed(path, f"is not valid JSON: {error}") from None
    return data


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"key {key!r} appears twice")
        data[key] = value
    return data


def _finite(text: str) -> float:
    value = float(text)  # "NaN" and "Infinity" too
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def parse_config(path: Path, data: Any) -> TranslatorConfig:
    if not isinstance(data, dict):
        raise malformed(path, f"holds a {type(data).__name__}, expected an object")
    version = data.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise malformed(
            path,
            f"format version {version!r:.60}, this kvlingo-mlx reads {FORMAT_VERSION}; upgrade",
        )
    known = {f.name for f in fields(TranslatorConfig)} | {"format_version"}
    _check_keys(path, data, known, optional={"head_map"})
    source = _parse_model(path, "source", data["source"])
    target = _parse_model(path, "target", data["target"])
    config = TranslatorConfig(
        source=source,
        target=target,
        assignment=parse_assignment(path, data["assignment"], source, target),
        kind=_one_of(path, "kind", data["kind"], KINDS),
        head_mixing=_typed(path, "head_mixing", data["head_mixing"], bool),
        joint=_typed(path, "joint", data["joint"], bool),
        capture=_one_of(path, "capture", data["capture"], CAPTURES),
        alignment=_one_of(path, "alignment", data["alignment"], (None, "minimal_groups")),
        provenance=_typed(path, "provenance", data["provenance"], dict),
    )
    if "native_layers" in config.provenance:
        layers = config.provenance["native_layers"]
        _integer(path, "provenance.native_layers", layers, 0, len(target.layers))
    _check_joint(path, config)
    _check_latent(path, config)
    if config.head_mixing and "head_map" in data:
        raise malformed(path, "head_map belongs to head-wise translators only")
    if not config.head_mixing:
        config = replace(config, head_map=_parse_head_map(path, data.get("head_map"), config))
    return config


def _check_keys(path: Path, data: dict, known: set[str], optional: Set[str] = frozenset()) -> None:
    for key in sorted(known - optional - set(data)):
        raise malformed(path, f"lacks the key {key!r}")
    for key in sorted(set(data) - known):
        raise malformed(path, f"has the unknown key {key!r}")


def _typed(path: Path, key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise malformed(path, f"{key} is {value!r:.60}, expected a {kind.__name__}")
    return value


def _one_of(path: Path, key: str, value: Any, allowed: tuple) -> Any:
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        raise malformed(path, f"{key} is {value!r:.60}, expected one of {list(allowed)}")
    return value


def _integer(path: Path, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise malformed(path, f"{key} is {value!r:.60}, expected an integer {low} to {high}")
    return value


def _parse_model(path: Path, side: str, data: Any) -> ModelSpec:
    _typed(path, side, data, dict)
    _check_keys(path, data, {f.name for f in fields(ModelSpec)})
    fingerprint = _typed(path, f"{side}.fingerprint", data["fingerprint"], dict)
    _check_keys(path, fingerprint, {"geometry", "norms", "tokenizer"})
    for tier, digest in fingerprint.items():
        if digest is not None and not _is_sha256(digest):
            raise malformed(path, f"{side}.fingerprint.{tier} is no sha256 in hex")
    revision = data["revision"]
    if revision is not None:
        _typed(path, f"{side}.revision", revision, str)
    layers = _typed(path, f"{side}.layers", data["layers"], list)
    _integer(path, f"number of {side} layers", len(layers), 1, MAX_LAYERS)
    return ModelSpec(
        name=_typed(path, f"{side}.name", data["name"], str),
        revision=revision,
        model_type=_typed(path, f"{side}.model_type", data["model_type"], str),
        fingerprint=dict(fingerprint),
        layers=tuple(_parse_layer(path, f"{side}.layers", layer) for layer in layers),
    )


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _parse_layer(path: Path, key: str, data: Any) -> LayerGeometry:
    _typed(path, key, data, dict)
    _check_keys(path, data, {f.name for f in fields(LayerGeometry)})
    window = data["window"]
    if window is not None:
        _integer(path, f"{key}.window", window, 1, MAX_WINDOW)
    attention = _one_of(path, f"{key}.attention", data["attention"], ("full", "sliding", "latent"))
    if (attention == "sliding") != (window is not None):
        raise malformed(path, f"{key}: attention {attention!r} with window {window}")
    return LayerGeometry(
        layer=_integer(path, f"{key}.layer", data["layer"], 0, MAX_LAYERS),
        kv_heads=_integer(path, f"{key}.kv_heads", data["kv_heads"], 1, MAX_HEADS),
        key_dim=_integer(path, f"{key}.key_dim", data["key_dim"], 1, MAX_DIM),
        value_dim=_integer(path, f"{key}.value_dim", data["value_dim"], 1, MAX_DIM),
        attention=attention,
        window=window,
    )


def parse_assignment(path: Path, data: Any, source: ModelSpec, target: ModelSpec) -> Assignment:
    """The assignment that ``path`` holds as JSON; every list is checked."""
    _typed(path, "assignment", data, dict)
    _check_keys(path, data, set(SIDES))
    sides = {side: _parse_side(path, side, data[side], source, target) for side in SIDES}
    return Assignment(**sides)


def _parse_side(
    path: Path, side: str, data: Any, source: ModelSpec, target: ModelSpec
) -> tuple[tuple[int, ...], ...]:
    _typed(path, f"assignment.{side}", data, list)
    if len(data) != len(target.layers):
        raise malformed(
            path, f"assignment.{side} has {len(data)} lists for {len(target.layers)} target layers"
        )
    lengths: dict[str, int] = {}
    for t, layers in enumerate(data):
        key = f"assignment.{side}[{t}]"
        _typed(path, key, layers, list)
        for s in layers:
            _integer(path, key, s, 0, len(source.layers) - 1)
        if not layers or len(set(layers)) != len(layers):
            raise malformed(path, f"{key} is {layers}, expected distinct source layers")
        group = target.layers[t].attention
        crossing = [s for s in layers if source.layers[s].attention != group]
        if crossing:
            raise malformed(
                path, f"{key} crosses attention groups: source layer {crossing[0]} is not {group}"
            )
        if lengths.setdefault(group, len(layers)) != len(layers):
            raise malformed(path, f"{key} has {len(layers)} layers, others {lengths[group]}")
    return tuple(tuple(layers) for layers in data)


def _check_joint(path: Path, config: TranslatorConfig) -> None:
    if not config.joint:
        return
    if config.kind != "linear" or not config.head_mixing:
        raise malformed(path, "joint is true, expected kind linear with head_mixing true")
    if config.assignment.keys != config.assignment.values:
        raise malformed(path, "joint is true, but keys and values have different assignments")


def _check_latent(path: Path, config: TranslatorConfig) -> None:
    for end, spec in (("source", config.source), ("target", config.target)):
        for layer in spec.layers:
            if (layer.attention == "latent") != (config.capture == "latent"):
                raise malformed(
                    path,
                    f"capture is {config.capture!r}, but layer {layer.layer} of the {end} has "
                    f"{layer.attention} attention: latents are captured at 'latent' alone",
                )


def _parse_head_map(path: Path, data: Any, config: TranslatorConfig) -> tuple[int, ...] | None:
    targets = {layer.kv_heads for layer in config.target.layers}
    sources = {layer.kv_heads for layer in config.source.layers}
    if len(targets) > 1 or len(sources) > 1:
        raise malformed(path, "head-wise maps need one KV-head count per model")
    heads, source_heads = targets.pop(), sources.pop()
    if data is None:
        if heads % source_heads:
            raise malformed(
                path, f"{heads} target heads from {source_heads} source heads need head_map"
            )
        return None
    _typed(path, "head_map", data, list)
    if len(data) != heads:
        raise malformed(path, f"head_map has {len(data)} entries for {heads} target heads")
    return tuple(_integer(path, "head_map", h, 0, source_heads - 1) for h in data)
