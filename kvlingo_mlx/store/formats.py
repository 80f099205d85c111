"""Linear maps in the formats of others: a row of ``FORMATS`` each, read and written by that row.

A row says how tensors are called and laid out, and what the JSON manifest beside them holds: a
template whose leaves are constants or facts. To read is to match the template against a manifest,
to write is to fill it. Axes are spelt as einops spells them: ``heads (sources source_heads
source_dim) dim`` is a tensor of three axes, the second of which runs over the source layers that
are read, their heads and each head's numbers, the last one fastest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError, malformed
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.files import read_json, short
from kvlingo_mlx.format.geometry import (
    MAX_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    LayerGeometry,
    RopeSpec,
)
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import (
    STORAGE,
    DType,
    LazyTensors,
    Weights,
    open_tensors,
    write_tensors,
)
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.format.translator_folder import LARGEST
from kvlingo_mlx.models.language_model import LanguageModel

ROLES = "source", "target"
WEIGHT, BIAS = (
    "(heads dim) (sources source_heads source_dim)",
    "(heads dim)",
)  # as ours are laid out
UNKNOWN = {"geometry": None, "norms": None, "tokenizer": None}
REMEMBERED = "ridge", "samples", "every"  # facts of a manifest that the provenance keeps
NOTHING = object()  # a template's leaf that must not be there, or be false or empty


@dataclass(frozen=True)
class Leaf:
    """A template's leaf: a fact of this name."""

    name: str
    kind: Any  # str, int, float, bool, or [int] for a list
    most: int | None = None  # of a whole number from 1 on
    meaning: Mapping[Any, str] | None = None  # what each value stands for, where that is listed
    optional: bool = False

    @property
    def names(self) -> str:
        """What its value must be, in words."""
        if self.most is not None:
            return f"a whole number from 1 to {self.most}"
        known = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        return "a list of whole numbers" if self.kind == [int] else known[self.kind]

    def suits(self, found: Any) -> bool:
        if self.kind == [int]:
            return isinstance(found, list) and all(type(one) is int for one in found)
        right = type(found) in ((int, float) if self.kind is float else (self.kind,))
        return right and (self.most is None or 1 <= found <= self.most)


@dataclass(frozen=True)
class Format:
    """A format of others: a folder of a manifest, and of tensors for each target layer."""

    name: str  # for `import --from` and `export --to`
    program: str  # which writes it
    manifest: str
    tensors: str
    template: Mapping[str, Any]  # of the manifest
    letters: Mapping[str, str]  # what stands for {side} in tensors' names
    captures: tuple[str, ...]  # the points at which it can take keys
    weight: tuple[str, str]  # the names of matrices, and their axes
    bias: tuple[str, str] | None  # of biases, where it has them

    @property
    def files(self) -> tuple[str, str]:
        return self.manifest, self.tensors

    def tensors_of(self, side: str, layer: int) -> Iterator[tuple[str, str, str, str]]:
        """Yield the name and axes of each tensor of a map, and what ours are."""
        own = (("weight", WEIGHT, self.weight), ("bias", BIAS, self.bias))
        for last, axes, theirs in own:
            if theirs is not None:
                name = theirs[0].format(layer=layer, side=self.letters[side])
                yield name, theirs[1], f"{side}.{layer}.{last}", axes


def _veloxquant(role: str) -> dict[str, Any]:
    return {
        "n_layers": Leaf(f"{role}.layers", int, MAX_LAYERS),
        "n_kv_heads": Leaf(f"{role}.kv_heads", int, MAX_HEADS),
        "head_dim": Leaf(f"{role}.head_dim", int, MAX_DIM),
        "rope_theta": Leaf(f"{role}.rope_base", float),
        "model_type": Leaf(f"{role}.model_type", str),
        "rope_traditional": NOTHING,
        "rope_scaling": NOTHING,
    }


