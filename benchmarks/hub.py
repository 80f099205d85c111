"""Many models by way of one: maps into and out of a shared space, beside a map for every pair.

    python benchmarks/hub.py --json benchmarks/results/hub.jsonl

All maps are linear, in closed form, and of one reading of the same text. A model's states are those
of all its layers of a side, so no layer is matched with another model's.

``pairs``: a map for each two of n models; a target layer reads one source layer, or all. ``star``:
everything by way of one model, 2 (n - 1) maps. ``joint``: a space of k numbers a side, a map in and
one out for each model, the best approximation of rank k of all pairs' maps as one matrix of blocks.
Errors count as often as source states go their way, in units of the target's layers or of its white
states: then blocks are correlations, and the space that of generalised canonical ones. Blocks on
the diagonal, which nobody needs, are filled from the approximation, in turns.

A record has recall and KL of each pair, the numbers stored for all, and the mean multiplications
for a token.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks import quality as tables
from benchmarks.paper.evaluation import recalled
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.capture import whole
from kvlingo_mlx.models.language_model import LanguageModel as Model
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.closed_form import Moments, solve
from kvlingo_mlx.stage1.config import config_of_pair
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

MODELS = ("tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-narrow", "tiny-qwen3-moe")  # one tokenizer
CAPTURE, ROUNDS, SMALL = "pre_norm", 4, 1e-6
Pair, Arrays = tuple[int, int], Sequence[np.ndarray]  # a pair: source and target
Maps = dict[Pair, np.ndarray]  # (target's width, source's)
Routes = dict[Pair, tuple[np.ndarray, ...]]  # the maps that a pair's states go through, in order


def star(maps: Maps, hub: int) -> Routes:
    """Every pair's states by way of one model."""
    return {
        (i, j): (own,) if hub in (i, j) else (maps[i, hub], maps[hub, j])
        for (i, j), own in maps.items()
    }


def joint(maps: Maps, squares: Arrays, units: Arrays, k: int, rounds: int = ROUNDS) -> Routes:
    """Maps into (k, width) and out of (width, k) a space of k numbers, near ``maps``.

    ``squares`` are the mean x x^T of each model's states x, ``units`` the matrices by which their
    errors are multiplied; the diagonal is filled ``rounds`` times from what was found.
    """
    ends = np.cumsum([0, *map(len, squares)])
    parts, roots = [slice(*each) for each in itertools.pairwise(ends)], list(map(powers, squares))
    blocks = np.zeros((ends[-1], ends[-1]))
    as_they_are = {(n, n): np.eye(len(each)) for n, each in enumerate(squares)}  # to begin with
    for (i, j), each in (maps | as_they_are).items():
        blocks[parts[j], parts[i]] = units[j] @ each @ roots[i][0]
    right = np.linalg.qr(np.random.default_rng(0).standard_normal((ends[-1], k)))[0]
    for _ in range(rounds):
        for _ in range(2):  # steps of an orthogonal iteration, which goes on from round to round
            left = np.linalg.qr(blocks @ right)[0]
            right = np.linalg.qr(blocks.T @ left)[0]
        core = left.T @ blocks @ right
        for own in parts:
            blocks[own, own] = left[own] @ core @ right[own].T
    into = [core @ right[own].T @ root[1] for own, root in zip(parts, roots, strict=True)]
    out = [np.linalg.solve(unit, left[own]) for own, unit in zip(parts, units, strict=True)]
    return {(i, j): (into[i], out[j]) for i, j in maps}


