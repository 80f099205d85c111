"""Ten turns of recall by two models of the zoo that alternate: which strategy still remembers.

    python benchmarks/conversations.py --json FILE
    python benchmarks/conversations.py --no-verbatim --json FILE   # turns as the template has them

A dialogue states 12 to 20 facts; then come ten questions, one a turn, no fact asked twice. The
models take turns at answering, in both orders; answers are decoded greedily and stay in the
conversation, right or wrong. A turn counts if the value is a word of what the answer says after
"is": before it stands the name that was asked about, and some people are their own friends.
Strategies are those of ``Conversation``. Beside them, alternated as well: ``one switch`` lets the
model that answers first answer every turn, and asks the other one at even turns on a branch, so
that its answers there come after the first switch of the conversation and what they lose is lost
by one translation; ``shuffled`` has every translator's maps at wrong layers; ``facts hidden``
leaves the facts out of the conversation, so what it recalls is what can be guessed.

The facts are read once, by the model that answers first. The other one only ever sees them
translated, and answers every second turn, the tenth among them in either order.

Reasoning is off: each answer's header holds an empty think block, which the zoo's template (like
Qwen3's) strips from earlier turns. With ``--no-verbatim`` every answer is therefore read anew by
the models at its new positions, and the translated spans are less than what was written. Both
forms of earlier turns are in the zoo's training data, half of the answers each, and re-prefill
recalls alike from both; ``verbatim``, the default, is the protocol in which every token that a
model wrote reaches the other one by translation.

One JSON line a seed (of the dialogues), with every hit: order, condition, dialogue, turn.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx import Conversation
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.embedded.dialogues import Dialogue
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.translators.base import Translator

CONDITIONS = ("reprefill", "alternated", "one switch", "naive", "shuffled", "facts hidden")
NOT_RECORDED = ("json", "seeds", "translators")  # the command has them
STRATEGIES = ("reprefill", "alternated", "naive")


@dataclass(frozen=True)
class Pair:
    """Two models by name, their translators in both directions, and the same ones shuffled."""

    models: dict[str, LanguageModel]
    translators: Sequence[Translator]
    shuffled: Sequence[Translator]

    @classmethod
    def load(cls, names: Sequence[str], root: Path) -> Pair:
        folders = (root / "--".join(pair) for pair in itertools.permutations(names))
        translators = [load_translator(folder) for folder in folders]
        wrong = [conditions.shuffled(translator) for translator in translators]
        return cls({name: load(zoo(name)) for name in names}, translators, wrong)


def begin(pair: Pair, condition: str, verbatim: bool) -> Conversation:
    """An empty conversation; not eager, since accuracy does not depend on when one translates."""
    return Conversation(
        pair.models,
        pair.shuffled if condition == "shuffled" else pair.translators,
        switching=condition if condition in STRATEGIES else "alternated",
        eager=False,
        enable_thinking=False,
        verbatim=verbatim,
    )


def run(
    pair: Pair, talk: Dialogue, order: Sequence[str], condition: str, args: argparse.Namespace
) -> list[int]:
    """For every turn of a dialogue whether its answer was right; ``order`` is who answers."""
    conversation = begin(pair, condition, args.verbatim)
    told = [] if condition == "facts hidden" else list(talk.messages[:-1])
    hits = []
    for turn, (fact, question) in enumerate(zip(talk.asked, talk.questions, strict=True)):
        new = [*told, {"role": "user", "content": question}] if turn == 0 else question
        asked = conversation
        if condition == "one switch" and turn % 2:
            asked = conversation.branch()
            conversation.reply(order[0], new, max_tokens=args.max_tokens)
        answer = asked.reply(order[turn % 2], new, max_tokens=args.max_tokens)
        hits.append(int(fact.value in re.findall(r"\w+", answer.partition(" is ")[2])))
    return hits


def run_seed(pair: Pair, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    talks = list(
        dialogues.held_out(
            args.dialogues, seed=seed, facts=tuple(args.facts), questions=args.questions
        )
    )
    hits: dict[str, dict[str, list[list[int]]]] = {}
    for order in itertools.permutations(pair.models):
        found = hits[f"{order[0]} first"] = {name: [] for name in args.conditions}
        for talk, name in itertools.product(talks, args.conditions):
            found[name].append(run(pair, talk, order, name, args))
        report(f"seed {seed}, {order[0]} first", found, time.perf_counter() - started)
    return {"seed": seed, "hits": hits, "seconds": round(time.perf_counter() - started)}


def report(title: str, found: dict[str, list[list[int]]], seconds: float) -> None:
    print(f"{title}, {seconds:.0f} s so far", flush=True)
    for name, rows in found.items():
        print(f"  {name:14s}", *(f"{m:.2f}" for m in np.mean(rows, axis=0)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny-qwen3-s:tiny-qwen3-l")
    parser.add_argument("--translators", type=Path, default=TRANSLATORS, help="their folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dialogues", type=int, default=32, help="a seed")
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 20], metavar=("FEWEST", "MOST"))
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--conditions", nargs="+", default=CONDITIONS, choices=CONDITIONS)
    parser.add_argument("--verbatim", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", help="append a record a seed to this file")
    args = parser.parse_args()
    pair = Pair.load(args.pair.split(":"), args.translators)
    for seed in args.seeds:
        result = run_seed(pair, seed, args)
        if args.json:
            config = {
                k: v for k, v in vars(args).items() if k not in ("json", "seeds", "translators")
            }
            measure.append_json(args.json, measure.record("conversations", config, result))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
