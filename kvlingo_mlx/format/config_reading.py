"""Strict reading of ``translator_config.json``: all that the format does not allow is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.assignment import Assignment, may_read
from kvlingo_mlx.format.geometry import MAX_LAYERS, RULES, LayerGeometry
from kvlingo_mlx.format.kinds import SIDES, kind_named
from kvlingo_mlx.format.maps import unmappable, unpaired_heads
from kvlingo_mlx.format.translator_config import FORMAT_VERSION, ModelSpec, TranslatorConfig
from kvlingo_mlx.format.typed import read


def parse_config(path: Path, data: Any) -> TranslatorConfig:
    """A translator's config, from the JSON value that ``path`` holds.

    Raises:
        MalformedTranslatorError: It breaks a rule of the format page.
    """
    try:
        version, config = _config(data)
        _refuse(path, _problems(config, version))
    except ValueError as error:
        raise malformed(path, str(error)) from None
    return config


def parse_assignment(path: Path, data: Any, source: ModelSpec, target: ModelSpec) -> Assignment:
    """An assignment between two models, from the JSON value that ``path`` holds.

    Raises:
        MalformedTranslatorError: It breaks a rule of the format page.
    """
    try:
        found: Assignment = read(Assignment, data, "assignment")
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


def _config(data: Any) -> tuple[int, TranslatorConfig]:
    """The version and the contents, each value of its type."""
    if not isinstance(data, dict):
        raise ValueError(f"holds a {type(data).__name__}, expected an object")
    version = data.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        found = f"format version {version!r:.60}"
        raise ValueError(f"{found}, this kvlingo-mlx reads 1 to {FORMAT_VERSION}; upgrade")
    if data.get("state_maps", True) is not True:
        found = data["state_maps"]
        raise ValueError(f"state_maps is {found!r:.60}, expected true, or no such key")
    rest = {key: value for key, value in data.items() if key != "format_version"}
    return version, read(TranslatorConfig, rest)


def _problems(config: TranslatorConfig, version: int) -> Iterator[str]:
    ends = ("source", config.source), ("target", config.target)
    for role, spec in ends:
        if not 1 <= len(spec.layers) <= MAX_LAYERS:
            yield f"{role}.layers has {len(spec.layers)} layers, expected 1 to {MAX_LAYERS}"
        for number, layer in enumerate(spec.layers):
            for problem in _of_layer(layer):
                yield f"{role}.layers[{number}]: {problem}"
    yield from _of_assignment(config.assignment, config.source, config.target)
    if config.format_version > version:
        what = "maps of states" if config.state_maps else "recurrent layers"
        yield f"has {what}, which format version {version} has not"
    yield from _of_states(config)
    depth, native = len(config.target.layers), config.provenance.get("native_layers", 0)
    if type(native) is not int or not 0 <= native <= depth:
        yield f"provenance.native_layers is {native!r:.60}, expected 0 to {depth}"
    row = kind_named(config.kind, config.joint, config.head_mixing)
    if config.state_maps and not row.solved:
        yield f"kind is {config.kind!r}, which has no maps of states (state_maps)"
    if row.joint and config.assignment.keys != config.assignment.values:
        yield "joint is true, but keys and values have different assignments"
    for role, spec in ends:
        for layer in spec.layers:
            if (layer.attention == "latent") != (config.capture == "latent"):
                yield (
                    f"capture is {config.capture!r}, but layer {layer.layer} of the {role} has "
                    f"{layer.attention} attention: latents are captured at 'latent' alone"
                )
    if config.head_mixing and config.head_map is not None:
        yield "head_map belongs to head-wise translators only"
    if not config.head_mixing and (reason := unpaired_heads(*config.ends, config.head_map)):
        yield reason


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
    keys, values = found.channels, found.gates(attention)
    if (layer.kv_heads, layer.key_dim, layer.value_dim) != (1, keys, values):
        yield (
            f"{layer.kv_heads} heads of {layer.key_dim} and {layer.value_dim} numbers, but its "
            f"recurrence reads one of {keys} and {values}"
        )


def _of_assignment(assignment: Assignment, source: ModelSpec, target: ModelSpec) -> Iterator[str]:
    last = len(source.layers) - 1
    for side in SIDES:
        lists, lengths = assignment.side(side), dict[str, int]()
        if len(lists) != len(target.layers):
            yield f"assignment.{side} has {len(lists)} lists for {len(target.layers)} target layers"
        for t, (reads, layer) in enumerate(zip(lists, target.layers, strict=False)):
            place = f"assignment.{side}[{t}]"
            if not reads or len({*reads}) != len(reads) or not {*reads} <= {*range(last + 1)}:
                yield f"{place} is {list(reads)!r:.60}, expected distinct layers, 0 to {last}"
                continue
            for s in reads:
                if not may_read(layer, source.layers[s]):
                    yield (
                        f"{place} crosses attention groups: source layer {s} is not "
                        f"{layer.attention}"
                    )
            if lengths.setdefault(layer.attention, len(reads)) != len(reads):
                yield f"{place} has {len(reads)} layers, others {lengths[layer.attention]}"


def _of_states(config: TranslatorConfig) -> Iterator[str]:
    if not config.state_maps:
        return
    if (reason := unmappable(*config.ends)) is not None:
        yield f"state_maps is true, but {reason}"
    both = config.assignment.keys, config.assignment.values
    for t, (layer, keys, values) in enumerate(zip(config.target.layers, *both, strict=True)):
        for s in (*keys, *values):
            if config.source.layers[s].attention != layer.attention:
                yield (
                    f"target layer {t} reads source layer {s}, but where states are mapped one of "
                    f"{layer.attention} reads its own kind alone"
                )
        if layer.recurrence is not None and keys != values:
            yield (
                f"the state of target layer {t} has one list of source layers, but "
                f"assignment.keys has {[*keys]} and assignment.values {[*values]}"
            )
