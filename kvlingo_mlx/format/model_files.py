"""What identifies a model's files, whichever runtime loads them; NumPy only."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from os.path import commonprefix
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.projections import OF_THE_FILE
from kvlingo_mlx.format.tensor_file import FILE_DTYPES, STORAGE, DType, Weights, rounded

READ = 1024  # bytes of a tensor that are read at its beginning, in its middle, and at its end
MOST = 2**16  # numbers of a norm
NARROW: tuple[DType, ...] = ("bfloat16", "float16")


def norms_fingerprint(
    held: Mapping[str, np.ndarray], folder: Path | None, dtype: DType | None = None
) -> str:
    """Sha256 over the weights of a model's norms, in the order of their names, in float32.

    It is of what the files store. 4-bit conversion leaves these weights as they are, so a quantised
    copy has the same fingerprint.

    Args:
        held: Each norm's weight in float32, by its module's name in the runtime, which may have
            rounded it to 16 bits.
        folder: The model's folder, whose files say what was rounded; None: there is none.
        dtype: To what each weight is rounded first, as 0.1.0 did after training with PyTorch.
    """
    files = {} if folder is None else _stored(folder)
    digest = hashlib.sha256()
    for name in sorted(held):
        norm = _unrounded(name, held[name].reshape(-1), files)
        digest.update((norm if dtype is None else rounded(norm, dtype)).tobytes())
    return digest.hexdigest()


def _unrounded(name: str, held: np.ndarray, files: Mapping[str, np.ndarray]) -> np.ndarray:
    """A norm's weight as its file stores it: what becomes ``held`` when it is rounded.

    The runtimes put other prefixes before a name than the files have. A weight that the runtime
    changed otherwise (mlx-lm adds one to some) is taken as it is held.
    """
    if np.array_equal(held, files.get(name, ())):
        return held
    both = {other: [f".{name}"[::-1], f".{other}"[::-1]] for other in files}
    ends = {other: len(commonprefix(names)) for other, names in both.items()}  # noqa: RUF071
    most = max(ends.values(), default=0)
    for other in (n for n, end in ends.items() if end == most):
        if any(np.array_equal(held, rounded(files[other], dtype)) for dtype in NARROW):
            return files[other]
    return held


def _stored(folder: Path) -> dict[str, np.ndarray]:
    """The small weights of a model's files, flat and in float32, by their modules."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            length, _, tensors = _header(path, file)
        for name, entry in tensors.items():
            module, dtype = name.removesuffix(".weight"), FILE_DTYPES.get(entry["dtype"])
            count = math.prod(entry["shape"])
            if module != name and dtype is not None and count <= MOST:
                start = 8 + length + entry["data_offsets"][0]
                array = np.fromfile(path, STORAGE[dtype], count, offset=start)
                found[module] = Weights(dtype, {name: array}).as_float32(name)
    return found


def files_fingerprint(folder: Path) -> str:
    """Sha256 of a model folder's config, the layout of its weights, and parts of every tensor.

    A few milliseconds, where reading every weight takes a second for each 2 GB. A fine-tune or a
    fused adapter changes whole tensors.

    Raises:
        ValueError: A file of weights is damaged.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    digest = hashlib.sha256(canonical_json(facts).encode())
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            length, header, tensors = _header(path, file)
            digest.update(path.name.encode() + header)
            for _, tensor in sorted(tensors.items()):
                start, stop = (8 + length + offset for offset in tensor["data_offsets"])
                middle = (start + stop - READ) // 2
                for place in (start, max(start, middle), max(start, stop - READ)):
                    file.seek(place)
                    digest.update(file.read(min(READ, stop - place)))
    return digest.hexdigest()


def _header(path: Path, file: BinaryIO) -> tuple[int, bytes, dict[str, Any]]:
    """The header's length, the header, and what it says of each tensor."""
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
