"""A chunk's file: safetensors in memory, written by one side and checked by the other."""

import io
import json
from collections.abc import Mapping

from kvlingo_mlx.backend import mx

import numpy as np
from safetensors import SafetensorError, deserialize

from kvlingo_mlx.format.tensor_file import FILE_DTYPES, METADATA, STORAGE, DType, Shapes

HEAD = 1000  # bytes of a file's head at most, and for each tensor


def packed(arrays: dict[str, mx.array], told: dict[str, str]) -> bytes:
    """A file of evaluated arrays; ``told`` goes into its metadata."""
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, told)
    return file.getvalue()


def most_bytes(shapes: Shapes) -> int:
    """The bytes that a file of such tensors can have."""
    return HEAD * (1 + len(shapes)) + 4 * sum(int(np.prod(shape)) for shape in shapes.values())


def unpacked(
    blob: bytes, shapes: Shapes, told: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], DType]:
    """The tensors of an untrusted file and their one dtype; bfloat16 as its bits.

    Raises:
        ValueError: It is not a file of tensors of these shapes and of one dtype with that metadata.
    """
    try:
        tensors = dict(deserialize(blob))
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")]).get(METADATA, {})
    except (SafetensorError, ValueError, AttributeError) as error:
        raise ValueError(f"{len(blob)} bytes are no safetensors file ({error})") from None
    if any(metadata.get(name) != value for name, value in told.items()):
        raise ValueError(f"it tells {metadata!r:.200}, expected {dict(told)}")
    found = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    if found != dict(shapes):
        raise ValueError(f"it holds {found!r:.200}, expected {dict(shapes)!r:.200}")
    dtypes = {FILE_DTYPES.get(tensor["dtype"]) for tensor in tensors.values()}
    dtype, *more = dtypes or {"float32"}
    if more or dtype is None:
        raise ValueError(f"its dtypes are {dtypes}, expected one that is known")
    kind = STORAGE[dtype]
    arrays = {
        name: np.frombuffer(tensor["data"], kind).reshape(tensor["shape"])
        for name, tensor in tensors.items()
    }
    return arrays, dtype
