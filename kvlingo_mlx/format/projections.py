"""Some numbers by which a fine-tuned or LoRA-fused copy of a model is told from the model.

Norms identify a checkpoint, and fine-tuning leaves them alone as a rule; what it changes is
projections. Four numbers for each projection of keys and values are kept with a translator: what
the quarters of its rows make of a known vector, each projected on another. NumPy only, for both
runtimes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.translator_folder import probe

# Of a projection's size, the same weights summed in another order; and rounded to 16 bits (0.2 %
# each number, the largest of a few hundred such sums).
SAME, ROUNDED = 1e-3, 2e-2
PARTS = 4
SAMPLED = 256  # of an array's numbers, those that its fingerprint holds as they are, about
# What a config.json says of its file alone, not of what the model computes.
OF_THE_FILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Checked:
    """One array of a model's weights, read once.

    Attributes:
        name: By which its runtime knows it.
        kind: Its dtype and shape.
        sums: Its bits as unsigned or signed integers, summed along the last axis with
            wrap-around: exact, in whatever order a machine adds them.
        sample: Every so manieth of its numbers, as bytes.
    """

    name: str
    kind: str
    sums: bytes
    sample: bytes


def weights_fingerprint(arrays: Iterable[Checked], config: Mapping[str, Any]) -> str:
    """Sha256 by which a model's weights and config are told from any others of one runtime.

    ``config`` is its config.json: scales and caps of which no weight knows stand there.
    """
    facts = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    digest = hashlib.sha256(canonical_json(facts).encode())
    for array in sorted(arrays, key=lambda each: each.name):
        digest.update(f"{array.name} {array.kind} {len(array.sums)}".encode())
        digest.update(array.sums + array.sample)
    return digest.hexdigest()


@dataclass(frozen=True)
class Sketch:
    """What is known of a model's projections, in cache order.

    Attributes:
        numbers: Four a projection, of six digits; what a translator's provenance keeps.
        scales: How large each would be, about, were its direction random.
    """

    numbers: tuple[float, ...]
    scales: tuple[float, ...]

    def difference(self, others: Any) -> float | None:
        """The largest difference from another model's ``numbers``, as a share of its scale.

        None where ``others``, a stranger's provenance perhaps, are not such numbers.
        """
        if not isinstance(others, list | tuple) or len(others) != len(self.numbers):
            return None
        if not all(isinstance(n, int | float) and abs(n) < 1e30 for n in others):
            return None
        found = np.abs(np.subtract(self.numbers, others)) / np.maximum(self.scales, 1e-30)
        return float(found.max(initial=0.0))


def sketch(outputs: Sequence[np.ndarray]) -> Sketch:
    """The sketch of projections by what each makes of ``probe(its columns)``, (rows,) each."""
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
    """What a translator's provenance keeps of the models, by role, beside their fingerprints."""
    sketches = {role: model.projections for role, model in models.items()}
    return {
        "precision": {role: model.precision for role, model in models.items()},
        "projections": {role: list(s.numbers) for role, s in sketches.items() if s is not None},
    }
