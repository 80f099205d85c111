"""Many models by way of one: maps into and out of a shared space, beside a map for every pair.

    python benchmarks/hub.py --json benchmarks/results/hub.jsonl
    python benchmarks/hub.py --models A B C --held CHATS --json benchmarks/results/hub_real.jsonl

The first line is of the bundled models. ``--models`` are any others with one tokenizer; they read
look-back text and conversations of ``--held``, and are judged by others of these and by codes.

All maps are linear, in closed form, and of one reading of the same text. A model's states are those
of all its layers of a side, so no layer is matched with another model's.

``pairs``: a map for each two of n models; a target layer reads one source layer, or all. ``star``:
everything by way of one model, 2 (n - 1) maps. ``joint``: a space of k numbers a side, a map in and
one out for each model, the best approximation of rank k of all pairs' maps as one matrix of blocks.
Errors count as often as source states go their way, in units of the target's layers or of its white
states: then blocks are correlations, and the space that of generalised canonical ones. Blocks on
the diagonal, which nobody needs, are filled from the approximation, in turns. With ``--centred``
maps are of what states differ by from their means, which a bias adds again.

A record has recall and KL of each pair, the numbers stored for all, and the mean multiplications
for a token.
"""

import argparse
import functools
import itertools
import json
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from kvlingo_mlx.backend import mx

from benchmarks import quality as tables
from benchmarks.paper.evaluation import recalled
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.engine.fill import take_over
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import RecallSample, recall_sample
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.capture import whole
from kvlingo_mlx.models.language_model import LanguageModel as Model
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.closed_form import Eigen, Moments, solve
from kvlingo_mlx.stage1.config import config_of_pair
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

MODELS = ("tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-narrow", "tiny-qwen3-moe")  # one tokenizer
CAPTURE, ROUNDS, SMALL = "pre_norm", 4, 1e-6
Pair, Arrays = tuple[int, int], Sequence[np.ndarray]  # a pair: source and target
Roots = tuple[np.ndarray, np.ndarray]  # a symmetric root, and its inverse
Maps = dict[Pair, np.ndarray]  # (target's width, source's)
Routes = dict[Pair, tuple[np.ndarray, ...]]  # the maps that a pair's states go through, in order


def star(maps: Maps, hub: int) -> Routes:
    """Every pair's states by way of one model."""
    return {
        (i, j): (own,) if hub in (i, j) else (maps[i, hub], maps[hub, j])
        for (i, j), own in maps.items()
    }


def joint(
    blocks: np.ndarray, roots: Sequence[Roots], units: Arrays, pairs: Sequence[Pair], k: int
) -> Routes:
    """Maps into (k, width) and out of (width, k) a space of k numbers.

    Args:
        blocks: All pairs' maps as one matrix, of white states, in ``units``; its diagonal is filled
            ``ROUNDS`` times from what was found.
        roots: Those of the mean x x^T of each model's states x.
        units: The matrices by which errors are multiplied, or their diagonals.
        pairs: The pairs.
        k: The space's numbers.
    """
    ends = np.cumsum([0, *(len(root) for root, _ in roots)])
    parts = [slice(*each) for each in itertools.pairwise(ends)]
    blocks = blocks.copy()
    drawn = np.random.default_rng(0).standard_normal((len(blocks), k), blocks.dtype)
    right = np.linalg.qr(drawn)[0]
    for _ in range(ROUNDS):
        for _ in range(2):  # steps of an orthogonal iteration, which goes on from round to round
            left = np.linalg.qr(blocks @ right)[0]
            right = np.linalg.qr(blocks.T @ left)[0]
        core = left.T @ blocks @ right
        for own in parts:
            blocks[own, own] = left[own] @ core @ right[own].T
    into = [core @ right[own].T @ root[1] for own, root in zip(parts, roots, strict=True)]
    inverse = (1 / unit if unit.ndim == 1 else np.linalg.inv(unit) for unit in units)
    out = [_times(unit, left[own]) for own, unit in zip(parts, inverse, strict=True)]
    return {(i, j): (into[i], out[j]) for i, j in pairs}


