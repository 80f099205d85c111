"""Ways to hand a conversation to or from a hybrid: quality of each, beside controls.

    python benchmarks/recurrent.py --pairs tiny-qwen3.5-s:tiny-qwen3.5-l --seeds 0 1 2 --json FILE
    python benchmarks/recurrent.py --parts tiny-qwen3.5-s --json FILE
    python benchmarks/recurrent.py ... --steps 600 --work build/recurrent --json FILE

``--parts``: what a model's answers need: recall and KL with its states hidden, its attention
hidden, and both. The others are of a pair:

- inputs: the recurrences' inputs are translated token by token, and the target's own recurrence
  makes its states (what ``fit`` makes), for each ``--nu``;
- any kind: the same, but each layer reads the source layers nearest in depth, whatever their kind;
- own kind, then any: the nearest layer of a target layer's own kind, and the nearest of all others;
- native first layers: of these, the target reads the first ones itself;
- attention only: the attention layers are translated, the states stay empty;
- states (between hybrids of one rule): each head's state goes through a map of its own, for each
  ``--nu`` (what ``fit --state-maps`` makes);
- states copied: the source's states as they are, where the shapes allow it;
- controls: the prefix hidden, and every translator with its layers shuffled.

With ``--steps``, the translators of inputs are self-distilled, or with ``--state-maps`` those of
states, and the record holds these alone. ``--judged-facts`` judges other dialogues than a
translator was trained for. ``--back`` judges what comes back: the first model reads half of a text,
the second one the rest on what it was handed, and the first one is asked.

One record for each pair and seed; those that FILE has already are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from dialogue_stream import DialogueStream
from quality import model_folder, summary

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.evaluation import recalled
from kvlingo_mlx import caches
from kvlingo_mlx.caches.entries import PositionedKVCache
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Trainer
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

Maker = conditions.CacheMaker


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


@dataclass(frozen=True)
class Crossing:
    """A way from one model to another: makes the target's cache of a prefix."""

    source: LanguageModel
    target: LanguageModel
    translator: Translator

    def __call__(self, prefix: Any) -> list[Any]:
        return conditions.translated(self.source, self.target, self.translator)(prefix)

    def shuffled(self) -> Crossing:
        """Control: each layer has the maps of another one."""
        return replace(self, translator=conditions.shuffled(self.translator))

    def go_on(self, own: list[Any], other: list[Any], tokens: Sequence[int], begun: int) -> None:
        """Let ``own``, a cache of the target, go on over what the source reads in ``other``.

        Both hold the first ``begun`` of ``tokens``.
        """
        config = self.translator.config
        read = capture.prefill(self.source, tokens, 2048, other, begun, config.state_maps)
        for span in read:
            moved = capture.move(span, self.source, config.capture)
            made = self.translator(moved, self.target.geometry.first_kept(span.end))
            caches.append(own, made, self.target)
            mx.eval(caches.arrays(own))


def there_and_back(there: Crossing, back: Crossing) -> Maker:
    """The first model's cache of a prefix of which the second one reads the second half.

    The second model reads it on what it was handed, and hands it back.
    """

    def made(prefix: Any) -> list[Any]:
        half, first = len(prefix) // 2, there.source
        own = conditions.prefill_layers(first, prefix[:half], 2048, len(first.attentions))
        back.go_on(own, there(prefix[: half + 1]), prefix[:-1], half)
        return own

    return made


# ---- the table -----------------------------------------------------------------------------


def _told_facts(args: argparse.Namespace) -> tuple[int, int]:
    """The least and the most facts of a dialogue that something is trained on.

    More than are judged the models themselves may not know.
    """
    return min(4, args.facts[0]), args.facts[1]


def _stream(
    source: LanguageModel, target: LanguageModel, seed: int, args: argparse.Namespace
) -> DialogueStream:
    return DialogueStream(target, seed, _told_facts(args), source=source)


