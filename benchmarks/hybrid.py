"""Hybrid hand-overs: quality and time by how many layers the target reads itself.

    python benchmarks/hybrid.py quality --pairs tiny-qwen3-s:tiny-qwen3-l --json FILE
    python benchmarks/hybrid.py quality --facts 8 16 --pairs tiny-gemma3-s:tiny-gemma3-l
    python benchmarks/hybrid.py time --json FILE

``quality``: recall and KL on held-out dialogues where the target reads its first j cache layers
and the others are translated, by a closed form (nu = 1) and by the package's self-distilled
translator, for every j; DroidSpeak, which reuses the source's cache verbatim above j, where shapes
allow; one native layer at a time; native decoding and both controls. ``--trained`` names folders
of translators that were distilled with native layers (``tools/fit_zoo.py --native-layers``).

``time``: seconds to the first token at a switch, the source's states at hand, by j, for random
models of some depth; beside it what j / N of a re-prefill and the translation of the other layers
take, measured in the same run. A re-prefill and a translation of every layer alternate with them.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from quality import mean, model_folder, summary
from translation_cost import model_of_shape, random_translator

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.evaluation import recalled, reuse
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.conditions import CacheMaker
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.switching import first_token, interleaved, translation


def one_native(translated: CacheMaker, native: CacheMaker, layer: int) -> CacheMaker:
    """A translated cache with a single layer of the target's own."""

    def make(tokens: Sequence[int]) -> list:
        cache, own = translated(tokens), native(tokens)
        return [*cache[:layer], own[layer], *cache[layer + 1 :]]

    return make


def run_pair(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every way of one pair, scored on the same dialogues."""
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    layers = len(target.attentions)
    talks = dialogues.for_fitting(args.fit_dialogues, facts=(4, args.facts[1]))
    closed = fit(source, target, [{"messages": talk.conversation()} for talk in talks])
    forms = {"closed form": closed}
    for root in (TRANSLATORS, args.zoo / "translators"):
        if (root / "--".join(names)).exists():
            forms["self-distilled"] = load_translator(root / "--".join(names))
    makers = {"prefix hidden": conditions.hidden(target)}
    for name, translator in forms.items():
        control = conditions.shuffled(translator)
        makers[f"{name}, shuffled"] = conditions.translated(source, target, control, 0)
        for j in range(layers):
            makers[f"{name}, j = {j}"] = conditions.translated(source, target, translator, j)
    for root in args.trained:
        for folder in sorted(root.glob(f"{'--'.join(names)}*")):
            translator = load_translator(folder)
            j = translator.config.native_layers
            makers[f"distilled at j, j = {j}"] = conditions.translated(
                source, target, translator, j
            )
    own = conditions.native(target)
    for layer in range(layers):
        plain = makers["closed form, j = 0"]
        makers[f"closed form, layer {layer} native"] = one_native(plain, own, layer)
    try:
        for j in range(layers):
            makers[f"DroidSpeak, j = {j}"] = reuse.reused(source, target, j)
    except IncompatibleTranslatorError as error:
        print(f"no DroidSpeak: {error}")
    samples = [
        quality.recall_sample(target, talk)
        for talk in dialogues.held_out(args.dialogues, facts=tuple(args.facts))
    ]
    scores = recalled.score(target, samples, makers)
    print(f"\n{pair}: {len(samples)} dialogues, {layers} layers")
    for name, score in scores.items():
        print(f"  {name:30s} recall {mean(score.hits)}   KL {mean(score.kl)}", flush=True)
    return {"layers": layers, "scores": {name: summary(score) for name, score in scores.items()}}


def run_quality(args: argparse.Namespace) -> dict[str, Any]:
    return {pair: run_pair(pair, args) for pair in args.pairs}


def run_time(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token by j, interleaved with what they are compared with."""
    size = {"hidden_size": args.width, "intermediate_size": 3 * args.width}
    source = model_of_shape("qwen3", args.layers, args.heads, args.head_dim)
    target = model_of_shape("qwen3", args.layers, args.heads, args.head_dim, **size)
    translator = random_translator(source, target, 1)
    tokens = np.random.default_rng(0).integers(0, 1000, args.tokens).tolist()
    actions = {
        f"j = {j}": translation(Plan(source, target, tokens, translator, Native(j)))
        for j in range(0, args.layers + 1, args.every)
    }
    runs = {
        name: lambda make=make: first_token(target, tokens[-1:], make())
        for name, make in actions.items()
    }
    cache = actions["j = 0"]()
    runs["step"] = lambda: first_token(target, tokens[-1:], [copy.copy(c) for c in cache])
    samples = interleaved(runs, args.trials)
    median = {name: measure.median(found) for name, found in samples.items()}
    step, whole = median["step"], median[f"j = {args.layers}"]
    rows = {}
    for j in range(0, args.layers + 1, args.every):
        share = j / args.layers
        expected = share * (whole - step) + (1 - share) * (median["j = 0"] - step) + step
        rows[j] = median[f"j = {j}"] / expected
        print(f"  j = {j:2d}  {1e3 * median[f'j = {j}']:8.1f} ms   {rows[j]:.3f} of what j / N of "
              f"a re-prefill and the rest's translation take")  # fmt: skip
    return {"samples_s": samples, "ratio": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["quality", "time"])
    parser.add_argument("--pairs", nargs="+", default=["tiny-qwen3-s:tiny-qwen3-l"])
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--trained", type=Path, nargs="*", default=[])
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 28], metavar=("FEWEST", "MOST"))
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--fit-dialogues", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="try every so manyth j")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1025)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    mx.random.seed(0)
    results = run_quality(args) if args.what == "quality" else run_time(args)
    print(measure.machine_line())
    if args.json:
        names = {
            "quality": ("facts", "dialogues", "fit_dialogues"),
            "time": ("layers", "width", "heads", "head_dim", "tokens", "trials"),
        }[args.what]
        config = {"what": args.what, **{name: getattr(args, name) for name in names}}
        measure.append_json(args.json, measure.record("hybrid", config, results))


if __name__ == "__main__":
    main()
