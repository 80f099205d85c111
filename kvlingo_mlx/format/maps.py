"""The maps that a config implies: what each reads and writes, its tensors' names and shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.kinds import MATRICES, SIDES, TENSORS
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig

Read = tuple[str, int]  # (side, source layer)
STATES = "states"  # the beginning of the names of maps of recurrent states


@dataclass(frozen=True)
class Map:
    """One map of a translator: what it reads and writes, and its sizes."""

    name: str  # in the file, ``keys.0`` say
    layer: int  # the target's
    reads: tuple[Read, ...]  # in the order of the map's input columns
    writes: tuple[str, ...]  # the target's sides, in the order of the map's output rows
    heads: int | None  # the target heads of a head-wise map
    inputs: int  # the columns of one matrix that reads the source's states
    outputs: int  # the rows of one matrix that writes the target's states


@dataclass(frozen=True)
class StateMap:
    """The map to the state of one recurrent target layer, head by head.

    A head's state becomes the sum of L S R over the source layers that are read, where S is the
    state of one of their heads. ``left`` has the layers' L side by side, ``right`` their R one
    below the other.
    """

    layer: int  # the target's
    reads: tuple[int, ...]
    heads: tuple[int, ...]  # for each target head, the source head that it reads
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by the last part of their names

    @property
    def name(self) -> str:
        """The beginning of its tensors' names, for example ``states.0``."""
        return f"{STATES}.{self.layer}"


def maps_states(config: TranslatorConfig, t: int) -> bool:
    """Whether the state of target layer ``t`` is mapped, and not made of mapped inputs."""
    return config.state_maps and config.target.layers[t].recurrence is not None


def maps_of(config: TranslatorConfig) -> list[Map]:
    """All maps of keys and values that ``config`` implies, in layer order, keys before values."""
    layers = [t for t in range(len(config.target.layers)) if not maps_states(config, t)]
    return [_map(config, writes, t) for writes in config.spec.written for t in layers]


def first_readers(config: TranslatorConfig) -> dict[str, str]:
    """For each map by name the first one that reads the same states."""
    first: dict[tuple[Read, ...], str] = {}
    return {m.name: first.setdefault(m.reads, m.name) for m in maps_of(config)}


def state_maps_of(config: TranslatorConfig) -> list[StateMap]:
    """All maps of states that ``config`` implies, in layer order."""
    layers = [t for t in range(len(config.target.layers)) if maps_states(config, t)]
    return [_state_map(config, t) for t in layers]


def _state_map(config: TranslatorConfig, t: int) -> StateMap:
    reads = config.assignment.keys[t]
    source, target = config.source.layers[reads[0]].recurrence, config.target.layers[t].recurrence
    assert source is not None and target is not None  # a config without them was refused
    heads, count = target.value_heads, len(reads)
    read = tuple(head * source.value_heads // heads for head in range(heads))
    left = heads, target.value_dim, count * source.value_dim
    right = heads, count * source.key_dim, target.key_dim
    return StateMap(t, reads, read, {"left": left, "right": right})


def unmappable(source: ModelSpec, target: ModelSpec) -> str | None:
    """Why no maps lead from the states of one model to those of another; None if they do."""
    recurrent = [[g for g in spec.layers if g.recurrence] for spec in (source, target)]
    rules = [sorted({layer.attention for layer in layers}) for layers in recurrent]
    if rules[0] != rules[1] or not rules[0]:
        told = (
            f"{spec.name} has {'those of ' + ' and '.join(own) if own else 'none'}"
            for spec, own in zip((source, target), rules, strict=True)
        )
        return f"states are mapped between recurrent layers of one rule; {', '.join(told)}"
    if "short_conv" in rules[0]:
        return f"{target.name} has short convolutions, which keep no state that could be mapped"
    if len({layer.recurrence.parts for layer in recurrent[0] if layer.recurrence}) > 1:
        return f"the recurrent layers of {source.name} have states of several shapes"
    return None


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


def unpaired_heads(
    source: ModelSpec, target: ModelSpec, head_map: tuple[int, ...] | None = None
) -> str | None:
    """Why head-wise maps cannot pair the heads of two models; None if they can."""
    for spec in (source, target):
        counts = sorted({layer.kv_heads for layer in spec.layers})
        if len(counts) > 1:
            told = f"{spec.name} has layers of {' and '.join(map(str, counts))}"
            return f"head-wise maps need one KV-head count per model, {told}; use head-mixing ones"
    sources, heads = source.layers[0].kv_heads, target.layers[0].kv_heads
    if head_map is None and heads % sources:
        return (
            f"{heads} target heads are no multiple of {sources} source heads: head-wise maps need "
            f"head_map, a list of {heads} source heads (0 to {sources - 1}), one for each target "
            "head; or use head-mixing ones"
        )
    if head_map is not None and (len(head_map) != heads or max(head_map) >= sources):
        return (
            f"head_map is {list(head_map)!r:.60}, expected {heads} source heads from 0 to "
            f"{sources - 1}"
        )
    return None


def check_states(source: ModelSpec, target: ModelSpec) -> None:
    """Refuse (IncompatibleTranslatorError) models between whose states no maps lead."""
    if (reason := unmappable(source, target)) is not None:
        raise IncompatibleTranslatorError(
            f"state_maps is on, but {reason}; leave state_maps out, and layers are made of what "
            "goes into recurrences"
        )


def expected_shapes(
    config: TranslatorConfig, names: Iterable[str], hidden: int = -1
) -> dict[str, tuple]:
    """The name and shape of every tensor in a file of this config.

    ``names`` are those found in the file. They decide whether biases and gates are expected: every
    map has them or none has. The config does not tell the ``hidden`` width, for which -1 stands.
    """
    lasts = {name.rsplit(".", 1)[-1] for name in names}
    spec = config.spec
    present = (*spec.tensors, *(name for name in spec.optional if name in lasts))
    found = {
        f"{m.name}.{name}": shape
        for m in maps_of(config)
        for name, shape in shapes_of(config, m, present, hidden).items()
    }
    for each in state_maps_of(config):
        found |= {f"{each.name}.{name}": shape for name, shape in each.shapes.items()}
    return found


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


# What an axis counts; in a head-wise map of one head, as one more axis in front says.
AXES = {
    "outputs": "the target layer's KV heads x dim",
    "inputs": "the same of the source layers that it reads",
    "hidden": "hidden units",
    "heads": "the target layer's KV heads",
    "all": "the target layer's KV heads x dim",
}
STATE_AXES = {
    "left": "rows: the target's value dim; columns: that of each source layer that it reads",
    "right": "rows: the key dim of each source layer that it reads; columns: the target's",
}


def axes_in_words(name: str, head_mixing: bool) -> str:
    """What the axes of a tensor count; ``name`` is the last part of its name."""
    if name in STATE_AXES:
        return f"first the target layer's heads; {STATE_AXES[name]}"
    tensor = TENSORS[name]
    by_head = not head_mixing and tensor.by_head
    words = [AXES[axis].replace("KV heads x dim", "dim" if by_head else "KV heads x dim")
             for axis in tensor.axes]  # fmt: skip
    if tensor.is_matrix:
        words = [f"rows: {words[0]}", f"columns: {words[1]}"]
    return "; ".join(["first the target layer's KV heads", *words] if by_head else words)


def flops_of(sizes: Iterable[tuple[str, int]]) -> int:
    """The floating-point operations per token of tensors given by name and size.

    Each number of a matrix counts two (appendix "Computational gains"); biases, gates and GELU
    are not counted.
    """
    return 2 * sum(size for name, size in sizes if name.rsplit(".", 1)[-1] in MATRICES)
