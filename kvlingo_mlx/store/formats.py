"""Linear maps in the formats of others: a manifest, and tensors for each target layer.

A format is a row of ``FORMATS``: the dataclass of its manifest, by which strangers' JSON is read
and ours is written. A map of a layer is (KV heads, inputs, dim) or (inputs, KV heads x dim) there,
where ours is (KV heads x dim, inputs); inputs are in the same order.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError, malformed
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.format.config_reading import parse_assignment
from kvlingo_mlx.format.files import read_json, sha256_of, short
from kvlingo_mlx.format.geometry import MAX_LAYERS, Heads, RopeSpec, Width
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
from kvlingo_mlx.format.typed import WRITTEN, read
from kvlingo_mlx.loading.grading import without_none
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.loading.translators import folder_of
from kvlingo_mlx.models.language_model import LanguageModel

ROLES = "source", "target"
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
COMMIT = re.compile("[0-9a-f]{40}", re.ASCII)
Commit = Annotated[str, COMMIT]
Models = Sequence[LanguageModel]  # the source and the target


@dataclass(frozen=True)
class End:
    """What a manifest says of a model; None is what it leaves out."""

    kv_heads: int
    dim: int
    layers: int | None = None
    model_type: str | None = None
    rope: RopeSpec | None = None  # by which its keys were rotated back
    name: str | None = None
    commit: str | None = None


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
    FILES: ClassVar[tuple[str, ...]] = "manifest.json", "mapper.safetensors"
    # The names of matrices and biases, by layer and the side's first letter
    TENSORS: ClassVar[tuple[str, str]] = "{layer}.w_{side}", "{layer}.b_{side}"
    BY_HEAD: ClassVar[bool] = True  # whether heads are an axis of their own
    DTYPES: ClassVar[tuple[DType, ...]] = tuple(STORAGE)  # of its tensors
    CAPTURES: ClassVar[tuple[str, ...]] = "post_norm", "post_rope"  # the points that it knows
    format_version: int
    source: MapperEnd
    target: MapperEnd
    config: MapperOptions
    layers: tuple[MapperLayer, ...]  # in any order

    @property
    def capture(self) -> str:
        """The point at which keys were taken from caches."""
        return "post_norm" if self.config.content_space else "post_rope"

    def end(self, role: str) -> End:
        """What it says of the ``"source"`` or ``"target"``."""
        end: MapperEnd = getattr(self, role)
        rope = RopeSpec("default", float(end.rope_theta), end.head_dim)
        facts = end.n_kv_heads, end.head_dim, end.n_layers, end.model_type
        return End(*facts, rope if self.config.content_space else None)

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

    @classmethod
    def of(cls, config: TranslatorConfig, weights: Weights, models: Models) -> Manifest:
        """The manifest of a translator of ours."""
        layers = (MapperLayer(t, read) for t, read in enumerate(config.assignment.keys))
        options = MapperOptions(config.capture == "post_norm", config.nu, weights.dtype)
        source, target = map(MapperEnd.of, models)
        return cls(1, source, target, options, tuple(layers))


# ---- vLLM's semantic router -------------------------------------------------------------------


@dataclass(frozen=True)
class RouterPair:
    """The models of a mapper, which a router's must equal to the last entry; it has no others."""

    num_kv_heads: Heads  # of both
    head_dim: Width
    precision: Annotated[str, tuple(PRECISIONS.values())]  # of the target
    source_model: str
    source_revision: Commit
    target_model: str
    target_revision: Commit
    variant: Annotated[str, ("full_head",)] = field(default="full_head", metadata=WRITTEN)
    source_tp: Annotated[int, range(1, 2)] = field(default=1, metadata=WRITTEN)
    target_tp: Annotated[int, range(1, 2)] = field(default=1, metadata=WRITTEN)
    head_order: Annotated[str, ("contiguous",)] = field(default="contiguous", metadata=WRITTEN)


