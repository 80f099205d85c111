"""The coordinates in which a solved map learns.

AdamW gives every weight steps of one size. The numbers of a model's keys and values differ in size
by hundreds (the biases of Qwen2.5's keys), and many go together, so one rate is far too high for
some directions of a map's input and far too low for others. In these coordinates what a map reads
is white, and an output's unit is its error under the closed form: a rate is a share of that error
(paper/LOG.md, "a real pair").

What a map reads is made white, once for all maps that read it. To turn gradients and steps instead
would cost a product with the inputs squared for every map and step, half of the time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.format.assignment import LATENT
from kvlingo_mlx.format.maps import first_readers, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig

RATE = 3e-3  # of whatever pair
# Inputs of a map beyond which its steps get shorter: each moves every input's weight, and so the
# output by the root of their number.
WIDE = 512
LEAST = 1e-3, 1e-6  # an output's unit: of the largest in its map, and at all
LONGER = 1.15  # the factor of keys' deviations from their mean


@dataclass(frozen=True)
class Coordinates:
    """Those of a translator's tensors, in either runtime's arrays; other tensors have none."""

    white: Mapping[str, Any]  # symmetric (inputs, inputs), in head-wise maps one for each head
    units: Mapping[str, Any]  # of a tensor's outputs, (outputs, 1) or (heads, outputs, 1)
    first: Mapping[str, str]  # whose ``white`` a map has, where it has one: :func:`.first_readers`

    def applied(self, name: str, tensor: Any) -> Any:
        """What is applied to white inputs, where a tensor learns from them."""
        return tensor * self.units[name] if name in self.units else tensor

    def plain(self, name: str, tensor: Any) -> Any:
        """What is applied to a source's states as they are."""
        if name not in self.units:
            return tensor
        return self.applied(name, tensor) @ self.white[self.first[name.rpartition(".")[0]]]


def apart(
    arrays: Mapping[str, np.ndarray], config: TranslatorConfig, copied: Callable[[np.ndarray], Any]
) -> tuple[dict[str, Any], Coordinates]:
    """The tensors of a translator in its coordinates, both as a runtime's arrays.

    Of a tensor NAME that has coordinates there are ``NAME/size`` (outputs,) and, if its map is the
    first to read its inputs, ``NAME/white``.
    """
    first = first_readers(config) if any("/" in name for name in arrays) else {}
    white = {n.split(".weight/")[0]: a for n, a in arrays.items() if n.endswith("/white")}
    inverse = {name: np.linalg.inv(array.astype(np.float64)) for name, array in white.items()}
    tensors, units = dict[str, Any](), dict[str, Any]()
    for name, array in arrays.items():
        if "/" in name:
            continue
        if f"{name}/size" in arrays:
            size, (share, least) = arrays[f"{name}/size"], LEAST  # 0 where a map is exact
            size = np.maximum(size, max(share * size.max(), least))
            unit = size[..., None] * min(1.0, WIDE / array.shape[-1]) ** 0.5
            array = array / unit @ inverse[first[name.rpartition(".")[0]]].astype(array.dtype)
            units[name] = copied(unit)
        tensors[name] = copied(array)
    return tensors, Coordinates({n: copied(a) for n, a in white.items()}, units, first)


def lengthened(arrays: Mapping[str, np.ndarray], config: TranslatorConfig) -> dict[str, np.ndarray]:
    """The maps of keys, by name, whose results deviate from their mean ``LONGER`` times as much.

    Least squares draw what is uncertain to its mean. Where all entries are translated, a softmax
    hardly sees it; beside a target's own entries, as in a conversation in which it answers too, it
    finds translated ones too seldom (paper/LOG.md, "longer keys"). ``NAME/mean`` are the means
    (inputs,) of what a map reads. Maps without coordinates, of recurrent layers and of latents are
    left as they are.
    """
    found, first = dict[str, np.ndarray](), first_readers(config)
    for m in maps_of(config) if config.capture != LATENT else ():
        means, white = (arrays.get(f"{first[m.name]}.weight/{what}") for what in ("mean", "white"))
        attends = m.writes == ("keys",) and config.target.layers[m.layer].recurrence is None
        if attends and means is not None and white is not None:
            # The product of a map's inputs with ``one`` is 1, as nearly as their squares allow.
            weight, one = arrays[f"{m.name}.weight"], white @ (white @ means[..., None])
            kept = weight @ means[..., None] @ one.mT
            found[f"{m.name}.weight"] = kept + LONGER * (weight - kept)
    return found
