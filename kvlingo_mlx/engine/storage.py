"""Where an idle line's arrays are stored: in memory with 8 bits, or in a file."""

import functools
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.caches import PARTS
from kvlingo_mlx.errors import KVLingoError, MalformedTranslatorError
from kvlingo_mlx.format.files import sha256_of
from kvlingo_mlx.format.tensor_file import DType, Weights, read_tensors, write_tensors
from kvlingo_mlx.loading.translators import store
from kvlingo_mlx.translators.products import loaded

PLACES = ("8bit", "disk")
GROUP = 64  # numbers that share a scale, as mlx-lm quantises a cache
DTYPES: dict[mx.Dtype, DType] = {
    mx.float32: "float32",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
}
Arrays = Mapping[str, mx.array]


class Storage(Protocol):
    """Arrays that were put away; unless a place says otherwise, there is nothing to wait for.

    Attributes:
        place: The place where they are to be stored.
    """

    place: str

    @property
    def failed(self) -> bool:
        """Whether storing them failed, so that they are still in memory."""

    @property
    def where(self) -> str:
        """``8bit`` or ``disk``; ``resident`` until they are stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the stored arrays take."""

    def settle(self) -> None:
        """Wait until they are stored; OSError if that failed and they are still in memory."""

    def recall(self) -> None:
        """Begin to bring them back, and return at once."""

    def take(self) -> dict[str, mx.array]:
        """The arrays.

        Raises:
            KVLingoError: The stored data are damaged.
        """


class EightBits(Storage):
    """Arrays in memory with 8 bits and groups of 64 numbers; they come back rounded.

    The codes are symmetric about zero, unlike MLX's own. The largest number of a group comes back
    unchanged, so a line that is put away again and again is rounded only once. What recurrent
    layers keep is not rounded: in tiny hybrids that moved the next tokens 15 to 900 times as far as
    rounding all keys and values did (KL 1e-5 to 5e-4 over 40 tokens), and it does not grow with a
    text.
    """

    place = where = "8bit"
    failed = False

    def __init__(self, arrays: Arrays) -> None:
        self._whole = {n: array for n, array in arrays.items() if n.split(".")[-1] in PARTS}
        rounded = {name: array for name, array in arrays.items() if name not in self._whole}
        self._shapes = {name: (array.shape, array.dtype) for name, array in rounded.items()}
        self._parts = {name: _quantised(_rows(array)) for name, array in rounded.items()}
        mx.eval(list(self._parts.values()), list(self._whole.values()))

    @property
    def nbytes(self) -> int:
        whole = {id(array): array.nbytes for array in self._whole.values()}
        coded = sum(part.nbytes for parts in self._parts.values() for part in parts)
        return coded + sum(whole.values())

    def take(self) -> dict[str, mx.array]:
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
    """Arrays in safetensors files, written and read in another thread; they come back exactly.

    There is a file for each dtype; nearly always that is one.
    """

    place = "disk"

    def __init__(self, arrays: Arrays) -> None:
        mx.eval(list(arrays.values()))
        self._here: Arrays | None = arrays  # until the file is written
        parts = [to_weights(part) for part in by_dtype(arrays)]
        place, own = _folder(), f"{id(self):x}-{os.urandom(4).hex()}"
        self.paths = [place / f"{own}-{number}.safetensors" for number in range(len(parts))]
        self._digests = worker().submit(self._write, parts)
        self._read: Future[list[Weights]] | None = None
        self._shapes = {name: array.shape for name, array in arrays.items()}
        weakref.finalize(self, _remove, self.paths)

    def _write(self, parts: Sequence[Weights]) -> list[str]:
        try:
            digests = [write_file(p, part) for p, part in zip(self.paths, parts, strict=True)]
        except BaseException:
            _remove(self.paths)
            raise
        self._here = None
        return digests

    @property
    def failed(self) -> bool:
        return self._digests.done() and self._digests.exception() is not None

    @property
    def where(self) -> str:
        return "disk" if self._here is None else "resident"

    @property
    def nbytes(self) -> int:
        return 0 if self._here is None else sum(array.nbytes for array in self._here.values())

    def settle(self) -> None:
        try:
            self._digests.result()
        except OSError as error:
            raise OSError(
                error.errno, f"a line cannot be kept on disk ({error.strerror}); it stays in memory"
            ) from None

    def recall(self) -> None:
        if self._read is None and self.where == "disk":
            both = list(zip(self.paths, self._digests.result(), strict=True))
            self._read = worker().submit(lambda: [read_file(*each) for each in both])

    def take(self) -> dict[str, mx.array]:
        if (here := self._here) is not None:
            # Separate array objects: a cache changes its arrays in place, and branches share these.
            return {name: array[...] for name, array in here.items()}
        self.recall()
        assert self._read is not None
        reading, self._read = self._read, None  # frees the read data as soon as possible
        found: dict[str, mx.array] = {}
        for weights in reading.result():
            found |= from_weights(weights)
        return {name: found[name].reshape(shape) for name, shape in self._shapes.items()}


PUT: dict[str, Callable[[Arrays], Storage]] = {"8bit": EightBits, "disk": File}


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def by_dtype(arrays: Arrays) -> list[dict[str, mx.array]]:
    """Arrays apart by their dtypes: a cache's are of one, but for float32 recurrent states."""
    found: dict[mx.Dtype, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        found.setdefault(array.dtype, {})[name] = array
    return list(found.values())


def to_weights(arrays: Arrays) -> Weights:
    """Evaluated arrays of one dtype as NumPy arrays with two axes; nothing is copied."""
    dtype = next(iter(arrays.values())).dtype
    if any(array.dtype != dtype for array in arrays.values()):
        raise ValueError(f"arrays of {sorted({str(a.dtype) for a in arrays.values()})} in one file")
    carried = {
        name: np.array(a.view(mx.uint16) if dtype == mx.bfloat16 else a, copy=False)
        for name, a in arrays.items()
    }
    return Weights(DTYPES[dtype], {name: a.reshape(-1, a.shape[-1]) for name, a in carried.items()})


def from_weights(weights: Weights) -> dict[str, mx.array]:
    """The MLX arrays of :func:`to_weights`, with two axes."""
    return {name: loaded(array, weights.dtype) for name, array in weights.arrays.items()}


def write_file(path: Path, weights: Weights) -> str:
    """Write a file and return its sha256."""
    write_tensors(path, weights)
    path.chmod(0o600)  # it holds a conversation
    return sha256_of(path)


def read_file(path: Path, digest: str) -> Weights:
    """Read a file whose sha256 is still ``digest``.

    Raises:
        KVLingoError: The sha256 differs, or the file cannot be read.
    """
    try:
        found = sha256_of(path)
        if found != digest:
            raise KVLingoError(f"{path} is damaged: its sha256 is {found}, expected {digest}")
        return read_tensors(path)
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
