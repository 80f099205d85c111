"""What translation costs beside the bare matmuls of the same shapes.

    python benchmarks/translation_cost.py [--layers 48] [--tokens 64 1024] [--json FILE]

Shapes of Qwen3-4B to Qwen3-30B-A3B: each of 48 target layers reads nu = 3 source layers
through 512 x 3072 per side; random weights. The translation counts everything between
the source's recorded states and a cache that the target can decode from: products,
k_norm, RoPE, cache write. The bare matmuls are two batched products, one a side, of
inputs that lie stacked in memory already. Both alternate in one run; medians and ratios.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches, measure
from kvlingo_mlx.generation import translate_span
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import KVStates
from kvlingo_mlx.timing.geometries import random_translators
from kvlingo_mlx.translators.base import Translator


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
    return LanguageModel(model, None, config, f"random {kind}")  # no text is involved


def random_translator(source: LanguageModel, target: LanguageModel, nu: int) -> Translator:
    """Random head-mixing maps, by relative depth."""
    return random_translators(source, target, nu, {"float32": ("float32", None)})["float32"]


def run(tokens: int, layers: int, trials: int) -> dict:
    source = model_of_shape("qwen3", layers * 36 // 48, 8, 128)
    target = model_of_shape("qwen3_moe", layers, 4, 128)
    translator = random_translator(source, target, 3)
    states = KVStates(
        *(tuple(mx.random.normal((1, tokens, 1024)) for _ in source.attentions) for _ in range(2)),
        "pre_norm",
        0,
    )
    stacked = mx.random.normal((layers, tokens, 3072))
    maps = mx.random.normal((layers, 512, 3072)) * 0.02
    mx.eval(states.arrays, stacked, maps)
    cache_dtype = target.cache_dtype  # learnt once per model, not per translation
    assert cache_dtype == mx.float32

    def bare() -> None:
        for _ in range(2):
            mx.eval(stacked @ maps.swapaxes(-1, -2))

    def translate() -> None:
        cache = caches.allocate(target, tokens)
        translate_span(cache, states, source, target, translator, tokens)
        mx.eval(caches.arrays(cache))

    bare(), translate()
    samples: dict[str, list[float]] = {"bare": [], "translation": []}
    for _ in range(trials):
        samples["bare"].append(measure.seconds(bare))
        samples["translation"].append(measure.seconds(translate))
    ratios = [t / b for t, b in zip(samples["translation"], samples["bare"], strict=True)]
    flops = 2 * 2 * layers * tokens * 512 * 3072
    return {
        "tokens": tokens,
        "layers": layers,
        "samples_s": samples,
        "bare_gflops": flops / measure.median(samples["bare"]) / 1e9,
        "ratio": measure.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    results = [run(tokens, args.layers, args.trials) for tokens in args.tokens]
    for r in results:
        bare, translation = (
            1e3 * measure.median(r["samples_s"][k]) for k in ("bare", "translation")
        )
        print(
            f"{r['tokens']:5d} tokens: bare {bare:7.1f} ms ({r['bare_gflops']:.0f} GFLOP/s), "
            f"translation {translation:7.1f} ms, ratio {r['ratio']:.2f} "
            f"({r['ratio_min']:.2f} to {r['ratio_max']:.2f})"
        )
    print(measure.machine_line())
    if args.json:
        config = {"layers": args.layers, "trials": args.trials}
        measure.append_json(args.json, measure.record("translation_cost", config, results))


if __name__ == "__main__":
    main()
