"""The paper's made pairs at tiny size: models turned into latents, and models made from scratch.

    python benchmarks/made_pairs.py --pairs tiny-qwen3-s:tiny-qwen3-l --json FILE
    python benchmarks/made_pairs.py --as-is tiny-mla-s:tiny-mla-l --facts 8 16 --json FILE
    python benchmarks/made_pairs.py --as-is tiny-scratch-s:tiny-scratch-l \\
        tiny-scratch-s-sliced:tiny-scratch-l --maps mixing head-wise --json FILE

``--pairs``: the paper's comparison of latents with the keys and values that they compress (appendix
"MLA cache translation", its second table), on models that a CPU can fine-tune:

1. ``tools/convert_mla.py`` converts each model of a pair at every one of ``--ranks``.
   ``tools/recover_mla.py`` gives each conversion, and the model as it was, the same fine-tune:
   the paper's, but for a higher rate, and for losses on six answers instead of the last one.
2. Each model is scored alone, before and after that: recall, and KL(original || model).
3. Between two conversions of one rank ("latents"), and between the two fine-tuned models that were
   not converted ("keys and values"), translators are fitted and self-distilled by one recipe, in
   both directions, for each seed of the data.
4. They are scored by recall and by KL to the target's own cache, with the prefix hidden and with
   every translator's layers shuffled as controls.

``--as-is``: pairs whose models are translated as they are, without 1 and 2, by each of ``--maps``.
Head-wise maps stay within a head. Head-wise MLPs have as many parameters as mixing maps, or four
times as many; they have no closed form, and begin with ``--mlp-steps`` of reconstruction. First the
caches themselves are compared: the R2 of linear maps and of MLPs, and how far heads correspond
(appendices "Cache linearity and rank, per layer", "Head alignment in released Qwen3 pairs").
``tools/pretrain.py`` makes the zoo's MLA pair, the pair by the paper's recipe, and a small model
that is sliced out of the large one.

Rank and width of the rotary key are in numbers: the zoo's small model has a full rank of 128, keys
of 128 and values of 128. Models and translators lie in ``--work``. What is there is not made again,
and a run that was stopped goes on. One record for each model and rank, and for each pair, rank,
kind of map, direction and seed; those that FILE has already are left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from dialogue_stream import DialogueStream, for_distilling
from quality import model_folder, summary

import benchmarks.paper.converted_mla.on_mlx  # noqa: F401  (registers the family)
from benchmarks.paper.analysis.report import Settings, analyze
from benchmarks.paper.evaluation import recalled
from benchmarks.paper.evaluation.recalled import Score
from benchmarks.paper.reproducing.tables import LARGE_TO_SMALL, WAYS
from kvlingo_mlx.caches.memory import cache_bytes
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.continuation import RecallSample, per_token, predicted
from kvlingo_mlx.format.fingerprints import files_fingerprint
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.training.checkpoints import check_settings
from kvlingo_mlx.training.plan import TrainingPlan, make_config, reconstruction
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, pair_of
from kvlingo_mlx.training.trainer import Trainer
from kvlingo_mlx.translators.base import Translator

TOOLS = Path(__file__).parents[1] / "tools"
LATENTS, PLAIN, AS_IS = "latents", "keys and values", "as they are"
FEWEST = 4  # facts of a dialogue that something is made of, unless fewer are judged
RECOVERED_ON = 10_007  # the seed of the fine-tunes' dialogues; no translator is trained on these
HELD_OUT = 16  # dialogues by which a fine-tune or a training tells how far it is
LONGEST = 1024  # tokens of a fine-tune's dialogue
# What records say of their settings: all of them, those of models and of translators made here.
SCORED = ("facts", "dialogues")
MADE = ("rotary", "calibration", "recovery_steps", "recovery_rate", "exchanges")
TRAINED = ("nu", "fit_dialogues", "steps", "batch", "lr")
OF_MLPS = ("mlp_steps", "mlp_lr")
COMPARED = ("facts", "documents", "tokens")
MIXING, HEAD_WISE = "mixing", "head-wise"
MLPS = {"head-wise-mlp": 1, "head-wise-mlp-x4": 4}  # parameters, in those of mixing maps
MAPS = (MIXING, HEAD_WISE, *MLPS)
# What names of folders do not say of the models in them.
KEPT = ("rotary", "calibration", "recovery_rate", "exchanges", "facts")
Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def told_facts(args: argparse.Namespace) -> tuple[int, int]:
    """The least and the most facts of a dialogue that something is made of."""
    return min(FEWEST, args.facts[0]), args.facts[1]


# ---- models ------------------------------------------------------------------------------


def tool(name: str, *words: Any) -> None:
    """Run ``tools/NAME.py``; what stops this program stops the tool, which keeps its work."""
    command = [sys.executable, TOOLS / f"{name}.py", *words]
    # A session of its own: Ctrl-C would reach it twice, and the second time it keeps nothing.
    child = subprocess.Popen(list(map(str, command)), start_new_session=True)
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if status:
        raise SystemExit(f"tools/{name}.py failed with status {status}; its message is above")


def named(folder: Path) -> str:
    """A model's name, with what tells it from another of that name, or from what it was before.

    Raises:
        ValueError: A file of its weights is damaged.
    """
    return f"{folder.name}-{files_fingerprint(folder)[:8]}"


class Models:
    """The models of a run, each made when it is asked for first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work / "models"

    def original(self, name: str) -> Path:
        """The model as it is.

        Raises:
            ValueError: There is none; the message says how one is made.
        """
        try:
            return model_folder(name, self.args.zoo)
        except ValueError as error:
            raise ValueError(
                f"{error}; tools/pretrain.py makes those that it knows: python tools/pretrain.py "
                f"{name} --out {self.args.zoo / 'models' / name}"
            ) from None

    def converted(self, name: str, rank: int) -> Path:
        """The model with latents, not yet fine-tuned."""
        args, start = self.args, self.original(name)
        out = self.work / f"{named(start)}-rank-{rank}"
        if not out.exists():
            sequences, length = args.calibration
            talks = dialogues.for_fitting(sequences * length // 50, facts=told_facts(args))
            data = self._written("calibration", (talk.conversation() for talk in talks))
            tool(
                "convert_mla", start, out, "--data", data, "--rank", rank,
                "--rotary", args.rotary, "--sequences", sequences, "--length", length,
                "--work", self.work / f"{named(start)}.calibration",
            )  # fmt: skip
        return out

    def recovered(self, name: str, rank: int | None) -> Path:
        """The converted model, or without a rank the original, after the fine-tune."""
        args = self.args
        start = self.original(name) if rank is None else self.converted(name, rank)
        out = self.work / f"{named(start)}-recovered-{args.recovery_steps}"
        if not out.exists():
            count = args.recovery_steps + HELD_OUT
            told = (
                for_distilling(i, seed=RECOVERED_ON, facts=told_facts(args)) for i in range(count)
            )
            data = self._written(f"recovery-{count}", (talk.conversation() for talk in told))
            tool(
                "recover_mla", start, self.original(name), out, "--data", data,
                "--steps", args.recovery_steps, "--rate", args.recovery_rate,
                "--exchanges", args.exchanges, "--tokens", LONGEST, "--held-out", HELD_OUT,
                "--keep-every", 100, "--validate-every", 1 << 30,
            )  # fmt: skip
        return out

    def _written(self, name: str, talks: Iterable[list[dict[str, str]]]) -> Path:
        """Conversations as a JSONL file."""
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.work / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        return path

    def check(self) -> None:
        """Refuse (ValueError) what would mix models that were made differently."""
        path = self.work / "settings.json"
        settings = {name: getattr(self.args, name) for name in KEPT}
        if path.exists():
            check_settings(self.args.work, json.loads(path.read_text()), settings)
        self.work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")


def alone(original: LanguageModel, model: LanguageModel, samples: Sequence[RecallSample]) -> Score:
    """A model's own answers: recall, and KL(original || model) over each continuation."""
    hits: list[bool] = []
    kls, value_kls = [], []
    for sample in samples:
        first, other = (list(predicted(m, conditions.native(m), sample)) for m in (original, model))
        found = per_token(first, other, sample.continuation)
        hits += found.hits(sample)
        kls.append(float(found.kl.mean()))
        value_kls.append(float(found.kl[[i for row in sample.recalled for i in row]].mean()))
    return Score(tuple(hits), tuple(kls), tuple(value_kls))


def of_model(name: str, rank: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """One model before and after its fine-tune, beside the original."""
    models = Models(args)
    folders = {"original": models.original(name)}
    if rank is not None:
        folders["converted"] = models.converted(name, rank)
    folders["recovered"] = models.recovered(name, rank)
    loaded = {stage: load(folder) for stage, folder in folders.items()}
    samples = _samples(loaded["original"], args)
    found = {
        stage: summary(alone(loaded["original"], model, samples)) for stage, model in loaded.items()
    }
    _show(name if rank is None else f"{name}, rank {rank}", found)
    sizes = {stage: cache_bytes(model, 1) for stage, model in loaded.items()}
    return {"scores": found, "bytes_per_token": sizes}


# ---- translators -------------------------------------------------------------------------


def recipe_of(steps: int, rates: Sequence[float], args: argparse.Namespace) -> Recipe:
    """Stage 2; of several rates the best one wins."""
    if not steps:
        return Recipe(steps=0)
    return Recipe(steps=steps, batch=args.batch, learning_rates=tuple(rates))


def plan_of(pair: Pair, maps: str, seed: int, steps: int, args: argparse.Namespace) -> TrainingPlan:
    """How a translator is made; with no ``steps`` it stays the closed form."""
    plan = TrainingPlan(
        nu=args.nu, head_mixing=maps == MIXING, fit_samples=args.fit_dialogues, held_out=HELD_OUT,
        seed=seed, recipe=recipe_of(steps, args.lr, args),
    )  # fmt: skip
    if maps not in MLPS:
        return plan
    recipe = recipe_of(steps, args.mlp_lr, args)
    first = reconstruction(recipe, tuple(args.mlp_lr), args.mlp_steps)
    hidden = hidden_width(pair, args.nu, MLPS[maps])
    return replace(plan, kind="mlp", hidden=hidden, recipe=recipe, stage1_recipe=first)


def hidden_width(pair: Pair, nu: int, times: int) -> int:
    """The hidden units of a head's MLP, for ``times`` the weights of a mixing map.

    A mixing map of widths S and T has nu S T of them; each hidden unit, of all heads, nu S + T, if
    there are as many heads on either side. Of fewer source heads each is read several times.
    """
    source, target = (model.geometry.layers[0] for model in (pair.source, pair.target))
    read = nu * source.width("keys") * (target.kv_heads // source.kv_heads)
    mixing = nu * source.width("keys") * target.width("keys")
    return max(1, round(times * mixing / (read + target.width("keys"))))


def trained(
    pair: Pair, plan: TrainingPlan, data: DialogueStream, args: argparse.Namespace,
    fit: ClosedForm | None = None,
) -> Translator:  # fmt: skip
    """The translator of a plan; one without steps is its closed form."""
    names = f"{pair.source.name}--{pair.target.name}{'' if plan.head_mixing else '-' + HEAD_WISE}"
    names += f"-mlp-{plan.hidden}" if plan.kind == "mlp" else ""
    recipe, how = plan.recipe, "closed-form"
    if recipe.steps:
        rates = "-".join(map(str, recipe.learning_rates))
        how = f"steps-{recipe.steps}-of-{recipe.batch}-lr-{rates}"
    name = f"{names}-nu-{plan.nu}-of-{plan.fit_samples}-seed-{plan.seed}-{how}"
    settings = {"data": ["kvlingo_mlx.embedded.dialogues"], "facts": args.facts}
    done = Trainer(
        pair.source, pair.target, data, plan, args.work / "translators" / name,
        settings=settings, start=fit and fit.result,
    ).run()  # fmt: skip
    return load_translator(done)


def translators(
    source: LanguageModel, target: LanguageModel, seed: int, maps: str, args: argparse.Namespace
) -> Iterator[tuple[str, Translator]]:
    """The closed form of a pair, if its maps have one, and what stage 2 makes of them."""
    data = DialogueStream(target, seed, told_facts(args), source=source)
    pair = pair_of(source, target)
    plan = plan_of(pair, maps, seed, args.steps, args)
    if maps in MLPS:
        yield "self-distilled", trained(pair, plan, data, args)
        return
    samples = [data.sample(number) for number in range(args.fit_dialogues)]
    fit = ClosedForm(make_config(source, target, plan), pair, lambda: samples, plan.norm)
    fit.run()
    unrefined = plan_of(pair, maps, seed, 0, args)
    yield "closed form", trained(pair, unrefined, data, args, fit)
    if args.steps:
        yield "self-distilled", trained(pair, plan, data, args, fit)


def both(own: dict[str, Any], args: argparse.Namespace) -> tuple[LanguageModel, LanguageModel]:
    """The source and the target of a record."""
    models, names = Models(args), own["pair"].split(":")
    if own["direction"] == LARGE_TO_SMALL:
        names.reverse()
    if own.get("way", AS_IS) == AS_IS:
        folders = [models.original(name) for name in names]
    else:
        folders = [models.recovered(name, own["rank"]) for name in names]
    source, target = (replace(load(folder), name=named(folder)) for folder in folders)
    return source, target


def of_caches(own: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What the caches of a pair have in common, before any translator."""
    source, target = both(own, args)
    settings = Settings(documents=args.documents, tokens=args.tokens, cka=False)
    talks = dialogues.for_fitting(args.documents, facts=told_facts(args))
    found = analyze(source, target, ({"messages": t.conversation()} for t in talks), settings)
    print(f"\n{source.name} to {target.name}, caches")
    for side, each in found.summary.items():
        print(f"  {side:6s} R2 {each.linear:.3f}, of an MLP {each.mlp:.3f}", flush=True)
    sides = {
        side: {"linear": each.linear, "affine": each.affine, "mlp": each.mlp, "rho": each.rho}
        for side, each in found.summary.items()
    }
    heads = {
        side: {"diagonal": each.diagonal, "null": list(each.null), "p": each.p}
        for side, each in found.heads.get("closed form", {}).items()
    }
    return {"sides": sides, "heads": heads, "scored": found.scored, "notes": found.notes}


def of_pair(own: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What the translators of one way, direction and seed keep of the target's answers."""
    source, target = both(own, args)
    makers = {"prefix hidden": conditions.hidden(target)}
    for name, translator in translators(source, target, own["seed"], own["maps"], args):
        control = conditions.shuffled(translator)
        makers[name] = conditions.translated(source, target, translator)
        makers[f"{name}, shuffled"] = conditions.translated(source, target, control)
    scores = recalled.score(target, _samples(target, args, source), makers)
    found = {name: summary(score) for name, score in scores.items()}
    _show(f"{source.name} to {target.name}, {own['maps']}, seed {own['seed']}", found)
    sizes = {"source": cache_bytes(source, 1), "target": cache_bytes(target, 1)}
    return {"scores": found, "bytes_per_token": sizes}


def _samples(
    model: LanguageModel, args: argparse.Namespace, source: LanguageModel | None = None
) -> list[RecallSample]:
    talks = dialogues.held_out(args.dialogues, facts=tuple(args.facts))
    return [quality.recall_sample(model, talk, source) for talk in talks]


def _show(title: str, scores: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    for name, score in scores.items():
        print(f"  {name:26s} recall {score['hits']:.3f}   KL {score['kl']:.4f}", flush=True)


# ---- the table ---------------------------------------------------------------------------


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """What the records are of: models alone, then a whole table for each seed."""

    def told(names: Sequence[str], **own: Any) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names} | own

    ranks = (*args.ranks, None)
    for name in dict.fromkeys(name for pair in args.pairs for name in pair.split(":")):
        for rank in ranks:
            own = told((*SCORED, *MADE), model=name, rank=rank)
            yield own, lambda name=name, rank=rank: of_model(name, rank, args)
    for pair in args.as_is:
        for direction in WAYS:
            own = told(COMPARED, pair=pair, direction=direction)
            yield own, lambda own=own: of_caches(own, args)
    ways = [
        (pair, PLAIN if rank is None else LATENTS, rank, MIXING)
        for pair in args.pairs
        for rank in ranks
    ]
    ways += [(pair, AS_IS, None, maps) for pair in args.as_is for maps in args.maps]
    for seed in args.seeds:
        for pair, way, rank, maps in ways:
            own = told((*SCORED, *TRAINED, *(() if way == AS_IS else MADE)), seed=seed)
            own |= {"pair": pair, "way": way, "rank": rank, "maps": maps}
            own |= {"mlp": told(OF_MLPS)} if maps in MLPS else {}
            for direction in WAYS:
                whole = own | {"direction": direction}
                yield whole, lambda own=whole: of_pair(own, args)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="*", default=[], metavar="SMALL:LARGE")
    parser.add_argument("--as-is", nargs="*", default=[], metavar="SMALL:LARGE")
    parser.add_argument("--maps", nargs="+", choices=MAPS, default=[MIXING], help="of --as-is")
    parser.add_argument("--documents", type=int, default=64, help="that caches are compared on")
    parser.add_argument("--tokens", type=int, default=16_384, help="of all documents together")
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64], help="of the latents")
    parser.add_argument("--rotary", type=int, default=32, help="the width of the rotary key")
    parser.add_argument(
        "--calibration", type=int, nargs=2, default=[64, 512], metavar=("SEQUENCES", "TOKENS")
    )
    parser.add_argument("--recovery-steps", type=int, default=400, help="of a model's fine-tune")
    parser.add_argument("--recovery-rate", type=float, default=5e-4)
    parser.add_argument("--exchanges", type=int, default=6, help="in its losses; the paper has 1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the data")
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--fit-dialogues", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600, help="of self-distillation")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-2], help="the best one wins")
    parser.add_argument("--mlp-steps", type=int, default=600, help="of reconstruction")
    parser.add_argument(
        "--mlp-lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="of both stages of MLPs"
    )
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 28])
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--work", type=Path, default=Path("build/made-pairs"))
    parser.add_argument("--json", help="append the records to this file")
    args = parser.parse_args()
    try:
        if not args.pairs + args.as_is:
            raise ValueError("no pair is given; name one, as SMALL:LARGE, by --pairs or --as-is")
        if not args.steps and (mlps := [maps for maps in args.maps if maps in MLPS]):
            raise ValueError(f"{mlps[0]} has no closed form; give --steps 1 or more")
        for pair in args.pairs + args.as_is:
            if len(names := pair.split(":")) != 2:
                raise ValueError(f"{pair} is not SMALL:LARGE")
            for name in names:
                named(Models(args).original(name))
        if args.pairs:
            Models(args).check()
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    done = []
    if args.json and Path(args.json).exists():
        lines = Path(args.json).read_text().splitlines()
        done = [json.loads(line)["config"] for line in lines]
    for own, job in jobs(args):
        if own in done:
            continue
        started = time.perf_counter()
        results = job()
        print(f"  in {time.perf_counter() - started:.0f} s", flush=True)
        if args.json:
            measure.append_json(args.json, measure.record("made_pairs", own, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