# Keys are taken from caches, and rotated back where ``content_space`` says so.
SPACES = {True: "post_norm", False: "post_rope"}
VELOXQUANT = Format(
    "veloxquant",
    "VeloxQuant-MLX",
    "manifest.json",
    "mapper.safetensors",
    {
        "format_version": 1,
        "source": _veloxquant("source"),
        "target": _veloxquant("target"),
        "config": {
            "k": Leaf("nu", int, optional=True),
            "content_space": Leaf("capture", bool, meaning=SPACES),
            "dtype": Leaf("dtype", str, optional=True),
            "ridge_lambda": Leaf("ridge", float, optional=True),
            "n_calib_sequences": Leaf("samples", int, optional=True),
            "stride": Leaf("every", int, optional=True),
        },
        "layers": [{"target_layer": Leaf("layer", int), "source_layers": Leaf("reads", [int])}],
    },
    {"keys": "k", "values": "v"},
    ("post_norm", "post_rope"),
    ("{layer}.w_{side}", "heads (sources source_heads source_dim) dim"),
    ("{layer}.b_{side}", "heads dim"),
)
FORMATS = {row.name: row for row in (VELOXQUANT,)}


# ---- templates --------------------------------------------------------------------------------


def matched(path: Path, template: Any, found: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a template's facts; those of a list of objects are ``rows``.

    Raises:
        MalformedTranslatorError: Something is missing, of another type, or not as the template has
            it; the message says where.
    """
    if isinstance(template, list):
        if not isinstance(found, list):
            raise malformed(path, f"{where} is {short(found)}, expected a list")
        rows = (matched(path, template[0], each, f"{where}[{n}]") for n, each in enumerate(found))
        yield "rows", [dict(facts) for facts in rows]
    elif isinstance(template, dict):
        if not isinstance(found, dict):
            raise malformed(path, f"{where or 'it'} is {short(found)}, expected an object")
        for key, part in template.items():
            place = f"{where}.{key}" if where else key
            if key in found:
                yield from matched(path, part, found[key], place)
            elif part is not NOTHING and not getattr(part, "optional", False):
                raise malformed(path, f"{place} is missing")
    elif isinstance(template, Leaf):
        if not template.suits(found):
            raise malformed(path, f"{where} is {short(found)}, expected {template.names}")
        yield template.name, found if template.meaning is None else template.meaning[found]
    elif template is NOTHING and found:
        raise malformed(path, f"{where} is {short(found)}, which its own reader refuses too")
    elif template is not NOTHING and (type(found) is not type(template) or found != template):
        raise malformed(path, f"{where} is {short(found)}, this kvlingo-mlx reads {template}")


def filled(template: Any, facts: Mapping[str, Any]) -> Any:
    """What a template gives with these facts; optional ones that are not there are left out."""
    if isinstance(template, Leaf):
        value = facts[template.name]
        if template.meaning is None:
            return value
        return next(key for key, stands_for in template.meaning.items() if stands_for == value)
    if isinstance(template, list):
        return [filled(template[0], row) for row in facts["rows"]]
    if not isinstance(template, dict):
        return template
    there = {
        key: part
        for key, part in template.items()
        if part is not NOTHING and (not getattr(part, "optional", False) or part.name in facts)
    }
    return {key: filled(part, facts) for key, part in there.items()}


# ---- axes -------------------------------------------------------------------------------------


def _groups(axes: str) -> list[list[str]]:
    """``a (b c)`` as [["a"], ["b", "c"]]."""
    return [(inside or alone).split() for inside, alone in re.findall(r"\((.+?)\)|(\w+)", axes)]


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor with these axes."""
    return tuple(math.prod(sizes[axis] for axis in group) for group in _groups(axes))


def rearranged(array: np.ndarray, axes: str, wanted: str, sizes: Mapping[str, int]) -> np.ndarray:
    """An array with these axes, brought into the order of ``wanted``."""
    flat = [axis for group in _groups(axes) for axis in group]
    order = [flat.index(axis) for group in _groups(wanted) for axis in group]
    apart = array.reshape([sizes[axis] for axis in flat]).transpose(order)
    return np.ascontiguousarray(apart).reshape(shape_of(wanted, sizes))


def _sizes(config: TranslatorConfig, side: str, layer: int) -> dict[str, int]:
    """What each axis of a target layer's maps counts."""
    target, read = config.target.layers[layer], config.assignment.side(side)[layer]
    source = config.source.layers[read[0]]
    return {
        "heads": target.kv_heads,
        "dim": target.head_dim(side),
        "sources": len(read),
        "source_heads": source.kv_heads,
        "source_dim": source.head_dim(side),
    }


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignMaps:
    """What a folder of others says; its tensors are unread."""

    row: Format
    path: Path  # of the manifest
    facts: Mapping[str, Any]
    dtypes: Mapping[str, DType]  # of each tensor
    tensors: LazyTensors

    def end(self, role: str) -> ModelSpec:
        """A model of which no more is known than the shape of its cache, alike in all layers."""
        names = ("layers", "kv_heads", "head_dim", "model_type")
        depth, heads, width, model_type = (self.facts[f"{role}.{name}"] for name in names)
        layers = tuple(LayerGeometry(i, heads, width, width) for i in range(depth))
        return ModelSpec(self.facts.get(f"{role}.name", ""), None, model_type, UNKNOWN, layers)

    def rotation(self, role: str) -> RopeSpec | None:
        """How the model's keys were rotated back; None where they were not, or nothing says."""
        base = self.facts.get(f"{role}.rope_base")
        if base is None or self.facts["capture"] != "post_norm":
            return None
        return RopeSpec("default", float(base), self.facts[f"{role}.head_dim"])

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The source layers of each target layer, which the manifest lists in any order."""
        rows, ends = self.facts["rows"], [self.facts[f"{role}.layers"] for role in ROLES]
        layers = [row["layer"] for row in rows]
        if sorted(layers) != list(range(ends[1])):
            raise malformed(
                self.path,
                f"layers is for target layers {short(layers)}, expected 0 to {ends[1] - 1}, each "
                "once: a translator has maps for all of them",
            )
        for row in rows:
            read = row["reads"]
            if not read or len({*read}) < len(read) or not {*read} <= {*range(ends[0])}:
                raise malformed(
                    self.path,
                    f"target layer {row['layer']} reads source layers {short(read)}, expected "
                    f"different ones from 0 to {ends[0] - 1}",
                )
        return tuple(tuple(row["reads"]) for row in sorted(rows, key=lambda row: row["layer"]))

    def read(self, name: str, dtype: DType) -> np.ndarray:
        """A tensor in ``dtype``, its own or float32, so that no number changes."""
        array, own = self.tensors[name], self.dtypes[name]
        return array if own == dtype else Weights(own, {"": array}).as_float32("")


def read_folder(row: Format, folder: Path) -> ForeignMaps:
    """Read a manifest, and open the tensors beside it.

    Raises:
        MalformedTranslatorError: A file is missing or unsound, or the manifest is not the format's.
    """
    for name in row.files:
        if not (folder / name).is_file():
            files = " and ".join(row.files)
            raise malformed(folder / name, f"is missing; {row.name} is a folder with {files}")
    path = folder / row.manifest
    facts = dict(matched(path, row.template, read_json(path)))
    return ForeignMaps(row, path, facts, *open_tensors(folder / row.tensors))


def converted(
    maps: ForeignMaps, source: ModelSpec, target: ModelSpec
) -> tuple[TranslatorConfig, Weights]:
    """The maps as a translator between two models; its weights are made when they are looked at.

    Raises:
        MalformedTranslatorError: The tensors are not those that the manifest asks for, or hold
            numbers that no sound map has.
    """
    kept = {name: maps.facts[name] for name in REMEMBERED if name in maps.facts}
    config = TranslatorConfig(
        source,
        target,
        Assignment(maps.reads, maps.reads),
        capture=maps.facts["capture"],
        provenance={"converted_from": maps.row.program, "stage": 1, **kept},
    )
    dtypes = set(maps.dtypes.values())
    dtype: DType = dtypes.pop() if len(dtypes) == 1 else "float32"  # holds all numbers exactly
    places = {}  # of ours by name: theirs, the axes of both, and what they count
    for side in SIDES:
        for layer in range(len(target.layers)):
            sizes = _sizes(config, side, layer)
            for name, axes, own, wanted in maps.row.tensors_of(side, layer):
                places[own] = name, axes, wanted, sizes
    _check_tensors(maps, {name: (axes, sizes) for name, axes, _, sizes in places.values()})

    def make(own: str) -> np.ndarray:
        name, axes, wanted, sizes = places[own]
        return rearranged(maps.read(name, dtype), axes, wanted, sizes)

    shapes = {own: shape_of(wanted, sizes) for own, (_, _, wanted, sizes) in places.items()}
    return config, Weights(dtype, LazyTensors(shapes, make))


def _check_tensors(
    maps: ForeignMaps, expected: Mapping[str, tuple[str, Mapping[str, int]]]
) -> None:
    """Refuse other tensors, other shapes, and numbers that no sound map has, by their names."""
    found = maps.tensors.shapes
    for what, names in (("lacks", {*expected} - {*found}), ("has", {*found} - {*expected})):
        if names:
            listed = ", ".join(sorted(names)[:5])
            told = f"the maps of {maps.path.name} are {len(expected)} tensors"
            raise malformed(maps.path.parent / maps.row.tensors, f"{what} {listed}; {told}")
    for name, (axes, sizes) in expected.items():
        shape = shape_of(axes, sizes)
        if found[name] != shape:
            raise malformed(maps.path, f"{name} has shape {found[name]}, expected {shape}: {axes}")
        largest = float(np.abs(maps.read(name, "float32")).max())
        if not np.isfinite(largest):
            raise malformed(maps.path, f"{name} holds NaN or Inf, expected numbers")
        if largest > LARGEST:
            raise malformed(
                maps.path,
                f"{name} holds {largest:.3g}; this package refuses weights beyond {LARGEST:g}, "
                "which no sound fit has",
            )


# ---- writing ----------------------------------------------------------------------------------


def unwritable(row: Format, config: TranslatorConfig) -> str | None:
    """Why a translator cannot be written in a format; None if it can."""
    layers = (*config.source.layers, *config.target.layers)
    widths = {(g.kv_heads, w, g.attention) for g in layers for w in (g.key_dim, g.value_dim)}
    reasons = (
        (
            config.kind != "linear" or config.joint or not config.head_mixing,
            f"it is {config.form}, and the format has linear head-mixing maps of each side",
        ),
        (
            any(layer.recurrence for layer in layers),
            "it has recurrent layers, which the format does not know",
        ),
        (
            config.capture not in row.captures,
            f"it reads {config.capture} keys, and the format takes {' and '.join(row.captures)}; "
            f"make one that reads those with `kvlingo-mlx fit -c capture={row.captures[0]}`",
        ),
        (config.alignment is not None, "it is between two tokenizers"),
        (
            config.assignment.keys != config.assignment.values,
            "its keys read other source layers than its values, and the format has one list",
        ),
        (
            len({len(read) for read in config.assignment.keys}) > 1,
            "its target layers read different numbers of source layers",
        ),
        (
            len(widths) > 1,
            "its models differ in KV heads or their width, and the format's are alike",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def write_folder(
    row: Format,
    folder: Path,
    config: TranslatorConfig,
    weights: Weights,
    ends: tuple[LanguageModel, LanguageModel],
) -> None:
    """Write a translator that is not :func:`unwritable`; biases of zero where it has none.

    Raises:
        IncompatibleTranslatorError: A model rotates its keys as no manifest can say.
    """
    rows = [{"layer": t, "reads": read} for t, read in enumerate(config.assignment.keys)]
    facts = {"nu": config.nu, "capture": config.capture, "dtype": weights.dtype, "rows": rows}
    for role, model in zip(ROLES, ends, strict=True):
        facts |= {f"{role}.{name}": fact for name, fact in _facts_of(model).items()}
    text = json.dumps(filled(row.template, facts), indent=2) + "\n"
    (folder / row.manifest).write_text(text, encoding="utf-8")
    sizes = _sizes(config, "keys", 0)  # alike in all layers, or it is unwritable
    places: dict[str, list[str]] = {}
    for side in SIDES:
        for layer in range(len(config.target.layers)):
            places |= {name: rest for name, *rest in row.tensors_of(side, layer)}
    shapes = {name: shape_of(axes, sizes) for name, (axes, _, _) in places.items()}

    def make(name: str) -> np.ndarray:
        axes, own, wanted = places[name]
        if own in weights.shapes:
            return rearranged(weights.arrays[own], wanted, axes, sizes)
        return np.zeros(shapes[name], STORAGE[weights.dtype])

    write_tensors(folder / row.tensors, Weights(weights.dtype, LazyTensors(shapes, make)))


def _facts_of(model: LanguageModel) -> dict[str, Any]:
    layer, rope = model.geometry.layers[0], set(model.geometry.rope)
    found = rope.pop() if len(rope) == 1 else None
    if found is None or found != RopeSpec("default", found.base, layer.key_dim):
        raise IncompatibleTranslatorError(
            f"{model.name} does not rotate all keys alike, whole and unscaled, and a manifest can "
            "say nothing else"
        )
    return {
        "name": model.name,
        "model_type": model.geometry.model_type,
        "rope_base": found.base,
        "layers": len(model.geometry.layers),
        "kv_heads": layer.kv_heads,
        "head_dim": layer.key_dim,
    }
