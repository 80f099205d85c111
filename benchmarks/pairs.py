"""What ``kvlingo-mlx pair`` reaches from nothing, beside the shipped translators and native.

    python benchmarks/pairs.py --minutes 5 15 45 --seeds 0 1 2 --room build/pairs --json FILE

Each translator is made by the verb, in a process of its own, from dialogues in a JSONL file (the
zoo's models know no other language). Then it is judged on dialogues that nothing has seen, with
its native layers, beside the target's own cache, the shipped translator, the prefix hidden and
its layers shuffled. One JSON line each; those that FILE has already are left out, so the same
command goes on where it was stopped. With ``--max-kl`` native layers are chosen for a copy of each
translator by ``kvlingo-mlx tune``; what an earlier run has made in the room is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import quality as tables
from dialogue_stream import for_distilling

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.evaluation import recalled
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.training.watch import lowest

PAIRS = ("tiny-qwen3-s:tiny-qwen3-l", "tiny-qwen3-s:tiny-qwen3-moe")
TALKS = 4000  # dialogues in the file


def made(pair: str, minutes: float, seed: int, args: argparse.Namespace) -> tuple[Path, dict]:
    """The translator that the verb makes, and what it tells."""
    names = pair.split(":")
    place = args.room / f"{'--'.join(names)}-{minutes:g}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    if (place / "facts.json").exists():
        return place / "translator", json.loads((place / "facts.json").read_text())
    talks = (for_distilling(n, seed=seed) for n in range(TALKS))
    data, told = place / "dialogues.jsonl", place / "told.jsonl"
    lines = (json.dumps({"messages": talk.conversation()}) for talk in talks)
    data.write_text("\n".join(lines) + "\n")
    words = [
        *("pair", *(str(tables.model_folder(name, args.zoo)) for name in names)),
        *("--data", str(data), "--minutes", str(minutes), "--seed", str(seed)),
        *("--out", str(place / "translator"), "--json", str(told)),
    ]
    began = time.perf_counter()
    # A first use of its own: nothing in the store, no timings.
    environment = {**os.environ, "KVLINGO_HOME": str(place / "home")}
    subprocess.run(
        [sys.executable, "-m", "kvlingo_mlx.cli", *words],
        check=True, env=environment, stdout=(place / "log.txt").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    facts = json.loads(told.read_text().splitlines()[-1])["results"]
    facts["seconds"] = round(time.perf_counter() - began, 1)
    (place / "facts.json").write_text(json.dumps(facts))
    return place / "translator", facts


def tuned(pair: str, folder: Path, args: argparse.Namespace) -> Path:
    """A copy of a translator with the native layers that the KL asked for takes."""
    copy = folder.with_name(f"tuned-{args.max_kl:g}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    names = [str(tables.model_folder(name, args.zoo)) for name in pair.split(":")]
    words = [
        *("tune", "--source", names[0], "--target", names[1], "--translator", str(copy)),
        *("--max-kl", str(args.max_kl), "-c", "trials=1"),
        *("--out", str(copy.with_suffix(".items.jsonl"))),
    ]
    subprocess.run(
        [sys.executable, "-m", "kvlingo_mlx.cli", *words],
        check=True, stdout=copy.with_suffix(".txt").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    return copy


def judge(pair: str, folder: Path, args: argparse.Namespace) -> dict[str, dict]:
    """The recall and the KL of a translator and of what it is held against."""
    names = pair.split(":")
    ends = [load(tables.model_folder(name, args.zoo)) for name in names]
    talks = dialogues.held_out(args.dialogues, seed=7)
    samples = [quality.recall_sample(ends[1], talk, ends[0]) for talk in talks]
    found = load_translator(folder)
    makers = {
        "native": conditions.native(ends[1]),
        "prefix hidden": conditions.hidden(ends[1]),
        "pair": conditions.translated(*ends, found, None),
        "pair, shuffled": conditions.translated(*ends, conditions.shuffled(found)),
    }
    for root in (TRANSLATORS, args.zoo / "translators"):
        if (shipped := root / "--".join(names)).exists():
            makers["shipped"] = conditions.translated(*ends, load_translator(shipped))
    scores = recalled.score(ends[1], samples, makers)
    return {name: tables.summary(score) for name, score in scores.items()}


def curve_of(facts: dict) -> list[list[float]]:
    """Step and lowest held-out KL of each look."""
    return [[look["step"], lowest(look["held_out"])] for look in facts["curve"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--minutes", type=float, nargs="+", default=[5, 15, 45])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-kl", type=float, help="then tune native layers to this KL")
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--room", type=Path, default=Path("build/pairs"))
    parser.add_argument("--json", help="append a record for each translator to this file")
    args = parser.parse_args()
    there = (
        Path(args.json).read_text().splitlines() if args.json and Path(args.json).exists() else ()
    )
    done = [json.loads(line)["config"] for line in there]
    for minutes in args.minutes:
        for seed, pair in ((seed, pair) for seed in args.seeds for pair in args.pairs):
            config = {
                "pair": pair, "minutes": minutes, "seed": seed, "max_kl": args.max_kl,
                "dialogues": args.dialogues,
            }  # fmt: skip
            if config in done:
                continue
            folder, facts = made(pair, minutes, seed, args)
            folder = folder if args.max_kl is None else tuned(pair, folder, args)
            scores = judge(pair, folder, args)
            told = {name: facts[name] for name in ("seconds",)}
            told |= {"curve": curve_of(facts), "scores": scores}
            told["native_layers"] = load_translator(folder).config.native_layers
            told["form"] = {
                name: facts["provenance"].get(name)
                for name in ("longest_prefix", "steps", "learning_rate", "tokens")
            }
            print(f"{pair}, {minutes:g} minutes, seed {seed}, {facts['seconds']:.0f} s: ", end="")
            print(", ".join(f"{n} {s['hits']:.3f} (KL {s['kl']:.4f})" for n, s in scores.items()),
                  flush=True)  # fmt: skip
            if args.json:
                measure.append_json(args.json, measure.record("pairs", config, told))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
