"""Hybrids: families some of whose layers keep a recurrent state in place of keys and values.

A state cannot be mapped token by token, but what it is made of can. So a recurrent layer's "keys"
are the inputs of its convolution, its "values" those of its gates, and the target's own recurrence
makes its state of their translations. Exact inputs give the exact state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models import gated_delta
from mlx_lm.models.smollm3 import NoPE
from mlx_lm.models.ssm import ssm_update

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family, Finish, Kept, Parts, Sides
from kvlingo_mlx.format.geometry import (
    LIFTED,
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
    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> Sides:
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
        reasons = {
            "no layer of attention, so nothing of a text can be looked up in its cache: such "
            "models are not supported": all(each is not None for each in found),
            "layers of attention alone, and mlx-lm runs none without a recurrent layer; "
            "correct the kinds of layers in its config.json": not any(found),
            f"convolutions with a kernel of {least}, and mlx-lm runs none below 2; correct it "
            "in its config.json": least < 2,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedModelError(f"this {self.model_type} has {reason}")
        return super().geometry(model, config)

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The modules that own a cache, attention or not, in cache order."""
        found = map(self.mixer, model.layers)
        return [module for module in found if module is not None]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        recurrent = self.recurrence(attention) is not None
        return self.projections(attention) if recurrent else super().taps(attention)

    def states(self, attention: nn.Module, outputs: Sequence[mx.array]) -> Sides:
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


# ---- the gated delta rule -------------------------------------------------------------------

# What transformers takes where a config says nothing, and mlx-lm takes otherwise or not at all.
DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
BASE = 1e4  # transformers' rope_theta where a config has none


