"""How two tokenizers' tokens correspond, and what finding that costs.

    python benchmarks/alignment.py [--tokens 32768] [--trials 5] [--json FILE]

A byte-level BPE and a SentencePiece-style BPE (leading-space marks, byte fallback) are trained on
the tests' text in sixteen scripts and languages, 3000 characters. Shares are over that text, each
direction; seconds are of a text of ``--tokens`` tokens made of its sentences in random order:
tokenising it, and aligning the two. Real vocabularies are a hundred times as large.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.alignment import Cuts, TokenAlignment, align, token_ends

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed
from tests.support.languages import CORPUS, TEXTS, byte_level, sentencepiece

Offsets = list[tuple[int, int]]


def aligned(source: Offsets, target: Offsets, text: str) -> TokenAlignment:
    return align(*(Cuts.of(token_ends(offsets, text)) for offsets in (source, target)))


def shares(source: Any, target: Any, texts: list[str]) -> dict[str, Any]:
    """What the groups of all texts are like, and what the rule makes of their tokens."""
    encoded = [[t.encode(s, add_special_tokens=False).offsets for t in (source, target)]
               for s in texts]  # fmt: skip
    found = [aligned(*both, text) for both, text in zip(encoded, texts, strict=True)]
    sizes = np.concatenate([f.groups[:, 1::2] - f.groups[:, ::2] for f in found])
    own = np.concatenate([f.assigned - np.arange(*f.source) for f in found])
    entries = np.concatenate([f.entries for f in found])
    return {
        "groups": len(sizes),
        "source_tokens": len(own),
        "target_tokens": len(entries),
        "one_to_one": float((sizes == 1).all(axis=1).mean()),
        "one_to_many": float(((sizes[:, 0] == 1) & (sizes[:, 1] > 1)).mean()),
        "many_to_one": float(((sizes[:, 0] > 1) & (sizes[:, 1] == 1)).mean()),
        "many_to_many": float((sizes > 1).all(axis=1).mean()),
        "largest_group": sizes.max(axis=0).tolist(),
        "not_where_canonical": float((own != 0).mean()),
        "halves": float(np.concatenate([at_a_half(f) for f in found]).mean()),
        "targets_without_entry": float((entries == 0).mean()),
        "targets_with_several": float((entries > 1).mean()),
    }


def at_a_half(found: TokenAlignment) -> np.ndarray:
    """(S,) source tokens that the rule puts exactly between two target tokens."""
    start, stop, first, last = found.groups[found.group_of].T
    twice = 2 * (np.arange(*found.source) - start) * (last - first - 1)
    wide = np.maximum(stop - start - 1, 1)
    return (twice % wide == 0) & (twice // wide % 2 == 1)


def seconds(action: Callable[[], Any], trials: int) -> list[float]:
    """Wall seconds of each run; no device is involved."""
    found = []
    for _ in range(trials):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return found


def long_text(tokenizers: list[Any], tokens: int) -> str:
    """Sentences in random order until every tokenizer has ``tokens`` of them."""
    rng, parts = random.Random(0), []
    while True:
        parts += rng.sample(CORPUS, len(CORPUS))
        text = " ".join(parts)
        if all(len(t.encode(text, add_special_tokens=False)) >= tokens for t in tokenizers):
            return text


def run(tokens: int, trials: int) -> dict[str, Any]:
    pair = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}
    text = long_text(list(pair.values()), tokens)
    encodings = {n: t.encode(text, add_special_tokens=False) for n, t in pair.items()}
    offsets = {name: encoding.offsets for name, encoding in encodings.items()}
    samples = {
        f"tokenise, {name}": seconds(lambda t=t: t.encode(text, add_special_tokens=False), trials)
        for name, t in pair.items()
    }
    samples["offsets from the tokenizers"] = seconds(
        lambda: [encoding.offsets for encoding in encodings.values()], trials
    )
    samples["align"] = seconds(lambda: aligned(*offsets.values(), text).assigned, trials)
    names = list(pair)
    return {
        "vocabularies": {name: t.get_vocab_size() for name, t in pair.items()},
        "characters": len(text),
        "tokens": {name: len(found) for name, found in offsets.items()},
        "samples_s": samples,
        "shares": {
            f"{a} to {b}": {
                language: shares(pair[a], pair[b], texts)
                for language, texts in {"all": list(TEXTS.values()), "en": [TEXTS["en"]]}.items()
            }
            for a, b in (names, names[::-1])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    found = run(args.tokens, args.trials)
    for direction, by_text in found["shares"].items():
        for text, share in by_text.items():
            print(
                f"{direction}, {text}: {share['one_to_one']:.1%} of {share['groups']} groups are "
                f"one to one, {share['one_to_many']:.1%} one to many, {share['many_to_one']:.1%} "
                f"many to one, {share['many_to_many']:.1%} many to many; "
                f"{share['targets_without_entry']:.1%} of target positions have no entry, "
                f"{share['targets_with_several']:.1%} several; {share['halves']:.1%} of source "
                "tokens lie at a half"
            )
    for what, samples in found["samples_s"].items():
        print(f"{what}: {1000 * measure.median(samples):.1f} ms of {found['tokens']} tokens")
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("alignment", config, found))


if __name__ == "__main__":
    main()