def _recipe(args: argparse.Namespace) -> Recipe:
    return Recipe(steps=args.steps, batch=4, learning_rates=(args.lr,), validate_every=100)


def distilled(
    source: LanguageModel, target: LanguageModel, nu: int, seed: int, args: argparse.Namespace
) -> Translator:
    """The translator after stage 2, on MLX; resumed where it was stopped."""
    plan = TrainingPlan(nu=nu, fit_samples=args.fit_dialogues, held_out=16, seed=seed,
                        state_maps=args.state_maps, recipe=_recipe(args))  # fmt: skip
    way = "-states" * args.state_maps
    folder = args.work / f"{_names(source, target)}{way}-{nu}-{seed}-{args.steps}"
    settings = {"data": ["kvlingo_mlx.embedded.dialogues"], "facts": list(_told_facts(args))}
    stream = _stream(source, target, seed, args)
    done = Trainer(source, target, stream, plan, folder, settings=settings).run()
    return load_translator(done)


def _names(*models: LanguageModel) -> str:
    return "--".join(model.name.split("/")[-1] for model in models)


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
    if not args.steps:
        yield from _closed_forms(source, target, seed, args)
        return
    for nu in args.nu:
        name, crossing = _distilled_crossing(source, target, nu, seed, args)
        yield from _variants(name, crossing, args)


def _closed_forms(
    source: LanguageModel, target: LanguageModel, seed: int, args: argparse.Namespace
) -> Iterator[tuple[str, Maker]]:
    made: dict[str, Translator] = {}
    records = [{"messages": talk.conversation()} for talk in _talks(seed, args)]
    for nu in args.nu:
        made[f"inputs nu={nu}"] = fit(source, target, records, nu=nu)
        tried = [made[f"inputs nu={nu}"].config.assignment]
        for name, own in (("any kind", False), ("own kind, then any", True)):
            other = nearest(source, target, nu, own)
            if other not in tried:
                made[f"{name} nu={nu}"] = fit(source, target, records, assignment=other)
                tried.append(other)
    for name, translator in made.items():
        yield from _variants(name, Crossing(source, target, translator), args)
    layers = [[g for g in model.geometry.layers if g.recurrence] for model in (source, target)]
    rules, shapes = zip(
        *(([g.attention for g in each], [g.recurrence for g in each]) for each in layers),
        strict=True,
    )
    if set(rules[0]) != set(rules[1]) or not rules[0]:
        return
    for nu in args.nu:
        mapped = fit(source, target, records, nu=nu, state_maps=True)
        yield from _variants(f"states nu={nu}", Crossing(source, target, mapped), args)
    if shapes[0] == shapes[1]:
        mapped = fit(source, target, records, nu=1, state_maps=True)
        yield "states copied", Crossing(source, target, _copied(mapped))


def _copied(translator: Translator) -> Translator:
    """A translator with unit matrices in the place of its maps of states."""
    arrays = translator.floats()
    for name, array in arrays.items():
        if name.startswith("states."):
            arrays[name] = np.broadcast_to(np.eye(array.shape[-1], dtype=np.float32), array.shape)
    return build(translator.config, Weights.from_float32(arrays, "float32"))


def _talks(seed: int, args: argparse.Namespace) -> list[dialogues.Dialogue]:
    return list(dialogues.for_fitting(args.fit_dialogues, seed=seed))


def _distilled_crossing(
    source: LanguageModel, target: LanguageModel, nu: int, seed: int, args: argparse.Namespace
) -> tuple[str, Crossing]:
    """What ``--steps`` asks for, and its name; what ``--work`` has already is taken from there."""
    translator = distilled(source, target, nu, seed, args)
    what = "states" if args.state_maps else "inputs"
    return f"{what} nu={nu}, distilled", Crossing(source, target, translator)


