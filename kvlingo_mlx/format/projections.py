"""Fingerprints of projections: they tell a fine-tuned or LoRA-fused copy from the model itself.

RMSNorm weights identify a checkpoint, but fine-tuning usually leaves them as they are and changes
the projections. A translator keeps four numbers for each projection of keys and values: the
projection is applied to a known vector, its output is split into four parts, and each part is
projected on another known vector. NumPy only, for both runtimes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.translator_folder import probe

# Largest expected differences, as shares of a number's scale: SAME for the same weights summed in
# another order; ROUNDED for weights rounded to 16 bits (each by up to 0.2 %), where the largest
# difference of a few hundred such sums counts.
SAME, ROUNDED = 1e-3, 2e-2
PARTS = 4
SAMPLED = 256  # about how many of an array's numbers its fingerprint holds unchanged
# Entries of config.json that describe the file, not what the model computes.
OF_THE_FILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Checked:
    """One array of a model's weights, read once."""

    name: str  # in its runtime
    kind: str  # its dtype and shape
    # Its bits as integers, summed along the last axis with wrap-around: exact in any order.
    sums: bytes
    sample: bytes  # numbers at regular intervals


def weights_fingerprint(arrays: Iterable[Checked], config: Mapping[str, Any]) -> str:
    """Sha256 that identifies a model's weights and config within one runtime.

    ``config`` is the model's config.json; it holds scales and caps that no weight contains.
    """
    facts = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    digest = hashlib.sha256(canonical_json(facts).encode())
    for array in sorted(arrays, key=lambda each: each.name):
        digest.update(f"{array.name} {array.kind} {len(array.sums)}".encode())
        digest.update(array.sums + array.sample)
    return digest.hexdigest()


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


class Fitted(Protocol):
    """A loaded model, in either runtime."""

    @property
    def precision(self) -> str: ...
    @property
    def projections(self) -> Sketch | None: ...


def facts_of_models(models: Mapping[str, Fitted]) -> dict[str, Any]:
    """The facts of the models by role that a provenance keeps beside their fingerprints."""
    sketches = {role: model.projections for role, model in models.items()}
    return {
        "precision": {role: model.precision for role, model in models.items()},
        "projections": {role: list(s.numbers) for role, s in sketches.items() if s is not None},
    }
