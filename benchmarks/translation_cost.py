"""What translation costs beside the bare matmuls of the same shapes.

    python benchmarks/translation_cost.py [--layers 48] [--tokens 64 1024] [--json FILE]

Shapes of Qwen3-4B to Qwen3-30B-A3B: each of 48 target layers reads nu = 3 source layers
through 512 x 3072 per side; random weights. With `--shape preserving` those of Qwen3-0.6B to
Qwen3-1.7B: 28 layers, nu = 1, 1024 x 1024. The translation counts everything between
the source's recorded states and a cache that the target can decode from: products,
k_norm, RoPE, cache write. The bare matmuls are two batched products, one a side, of
inputs that lie stacked in memory already. Both alternate in one run; medians and ratios.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.utils import load_tokenizer

from kvlingo_mlx import caches
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.random_maps import random_translators
from kvlingo_mlx.translators.base import Translator

HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Layers and KV heads of source and target, and source layers that a target layer reads."""

    source: tuple[int, int]
    target: tuple[int, int]
    nu: int

    def bare_products(self, layers: int, tokens: int) -> tuple[mx.array, mx.array]:
        """One side's inputs (layers, T, in), stacked, and maps (layers, out, in)."""
        inputs = self.nu * self.source[1] * HEAD_DIM
        maps = mx.random.normal((layers, self.target[1] * HEAD_DIM, inputs)) * 0.02
        return mx.random.normal((layers, tokens, inputs)), maps


SHAPES = {"moe": Shape((36, 8), (48, 4), 3), "preserving": Shape((28, 8), (28, 8), 1)}


def model_of_shape(
    kind: str, layers: int, kv_heads: int, head_dim: int, **more: Any
) -> LanguageModel:
    """A random model whose cache has the true shape and whose hidden width is tiny.

    ``more`` goes into its config.
    """
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = {
        "model_type": kind, "hidden_size": 32, "num_hidden_layers": layers,
        "intermediate_size": 32, "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "vocab_size": 1024,
        "max_position_embeddings": 40960, "head_dim": head_dim,
        "tie_word_embeddings": True, "rope_theta": 1e6, "num_experts": 2,
        "num_experts_per_tok": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 32, "norm_topk_prob": True, **more,
    }  # fmt: skip
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    tokenizer = load_tokenizer(zoo("tiny-qwen3-s"))  # for its fingerprint; no text is involved
    return LanguageModel(model, tokenizer, config, f"random {kind}")


def random_translator(
    source: LanguageModel, target: LanguageModel, nu: int, **more: bool
) -> Translator:
    """Random maps, by relative depth; ``more`` goes into the config."""
    form = {"float32": ("float32", None)}
    return random_translators(source, target, nu, form, **more)["float32"]


def random_states(source: LanguageModel, tokens: int) -> KVStates:
    """What a source might have written, evaluated."""
    width = source.geometry.layers[0].width("keys")
    keys, values = (
        tuple(mx.random.normal((1, tokens, width)) for _ in source.attentions) for _ in range(2)
    )
    mx.eval(keys, values)
    return KVStates(keys, values, "pre_norm", 0)


def wall_and_processor(action: Callable[[], object]) -> tuple[float, float]:
    """The wall seconds of ``action``, and the CPU seconds of all threads of this process.

    If other processes use the machine too, ratios of CPU seconds are disturbed less.
    """
    before = time.process_time()
    wall = measure.seconds(action)
    return wall, time.process_time() - before


def alternated(actions: dict[str, Callable[[], object]], trials: int) -> dict[str, Any]:
    """Seconds of actions in turns, and the first one's over the sum of the others', by round."""
    for action in actions.values():
        action()
    rounds = [
        {name: wall_and_processor(action) for name, action in actions.items()}
        for _ in range(trials)
    ]
    first, *others = actions
    ratios, processor = (
        [found[first][clock] / sum(found[name][clock] for name in others) for found in rounds]
        for clock in (0, 1)
    )
    return {
        "samples_s": {name: [found[name][0] for found in rounds] for name in actions},
        "ratios": ratios, "processor_ratios": processor,
        "ratio": measure.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
    }  # fmt: skip


def run(tokens: int, layers: int, trials: int, shape: Shape = SHAPES["moe"]) -> dict[str, Any]:
    depth = layers * shape.source[0] // shape.target[0]
    source = model_of_shape("qwen3", depth, shape.source[1], HEAD_DIM)
    target = model_of_shape("qwen3", layers, shape.target[1], HEAD_DIM)
    translator, states = random_translator(source, target, shape.nu), random_states(source, tokens)
    stacked, maps = shape.bare_products(layers, tokens)
    mx.eval(stacked, maps)
    cache_dtype = target.cache_dtype  # learnt once per model, not per translation
    assert cache_dtype == mx.float32

    def bare() -> None:
        for _ in range(2):
            mx.eval(stacked @ maps.swapaxes(-1, -2))

    def translate() -> None:
        cache = caches.empty(target)
        caches.reserve(cache, target, tokens)
        caches.append(cache, translator(states, target.geometry.first_kept(tokens)), target)
        mx.eval(caches.arrays(cache))

    found = alternated({"translation": translate, "bare": bare}, trials)
    flops = 2 * 2 * tokens * maps.size
    return {
        "tokens": tokens, "layers": layers, **found,
        "bare_gflops": flops / measure.median(found["samples_s"]["bare"]) / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="moe")
    parser.add_argument("--layers", type=int, help="of the target; default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    layers = args.layers or shape.target[0]
    results = [run(tokens, layers, args.trials, shape) for tokens in args.tokens]
    for r in results:
        bare, translation = (
            1e3 * measure.median(r["samples_s"][k]) for k in ("bare", "translation")
        )
        print(
            f"{r['tokens']:5d} tokens: bare {bare:7.1f} ms ({r['bare_gflops']:.0f} GFLOP/s), "
            f"translation {translation:7.1f} ms, ratio {r['ratio']:.2f} "
            f"({r['ratio_min']:.2f} to {r['ratio_max']:.2f}), "
            f"of processor time {measure.median(r['processor_ratios']):.2f}"
        )
    print(measure.machine_line())
    if args.json:
        config = {"shape": args.shape, "layers": layers, "trials": args.trials}
        measure.append_json(args.json, measure.record("translation_cost", config, results))


if __name__ == "__main__":
    main()
