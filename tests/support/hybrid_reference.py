"""Hybrids in PyTorch and float64: an independent reference of whole models and of hand-overs.

Embeddings, norms, attention, MLPs and experts are transformers' own, in float64 throughout. Its
recurrent layers are replaced by loops over tokens, written from the papers' formulas: the gated
delta rule (Yang et al. 2024), S <- g S, S <- S + beta (v - S k) k^T; Mamba-2 (Dao and Gu 2024),
S <- exp(dt A) S + dt x B^T; LFM2's gated convolution. A translator is read from its files as the
format page describes them. Nothing here is of the package.
Legend: T tokens, H heads, D a head's width, C channels of a convolution, V the vocabulary.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache

from tests.support.reference import SIDES, read_translator

Model = Any  # a transformers model or one of its modules: attributes differ by family
Pair = tuple[Tensor, Tensor]  # a layer's keys and values, or what a recurrence reads in their place


class Widened(TorchFunctionMode):
    """A context in which whatever casts to float32 casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        given = (kwargs or {}).items()
        wide = {k: torch.float64 if each is torch.float32 else each for k, each in given}
        return func(*args, **wide)


def widened(model: Model) -> Model:
    """A copy of transformers' model in float64, to be run in the context of :class:`Widened`."""
    with Widened():
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config),
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    made.load_state_dict(model.state_dict())
    return made.eval()


@dataclass
class Mixer(ABC):
    """A recurrent layer, one token after another."""

    module: Model  # transformers' layer, of which only projections and weights are used
    tail: Tensor = field(init=False)  # (kernel - 1, C) the convolution's last inputs
    state: Tensor | None = field(init=False, default=None)  # None in a convolution alone

    def __post_init__(self) -> None:
        self.convolution = getattr(self.module, "conv1d", None) or self.module.conv
        self.kernel = self.convolution.weight[:, 0].T.detach()  # (kernel, C)
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.tail = torch.zeros_like(self.kernel[1:])

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """In place of the module's ``forward``, for a batch of one."""
        keys, values, gate = self.inputs(hidden_states[0])
        read = [self.advance(*row) for row in zip(keys, values, strict=True)]
        return self.output(torch.stack(read), gate)[None]

    @property
    def kept(self) -> list[Tensor]:
        """What a cache holds after the tokens so far."""
        return [self.tail] if self.state is None else [self.tail, self.state]

    def convolved(self, row: Tensor) -> Tensor:
        """The weighted sum (C) of a token's inputs and those before it."""
        window = torch.cat([self.tail, row[None]])
        self.tail = window[1:]
        found = (self.kernel * window).sum(dim=0)
        return found if self.convolution.bias is None else found + self.convolution.bias

    @abstractmethod
    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (T, width): what the recurrence reads, in two parts, and the output's gate."""

    @abstractmethod
    def advance(self, key: Tensor, value: Tensor) -> Tensor:
        """Take one token's inputs in; what is read from the state thereafter."""

    @abstractmethod
    def output(self, read: Tensor, gate: Tensor) -> Tensor:
        """The layer's outputs (T, width)."""


