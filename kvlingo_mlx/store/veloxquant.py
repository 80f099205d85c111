"""The mappers of VeloxQuant-MLX (``veloxquant_mlx.transfer``), read and written.

A folder holds ``manifest.json`` and ``mapper.safetensors``. A target layer has four tensors:
``w_k`` and ``w_v`` (target heads, inputs, width of a head) and their biases ``b_k`` and ``b_v``
(target heads, width). Inputs are all heads of the source layers that it reads, layer after layer.
Keys are taken from caches, and rotated back where ``content_space`` says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError, malformed
from kvlingo_mlx.format.config_reading import (
    MAX_CONFIG_BYTES,
    MAX_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    parse_json,
)
from kvlingo_mlx.format.geometry import RopeSpec
from kvlingo_mlx.format.tensor_file import Made, Weights, open_tensors, regular_file, write_tensors
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store.axes import OUTPUTS, Form
from kvlingo_mlx.store.described import plain_model
from kvlingo_mlx.store.foreign import Foreign, Side, short

MANIFEST, MAPPER = "manifest.json", "mapper.safetensors"
FILES = (MANIFEST, MAPPER)
VERSION = 1
LETTERS = {"keys": "k", "values": "v"}
INPUTS = ("sources", "source_heads", "source_dim")


def read_mapper(folder: Path) -> Foreign:
    """Read a mapper's manifest, and open its tensors.

    Raises:
        MalformedTranslatorError: A file is missing or unsound, or the manifest is of another
            version, lacks an entry, or has one of another type.
    """
    path = folder / MANIFEST
    for name in FILES:
        if not (folder / name).is_file():
            raise malformed(
                folder / name, f"is missing; a mapper is a folder with {' and '.join(FILES)}"
            )
        regular_file(folder / name)
    with open(path, "rb") as file:
        said = parse_json(path, file.read(MAX_CONFIG_BYTES + 1))
    if not isinstance(said, dict):
        raise malformed(path, f"holds a {type(said).__name__}, expected an object")
    version = said.get("format_version")
    if type(version) is not int or version != VERSION:
        raise malformed(
            path, f"format_version is {short(version)}, this kvlingo-mlx reads {VERSION}"
        )
    depth = _count(path, said, "target", "n_layers", MAX_LAYERS)
    reads = _reads(path, said.get("layers"), depth)
    back = _entry(path, said, "config", "content_space", bool)
    dtypes, tensors = open_tensors(folder / MAPPER)
    _check_config(path, said, reads, set(dtypes.values()))
    ends, rotations = zip(*(_end(path, said, role) for role in ("source", "target")), strict=True)
    sides = {
        side: Side(
            Form.of(
                f"{{layer}}.w_{letter}", f"heads ({' '.join(INPUTS)}) dim", (*OUTPUTS, *INPUTS)
            ),
            Form.of(f"{{layer}}.b_{letter}", "heads dim", OUTPUTS),
            reads,
        )
        for side, letter in LETTERS.items()
    }
    return Foreign(
        path,
        "veloxquant",
        dtypes,
        tensors,
        sides,
        "post_norm" if back else "post_rope",
        ends=ends,
        rotations=rotations if back else None,
        provenance={"converted_from": "VeloxQuant-MLX", "stage": 1, **_settings(said["config"])},
    )


def _check_config(
    path: Path, said: dict[str, Any], reads: tuple[tuple[int, ...], ...], dtypes: set[str]
) -> None:
    """Refuse a manifest that says otherwise than its own lists and its tensors."""
    config, there = said["config"], _count(path, said, "source", "n_layers", MAX_LAYERS)
    for layer, read in enumerate(reads):
        # Where a model has fewer layers than ``k``, its own reader takes all of them.
        if "k" in config and len(read) != min(_entry(path, said, "config", "k", int), there):
            raise malformed(
                path,
                f"config.k is {short(config['k'])}, and target layer {layer} reads {len(read)} "
                f"source layers of {there}",
            )
    if "dtype" in config and dtypes != {config["dtype"]}:
        raise malformed(
            path,
            f"config.dtype is {short(config['dtype'])}, and {MAPPER} holds "
            f"{' and '.join(sorted(dtypes))}",
        )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """How it was fitted, by our names."""
    names = {"ridge_lambda": "ridge", "n_calib_sequences": "samples", "stride": "every"}
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}


KINDS = {int: "a whole number from 1 on", float: "a number", bool: "true or false", str: "a text"}


def _entry(path: Path, said: dict[str, Any], table: str, key: str, kind: type) -> Any:
    found = said.get(table)
    if not isinstance(found, dict):
        what = f"is {short(found)}" if table in said else "is missing"
        raise malformed(path, f"{table} {what}, expected an object")
    value = found.get(key)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise malformed(path, f"{table}.{key} is {short(value)}, expected {KINDS[kind]}")
    return value


def _count(path: Path, said: dict[str, Any], role: str, key: str, most: int) -> int:
    """A size that can be real: lists are made of it."""
    value = _entry(path, said, role, key, int)
    if not 1 <= value <= most:
        raise malformed(path, f"{role}.{key} is {short(value)}, expected 1 to {most}")
    return value


def _end(path: Path, said: dict[str, Any], role: str) -> tuple[Any, RopeSpec]:
    limits = {"n_layers": MAX_LAYERS, "n_kv_heads": MAX_HEADS, "head_dim": MAX_DIM}
    layers, heads, width = (_count(path, said, role, n, most) for n, most in limits.items())
    for name in ("rope_traditional", "rope_scaling"):
        if said[role].get(name):
            raise malformed(
                path,
                f"{role}.{name} is {short(said[role][name])}, which its own reader refuses too",
            )
    base = float(_entry(path, said, role, "rope_theta", float))
    model_type = _entry(path, said, role, "model_type", str)
    return plain_model("", model_type, layers, heads, width), RopeSpec("default", base, width)


def _reads(path: Path, layers: Any, depth: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(layers, list):
        raise malformed(path, f"layers is {short(layers)}, expected a list")
    found: dict[int, tuple[int, ...]] = {}
    for entry in layers:
        row = entry if isinstance(entry, dict) else {}
        layer, read = row.get("target_layer"), row.get("source_layers")
        if type(layer) is not int or not isinstance(read, list):
            raise malformed(
                path, f"layers has {short(entry)}, expected target_layer and source_layers"
            )
        if layer in found:
            raise malformed(path, f"layers has target layer {layer} twice")
        found[layer] = tuple(read)
    missing = [t for t in range(depth) if t not in found]
    other = sorted(set(found) - set(range(depth)))
    if missing or other:
        what = f"none for target layer {missing[0]}" if missing else f"one for layer {other[-1]}"
        raise malformed(
            path,
            f"target.n_layers is {depth}, and layers has {what}; a translator has maps for all "
            "target layers",
        )
    return tuple(found[layer] for layer in range(depth))


# ---- writing --------------------------------------------------------------------------------


def why_not(config: TranslatorConfig) -> str | None:
    """Why a translator cannot be written as a mapper; None if it can."""
    if config.kind != "linear" or config.joint or not config.head_mixing:
        return f"it is {config.form}, and a mapper is linear and head-mixing, keys and values apart"
    if any(layer.recurrence for end in (config.source, config.target) for layer in end.layers):
        return "it has recurrent layers, which a mapper does not know"
    if config.capture not in ("post_norm", "post_rope"):
        return (
            f"it reads keys before the norm ({config.capture}), and a mapper reads them as a cache "
            "holds them; make one that does with `kvlingo-mlx fit -c capture=post_norm`"
        )
    if config.alignment is not None:
        return "it is between two tokenizers"
    if config.assignment.keys != config.assignment.values:
        return "its keys read other source layers than its values, and a mapper has one list"
    if len({len(read) for read in config.assignment.keys}) > 1:
        return "its target layers read different numbers of source layers"
    shapes = {
        (layer.kv_heads, layer.key_dim, layer.value_dim, layer.attention)
        for end in (config.source, config.target)
        for layer in end.layers
    }
    if len(shapes) > 1 or len({width for _, *both, _ in shapes for width in both}) > 1:
        return "its models differ in KV heads or their width, and a mapper's are alike"
    return None


def write_mapper(
    folder: Path,
    config: TranslatorConfig,
    weights: Weights,
    ends: tuple[LanguageModel, LanguageModel],
) -> None:
    """Write a translator for which :func:`why_not` has no reason; biases of zero where it has none.

    Raises:
        IncompatibleTranslatorError: A model rotates its keys as no mapper can say.
    """
    biased = "keys.0.bias" in weights.shapes
    layer = config.target.layers[0]
    heads, width = layer.kv_heads, layer.key_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for t, read in enumerate(config.assignment.keys):
        for letter in LETTERS.values():
            shapes[f"{t}.w_{letter}"] = (heads, len(read) * heads * width, width)
            shapes[f"{t}.b_{letter}"] = (heads, width)
    of = {letter: side for side, letter in LETTERS.items()}

    def make(name: str) -> np.ndarray:
        t, _, last = name.partition(".")
        side = of[last[-1]]
        if last[0] == "w":
            whole = weights.arrays[f"{side}.{t}.weight"]
            return whole.reshape(heads, width, -1).swapaxes(1, 2)
        if biased:
            return weights.arrays[f"{side}.{t}.bias"].reshape(heads, width)
        return np.zeros((heads, width), weights.arrays[f"{side}.{t}.weight"].dtype)

    manifest = {
        "format_version": VERSION,
        **{
            role: _told(model, heads, width)
            for role, model in zip(("source", "target"), ends, strict=True)
        },
        "config": {
            "k": config.nu,
            "content_space": config.capture == "post_norm",
            "dtype": weights.dtype,
        },
        "layers": [
            {"target_layer": t, "source_layers": list(read)}
            for t, read in enumerate(config.assignment.keys)
        ],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder / MAPPER, Weights(weights.dtype, Made(shapes, make)))


def _told(model: LanguageModel, heads: int, width: int) -> dict[str, Any]:
    rope = set(model.geometry.rope)
    found = rope.pop() if len(rope) == 1 else None
    if found is None or found != RopeSpec("default", found.base, width):
        raise IncompatibleTranslatorError(
            f"{model.name} does not rotate all keys alike, whole and unscaled, and a mapper knows "
            "nothing else"
        )
    return {
        "n_layers": len(model.geometry.layers),
        "n_kv_heads": heads,
        "head_dim": width,
        "rope_theta": found.base,
        "model_type": model.geometry.model_type,
    }
