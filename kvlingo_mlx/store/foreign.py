"""Linear maps that others have written, as a translator of ours: the same numbers in our order."""

from __future__ import annotations

import contextlib
import functools
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import RopeSpec
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import (
    MAX_FILE_BYTES,
    STORAGE,
    DType,
    Made,
    Weights,
    open_tensors,
    regular_file,
)
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.format.translator_folder import LARGEST
from kvlingo_mlx.store.axes import Form

NPY_DTYPES: dict[str, DType] = {"float32": "float32", "float16": "float16"}


@dataclass(frozen=True)
class Side:
    """The maps of keys or of values.

    Attributes:
        weight: The matrices.
        bias: The biases, if there are any.
        sources: The source layers that each target layer reads, in the order of the inputs.
    """

    weight: Form
    bias: Form | None
    sources: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Foreign:
    """What the files of others say.

    Attributes:
        path: The file that describes them, for messages.
        kind: The name of their format.
        dtypes: The dtype of each tensor.
        tensors: The tensors, unread.
        sides: The maps of ``"keys"`` and ``"values"``.
        capture: Where keys are read and written.
        head_mixing: Whether a map reads all heads of its source layers.
        ends: What they say of the source and the target; None where they say nothing.
        rotations: How the source's and the target's keys were rotated back, for keys of before
            RoPE that were taken from a cache; None where nothing says.
        ignored: Tensors that are no part of the maps.
        unneeded: What to do with further ones, for messages.
        provenance: What is kept of where they come from.
    """

    path: Path
    kind: str
    dtypes: Mapping[str, DType]
    tensors: Made
    sides: Mapping[str, Side]
    capture: str
    head_mixing: bool = True
    ends: tuple[ModelSpec | None, ModelSpec | None] = (None, None)
    rotations: tuple[RopeSpec, RopeSpec] | None = None
    ignored: frozenset[str] = frozenset()
    unneeded: str = "remove them if they are not needed"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> DType:
        """The narrowest dtype that holds all numbers of the maps exactly."""
        found = {dtype for name, dtype in self.dtypes.items() if name not in self.ignored}
        return found.pop() if len(found) == 1 else "float32"


