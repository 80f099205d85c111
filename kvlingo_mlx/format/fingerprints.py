"""What identifies a model's weights, in either runtime; NumPy only.

RMSNorm weights identify a checkpoint, but fine-tuning usually leaves them as they are and changes
the projections. So a translator also keeps four numbers for each projection of keys and values: the
projection is applied to a known vector, its output is split into four parts, and each part is
projected on another known vector.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.format.geometry import canonical_json, digest_of
from kvlingo_mlx.format.tensor_file import FILE_DTYPES, DType, Header, Weights, rounded
from kvlingo_mlx.format.translator_folder import probe

# Largest expected differences, as shares of a number's scale: SAME for the same weights summed in
# another order; ROUNDED for weights rounded to 16 bits (each by up to 0.2 %), where the largest
# difference of a few hundred such sums counts.
SAME, ROUNDED = 1e-3, 2e-2
PARTS = 4
READ = 1024  # bytes of a tensor that are read at its beginning, in its middle, and at its end
MOST = 2**16  # numbers of a norm
NARROW: tuple[DType, ...] = ("bfloat16", "float16")
# Entries of config.json that describe the file, not what the model computes.
OF_THE_FILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Sketch:
    """The numbers that describe a model's projections, in cache order."""

    numbers: tuple[float, ...]  # four per projection, with six digits, as a provenance keeps them
    scales: tuple[float, ...]  # the expected size of each, if its projection's direction is random

    def difference(self, others: Any) -> float | None:
        """The largest difference from another model's ``numbers``, as a share of its scale.

        None if ``others`` are not such numbers: they may come from an untrusted provenance.
        """
        if not isinstance(others, list | tuple) or len(others) != len(self.numbers):
            return None
        if not all(isinstance(n, int | float) and abs(n) < 1e30 for n in others):
            return None
        found = np.abs(np.subtract(self.numbers, others)) / np.maximum(self.scales, 1e-30)
        return float(found.max(initial=0.0))


def sketch(outputs: Sequence[np.ndarray]) -> Sketch:
    """The sketch of projections, from each one's output (rows,) on ``probe(its columns)``."""
    numbers, scales = [], []
    for output in outputs:
        both = output.astype(np.float64), probe(len(output))
        for part, across in zip(*(np.array_split(a, PARTS) for a in both), strict=True):
            numbers.append(float(f"{across @ part:.6g}"))
            size = np.linalg.norm(across) * np.linalg.norm(part)
            scales.append(float(size) / max(len(part), 1) ** 0.5)
    return Sketch(tuple(numbers), tuple(scales))


def facts_of_models(models: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of loaded models by role that a provenance keeps beside their fingerprints."""
    sketches: dict[str, Sketch | None] = {r: model.projections for r, model in models.items()}
    return {
        "precision": {role: model.precision for role, model in models.items()},
        "projections": {role: list(s.numbers) for role, s in sketches.items() if s is not None},
    }


def weights_fingerprint(model: Any) -> str:
    """Sha256 that distinguishes a loaded model from all others, wherever it lies.

    It is of the model's files; of one that has none, of what its numbers are known by.
    """
    if model.path is not None:
        return files_fingerprint(model.path)
    sketch = model.projections
    return digest_of([model.spec().fingerprint, sketch and sketch.numbers])


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
        header = Header.of_model(path)
        digest.update(path.name.encode() + header.text)
        with path.open("rb") as file:
            for _, tensor in sorted(header.tensors.items()):
                start, stop = (header.begin + offset for offset in tensor["data_offsets"])
                middle = (start + stop - READ) // 2
                for place in (start, max(start, middle), max(start, stop - READ)):
                    file.seek(place)
                    digest.update(file.read(min(READ, stop - place)))
    return digest.hexdigest()


def norms_fingerprint(held: Mapping[str, np.ndarray], folder: Path | None) -> str:
    """Sha256 over the weights of a model's norms, in the order of their names, in float32.

    It is of what the files store. 4-bit conversion leaves these weights as they are, so a quantised
    copy has the same fingerprint.

    Args:
        held: Each norm's weight in float32, by its module's name in the runtime, which may have
            rounded it to 16 bits.
        folder: The model's folder, whose files say what was rounded; None: there is none.
    """
    files = {} if folder is None else _stored(folder)
    digest = hashlib.sha256()
    for name in sorted(held):
        digest.update(_unrounded(name, held[name].reshape(-1), files).tobytes())
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
        header = Header.of_model(path)
        for name, entry in header.tensors.items():
            module, dtype = name.removesuffix(".weight"), FILE_DTYPES.get(entry["dtype"])
            if module != name and dtype is not None and header.size_of(name) <= MOST:
                array = header.read(name, dtype)
                found[module] = Weights(dtype, {name: array}).as_float32(name).reshape(-1)
    return found
