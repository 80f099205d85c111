"""Assignments: which source layers each target layer reads.

Paper: section "Linear translator family", paragraph "Source-layer selection".

An assignment lists, for each target cache layer in order, the source cache layers whose states are
concatenated into the map's input. There is one list for keys and one for values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.geometry import LayerGeometry

Layers = tuple[tuple[int, ...], ...]
LATENT = "latent"


@dataclass(frozen=True)
class Assignment:
    """The source cache layers of every target cache layer, for keys and for values."""

    keys: Layers
    values: Layers

    def side(self, side: str) -> Layers:
        """The lists of one side, ``"keys"`` or ``"values"``."""
        return self.keys if side == "keys" else self.values

    def to_json(self) -> dict[str, list[list[int]]]:
        """The lists as ``translator_config.json`` stores them."""
        sides = {"keys": self.keys, "values": self.values}
        return {name: [list(layers) for layers in side] for name, side in sides.items()}


def relative_depth(num_source: int, num_target: int, nu: int = 1) -> Assignment:
    """The band of ``nu`` source layers centred on each target layer's relative depth.

    Target layer l (from 0) has the counterpart c(l) = l (N_src - 1) / (N_tgt - 1). The band whose
    centre is nearest to c(l) is taken, the deeper one on a tie. At both ends the band is shifted
    inward, so that every target layer reads exactly ``nu`` source layers.

    Raises:
        ValueError: ``nu`` is not between 1 and ``num_source``.
    """
    if not 1 <= nu <= num_source:
        raise ValueError(f"nu is {nu}; it must be 1 to {num_source}, the source's layers")
    steps, bands = max(num_target - 1, 1), []
    for index in range(num_target):
        # Only integers, so nothing is rounded: start = floor(c - (nu - 1) / 2 + 1 / 2).
        start = (2 * index * (num_source - 1) - (nu - 2) * steps) // (2 * steps)
        start = min(max(start, 0), num_source - nu)
        bands.append(tuple(range(start, start + nu)))
    return Assignment(tuple(bands), tuple(bands))


def by_depth(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry], nu: int = 1
) -> Assignment:
    """Relative depth within each attention group (paper: section "Cross-layer cache translation").

    Local target layers read only local source layers, global layers only global ones. A group of
    fewer than ``nu`` source layers is read whole. Between models of other recurrences, or a hybrid
    and a plain model, depths in the whole models count, and the nearest layers are read.

    Raises:
        ValueError: ``nu`` is not between 1 and the number of source layers of the largest group.
        IncompatibleTranslatorError: The source has no layer that a target layer can read.
    """
    found: list[tuple[int, ...]] = [()] * len(target)
    groups = attention_groups(source, target)
    largest = max(len(theirs) for theirs, _ in groups)
    if not 1 <= nu <= largest:
        raise ValueError(
            f"nu is {nu}; it must be 1 to {largest}, the source layers that a target layer can read"
        )
    steps, depth = max(len(target) - 1, 1), len(source) - 1
    for theirs, ours in groups:
        count = min(nu, len(theirs))
        bands = relative_depth(len(theirs), len(ours), count).keys
        for t, band in zip(ours, bands, strict=True):
            found[t] = tuple(theirs[index] for index in band)
            if _rules(source) != _rules(target):  # the nearest of all, the deeper one on a tie
                ranked = sorted((abs(s * steps - t * depth), -s) for s in theirs)
                found[t] = tuple(sorted(-s for _, s in ranked[:count]))
    return Assignment(tuple(found), tuple(found))


def narrow_groups(source: Sequence[LayerGeometry], target: Sequence[LayerGeometry], nu: int) -> str:
    """One line for users about kinds of attention with fewer than ``nu`` source layers.

    Empty where every target layer reads ``nu`` source layers, or no target layer can.
    """
    kinds = [theirs for theirs, _ in attention_groups(source, target)]
    short = [
        f"{len(theirs)} of {_kinds([source[i] for i in theirs])} attention"
        for theirs in kinds
        if len(theirs) < nu
    ]
    if len(short) in (0, len(kinds)):
        return ""
    have = " and ".join(short)
    return f"nu is {nu}, but the source has {have}: layers of that kind read no more than these"


def may_read(target: LayerGeometry, source: LayerGeometry) -> bool:
    """Whether a map to a target layer can read a source layer.

    Layers of attention read those of their kind. Where one of both is recurrent, any kind will do
    that is there for every token, which a window is not; latents are captured elsewhere.
    """
    if source.attention == target.attention:
        return True
    recurrent = source.recurrence is not None or target.recurrence is not None
    return (
        recurrent and source.window is None and LATENT not in (source.attention, target.attention)
    )


def attention_groups(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry]
) -> list[tuple[list[int], list[int]]]:
    """The (source, target) cache layers of each kind of attention that the target has.

    The source's are those of the same kind; where the models' recurrences differ, all that can be
    read.

    Raises:
        IncompatibleTranslatorError: The source has no layer that one of these kinds can read.
    """
    groups, apart = [], _rules(source) != _rules(target)
    for kind in dict.fromkeys(layer.attention for layer in target):
        ours = [index for index, layer in enumerate(target) if layer.attention == kind]
        theirs = [
            index
            for index, layer in enumerate(source)
            if layer.attention == kind or (apart and may_read(target[ours[0]], layer))
        ]
        if not theirs:
            raise IncompatibleTranslatorError(
                f"the target has layers of {kind} attention, the source only of "
                f"{_kinds(source)}, which these cannot read, so this pair cannot be translated"
            )
        groups.append((theirs, ours))
    return groups


def check_windows(source: Sequence[LayerGeometry], target: Sequence[LayerGeometry]) -> None:
    """Refuse a target with a layer whose window is larger than the source's smallest window.

    Raises:
        IncompatibleTranslatorError: The message names both windows.
    """
    windows = [layer.window for layer in source if layer.window is not None]
    for layer in target:
        if layer.window is not None and windows and layer.window > min(windows):
            raise IncompatibleTranslatorError(
                f"layer {layer.layer} of the target attends to a window of {layer.window} tokens, "
                f"but the source keeps the last {min(windows)} only, so the tokens before them "
                "cannot be translated"
            )


def _rules(layers: Sequence[LayerGeometry]) -> set[str]:
    return {layer.attention for layer in layers if layer.recurrence is not None}


def _kinds(layers: Sequence[LayerGeometry]) -> str:
    return " and ".join(dict.fromkeys(layer.attention for layer in layers))
