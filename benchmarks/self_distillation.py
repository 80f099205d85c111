"""What self-distillation earns on the zoo: closed form, cross-entropy, KL, mixed; by seed.

    python benchmarks/self_distillation.py --pair tiny-qwen3-s:tiny-qwen3-l --nu 1 \\
        --seeds 0 1 2 --steps 600 --json FILE

For each seed: both closed forms are fitted in PyTorch, then four translators are trained in
lockstep on one stream of dialogues (they share both readings without gradient): KL from
either closed form, cross-entropy and mixed from the better one. Held-out KL is recorded along
the way. At the end every translator, and the controls, are judged by MLX on dialogues that
nothing has seen: recall of first askings and KL over the continuation. What differs between seeds
is the dialogues that the fit and the training draw. One JSON line a seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from dialogue_stream import DialogueStream

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.evaluation import recalled
from kvlingo_mlx.cuda import model as torch_model
from kvlingo_mlx.cuda.pair import TorchPair
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Distillation, Run
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import PairReading
from kvlingo_mlx.translators import build

NORMS = ("frobenius", "attention_mass")
# Name, the norm of the closed form it starts from (None: the better one), objective.
TRAINED = (
    ("kl from frobenius", "frobenius", "kl"),
    ("kl from attention_mass", "attention_mass", "kl"),
    ("ce", None, "ce"),
    ("mixed", None, "mixed"),
)


@dataclass(frozen=True)
class Lockstep(TorchPair):
    """A pair that finds its readings where an earlier training of the same step left them."""

    shared: dict[Sample, PairReading] = field(default_factory=dict)

    def read(self, sample: Sample, config: TranslatorConfig, attends: bool = False) -> PairReading:
        if sample not in self.shared:
            self.shared[sample] = super().read(sample, config, attends)
        return self.shared[sample]


def fit_samples(model: LanguageModel, count: int, seed: int) -> list[Sample]:
    found = [quality.recall_sample(model, t) for t in dialogues.for_fitting(count, seed=seed)]
    return [Sample(sample.prefix, sample.continuation) for sample in found]


def fitted(
    config: TranslatorConfig, pair: TorchPair, samples: list[Sample], norm: str
) -> dict[str, np.ndarray]:
    fit = ClosedForm(config, pair, lambda: samples, norm_named(norm))
    fit.run()
    return fit.weights


def run_seed(
    pair: tuple[LanguageModel, LanguageModel],
    twins: tuple[torch_model.TorchModel, torch_model.TorchModel],
    seed: int,
    args: argparse.Namespace,
) -> dict:
    stream = DialogueStream(pair[1], seed=seed)
    judged = [quality.recall_sample(pair[1], d) for d in dialogues.held_out(args.dialogues, seed=7)]
    depths = [len(model.attentions) for model in twins]
    config = TranslatorConfig(*(m.spec() for m in twins), relative_depth(*depths, args.nu))
    fits, seconds = {}, {}
    for norm in NORMS:
        started = time.perf_counter()
        samples = fit_samples(pair[1], args.fit_dialogues, seed)
        fits[norm] = fitted(config, TorchPair(*twins), samples, norm)
        seconds[norm] = round(time.perf_counter() - started, 1)
    readings: dict[Sample, PairReading] = {}
    kept = stream.held_out(args.validation)
    trainings = {}
    starts = {n: [Run(0.0, TorchPair(*twins).trainable(config, fits[n]))] for n in NORMS}
    probe = {n: lockstep(twins, starts[n], stream, kept, Recipe(), readings) for n in NORMS}
    for norm in NORMS:
        probe[norm].validate()
    start_kl = {norm: probe[norm].runs[0].held_out for norm in NORMS}
    better = min(NORMS, key=start_kl.__getitem__)
    for name, norm, objective in TRAINED:
        if name not in args.train:
            continue
        rate = args.ce_lr if objective == "ce" else args.lr
        recipe = Recipe(
            steps=args.steps, batch=args.batch, learning_rates=(rate,), objective=objective
        )
        runs = [Run(rate, TorchPair(*twins).trainable(config, fits[norm or better]))]
        trainings[name] = lockstep(twins, runs, stream, kept, recipe, readings)
    curves = {name: [start_kl[norm or better]] for name, norm, _ in TRAINED if name in trainings}
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        for training in trainings.values():
            training.advance()
        for sample in [s for s in readings if s not in kept]:
            del readings[sample]
        if step % args.every == 0 or step == args.steps:
            for name, training in trainings.items():
                training.validate()
                curves[name].append(training.runs[0].held_out)
            spent = time.perf_counter() - started
            latest = ", ".join(f"{n} {c[-1]:.4f}" for n, c in curves.items())
            print(f"seed {seed}, step {step}, {spent:.0f} s: {latest}", flush=True)
    seconds["training"] = round(time.perf_counter() - started)
    arrays = dict(fits) | {
        name: training.runs[0].translator.arrays() for name, training in trainings.items()
    }
    scores = judge(pair, config, arrays, judged)
    report(scores)
    return {
        "seed": seed, "better_start": better, "curves": curves, "every": args.every,
        "seconds": seconds, "scores": {name: summary(score) for name, score in scores.items()},
    }  # fmt: skip


def lockstep(twins, runs, stream, kept, recipe, readings) -> Distillation:
    return Distillation(Lockstep(*twins, readings), runs, stream, kept, recipe)


def judge(pair, config, arrays, samples) -> dict[str, recalled.Score]:
    """Score every translator on the device's own path, beside the controls."""
    makers = {"prefix hidden": conditions.hidden(pair[1])}
    for name, maps in arrays.items():
        weights = Weights.from_float32(
            {n: np.asarray(a, np.float32) for n, a in maps.items()}, "float32"
        )
        translator = build(config, weights)
        makers[name] = conditions.translated(*pair, translator)
        control = conditions.shuffled(translator)
        makers[f"{name}, shuffled"] = conditions.translated(*pair, control)
    return recalled.score(pair[1], samples, makers)


def report(scores: dict[str, recalled.Score]) -> None:
    for name, score in scores.items():
        print(f"  {name:34s} recall {score.recall:.3f}   KL {np.mean(score.kl):.4f}", flush=True)


def summary(score: recalled.Score) -> dict[str, float | int]:
    return {
        "recall": score.recall, "kl": float(np.mean(score.kl)),
        "value_kl": float(np.mean(score.value_kl)), "questions": len(score.hits),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny-qwen3-s:tiny-qwen3-l")
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--ce-lr", type=float, default=6e-3)
    parser.add_argument("--train", nargs="+", default=[name for name, _, _ in TRAINED])
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--fit-dialogues", type=int, default=200)
    parser.add_argument("--validation", type=int, default=16)
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="append a record a seed to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folders = [zoo(name) for name in args.pair.split(":")]
    pair = load(folders[0]), load(folders[1])
    twins = tuple(torch_model.load(str(folder), dtype=torch.float32) for folder in folders)
    for seed in args.seeds:
        result = run_seed(pair, twins, seed, args)
        if args.json:
            config = {k: v for k, v in vars(args).items() if k not in ("json", "seeds")}
            measure.append_json(args.json, measure.record("self_distillation", config, result))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
