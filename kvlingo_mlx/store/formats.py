"""Linear maps in the formats of others: a manifest, and tensors for each target layer.

A format is a row of ``FORMATS``: the dataclass of its manifest, by which strangers' JSON is read
and ours is written. A map of a layer is (KV heads, inputs, dim) there, where ours is
(KV heads x dim, inputs); inputs are in the same order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError, malformed
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.files import read_json, short
from kvlingo_mlx.format.geometry import MAX_LAYERS, Heads, LayerGeometry, RopeSpec, Width
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import (
    STORAGE,
    DType,
    LazyTensors,
    Shapes,
    Weights,
    open_tensors,
    write_tensors,
)
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.format.translator_folder import LARGEST
from kvlingo_mlx.format.typed import read
from kvlingo_mlx.loading.grading import without_none
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.loading.translators import folder_of
from kvlingo_mlx.models.language_model import LanguageModel

ROLES = "source", "target"
UNKNOWN = {"geometry": None, "norms": None, "tokenizer": None}


# ---- VeloxQuant-MLX ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MapperEnd:
    """A model in a manifest: its cache is alike in all layers, and its keys are rotated whole."""

    EXTRA: ClassVar[bool] = True
    n_layers: Annotated[int, range(1, MAX_LAYERS + 1)]
    n_kv_heads: Heads
    head_dim: Width
    rope_theta: float
    model_type: str
    rope_traditional: Any = None
    rope_scaling: Any = None

    def spec(self) -> ModelSpec:
        """The model, of which no more is known."""
        shape = self.n_kv_heads, self.head_dim, self.head_dim
        layers = tuple(LayerGeometry(i, *shape) for i in range(self.n_layers))
        return ModelSpec("", None, self.model_type, UNKNOWN, layers)

    @classmethod
    def of(cls, model: LanguageModel) -> MapperEnd:
        """The description of a model.

        Raises:
            IncompatibleTranslatorError: It rotates its keys as no manifest can say.
        """
        layer, rope = model.geometry.layers[0], {*model.geometry.rope}
        found = rope.pop() if len(rope) == 1 else None
        if found is None or found != RopeSpec("default", found.base, layer.key_dim):
            raise IncompatibleTranslatorError(
                f"{model.name} does not rotate all keys alike, whole and unscaled, and a manifest "
                "can say nothing else"
            )
        shape = len(model.geometry.layers), layer.kv_heads, layer.key_dim
        return cls(*shape, found.base, model.geometry.model_type)


@dataclass(frozen=True)
class MapperOptions:
    """How the maps were fitted."""

    EXTRA: ClassVar[bool] = True
    content_space: bool  # whether keys were rotated back before they were mapped
    k: int | None = None
    dtype: str | None = None
    ridge_lambda: float | None = None
    n_calib_sequences: int | None = None
    stride: int | None = None


@dataclass(frozen=True)
class MapperLayer:
    """The source layers of a target layer."""

    EXTRA: ClassVar[bool] = True
    target_layer: int
    source_layers: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    EXTRA: ClassVar[bool] = True
    PROGRAM: ClassVar[str] = "VeloxQuant-MLX"  # which writes it
    FILES: ClassVar[tuple[str, str]] = "manifest.json", "mapper.safetensors"
    # The names of matrices and biases, by layer and the side's first letter
    TENSORS: ClassVar[tuple[str, str]] = "{layer}.w_{side}", "{layer}.b_{side}"
    CAPTURES: ClassVar[tuple[str, str]] = "post_norm", "post_rope"  # the points that it knows
    format_version: int
    source: MapperEnd
    target: MapperEnd
    config: MapperOptions
    layers: tuple[MapperLayer, ...]  # in any order

    @property
    def capture(self) -> str:
        """The point at which keys were taken from caches."""
        return "post_norm" if self.config.content_space else "post_rope"

    @property
    def remembered(self) -> dict[str, Any]:
        """What a provenance keeps."""
        own = self.config
        known = {"ridge": own.ridge_lambda, "samples": own.n_calib_sequences, "every": own.stride}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The source layers of each target layer."""
        ordered = sorted(self.layers, key=lambda row: row.target_layer)
        return tuple(row.source_layers for row in ordered)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, of what its types do not say."""
        if self.format_version != 1:
            yield f"format_version is {self.format_version}, this kvlingo-mlx reads 1"
        for role, end in (("source", self.source), ("target", self.target)):
            for name in ("rope_traditional", "rope_scaling"):
                if found := getattr(end, name):
                    yield f"{role}.{name} is {short(found)}, which its own reader refuses too"
        listed, last = [row.target_layer for row in self.layers], self.target.n_layers - 1
        if sorted(listed) != [*range(last + 1)]:
            yield (
                f"layers is for target layers {short(listed)}, expected 0 to {last}, each once: a "
                "translator has maps for all of them"
            )
        for row in self.layers:
            found, most = [*row.source_layers], self.source.n_layers - 1
            if not found or len({*found}) < len(found) or not {*found} <= {*range(most + 1)}:
                yield (
                    f"target layer {row.target_layer} reads source layers {short(found)}, expected "
                    f"different ones from 0 to {most}"
                )

    def rotation(self, role: str) -> RopeSpec | None:
        """How a model's keys were rotated back; None where they were not."""
        end: MapperEnd = getattr(self, role)
        base = float(end.rope_theta)
        return RopeSpec("default", base, end.head_dim) if self.config.content_space else None

    @classmethod
    def of(
        cls, config: TranslatorConfig, dtype: DType, ends: tuple[MapperEnd, MapperEnd]
    ) -> Manifest:
        """The manifest of a translator of ours."""
        layers = (MapperLayer(t, read) for t, read in enumerate(config.assignment.keys))
        options = MapperOptions(config.capture == "post_norm", config.nu, dtype)
        return cls(1, *ends, options, tuple(layers))


