"""The work of a prefill by layers: what recomputing or healing some of them takes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvlingo_mlx.backend import nn

from benchmarks.paper.timing.costs import Costs, is_in, recurrent_flops


class LayerCosts(Costs):
    """:class:`Costs` of each cache layer apart."""

    def by_layer(self, count: int) -> list[float]:
        """The operations of a prefill in each cache layer: linear layers and causal attention.

        Embeddings and the output head are left out. A layer without a cache of its own counts with
        the next one that has one; those above the last one are not run.
        """
        return [
            self._linear(blocks) * count + self._attention([geometry], count, 0).flops
            for blocks, geometry in zip(self._blocks(), self.model.geometry.layers, strict=True)
        ]

    def keys_by_layer(self, count: int) -> list[float]:
        """The operations of :meth:`by_layer` where a prefill ends with that layer's cache entries.

        Of its last block no more is run than what makes keys and values.
        """
        found = []
        for owner, (*before, _) in zip(self.model.attentions, self._blocks(), strict=True):
            found.append((self._linear(before) + self._each(self._kept(owner))) * count)
        states = (recurrent_flops(geometry) * count for geometry in self.model.geometry.layers)
        return list(map(operator.add, found, states))

    def _blocks(self) -> list[list[nn.Module]]:
        """The blocks of each cache layer: those after the one before it, up to its own."""
        holders = [
            next(i for i, layer in enumerate(self.layers) if is_in(owner, layer))
            for owner in self.model.attentions
        ]
        starts = [0, *(last + 1 for last in holders[:-1])]
        return [self.layers[a : b + 1] for a, b in zip(starts, holders, strict=True)]

    def _linear(self, blocks: Sequence[nn.Module]) -> float:
        """Floating-point operations per token in the linear layers of some blocks."""
        held = {id(module) for block in blocks for module in block.modules()}
        return self._each(m for m in (*self.dense, *self.experts) if id(m) in held)

    def _kept(self, owner: nn.Module) -> list[nn.Module]:
        """The linear layers that make an attention's keys and values."""
        taps = {id(module) for module in self.model.family.taps(owner)}
        return [m for m in (*self.dense, *self.experts) if id(m) in taps]
