"""The maps that a config implies: what each reads and writes, its tensors' names and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlingo_mlx.format.kinds import MATRICES, SIDES, TENSORS
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig

Read = tuple[str, int]  # (side, source layer)


@dataclass(frozen=True)
class Map:
    """One map of a translator: its name in the file, what it reads and writes, and its sizes.

    Attributes:
        name: For example ``keys.0``.
        layer: The target layer.
        reads: Sides and source layers, in the order of the map's input columns.
        writes: The target's sides, in the order of the map's output rows.
        heads: The number of target heads of a head-wise map, else None.
        inputs: The number of columns of one matrix that reads the source's states.
        outputs: The number of rows of one matrix that writes the target's states.
    """

    name: str
    layer: int
    reads: tuple[Read, ...]
    writes: tuple[str, ...]
    heads: int | None
    inputs: int
    outputs: int


def maps_of(config: TranslatorConfig) -> list[Map]:
    """All maps that ``config`` implies, in layer order, keys before values."""
    layers = range(len(config.target.layers))
    return [_map(config, writes, t) for writes in config.spec.written for t in layers]


def reads_of(
    config: TranslatorConfig, side: str, t: int, layers: Iterable[int]
) -> tuple[Read, ...]:
    """What the map to one side of target layer ``t`` reads of source ``layers``.

    That is the same side of a layer of its own kind. In a layer of another kind the sides mean
    something else, so both are read.
    """
    kind, source = config.target.layers[t].attention, config.source.layers
    return tuple(
        (each, s) for s in layers for each in ((side,) if source[s].attention == kind else SIDES)
    )


def _map(config: TranslatorConfig, writes: tuple[str, ...], t: int) -> Map:
    target, mixing = config.target.layers[t], config.head_mixing
    if len(writes) == 1:
        reads = reads_of(config, writes[0], t, config.assignment.side(writes[0])[t])
    else:
        reads = tuple((side, s) for side in writes for s in config.assignment.side(side)[t])
    read = [(config.source.layers[s], side) for side, s in reads]
    return Map(
        name=f"{writes[0] if len(writes) == 1 else 'joint'}.{t}",
        layer=t,
        reads=reads,
        writes=writes,
        heads=None if mixing else target.kv_heads,
        inputs=sum(s.width(side) if mixing else s.head_dim(side) for s, side in read),
        outputs=sum(target.width(side) if mixing else target.head_dim(side) for side in writes),
    )


def head_map_of(config: TranslatorConfig) -> tuple[int, ...]:
    """The source head that each target head of a head-wise translator reads."""
    heads, sources = config.target.layers[0].kv_heads, config.source.layers[0].kv_heads
    if config.head_map is not None:
        return config.head_map
    return tuple(head // (heads // sources) for head in range(heads))


def check_head_ratio(source: ModelSpec, target: ModelSpec) -> None:
    """Refuse (ValueError) models whose head counts new head-wise maps cannot pair evenly."""
    for spec in (source, target):
        counts = sorted({layer.kv_heads for layer in spec.layers})
        if len(counts) > 1:
            raise ValueError(
                f"head-wise maps need one KV-head count per model, {spec.name} has layers of "
                f"{' and '.join(map(str, counts))}; use head-mixing ones"
            )
    heads, sources = target.layers[0].kv_heads, source.layers[0].kv_heads
    if heads % sources:
        raise ValueError(
            f"head-wise maps need target heads ({heads}) to be a multiple of source heads "
            f"({sources}); use head-mixing ones"
        )


def expected_shapes(config: TranslatorConfig, names: Iterable[str]) -> dict[str, tuple]:
    """The name and shape of every tensor in a file of this config.

    ``names`` are those found in the file. They decide whether biases and gates are expected: every
    map has them or none has. A hidden width stands as -1, because the config does not tell it.
    """
    lasts = {name.rsplit(".", 1)[-1] for name in names}
    spec = config.spec
    present = (*spec.tensors, *(name for name in spec.optional if name in lasts))
    return {
        f"{m.name}.{name}": shape
        for m in maps_of(config)
        for name, shape in shapes_of(config, m, present).items()
    }


def shapes_of(
    config: TranslatorConfig, m: Map, names: Iterable[str], hidden: int = -1
) -> dict[str, tuple[int, ...]]:
    """The shapes of a map's tensors, by the last part of their names."""
    sizes = {
        "outputs": m.outputs,
        "inputs": m.inputs,
        "hidden": hidden,
        "heads": config.target.layers[m.layer].kv_heads,
        "all": m.outputs * (m.heads or 1),
    }
    shapes = {}
    for name in names:
        tensor = TENSORS[name]
        lead = (m.heads,) if m.heads is not None and tensor.by_head else ()
        shapes[name] = (*lead, *(sizes[axis] for axis in tensor.axes))
    return shapes


# What an axis counts, in a head-mixing map and in a head-wise one.
AXES = {
    "outputs": ("the target layer's KV heads x dim", "the target layer's dim"),
    "inputs": (
        "the same of the source layers that it reads",
        "the dims of the source layers that it reads",
    ),
    "hidden": ("hidden units", "hidden units"),
    "heads": ("the target layer's KV heads", "the target layer's KV heads"),
    "all": ("flat: the target layer's KV heads x dim", "flat: the target layer's KV heads x dim"),
}


def axes_told(name: str, head_mixing: bool) -> str:
    """What the axes of a tensor count, in words; ``name`` is the last part of its name."""
    tensor = TENSORS[name]
    words = [AXES[axis][0 if head_mixing else 1] for axis in tensor.axes]
    if tensor.is_matrix:
        words = [f"rows: {words[0]}", f"columns: {words[1]}"]
    if not head_mixing and tensor.by_head:
        words.insert(0, "first the target layer's KV heads")
    return "; ".join(words)


def flops_of(sizes: Iterable[tuple[str, int]]) -> int:
    """The floating-point operations per token of tensors given by name and size.

    Each number of a matrix counts two (appendix "Computational gains"); biases, gates and GELU
    are not counted.
    """
    return 2 * sum(size for name, size in sizes if name.rsplit(".", 1)[-1] in MATRICES)
