"""Why recall falls beyond the trained length: sizes of translated entries, and what scaling does.

    python benchmarks/lengths.py --json FILE [--translator FOLDER ...]
    python benchmarks/lengths.py --trained FOLDER ... --json FILE
    python benchmarks/lengths.py --temperatures --json FILE

Dialogues with few and with many facts, so of two lengths. For each translator: recall and KL at
each length; the energy of what it writes, as a share of the native cache's, and its error, by
layer and position; and both scores with all translated keys (a temperature) and values scaled by a
factor.

``--trained``: translators of one pair that were trained on prefixes of several lengths
(``tools/fit_zoo.py --facts``), at 512, 1,024 and 2,048 tokens: recall of six questions, KL and
needles, with none, one and two native layers, beside native and both controls.

``--temperatures``: a factor for the keys of each head and layer, fitted in closed form at each
length on dialogues of its own: the one that brings the target's scores from its translated cache
nearest (least squares) to those from its own, both without their mean over positions, which
attention does not see. ``own tail``: the last 64 tokens are read by the target itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from quality import model_folder, standard_error

from kvlingo_mlx import caches
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine.fill import bring
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.evaluation import conditions, continuation, probes
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.reporting import measure

FACTS = (16, 34, 68)
KEYS, VALUES = (0.9, 1.0, 1.15, 1.3), (0.7, 1.0, 1.3)
LENGTHS, TOKENS_PER_FACT, MOST_FACTS = (512, 1024, 2048), 15, 118
PARTS = 4  # of a prefix, in which sizes are told apart


def scaled(make: Any, keys: float, values: float) -> Any:
    """A condition whose translated keys and values are multiplied."""

    def made(prefix: Any) -> list:
        found = make(prefix)
        for cache in found:
            cache.keys, cache.values = cache.keys * keys, cache.values * values
        return found

    return made


def sizes(found: list, native: list) -> list[dict[str, Any]]:
    """Energy and squared error by layer and side, in parts of the prefix, of native energy."""
    rows = []
    for layer, both in enumerate(zip(found, native, strict=True)):
        for place, side in enumerate(caches.SIDES):
            ours, own = (np.array(caches.contents(c)[place].astype(mx.float32))[0] for c in both)
            bounds = np.linspace(0, ours.shape[1], PARTS + 1).astype(int)
            energy, error = [], []
            for start, stop in itertools.pairwise(bounds):
                base = float(np.square(own[:, start:stop]).sum())
                energy.append(float(np.square(ours[:, start:stop]).sum()) / base)
                error.append(float(np.square((ours - own)[:, start:stop]).sum()) / base)
            rows.append({"layer": layer, "side": side, "energy": energy, "error": error})
    return rows


def looked_at(pair: str, folders: Sequence[Path], args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    results: dict[str, Any] = {}
    for folder in folders:
        make = conditions.translated(source, target, load_translator(folder))
        own: dict[str, Any] = {"scores": [], "scaled": []}
        for facts in FACTS:
            drawn = dialogues.held_out(args.dialogues, seed=11, facts=(facts, facts))
            samples = [continuation.recall_sample(target, talk, source) for talk in drawn]
            ways = {"1/1": make}
            if facts in (FACTS[0], FACTS[-1]):
                ways |= {f"{k}/{v}": scaled(make, k, v) for k in KEYS for v in VALUES}
            scores = continuation.score(target, samples, ways)
            tokens = float(np.mean([len(sample.prefix) for sample in samples]))
            for name, score in scores.items():
                row = {"facts": facts, "tokens": tokens, "scale": name,
                       "recall": score.recall, "kl": float(np.mean(score.kl))}  # fmt: skip
                own["scores" if name in ("1/1", "native") else "scaled"].append(row)
        prefix = samples[0].prefix
        own["sizes"] = sizes(make(prefix), conditions.native(target)(prefix))
        results[folder.name] = own
        print(f"\n{pair}, {folder}")
        for row in own["scores"]:
            print(f"  {row['scale']:7s} {row['tokens']:5.0f} tokens: recall {row['recall']:.3f}, "
                  f"KL {row['kl']:.4f}")  # fmt: skip
        for row in own["sizes"]:
            print(f"  layer {row['layer']} {row['side']:6s} energy "
                  + " ".join(f"{e:.2f}" for e in row["energy"])
                  + "   error " + " ".join(f"{e:.2f}" for e in row["error"]))  # fmt: skip
        most = [row for row in own["scaled"] if row["facts"] == FACTS[-1]]
        best = max(most, key=lambda row: row["recall"])
        print(f"  best of {len(most)} scales at the longest: keys/values {best['scale']}, recall "
              f"{best['recall']:.3f}, KL {best['kl']:.4f}", flush=True)  # fmt: skip
    return results


@contextlib.contextmanager
def noted_scores(target: Any) -> Iterator[list[mx.array]]:
    """The scores (KV heads, queries a head x T, positions) of each layer, run by run."""
    module = importlib.import_module(type(target.attentions[0]).__module__)
    attend, found = module.scaled_dot_product_attention, []

    def noted(queries: mx.array, keys: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        heads, width = keys.shape[1], keys.shape[-1]
        by_head = queries.reshape(heads, -1, width)  # query heads of one KV head lie together
        scores = by_head @ keys[0].swapaxes(-1, -2)
        found.append(scores - scores.mean(axis=-1, keepdims=True))
        return attend(queries, keys, *args, **kwargs)

    module.scaled_dot_product_attention = noted
    try:
        yield found
    finally:
        module.scaled_dot_product_attention = attend


def temperatures(target: Any, make: Any, samples: Sequence[Any]) -> list[np.ndarray]:
    """For each layer, a factor for each KV head's translated keys."""
    own, sums = conditions.native(target), None
    for sample in samples:
        both = []
        for maker in (own, make):
            cache = maker(sample.prefix)
            tokens = [sample.prefix[-1], *sample.continuation[:-1]]
            with noted_scores(target) as found:
                mx.eval(target.model(mx.array([tokens]), cache=cache))
            length = len(sample.prefix) - 1
            both.append([np.array(each[..., :length].astype(mx.float32)) for each in found])
        rows = [
            np.stack([(a * b).sum((1, 2)), (b * b).sum((1, 2))]) for a, b in zip(*both, strict=True)
        ]
        sums = rows if sums is None else [a + b for a, b in zip(sums, rows, strict=True)]
    assert sums is not None
    return [along / squares for along, squares in sums]


