"""The least time that a machine could need: its measured rates, and the least work of each phase.

Work that depends on the prompt's content or the kind of a layer is left out (attention, recurrent
rules), and so is the last layer of a prefill, of which little is run: a phase takes no less.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn, on_gpu

from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvlingo_mlx import caches
from kvlingo_mlx.families.base import text_model
from kvlingo_mlx.models.hidden import decoder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import seconds
from kvlingo_mlx.translators.base import Translator

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
DENSE = (nn.Linear, nn.QuantizedLinear)
REPEATS = 5


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes of memory that must be touched once."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Rates:
    """The measured rates of this machine, a second.

    ``bandwidth`` is of bytes read and written: the better of a sum over a large array and a large
    matrix times a vector, the main work of a decoding step.
    """

    flops: float  # in a large square matrix product
    bandwidth: float
    dtype: str  # of the square product

    def floor(self, work: Work) -> float:
        """The least seconds in which some work can be done."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)

    def best(self, other: Rates) -> Rates:
        """The better of both for each rate, since a busy machine shows less than it can do."""
        flops, bandwidth = max(self.flops, other.flops), max(self.bandwidth, other.bandwidth)
        return Rates(flops, bandwidth, self.dtype)


def measured_rates() -> Rates:
    """The best rates of several runs."""
    size, dtype = (8192, mx.bfloat16) if on_gpu() else (1024, mx.float32)
    square = mx.random.normal((size, size)).astype(dtype)
    long = mx.zeros(2**26 if on_gpu() else 2**24, mx.float32)
    wide, vector = long.reshape(-1, 4096), mx.zeros((4096, 1), mx.float32)
    mx.eval(square, long, wide, vector)

    def least(run: Callable[[], mx.array]) -> float:
        return min(seconds(lambda: mx.eval(run())) for _ in range(REPEATS))

    product, total = least(lambda: square @ square), least(lambda: long + 1)
    bandwidth = max(2 * long.nbytes / total, wide.nbytes / least(lambda: wide @ vector))
    return Rates(2 * size**3 / product, bandwidth, str(dtype).rsplit(".", 1)[-1])


def read_work(model: LanguageModel, count: int) -> Work:
    """The least work of reading ``count`` tokens: products of linear layers, each weight read once.

    Of a mixture of experts the weights of those that one token uses count as read.
    """
    layers = list(decoder_of(model).layers)
    last = next(i for i, layer in enumerate(layers) if is_in(model.attentions[-1], layer))
    return _linear(model, layers[:last], count)


def step_work(model: LanguageModel, before: int) -> Work:
    """The least work of one token after ``before`` others: linear layers, caches, the head."""
    text, decoder = text_model(model.model), decoder_of(model)
    head = text.lm_head if "lm_head" in text else decoder.embed_tokens
    seen = (min(before, layer.window or before) for layer in model.geometry.layers)
    read = sum(map(operator.mul, caches.bytes_by_layer(model), seen)) + caches.state_bytes(model)
    last = Work(2 * math.prod(shape_of(head)), nbytes(head) + read)
    return _linear(model, list(decoder.layers), 1) + last


def translation_work(translator: Translator, target: LanguageModel, count: int) -> Work:
    """The least work of translating ``count`` tokens: maps read and applied, caches written.

    A layer with a window translates only its last tokens.
    """
    kept = [min(count, layer.reach or count) for layer in target.geometry.layers]
    written = sum(map(operator.mul, caches.bytes_by_layer(target), kept))
    moved = translator.nbytes + written + caches.state_bytes(target)
    return Work(translator.flops_per_token * min(kept), moved)


def _linear(model: LanguageModel, layers: Sequence[nn.Module], count: int) -> Work:
    active = int(model.facts.get("num_experts_per_tok") or 0)
    share, work = active / max(1, int(model.facts.get("num_experts") or 1)), Work(0, 0)
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, (*DENSE, *EXPERTS)):
            uses, read = (active, share) if isinstance(module, EXPERTS) else (1, 1.0)
            each = 2 * uses * math.prod(shape_of(module))
            work += Work(each * count, read * nbytes(module))
    return work


def is_in(module: nn.Module, layer: nn.Module) -> bool:
    return any(module is part for part in layer.modules())


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, of one of its experts, or of an embedding as head."""
    *_, outputs, inputs = module.weight.shape
    return outputs, inputs * 32 // module.bits if "scales" in module else inputs


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for array in dict(tree_flatten(module.parameters())).values())
