"""Ways to hand a conversation to or from a hybrid: quality of each, beside controls.

    python benchmarks/recurrent.py --pairs tiny-qwen3.5-s:tiny-qwen3.5-l --seeds 0 1 2 --json FILE
    python benchmarks/recurrent.py --parts tiny-qwen3.5-s --json FILE
    python benchmarks/recurrent.py ... --steps 600 --work build/recurrent --json FILE

``--parts``: what a model's answers need: recall and KL with its states hidden, its attention
hidden, and both. The others are of a pair:

- inputs: the recurrences' inputs are translated token by token, and the target's own recurrence
  makes its states (what ``fit`` makes), for each ``--nu``; with ``--steps`` self-distilled as well;
- any kind: the same, but each layer reads the source layers nearest in depth, whatever their kind;
- own kind, then any: the nearest layer of a target layer's own kind, and the nearest of all others;
- native first layers: of these, the target reads the first ones itself;
- attention only: the attention layers are translated, the states stay empty;
- states mapped (between hybrids of one rule): they are, and each head's state is A S B of the
  source's head at that depth, A and B by alternating least squares over prefixes of many lengths;
  the tail by one linear map;
- states copied: the source's states as they are, where the shapes allow it;
- controls: the prefix hidden, and every translator with its layers shuffled.

One record for each pair and seed; those that FILE has already are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from quality import model_folder, summary

from kvlingo_mlx import caches
from kvlingo_mlx.caches.entries import PositionedKVCache
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.continuation import DialogueStream
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.training.pipeline import Training
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.translators.base import Translator

Maker = conditions.CacheMaker
ROUNDS, RIDGE = 20, 1e-4  # of alternating least squares
CUTS = 4  # prefixes of one dialogue by which states are mapped


def hidden(make: Maker, model: LanguageModel, recurrent: bool) -> Maker:
    """Caches whose recurrent layers, or whose attention layers, hold nothing.

    The next tokens stand where they would have stood.
    """

    def made(prefix: Any) -> list:
        found = []
        for cache, empty in zip(make(prefix), conditions.empty(model), strict=True):
            if caches.is_recurrent(cache) is not recurrent:
                found.append(cache)
                continue
            found.append(empty if recurrent else PositionedKVCache())
            if not recurrent:
                found[-1].offset = cache.offset
        return found

    return made


# ---- states mapped ------------------------------------------------------------------------


def states_of(model: LanguageModel, tokens: Sequence[int]) -> list[list[np.ndarray]]:
    """The tail and the state of each recurrent layer after ``tokens``."""
    cache = conditions.prefill_layers(model, tokens, 2048, len(model.attentions))
    return [[np.array(a.astype(mx.float32))[0] for a in caches.held(c).values()]
            for c in cache if caches.is_recurrent(c)]  # fmt: skip


def bilinear(given: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A (dv', dv) and B (dk, dk') with wanted (N, dv', dk') near A given (N, dv, dk) B."""
    b = np.eye(given.shape[2], wanted.shape[2])
    a = np.zeros((wanted.shape[1], given.shape[1]))
    for _ in range(ROUNDS):
        right = given @ b
        a = np.linalg.solve(
            _ridged(np.einsum("nik,njk->ij", right, right)), np.einsum("nik,njk->ij", right, wanted)
        ).T
        left = a @ given
        b = np.linalg.solve(
            _ridged(np.einsum("nki,nkj->ij", left, left)), np.einsum("nki,nkj->ij", left, wanted)
        )
    return a, b


def _ridged(square: np.ndarray) -> np.ndarray:
    return square + RIDGE * np.trace(square) / len(square) * np.eye(len(square))


