"""The fingerprint of a model's norms, which tells its checkpoint; NumPy only, for both runtimes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvlingo_mlx.format.tensor_file import FILE_DTYPES, STORAGE, DType, Weights, rounded

STORED = "stored"
NARROW: tuple[DType, ...] = ("bfloat16", "float16")


def norms_fingerprints(held: Mapping[str, np.ndarray], folder: Path | None) -> dict[str, str]:
    """Sha256 over the weights of a model's norms, in the order of their names, in float32.

    4-bit conversion leaves these weights as they are, so a quantised copy has the same fingerprint.

    Args:
        held: Each norm's weight in float32, by its module's name in the runtime, which may
            have rounded it to 16 bits.
        folder: The model's folder, whose files say what was rounded; None: there is none.

    Returns:
        Under ``STORED`` the fingerprint of what the files store. Under the names of ``NARROW`` those
        of the same weights rounded, which earlier versions wrote where they trained with PyTorch.
    """
    short = {_last(name) for name, array in held.items() if _is_narrow(array)}
    files = {} if folder is None or not short else _stored(folder, short)
    norms = [_unrounded(name, held[name].reshape(-1), files) for name in sorted(held)]
    return {
        STORED: _sha256(norms),
        **{dtype: _sha256(rounded(norm, dtype) for norm in norms) for dtype in NARROW},
    }


def _unrounded(name: str, held: np.ndarray, files: Mapping[str, np.ndarray]) -> np.ndarray:
    """A norm's weight as its file stores it: what becomes ``held`` when it is rounded.

    The runtimes put other prefixes before a name than the files have. A weight that the runtime
    changed otherwise (mlx-lm adds one to some) is taken as it is held.
    """
    likeness = {other: _same_end(name, other) for other in files} if _is_narrow(held) else {}
    best = max(likeness.values(), default=0)
    for other in (n for n in files if best and likeness[n] == best):
        if any(np.array_equal(held, rounded(files[other], dtype)) for dtype in NARROW):
            return files[other]
    return held


def _is_narrow(array: np.ndarray) -> bool:
    """Whether the numbers may have been rounded to 16 bits."""
    return any(np.array_equal(array, rounded(array, dtype)) for dtype in NARROW)


def _same_end(ours: str, theirs: str) -> int:
    """How many of the last parts of two names are the same."""
    pairs = zip(ours.split(".")[::-1], theirs.split(".")[::-1], strict=False)
    return [*(a == b for a, b in pairs), False].index(False)


def _stored(folder: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    """The weights in float32, by module, of all modules in a folder with these last names."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            length, _, tensors = header_of(path, file)
        for name, entry in tensors.items():
            module, dtype = name.removesuffix(".weight"), FILE_DTYPES.get(entry["dtype"])
            if module == name or dtype is None or _last(module) not in wanted:
                continue
            begin, end = entry["data_offsets"]
            kind = STORAGE[dtype]
            count = (end - begin) // np.dtype(kind).itemsize
            array = np.fromfile(path, kind, count, offset=8 + length + begin)
            found[module] = Weights(dtype, {name: array}).as_float32(name)
    return found


def header_of(path: Path, file: BinaryIO) -> tuple[int, bytes, dict[str, Any]]:
    """The length of a safetensors header, the header, and what it says of each tensor.

    Raises:
        ValueError: The file is damaged.
    """
    size = path.stat().st_size
    start = file.read(8)
    length = int.from_bytes(start, "little") if len(start) == 8 else size
    if length > size - 8:
        raise ValueError(f"{path} is damaged, or no file of weights; download it again")
    header = file.read(length)
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
    except (ValueError, AttributeError):
        raise ValueError(f"{path} has a damaged header; download it again") from None
    return length, header, tensors


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _sha256(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