FORMATS = {"veloxquant": Manifest}  # for `import --from` and `export --to`


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignMaps:
    """What a folder of others says; its tensors are unread."""

    path: Path  # of the manifest
    manifest: Manifest
    dtypes: dict[str, DType]  # of each tensor
    tensors: LazyTensors

    def read(self, name: str, dtype: DType) -> np.ndarray:
        """A tensor in ``dtype``, its own or float32, so that no number changes."""
        array, own = self.tensors[name], self.dtypes[name]
        return array if own == dtype else Weights(own, {"": array}).as_float32("")


def read_folder(name: str, folder: Path) -> ForeignMaps:
    """Read a manifest, and open the tensors beside it.

    Raises:
        MalformedTranslatorError: A file is missing or unsound, or the manifest is not the format's.
    """
    kind = FORMATS[name]
    path, tensors = (folder / file for file in kind.FILES)
    for file in (path, tensors):
        if not file.is_file():
            raise malformed(file, f"is missing; {name} is a folder with {' and '.join(kind.FILES)}")
    try:
        manifest: Manifest = read(kind, read_json(path))
    except ValueError as error:
        raise malformed(path, str(error)) from None
    for problem in manifest.problems():
        raise malformed(path, problem)
    return ForeignMaps(path, manifest, *open_tensors(tensors))


def converted(
    maps: ForeignMaps, source: ModelSpec, target: ModelSpec
) -> tuple[TranslatorConfig, Weights]:
    """The maps as a translator between two models; its weights are made when they are looked at.

    Raises:
        MalformedTranslatorError: The tensors are not those that the manifest asks for, or hold
            numbers that no sound map has.
    """
    reads, facts = maps.manifest.reads, {"converted_from": maps.manifest.PROGRAM, "stage": 1}
    config = TranslatorConfig(
        source,
        target,
        Assignment(reads, reads),
        capture=maps.manifest.capture,
        provenance=facts | maps.manifest.remembered,
    )
    dtypes = {*maps.dtypes.values()}
    dtype: DType = dtypes.pop() if len(dtypes) == 1 else "float32"  # holds all numbers exactly
    names, shapes = _laid_out(maps.manifest, config)
    _check_tensors(maps, shapes)

    def make(own: str) -> np.ndarray:
        array = maps.read(names[own], dtype)
        if array.ndim == 2:
            return array.reshape(-1)
        return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(-1, array.shape[1])

    own = {name: shapes[theirs] for name, theirs in names.items()}
    flat = {n: (s[0] * s[-1], *s[1:-1]) for n, s in own.items()}
    return config, Weights(dtype, LazyTensors(flat, make))


def _laid_out(manifest: Manifest, config: TranslatorConfig) -> tuple[dict[str, str], Shapes]:
    """Their names by ours, and the shapes of theirs."""
    names, shapes = {}, {}
    for side in SIDES:
        for t, target in enumerate(config.target.layers):
            inputs = sum(config.source.layers[s].width(side) for s in config.assignment.keys[t])
            sizes = target.kv_heads, inputs, target.head_dim(side)
            for last, pattern in zip(("weight", "bias"), manifest.TENSORS, strict=True):
                theirs = pattern.format(layer=t, side=side[0])
                names[f"{side}.{t}.{last}"] = theirs
                shapes[theirs] = sizes if last == "weight" else (sizes[0], sizes[2])
    return names, shapes


