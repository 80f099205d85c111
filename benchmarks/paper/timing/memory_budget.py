"""The paper's table of decoding under a memory budget (appendix of that name), on this machine.

Gemma-3-12B with random weights and a random cache decodes in three ways: from its own cache of 8
KV heads; from a cache of the 4 KV heads of Gemma-3-4B, as narrowed projections would write; and
from that cache through a random head-wise translator, folded into its queries and pooled values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvlingo_mlx.backend import mx, nn, on_gpu

from mlx.utils import tree_flatten

from benchmarks.paper.timing.geometries import (
    FLOATS,
    GEOMETRIES,
    Progress,
    make,
    unmade_model,
    untrained,
)
from benchmarks.paper.timing.tables import summary
from kvlingo_mlx import caches
from kvlingo_mlx.caches import memory
from kvlingo_mlx.folding import FoldedCache, fold_caches
from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import seconds
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

FULL, NARROW = "gemma-3-12b", "gemma-3-4b"
WAYS = ("full", "narrowed", "folded")
CONTEXTS, BATCHES = (8192, 32768), (1, 8)
OWN = ("k_proj", "v_proj")  # the projections that a narrowed model does not share
BLOCK = 256  # random tokens that a random cache repeats


@dataclass(frozen=True)
class Setup:
    """The models of the table; they share all weights except the key and value projections.

    Attributes:
        full: The model that decodes.
        narrowed: The same model with fewer KV heads.
        translator: Head-wise, from the narrowed cache to the full one.
    """

    full: LanguageModel
    narrowed: LanguageModel
    translator: Translator

    def foreign_bytes(self, way: str) -> int:
        """Bytes of weights that are in memory but that ``way`` does not use."""
        full, narrowed = _own_bytes(self.full), _own_bytes(self.narrowed)
        maps = self.translator.nbytes
        used = {"full": full, "narrowed": narrowed, "folded": full + maps}
        return full + narrowed + maps - used[way]


@dataclass
class Cell:
    """The measurements of one context length and batch size.

    Attributes:
        context: Cached tokens.
        batch: Batch rows.
        decoded: Tokens per row that each sample decodes.
        samples: Raw seconds by way.
        peak: Peak bytes while decoding, by way: its weights, its cache, its activations.
        cache: Bytes of the cache, by way; for a folded cache, those of the source's cache.
        maps: Raw seconds of the translator's products alone, for the same number of tokens.
    """

    context: int
    batch: int
    decoded: int
    samples: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    peak: dict[str, int] = field(default_factory=dict)
    cache: dict[str, int] = field(default_factory=dict)
    maps: list[float] = field(default_factory=list)

    def rate(self, way: str) -> float:
        """Tokens per second over all rows, in the best sample (as in the paper)."""
        return self.batch * self.decoded / min(self.samples[way])

    def gain(self, way: str) -> float:
        """Throughput relative to the full cache's: 0.1 is a tenth more."""
        return self.rate(way) / self.rate("full") - 1

    @property
    def share(self) -> float:
        """The share of the translator's products in a folded step."""
        return min(self.maps) / min(self.samples["folded"])

    def as_json(self) -> dict[str, Any]:
        """All measurements with the figures derived from them."""
        gains = {way: self.gain(way) for way in WAYS[1:]}
        return {
            **asdict(self),
            "summary": summary({**self.samples, "maps": self.maps}),
            "gain": gains,
            "translator_share": self.share,
        }


def setup(
    layers: int | None, precision: str = "4bit", progress: Progress = lambda done, total: None
) -> Setup:
    """Random models of the table's geometry, and the translator between their caches.

    Args:
        layers: The number of the 48 layers to use; None for all.
        precision: As for :func:`unmade_model`; on a CPU quantised weights compute in float32.
        progress: As for :func:`make`.
    """
    dtype = FLOATS.get(precision, mx.bfloat16 if on_gpu() else mx.float32)
    unmade = unmade_model(FULL, layers, precision, activations=dtype)
    (full,) = make([unmade], progress=progress)
    narrowed = _narrowed(full, GEOMETRIES[NARROW]["num_key_value_heads"], precision, dtype)
    ends, same = (narrowed.spec(), full.spec()), relative_depth(*2 * (len(full.attentions),))
    config = TranslatorConfig(*ends, same, head_mixing=False, capture="post_rope")
    weights = Weights.from_float32(random_maps(config), "bfloat16" if on_gpu() else "float32")
    return Setup(full, narrowed, build(config, weights))


def _narrowed(full: LanguageModel, kv_heads: int, precision: str, dtype: mx.Dtype) -> LanguageModel:
    """The same model with fewer KV heads; all other weights are the same arrays."""
    config = {**full.config, "num_key_value_heads": kv_heads}
    model = untrained(config)
    _share(model, full.model)
    for layer in model.layers:
        for name in OWN:
            projection = layer.self_attn[name]
            projection.set_dtype(dtype)
            if precision.endswith("bit"):
                projection = projection.to_quantized(64, int(precision[0]))
            layer.self_attn[name] = projection
    mx.eval(model.parameters())
    return LanguageModel(model, full.tokenizer, config, f"{full.name}, {kv_heads} KV heads")