def warmed(make: Any, factors: Sequence[np.ndarray]) -> Any:
    """A condition whose translated keys are multiplied, head by head."""

    def made(prefix: Any) -> list:
        found = make(prefix)
        for cache, factor in zip(found, factors, strict=True):
            cache.keys = cache.keys * mx.array(factor.astype(np.float32))[None, :, None, None]
        return found

    return made


def heated(pair: str, folders: Sequence[Path], args: argparse.Namespace) -> dict[str, Any]:
    """Recall and KL at each length without and with temperatures, and with a tail of its own."""
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    results: dict[str, Any] = {}
    for folder in folders:
        found = load_translator(folder)
        make, rows = conditions.translated(source, target, found), []

        def tailed(prefix: Any, found: Any = found) -> list:
            part = Native(0, tail=64)
            return bring(conditions.plan_of(source, target, found, prefix, part)).cache

        for facts in FACTS:
            drawn = [
                [
                    continuation.recall_sample(target, talk, source)
                    for talk in dialogues.held_out(args.dialogues, seed=seed, facts=(facts, facts))
                ]
                for seed in (5, 11)
            ]
            factors = temperatures(target, make, drawn[0])
            ways = {"translated": make, "by head": warmed(make, factors), "own tail": tailed}
            ways["native"] = conditions.native(target)
            for name, score in continuation.score(target, drawn[1], ways).items():
                tokens = float(np.mean([len(sample.prefix) for sample in drawn[1]]))
                row = {"facts": facts, "tokens": tokens, "way": name, "recall": score.recall,
                       "recall_se": standard_error(score.hits),
                       "kl": float(np.mean(score.kl))}  # fmt: skip
                rows.append(row)
                print(f"{pair}, {tokens:.0f} tokens, {name:10s}: recall {row['recall']:.3f} +- "
                      f"{row['recall_se']:.3f}, KL {row['kl']:.4f}", flush=True)  # fmt: skip
            spread = np.concatenate(factors)
            rows[-3]["factors"] = [float(f) for f in np.quantile(spread, (0, 0.25, 0.5, 0.75, 1))]
            print(f"  factors {spread.min():.2f} to {spread.max():.2f}", flush=True)
        results[folder.name] = {"temperatures": rows}
    return results