def _check_tensors(maps: ForeignMaps, expected: Shapes) -> None:
    """Refuse other tensors, other shapes, and numbers that no sound map has, by their names."""
    found = maps.tensors.shapes
    for what, names in (("lacks", {*expected} - {*found}), ("has", {*found} - {*expected})):
        if names:
            listed = ", ".join(sorted(names)[:5])
            told = f"the maps of {maps.path.name} are {len(expected)} tensors"
            raise malformed(maps.path.with_name(maps.manifest.FILES[1]), f"{what} {listed}; {told}")
    for name, shape in expected.items():
        if found[name] != shape:
            told = "KV heads, inputs, dim" if len(shape) > 2 else "KV heads, dim"
            raise malformed(maps.path, f"{name} has shape {found[name]}, expected {shape}: {told}")
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


def export(
    translator: str,
    to: str,
    out: str | os.PathLike[str],
    *,
    models: tuple[str, str] | None = None,
    force: bool = False,
) -> TranslatorConfig:
    """Write a translator for another program; the folder appears whole or not at all.

    Args:
        translator: A folder, a name that `kvlingo-mlx list` shows, or a Hub id.
        to: The format, one of ``FORMATS``.
        out: The folder to write.
        models: The source and target, which say how keys are rotated. Default: those that the
            translator names, if they are on this machine.
        force: Whether to replace another export in the folder.

    Raises:
        IncompatibleTranslatorError: The format cannot say what the translator computes; the message
            says why. Or it is not for ``models``.
        ValueError: ``to`` is unknown, or ``out`` exists and is no such export, or is one and
            ``force`` is off.
        MissingModelError: A model is not on this machine.
    """
    if to not in FORMATS:
        raise ValueError(f"--to is {to!r}; it must be one of {', '.join(FORMATS)}")
    kind, folder = FORMATS[to], atomic.followed(Path(out))
    config, weights = translator_folder.read(folder_of(translator), lazy=True)
    for reason in _unwritable(kind, config):
        raise IncompatibleTranslatorError(f"{config.title} cannot be exported to {to}: {reason}")
    _check_free(kind, folder, force)
    if models is not None:
        source, target = (load(name, lazy=True) for name in models)
    else:
        source, target = (at_hand(end.name, end.revision) for end in config.ends)
    check_pair(config, source, target)
    with atomic.new_folder(folder, 2 * weights.nbytes) as place:
        assert place is not None
        ends = MapperEnd.of(source), MapperEnd.of(target)
        _write(kind.of(config, weights.dtype, ends), place, config, weights)
    return config


def _unwritable(kind: type[Manifest], config: TranslatorConfig) -> Iterator[str]:
    """Yield the reasons for which a format cannot say what a translator computes."""
    layers = [layer for spec in config.ends for layer in spec.layers]
    if config.kind != "linear" or config.joint or not config.head_mixing:
        yield f"it is {config.form}, and the format has linear head-mixing maps of each side"
    if any(layer.recurrence for layer in layers):
        yield "it has recurrent layers, which the format does not know"
    if config.capture not in kind.CAPTURES:
        yield (
            f"it reads {config.capture} keys, and the format takes {' and '.join(kind.CAPTURES)}; "
            f"make one that reads those with `kvlingo-mlx fit -c capture={kind.CAPTURES[0]}`"
        )
    if config.alignment is not None:
        yield "it is between two tokenizers"
    if config.assignment.keys != config.assignment.values:
        yield "its keys read other source layers than its values, and the format has one list"
    if len({len(read) for read in config.assignment.keys}) > 1:
        yield "its target layers read different numbers of source layers"
    if len({(g.kv_heads, w, g.attention) for g in layers for w in (g.key_dim, g.value_dim)}) > 1:
        yield "its models differ in KV heads or their width, and the format's are alike"


def _check_free(kind: type[Manifest], folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else None
    if names is None or not names <= {*kind.FILES}:
        what = "is a file" if names is None else f"holds {min(names - {*kind.FILES})}"
        raise ValueError(f"{folder} {what}, which is no part of such an export; give a new --out")
    if names and not force:
        raise ValueError(
            f"{folder} holds an export; replace it with --force, or give another --out"
        )


def _write(manifest: Manifest, folder: Path, config: TranslatorConfig, weights: Weights) -> None:
    """Write a manifest, and tensors beside it; biases are zero where the translator has none."""
    text = json.dumps(asdict(manifest, dict_factory=without_none), indent=2) + "\n"
    (folder / manifest.FILES[0]).write_text(text, encoding="utf-8")
    names, shapes = _laid_out(manifest, config)
    ours = {theirs: own for own, theirs in names.items()}

    def make(name: str) -> np.ndarray:
        if ours[name] not in weights.shapes:
            return np.zeros(shapes[name], STORAGE[weights.dtype])
        array, (heads, *_, dim) = weights.arrays[ours[name]], shapes[name]
        parts = array.reshape(heads, dim, *array.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(1, 2)) if parts.ndim == 3 else parts

    write_tensors(folder / manifest.FILES[1], Weights(weights.dtype, LazyTensors(shapes, make)))