def _share(mine: nn.Module, theirs: nn.Module) -> None:
    """Replace this model's modules by another's, except those in ``OWN``."""
    for name, child in theirs.children().items():
        if name == "layers":
            for layer, other in zip(mine[name], child, strict=True):
                _share(layer, other)
        elif name in ("model", "self_attn"):
            _share(mine[name], child)
        elif name not in OWN:
            mine[name] = child


def _own_bytes(model: LanguageModel) -> int:
    modules = [layer.self_attn[name] for layer in model.model.layers for name in OWN]
    arrays: Any = tree_flatten([module.parameters() for module in modules])
    return sum(array.nbytes for _, array in arrays)


def allocated(model: LanguageModel, tokens: int) -> list[Any]:
    """Stock caches of ``tokens`` zeros, with room to grow; a ring has room for its window only."""
    cache, whole = caches.empty(model), (tokens // caches.GROW + 1) * caches.GROW
    for index, (own, layer) in enumerate(zip(cache, model.geometry.layers, strict=True)):
        room = min(whole, layer.window or whole)
        own.keys, own.values = (
            mx.zeros((1, heads, room, dim), model.cache_dtype)
            for heads, dim in caches.stored_shape(model, index)
        )
        own.offset = tokens
        if layer.window is not None:  # in temporal order, so the next token replaces the oldest
            own._idx = min(tokens, layer.window)
    return cache


def random_cache(model: LanguageModel, tokens: int, batch: int) -> list[Any]:
    """A model's cache of ``tokens`` in ``batch`` rows, of random numbers that repeat."""
    cache = allocated(model, tokens)
    for layer in cache:
        for name in ("keys", "values"):
            _, heads, room, dim = getattr(layer, name).shape
            block = mx.random.normal((1, heads, 1, BLOCK, dim)).astype(model.cache_dtype)
            tiled = mx.broadcast_to(block, (batch, heads, -(-room // BLOCK), BLOCK, dim))
            setattr(layer, name, mx.flatten(tiled, 2, 3)[..., :room, :])
            mx.eval(getattr(layer, name))
    return cache


def decode(model: LanguageModel, cache: list[Any], batch: int, tokens: int) -> None:
    """Decode greedily; each step is queued while the step before it runs."""
    last = mx.zeros((batch, 1), mx.int32)
    for _ in range(tokens):
        last = mx.argmax(model.model(last, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(last)
    mx.eval(last)


def translate_alone(cache: Sequence[FoldedCache], heads: int, batch: int, tokens: int) -> None:
    """Run only the translator's products of this number of decoding steps."""
    for _ in range(tokens):
        done = []
        for layer in cache:
            keys, values = layer.fold.keys.matrices, layer.fold.values.matrices
            for matrix in (*keys, *(m.swapaxes(1, 2) for m in values)):
                rows = (batch, len(matrix), heads // len(matrix), matrix.shape[1])
                done.append(mx.zeros(rows, matrix.dtype) @ matrix)
        mx.async_eval(done)
    mx.eval(done)


def measure_cell(
    models: Setup,
    context: int,
    batch: int,
    *,
    trials: int,
    decoded: int,
    progress: Callable[[], None] = lambda: None,
) -> Cell:
    """Time one cell, alternating between the ways; each gets a new cache and frees it."""
    cell = Cell(context, batch, decoded)
    for _ in range(trials):
        for way in WAYS:
            _sample(models, way, cell)
            mx.clear_cache()
        progress()
    return cell


def _sample(models: Setup, way: str, cell: Cell) -> None:
    model = models.narrowed if way == "narrowed" else models.full
    cached = models.full if way == "full" else models.narrowed
    cache = random_cache(cached, cell.context, cell.batch)
    cell.cache[way] = sum(layer.nbytes for layer in cache)
    if way == "folded":
        cache = fold_caches(cache, models.narrowed, models.full, models.translator)
    mx.clear_cache()
    mx.reset_peak_memory()
    decode(model, cache, cell.batch, 1)  # the first step allocates
    cell.samples[way].append(seconds(lambda: decode(model, cache, cell.batch, cell.decoded)))
    cell.peak[way] = mx.get_peak_memory() - models.foreign_bytes(way)
    if way == "folded":
        heads = models.full.facts["num_attention_heads"]
        work = (cache, heads, cell.batch, cell.decoded)
        translate_alone(cache, heads, cell.batch, 1)
        cell.maps.append(seconds(lambda: translate_alone(*work)))


def run(
    models: Setup,
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    trials: int,
    decoded: int,
    clock: Stopwatch,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[Cell]:
    """Measure the cells, smallest first, until the next takes more time or memory than is left."""
    done: tuple[int, float] | None = None
    for context, batch in sorted(
        ((c, b) for c in contexts for b in batches), key=lambda cell: cell[0] * cell[1]
    ):
        if done is not None and done[1] * context * batch / done[0] > clock.left():
            return
        free = memory.free()
        if free is not None and batch * memory.cache_bytes(models.full, context) > free:
            return
        started = time.perf_counter()
        try:
            with clock.limiting():
                cell = measure_cell(
                    models, context, batch, trials=trials, decoded=decoded, progress=progress
                )
        except OutOfTime:
            return
        yield cell
        done = context * batch, time.perf_counter() - started


def whole_depth() -> int:
    """The number of layers of the full geometry."""
    return int(GEOMETRIES[FULL]["num_hidden_layers"])


def default_decoded() -> int:
    """The number of tokens that a sample decodes: 128 as in the paper, or 4 on a CPU."""
    return 128 if on_gpu() else 4