def powers(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The symmetric root of a matrix, and its inverse."""
    values, vectors = np.linalg.eigh(square)
    roots = np.sqrt(np.maximum(values, SMALL * values[-1]))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def ways(
    models: Sequence[Model], side: str, sums: np.ndarray, tokens: int, dims: Sequence[int]
) -> dict[str, Routes]:
    """What one side's states go through, by the name of the way."""
    n, pairs = len(models), list(itertools.permutations(range(len(models)), 2))
    layers = [[g.width(side) for g in m.geometry.layers] for m in models]
    ends = np.cumsum([0, *map(sum, layers)])
    rows = [np.split(np.arange(sum(each)), np.cumsum(each)[:-1]) for each in layers]

    def moments(i: int, j: int) -> Moments:
        a, b = (slice(ends[m], ends[m + 1]) for m in (i, j))
        return Moments(sums[a, a], sums[a, b], sums.diagonal()[b], tokens)

    every = {pair: solve(moments(*pair), ridge=None).weight for pair in pairs}
    single = {pair: np.zeros_like(each) for pair, each in every.items()}
    for i, j in pairs:
        assigned = config_of_pair(models[i], models[j], capture=CAPTURE).assignment.side(side)
        for t, (s,) in enumerate(assigned):
            part = moments(i, j).block(rows[i][s], rows[j][t])
            single[i, j][np.ix_(rows[j][t], rows[i][s])] = solve(part, ridge=None).weight
    whole_or_not = {"pairs all layers": every, "pairs one layer": single}
    found = {name: {p: (m,) for p, m in maps.items()} for name, maps in whole_or_not.items()}
    found |= {f"star {Path(model.name).name}": star(every, m) for m, model in enumerate(models)}
    squares = [moments(m, m).xx / tokens for m in range(n)]
    sizes = [
        np.repeat([q.diagonal()[r].mean() ** -0.5 for r in own], widths)
        for own, q, widths in zip(rows, squares, layers, strict=True)
    ]
    units = {"layers": list(map(np.diag, sizes)), "white": [powers(q)[1] for q in squares]}
    for (name, unit), k in itertools.product(units.items(), dims):
        found[f"joint {name} {k}"] = joint(every, squares, unit, k)
    return found


def read(models: Sequence[Model], texts: int) -> tuple[dict[str, np.ndarray], int]:
    """For each side the sums of x x^T over tokens, x all layers of all models; and the tokens."""
    sums, tokens = dict.fromkeys(SIDES, np.zeros(())), 0
    for talk in dialogues.for_fitting(texts):
        prefix = recall_sample(models[0], talk).prefix
        found = [whole(model, prefix, CAPTURE) for model in models]
        for side in SIDES:
            rows = [np.array(each)[0] for states in found for each in states.side(side)]
            x = np.concatenate(rows, axis=-1).astype(np.float64)
            sums[side] = sums[side] + x.T @ x
        tokens += len(prefix)
    return sums, tokens


def translator(source: Model, target: Model, routes: Mapping[str, Arrays]) -> Translator:
    """The product of a pair's maps, whose target layers read all source layers."""
    config = config_of_pair(source, target, capture=CAPTURE, nu=len(source.geometry.layers))
    arrays = {}
    for side, route in routes.items():
        ends = np.cumsum([g.width(side) for g in target.geometry.layers])[:-1]
        for t, part in enumerate(np.split(reduce(lambda x, m: m @ x, route), ends)):
            arrays[f"{side}.{t}.weight"] = part
    return build(config, Weights.from_float32(arrays, "float32"))


def costs(routes: Sequence[Routes]) -> dict[str, float]:
    """Numbers stored for all pairs, and multiplications for a token, mean over pairs."""
    sizes = {id(m): np.count_nonzero(m) for r in routes for route in r.values() for m in route}
    used = [sum(sizes[id(m)] for r in routes for m in r[pair]) for pair in routes[0]]
    return {"numbers": int(sum(sizes.values())), "multiplications": float(np.mean(used))}


def judge(source: Model, target: Model, made: Mapping[str, Translator], count: int) -> dict:
    """Recall and KL of a pair's translators and of the controls."""
    samples = [recall_sample(target, talk) for talk in dialogues.held_out(count)]
    others = {s.prefix: samples[n - 1].prefix * 9 for n, s in enumerate(samples)}
    makers = {name: conditions.translated(source, target, each) for name, each in made.items()}
    right = makers["pairs all layers"]
    makers["wrong dialogue"] = lambda p: right(others[tuple(p)][: len(p)])
    makers["prefix hidden"] = conditions.hidden(target)
    scores = recalled.score(target, samples, makers)
    return {name: tables.summary(score) for name, score in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--texts", type=int, default=110, help="dialogues that maps are made of")
    parser.add_argument("--dialogues", type=int, default=5, help="that judge")
    parser.add_argument("--json", help="append a record of each way to this file")
    args = parser.parse_args()
    models = [load(tables.model_folder(name, Path("tests/zoo"))) for name in MODELS]
    sums, tokens = read(models, args.texts)
    made = {side: ways(models, side, sums[side], tokens, args.dims) for side in SIDES}
    found: dict[str, dict] = {}
    for i, j in itertools.permutations(range(len(models)), 2):
        names, ends = made[SIDES[0]], (models[i], models[j])
        built = {n: translator(*ends, {s: made[s][n][i, j] for s in SIDES}) for n in names}
        for name, score in judge(*ends, built, args.dialogues).items():
            found.setdefault(name, {})[f"{MODELS[i]}:{MODELS[j]}"] = score
    for name, pairs in found.items():
        size = costs([made[s][name] for s in SIDES]) if name in made[SIDES[0]] else {}
        mean = {of: float(np.mean([p[of] for p in pairs.values()])) for of in ("hits", "kl")}
        kept = mean["hits"] / np.mean([p["hits"] for p in found["pairs all layers"].values()])
        print(f"{name:24s} recall {mean['hits']:.3f} ({kept:.2f})   KL {mean['kl']:.3f}   {size}")
        if args.json:
            config = {"way": name, "tokens": tokens, "texts": args.texts}
            told = {**mean, "share": float(kept), **size, "pairs": pairs}
            measure.append_json(args.json, measure.record("hub", config, told))


if __name__ == "__main__":
    main()
