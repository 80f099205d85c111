"""The least time that a machine could need: its measured rates, and the work of each phase."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvlingo_mlx.backend import mx, nn, on_gpu

from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvlingo_mlx import caches
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Read, flops_of, maps_states
from kvlingo_mlx.models.hidden import decoder_of, text_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import seconds
from kvlingo_mlx.translators.base import Translator

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
DENSE = (nn.Linear, nn.QuantizedLinear)
REPEATS = 5


@dataclass(frozen=True)
class Rates:
    """The measured rates of this machine."""

    flops: float  # floating-point operations per second in a large square matrix product
    # Bytes per second, read and written: the better of a sum over a large array and a large matrix
    # times a vector, the main work of a decoding step.
    bandwidth: float
    dtype: str  # the dtype of the square product

    def floor(self, work: Work) -> float:
        """The least seconds in which some work can be done."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)

    def best(self, other: Rates) -> Rates:
        """The better of both for each rate, since a busy machine shows less than it can do."""
        flops, bandwidth = max(self.flops, other.flops), max(self.bandwidth, other.bandwidth)
        return Rates(flops, bandwidth, self.dtype)


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes of memory that must be touched once."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def measured_rates() -> Rates:
    """The best rates of several runs of a large product, a sum and a matrix times a vector."""
    size, dtype = (8192, mx.bfloat16) if on_gpu() else (1024, mx.float32)
    square = mx.random.normal((size, size)).astype(dtype)
    long = mx.zeros(2**26 if on_gpu() else 2**24, mx.float32)
    wide, vector = long.reshape(-1, 4096), mx.zeros((4096, 1), mx.float32)
    mx.eval(square, long, wide, vector)
    product = min(seconds(lambda: mx.eval(square @ square)) for _ in range(REPEATS))
    total = min(seconds(lambda: mx.eval(long + 1)) for _ in range(REPEATS))
    step = min(seconds(lambda: mx.eval(wide @ vector)) for _ in range(REPEATS))
    bandwidth = max(2 * long.nbytes / total, wide.nbytes / step)
    return Rates(2 * size**3 / product, bandwidth, str(dtype).rsplit(".", 1)[-1])


