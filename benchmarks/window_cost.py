"""What translating a window alone costs beside translating every token.

    python benchmarks/window_cost.py [--layers 12] [--tokens 8192] [--json FILE]

Shapes of Gemma-3-4B to Gemma-3-12B: 4 to 8 KV heads of 256, windows of 1024 tokens, one global
layer after five local ones; random weights. Each target layer reads nu source layers of its own
kind. A translation is a hand-over's but for the source's prefill: products, k_norm, RoPE and cache
write, chunk by chunk. Beside it the same translator on the same states fills the cache of a model
whose windows hold the whole prompt. Both alternate in one run; medians and ratios.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from kvlingo_mlx.backend import mx

from translation_cost import alternated, model_of_shape, random_translator

from kvlingo_mlx import caches
from kvlingo_mlx.format.maps import flops_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.reporting import measure

WINDOW, PERIOD, HEAD_DIM = 1024, 6, 256
SOURCE, TARGET = (34, 4), (48, 8)  # layers and KV heads


def gemma_3(layers: int, kv_heads: int, window: int) -> LanguageModel:
    """A random model with Gemma-3's cache and pattern of layers, and a tiny hidden width."""
    return model_of_shape(
        "gemma3_text", layers, kv_heads, HEAD_DIM, sliding_window=window,
        sliding_window_pattern=PERIOD, query_pre_attn_scalar=HEAD_DIM, rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip


def run(tokens: int, layers: int, nu: int, step: int, trials: int) -> dict[str, Any]:
    depth, heads = SOURCE
    source = gemma_3(max(PERIOD, layers * depth // TARGET[0]), heads, WINDOW)
    target, unbounded = (gemma_3(layers, TARGET[1], window) for window in (WINDOW, tokens))
    translator = random_translator(source, target, nu)
    spans = []
    for start in range(0, tokens, step):
        shape = (1, min(step, tokens - start), heads * HEAD_DIM)
        keys, values = (tuple(mx.random.normal(shape) for _ in source.attentions) for _ in range(2))
        spans.append(KVStates(keys, values, "pre_norm", start))
        mx.eval(spans[-1].arrays)
    assert target.cache_dtype == unbounded.cache_dtype == mx.float32

    def translate(model: LanguageModel) -> None:
        cache = caches.empty(model)
        caches.reserve(cache, model, tokens)
        for states in spans:
            caches.append(cache, translator(states, model.geometry.first_kept(tokens)), model)
            mx.eval(caches.arrays(cache))

    models = {"window": target, "every token": unbounded}
    actions = {name: functools.partial(translate, model) for name, model in models.items()}
    found = alternated(actions, trials)
    every_s = measure.median(found["samples_s"]["every token"])
    kept = [tokens - first for first in target.geometry.first_kept(tokens)]
    flops = flops_of((name, part.size) for name, part in translator.tensors())
    return {
        **found,
        "gflops": flops * tokens / every_s / 1e9,
        "tokens_kept": sum(kept) / (tokens * layers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of the target, of 48")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--step", type=int, default=2048, help="tokens a chunk")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    found = run(args.tokens, args.layers, args.nu, args.step, args.trials)
    window, every = (measure.median(found["samples_s"][k]) for k in ("window", "every token"))
    print(
        f"{args.tokens} tokens, {args.layers} layers: window alone {window:.2f} s, every token "
        f"{every:.2f} s ({found['gflops']:.0f} GFLOP/s), ratio {found['ratio']:.3f} "
        f"({found['ratio_min']:.3f} to {found['ratio_max']:.3f}); "
        f"{found['tokens_kept']:.3f} of the tokens are kept"
    )
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("window_cost", config, found))


if __name__ == "__main__":
    main()