@dataclass(frozen=True)
class RouterManifest:
    """The contents of a router's ``manifest.json``: keys are taken after k_norm, before RoPE."""

    EXTRA: ClassVar[bool] = True
    PROGRAM: ClassVar[str] = "vLLM Semantic Router"
    FILES: ClassVar[tuple[str, ...]] = "manifest.json", "weights.safetensors", "SHA256SUMS"
    TENSORS: ClassVar[tuple[str, str]] = "target.{layer}.{side}.W", "target.{layer}.{side}.b"
    BY_HEAD: ClassVar[bool] = False
    DTYPES: ClassVar[tuple[DType, ...]] = ("float32",)
    CAPTURES: ClassVar[tuple[str, ...]] = ("post_norm",)
    capture: ClassVar[str] = "post_norm"
    mapper_id: str
    compatibility: RouterPair
    topk: Annotated[int, range(1, MAX_LAYERS + 1)]
    ridge_alpha: float
    centered_inputs: bool  # whether the fit had a bias
    rope_stripped_on_keys: bool
    source_layers_per_target: Annotated[Mapping[str, Mapping[str, tuple[int, ...]]], ("k", "v")]
    schema_version: Annotated[int, range(1, 2)] = 1

    def end(self, role: str) -> End:
        """What it says of the ``"source"`` or ``"target"``."""
        own = vars(self.compatibility)
        name, commit = own[f"{role}_model"], own[f"{role}_revision"]
        return End(own["num_kv_heads"], own["head_dim"], name=name, commit=commit)

    @property
    def remembered(self) -> dict[str, Any]:
        """What a provenance keeps."""
        return {"ridge": self.ridge_alpha, "mapper": self.mapper_id}

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The source layers of each target layer."""
        keys = self.source_layers_per_target["k"]
        return tuple(keys[str(layer)] for layer in range(len(keys)))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, of what its types do not say."""
        if not self.rope_stripped_on_keys:
            yield "rope_stripped_on_keys is false, expected maps of keys before RoPE"
        keys, values = (self.source_layers_per_target[side] for side in "kv")
        alike = keys == values and {*map(len, keys.values())} == {self.topk}
        if not alike or {*keys} != {*map(str, range(len(keys)))}:
            yield (
                f"source_layers_per_target is not {self.topk} layers for each of 0, 1 and so on, "
                "alike for k and v"
            )

    @classmethod
    def of(cls, config: TranslatorConfig, weights: Weights, models: Models) -> RouterManifest:
        """The manifest of a translator of ours; models without a commit or a float dtype have none.

        Raises:
            IncompatibleTranslatorError: One is such, or rotates its keys as no router does.
        """
        ends: list[Any] = []
        for spec, model in zip(config.ends, models, strict=True):
            MapperEnd.of(model)  # refuses other rotations
            end = spec if model.revision is None else model
            if not COMMIT.fullmatch(end.revision or "") or model.precision not in PRECISIONS:
                raise IncompatibleTranslatorError(
                    f"{end.name} has {end.revision or 'no commit'} and runs in {model.precision}, "
                    f"and the format wants a commit of the Hub and {' or '.join(PRECISIONS)}; give "
                    "--source and --target by their Hub ids, as the router has them"
                )
            ends += end.name, end.revision
        layer, precision = config.target.layers[0], PRECISIONS[models[1].precision]
        pair = RouterPair(layer.kv_heads, layer.key_dim, precision, *ends)
        titles = (Path(name).name.lower() for name in ends[::2])
        facts = f"full_head-{precision}-tp1-h{layer.kv_heads}-s{ends[1]}-t{ends[3]}-b1"
        read = {str(t): found for t, found in enumerate(config.assignment.keys)}
        centred = any(name.endswith("bias") for name in weights.shapes)
        ridge, both = float(config.provenance.get("ridge", 0.0)), {"k": read, "v": read}
        return cls("-".join((*titles, facts)), pair, config.nu, ridge, centred, True, both)


