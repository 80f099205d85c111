"""Strict reading of ``translator_config.json``: all that the format does not allow is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.assignment import Assignment, may_read
from kvlingo_mlx.format.geometry import MAX_LAYERS, MAX_WINDOW, RULES, LayerGeometry
from kvlingo_mlx.format.kinds import SIDES, kind_named
from kvlingo_mlx.format.maps import unmappable
from kvlingo_mlx.format.translator_config import FORMAT_VERSION, ModelSpec, TranslatorConfig
from kvlingo_mlx.format.typed import read

TIERS = {"geometry", "norms", "tokenizer"}


def parse_config(path: Path, data: Any) -> TranslatorConfig:
    """A translator's config, from the JSON value that ``path`` holds.

    Raises:
        MalformedTranslatorError: It breaks a rule of the format page.
    """
    try:
        return _config(data)
    except ValueError as error:
        raise malformed(path, str(error)) from None


def parse_assignment(path: Path, data: Any, source: ModelSpec, target: ModelSpec) -> Assignment:
    """An assignment between two models, from the JSON value that ``path`` holds.

    Raises:
        MalformedTranslatorError: It breaks a rule of the format page.
    """
    try:
        found = read(Assignment, data, "assignment")
    except ValueError as error:
        raise malformed(path, str(error)) from None
    _refuse(path, _of_assignment(found, source, target))
    return found


def check_mapped(path: Path, config: TranslatorConfig) -> None:
    """Refuse maps of states between models that have none, or from two lists of layers.

    Raises:
        MalformedTranslatorError: The message says which layer reads what it cannot.
    """
    _refuse(path, _of_states(config))


def _refuse(path: Path, problems: Iterator[str]) -> None:
    for problem in problems:
        raise malformed(path, problem)


def _config(data: Any) -> TranslatorConfig:
    if not isinstance(data, dict):
        raise ValueError(f"holds a {type(data).__name__}, expected an object")
    version = data.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        told = f"format version {version!r:.60}, this kvlingo-mlx reads 1 to {FORMAT_VERSION}"
        raise ValueError(f"{told}; upgrade")
    if data.get("state_maps", True) is not True:
        found = data["state_maps"]
        raise ValueError(f"state_maps is {found!r:.60}, expected true, or no such key")
    rest = {key: value for key, value in data.items() if key != "format_version"}
    config = read(TranslatorConfig, rest)
    for problem in _problems(config, version):
        raise ValueError(problem)
    return config


def _problems(config: TranslatorConfig, version: int) -> Iterator[str]:
    for role, spec in (("source", config.source), ("target", config.target)):
        yield from _of_model(role, spec)
    yield from _of_assignment(config.assignment, config.source, config.target)
    if config.format_version > version:
        what = "maps of states" if config.state_maps else "recurrent layers"
        yield f"has {what}, which format version {version} has not"
    yield from _of_states(config)
    yield from _of_native_layers(config)
    row = kind_named(config.kind, config.joint, config.head_mixing)
    if config.state_maps and not row.solved:
        yield f"kind is {config.kind!r}, which has no maps of states (state_maps)"
    if row.joint and config.assignment.keys != config.assignment.values:
        yield "joint is true, but keys and values have different assignments"
    for role, spec in (("source", config.source), ("target", config.target)):
        for layer in spec.layers:
            if (layer.attention == "latent") != (config.capture == "latent"):
                yield (
                    f"capture is {config.capture!r}, but layer {layer.layer} of the {role} has "
                    f"{layer.attention} attention: latents are captured at 'latent' alone"
                )
    yield from _of_heads(config)


def _of_model(role: str, spec: ModelSpec) -> Iterator[str]:
    for key in sorted(TIERS - {*spec.fingerprint}):
        yield f"{role}.fingerprint lacks the key {key!r}"
    for key, digest in spec.fingerprint.items():
        if key not in TIERS:
            yield f"{role}.fingerprint has the unknown key {key!r:.60}"
        if digest is not None and (len(digest) != 64 or {*digest} - {*"0123456789abcdef"}):
            yield f"{role}.fingerprint.{key} is no sha256 in hex"
    if not 1 <= len(spec.layers) <= MAX_LAYERS:
        yield f"{role}.layers has {len(spec.layers)} {role} layers, expected 1 to {MAX_LAYERS}"
    for number, layer in enumerate(spec.layers):
        for problem in _of_layer(layer):
            yield f"{role}.layers[{number}]: {problem}"


def _of_layer(layer: LayerGeometry) -> Iterator[str]:
    attention, found = layer.attention, layer.recurrence
    if (attention == "sliding") != (layer.window is not None):
        yield f"attention {attention!r} with window {layer.window}"
    if (attention in RULES) != (found is not None):
        yield f"attention {attention!r} with recurrence {found}"
    if found is None:
        return
    # A convolution alone has no state.
    if attention != "short_conv" and not (found.key_heads and found.key_dim):
        yield f"its recurrence has {found.key_heads} key_heads of key_dim {found.key_dim}"
    widths = 1, found.channels, found.gates(attention)
    if (layer.kv_heads, layer.key_dim, layer.value_dim) != widths:
        yield (
            f"{layer.kv_heads} heads of {layer.key_dim} and {layer.value_dim} numbers, but its "
            f"recurrence reads one of {widths[1]} and {widths[2]}"
        )


def _of_assignment(assignment: Assignment, source: ModelSpec, target: ModelSpec) -> Iterator[str]:
    for side in SIDES:
        lists = assignment.side(side)
        lengths: dict[str, int] = {}
        if len(lists) != len(target.layers):
            yield f"assignment.{side} has {len(lists)} lists for {len(target.layers)} target layers"
        for t, (reads, layer) in enumerate(zip(lists, target.layers, strict=False)):
            place, last = f"assignment.{side}[{t}]", len(source.layers) - 1
            if (
                not reads
                or len({*reads}) != len(reads)
                or not 0 <= min(reads) <= max(reads) <= last
            ):
                yield f"{place} is {list(reads)!r:.60}, expected distinct layers, 0 to {last}"
                continue
            crossing = [s for s in reads if not may_read(layer, source.layers[s])]
            if crossing:
                yield (
                    f"{place} crosses attention groups: source layer {crossing[0]} is not "
                    f"{layer.attention}"
                )
            if lengths.setdefault(layer.attention, len(reads)) != len(reads):
                yield f"{place} has {len(reads)} layers, others {lengths[layer.attention]}"


def _of_states(config: TranslatorConfig) -> Iterator[str]:
    if not config.state_maps:
        return
    if (reason := unmappable(config.source, config.target)) is not None:
        yield f"state_maps is true, but {reason}"
    for t, layer in enumerate(config.target.layers):
        both = [list(config.assignment.side(side)[t]) for side in SIDES]
        for s in (*both[0], *both[1]):
            if config.source.layers[s].attention != layer.attention:
                yield (
                    f"target layer {t} reads source layer {s}, but where states are mapped one of "
                    f"{layer.attention} reads its own kind alone"
                )
        if layer.recurrence is not None and both[0] != both[1]:
            yield (
                f"the state of target layer {t} has one list of source layers, but "
                f"assignment.keys has {both[0]} and assignment.values {both[1]}"
            )


def _of_native_layers(config: TranslatorConfig) -> Iterator[str]:
    """Native layers, and those by length: ascending pairs of tokens and layers."""
    depth, place = len(config.target.layers), "provenance.native_by_length"
    found = config.provenance.get("native_layers", 0)
    if type(found) is not int or not 0 <= found <= depth:
        yield f"provenance.native_layers is {found!r:.60}, expected 0 to {depth}"
    pairs, before = (
        read(tuple[tuple[int, ...], ...], config.provenance.get("native_by_length", []), place),
        0,
    )
    for index, pair in enumerate(pairs):
        right = len(pair) == 2 and before < pair[0] <= MAX_WINDOW and 0 <= pair[1] <= depth
        if not right:
            yield (
                f"{place}[{index}] is {list(pair)!r:.60}; expected [tokens, layers], {before + 1} "
                f"to {MAX_WINDOW} and 0 to {depth}"
            )
            return
        before = pair[0]


def _of_heads(config: TranslatorConfig) -> Iterator[str]:
    if config.head_mixing:
        if config.head_map is not None:
            yield "head_map belongs to head-wise translators only"
        return
    counts = [{layer.kv_heads for layer in spec.layers} for spec in (config.source, config.target)]
    if max(map(len, counts)) > 1:
        yield "head-wise maps need one KV-head count per model"
    sources, heads = (count.pop() for count in counts)
    if config.head_map is None and heads % sources:
        yield (
            f"{heads} target heads from {sources} source heads need head_map, a list of {heads} "
            f"source heads (0 to {sources - 1}), one for each target head"
        )
    if config.head_map is not None and len(config.head_map) != heads:
        yield f"head_map has {len(config.head_map)} entries for {heads} target heads"
    if config.head_map is not None and max(config.head_map) >= sources:
        yield f"head_map has {max(config.head_map)}, expected source heads 0 to {sources - 1}"