def rotation(text: Mapping[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` that transformers makes of a config, however it spells them."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    lifted = {name: text[name] for name in LIFTED if text.get(name) is not None}
    share = DEFAULTS["partial_rotary_factor"]
    default = {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": share}
    return {**default, **lifted, **given}


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """Qwen3.5: three layers of the gated delta rule to one of gated attention.

    A layer's inputs are queries, keys and values before their convolution, which have one
    projection, and those of two gates (write strength and decay). Queries have no part in the
    state, but in the convolution's tail.
    """

    period: str | None = "full_attention_interval"
    named_inside: bool = True
    sizes: tuple[str, ...] = (
        *("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size"),
    )

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a config; the whole rotation, of which mlx-lm reads ``rope_parameters``."""
        found = super().overrides(config)
        text = config.get("text_config", config)
        entries = {**found.get("text_config", {**text, **found}), "rope_parameters": rotation(text)}
        return {"text_config": entries} if "text_config" in config else entries

    def mixer(self, block: nn.Module) -> nn.Module:
        return block.linear_attn if block.is_linear else block.self_attn

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return module.in_proj_qkv, module.in_proj_b, module.in_proj_a

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        mixed, strengths, decays = outputs
        return mixed, mx.concatenate([strengths, decays], axis=-1)

    def followed(self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array) -> Parts:
        """The tail and the state after a span; in the order in which mlx-lm computes them."""
        tail, state = kept
        batch, tokens, _ = keys.shape
        tail, whole = slid(tail, keys, module.conv_kernel_size)
        mixed = nn.silu(module.conv1d(whole))
        q, k, v = mx.split(mixed, [module.key_dim, 2 * module.key_dim], -1)
        q, k = (each.reshape(batch, tokens, module.num_k_heads, -1) for each in (q, k))
        v = v.reshape(batch, tokens, module.num_v_heads, -1)
        q, k = gated_delta.normalize_qk(q, k, inv_scale=module.head_k_dim**-0.5, eps=1e-6)
        strengths, decays = mx.split(values, 2, axis=-1)
        _, state = gated_delta.gated_delta_update(
            *(q, k, v, decays, strengths, module.A_log, module.dt_bias, state),
            use_kernel=not module.training,
        )
        return tail, state


@dataclass(frozen=True)
class InterleavedProjection(GatedDelta):
    """Qwen3-Next, whose projections come head by head."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation and the period; what a config may leave out, as transformers takes it."""
        return {**DEFAULTS, **super().settings(text)}

    overrides = Recurrent.overrides

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return module.in_proj_qkvz, module.in_proj_ba

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        q, k, v, _, strengths, decays = module.fix_query_key_value_ordering(*outputs)
        batch, tokens = q.shape[:2]
        mixed = [each.reshape(batch, tokens, -1) for each in (q, k, v)]
        return mx.concatenate(mixed, axis=-1), mx.concatenate([strengths, decays], axis=-1)


# ---- Mamba-2 --------------------------------------------------------------------------------

KINDS = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers' newer names


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Granite 4: each block has a mixer of one of two kinds, each by its own name.

    A Mamba-2 layer's inputs are what its convolution reads (x, B and C), and its time steps. C has
    no part in the state, but in the convolution's tail.
    """

    rule: Attention = "mamba2"
    sizes: tuple[str, ...] = (
        *("n_groups", "num_heads", "ssm_state_size", "head_dim", "conv_kernel_size"),
    )

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation; what transformers takes where a config says nothing."""
        unset = {
            "position_embedding_type": "nope",
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, math.inf],
        }
        return {**unset, **super().settings(text)}

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a config; the kinds of layers by the names that mlx-lm knows."""
        found = super().overrides(config)
        if kinds := config.get("layer_types"):
            found["layer_types"] = [KINDS.get(kind, kind) for kind in kinds]
        return found

    def mixer(self, block: nn.Module) -> nn.Module | None:
        return block.mamba if block.layer_type == "mamba" else block.self_attn

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return (module.in_proj,)

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        (projected,) = outputs
        first = module.intermediate_size
        _, mixed, steps = mx.split(projected, [first, first + module.conv_dim], axis=-1)
        return mixed, steps

    def followed(self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array) -> Parts:
        """The tail and the state after a span; in the order in which mlx-lm computes them."""
        tail, state = kept
        batch, tokens, _ = keys.shape
        tail, whole = slid(tail, keys, module.conv_kernel_size)
        mixed = nn.silu(module.conv1d(whole))
        groups, width = module.n_groups, module.ssm_state_size
        first = module.intermediate_size
        x, b, c = mx.split(mixed, [first, first + groups * width], axis=-1)
        x = x.reshape(batch, tokens, module.num_heads, module.head_dim)
        b, c = (each.reshape(batch, tokens, groups, width) for each in (b, c))
        _, state = ssm_update(
            *(x, module.A_log, b, c, module.D.astype(x.dtype), values, module.dt_bias, state),
            module.time_step_limit,
        )
        return tail, state


@dataclass(frozen=True)
class NemotronH(Mamba2):
    """Nemotron-H: a block is a mixer, an MLP or experts, all by one name; no keys are rotated."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"norm_topk_prob": True}  # as transformers takes it

    overrides = Recurrent.overrides

    def mixer(self, block: nn.Module) -> nn.Module | None:
        return block.mixer if block.block_type in "M*" else None


# ---- convolutions alone ---------------------------------------------------------------------


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """LFM2, dense or with experts: gated convolutions over three tokens among attention.

    Such a layer keeps the last products of two of its inputs, its "keys" and "values".
    """

    rule: Attention = "short_conv"
    mark: str = "conv"

    def mixer(self, block: nn.Module) -> nn.Module:
        return block.self_attn if block.is_attention_layer else block.conv

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        if self.mark not in module:
            return None
        return Recurrence(0, 1, 0, module.args.hidden_size, module.L_cache)

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return (module.in_proj,)

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        (projected,) = outputs
        b, _, x = mx.split(projected, 3, axis=-1)
        return b, x

    def followed(self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array) -> Parts:
        """The tail after a span."""
        tail, _ = slid(kept[0], keys * values, module.L_cache)
        return (tail,)


FAMILIES = {
    "qwen3_next": InterleavedProjection("qwen3_next"),
    **{name: GatedDelta(name) for name in ("qwen3_5", "qwen3_5_moe")},
    "granitemoehybrid": Mamba2("granitemoehybrid"),
    "nemotron_h": NemotronH("nemotron_h"),
    **{name: ShortConv(name) for name in ("lfm2", "lfm2_moe")},
}
