"""What a translation launches and moves on a GPU, counted from MLX's graph; no GPU is needed.

    python benchmarks/translation_counts.py [--tokens 2048] [--layers 36] [--nu 1] [--head-wise]
        [--bits 8] [--ops] [--timed 7] [--json FILE]

Shapes of Qwen3-4B to Qwen3-8B: 36 layers, 8 KV heads of 128, bfloat16, unless said otherwise. A
translation goes from a span's recorded states to caches that hold it: products, k_norm, RoPE,
cast, write. States were recorded before: on a GPU each side of a span is put into one array then,
a copy a layer. Beside it stands the least: each state and each map read once, each entry written
once.

The graph is traced as on a GPU and nothing of it is computed. What a kernel needs beyond its
primitive was read in MLX's source, 0.32.2 of 2026-08-22 (``mlx/backend/{cuda,metal,gpu}``):

- Views (transposes, slices, broadcasts, most reshapes) launch nothing. A reshape that is no view
  copies. ``concatenate`` is a copy for each input, on both backends.
- A product runs as one batch with one stride only where its batch axes collapse into one. CUDA
  reads rows that lie side by side, and copies a matrix whose rows do not; Metal takes any row
  stride. Where batch axes do not collapse, Metal still launches once; CUDA 12.9 and later launch a
  kernel that writes an array of pointers and a product that reads by them, earlier CUDA a product
  for each outer index.
- RMSNorm copies what is not dense by rows of its last axis, and keeps its input's layout. RoPE
  keeps the layout on CUDA; on Metal it writes head-major from token-major.
- A compiled function is one kernel where all in it is elementwise, and writes by rows.
- A slice update copies all that it updates unless nobody else holds it.

``--timed`` also runs what was counted, on MLX's device here, and the bare products beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from kvlingo_mlx.backend import mx

from mlx.utils import tree_flatten
from translation_cost import alternated, model_of_shape

from kvlingo_mlx import caches
from kvlingo_mlx.models import keys
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, Stacked
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.random_maps import random_translators
from kvlingo_mlx.translators.base import Translator

BACKENDS = ("cuda", "metal")
VIEWS = ("Transpose", "Broadcast", "ExpandDims", "Squeeze", "Slice", "Split", "Flatten",
         "Unflatten", "Reshape", "StopGradient")  # fmt: skip
# A CPU takes fused operations apart where they are called; these stand for them in the graph.
NORM, ROPE, COMPILED = "ArcCosh", "ArcTanh", "ArcSinh"
NAMES = {NORM: "RMSNorm", ROPE: "RoPE", COMPILED: "Compiled"}


@dataclass(frozen=True)
class Layout:
    """How an array lies in memory: strides in elements, bytes of an element, its buffer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    buffer: str

    @classmethod
    def fresh(cls, shape: Sequence[int], size: int, buffer: str) -> Layout:
        return cls(tuple(shape), row_major(shape), size, buffer)

    @property
    def nbytes(self) -> int:
        """The bytes that a kernel reads of it: what is broadcast counts once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return math.prod(n for n, stride in pairs if stride) * self.size

    @property
    def by_rows(self) -> bool:
        """Whether it is contiguous in the order of its axes."""
        pairs = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        return all(n == 1 or a == b for n, a, b in pairs)

    @property
    def dense(self) -> bool:
        """Whether it is contiguous in some order of its axes."""
        axes = sorted(range(len(self.shape)), key=lambda i: (-self.strides[i], -self.shape[i]))
        shape, strides = ([a[i] for i in axes] for a in (self.shape, self.strides))
        return Layout(tuple(shape), tuple(strides), self.size, "").by_rows

    def matrix(self, whole_rows: bool) -> bool:
        """Whether the last two axes are a matrix, or a transposed one, that is read in place."""
        (rows, columns), (one, other) = self.shape[-2:], self.strides[-2:]
        if not whole_rows:
            return 1 in (one, other)
        return (other == 1 and one == columns) or (one == 1 and other == rows)

    def like(self, buffer: str, size: int) -> Layout:
        return Layout(self.shape, self.strides, size, buffer)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def collapsed(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """The number of axes that stay of a batch, where several arrays' strides must agree."""
    axes = [i for i, n in enumerate(shape) if n > 1]
    joined = sum(all(s[i] == s[j] * shape[j] for s in strides) for i, j in itertools.pairwise(axes))
    return len(axes) - joined


