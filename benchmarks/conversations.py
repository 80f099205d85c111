"""Ten turns of recall by two models of the zoo that alternate: which strategy still remembers.

    python benchmarks/conversations.py --json FILE
    python benchmarks/conversations.py --no-verbatim --json FILE   # turns as the template has them

A dialogue states 12 to 20 facts; then come ten questions, one a turn, no fact asked twice. The
models take turns at answering, in both orders (:mod:`benchmarks.paper.evaluation.turns`); answers
are decoded greedily and stay in the conversation, right or wrong. A turn counts if the value is
a word of what the answer says after "is": before it stands the name that was asked about, and some
people are their own friends.
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
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

import numpy as np

from benchmarks.paper.evaluation import turns
from benchmarks.paper.evaluation.turns import Manner, Models, Talk, Turn, Way
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.embedded.dialogues import Dialogue
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.reporting import measure

CONDITIONS = ("reprefill", "alternated", "one switch", "naive", "shuffled", "facts hidden")


def ways_of(models: Models, root: Path) -> dict[str, Way]:
    """Every condition by name, with the translators of a folder."""
    folders = [str(root / "--".join(pair)) for pair in itertools.permutations(models)]
    (own,) = turns.directed(folders, list(models.values()))
    wrong = tuple(conditions.shuffled(translator) for translator in own)
    return {
        "reprefill": Way("reprefill"),
        "alternated": Way("alternated", "alternated", (own,)),
        "one switch": Way("one switch", "alternated", (own,), once=True),
        "naive": Way("naive", "naive", (own,)),
        "shuffled": Way("shuffled", "alternated", (wrong,)),
        "facts hidden": Way("facts hidden", "alternated", (own,), hidden=True),
    }


def talk_of(dialogue: Dialogue) -> Talk:
    """A dialogue as a conversation to be held; its facts stand before the first question."""
    told = dialogue.messages[:-1]
    questions = [({"role": "user", "content": question},) for question in dialogue.questions]
    return Talk(
        "",
        tuple(
            Turn((*told, *question) if place == 0 else question, question, (fact.value,))
            for place, (fact, question) in enumerate(zip(dialogue.asked, questions, strict=True))
        ),
    )


def hit(answer: str, turn: Turn) -> int:
    """Whether the value is a word of what the answer says after "is"."""
    return int(turn.references[0] in re.findall(r"\w+", answer.partition(" is ")[2]))


def run_seed(
    models: Models, ways: dict[str, Way], seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    started = time.perf_counter()
    facts = tuple(args.facts)
    drawn = dialogues.held_out(args.dialogues, seed=seed, facts=facts, questions=args.questions)
    talks = [talk_of(dialogue) for dialogue in drawn]
    manner = Manner(args.max_tokens, verbatim=args.verbatim)
    hits: dict[str, dict[str, list[list[int]]]] = {}
    for order in itertools.permutations(models):
        found = hits[f"{order[0]} first"] = {name: [] for name in args.conditions}
        for talk, name in itertools.product(talks, args.conditions):
            said = turns.answers(models, ways[name], talk, order, manner)
            found[name].append([hit(a, turn) for a, turn in zip(said, talk.turns, strict=True)])
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
    models = {name: load(zoo(name)) for name in args.pair.split(":")}
    ways = ways_of(models, args.translators)
    for seed in args.seeds:
        result = run_seed(models, ways, seed, args)
        if args.json:
            config = {
                k: v for k, v in vars(args).items() if k not in ("json", "seeds", "translators")
            }
            measure.append_json(args.json, measure.record("conversations", config, result))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
