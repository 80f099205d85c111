"""Where an idle line's arrays are stored: in memory with 8 bits, or in a file."""

import functools
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.caches import PARTS
from kvlingo_mlx.errors import KVLingoError, MalformedTranslatorError
from kvlingo_mlx.format.files import sha256_of
from kvlingo_mlx.format.tensor_file import DType, open_tensors, write_arrays
from kvlingo_mlx.loading.translators import store
from kvlingo_mlx.translators.products import loaded

GROUP = 64  # numbers that share a scale, as mlx-lm quantises a cache
# By NumPy's names; it has no bfloat16, of which the bits are held.
DTYPES: dict[str, DType] = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
Arrays = Mapping[str, mx.array]
Held = Mapping[str, np.ndarray]


class EightBits:
    """Arrays in memory with 8 bits and groups of 64 numbers; they come back rounded.

    The codes are symmetric about zero, unlike MLX's own. The largest number of a group comes back
    unchanged, so a line that is put away again and again is rounded only once. What recurrent
    layers keep is not rounded: in tiny hybrids that moved the next tokens 15 to 900 times as far as
    rounding all keys and values did (KL 1e-5 to 5e-4 over 40 tokens), and it does not grow with a
    text.
    """

    place = where = "8bit"  # where they are to be stored, and where they are
    failed = False  # whether storing them failed, so that they are still in memory

    def __init__(self, arrays: Arrays) -> None:
        self._whole = {n: array for n, array in arrays.items() if n.split(".")[-1] in PARTS}
        rounded = {name: array for name, array in arrays.items() if name not in self._whole}
        self._shapes = {name: (array.shape, array.dtype) for name, array in rounded.items()}
        self._parts = {name: _quantised(_rows(array)) for name, array in rounded.items()}
        mx.eval(list(self._parts.values()), list(self._whole.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stored arrays take."""
        whole = {id(array): array.nbytes for array in self._whole.values()}
        coded = sum(part.nbytes for parts in self._parts.values() for part in parts)
        return coded + sum(whole.values())

    def settle(self) -> None:
        """There is nothing to wait for."""

    def take(self) -> dict[str, mx.array]:
        """The arrays."""
        found = dict(self._whole)
        for name, (shape, dtype) in self._shapes.items():
            codes, steps = self._parts[name]
            numbers = (codes * steps).astype(dtype).reshape(-1)
            found[name] = numbers[: math.prod(shape)].reshape(shape)
        return found


def _quantised(rows: mx.array) -> tuple[mx.array, mx.array]:
    """Each row as int8 codes and their float32 step."""
    wide = rows.astype(mx.float32)
    steps = mx.abs(wide).max(axis=-1, keepdims=True) / 127
    codes = mx.round(wide / mx.where(steps == 0, 1, steps))
    return codes.astype(mx.int8), steps


def _rows(array: mx.array) -> mx.array:
    """An array as rows of one group each, the last one padded with zeros."""
    numbers = array.reshape(-1)
    if missing := -numbers.size % GROUP:
        numbers = mx.concatenate([numbers, mx.zeros(missing, array.dtype)])
    return numbers.reshape(-1, GROUP)


class File:
    """Arrays in a safetensors file, written in another thread; they come back exactly."""

    place = "disk"

    def __init__(self, arrays: Arrays) -> None:
        mx.eval(list(arrays.values()))
        self._here: Arrays | None = arrays  # until the file is written
        self._path = _folder() / f"{id(self):x}-{os.urandom(4).hex()}.safetensors"
        self._digest = worker().submit(self._write, to_numpy(arrays))
        weakref.finalize(self, self._path.unlink, missing_ok=True)

    def _write(self, held: Held) -> str:
        try:
            digest = write_file(self._path, held)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        self._here = None
        return digest

    @property
    def failed(self) -> bool:
        """Whether storing them failed, so that they are still in memory."""
        return self._digest.done() and self._digest.exception() is not None

    @property
    def where(self) -> str:
        """``disk``; ``resident`` until they are stored."""
        return "disk" if self._here is None else "resident"

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stored arrays take."""
        return 0 if self._here is None else sum(array.nbytes for array in self._here.values())

    def settle(self) -> None:
        """Wait until they are stored; OSError if that failed and they are still in memory."""
        try:
            self._digest.result()
        except OSError as error:
            raise OSError(
                error.errno, f"a line cannot be kept on disk ({error.strerror}); it stays in memory"
            ) from None

    def take(self) -> dict[str, mx.array]:
        """The arrays.

        Raises:
            KVLingoError: The file is damaged.
        """
        if (here := self._here) is not None:
            # Separate array objects: a cache changes its arrays in place, and branches share these.
            return {name: array[...] for name, array in here.items()}
        return from_numpy(read_file(self._path, self._digest.result()))


Storage = EightBits | File
PUT: dict[str, Callable[[Arrays], Storage]] = {"8bit": EightBits, "disk": File}


def to_numpy(arrays: Arrays) -> Held:
    """Evaluated arrays as NumPy's; nothing is copied."""
    return {
        name: np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a, copy=False)
        for name, a in arrays.items()
    }


def from_numpy(held: Held) -> dict[str, mx.array]:
    """The arrays of :func:`to_numpy`."""
    return {name: loaded(array, DTYPES[array.dtype.name]) for name, array in held.items()}


def write_file(path: Path, held: Held) -> str:
    """Write a file and return its sha256."""
    dtypes = {name: DTYPES[array.dtype.name] for name, array in held.items()}
    write_arrays(path, held, {name: array.shape for name, array in held.items()}, dtypes)
    path.chmod(0o600)  # it holds a conversation
    return sha256_of(path)


def read_file(path: Path, digest: str) -> Held:
    """Read a file whose sha256 is still ``digest``.

    Raises:
        KVLingoError: The sha256 differs, or the file cannot be read.
    """
    try:
        found = sha256_of(path)
        if found != digest:
            raise KVLingoError(f"{path} is damaged: its sha256 is {found}, expected {digest}")
        return open_tensors(path)[1]
    except (OSError, MalformedTranslatorError) as error:
        raise KVLingoError(f"{path} cannot be read: {error}") from None


@functools.cache
def worker() -> ThreadPoolExecutor:
    """The one thread for all files; more would only wait for the same disk.

    It touches no MLX array, because MLX evaluates in the thread that made the graph.
    """
    return ThreadPoolExecutor(1, "kvlingo-offload")


@functools.cache
def _folder() -> Path:
    """This process's folder beside the store; the folders of dead processes are removed."""
    root = store().parent / "offload"
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():
        if not _runs(left.name.split("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
    weakref.finalize(worker(), shutil.rmtree, made, ignore_errors=True)
    return made


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # another user's process
        return True
    return True
