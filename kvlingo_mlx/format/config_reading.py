"""Strict reading of ``translator_config.json``: all that the format does not allow is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.assignment import Assignment, may_read
from kvlingo_mlx.format.geometry import ATTENTIONS, RULES, LayerGeometry, Recurrence
from kvlingo_mlx.format.kinds import NAMES, SIDES, kind_named
from kvlingo_mlx.format.maps import unmappable
from kvlingo_mlx.format.translator_config import (
    CAPTURES,
    FORMAT_VERSION,
    ModelSpec,
    TranslatorConfig,
)

MAX_CONFIG_BYTES = 2**20
MAX_LAYERS, MAX_HEADS, MAX_DIM, MAX_WINDOW = 1024, 1024, 65536, 2**31


def parse_json(path: Path, blob: bytes) -> Any:
    """Parse strict JSON: repeated keys, NaN, Inf and lone surrogates are refused."""
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
    value = float(text)  # also parses "NaN" and "Infinity"
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def parse_config(path: Path, data: Any) -> TranslatorConfig:
    if not isinstance(data, dict):
        raise malformed(path, f"holds a {type(data).__name__}, expected an object")
    version = data.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise malformed(
            path,
            f"format version {version!r:.60}, this kvlingo-mlx reads 1 to {FORMAT_VERSION}; "
            "upgrade",
        )
    known = {f.name for f in fields(TranslatorConfig)} | {"format_version"}
    _check_keys(path, data, known, optional={"head_map", "state_maps"})
    if data.get("state_maps", True) is not True:
        raise malformed(
            path, f"state_maps is {data['state_maps']!r:.60}, expected true, or no such key"
        )
    source = _parse_model(path, "source", data["source"])
    target = _parse_model(path, "target", data["target"])
    config = TranslatorConfig(
        source=source,
        target=target,
        assignment=parse_assignment(path, data["assignment"], source, target),
        kind=_one_of(path, "kind", data["kind"], NAMES),
        head_mixing=_typed(path, "head_mixing", data["head_mixing"], bool),
        joint=_typed(path, "joint", data["joint"], bool),
        capture=_one_of(path, "capture", data["capture"], CAPTURES),
        alignment=_one_of(path, "alignment", data["alignment"], (None, "minimal_groups")),
        state_maps="state_maps" in data,
        provenance=_typed(path, "provenance", data["provenance"], dict),
    )
    if "native_layers" in config.provenance:
        layers = config.provenance["native_layers"]
        _integer(path, "provenance.native_layers", layers, 0, len(target.layers))
    if config.format_version > version:
        what = "maps of states" if config.state_maps else "recurrent layers"
        raise malformed(path, f"has {what}, which format version {version} has not")
    check_mapped(path, config)
    _check_by_length(path, config)
    _check_kind(path, config)
    _check_latent(path, config)
    if config.head_mixing and "head_map" in data:
        raise malformed(path, "head_map belongs to head-wise translators only")
    if not config.head_mixing:
        config = replace(config, head_map=_parse_head_map(path, data.get("head_map"), config))
    return config


def check_mapped(path: Path, config: TranslatorConfig) -> None:
    """Refuse maps of states between models that have none, or from two lists of layers.

    Raises:
        MalformedTranslatorError: The message says which layer reads what it cannot.
    """
    if not config.state_maps:
        return
    if (reason := unmappable(config.source, config.target)) is not None:
        raise malformed(path, f"state_maps is true, but {reason}")
    for t, layer in enumerate(config.target.layers):
        both = [list(config.assignment.side(side)[t]) for side in SIDES]
        for s in {s for own in both for s in own}:
            if config.source.layers[s].attention != layer.attention:
                raise malformed(
                    path,
                    f"target layer {t} reads source layer {s}, but where states are mapped "
                    f"one of {layer.attention} reads its own kind alone",
                )
        if layer.recurrence is not None and both[0] != both[1]:
            raise malformed(
                path,
                f"the state of target layer {t} has one list of source layers, but "
                f"assignment.keys has {both[0]} and assignment.values {both[1]}",
            )


def _check_by_length(path: Path, config: TranslatorConfig) -> None:
    """Refuse native layers by length that are no ascending pairs of tokens and layers."""
    place = "provenance.native_by_length"
    found, before = config.provenance.get("native_by_length", []), 0
    for index, pair in enumerate(_typed(path, place, found, list)):
        where = f"{place}[{index}]"
        if len(_typed(path, where, pair, list)) != 2:
            raise malformed(path, f"{where} is {pair!r}; expected [tokens, layers]")
        _integer(path, f"{where}[0]", pair[0], before + 1, MAX_WINDOW)
        _integer(path, f"{where}[1]", pair[1], 0, len(config.target.layers))
        before = pair[0]


def _check_keys(
    path: Path, data: dict, known: set[str], optional: Set[str] = frozenset(), place: str = ""
) -> None:
    start = f"{place} " if place else ""
    for key in sorted(known - optional - set(data)):
        raise malformed(path, f"{start}lacks the key {key!r}")
    for key in sorted(set(data) - known):
        raise malformed(path, f"{start}has the unknown key {key!r}")


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
    _check_keys(path, data, {f.name for f in fields(ModelSpec)}, place=side)
    fingerprint = _typed(path, f"{side}.fingerprint", data["fingerprint"], dict)
    tiers = {"geometry", "norms", "tokenizer"}
    _check_keys(path, fingerprint, tiers, place=f"{side}.fingerprint")
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
    known = {f.name for f in fields(LayerGeometry)}
    _check_keys(path, data, known, optional={"recurrence"}, place=key)
    window = data["window"]
    if window is not None:
        _integer(path, f"{key}.window", window, 1, MAX_WINDOW)
    attention = _one_of(path, f"{key}.attention", data["attention"], ATTENTIONS)
    if (attention == "sliding") != (window is not None):
        raise malformed(path, f"{key}: attention {attention!r} with window {window}")
    return LayerGeometry(
        layer=_integer(path, f"{key}.layer", data["layer"], 0, MAX_LAYERS),
        kv_heads=_integer(path, f"{key}.kv_heads", data["kv_heads"], 1, MAX_HEADS),
        key_dim=_integer(path, f"{key}.key_dim", data["key_dim"], 1, MAX_DIM),
        value_dim=_integer(path, f"{key}.value_dim", data["value_dim"], 1, MAX_DIM),
        attention=attention,
        window=window,
        recurrence=_parse_recurrence(path, key, data),
    )


def _parse_recurrence(path: Path, key: str, layer: dict) -> Recurrence | None:
    """The recurrence of a layer that has one, which must give the widths that the layer says."""
    place, attention = f"{key}.recurrence", layer["attention"]
    if (attention in RULES) != ("recurrence" in layer):
        told = layer.get("recurrence")
        raise malformed(path, f"{key}: attention {attention!r} with recurrence {told!r:.60}")
    if "recurrence" not in layer:
        return None
    data = _typed(path, place, layer["recurrence"], dict)
    _check_keys(path, data, {f.name for f in fields(Recurrence)}, place=place)
    least = 0 if attention == "short_conv" else 1  # a convolution alone has no state
    found = Recurrence(
        key_heads=_integer(path, f"{place}.key_heads", data["key_heads"], least, MAX_HEADS),
        value_heads=_integer(path, f"{place}.value_heads", data["value_heads"], 1, MAX_HEADS),
        key_dim=_integer(path, f"{place}.key_dim", data["key_dim"], least, MAX_DIM),
        value_dim=_integer(path, f"{place}.value_dim", data["value_dim"], 1, MAX_DIM),
        kernel=_integer(path, f"{place}.kernel", data["kernel"], 2, MAX_DIM),
    )
    widths = 1, found.channels, found.gates(attention)
    told = tuple(layer[name] for name in ("kv_heads", "key_dim", "value_dim"))
    if told != widths:
        raise malformed(
            path,
            f"{key}: {told[0]} heads of {told[1]} and {told[2]} numbers, but its recurrence reads "
            f"one of {widths[1]} and {widths[2]}",
        )
    return found


def parse_assignment(path: Path, data: Any, source: ModelSpec, target: ModelSpec) -> Assignment:
    """Parse and check the assignment in ``data``, the JSON value that ``path`` holds."""
    _typed(path, "assignment", data, dict)
    _check_keys(path, data, set(SIDES), place="assignment")
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
        crossing = [s for s in layers if not may_read(target.layers[t], source.layers[s])]
        if crossing:
            raise malformed(
                path, f"{key} crosses attention groups: source layer {crossing[0]} is not {group}"
            )
        if lengths.setdefault(group, len(layers)) != len(layers):
            raise malformed(path, f"{key} has {len(layers)} layers, others {lengths[group]}")
    return tuple(tuple(layers) for layers in data)


def _check_kind(path: Path, config: TranslatorConfig) -> None:
    try:
        spec = kind_named(config.kind, config.joint, config.head_mixing)
    except ValueError as error:
        raise malformed(path, str(error)) from None
    if config.state_maps and not spec.solved:
        raise malformed(path, f"kind is {config.kind!r}, which has no maps of states (state_maps)")
    if spec.joint and config.assignment.keys != config.assignment.values:
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
                path,
                f"{heads} target heads from {source_heads} source heads need head_map, a list of "
                f"{heads} source heads (0 to {source_heads - 1}), one for each target head",
            )
        return None
    _typed(path, "head_map", data, list)
    if len(data) != heads:
        raise malformed(path, f"head_map has {len(data)} entries for {heads} target heads")
    return tuple(_integer(path, "head_map", h, 0, source_heads - 1) for h in data)
