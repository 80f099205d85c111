"""Recall and continuation KL of translators between the zoo's models on held-out dialogues.

    python benchmarks/quality.py --nu --json FILE            # the package's own translators
    python benchmarks/quality.py --nu 1 2 4 --json FILE      # closed forms fitted here as well
    python benchmarks/quality.py --zoo tests/zoo --facts 8 16 --pairs tiny-gemma3-s:tiny-gemma3-l \
        --nu 1 2 4 --norms frobenius --assignments relative_depth r2 greedy --json FILE
    python benchmarks/quality.py --nu 1 2 --capture post_rope --head-wise --json FILE  # and folded

For every pair: the target's native cache, the self-distilled translator if there is one, closed
forms under the norms and with the assignments given at each nu, and the controls: the prefix
hidden, and every translator with its layers shuffled or, between two tokenizers, with its keys
rotated where their entries stand. Post-RoPE translators are folded as well: the target decodes
from the source's own cache. Only the first asking of each fact is
scored; standard errors are over questions for recall and over dialogues for KL. ``--zoo`` names a
folder with more models and translators than the package's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.evaluation import recalled
from benchmarks.paper.evaluation.baselines import canonical, folded
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.format.translator_config import unfoldable
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.translators.base import Translator

PAIRS = (
    "tiny-qwen3-s:tiny-qwen3-l",
    "tiny-qwen3-l:tiny-qwen3-s",
    "tiny-qwen3-s:tiny-qwen3-moe",
    "tiny-qwen3-l:tiny-qwen3-moe",
    "tiny-qwen3-moe:tiny-qwen3-s",
    "tiny-qwen3-moe:tiny-qwen3-l",
)
NORMS = ("frobenius", "attention_mass")


def run_pair(pair: str, args: argparse.Namespace) -> dict[str, dict]:
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    talks = dialogues.held_out(args.dialogues, facts=tuple(args.facts))
    samples = [quality.recall_sample(target, talk, source) for talk in talks]
    makers = {"prefix hidden": conditions.hidden(target)}
    for name, translator in translators(names, source, target, args):
        control = conditions.shuffled(translator)
        makers[name] = conditions.translated(source, target, translator)
        makers[f"{name}, shuffled"] = conditions.translated(source, target, control)
        if translator.config.alignment is not None:
            makers[f"{name}, canonical positions"] = canonical(makers[name])
        if unfoldable(translator.config) is None:
            makers[f"{name}, folded"] = folded(source, target, translator)
            makers[f"{name}, shuffled, folded"] = folded(source, target, control)
    scores = recalled.score(target, samples, makers)
    lengths = [len(sample.prefix) for sample in samples]
    print(
        f"\n{pair}: {len(samples)} dialogues, prefixes of {min(lengths)} to {max(lengths)} tokens"
    )
    for name, score in scores.items():
        print(f"  {name:28s} recall {mean(score.hits)}   KL {mean(score.kl)}   "
              f"KL on values {mean(score.value_kl)}")  # fmt: skip
    return {name: summary(score) for name, score in scores.items()}


def translators(
    names: Sequence[str], source: LanguageModel, target: LanguageModel, args: argparse.Namespace
) -> Iterator[tuple[str, Translator]]:
    for root in (TRANSLATORS, args.zoo / "translators"):
        if (root / "--".join(names)).exists():
            yield "self-distilled", load_translator(root / "--".join(names))
    talks = dialogues.for_fitting(args.fit_dialogues, facts=(4, args.facts[1]))
    records = [{"messages": talk.conversation()} for talk in talks]
    for nu, norm, assignment in itertools.product(args.nu, args.norms, args.assignments):
        name = norm if args.assignments == ["relative_depth"] else f"{norm} {assignment}"
        fitted = fit(
            source, target, records, norm=norm, nu=nu, assignment=assignment,
            capture=args.capture, head_mixing=not args.head_wise,
        )  # fmt: skip
        yield f"{name} nu={nu}", fitted


def model_folder(name: str, more: Path) -> Path:
    """A model of the zoo ``more``, a model's folder, or else a model of the package."""
    for folder in (more / "models" / name, Path(name)):
        if (folder / "config.json").exists():
            return folder
    return zoo(name)


def mean(values: tuple) -> str:
    return f"{np.mean(values):.3f} +- {standard_error(values):.3f}"


def standard_error(values: tuple) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def summary(score: recalled.Score) -> dict[str, float | int]:
    out: dict[str, float | int] = {"questions": len(score.hits), "dialogues": len(score.kl)}
    for name in ("hits", "kl", "value_kl"):
        values = getattr(score, name)
        out |= {name: float(np.mean(values)), f"{name}_se": standard_error(values)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--nu", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--norms", nargs="+", default=list(NORMS))
    parser.add_argument("--assignments", nargs="+", default=["relative_depth"])
    parser.add_argument("--capture", help="of closed forms: post_rope can be folded, and is")
    parser.add_argument("--head-wise", action="store_true", help="closed forms, head by head")
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 28], metavar=("FEWEST", "MOST"))
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--fit-dialogues", type=int, default=400)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    results = {pair: run_pair(pair, args) for pair in args.pairs}
    print(measure.machine_line())
    if args.json:
        names = ("nu", "norms", "assignments", "capture", "head_wise", "facts", "dialogues",
                 "fit_dialogues")  # fmt: skip
        config = {name: getattr(args, name) for name in names}
        measure.append_json(args.json, measure.record("quality", config, results))


if __name__ == "__main__":
    main()
