"""What other programs do in their closed forms, one by one: does it improve ours?

    python benchmarks/closed_form_options.py [--pairs A:B ...] [--nu 2] [--steps 100] --json FILE

For every pair of the zoo, from the same states: biases (inputs and outputs centred); a fixed small
ridge (0.01, not a share, as VeloxQuant-MLX has it) and none, beside the chosen one; source layers
by relative depth, by R2 on the data that are fitted and on others; keys before the norm and after
it; every fourth token of four times as many conversations. Then VeloxQuant-MLX's own combination.
Recall and KL on dialogues that nothing has seen, and, for those that could matter, KL after some
steps of distillation.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx, always)

import numpy as np
import quality as tables
from starts import PAIRS, Talks

from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.continuation import DialogueStream
from kvlingo_mlx.fitting.rows import Rows
from kvlingo_mlx.format.assignment import Assignment, by_depth
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.closed_form import Moments, solve
from kvlingo_mlx.stage1.selection import candidates
from kvlingo_mlx.training.distill import Distillation, start_runs
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import pair_of
from kvlingo_mlx.translators import build

FACTS = {"gemma": (4, 16), "mistral": (4, 16)}
SIDES = ("keys", "values")
RATES = (3e-3,)
HELD = 4  # one conversation of so many chooses layers, where others than those that are fitted do


@dataclass(frozen=True)
class Options:
    """A closed form; the defaults are this package's."""

    bias: bool = False
    ridge: float | str | None = None  # None: chosen; a text: that number, and no share of anything
    layers: str = "depth"
    capture: str = "pre_norm"
    every: int = 1


WAYS = {
    "ours": Options(),
    "biases": Options(bias=True),
    "no ridge": Options(ridge=0.0),
    "ridge 0.01, fixed": Options(ridge="0.01"),
    "layers by R2": Options(layers="r2"),
    "layers by held-out R2": Options(layers="held out"),
    "keys after the norm": Options(capture="post_norm"),
    "every fourth token": Options(every=4),
    "biases, keys after the norm": Options(bias=True, capture="post_norm"),
    "VeloxQuant's": Options(bias=True, ridge="0.01", layers="r2", capture="post_norm"),
}
DISTILLED = ("ours", "biases", "keys after the norm")
Ends = tuple[LanguageModel, LanguageModel]
States = dict[str, list[list[np.ndarray]]]  # side: by conversation, by layer


def states_of(
    source: LanguageModel, target: LanguageModel, samples: Sequence[Any], capture: str, every: int
) -> tuple[States, States]:
    """Both models' states of some conversations, (tokens, width) each."""
    rows, found = Rows(source, target), ({s: [] for s in SIDES}, {s: [] for s in SIDES})
    for sample in samples:
        for spans in [list(rows.spans(sample, capture))]:
            for end, kept in enumerate(found):
                for side in SIDES:
                    layers = len(spans[0][end].side(side))
                    kept[side].append([
                        np.concatenate([rows.rows(span[end], side, n) for span in spans])[::every]
                        for n in range(layers)
                    ])  # fmt: skip
    return found


def stacked(states: list[list[np.ndarray]], layers: Sequence[int]) -> np.ndarray:
    """(tokens, width) of some layers side by side, all conversations."""
    return np.concatenate([np.concatenate([talk[n] for n in layers], axis=1) for talk in states])


