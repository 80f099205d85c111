"""A model that several machines hold together: which part of it this one holds.

mlx-lm shards a model in two ways. With tensor parallelism each rank has some heads of every layer;
in a pipeline each has some layers, the first rank the last ones. Either way a rank's module makes
caches of its own part only, so to the rest of the package that part is a model like any other. A
source can also be whole on the first rank, which tells the others what it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

TENSOR, PIPELINE, FIRST = "tensor", "pipeline", "first"


@dataclass(frozen=True)
class Part:
    """The part of a model that one rank holds."""

    # ``tensor``: some heads of every layer; ``pipeline``: some layers; ``first``: all on the first
    # rank, and on the others nothing, whose weights stay unread
    kind: str
    rank: int  # this rank
    size: int  # number of ranks
    layers: range  # whole model's cache layers of which this rank's module makes keys and values
    heads: tuple[range, ...]  # for each of them, the whole model's KV heads that this rank holds


def pipelined(layers: int, rank: int, size: int) -> range:
    """The layers of a rank in a pipeline, as mlx-lm shares them: the first rank has the last."""
    base, extra = divmod(layers, size)
    begun = sum(base + (other < extra) for other in range(rank + 1, size))
    return range(begun, begun + base + (rank < extra))