def converted(
    foreign: Foreign, source: ModelSpec, target: ModelSpec
) -> tuple[TranslatorConfig, Weights]:
    """The maps as a translator between two models; its weights are made when they are looked at.

    Raises:
        MalformedTranslatorError: The tensors are not those that the models' layers ask for.
    """
    config = TranslatorConfig(
        source, target, Assignment(*(foreign.sides[side].sources for side in SIDES)),
        head_mixing=foreign.head_mixing, capture=foreign.capture, provenance=foreign.provenance,
    )  # fmt: skip
    _check_layers(foreign, config)
    makers: dict[str, Callable[[], np.ndarray]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    used: set[str] = set()
    read = functools.lru_cache(maxsize=1)(lambda name: foreign.tensors[name])

    def add(name: str, form: Form, layer: int, sources: Sequence[int], sizes, order) -> None:
        used.update(_checked(foreign, form, layer, sources, sizes))
        shapes[name] = Form("", order).shape(sizes)
        makers[name] = lambda: form.taken(same, layer, sources, sizes, order)

    def same(name: str) -> np.ndarray:
        return _widened(read(name), foreign.dtypes[name], foreign.dtype)

    for side in SIDES:
        maps = foreign.sides[side]
        for layer, sources in enumerate(maps.sources):
            sizes = _sizes(foreign, config, side, layer)
            inputs = ("sources", "source_heads", "source_dim")
            order: tuple[tuple[str, ...], ...] = (("heads", "dim"), inputs)
            if not config.head_mixing:
                order = (("heads",), ("dim",), ("sources", "source_dim"))
            add(f"{side}.{layer}.weight", maps.weight, layer, sources, sizes, order)
            if maps.bias is not None:
                add(f"{side}.{layer}.bias", maps.bias, layer, (), sizes, (("heads", "dim"),))
    _check_biases(foreign)
    left = sorted(set(foreign.tensors) - used - foreign.ignored)
    if left:
        raise malformed(
            foreign.path,
            f"{len(left)} tensor(s) are no part of the maps that it describes: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}; {foreign.unneeded}",
        )
    _check_numbers(foreign, used)
    return config, Weights(foreign.dtype, Made(shapes, lambda name: makers[name]()))


def _check_numbers(foreign: Foreign, names: Iterable[str]) -> None:
    """What the format refuses, told by the names that the files have."""
    for name in sorted(names):
        largest = float(
            np.abs(_widened(foreign.tensors[name], foreign.dtypes[name], "float32")).max()
        )
        if not np.isfinite(largest):
            raise malformed(foreign.path, f"{name} holds NaN or Inf, expected numbers")
        if largest > LARGEST:
            raise malformed(
                foreign.path,
                f"{name} holds {largest:.3g}; this package refuses weights beyond {LARGEST:g}, "
                "which no sound fit has",
            )


def _check_layers(foreign: Foreign, config: TranslatorConfig) -> None:
    depth, deepest = len(config.target.layers), len(config.source.layers)
    for side in SIDES:
        sources = foreign.sides[side].sources
        if len(sources) != depth:
            raise malformed(
                foreign.path,
                f"has maps of {side} for {len(sources)} target layers, expected {depth}, the cache "
                f"layers of {config.target.name}",
            )
        for layer, read in enumerate(sources):
            if not read or len(set(read)) < len(read) or not set(read) <= set(range(deepest)):
                raise malformed(
                    foreign.path,
                    f"target layer {layer} reads {side} of source layers {list(read)}, expected "
                    f"different ones from 0 to {deepest - 1}, the cache layers of "
                    f"{config.source.name}",
                )


def _check_biases(foreign: Foreign) -> None:
    there = [side for side in SIDES if foreign.sides[side].bias is not None]
    if len(there) == 1:
        raise malformed(
            foreign.path,
            f"only {there[0]} have biases; a translator has them on both sides or on none: give "
            "the other side biases of zero",
        )


def _sizes(foreign: Foreign, config: TranslatorConfig, side: str, layer: int) -> dict[str, int]:
    target = config.target.layers[layer]
    sources = foreign.sides[side].sources[layer]
    read = [config.source.layers[s] for s in sources]
    widths = {(s.kv_heads, s.head_dim(side)) for s in read}
    if len(widths) > 1:
        raise malformed(
            foreign.path,
            f"target layer {layer} reads {side} of source layers {list(sources)}, whose heads "
            "differ in number or width; one pattern of axes cannot tell that",
        )
    heads, width = widths.pop()
    return {
        "layers": len(config.target.layers),
        "heads": target.kv_heads,
        "dim": target.head_dim(side),
        "sources": len(sources),
        "source_heads": heads,
        "source_dim": width,
    }


def _checked(
    foreign: Foreign, form: Form, layer: int, sources: Sequence[int], sizes: Mapping[str, int]
) -> list[str]:
    """The names of a target layer's tensors, all of which are there and have the right shapes."""
    names, expected = form.named(layer, sources, sizes), form.shape(sizes)
    for name in names:
        if name not in foreign.tensors:
            there = list(foreign.tensors)
            few = f"{', '.join(there[:3])}{', ...' if len(there) > 3 else ''}"
            raise malformed(
                foreign.path, f"tensor {name} is missing; there are {len(there)}: {few or 'none'}"
            )
        if foreign.tensors.shapes[name] != expected:
            told = " ".join(
                group[0] if len(group) == 1 else f"({' '.join(group)})" for group in form.groups
            )
            counts = {a: sizes[a] for group in form.groups for a in group}
            raise malformed(
                foreign.path,
                f"{name} has shape {foreign.tensors.shapes[name]}, expected {expected}: {told}, "
                f"where {', '.join(f'{a} = {n}' for a, n in counts.items())}",
            )
    return names


def _widened(array: np.ndarray, dtype: DType, wanted: DType) -> np.ndarray:
    """An array as it is stored, or exactly in float32."""
    return array if dtype == wanted else Weights(dtype, {"": array}).as_float32("")


# ---- files ----------------------------------------------------------------------------------


def opened(paths: Sequence[Path]) -> tuple[dict[str, DType], Made]:
    """The dtype of each tensor of some .safetensors and .npz files, and the tensors, unread.

    Raises:
        MalformedTranslatorError: A file is unsound, or holds other dtypes; or two hold a tensor of
            one name.
    """
    dtypes: dict[str, DType] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    owners: dict[str, Made] = {}
    for path in paths:
        found, tensors = READERS[path.suffix.lower()](path)
        twice = sorted(set(found) & set(dtypes))
        if twice:
            raise malformed(path, f"holds {twice[0]}, and so does another of the files")
        dtypes |= found
        shapes |= tensors.shapes
        owners |= dict.fromkeys(found, tensors)
    return dtypes, Made(shapes, lambda name: owners[name][name])


def _open_npz(path: Path) -> tuple[dict[str, DType], Made]:
    """The same of a file of ``numpy.savez``; nothing in it is unpickled."""
    regular_file(path)
    dtypes: dict[str, DType] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with _damage_told(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            shape, dtype = _npy_header(archive, member.filename)
            if name in shapes:
                raise ValueError(f"{name} is there twice")
            if dtype.name not in NPY_DTYPES:
                told = dtype.name if dtype.kind in "iufcb" else "no numbers"
                raise malformed(
                    path,
                    f"{name} is {told}, expected {' or '.join(NPY_DTYPES)}; save it as one of them "
                    "(array.astype('float32')), since an import rounds nothing by itself",
                )
            size = math.prod(shape) * dtype.itemsize
            if size > min(member.file_size, MAX_FILE_BYTES):
                raise ValueError(f"{name} should have {size:,} bytes, and has {member.file_size:,}")
            shapes[name], dtypes[name] = shape, NPY_DTYPES[dtype.name]

    def read(name: str) -> np.ndarray:
        with _damage_told(path), np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[name], STORAGE[dtypes[name]])

    return dtypes, Made(shapes, read)


@contextlib.contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Whatever a broken archive makes of the libraries that read it, one line says."""
    try:
        yield
    except PermissionError as error:
        raise malformed(path, f"cannot be read: {error.strerror}") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, SyntaxError, MemoryError,
            RecursionError, NotImplementedError, tokenize.TokenError) as error:  # fmt: skip
        raise malformed(
            path, f"is no .npz file, or a damaged one ({error}); copy it again"
        ) from None


def _npy_header(archive: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member} has version {version} of NumPy's format")
        reader = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = reader(file)
    return shape, dtype


def short(value: Any) -> str:
    """A value that a stranger wrote, for a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


READERS: dict[str, Callable[[Path], tuple[dict[str, DType], Made]]] = {
    ".safetensors": open_tensors,
    ".npz": _open_npz,
}
