"""Fit a translator on your own text, see what it is worth, and choose its native layers.

    python examples/fit_and_tune.py --out my-pair
    python examples/fit_and_tune.py --source Qwen/Qwen3-0.6B --target Qwen/Qwen3-1.7B \\
        --data chats.jsonl --out 0.6b-to-1.7b --max-kl 0.01

Without ``--data`` the embedded models' own kind of dialogues is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import dialogues


def main(arguments: list[str] | None = None) -> None:
    """Fit, save, tune; then answer a question with what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="tiny-qwen3-s", help="a folder or Hub id")
    parser.add_argument("--target", default="tiny-qwen3-l", help="a folder or Hub id")
    parser.add_argument(
        "--data", type=Path, help='JSON lines of {"messages": [...]} or {"text": ...}'
    )
    parser.add_argument("--nu", type=int, default=1, help="source layers per target layer")
    parser.add_argument("--max-kl", type=float, default=0.01, help="nats per token that will do")
    parser.add_argument("--limit", type=int, default=8, help="conversations to tune on")
    parser.add_argument("--out", type=Path, default=Path("my-pair"))
    given = parser.parse_args(arguments)
    source, target = kv.load(given.source), kv.load(given.target)
    records = given.data or [
        {"messages": talk.conversation()} for talk in dialogues.for_fitting(24 * given.nu)
    ]
    translator = kv.fit(source, target, records, nu=given.nu)
    print(f"fitted {translator.num_parameters:,} numbers: {translator.save(given.out)}")
    pair = ["--source", given.source, "--target", given.target, "--translator", str(given.out)]
    goal = ["--max-kl", str(given.max_kl), "--limit", str(given.limit)]
    quick = ["-c", "trials=1"]
    if status := run(["tune", *pair, *goal, *quick, "--out", f"{given.out}-scores.jsonl"]):
        raise SystemExit(status)
    tuned = kv.load_translator(given.out)
    print(f"native layers: {tuned.config.native_layers} of {len(tuned.config.target.layers)}")
    question = [{"role": "user", "content": "The home of Paul is Oslo. What is the home of Paul?"}]
    print(kv.generate(source, target, question, translator=tuned, enable_thinking=False))


if __name__ == "__main__":
    main()
