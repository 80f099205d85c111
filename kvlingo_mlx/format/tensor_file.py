"""Tensors on disk as safetensors files, checked before use; NumPy only."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.atomic import write_file
from kvlingo_mlx.format.files import PICKLE, no_duplicates, regular_file

MAX_HEADER_BYTES = 100 * 2**20
MAX_FILE_BYTES = 16 * 2**30  # untrusted files must not fill the memory; our own are below 3 GB
LOST = 0.01  # of a tensor's norm; float16 changes at most 0.0005 of a number that it can hold
METADATA = "__metadata__"

DType = Literal["float32", "float16", "bfloat16"]
FILE_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORAGE: dict[DType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # NumPy has no bfloat16: the bits are stored as uint16
}


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that are made whenever they are looked at, so that memory holds one at a time."""

    shapes: Shapes
    make: Callable[[str], np.ndarray] = field(repr=False)  # of a name

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True)
class Weights:
    """A translator's tensors, all of one dtype; bfloat16 is held as its bits in uint16."""

    dtype: DType
    arrays: Mapping[str, np.ndarray]

    @property
    def shapes(self) -> Shapes:
        """The tensors' shapes by name."""
        if isinstance(self.arrays, LazyTensors):
            return self.arrays.shapes
        return {name: array.shape for name, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(STORAGE[self.dtype]).itemsize

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def as_float32(self, name: str) -> np.ndarray:
        """One tensor converted to float32, exactly."""
        array = self.arrays[name]
        if self.dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(array, np.float32)

    def cast(self, dtype: DType) -> Weights:
        """The same tensors in another dtype, rounded to nearest even.

        Lazy ones are rounded when they are looked at.

        Raises:
            ValueError: A weight is too large for ``dtype``, or a matrix's are too small.
        """
        if dtype == self.dtype:
            return self
        lazy = LazyTensors(self.shapes, lambda name: self._rounded(name, dtype))
        return Weights(dtype, lazy if isinstance(self.arrays, LazyTensors) else dict(lazy))

    def _rounded(self, name: str, dtype: DType) -> np.ndarray:
        array = self.as_float32(name)
        made = Weights.from_float32({name: array}, dtype)
        # bfloat16 has float32's range. Small gates and biases are as good as none.
        if dtype == "float16" and array.ndim > 1:
            size = float(np.linalg.norm(np.float64(array)))
            kept = made.as_float32(name)
            lost = float(np.linalg.norm(np.subtract(kept, array, dtype=np.float64)))
            if lost > LOST * size:
                raise ValueError(
                    f"{name} would change by {lost / size:.0%} in {dtype}, whose least numbers are "
                    "larger than some of its own: use float32 or bfloat16"
                )
        return made.arrays[name]

    @classmethod
    def from_float32(cls, arrays: Mapping[str, np.ndarray], dtype: DType) -> Weights:
        """Round float32 arrays to ``dtype``; raises ValueError if a number does not fit."""
        for name, array in arrays.items():
            if not np.isfinite(array).all():  # before rounding, which can turn a NaN into 0
                raise ValueError(f"{name} holds NaN or Inf")
        rounded = {name: _round(np.asarray(a, np.float32), dtype) for name, a in arrays.items()}
        weights = cls(dtype, rounded)
        for name in rounded:
            if not np.isfinite(weights.as_float32(name)).all():
                raise ValueError(f"{name} does not fit {dtype}: use float32 or bfloat16")
        return weights


def _round(array: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, STORAGE[dtype])


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """A float32 array rounded to ``dtype``, as float32; what is too large becomes Inf."""
    return Weights(dtype, {"": _round(array, dtype)}).as_float32("")


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The entry of each tensor in a safetensors header, and the offset at which the data start.

    The library checks sizes and offsets. It does not refuse repeated names, unknown fields and
    shapes beyond NumPy, and reads no bfloat16 into NumPy, so the header is read here, too.
    """
    size = regular_file(path)
    if size > MAX_FILE_BYTES:
        raise malformed(path, f"has {size:,} bytes, expected at most {MAX_FILE_BYTES:,}")
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            # Checked only here: a valid file starts with 0x80 too if its header has 128 bytes.
            pickled = head.startswith((b"PK", b"\x80"))
            text = PICKLE if pickled else f"is no safetensors file or truncated ({size} bytes)"
            raise malformed(path, text)
        header_bytes = file.read(length)
    try:
        header = json.loads(header_bytes.decode("utf-8"), object_pairs_hook=no_duplicates)
        stops = (entry["data_offsets"][1] for name, entry in header.items() if name != METADATA)
        end = 8 + length + max(stops, default=0)
        if end > size:
            told = f"its header tells of {min(end, 2**64)} bytes, it has {size}"
            raise malformed(path, f"is truncated: {told}; download or copy it again")
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RecursionError,
            OSError) as error:  # fmt: skip
        raise malformed(
            path, f"is damaged or truncated ({error}); download or copy it again"
        ) from None
    header.pop(METADATA, None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise malformed(path, f"{name}: expected dtype, shape and data_offsets alone")
        if entry["dtype"] not in FILE_DTYPES:
            allowed = ", ".join(FILE_DTYPES)
            raise malformed(path, f"{name} is {entry['dtype']}, expected one of {allowed}")
    return header, 8 + length


def open_tensors(path: Path) -> tuple[dict[str, DType], LazyTensors]:
    """The dtype of each tensor of a safetensors file, and the tensors, unread.

    Raises:
        MalformedTranslatorError: The file is unsound, or holds another dtype.
    """
    header, begin = _read_header(path)
    dtypes = {name: FILE_DTYPES[entry["dtype"]] for name, entry in header.items()}

    def read(name: str) -> np.ndarray:
        # Not mapped into memory: what was looked at would stay there.
        start, kind = begin + header[name]["data_offsets"][0], STORAGE[dtypes[name]]
        return np.fromfile(path, kind, math.prod(shapes[name]), offset=start).reshape(shapes[name])

    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return dtypes, LazyTensors(shapes, read)


def read_tensors(
    path: Path, check: Callable[[Shapes], None] = lambda shapes: None, *, lazy: bool = False
) -> Weights:
    """Read a safetensors file of one dtype; ``check`` gets the shapes before any data are read.

    With ``lazy`` each tensor is read when it is looked at, and not kept (:class:`LazyTensors`).

    Raises:
        MalformedTranslatorError: The file is unsound or empty, or its dtypes are mixed.
    """
    dtypes, tensors = open_tensors(path)
    if not dtypes:
        raise malformed(path, "holds no tensors")
    codes = {dtype: code for code, dtype in FILE_DTYPES.items()}
    first, wanted = next(iter(dtypes.items()))
    for name, shape in tensors.shapes.items():
        if not 1 <= len(shape) <= 3 or 0 in shape:
            raise malformed(path, f"{name} has shape {shape}, expected 1 to 3 axes, none empty")
        if dtypes[name] != wanted:
            told = f"{name} is {codes[dtypes[name]]}, {first} is {codes[wanted]}"
            raise malformed(path, f"{told}; expected one dtype")
    check(tensors.shapes)
    return Weights(wanted, tensors if lazy else dict(tensors))


def check_numbers(path: Path, weights: Weights) -> None:
    """Refuse a tensor of the wrong dtype or with NaN or Inf; the message says where."""
    for name, array in weights.arrays.items():
        if array.dtype != STORAGE[weights.dtype]:  # possible for a caller's arrays, when writing
            raise malformed(path, f"{name} is {array.dtype}, not {weights.dtype}")
        finite = np.isfinite(weights.as_float32(name))
        if not finite.all():
            first = tuple(map(int, np.argwhere(~finite)[0]))
            raise malformed(path, f"{name} holds NaN or Inf, expected numbers; first at {first}")


def write_tensors(path: Path, weights: Weights) -> None:
    """Write a safetensors file, tensor by tensor in the order of names, and wait for the disk.

    The bytes are those that the library writes, whose own writer wants all tensors in memory.
    """
    head = _head(weights.dtype, weights.shapes, {})
    arrays = (weights.arrays[name] for name in sorted(weights.shapes))
    write_file(path, itertools.chain([head], (np.ascontiguousarray(a).data for a in arrays)))


def _head(dtype: DType, shapes: Shapes, told: Mapping[str, str]) -> bytes:
    """The start of a safetensors file, which the tensors follow in the order of their names."""
    codes = {name: code for code, name in FILE_DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "kvlingo", **told}}
    width, end = np.dtype(STORAGE[dtype]).itemsize, 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + width * math.prod(shape)
        header[name] = {"dtype": codes[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors are aligned
    return len(text).to_bytes(8, "little") + text