class Mapped:
    """Maps of states between the recurrent layers of two models."""

    def __init__(
        self, source: LanguageModel, target: LanguageModel, prefixes: Sequence[Sequence[int]]
    ) -> None:
        self.source, self.target = source, target
        both = [(states_of(source, p), states_of(target, p)) for p in prefixes]
        theirs, ours = (len(each) for each in both[0])
        self.layers = [round(t * (theirs - 1) / max(1, ours - 1)) for t in range(ours)]
        self.maps = []
        for t, s in enumerate(self.layers):
            tails = np.stack([f[s][0].ravel() for f, _ in both])
            goals = np.stack([w[t][0].ravel() for _, w in both])
            square = _ridged(tails.T @ tails)
            tail = np.linalg.solve(square, tails.T @ goals)
            given = np.stack([f[s][1] for f, _ in both])
            wanted = np.stack([w[t][1] for _, w in both])
            share = wanted.shape[1] / given.shape[1]
            heads = [(int(h / share), *bilinear(given[:, int(h / share)], wanted[:, h]))
                     for h in range(wanted.shape[1])]  # fmt: skip
            self.maps.append((tail, heads))

    def __call__(self, tokens: Sequence[int]) -> list[list[np.ndarray]]:
        """The target's tails and states from the source's after ``tokens``."""
        found, made = states_of(self.source, tokens), []
        shapes = [g.recurrence.parts for g in self.target.geometry.layers if g.recurrence]
        for (tail, heads), s, (shape, _) in zip(self.maps, self.layers, shapes, strict=True):
            state = np.stack([a @ found[s][1][h] @ b for h, a, b in heads])
            made.append([(found[s][0].ravel() @ tail).reshape(shape), state])
        return made


def with_states(make: Maker, states: Callable[[Sequence[int]], list[list[np.ndarray]]]) -> Maker:
    """Caches whose recurrent layers hold other states."""

    def made(prefix: Any) -> list:
        found, given = make(prefix), iter(states(prefix[:-1]))
        for cache in filter(caches.is_recurrent, found):
            for name, array in zip(caches.PARTS, next(given), strict=False):
                old = caches.held(cache)[name]
                caches.put_part(cache, name, mx.array(array[None]).astype(old.dtype))
        return found

    return made


# ---- the table -----------------------------------------------------------------------------


def distilled(
    source: LanguageModel, target: LanguageModel, nu: int, seed: int, args: argparse.Namespace
) -> Translator:
    """The translator after stage 2, on MLX; resumed where it was stopped."""
    plan = TrainingPlan(
        nu=nu, fit_samples=args.fit_dialogues, held_out=16, seed=seed,
        recipe=Recipe(steps=args.steps, batch=4, learning_rates=(args.lr,)),
    )  # fmt: skip
    names = "--".join((source.name.split("/")[-1], target.name.split("/")[-1]))
    folder = args.work / f"{names}-{nu}-{seed}-{args.steps}"
    stream = DialogueStream(target, seed, source=source)
    settings = {"data": ["kvlingo_mlx.embedded.dialogues"]}
    done = Training(source, target, stream, plan, folder, settings=settings).run()
    return load_translator(done)


def nearest(source: LanguageModel, target: LanguageModel, nu: int, own: bool) -> Assignment:
    """The ``nu`` source layers nearest to each target layer in relative depth, of any kind.

    ``own`` takes the nearest one of its own kind in any case, if there is one.
    """
    theirs, ours = (model.geometry.layers for model in (source, target))
    found = []
    for t, layer in enumerate(ours):
        depth = t * (len(theirs) - 1) / max(1, len(ours) - 1)
        ranked = sorted(range(len(theirs)), key=lambda s: (abs(s - depth), -s))
        first = [s for s in ranked if theirs[s].attention == layer.attention][: int(own)]
        found.append(tuple(sorted([*first, *(s for s in ranked if s not in first)][:nu])))
    return Assignment(tuple(found), tuple(found))


