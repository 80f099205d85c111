"""The coordinates in which a solved map learns.

AdamW gives every weight steps of one size. The numbers of a model's keys and values differ in size
by hundreds (the biases of Qwen2.5's keys), and many go together, so one rate is far too high for
some directions of a map's input and far too low for others. In these coordinates what a map reads
is white, and an output's unit is its error under the closed form: a rate is a share of that error
(paper/LOG.md, "a real pair").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.format.maps import first_readers
from kvlingo_mlx.format.translator_config import TranslatorConfig

RATE = 3e-3  # of whatever pair
# Inputs of a map beyond which its steps get shorter: each moves every input's weight, and so the
# output by the root of their number.
WIDE = 512


@dataclass(frozen=True)
class Coordinates:
    """Those of a translator's tensors, in either runtime's arrays.

    Of a tensor NAME there are ``NAME/white``, symmetric, (inputs, inputs), and ``NAME/size``
    (outputs,); in head-wise maps one of each for a head. Maps that read the same states share the
    first one's ``white``. Other tensors learn as they are.
    """

    arrays: Mapping[str, Any]
    first: Mapping[str, str]  # of each map, see :func:`.first_readers`

    def turned(self, name: str, array: Any) -> Any:
        """A gradient in a tensor's coordinates, or a step from there to the tensor itself."""
        if f"{name}/size" not in self.arrays:
            return array
        begins, _, ends = name.rpartition(".")
        white = self.arrays[f"{self.first.get(begins, begins)}.{ends}/white"]
        short = min(1.0, WIDE / array.shape[-1]) ** 0.5
        return array @ white * self.arrays[f"{name}/size"][..., None] * short


def apart(
    arrays: Mapping[str, Any], config: TranslatorConfig
) -> tuple[dict[str, Any], Coordinates]:
    """The tensors of a translator, and the coordinates beside them."""
    tensors = {name: array for name, array in arrays.items() if "/" not in name}
    learnt = {name: array for name, array in arrays.items() if "/" in name}
    return tensors, Coordinates(learnt, first_readers(config) if learnt else {})