class GatedDelta(Mixer):
    """Queries, keys and values before their convolution; write strengths and decays."""

    def clear(self) -> None:
        super().clear()
        at = self.module
        self.state = torch.zeros(at.num_v_heads, at.head_v_dim, at.head_k_dim).to(self.kernel)

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at, tokens = self.module, len(hidden)
        if hasattr(at, "in_proj_qkv"):
            gate = at.in_proj_z(hidden).view(tokens, at.num_v_heads, -1)
            gates = torch.cat([at.in_proj_b(hidden), at.in_proj_a(hidden)], dim=-1)
            return at.in_proj_qkv(hidden), gates, gate
        # Qwen3-Next: each head of keys has its queries, its values and their gates beside it.
        values = at.num_v_heads // at.num_k_heads * at.head_v_dim
        heads = at.in_proj_qkvz(hidden).view(tokens, at.num_k_heads, -1)
        *mixed, gate = heads.split([at.head_k_dim, at.head_k_dim, values, values], dim=-1)
        gates = at.in_proj_ba(hidden).view(tokens, at.num_k_heads, 2, -1).transpose(1, 2)
        return (
            torch.cat([part.reshape(tokens, -1) for part in mixed], dim=-1),
            gates.reshape(tokens, -1),
            gate.reshape(tokens, at.num_v_heads, -1),
        )

    def advance(self, key: Tensor, value: Tensor) -> Tensor:
        at = self.module
        mixed = torch.nn.functional.silu(self.convolved(key))
        q, k, v = mixed.split([at.key_dim, at.key_dim, at.value_dim])
        q, k = (self._unit(part.view(at.num_k_heads, -1)) for part in (q, k))
        v = v.view(at.num_v_heads, -1)
        strength, decay = value.chunk(2)
        gate = torch.exp(-at.A_log.exp() * torch.nn.functional.softplus(decay + at.dt_bias))
        state = gate[:, None, None] * self.state
        missing = v - torch.einsum("hvk,hk->hv", state, k)
        self.state = state + torch.einsum("h,hv,hk->hvk", strength.sigmoid(), missing, k)
        return torch.einsum("hvk,hk->hv", self.state, q) * at.head_k_dim**-0.5

    def _unit(self, heads: Tensor) -> Tensor:
        """Heads of length 1, one for each head of values."""
        normed = heads / (heads.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
        return normed.repeat_interleave(self.module.num_v_heads // self.module.num_k_heads, dim=0)

    def output(self, read: Tensor, gate: Tensor) -> Tensor:
        normed = self.module.norm.weight * scaled(read, self.module.norm.variance_epsilon)
        return self.module.out_proj((normed * torch.nn.functional.silu(gate)).flatten(1))


class Mamba2(Mixer):
    """x, B and C before their convolution; time steps."""

    def clear(self) -> None:
        super().clear()
        at = self.module
        self.state = torch.zeros(at.num_heads, at.head_dim, at.ssm_state_size).to(self.kernel)

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = self.module
        sizes = [at.intermediate_size, len(self.kernel[0]), at.num_heads]
        gate, mixed, steps = at.in_proj(hidden).split(sizes, dim=-1)
        return mixed, steps, gate

    def advance(self, key: Tensor, value: Tensor) -> Tensor:
        at = self.module
        mixed = torch.nn.functional.silu(self.convolved(key))
        groups = at.n_groups * at.ssm_state_size
        x, b, c = mixed.split([at.intermediate_size, groups, groups])
        x = x.view(at.num_heads, at.head_dim)
        b, c = (
            part.view(at.n_groups, -1).repeat_interleave(at.num_heads // at.n_groups, dim=0)
            for part in (b, c)
        )
        step = torch.nn.functional.softplus(value + at.dt_bias).clamp(*at.time_step_limit)
        decay = torch.exp(-at.A_log.exp() * step)[:, None, None]
        self.state = decay * self.state + torch.einsum("h,hp,hn->hpn", step, x, b)
        return torch.einsum("hpn,hn->hp", self.state, c) + at.D[:, None] * x

    def output(self, read: Tensor, gate: Tensor) -> Tensor:
        norm = self.module.norm
        gated = read.flatten(1) * torch.nn.functional.silu(gate)
        normed = scaled(gated.unflatten(1, (-1, norm.group_size)), norm.variance_epsilon)
        return self.module.out_proj(norm.weight * normed.flatten(1))


class ShortConv(Mixer):
    """The two factors of the product that is convolved."""

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, c, x = self.module.in_proj(hidden).chunk(3, dim=-1)
        return b, x, c

    def advance(self, key: Tensor, value: Tensor) -> Tensor:
        return self.convolved(key * value)

    def output(self, read: Tensor, gate: Tensor) -> Tensor:
        return self.module.out_proj(gate * read)


def scaled(x: Tensor, eps: float) -> Tensor:
    """x at a root mean square of 1."""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def mixer_of(module: Model) -> Mixer | None:
    """The loop in place of a module; None if it is no recurrent layer."""
    if hasattr(module, "conv1d"):
        return GatedDelta(module) if hasattr(module, "num_k_heads") else Mamba2(module)
    return ShortConv(module) if type(module).__name__.endswith("ShortConv") else None


class Reference:
    """A hybrid with a cache, empty at first, from transformers' model of the same weights."""

    def __init__(self, model: Model) -> None:
        self.model = widened(model)
        self._cache: Any = None
        self._tokens = 0
        self.layers = [found for block in self.model.model.layers if (found := self._layer(block))]
        self.clear()

    @staticmethod
    def _layer(block: Model) -> Model:
        """What keeps a cache in a block: a loop that now runs in place of it, or attention."""
        for module in block.children():
            if (mixer := mixer_of(module)) is not None:
                module.forward = mixer
                return mixer
            if hasattr(module, "k_proj"):
                return module
        return None

    def clear(self) -> None:
        """Forget all tokens."""
        self._cache, self._tokens = DynamicCache(), 0
        for layer in self.layers:
            if isinstance(layer, Mixer):
                layer.clear()

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Go on by tokens; their logits (T, V)."""
        count, total = len(tokens), self._tokens + len(tokens)
        seen = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        mask = torch.zeros(1, 1, count, total, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        with Widened():
            logits: Tensor = self.model(
                torch.tensor([list(tokens)]),
                attention_mask={"full_attention": mask, "linear_attention": None, "conv": None},
                position_ids=torch.arange(self._tokens, total)[None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[0]
        self._tokens = total
        return logits

    def features(self, tokens: Sequence[int]) -> list[Pair]:
        """Each layer's keys and values (T, width) before norm and RoPE, or its inputs.

        The cache is that of these tokens thereafter.
        """
        self.clear()
        found: dict[int, Pair] = {}
        hooks: list[AbstractContextManager[Any]] = []
        for index, layer in enumerate(self.layers):
            module = layer.module if isinstance(layer, Mixer) else layer

            def record(
                _: Model, args: Any, options: Any, index: int = index, layer: Model = layer
            ) -> None:
                hidden = (args[0] if args else options["hidden_states"])[0]
                if isinstance(layer, Mixer):
                    found[index] = layer.inputs(hidden)[:2]
                else:
                    found[index] = layer.k_proj(hidden), layer.v_proj(hidden)

            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
        self.read(tokens)
        for hook in hooks:
            hook.remove()  # type: ignore[attr-defined]
        return [found[index] for index in range(len(self.layers))]

    @torch.no_grad()
    def fill(self, features: Sequence[Pair]) -> None:
        """Make the cache anew of keys and values before norm and RoPE, or inputs (T, width)."""
        self.clear()
        for layer, (keys, values) in zip(self.layers, features, strict=True):
            if isinstance(layer, Mixer):
                for row in zip(keys, values, strict=True):
                    layer.advance(*row)
                continue
            with Widened():
                heads = [part.view(1, len(part), -1, layer.head_dim) for part in (keys, values)]
                k, v = heads[0], heads[1].transpose(1, 2)
                for name in ("k_norm", "k_layernorm"):
                    k = getattr(layer, name, torch.nn.Identity())(k)
                self._cache.update(self._rotated(k.transpose(1, 2)), v, layer.layer_idx)
        self._tokens = len(features[0][0])

    def _rotated(self, keys: Tensor) -> Tensor:
        """Keys (1, H, T, D) from position 0 on, with RoPE if the model has one."""
        inner = self.model.model
        rotary = getattr(inner, "rotary_emb", None) or getattr(inner, "pos_emb", None)
        if rotary is None:
            return keys
        angles = rotary(keys, torch.arange(keys.shape[2])[None])
        _, rotated = sys.modules[type(inner).__module__].apply_rotary_pos_emb(keys, keys, *angles)
        return rotated

    @property
    def kept(self) -> list[list[Tensor]]:
        """Each layer's keys and values (H, T, D), rotated, or its tail and its state."""
        return [
            layer.kept
            if isinstance(layer, Mixer)
            else [
                self._cache.layers[layer.layer_idx].keys[0],
                self._cache.layers[layer.layer_idx].values[0],
            ]
            for layer in self.layers
        ]


@torch.no_grad()
def translated(folder: Path, source: Sequence[Pair]) -> list[Pair]:
    """What a saved linear translator makes of a source's features."""
    config, tensors = read_translator(folder)
    kinds, own = ([g["attention"] for g in config[end]["layers"]] for end in ("source", "target"))

    def of(side: int, layer: int) -> Tensor:
        reads = config["assignment"][SIDES[side]][layer]
        # Of a layer of its own kind a map reads one side, of another kind both.
        parts = [source[s][side : side + 1] if kinds[s] == own[layer] else source[s] for s in reads]
        read = torch.cat([array for part in parts for array in part], dim=-1)
        return read @ tensors[f"{SIDES[side]}.{layer}.weight"].T

    return [(of(0, t), of(1, t)) for t in range(len(config["target"]["layers"]))]
