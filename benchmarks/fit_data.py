"""How much data a closed form wants, and what its quality is called: the reasons of two thresholds.

    python benchmarks/fit_data.py [--seeds 3] [--shares 1 2 4 ...] [--ridges 0 chosen]

Fits of growing prefix tokens between embedded models, by tokens per unknown (the input width of
one map), with ridges that are given or chosen. Each is measured twice: recall and KL on held-out
dialogues, and the share of the hidden prefix's KL that it removes on the bundled conversations,
which is what receipts and grades are of.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import kvlingo_mlx.backend

import numpy as np

import kvlingo_mlx as kv
from kvlingo_mlx.embedded.dialogues import for_fitting, held_out
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import recall_sample, score
from kvlingo_mlx.evaluation.verification import agreement
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample, to_samples

SHARES = (1, 1.5, 2, 4, 8, 16, 32, 64, 128, 256)
PAIRS = (("tiny-qwen3-s", "tiny-qwen3-l", 1), ("tiny-qwen3-l", "tiny-qwen3-s", 1),
         ("tiny-qwen3-s", "tiny-qwen3-moe", 1), ("tiny-qwen3-s", "tiny-qwen3-l", 4))  # fmt: skip


def some(samples: Sequence[Sample], tokens: int) -> Iterator[Sample]:
    """The first ``tokens`` prefix tokens of the samples, the last prefix cut short."""
    for sample in samples:
        prefix = sample.prefix[:tokens]
        if prefix:
            yield Sample(prefix, ())
        tokens -= len(prefix)


def fits(
    source: LanguageModel, target: LanguageModel, nu: int, seed: int, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each amount of data and each ridge."""
    records = [{"messages": talk.conversation()} for talk in for_fitting(600, seed=seed)]
    samples = list(to_samples(records, target.tokenizer, 2048))
    asked = [recall_sample(target, talk) for talk in held_out(given.dialogues)]
    unknowns = nu * source.geometry.layers[0].width("keys")
    for share, named in itertools.product(given.shares, given.ridges):
        tokens = max(2, round(share * unknowns))
        ridge = None if named == "chosen" else float(named)
        translator = kv.fit(source, target, list(some(samples, tokens)), nu=nu, ridge=ridge)
        makers = {"fitted": conditions.translated(source, target, translator),
                  "hidden": conditions.hidden(target)}  # fmt: skip
        found = score(target, asked, makers)
        bundled = agreement(source, target, translator)
        assert bundled is not None
        means = {name: float(np.mean(found[name].kl)) for name in makers}
        yield {
            "seed": seed, "tokens": tokens, "unknowns": unknowns, "share": share,
            "ridge": named, "median_ridge": translator.config.provenance["ridge"],
            "rank": translator.config.provenance["lowest_rank"],
            "recall": found["fitted"].recall, "kl": means["fitted"],
            "removed": 1 - means["fitted"] / means["hidden"],
            "bundled": bundled.receipt.recovered,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dialogues", type=int, default=24)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--ridges", nargs="+", default=["0", "chosen"])
    parser.add_argument("--json", default="benchmarks/results/fit_data.jsonl")
    given = parser.parse_args()
    for source, target, nu in PAIRS:
        models = kv.load(source), kv.load(target)
        rows = []
        for seed in range(given.seeds):
            for row in fits(*models, nu, seed, given):
                rows.append(row)
                print(source, target, nu, row, flush=True)
        config = {"source": source, "target": target, "nu": nu, "dialogues": given.dialogues}
        measure.append_json(given.json, measure.record("fit_data", config, rows))


if __name__ == "__main__":
    main()