def reshaped(old: Layout, shape: Sequence[int], buffer: str) -> Layout | None:
    """The view of another shape, as MLX finds it; None where it copies."""
    if old.by_rows:
        return Layout(tuple(shape), row_major(shape), old.size, buffer)
    axes: list[list[int]] = []
    for n, stride in zip(old.shape, old.strides, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == stride * n:
            axes[-1] = [axes[-1][0] * n, stride]
        else:
            axes.append([n, stride])
    strides, j = [], 0
    for n in shape:
        if j < len(axes) and axes[j][0] % n == 0:
            axes[j][0] //= n
            strides.append(axes[j][0] * axes[j][1])
            j += axes[j][0] == 1
        elif n == 1:
            strides.append(strides[-1])
        else:
            return None
    return Layout(tuple(shape), tuple(strides), old.size, buffer)


@dataclass(frozen=True)
class Kernel:
    """A launch: of which primitive, and the bytes that it reads and writes."""

    name: str
    read: int
    written: int


@dataclass
class Count:
    """The launches of a graph on one backend.

    Attributes:
        backend: "cuda" or "metal".
        kernels: All launches, in order.
        irregular: Products whose batch has no single stride.
    """

    backend: str
    kernels: list[Kernel] = field(default_factory=list)
    irregular: int = 0
    layouts: dict[str, Layout] = field(default_factory=dict, repr=False)
    uses: Counter[str] = field(default_factory=Counter, repr=False)
    filled: set[str] = field(default_factory=set, repr=False)

    @property
    def nbytes(self) -> int:
        """All bytes read and written."""
        return sum(kernel.read + kernel.written for kernel in self.kernels)

    def launch(self, name: str, read: int, written: int) -> None:
        self.kernels.append(Kernel(name, read, written))

    def copy(self, name: str, old: Layout) -> Layout:
        """Copy an array so that it lies by rows."""
        new = Layout.fresh(old.shape, old.size, f"{old.buffer}'")
        self.launch(f"copy for {name}", old.nbytes, new.nbytes)
        return new

    def by_ops(self) -> list[tuple[str, int, int]]:
        """Launches and bytes by primitive."""
        numbers, moved = Counter[str](), Counter[str]()
        for kernel in self.kernels:
            numbers[kernel.name] += 1
            moved[kernel.name] += kernel.read + kernel.written
        return [(name, numbers[name], moved[name]) for name in moved]


# ---- primitives -----------------------------------------------------------------------------


def primitive(count: Count, event: dict[str, Any]) -> None:
    """Account for one primitive of a traced graph."""
    name, arguments = NAMES.get(event["name"], event["name"]), event["arguments"]
    inputs = [count.layouts[n] for n, _, _ in event["inputs"]]
    outputs = [(n, tuple(shape), dtype.size) for n, shape, dtype in event["outputs"]]
    own, shape, size = outputs[0]
    found: Layout
    if name in VIEWS:
        for index, (own, shape, _) in enumerate(outputs):
            count.layouts[own] = view(count, name, arguments, inputs[0], shape, index)
        return
    if name == "Full":  # MLX fills an array where it is used first; the trace holds equal ones once
        count.filled.add(own)
        count.layouts[own] = Layout.fresh(shape, size, own)
        return
    if name in ("Matmul", "AddMM", "QuantizedMatmul"):
        found = product(count, name, inputs, Layout.fresh(shape, size, own))
    elif name == "SliceUpdate":
        found = inputs[0].like(own, size)
        if inputs[0].buffer in count.filled:
            count.launch("Full", 0, found.nbytes)
        elif count.uses[inputs[0].buffer] > 1:
            count.launch("copy for SliceUpdate", inputs[0].nbytes, found.nbytes)
        count.launch(name, inputs[1].nbytes, math.prod(inputs[1].shape) * size)
    elif name == "Concatenate":
        found = Layout.fresh(shape, size, own)
        for each in inputs:
            count.launch(name, each.nbytes, math.prod(each.shape) * size)
    elif name in ("RMSNorm", "RoPE"):
        found = fused(count, name, inputs[0], own)
    elif name in ("Compiled", "Gather", "GatherAxis"):
        found = Layout.fresh(shape, size, own)
        count.launch(name, found.nbytes, found.nbytes)
    else:
        found = elementwise(count, name, inputs, Layout.fresh(shape, size, own))
    count.layouts[own] = found


def view(
    count: Count, name: str, arguments: Any, old: Layout, shape: tuple[int, ...], index: int
) -> Layout:
    """A view of an array, or a copy where MLX makes one."""
    if name == "Transpose":
        return Layout(shape, tuple(old.strides[i] for i in arguments[0]), old.size, old.buffer)
    if name == "Slice":
        strides = tuple(map(int.__mul__, old.strides, map(int, arguments[2])))
        return Layout(shape, strides, old.size, old.buffer)
    if name == "Split":
        return Layout(shape, old.strides, old.size, old.buffer)
    if name == "Broadcast":
        missing = len(shape) - len(old.shape)
        pairs = zip(old.shape, old.strides, shape[missing:], strict=True)
        kept = tuple(stride if n == new else 0 for n, stride, new in pairs)
        return Layout(shape, (0,) * missing + kept, old.size, old.buffer)
    if name in ("ExpandDims", "Squeeze"):
        strides, rest = [], list(zip(old.shape, old.strides, strict=True))
        rest = [pair for pair in rest if pair[0] != 1]
        for n in shape:
            strides.append(rest.pop(0)[1] if n != 1 else (rest[0][0] * rest[0][1] if rest else 1))
        return Layout(shape, tuple(strides), old.size, old.buffer)
    found = reshaped(old, shape, old.buffer)
    if found is None:
        found = Layout.fresh(shape, old.size, count.copy(name, old).buffer)
    return found


def product(count: Count, name: str, inputs: list[Layout], out: Layout) -> Layout:
    """A product, with the copies that it needs first."""
    cuda, packed = count.backend == "cuda", name == "QuantizedMatmul"
    left, right = inputs[:2]
    if packed and cuda:
        left = left if left.by_rows else count.copy(name, left)
    elif packed:
        left = left if left.matrix(True) and left.strides[-1] == 1 else count.copy(name, left)
    else:
        left, right = (a if a.matrix(cuda) else count.copy(name, a) for a in (left, right))
        axes = collapsed(out.shape[:-2], [a.strides[:-2] for a in (left, right)])
        count.irregular += axes > 1
        if axes > 1 and cuda:
            count.launch(f"pointers for {name}", 0, 24 * math.prod(out.shape[:-2]))
    read = left.nbytes + right.nbytes + sum(a.nbytes for a in inputs[2:])
    count.launch(name, read, out.nbytes)
    return out


def fused(count: Count, name: str, old: Layout, own: str) -> Layout:
    """RMSNorm or RoPE."""
    keeps = old.dense and old.strides[-1] == 1
    if name == "RMSNorm" and not (keeps and old.strides[-2] == old.shape[-1]):
        old = count.copy(name, old)
    new = old.like(own, old.size)
    if name == "RoPE" and not old.by_rows and count.backend == "metal":
        _, heads, tokens, dim = old.shape if len(old.shape) == 4 else (0, 0, 0, 0)
        transposed = (tokens * heads * dim, dim, heads * dim, 1)
        pairs = zip(old.shape, old.strides, transposed, strict=False)
        strided = len(old.shape) != 4 or any(n > 1 and a != b for n, a, b in pairs)
        if strided and math.prod(old.shape[:-3]) > 1:
            old = count.copy(name, old)
        new = Layout.fresh(old.shape, old.size, own)
    count.launch(name, old.nbytes, new.nbytes)
    return new


def elementwise(count: Count, name: str, inputs: list[Layout], out: Layout) -> Layout:
    """One kernel; with one large input its layout is kept."""
    if len(inputs) == 1 and inputs[0].shape == out.shape and inputs[0].dense:
        out = inputs[0].like(out.buffer, out.size)
    count.launch(name, sum(each.nbytes for each in inputs), out.nbytes)
    return out


# ---- a translation --------------------------------------------------------------------------


@contextlib.contextmanager
def as_on_a_gpu(backend: str = "cuda") -> Iterator[list[mx.array]]:
    """Let the package plan as on a GPU, and fused operations be one primitive each.

    Yields what compiled functions read beside their first argument, for their stand-in does not.
    """

    def norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
        return mx.arccosh(x)

    def rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.arctanh(x)

    def compiled(first: mx.array, *others: mx.array) -> mx.array:
        beside.extend(others)
        return mx.arcsinh(mx.broadcast_to(first, (*first.shape[:-2], 2, first.shape[-1])))

    def unpack(words: mx.array, scales: mx.array, _: mx.array, __: int, bits: int) -> mx.array:
        shape = (*words.shape, 32 // bits)
        return mx.flatten(mx.broadcast_to(words[..., None], shape).astype(scales.dtype), -2)

    beside: list[mx.array] = []

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("kvlingo_mlx.") and hasattr(module, "on_gpu"):
                stack.enter_context(mock.patch.object(module, "on_gpu", lambda: True))
        stack.enter_context(mock.patch.object(keys, "turned_pairs", compiled))
        stack.enter_context(mock.patch.object(mx.metal, "is_available", lambda: backend == "metal"))
        stack.enter_context(mock.patch.object(mx, "dequantize", unpack))
        stack.enter_context(mock.patch.object(mx.fast, "rms_norm", norm))
        stack.enter_context(mock.patch.object(mx.fast, "rope", rope))
        yield beside


def count_graph(
    run: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array], backend: str
) -> Count:
    """Count the launches of what ``run`` makes of ``inputs``; nothing is computed."""
    events: list[dict[str, Any]] = []
    mx.export_function(events.append, lambda *arrays: list(run(*arrays)), *inputs)
    count = Count(backend)
    for event in events:
        if event["type"] == "inputs":
            for name, shape, dtype in event["inputs"]:
                count.layouts[name] = Layout.fresh(shape, dtype.size, name)
                count.uses[name] += 1  # the caller holds it
        elif event["type"] == "constants":
            for name, array in event["constants"]:
                count.layouts[name] = Layout.fresh(array.shape, array.dtype.size, name)
                count.uses[name] += 1
    for event in (e for e in events if e["type"] == "primitive"):
        for name, _, _ in event["inputs"]:
            count.uses[name] += 1
    for event in (e for e in events if e["type"] == "primitive"):
        primitive(count, event)
    return count


@dataclass(frozen=True)
class Translation:
    """A translator, its target, and the states of a span; see :func:`made`."""

    translator: Translator
    source: LanguageModel
    target: LanguageModel
    tokens: int

    def sides(self) -> list[mx.array]:
        """The states, as a GPU records them."""
        layers, dtype = self.source.geometry.layers, self.source.cache_dtype
        shapes = (
            (len(layers), 1, self.tokens, layers[0].width(side)) for side in ("keys", "values")
        )
        return [mx.zeros(shape, dtype) for shape in shapes]

    def run(self, *sides: mx.array) -> list[mx.array]:
        """Caches filled from states."""
        keys, values = map(Stacked.of, sides)
        states = KVStates(keys, values, self.translator.config.capture, 0)
        filled = caches.empty(self.target)
        caches.reserve(filled, self.target, self.tokens)
        caches.append(filled, self.translator(states), self.target)
        return caches.arrays(filled)

    def count(self, backend: str) -> Count:
        """The launches from states to filled caches."""
        with as_on_a_gpu(backend) as beside:
            return count_graph(lambda *sides: [*self.run(*sides), *beside], self.sides(), backend)

    def timed(self, trials: int) -> dict[str, Any]:
        """A translation and as many bare products of its widths by turns, on MLX's device."""
        config, layer = self.translator.config, self.target.geometry.layers[0]
        sides, parts = self.sides(), 1 if config.head_mixing else layer.kv_heads
        batch, dtype = 2 * len(self.target.geometry.layers) * parts, sides[0].dtype
        reads, width = config.nu * sides[0].shape[-1] // parts, layer.width("keys") // parts
        shapes = (batch, self.tokens, reads), (batch, reads, width)
        left, right = (mx.random.normal(shape).astype(dtype) for shape in shapes)
        actions = {
            "translation": lambda: mx.eval(self.run(*sides)),
            "bare products": lambda: mx.eval(left @ right),
        }
        return alternated(actions, trials)

    @property
    def least(self) -> int:
        """Bytes of each state read once, each map read once, each entry written once."""
        states = sum(
            layer.width(side) * self.source.cache_dtype.size
            for layer in self.source.geometry.layers
            for side in ("keys", "values")
        )
        written = caches.bytes_per_token(self.target)
        return self.tokens * (states + written) + self.translator.nbytes


def made(
    layers: int = 36, heads: int = 8, dim: int = 128, tokens: int = 2048, nu: int = 1,
    *, depth: int | None = None, bits: int | None = None, **more: bool,
) -> Translation:  # fmt: skip
    """A random pair of one shape in bfloat16, planned as on a GPU; ``depth`` is the source's."""
    models = []
    for count in (depth or layers, layers):
        model = model_of_shape("qwen3", count, heads, dim)
        model.model.set_dtype(mx.bfloat16)
        mx.eval([array for _, array in tree_flatten(model.model.parameters())])
        assert model.cache_dtype == mx.bfloat16 and model.finishes  # asked before the patches
        models.append(model)
    source, target = models
    with as_on_a_gpu():
        form: dict[str, Any] = {"form": ("bfloat16", bits)}
        translator = random_translators(source, target, nu, form, **more)["form"]
    return Translation(translator, source, target, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--bits", type=int, choices=(8, 4))
    parser.add_argument("--head-wise", action="store_true")
    parser.add_argument("--ops", action="store_true", help="also list launches by primitive")
    parser.add_argument("--timed", type=int, default=0, metavar="TRIALS")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for tokens in args.tokens:
        translation = made(
            args.layers, tokens=tokens, nu=args.nu, bits=args.bits, head_mixing=not args.head_wise
        )
        for backend in BACKENDS:
            count = translation.count(backend)
            found = {"tokens": tokens, "backend": backend, "kernels": len(count.kernels),
                     "irregular": count.irregular, "bytes": count.nbytes,
                     "least": translation.least}  # fmt: skip
            results.append(found)
            print(
                f"{tokens:5d} tokens, {backend:5s}: {found['kernels']:4d} kernels, "
                f"{count.irregular} products without one batch stride, "
                f"{count.nbytes / 1e6:7.0f} MB, {count.nbytes / translation.least:.2f} of the least"
            )
            for name, number, moved in count.by_ops() if args.ops else ():
                print(f"    {name:24s} {number:4d} {moved / 1e6:8.0f} MB")
        if args.timed:
            found = translation.timed(args.timed)
            results.append({"tokens": tokens, **found})
            took = measure.median(found["samples_s"]["translation"])
            print(
                f"{tokens:5d} tokens, {mx.default_device()}: {took * 1e3:.2f} ms, "
                f"{measure.median(found['ratios']):.2f} of the bare products, "
                f"{took / len(count.kernels) * 1e6:.0f} us for each kernel counted, "
                f"{translation.least / took / 1e9:.1f} GB/s of the least"
            )
    if args.json:
        config = {key: value for key, value in vars(args).items() if key not in ("json", "ops")}
        measure.append_json(args.json, measure.record("translation_counts", config, results))


if __name__ == "__main__":
    main()
