"""Hybrids: families some of whose layers keep a recurrent state in place of keys and values.

A state cannot be mapped token by token, but what it is made of can. So a recurrent layer's "keys"
are the inputs of its convolution, its "values" those of its gates, and the target's own recurrence
makes its state of their translations. Exact inputs give the exact state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.smollm3 import NoPE

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family, Finish
from kvlingo_mlx.format.geometry import (
    Attention,
    CacheGeometry,
    LayerGeometry,
    Recurrence,
    RopeSpec,
)


@dataclass(frozen=True)
class Recurrent(Family, ABC):
    """A hybrid; ``rule`` names the recurrence of its layers without attention.

    ``mark`` is the name of a part that its recurrent layers alone have, and ``sizes`` are those of
    their attributes that :class:`Recurrence` has, in its order.
    """

    rule: Attention = "gated_delta"
    mark: str = "conv1d"
    sizes: tuple[str, ...] = ()

    # ---- what a family of hybrids says of itself --------------------------------------------

    @abstractmethod
    def mixer(self, block: nn.Module) -> nn.Module | None:
        """The part of a block that keeps a cache, attention or not; None where nothing does."""

    @abstractmethod
    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The modules whose outputs contain a recurrent layer's inputs."""

    @abstractmethod
    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """The inputs (B, T, width) of convolution and gates, from the ``projections``' outputs."""

    # ---- what follows from it ---------------------------------------------------------------

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        """What a layer keeps of a text; None if it is attention."""
        if self.mark not in module:
            return None
        return Recurrence(*(getattr(module, name) for name in self.sizes))

    def geometry(self, model: nn.Module, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that determine the shape of a cache.

        Raises:
            UnsupportedModelError: The model is no hybrid, or mlx-lm cannot run its convolutions.
        """
        found = list(map(self.recurrence, self.attentions(model)))
        least = min((each.kernel for each in found if each is not None), default=2)
        wrong = ""
        if all(each is not None for each in found):
            wrong = (
                "no layer of attention, so nothing of a text can be looked up in its cache: such "
                "models are not supported"
            )
        elif not any(found):
            wrong = (
                "layers of attention alone, and mlx-lm runs none without a recurrent layer; "
                "correct the kinds of layers in its config.json"
            )
        elif least < 2:
            wrong = (
                f"convolutions with a kernel of {least}, and mlx-lm runs none below 2; correct it "
                "in its config.json"
            )
        if wrong:
            raise UnsupportedModelError(f"this {self.model_type} has {wrong}")
        return super().geometry(model, config)

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The modules that own a cache, attention or not, in cache order."""
        found = map(self.mixer, model.layers)
        return [module for module in found if module is not None]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        recurrent = self.recurrence(attention) is not None
        return self.projections(attention) if recurrent else super().taps(attention)

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        recurrent = self.recurrence(attention) is not None
        return self.inputs(attention, outputs) if recurrent else super().states(attention, outputs)

    def rotary(self, attention: nn.Module) -> nn.Module:
        found = getattr(attention, "rope", None)
        return NoPE() if found is None else found  # a module without weights counts as false

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; inputs of a recurrence have none."""
        if self.recurrence(attention) is not None:
            return Finish(None, 0.0, NoPE(), None)
        return super().finish(attention, facts)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec | None:
        return None if self.recurrence(attention) is not None else super().rope(attention, facts)

    def layer_geometry(self, index: int, attention: nn.Module, cache: Any) -> LayerGeometry:
        recurrence = self.recurrence(attention)
        if recurrence is None:
            return super().layer_geometry(index, attention, cache)
        return LayerGeometry(
            layer=index,
            kv_heads=1,
            key_dim=recurrence.channels,
            value_dim=recurrence.gates(self.rule),
            attention=self.rule,
            recurrence=recurrence,
        )


def slid(tail: mx.array | None, inputs: mx.array, kernel: int) -> tuple[mx.array, mx.array]:
    """The next tail of a convolution, and what it reads: the tail so far, then the inputs."""
    batch, _, channels = inputs.shape
    if tail is None:
        tail = mx.zeros((batch, kernel - 1, channels), inputs.dtype)
    whole = mx.concatenate([tail, inputs], axis=1)
    return mx.contiguous(whole[:, 1 - kernel :]), whole