class Costs:
    """The work of a model's passes: linear layers, attention, the output head."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        text, decoder = text_of(model), decoder_of(model)
        modules = [module for _, module in decoder.named_modules()]
        self.dense = [module for module in modules if isinstance(module, DENSE)]
        self.experts = [module for module in modules if isinstance(module, EXPERTS)]
        self.head = text.lm_head if "lm_head" in text else decoder.embed_tokens
        self.active = int(model.facts.get("num_experts_per_tok") or 0)
        owner, kept = model.attentions[-1], model.family.taps(model.attentions[-1])
        self.layers = layers = list(decoder.layers)
        holder = next(i for i, layer in enumerate(layers) if is_in(owner, layer))
        self.behind = {  # modules that reading a prompt does not run: see `reading`
            id(module)
            for layer in layers[holder:]
            for module in layer.modules()
            if all(module is not projection for projection in kept)
        }
        last = [m for m in (*self.dense, *self.experts) if is_in(m, layers[holder])]
        self.last_share = self._each(m for m in last if id(m) not in self.behind) / self._each(last)

    @cached_property
    def _head_work(self) -> Work:
        outputs, inputs = _shape(self.head)
        return Work(2 * outputs * inputs, _nbytes(self.head))

    def tokens(self, count: int, before: int = 0, touched: float = 0.0) -> Work:
        """The work of a pass over ``count`` tokens after ``before`` others, the head run once.

        ``touched`` is the share of the experts whose weights are read.
        """
        layers = self.model.geometry.layers
        work = self._pass(self.dense, self.experts, count, touched)
        return work + self._attention(layers, count, before) + self._head_work

    def reading(self, count: int, touched: float = 0.0) -> Work:
        """The work of a prefill: a pass that ends with the last layer's keys and values.

        MLX evaluates no more than that. The rest of the last layer and the head are not run. A last
        layer that is recurrent runs for its state.
        """
        dense, experts = (
            [m for m in of if id(m) not in self.behind] for of in (self.dense, self.experts)
        )
        work = self._pass(dense, experts, count, touched)
        *layers, last = self.model.geometry.layers
        if last.recurrence is not None:
            layers.append(last)
        return work + self._attention(layers, count, 0)

    def _pass(
        self, dense: Sequence[nn.Module], experts: Sequence[nn.Module], count: int, touched: float
    ) -> Work:
        weights = sum(map(_nbytes, dense)) + touched * sum(map(_nbytes, experts))
        return Work(self._each([*dense, *experts]) * count, weights)

    def _each(self, modules: Iterable[nn.Module]) -> float:
        """Floating-point operations per token."""
        times = ((m, self.active if isinstance(m, EXPERTS) else 1) for m in modules)
        return float(sum(2 * uses * _shape(m)[0] * _shape(m)[1] for m, uses in times))

    def _attention(self, layers: Sequence[LayerGeometry], count: int, before: int) -> Work:
        """The work of attention: scores and sums over what each token sees, and cache traffic.

        That of recurrent layers beside it: their states are read, and written once.
        """
        heads = int(self.model.facts["num_attention_heads"])
        flops = 0.0
        for g in layers:
            if g.recurrence is not None:
                flops += recurrent_flops(g) * count
                continue
            seen = sum(min(before + i + 1, g.window or before + i + 1) for i in range(count))
            flops += 2 * heads * (g.key_dim + g.value_dim) * seen
        entries = (  # a layer with a window reads at most that many of the earlier tokens
            count + min(before, g.window - 1 if g.window else before)
            for g in self.model.geometry.layers
        )
        sizes = caches.bytes_by_layer(self.model)
        states = caches.state_bytes(self.model) * (2 if before else 1)
        return Work(flops, states + sum(map(operator.mul, sizes, entries)))


def translation_work(
    translator: Translator, source: LanguageModel, target: LanguageModel, count: int
) -> Work:
    """The work of translating ``count`` tokens: states read, maps read, cache written.

    A layer with a window translates only its last tokens. A recurrent one makes its state of what
    is translated, or its state is mapped, whatever the number of tokens.
    """
    kept = [min(count, g.reach or count) for g in target.geometry.layers]
    flops, read = 0.0, dict[Read, int]()
    for t, (geometry, tokens) in enumerate(zip(target.geometry.layers, kept, strict=True)):
        if not maps_states(translator.config, t):
            flops += recurrent_flops(geometry) * tokens
    maps = [m.map for m in translator.of_states]
    flops += sum(m.flops for m in maps)
    for group in (group for side in SIDES for group in translator.groups[side]):
        tokens = kept[group.layers[0]]  # all layers of a group reach as far
        parts = ((name, part.size) for name, parts in group.tensors.items() for part in parts)
        flops += tokens * flops_of(parts)
        for one in {one for cut in group.cuts for reads in cut for one in reads}:
            read[one] = max(tokens, read.get(one, 0))
    layers, size = source.geometry.layers, source.cache_dtype.size
    states = sum(size * layers[i].width(side) * tokens for (side, i), tokens in read.items())
    for i in {i for m in maps for i in m.reads}:
        if (recurrence := layers[i].recurrence) is not None:
            states += mx.float32.size * math.prod(recurrence.parts[1])
    written = sum(map(operator.mul, caches.bytes_by_layer(target), kept))
    written += caches.state_bytes(target)
    return Work(flops, translator.nbytes + states + written)


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


def _shape(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, of one of its experts, or of an embedding as head."""
    *_, outputs, inputs = module.weight.shape
    return outputs, inputs * 32 // module.bits if "scales" in module else inputs


def _nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for array in dict(tree_flatten(module.parameters())).values())