def trained(pair: str, folders: Sequence[Path], args: argparse.Namespace) -> dict[str, Any]:
    """Recall, KL and needles of translators at each length and number of native layers."""
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    makers: dict[str, Any] = {}
    for folder in folders:
        found = load_translator(folder)
        for layers in (0, 1, 2):
            name = f"{folder.parent.name}, {layers} native"
            makers[name] = conditions.translated(source, target, found, layers)
    wrong = conditions.shuffled(found)
    makers["shuffled"] = conditions.translated(source, target, wrong)
    makers["hidden"] = conditions.hidden(target)
    results = {}
    for length in LENGTHS:
        facts = min(MOST_FACTS, length // TOKENS_PER_FACT)
        drawn = dialogues.held_out(args.dialogues, seed=11, facts=(facts, facts))
        samples = [continuation.recall_sample(target, talk, source) for talk in drawn]
        scores = continuation.score(target, samples, makers)
        task = probes.find_needles(
            target, ["multi-key"], [length], args.dialogues, style="facts", max_tokens=24,
            source=source,
        )  # fmt: skip
        tokens = float(np.mean([len(sample.prefix) for sample in samples]))
        print(f"\n{pair}, {tokens:.0f} tokens, needles in {length}")
        rows: dict[str, Any] = {}
        for name, score in scores.items():
            hits = [task.scorer(target, item)(makers.get(name))["recall"] for item in task.items]
            rows[name] = {
                "recall": score.recall, "recall_se": standard_error(score.hits),
                "kl": float(np.mean(score.kl)), "needles": float(np.mean(hits)),
                "needles_se": standard_error(hits), "tokens": tokens,
            }  # fmt: skip
            row = rows[name]
            print(f"  {name:24s} recall {row['recall']:.3f} +- {row['recall_se']:.3f}  KL "
                  f"{row['kl']:.4f}  needles {row['needles']:.3f} +- {row['needles_se']:.3f}",
                  flush=True)  # fmt: skip
        results[str(length)] = rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=["tiny-qwen3-s:tiny-qwen3-l"])
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--translator", type=Path, nargs="+", help="instead of the shipped one")
    parser.add_argument("--trained", type=Path, nargs="+", help="WAY/PAIR folders to compare")
    parser.add_argument("--temperatures", action="store_true", help="fit and try one a head")
    parser.add_argument("--dialogues", type=int, default=16)
    parser.add_argument("--json", help="append a record a pair to this file")
    args = parser.parse_args()
    for pair in args.pairs:
        places = (
            root / pair.replace(":", "--") for root in (TRANSLATORS, args.zoo / "translators")
        )
        if args.trained:
            results = {"lengths": trained(pair, args.trained, args)}
            config = {"pair": pair, "dialogues": args.dialogues}
            if args.json:
                measure.append_json(args.json, measure.record("lengths", config, results))
            continue
        folders = args.translator or [next(place for place in places if place.exists())]
        results = (heated if args.temperatures else looked_at)(pair, folders, args)
        if args.json:
            config = {"pair": pair, "dialogues": args.dialogues}
            measure.append_json(args.json, measure.record("lengths", config, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
