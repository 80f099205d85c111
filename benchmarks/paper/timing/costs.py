"""The work of a model's passes in detail: linear layers, attention, caches, recurrent rules."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvlingo_mlx import caches
from kvlingo_mlx.families.base import text_model
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Read, StateMap, flops_of, maps_states
from kvlingo_mlx.models.hidden import decoder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
DENSE = (nn.Linear, nn.QuantizedLinear)


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes of memory that must be touched once."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


class Costs:
    """The work of a model's passes: linear layers, attention, the output head."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, facts = model, model.facts
        text, decoder = text_model(model.model), decoder_of(model)
        modules = [module for _, module in decoder.named_modules()]
        self.dense = [module for module in modules if isinstance(module, DENSE)]
        self.experts = [module for module in modules if isinstance(module, EXPERTS)]
        self.head = text.lm_head if "lm_head" in text else decoder.embed_tokens
        self.active = int(facts.get("num_experts_per_tok") or 0)
        owner = model.attentions[-1]
        kept = {id(projection) for projection in model.family.taps(owner)}
        self.layers = list(decoder.layers)
        holder = next(i for i, layer in enumerate(self.layers) if is_in(owner, layer))
        after = [module for layer in self.layers[holder:] for module in layer.modules()]
        self.behind = {id(module) for module in after} - kept  # which a prefill does not run

    def tokens(self, count: int, before: int = 0, touched: float = 0.0) -> Work:
        """The work of a pass over ``count`` tokens after ``before`` others, the head run once.

        ``touched`` is the share of the experts whose weights are read.
        """
        outputs, inputs = shape_of(self.head)
        head = Work(2 * outputs * inputs, nbytes(self.head))
        modules, layers = (*self.dense, *self.experts), self.model.geometry.layers
        return self._pass(modules, touched, count) + self._attention(layers, count, before) + head

    def reading(self, count: int, touched: float = 0.0) -> Work:
        """The work of a prefill, which ends with the last layer's keys and values.

        MLX evaluates no more than that, but for a recurrent last layer, which runs for its state.
        """
        modules = [m for m in (*self.dense, *self.experts) if id(m) not in self.behind]
        *layers, last = self.model.geometry.layers
        layers += [last] if last.recurrence is not None else []
        return self._pass(modules, touched, count) + self._attention(layers, count, 0)

    def _pass(self, modules: Sequence[nn.Module], touched: float, count: int) -> Work:
        """The work of linear layers."""
        shares = (touched if isinstance(m, EXPERTS) else 1 for m in modules)
        weights = sum(share * nbytes(m) for share, m in zip(shares, modules, strict=True))
        return Work(self._each(modules) * count, weights)

    def _each(self, modules: Iterable[nn.Module]) -> float:
        """Floating-point operations per token."""
        times = ((m, self.active if isinstance(m, EXPERTS) else 1) for m in modules)
        return float(sum(2 * uses * math.prod(shape_of(m)) for m, uses in times))

    def _attention(self, layers: Sequence[LayerGeometry], count: int, before: int) -> Work:
        """Scores and sums over what each token sees, recurrent rules, and the caches' traffic."""
        heads, flops = int(self.model.facts["num_attention_heads"]), 0.0
        for g in layers:
            most = g.window or before + count
            seen = sum(min(before + i + 1, most) for i in range(count))
            flops += (
                recurrent_flops(g) * count
                if g.recurrence is not None
                else 2 * heads * (g.key_dim + g.value_dim) * seen
            )
        entries = (  # a layer with a window reads at most that many of the earlier tokens
            count + min(before, g.window - 1 if g.window else before)
            for g in self.model.geometry.layers
        )
        sizes = caches.bytes_by_layer(self.model)
        states = caches.state_bytes(self.model) * (2 if before else 1)
        return Work(flops, states + sum(map(operator.mul, sizes, entries)))


def state_map_flops(m: StateMap) -> int:
    """The operations of one application of a map of states: L S, and that times R."""
    (heads, rows, given), (_, keys, columns) = m.shapes["left"], m.shapes["right"]
    return 2 * heads * rows * keys * (given // len(m.reads) + columns)


def translation_work(
    translator: Translator, source: LanguageModel, target: LanguageModel, count: int
) -> Work:
    """The work of translating ``count`` tokens: states read, maps read, cache written.

    A layer with a window translates only its last tokens. A recurrent one makes its state of what
    is translated, or its state is mapped, whatever the number of tokens.
    """
    layers = target.geometry.layers
    kept = [min(count, g.reach or count) for g in layers]
    maps = [m.map for m in translator.of_states]
    flops = float(sum(map(state_map_flops, maps)))
    for t, (layer, tokens) in enumerate(zip(layers, kept, strict=True)):
        flops += 0 if maps_states(translator.config, t) else recurrent_flops(layer) * tokens
    read = dict[Read, int]()
    for group in (group for side in SIDES for group in translator.groups[side]):
        tokens = kept[group.layers[0]]  # all layers of a group reach as far
        parts = ((name, part.size) for name, parts in group.tensors.items() for part in parts)
        flops += tokens * flops_of(parts)
        for one in {one for cut in group.cuts for reads in cut for one in reads}:
            read[one] = max(tokens, read.get(one, 0))
    theirs, size = source.geometry.layers, source.cache_dtype.size
    moved = sum(size * theirs[i].width(side) * tokens for (side, i), tokens in read.items())
    for i in {i for m in maps for i in m.reads}:
        if (recurrence := theirs[i].recurrence) is not None:
            moved += mx.float32.size * math.prod(recurrence.parts[1])
    moved += sum(map(operator.mul, caches.bytes_by_layer(target), kept))
    return Work(flops, translator.nbytes + moved + caches.state_bytes(target))


def recurrent_flops(layer: LayerGeometry) -> int:
    """The least floating-point operations a token of a recurrent layer's rule; 0 for attention.

    Its linear layers are counted apart. A state decays, is corrected by what it holds for the key
    (the gated delta rule alone), takes an outer product, and is read. Prefills in chunks do more.
    """
    shape = layer.recurrence
    if shape is None:
        return 0
    convolution = 2 * shape.kernel * shape.channels
    values = shape.value_heads * shape.value_dim
    if layer.attention == "short_conv":
        return convolution + 2 * values  # two products: before the convolution and after it
    touched, own = (7, 2) if layer.attention == "gated_delta" else (5, 3)
    return convolution + values * (touched * shape.key_dim + own)


def is_in(module: nn.Module, layer: nn.Module) -> bool:
    return any(module is part for part in layer.modules())


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, of one of its experts, or of an embedding as head."""
    *_, outputs, inputs = module.weight.shape
    return outputs, inputs * 32 // module.bits if "scales" in module else inputs


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for array in dict(tree_flatten(module.parameters())).values())
