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

RATE = 3e-3  # of whatever pair


@dataclass(frozen=True)
class Coordinates:
    """Those of a translator's tensors, in either runtime's arrays.

    Of a tensor NAME there are ``NAME/white``, symmetric, (inputs, inputs), and ``NAME/size``
    (outputs,); in head-wise maps one of each for a head. Other tensors learn as they are.
    """

    arrays: Mapping[str, Any]

    def turned(self, name: str, array: Any) -> Any:
        """A gradient in a tensor's coordinates, or a step from there to the tensor itself."""
        if f"{name}/white" not in self.arrays:
            return array
        return array @ self.arrays[f"{name}/white"] * self.arrays[f"{name}/size"][..., None]


def apart(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a translator, and the coordinates beside them."""
    tensors = {name: array for name, array in arrays.items() if "/" not in name}
    return tensors, {name: array for name, array in arrays.items() if "/" in name}