def _times(unit: np.ndarray, array: np.ndarray) -> np.ndarray:
    return unit[:, None] * array if unit.ndim == 1 else unit @ array


def powers(eigen: Eigen, count: int) -> Roots:
    """The symmetric root of the mean over ``count`` of a sum, and its inverse."""
    values, vectors = eigen[0] / count, eigen[1]
    roots = np.sqrt(np.maximum(values, SMALL * values[-1]))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def ways(
    models: Sequence[Model], side: str, sums: np.ndarray, tokens: int, args: argparse.Namespace
) -> dict[str, Routes]:
    """What one side's states go through, by the name of the way."""
    n, pairs = len(models), list(itertools.permutations(range(len(models)), 2))
    layers = [[g.width(side) for g in m.geometry.layers] for m in models]
    ends = np.cumsum([0, *map(sum, layers)])
    rows = [np.split(np.arange(sum(each)), np.cumsum(each)[:-1]) for each in layers]

    def moments(i: int, j: int) -> Moments:
        a, b = (slice(ends[m], ends[m + 1]) for m in (i, j))
        return Moments(sums[a, a], sums[a, b], sums.diagonal()[b], tokens)

    eigen = [np.linalg.eigh(moments(m, m).xx) for m in range(n)]
    every = {(i, j): solve(moments(i, j), ridge=None, eigen=eigen[i]).weight for i, j in pairs}
    single = {pair: np.zeros_like(each) for pair, each in every.items()}
    for i, j in pairs:
        assigned = config_of_pair(models[i], models[j], capture=CAPTURE).assignment.side(side)
        for t, (s,) in enumerate(assigned):
            part = moments(i, j).block(rows[i][s], rows[j][t])
            single[i, j][np.ix_(rows[j][t], rows[i][s])] = solve(part, ridge=None).weight
    whole_or_not = {"pairs all layers": every, "pairs one layer": single}
    found = {name: {p: (m,) for p, m in maps.items()} for name, maps in whole_or_not.items()}
    if not args.no_stars:
        found |= {f"star {Path(model.name).name}": star(every, m) for m, model in enumerate(models)}
    roots = [powers(each, tokens) for each in eigen]
    means = np.sqrt(sums.diagonal() / tokens)
    sizes = [
        np.concatenate([np.full(len(r), np.square(means[e + r]).mean() ** -0.5) for r in own])
        for e, own in zip(ends, rows, strict=False)
    ]
    units: dict[str, Arrays] = {"layers": sizes, "white": [white for _, white in roots]}
    for name in args.units:
        own = units[name]
        blocks = np.zeros(sums.shape, np.float32)
        for m, (root, _) in enumerate(roots):  # as they are, to begin with
            blocks[ends[m] : ends[m + 1], ends[m] : ends[m + 1]] = _times(own[m], root)
        for i, j in pairs:
            white = _times(own[j], every[i, j] @ roots[i][0])
            blocks[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = white
        for k in args.dims:
            found[f"joint {name} {k}"] = joint(blocks, roots, own, pairs, k)
    return found


def states_of(folder: Path, texts: Sequence[Sequence[int]], kept: Path | None) -> list[KVStates]:
    """What a model writes of texts; from the folder ``kept``, if an earlier run left it there."""
    path = None if kept is None else kept / f"{folder.name}.safetensors"
    if path is None or not path.exists():
        model = load(folder, lazy=True)
        found = [whole(model, text, CAPTURE) for text in texts]
        if path is None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        named = {f"{s} {n} {t}": a for n, each in enumerate(found) for s in SIDES
                 for t, a in enumerate(each.side(s))}  # fmt: skip
        mx.save_safetensors(str(path), named)
    arrays: Any = mx.load(str(path))
    layers = len(arrays) // len(texts) // len(SIDES)
    sides = [[tuple(arrays[f"{s} {n} {t}"] for t in range(layers)) for s in SIDES]
             for n in range(len(texts))]  # fmt: skip
    return [KVStates(*both, CAPTURE, 0) for both in sides]


def sums_of(
    readings: Sequence[Sequence[KVStates]], side: str, centred: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of x x^T over tokens, x all layers of all models, and what was taken off each x."""
    rows = [
        np.concatenate([np.array(each)[0] for states in one for each in states.side(side)], axis=-1)
        for one in zip(*readings, strict=True)
    ]
    count, width = sum(map(len, rows)), rows[0].shape[1]
    mean = sum(each.sum(0, np.float64) for each in rows) / count if centred else np.zeros(width)
    total = np.zeros((width, width))
    for each in rows:
        beside = each - mean
        total += beside.T @ beside
    return total, mean


def translator(
    source: Model, target: Model, routes: Mapping[str, Arrays], means: Mapping[str, Arrays]
) -> Translator:
    """The product of a pair's maps, whose target layers read all source layers.

    ``means`` are what was taken off the source's and off the target's states; a bias gives it back.
    """
    config = config_of_pair(source, target, capture=CAPTURE, nu=len(source.geometry.layers))
    arrays = {}
    for side, route in routes.items():
        ends = np.cumsum([g.width(side) for g in target.geometry.layers])[:-1]
        weight = functools.reduce(lambda x, m: m @ x, route)
        for t, part in enumerate(np.split(weight, ends)):
            arrays[f"{side}.{t}.weight"] = part
        theirs, ours = means[side]
        if ours.any():
            for t, part in enumerate(np.split(ours - weight @ theirs, ends)):
                arrays[f"{side}.{t}.bias"] = part
    return build(config, Weights.from_float32(arrays, "float32"))


def costs(routes: Sequence[Routes]) -> dict[str, float]:
    """Numbers stored for all pairs, and multiplications for a token, mean over pairs."""
    sizes = {id(m): np.count_nonzero(m) for r in routes for route in r.values() for m in route}
    used = [sum(sizes[id(m)] for r in routes for m in r[pair]) for pair in routes[0]]
    return {"numbers": int(sum(sizes.values())), "multiplications": float(np.mean(used))}


def judge(
    source: Model, target: Model, made: Mapping[str, Translator],
    samples: Sequence[RecallSample], readings: Sequence[KVStates],
) -> dict[str, dict]:  # fmt: skip
    """Recall and KL of a pair's translators and of the controls.

    ``readings`` are what the source makes of the samples' prefixes.
    """
    numbers = {sample.prefix: n for n, sample in enumerate(samples)}

    def maker(each: Translator, other: int = 0) -> conditions.CacheMaker:
        def make(prefix: conditions.Prefix) -> list:
            states = readings[numbers[tuple(prefix)] - other]
            plan = conditions.plan_of(source, target, each, prefix[: states.num_tokens])
            return take_over(plan, [states.part(0, len(plan.prefix))]).cache

        return make

    makers = {name: maker(each) for name, each in made.items()}
    makers["wrong text"] = maker(made["pairs all layers"], 1)
    makers["prefix hidden"] = conditions.hidden(target)
    scores = recalled.score(target, samples, makers)
    found = {name: tables.summary(score) for name, score in scores.items()}
    return {n: {of: v for of, v in each.items() if v == v} for n, each in found.items()}  # no NaN


def bundled(models: Sequence[Model], args: argparse.Namespace) -> tuple[list, dict[str, list]]:
    """Texts to read, and samples that judge: the bundled dialogues."""
    read_by = functools.partial(recall_sample, models[0])
    texts = [read_by(talk).prefix for talk in dialogues.for_fitting(args.texts)]
    return texts, {"dialogues": [read_by(talk) for talk in dialogues.held_out(args.items)]}


def spoken(models: Sequence[Model], args: argparse.Namespace) -> tuple[list, dict[str, list]]:
    """Texts to read, and samples that judge: look-back text, people's conversations, and codes."""
    from benchmarks.real_pair import Texts

    tokenizer = models[0].tokenizer
    lines = args.held.read_text("utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    random.Random(0).shuffle(chats)
    half = len(chats) // 2
    both = zip(lookback(args.texts), itertools.cycle(chats[:half]))  # a half is for judging
    mixed = itertools.islice(itertools.chain.from_iterable(both), args.texts)
    rendered = (tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in mixed)
    cut = (tokenizer.encode(text[:16000], add_special_tokens=False) for text in rendered)
    texts = [tokens[: args.longest] for tokens in cut]
    samples: dict[str, list] = {}
    for name, sample, places in Texts(tokenizer, chats[half:]).items(args.items, [320], 0):
        kind, number = name.rsplit("-", 1)
        if int(number) < args.items:
            recalled_at = (tuple(places),) if places else ()
            found = RecallSample(sample.prefix, sample.continuation, recalled=recalled_at)
            samples.setdefault(kind, []).append(found)
    return texts, samples


def totals(own: Collection[Mapping[str, float]], best: Collection[Mapping[str, float]]) -> dict:
    """The means over pairs, and the share of the recall of the best way."""
    means = {
        of: float(np.mean([pair[of] for pair in own]))
        for of in ("hits", "kl") if all(of in pair for pair in own)
    }  # fmt: skip
    if "hits" in means:  # texts without codes have none
        means["share"] = means["hits"] / float(np.mean([pair["hits"] for pair in best]))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="folders; else four bundled ones")
    parser.add_argument("--held", type=Path, help="JSONL of conversations, with --models")
    parser.add_argument("--longest", type=int, default=256, help="a text's most tokens")
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--units", nargs="*", default=["layers", "white"])
    parser.add_argument("--centred", action="store_true")
    parser.add_argument("--no-stars", action="store_true")
    parser.add_argument("--texts", type=int, default=110, help="that maps are made of")
    parser.add_argument("--items", type=int, default=5, help="that judge, of each kind")
    parser.add_argument("--kept", type=Path, help="a folder that keeps what was read")
    parser.add_argument("--json", help="append a record of each way to this file")
    args = parser.parse_args()
    folders = [tables.model_folder(name, Path("tests/zoo")) for name in args.models or MODELS]
    models, names = [load(each, lazy=True) for each in folders], [each.name for each in folders]
    texts, samples = (spoken if args.models else bundled)(models, args)
    judging = [sample.prefix for some in samples.values() for sample in some]
    readings = [states_of(each, [*texts, *judging], args.kept) for each in folders]
    made: dict[str, dict[str, Routes]] = {}
    means: dict[str, list[np.ndarray]] = {}
    tokens = sum(map(len, texts))
    for side in SIDES:
        sums, mean = sums_of([each[: len(texts)] for each in readings], side, args.centred)
        edges = np.cumsum([sum(g.width(side) for g in m.geometry.layers) for m in models])[:-1]
        made[side], means[side] = ways(models, side, sums, tokens, args), np.split(mean, edges)
    found: dict[tuple[str, str], dict] = {}
    for j, folder in enumerate(folders):
        target = load(folder, lazy=True)  # one model's weights at a time
        unlike = [m.geometry.layers != target.geometry.layers for m in models]
        for i in itertools.compress(range(len(models)), unlike):  # others' caches serve as they are
            own = {side: (each[i], each[j]) for side, each in means.items()}
            built = {
                name: translator(models[i], target, {s: made[s][name][i, j] for s in SIDES}, own)
                for name in made[SIDES[0]]
            }
            held = iter(readings[i][len(texts) :])
            for kind, some in samples.items():
                theirs = list(itertools.islice(held, len(some)))
                for name, score in judge(models[i], target, built, some, theirs).items():
                    found.setdefault((kind, name), {})[f"{names[i]}:{names[j]}"] = score
                    print(f"{names[i]}:{names[j]} {kind:10s} {name:24s} {score}", flush=True)
        del target
        mx.clear_cache()
    for (kind, name), pairs in found.items():
        size = costs([made[s][name] for s in SIDES]) if name in made[SIDES[0]] else {}
        told = totals(pairs.values(), found[kind, "pairs all layers"].values())
        print(kind, name, *(f"{of} {value:.3f}" for of, value in told.items()), size)
        if args.json:
            config = {"way": name, "tokens": tokens, "texts": args.texts, "judged by": kind}
            told |= {**size, "pairs": pairs}
            measure.append_json(args.json, measure.record("hub", config, told))


if __name__ == "__main__":
    main()
