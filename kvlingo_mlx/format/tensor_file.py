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
        weights = Weights.from_float32({name: array}, dtype)
        # bfloat16 has float32's range. Small gates and biases are as good as none.
        if dtype == "float16" and array.ndim > 1:
            lost = np.subtract(weights.as_float32(name), array, dtype=np.float64)
            share = np.linalg.norm(lost) / (np.linalg.norm(np.float64(array)) or 1.0)
            if share > LOST:
                raise ValueError(
                    f"{name} would change by {share:.0%} in {dtype}, whose least numbers are "
                    "larger than some of its own: use float32 or bfloat16"
                )
        return weights.arrays[name]

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


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of its tensors, by their names; they are unread."""

    path: Path
    text: bytes
    tensors: Mapping[str, Any]

    @property
    def begin(self) -> int:
        """The offset at which the data start."""
        return 8 + len(self.text)

    def size_of(self, name: str) -> int:
        """A tensor's numbers."""
        return math.prod(self.tensors[name]["shape"])

    def read(self, name: str, dtype: DType) -> np.ndarray:
        """A tensor, which is not mapped into memory: what was looked at would stay there."""
        start = self.begin + self.tensors[name]["data_offsets"][0]
        array = np.fromfile(self.path, STORAGE[dtype], self.size_of(name), offset=start)
        return array.reshape(self.tensors[name]["shape"])

    @classmethod
    def of_model(cls, path: Path) -> Header:
        """The header of a model's file, which mlx-lm reads too.

        Raises:
            ValueError: The file is damaged.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else size
            if length > size - 8:
                raise ValueError(f"{path} is damaged, or no file of weights; download it again")
            text = file.read(length)
        try:
            tensors = {k: v for k, v in json.loads(text).items() if k != METADATA}
        except (ValueError, AttributeError):
            raise ValueError(f"{path} has a damaged header; download it again") from None
        return cls(path, text, tensors)

    @classmethod
    def of_stranger(cls, path: Path) -> Header:
        """The header of a file that anybody may have written.

        The library checks sizes and offsets. It does not refuse repeated names, unknown fields and
        shapes beyond NumPy, and reads no bfloat16 into NumPy, so the header is read here, too.

        Raises:
            MalformedTranslatorError: The file is unsound, or holds another dtype.
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
                none = f"is no safetensors file or truncated ({size} bytes)"
                raise malformed(path, PICKLE if pickled else none)
            text = file.read(length)
        try:
            tensors = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
            tensors.pop(METADATA, None)
            end = 8 + length + max((e["data_offsets"][1] for e in tensors.values()), default=0)
            if end > size:
                raise ValueError(f"its header tells of {min(end, 2**64)} bytes, it has {size}")
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, ValueError, TypeError, LookupError, AttributeError,
                RecursionError, OSError) as error:  # fmt: skip
            told = f"is damaged or truncated: {error}; download or copy it again"
            raise malformed(path, told) from None
        for name, entry in tensors.items():
            if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
                raise malformed(path, f"{name}: expected dtype, shape and data_offsets alone")
            if entry["dtype"] not in FILE_DTYPES:
                allowed = ", ".join(FILE_DTYPES)
                raise malformed(path, f"{name} is {entry['dtype']}, expected one of {allowed}")
        return cls(path, text, tensors)


def open_tensors(path: Path) -> tuple[dict[str, DType], LazyTensors]:
    """The dtype of each tensor of a safetensors file, and the tensors, unread.

    Raises:
        MalformedTranslatorError: The file is unsound, or holds another dtype.
    """
    header = Header.of_stranger(path)
    dtypes = {name: FILE_DTYPES[entry["dtype"]] for name, entry in header.tensors.items()}
    shapes = {name: tuple(entry["shape"]) for name, entry in header.tensors.items()}
    return dtypes, LazyTensors(shapes, lambda name: header.read(name, dtypes[name]))


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
    write_arrays(path, weights.arrays, weights.shapes, dict.fromkeys(weights.shapes, weights.dtype))


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], shapes: Shapes, dtypes: Mapping[str, DType]
) -> None:
    """:func:`write_tensors` of tensors that have a dtype each."""
    codes = {name: code for code, name in FILE_DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "kvlingo"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + np.dtype(STORAGE[dtypes[name]]).itemsize * math.prod(shape)
        entry = {"shape": [*shape], "data_offsets": [begin, end]}
        header[name] = {"dtype": codes[dtypes[name]], **entry}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors are aligned
    parts = (np.ascontiguousarray(arrays[name]).data for name in sorted(shapes))
    write_file(path, itertools.chain([len(text).to_bytes(8, "little") + text], parts))