def ways(
    source: LanguageModel, target: LanguageModel, seed: int, args: argparse.Namespace
) -> Iterator[tuple[str, Maker]]:
    """The conditions of a pair, by name."""
    talks = list(dialogues.for_fitting(args.fit_dialogues, seed=seed))
    records = [{"messages": talk.conversation()} for talk in talks]
    made: dict[str, Translator] = {}
    for nu in args.nu:
        made[f"inputs nu={nu}"] = fit(source, target, records, nu=nu)
        tried = [made[f"inputs nu={nu}"].config.assignment]
        for name, own in (("any kind", False), ("own kind, then any", True)):
            other = nearest(source, target, nu, own)
            if other not in tried:
                made[f"{name} nu={nu}"] = fit(source, target, records, assignment=other)
                tried.append(other)
    if args.steps:
        for nu in args.nu:
            made[f"inputs nu={nu}, distilled"] = distilled(source, target, nu, seed, args)
    for name, translator in made.items():
        make = conditions.translated(source, target, translator)
        yield name, make
        yield (
            f"{name}, shuffled",
            conditions.translated(source, target, conditions.shuffled(translator)),
        )
        for layers in args.native_layers:
            own = conditions.translated(source, target, translator, layers)
            yield f"{name}, {layers} native layers", own
        if target.geometry.recurrent:
            yield f"{name}, attention only", hidden(make, target, True)
            yield f"{name}, states only", hidden(make, target, False)
    rules = [{g.attention for g in m.geometry.layers if g.recurrence} for m in (source, target)]
    if rules[0] != rules[1] or not rules[0]:
        return
    first = conditions.translated(source, target, made[f"inputs nu={args.nu[0]}"])
    prefixes = []
    for number, talk in enumerate(talks):
        tokens = quality.recall_sample(target, talk).prefix
        rng = np.random.default_rng([seed, number])
        prefixes += [tokens[: rng.integers(16, len(tokens))] for _ in range(CUTS)]
    yield "states mapped", with_states(first, Mapped(source, target, prefixes))
    shapes = [[g.recurrence for g in m.geometry.layers if g.recurrence] for m in (source, target)]
    if shapes[0] == shapes[1]:
        yield "states copied", with_states(first, lambda tokens: states_of(source, tokens))


def of_pair(pair: str, seed: int, args: argparse.Namespace) -> dict[str, dict]:
    source, target = (load(model_folder(name, args.zoo)) for name in pair.split(":"))
    talks = dialogues.held_out(args.dialogues, facts=tuple(args.facts))
    samples = [quality.recall_sample(target, talk) for talk in talks]
    makers = {"prefix hidden": conditions.hidden(target), **dict(ways(source, target, seed, args))}
    return _scored(f"{pair}, seed {seed}", target, samples, makers)


def of_parts(name: str, args: argparse.Namespace) -> dict[str, dict]:
    """What a model's own answers need."""
    model = load(model_folder(name, args.zoo))
    talks = dialogues.held_out(args.dialogues, facts=tuple(args.facts))
    samples = [quality.recall_sample(model, talk) for talk in talks]
    own = conditions.native(model)
    makers = {
        "states hidden": hidden(own, model, True),
        "attention hidden": hidden(own, model, False),
        "prefix hidden": conditions.hidden(model),
    }
    return _scored(name, model, samples, makers)


def _scored(
    title: str, target: LanguageModel, samples: Sequence[Any], makers: dict[str, Maker]
) -> dict[str, dict]:
    scores = quality.score(target, samples, makers)
    print(f"\n{title}: {len(samples)} dialogues")
    for name, score in scores.items():
        print(f"  {name:42s} recall {score.recall:.3f}   KL {np.mean(score.kl):.4f}", flush=True)
    return {name: summary(score) for name, score in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="*", default=[])
    parser.add_argument("--parts", nargs="*", default=[], help="models whose own parts are hidden")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the data")
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--nu", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--native-layers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 28])
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--fit-dialogues", type=int, default=200)
    parser.add_argument("--steps", type=int, default=0, help="of self-distillation")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--work", type=Path, default=Path("build/recurrent"))
    parser.add_argument("--json", help="append a record for each pair and seed to this file")
    args = parser.parse_args()
    done = []
    if args.json and Path(args.json).exists():
        lines = Path(args.json).read_text().splitlines()
        done = [json.loads(line)["config"] for line in lines]
    told = {"zoo", "work", "json", "pairs", "parts", "seeds"}
    shared = {name: value for name, value in vars(args).items() if name not in told}
    jobs: list[tuple[dict, Callable[[], dict]]] = [
        ({"parts": name}, lambda name=name: of_parts(name, args)) for name in args.parts
    ]
    jobs += [
        ({"pair": pair, "seed": seed}, lambda pair=pair, seed=seed: of_pair(pair, seed, args))
        for pair in args.pairs
        for seed in args.seeds
    ]
    for own, job in jobs:
        config = shared | own
        if config in done:
            continue
        with in_chunks():
            results = job()
        if args.json:
            measure.append_json(args.json, measure.record("recurrent", config, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