AnyManifest = Manifest | RouterManifest
# For `import --from` and `export --to`
FORMATS: dict[str, type[AnyManifest]] = {"veloxquant": Manifest, "semantic-router": RouterManifest}


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignMaps:
    """What a folder of others says; its tensors are unread."""

    path: Path  # of the manifest
    manifest: AnyManifest
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
    path, tensors, *sums = (folder / file for file in kind.FILES)
    for file in (path, tensors, *sums):
        if not file.is_file():
            raise malformed(file, f"is missing; {name} is a folder with {' and '.join(kind.FILES)}")
    for file in sums:
        own, said = _sums(path, tensors), file.read_text("ascii", "replace").splitlines()
        if sorted(said) != sorted(own):
            wrong = next((line for line in own if line not in said), "two lines alone")
            raise malformed(file, f"is {short(said)}, expected {wrong}; copy the folder again")
    try:
        manifest: AnyManifest = read(kind, read_json(path))
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
    facts = {"converted_from": maps.manifest.PROGRAM, "stage": 1}
    reads = {side: [[*layers] for layers in maps.manifest.reads] for side in SIDES}
    config = TranslatorConfig(
        source,
        target,
        parse_assignment(maps.path, reads, source, target),
        capture=maps.manifest.capture,
        provenance=facts | maps.manifest.remembered,
    )
    dtypes = {*maps.dtypes.values()}
    dtype: DType = dtypes.pop() if len(dtypes) == 1 else "float32"  # holds all numbers exactly
    names, shapes = _laid_out(maps.manifest, config)
    _check_tensors(maps, shapes)

    def make(own: str) -> np.ndarray:
        array = maps.read(names[own], dtype)
        if own.endswith("bias"):
            return array.reshape(-1)
        return np.ascontiguousarray(array.swapaxes(-1, -2)).reshape(-1, array.shape[-2])

    own = {name: shapes[theirs] for name, theirs in names.items()}
    flat = {n: (math.prod(s),) if n.endswith("bias") else (math.prod(s) // s[-2], s[-2])
            for n, s in own.items()}  # fmt: skip
    return config, Weights(dtype, LazyTensors(flat, make))


def _sums(*files: Path) -> list[str]:
    """The lines of a file of checksums."""
    return [f"{sha256_of(path)}  {path.name}" for path in files]


def _laid_out(manifest: AnyManifest, config: TranslatorConfig) -> tuple[dict[str, str], Shapes]:
    """Their names by ours, and the shapes of theirs."""
    names, shapes = {}, {}
    for side in SIDES:
        for t, target in enumerate(config.target.layers):
            inputs = sum(config.source.layers[s].width(side) for s in config.assignment.keys[t])
            heads, dim = target.kv_heads, target.head_dim(side)
            sizes = (heads, inputs, dim) if manifest.BY_HEAD else (inputs, heads * dim)
            for last, pattern in zip(("weight", "bias"), manifest.TENSORS, strict=True):
                theirs = pattern.format(layer=t, side=side[0])
                names[f"{side}.{t}.{last}"] = theirs
                shapes[theirs] = sizes if last == "weight" else (*sizes[:-2], sizes[-1])
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
        dtype, wanted = maps.dtypes[name], maps.manifest.DTYPES
        if found[name] != shape or dtype not in wanted:
            told = f"{name} is {dtype} {found[name]}, expected {' or '.join(wanted)} {shape}"
            raise malformed(maps.path, f"{told}: inputs come before dim")
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
    models: tuple[LanguageModel | str, LanguageModel | str] | None = None,
    force: bool = False,
) -> TranslatorConfig:
    """Write a translator for another program; the folder appears whole or not at all.

    Args:
        translator: A folder, a name that `kvlingo-mlx list` shows, or a Hub id.
        to: The format, one of ``FORMATS``.
        out: The folder to write.
        models: The source and target, loaded or by name, which say how keys are rotated. Default:
            those that the translator names, if they are on this machine.
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
        source, target = (load(m, lazy=True) if isinstance(m, str) else m for m in models)
    else:
        source, target = (at_hand(end.name, end.revision) for end in config.ends)
    check_pair(config, source, target)
    weights = weights if weights.dtype in kind.DTYPES else weights.cast(kind.DTYPES[0])
    manifest = kind.of(config, weights, (source, target))
    with atomic.new_folder(folder, 2 * weights.nbytes) as place:
        assert place is not None
        _write(manifest, place, config, weights)
    return config


def _unwritable(kind: type[AnyManifest], config: TranslatorConfig) -> Iterator[str]:
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


def _check_free(kind: type[AnyManifest], folder: Path, force: bool) -> None:
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


def _write(manifest: AnyManifest, folder: Path, config: TranslatorConfig, weights: Weights) -> None:
    """Write a manifest, and tensors beside it; biases are zero where the translator has none."""
    text = json.dumps(asdict(manifest, dict_factory=without_none), indent=2) + "\n"
    path, tensors, *sums = (folder / file for file in manifest.FILES)
    path.write_text(text, encoding="utf-8")
    names, shapes = _laid_out(manifest, config)
    ours = {theirs: own for own, theirs in names.items()}

    def make(name: str) -> np.ndarray:
        if ours[name] not in weights.shapes:
            return np.zeros(shapes[name], STORAGE[weights.dtype])
        array, shape = weights.arrays[ours[name]], shapes[name]
        if array.ndim == 1:
            return array.reshape(shape)
        parts = array.reshape(*shape[:-2], shape[-1], shape[-2])
        return np.ascontiguousarray(parts.swapaxes(-1, -2))

    write_tensors(tensors, Weights(weights.dtype, LazyTensors(shapes, make)))
    for file in sums:
        file.write_text("\n".join(_sums(path, tensors)) + "\n", encoding="ascii")
