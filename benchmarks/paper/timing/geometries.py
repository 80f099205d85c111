"""Random models with the widths of released ones; times do not depend on the weights' values."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn, on_gpu

from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_tokenizer

from benchmarks.paper.timing.shapes import GEOMETRIES
from kvlingo_mlx.caches import memory
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.bench import BenchPair, random_forms

BLOCK = 2**20 + 7  # odd, so that no two rows of a matrix are equal
FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16}
PRECISIONS = (*FLOATS, "8bit", "4bit")
Progress = Callable[[int, int], object]  # takes how many steps are done, and of how many


def check(name: str, layers: int | None, precision: str | None) -> None:
    """Raise ValueError for what :func:`unmade_model` cannot be; a None precision is any."""
    if name not in GEOMETRIES:
        raise ValueError(f"--geometry names {name!r}; there are {', '.join(GEOMETRIES)}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; give one of {', '.join(PRECISIONS)}")
    depth, period = GEOMETRIES[name]["num_hidden_layers"], _period(GEOMETRIES[name])
    if layers is not None and not 1 <= layers <= depth:
        raise ValueError(f"layers is {layers}; {name} has {depth}")
    if (layers or depth) < period:
        raise ValueError(
            f"layers is {layers}; of {name} every {period}th attends to all tokens: give more"
        )


def _period(config: Mapping[str, Any]) -> int:
    return int(config.get("sliding_window_pattern", config.get("full_attention_interval", 1)))


def unmade_model(
    name: str,
    layers: int | None,
    precision: str,
    seed: int = 0,
    *,
    activations: mx.Dtype | None = None,
) -> LanguageModel:
    """A model of a geometry, with random weights that are computed by :func:`make`, not before.

    None of ``layers`` is all. Precisions are ``float32``, ``bfloat16``, and ``8bit`` or ``4bit`` in
    groups of 64, which compute in ``activations``. Its tokenizer is the embedded models'.
    """
    check(name, layers, precision)
    config = dict(GEOMETRIES[name])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    mx.random.seed(seed)
    model = untrained(config)
    block = mx.random.normal((BLOCK,)) * 0.02
    model.update(tree_map(lambda array: _filled(array, block), model.parameters()))
    for part in [*model.layers, model]:
        part.set_dtype(FLOATS.get(precision, activations or mx.bfloat16))
        if precision.endswith("bit"):
            bare = lambda path, module: hasattr(module, "to_quantized")  # noqa: E731
            nn.quantize(part, 64, int(precision[0]), class_predicate=bare)
            _pack_at_random(part)
    return LanguageModel(model, load_tokenizer(zoo("tiny-qwen3-s")), config, f"random {name}")


def untrained(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of a config, with the weights that it starts with."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.sanitize({})  # without head weights, Gemma-3 then uses its embedding as head
    return model


def _filled(array: mx.array, block: mx.array) -> mx.array:
    """An array of random numbers; a large one repeats them, as drawing all takes far too long."""
    rows = -(-array.size // BLOCK)
    if rows <= 1:
        return array
    return mx.broadcast_to(block, (rows, BLOCK)).reshape(-1)[: array.size].reshape(array.shape)


def _pack_at_random(part: nn.Module) -> None:
    """Fill quantised layers with random words before quantised floats are evaluated for them."""
    for module in (m for m in part.modules() if "scales" in m):
        scales = module["scales"]
        width = scales.shape[-1] * module.group_size
        step = 2.0 ** (1 - module.bits) / width**0.5
        words = mx.random.randint(-(2**31), 2**31 - 1, module["weight"].shape, mx.int32)
        module.weight = words.view(mx.uint32)
        module.scales = mx.full(scales.shape, step, scales.dtype)
        module.biases = mx.full(scales.shape, -step * 2.0 ** (module.bits - 1), scales.dtype)


def make(
    models: Sequence[LanguageModel],
    more: Mapping[str, int] | None = None,
    progress: Progress = lambda done, total: None,
) -> Sequence[LanguageModel]:
    """The same random models with computed weights, after a check that these fit into memory.

    ``more`` are bytes that are needed beside the weights, by purpose. ``progress`` is called after
    each layer.

    Raises:
        NotEnoughMemoryError: The message says how many layers would fit; nothing was made.
        UnsupportedModelError: MLX cannot run one of them on this device.
    """
    for model in models:
        model.check_device()
    needs = {f"weights of {model.name}": memory.weights_bytes(model) for model in models}
    memory.check(needs | dict(more or {}), instead=_less(models, sum((more or {}).values())))
    # Layer by layer: a whole float32 copy may not fit.
    parts = [part for model in models for part in (*model.model.layers, model.model)]
    for done, part in enumerate(parts, start=1):
        mx.eval(part.parameters())
        progress(done, len(parts))
    return models


def _less(models: Sequence[LanguageModel], more: int) -> str:
    """What options of a bench would fit; all but embeddings and heads grows with the layers."""
    free, depths = memory.free() or 0, [len(model.model.layers) for model in models]
    own = [sum(a.nbytes for a in _arrays(model.model.layers)) for model in models]
    fixed = sum(map(memory.weights_bytes, models)) - sum(own)
    each = more / min(depths) + sum(size / depth for size, depth in zip(own, depths, strict=True))
    fits = int((free - fixed) / each)
    found = [f"-c layers={fits}"] if fits >= max(_period(m.config) for m in models) else []
    numbers = sum(array.size for model in models for array in _arrays([model.model]))
    if all(m.bits is None for m in models) and 0.6 * numbers + more < free:  # 4.5 bits and norms
        found.append("-c precision=4bit")
    return " or ".join(found or ["smaller models"])


def _arrays(modules: Sequence[nn.Module]) -> list[mx.array]:
    flat: Any = tree_flatten([module.parameters() for module in modules])
    return [array for _, array in flat]


def least_maps_bytes(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry], nu: int
) -> int:
    """The least bytes of float32 maps that read ``nu`` source layers for each target layer."""
    numbers = 0
    for dim in ("key_dim", "value_dim"):
        read, made = ([g.kv_heads * getattr(g, dim) for g in end] for end in (source, target))
        numbers += nu * min(read) * sum(made)
    return 4 * numbers


def of_geometry(
    names: Sequence[str], layers: int | None, precision: str | None, nu: int, bits: Sequence[int],
    *, tokens: int = 0, progress: Progress = lambda done, total: None,
) -> BenchPair:  # fmt: skip
    """Random models of released widths, and random maps that read ``nu`` source layers.

    ``layers`` are those of each model (None is all), ``precision`` its weights' (None is this
    machine's usual one); each of ``bits`` adds a form of the maps; both caches will hold ``tokens``
    at most.

    Raises:
        NotEnoughMemoryError, UnsupportedModelError: As for :func:`make`.
    """
    precision = precision or ("bfloat16" if on_gpu() else "float32")
    source, target = models = [
        unmade_model(name, layers, precision, seed) for seed, name in enumerate(names)
    ]
    needs = {
        "maps": least_maps_bytes(source.geometry.layers, target.geometry.layers, nu),
        memory.caches_of(tokens): sum(memory.cache_bytes(model, tokens) for model in models),
    }
    make(models, {name: size for name, size in needs.items() if size}, progress)
    weights = f"random weights in {precision}"
    if layers is not None:
        whole = [str(GEOMETRIES[name]["num_hidden_layers"]) for name in names]
        weights += f", {layers} layer{'s' * (layers > 1)} of {' and '.join(whole)}"
    return BenchPair(source, target, *random_forms((source, target), nu, bits, weights), text=False)
