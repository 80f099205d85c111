"""Which source layers each target layer reads (section 3.1, "Source-layer selection").

An assignment lists, for each target cache layer in order, the source cache layers
whose widths are concatenated into its input. Keys and values have one each.
"""

from __future__ import annotations

from dataclasses import dataclass

Layers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """The source cache layers of every target cache layer, for keys and for values."""

    keys: Layers
    values: Layers

    def side(self, side: str) -> Layers:
        """The list of ``"keys"`` or ``"values"``."""
        return self.keys if side == "keys" else self.values


def identity(num_layers: int) -> Assignment:
    """Layer to layer, for models of equal depth."""
    layers = tuple((index,) for index in range(num_layers))
    return Assignment(layers, layers)


def relative_depth(num_source: int, num_target: int, nu: int = 1) -> Assignment:
    """The band of ``nu`` source layers centred on each target layer's relative depth.

    Target layer l (from 0) has the counterpart c(l) = l (N_src - 1) / (N_tgt - 1). The
    band whose centre is nearest to c(l) is taken (the deeper one on a tie) and shifted
    inward at both ends, so every target layer reads exactly ``nu`` source layers.

    Raises:
        ValueError: ``nu`` is not between 1 and ``num_source``.
    """
    if not 1 <= nu <= num_source:
        raise ValueError(f"nu is {nu}; it must be 1 to {num_source}, the source's layers")
    bands = tuple(_band(index, num_source, num_target, nu) for index in range(num_target))
    return Assignment(bands, bands)


def _band(index: int, num_source: int, num_target: int, nu: int) -> tuple[int, ...]:
    # Integers throughout: start = floor(c - (nu - 1) / 2 + 1 / 2), with no rounding.
    steps = max(num_target - 1, 1)
    start = (2 * index * (num_source - 1) - (nu - 2) * steps) // (2 * steps)
    start = min(max(start, 0), num_source - nu)
    return tuple(range(start, start + nu))
