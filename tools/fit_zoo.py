"""Fit and self-distil the zoo's translators, and write them into the package.

    python tools/fit_zoo.py [--pairs tiny-qwen3-s:tiny-qwen3-l ...] [--nu 1] [--steps 600]

Every target layer reads the relative-depth band of ``nu`` source layers. The closed form (its
norm: ``--norm``) comes first; ``--steps 0`` keeps it. Dialogues are drawn apart from those
that judge quality. Work under way lies in WORK (``--work``); the same command resumes it. Maps
are stored in bfloat16, which halves the package. With ``--out`` they go to a folder of their
own: alternatives (``--kind``, ``--capture``, ``--head-wise``) that an evaluation compares. Models
that the package does not hold are looked for in ``--zoo``:

    python tools/fit_zoo.py --pairs tiny-gemma3-s:tiny-gemma3-l --facts 4 16 \
        --out tests/zoo/translators
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvlingo_mlx.cuda import model as torch_model
from kvlingo_mlx.embedded import TRANSLATORS, zoo, zoo_names
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.store.importing import import_translator
from kvlingo_mlx.training.distill import Report
from kvlingo_mlx.training.plan import MLP_STAGE1_RATE, TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from dialogue_stream import DialogueStream


def train(
    source: str, target: str, more: Path, facts: list[int] | None, turns: bool, plan: TrainingPlan,
    work: Path, out: Path,
) -> None:  # fmt: skip
    """One pair, both stages, into a folder of ``out``."""
    found = (more / "models" / source, more / "models" / target)
    folders = [path if path.exists() else zoo(path.name) for path in found]
    settings: dict[str, object] = {"data": ["kvlingo_mlx.embedded.dialogues"]}
    settings |= {"facts": facts} if facts else {}
    settings |= {"turns": True} if turns else {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    total = plan.fit_samples + plan.recipe.steps
    with Progress(*columns) as bar:
        task = bar.add_task(f"{source} to {target}", total=total)

        def show(stage: str, done: Report | int) -> None:
            if isinstance(done, int):
                bar.update(task, completed=done)
                return
            text = f"{source} to {target}: KL {done.kl:.4f}, held out {done.held_out:.4f}"
            bar.update(task, completed=plan.fit_samples + done.step, description=text)

        trained = Trainer(
            *(replace(torch_model.load(str(f), dtype=torch.float32), name=f.name) for f in folders),
            DialogueStream(
                load(folders[1]), plan.seed, facts, turns=turns, source=load(folders[0])
            ),
            plan, work / f"{source}--{target}", progress=show, settings=settings,
        ).run()  # fmt: skip
    folder = out / f"{source}--{target}"
    config = import_translator(str(trained), out=folder, force=True).config
    size = (folder / translator_folder.WEIGHTS_FILE).stat().st_size
    kl = config.provenance.get("held_out_kl")
    print(f"{folder.name}: {size / 1e6:.2f} MB, nu = {plan.nu}, held-out KL {kl}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = itertools.permutations(zoo_names(), 2)
    parser.add_argument("--pairs", nargs="+", default=[":".join(pair) for pair in names])
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--facts", type=int, nargs=2, metavar=("FEWEST", "MOST"))
    parser.add_argument("--turns", action="store_true", help="prefixes end at any question")
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--norm", default="frobenius")
    parser.add_argument("--kind", default="linear")
    parser.add_argument("--capture")
    parser.add_argument("--head-wise", action="store_true")
    parser.add_argument("--hidden", type=int, default=256, help="an MLP's width")
    parser.add_argument("--native-layers", type=int, default=0)
    parser.add_argument("--dialogues", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-2], help="the best one wins")
    parser.add_argument("--seed", type=int, default=0, help="of the dialogues, and of an MLP")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("build/zoo"))
    parser.add_argument("--out", type=Path, default=TRANSLATORS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(steps=args.steps, batch=args.batch, learning_rates=tuple(args.lr))
    first = Recipe(
        objective="reconstruction", steps=args.steps, batch=args.batch,
        learning_rates=(MLP_STAGE1_RATE,),
    )  # fmt: skip
    plan = TrainingPlan(
        kind=args.kind, capture=args.capture, head_mixing=not args.head_wise, hidden=args.hidden,
        nu=args.nu, norm=args.norm, fit_samples=args.dialogues, held_out=16, recipe=recipe,
        native_layers=args.native_layers, stage1_recipe=first, seed=args.seed,
    )  # fmt: skip
    for pair in args.pairs:
        train(*pair.split(":"), args.zoo, args.facts, args.turns, plan, args.work, args.out)


if __name__ == "__main__":
    main()