def solved(x: np.ndarray, y: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """(output, input) and (output,)."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    middle = (x.mean(axis=0), y.mean(axis=0)) if options.bias else (np.zeros(1), np.zeros(1))
    moments = Moments(x.shape[1], y.shape[1])
    moments.add(x - middle[0], y - middle[1])
    ridge = options.ridge
    if isinstance(ridge, str):  # as a share of the mean square, which `solve` takes
        ridge = float(ridge) / (np.trace(moments.xx) / len(moments.xx))
    weight = solve(moments, ridge=ridge).weight
    return weight, np.zeros(y.shape[1]) + middle[1] - weight @ (np.zeros(x.shape[1]) + middle[0])


def r2(weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    error = ((x @ weight.T + bias - y) ** 2).sum()
    return float(1 - error / ((y - y.mean(axis=0)) ** 2).sum())


def assignment(
    ends: tuple[LanguageModel, LanguageModel],
    read: tuple[States, States],
    nu: int,
    options: Options,
) -> Assignment:
    """The source layers that each target layer reads."""
    geometry = tuple(model.geometry.layers for model in ends)
    if options.layers == "depth":
        return by_depth(*geometry, nu)
    chosen = []
    for target, sources in candidates(*geometry).items():
        worth = dict.fromkeys(sources, 0.0)
        for side, source in itertools.product(SIDES, sources):
            talks = tuple(states[side] for states in read)
            fits, judges = talks, talks
            if options.layers == "held out":
                fits = tuple([t for i, t in enumerate(s) if i % HELD] for s in talks)
                judges = tuple(s[::HELD] for s in talks)
            x, y = stacked(fits[0], [source]), stacked(fits[1], [target])
            found = solved(x, y, options)
            judged = stacked(judges[0], [source]), stacked(judges[1], [target])
            worth[source] += r2(*found, *judged)
        best = sorted(sources, key=lambda s: (-worth[s], s))[:nu]
        chosen.append((target, tuple(sorted(best))))
    layers = tuple(read for _, read in sorted(chosen))
    return Assignment(layers, layers)


def fitted(
    ends: tuple[LanguageModel, LanguageModel],
    read: tuple[States, States],
    nu: int,
    options: Options,
) -> tuple[TranslatorConfig, dict[str, np.ndarray]]:
    """A closed form of these states."""
    chosen = assignment(ends, read, nu, options)
    specs = (ModelSpec.of(model) for model in ends)
    arrays: dict[str, np.ndarray] = {}
    for side in SIDES:
        for target, sources in enumerate(chosen.side(side)):
            x, y = stacked(read[0][side], sources), stacked(read[1][side], [target])
            weight, bias = solved(x, y, options)
            arrays[f"{side}.{target}.weight"] = weight.astype(np.float32)
            if options.bias:
                arrays[f"{side}.{target}.bias"] = bias.astype(np.float32)
    return TranslatorConfig(*specs, chosen, capture=options.capture), arrays


def after(ends: Any, config: TranslatorConfig, arrays: Any, stream: Any, args: Any) -> float:
    """The KL of held-out conversations after some steps of stage 2."""
    models = pair_of(*ends)
    held_out = list(stream.held_out(args.held_out))
    recipe = Recipe(steps=args.steps, batch=4, validate_every=args.steps, learning_rates=RATES)
    runs = start_runs(models, config, arrays, RATES)
    made = Distillation(models, runs, Talks(stream), held_out, recipe)
    made.run()
    return float(made.curve[-1]["held_out"][0])


def run_pair(pair: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    ends = tuple(load(tables.model_folder(name, args.zoo)) for name in pair.split(":"))
    facts = next((few for family, few in FACTS.items() if family in pair), None)
    stream = DialogueStream(ends[1], facts=facts, source=ends[0])
    most = max(map(len, candidates(*(m.geometry.layers for m in ends)).values()))
    nu = min(args.nu, most)
    talks = quality.held_out(args.dialogues, seed=13, facts=facts or (12, 28))
    judges = [quality.recall_sample(ends[1], talk) for talk in talks]
    read: dict[tuple[str, int], Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    makers = {}
    for name, options in WAYS.items():
        key = options.capture, options.every
        if key not in read:
            count = args.talks * options.every
            samples = [stream.sample(10**6 + n) for n in range(count)]
            read[key] = states_of(*ends, samples, *key)
        config, arrays = fitted(ends, read[key], nu, options)
        translator = build(config, Weights.from_float32(arrays, "float32"))
        makers[name] = conditions.translated(*ends, translator)
        rows[name] = {"nu": nu}
        if args.steps and name in DISTILLED:
            rows[name]["after"] = after(ends, config, arrays, stream, args)
    for name, score in quality.score(ends[1], judges, makers).items():
        rows.setdefault(name, {})
        rows[name] |= tables.summary(score)
    print(f"\n{pair}, nu = {nu}, {args.talks} conversations")
    for name, row in rows.items():
        told = f"   KL after {args.steps} steps {row['after']:.4f}" if "after" in row else ""
        print(f"  {name:28s} recall {row['hits']:.3f} +- {row['hits_se']:.3f}   "
              f"KL {row['kl']:.4f} +- {row['kl_se']:.4f}{told}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--nu", type=int, default=2)
    parser.add_argument("--talks", type=int, default=60, help="conversations that are fitted")
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--json", help="append a record for each pair to this file")
    args = parser.parse_args()
    for pair in args.pairs:
        results = run_pair(pair, args)
        if args.json:
            names = ("nu", "talks", "dialogues", "held_out", "steps")
            config = {"pair": pair, **{name: getattr(args, name) for name in names}}
            measure.append_json(args.json, measure.record("closed_form_options", config, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