def _variants(
    name: str, crossing: Crossing, args: argparse.Namespace
) -> Iterator[tuple[str, Maker]]:
    """A way as it is, beside its control, and parts of what it makes."""
    yield name, crossing
    yield f"{name}, shuffled", crossing.shuffled()
    models = crossing.source, crossing.target
    for layers in args.native_layers:
        own = conditions.translated(*models, crossing.translator, layers)
        yield f"{name}, {layers} native layers", own
    if crossing.target.geometry.recurrent:
        yield f"{name}, attention only", hidden(crossing, crossing.target, True)
        yield f"{name}, states only", hidden(crossing, crossing.target, False)


def of_return(pair: str, seed: int, args: argparse.Namespace) -> dict[str, dict]:
    """What the first model of a pair knows of a text whose second half the other one read."""
    first, second = (load(model_folder(name, args.zoo)) for name in pair.split(":"))
    made: dict[str, Maker] = {"prefix hidden": conditions.hidden(first)}
    for nu in args.nu:
        name, there = _distilled_crossing(first, second, nu, seed, args)
        _, back = _distilled_crossing(second, first, nu, seed, args)
        made |= {f"{name}, from the other": back, f"{name}, back": there_and_back(there, back)}
        control = there_and_back(there.shuffled(), back.shuffled())
        made[f"{name}, back, shuffled"] = control
    return _scored(f"{pair} and back, seed {seed}", first, _samples(first, args), made)


def of_pair(pair: str, seed: int, args: argparse.Namespace) -> dict[str, dict]:
    source, target = (load(model_folder(name, args.zoo)) for name in pair.split(":"))
    makers = {"prefix hidden": conditions.hidden(target), **dict(ways(source, target, seed, args))}
    return _scored(f"{pair}, seed {seed}", target, _samples(target, args), makers)


def of_parts(name: str, args: argparse.Namespace) -> dict[str, dict]:
    """What a model's own answers need."""
    model = load(model_folder(name, args.zoo))
    own = conditions.native(model)
    makers = {
        "states hidden": hidden(own, model, True),
        "attention hidden": hidden(own, model, False),
        "prefix hidden": conditions.hidden(model),
    }
    return _scored(name, model, _samples(model, args), makers)


def _samples(model: LanguageModel, args: argparse.Namespace) -> list[Any]:
    """The dialogues that are judged."""
    talks = dialogues.held_out(args.dialogues, facts=tuple(args.judged_facts or args.facts))
    return [quality.recall_sample(model, talk) for talk in talks]


def _scored(
    title: str, target: LanguageModel, samples: Sequence[Any], makers: dict[str, Maker]
) -> dict[str, dict]:
    scores = recalled.score(target, samples, makers)
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
    parser.add_argument("--judged-facts", type=int, nargs=2, help="default: as told in training")
    parser.add_argument("--state-maps", action="store_true", help="with --steps")
    parser.add_argument("--back", action="store_true", help="with --steps: there and back")
    parser.add_argument("--work", type=Path, default=Path("build/recurrent"))
    parser.add_argument("--json", help="append a record for each pair and seed to this file")
    args = parser.parse_args()
    if (args.state_maps or args.back) and not args.steps:
        parser.error("--state-maps and --back are of what is distilled; give --steps as well")
    done = []
    if args.json and Path(args.json).exists():
        lines = Path(args.json).read_text().splitlines()
        done = [json.loads(line)["config"] for line in lines]
    told = {"zoo", "work", "json", "pairs", "parts", "seeds"}
    usual = {"state_maps": False, "back": False, "judged_facts": None}  # as older records have it
    shared = {name: value for name, value in vars(args).items()
              if name not in told and (name not in usual or value != usual[name])}  # fmt: skip
    of_both = of_return if args.back else of_pair
    jobs: list[tuple[dict, Callable[[], dict]]] = [
        ({"parts": name}, lambda name=name: of_parts(name, args)) for name in args.parts
    ]
    jobs += [
        ({"pair": pair, "seed": seed}, lambda pair=pair, seed=seed: of_both(pair, seed, args))
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
