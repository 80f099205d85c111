"""What the checks that are always on cost, beside the hand-over that they guard.

    python benchmarks/checks_cost.py --json benchmarks/results/checks_cost.jsonl

Checked: the token ids for both models, the finished cache (layers, offsets, shapes, dtype), and the
first prediction. Two pairs: the embedded tiny one, the least favourable there is, and random models
whose caches are as wide as Qwen3-4B's and Qwen3-30B-A3B's; their hidden width is tiny, so their
prefill costs nothing and the share is larger than it would be of true models. Trials of hand-over
and checks alternate. A share is of medians, and of the least times: on a busy machine a check of
0.3 ms that is put off counts as 15.
"""

from __future__ import annotations

import argparse
import functools
import random
from types import SimpleNamespace
from typing import Any, cast

from kvlingo_mlx.backend import mx

from translation_cost import model_of_shape, random_translator

import kvlingo_mlx as kv
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine.fill import bring
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.engine.responses import check_numbers
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.translators.base import Translator

VOCABULARY = 151_936  # of Qwen3: what the first prediction is as wide as


def check(source: LanguageModel, target: LanguageModel, tokens: list[int], cache: list) -> None:
    """Everything that a hand-over checks, once more."""
    source.check_tokens(tokens)
    target.check_tokens(tokens)
    validate_cache(cache, target, len(tokens) - 1)


def run(
    source: LanguageModel, target: LanguageModel, translator: Translator, length: int, trials: int
) -> dict[str, Any]:
    rng = random.Random(0)
    tokens = [rng.randrange(5, 1000) for _ in range(length)]

    def hand_over() -> list:  # the random models have no tokenizer to be compared
        return bring(Plan(source, target, tokens, translator)).cache

    cache = hand_over()
    response = cast(Any, SimpleNamespace(logprobs=mx.random.normal((VOCABULARY,))))
    mx.eval(response.logprobs)
    actions = {
        "hand_over": hand_over,
        "tokens_and_cache": functools.partial(check, source, target, tokens, cache),
        "first_prediction": functools.partial(check_numbers, response, source, target, cache),
    }
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(trials):
        for name, action in actions.items():
            samples[name].append(measure.seconds(action))
    found: dict[str, Any] = {"tokens": length, "layers": len(target.attentions)}
    for kind, of in (("median", measure.median), ("least", min)):
        times = {name: of(values) for name, values in samples.items()}
        checks = times["tokens_and_cache"] + times["first_prediction"]
        found[kind] = {"checks_s": checks, "share": checks / times["hand_over"], **times}
    return {**found, "samples_s": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=4, help="of the wide target, of 48")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    tiny = kv.load("tiny-qwen3-s"), kv.load("tiny-qwen3-l")
    source = model_of_shape("qwen3", args.layers * 36 // 48, 8, 128)
    target = model_of_shape("qwen3_moe", args.layers, 4, 128)
    pairs = {
        "embedded": (*tiny, resolve_translator(None, *tiny)),
        "wide": (source, target, random_translator(source, target, 3)),
    }
    results = {
        name: [run(*pair, length, args.trials) for length in args.tokens]
        for name, pair in pairs.items()
    }
    for name, rows in results.items():
        for row in rows:
            for kind in ("median", "least"):
                found = row[kind]
                print(
                    f"{name:8} {row['tokens']:4d} tokens, {row['layers']} layers, {kind}: all "
                    f"{1e3 * found['hand_over']:8.1f} ms, checks {1e3 * found['checks_s']:.3f} ms, "
                    f"{100 * found['share']:.3f} %"
                )
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("checks_cost", config, results))


if __name__ == "__main__":
    main()
