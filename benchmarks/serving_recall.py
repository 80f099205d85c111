"""Twenty turns of recall through `kvlingo-mlx serve`, the model changing with every turn.

    python benchmarks/serving_recall.py [--dialogues 16] [--turns 20] [--json FILE]

A dialogue states as many facts as there are turns; each question asks for another one, and the two
models of a pair answer in turn: A, B, A. A client sends the whole history with every request, the
server's own answers in it. Which way the second model takes over is the condition: ``translate``;
``reread`` (asked for by the request); ``shuffled``, a server whose translators have every layer's
maps at a wrong layer; ``facts hidden``, where the client leaves them out. Beside them stands
``Conversation``, the library's own, with the translators of ``translate``: how many answers are the
same, letter for letter. A turn counts if the value is a word of what the answer says after "is".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from http_servers import Messages, Server

from kvlingo_mlx import Conversation
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.embedded.dialogues import Dialogue
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.reporting import measure

PORT, NEW = 8290, 24
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@contextmanager
def served(room: Path, names: Sequence[str], port: int, folders: Sequence[Path]) -> Any:
    """A server of the pair with these translators."""
    options = [part for name in names for part in ("--model", f"{name}={zoo(name)}")]
    options += [part for folder in folders for part in ("--translator", str(folder))]
    log = room / f"{port}.log"
    kept = ["--conversations", str(room / f"kept-{port}")]
    server = Server(["-m", "kvlingo_mlx.cli", "serve", *options, *kept], port, log)
    try:
        server.ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def run(
    server: Server, names: Sequence[str], talk: Dialogue, condition: str
) -> tuple[list[str], list[int]]:
    """The answers of all turns, and how many tokens each model read for them."""
    history: Messages = [] if condition == "facts hidden" else [dict(m) for m in talk.messages[:-1]]
    fields: dict[str, Any] = {**PLAIN}
    if condition == "reread":
        fields["kvlingo"] = {"strategy": "reread"}
    answers, read = [], []
    for turn, question in enumerate(talk.questions):
        history.append({"role": "user", "content": question})
        answer = server.ask(names[turn % 2], history, NEW, **fields)
        history.append({"role": "assistant", "content": answer.text})
        answers.append(answer.text)
        read.append(answer.facts["kvlingo"]["read_tokens"])
    return answers, read


def conversed(names: Sequence[str], models: dict[str, Any], talk: Dialogue) -> list[str]:
    """The library's answers to the same questions."""
    conversation = Conversation({name: models[name] for name in names}, enable_thinking=False)
    told = [dict(m) for m in talk.messages[:-1]]
    answers = []
    for turn, question in enumerate(talk.questions):
        new = [*told, {"role": "user", "content": question}] if turn == 0 else question
        answers.append(conversation.reply(names[turn % 2], new, max_tokens=NEW))
    return answers


def hits(talk: Dialogue, answers: Sequence[str]) -> list[int]:
    """For every turn whether its answer was right."""
    said = [re.findall(r"\w+", answer.partition(" is ")[2]) for answer in answers]
    return [int(fact.value in words) for fact, words in zip(talk.asked, said, strict=True)]


def shuffled(room: Path, names: Sequence[str]) -> list[Path]:
    """The pair's translators with their maps at wrong layers, on disk."""
    folders = []
    for pair in (names, names[::-1]):
        wrong = conditions.shuffled(load_translator(TRANSLATORS / "--".join(pair)))
        wrong.save(room / "--".join(pair))
        folders.append(room / "--".join(pair))
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny-qwen3-l:tiny-qwen3-moe")
    parser.add_argument("--dialogues", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", help="append the results to FILE")
    args = parser.parse_args()
    names = args.pair.split(":")
    models = {name: load(zoo(name)) for name in names}
    turns = args.turns
    talks = list(dialogues.held_out(args.dialogues, facts=(turns, turns), questions=turns))
    found: dict[str, list[list[int]]] = {}
    read: dict[str, list[list[int]]] = {}
    same = 0
    room = Path(tempfile.mkdtemp())
    os.environ["KVLINGO_HOME"] = str(room)
    right = [TRANSLATORS / "--".join(pair) for pair in (names, names[::-1])]
    wrong = shuffled(room, names)
    try:
        with served(room, names, PORT, right) as ours, served(room, names, PORT + 1, wrong) as bad:
            for talk in talks:
                for condition in ("translate", "reread", "facts hidden", "shuffled"):
                    server = bad if condition == "shuffled" else ours
                    answers, tokens = run(server, names, talk, condition)
                    found.setdefault(condition, []).append(hits(talk, answers))
                    read.setdefault(condition, []).append(tokens)
                    if condition == "translate":
                        library = conversed(names, models, talk)
                        same += sum(
                            a.strip() == b.strip() for a, b in zip(answers, library, strict=True)
                        )
                        found.setdefault("Conversation", []).append(hits(talk, library))
    finally:
        shutil.rmtree(room)
    results: dict[str, Any] = {
        name: {
            "recall": float(np.mean(rows)),
            "first five, last five": [float(np.mean(np.array(rows)[:, part]))
                                      for part in (slice(0, 5), slice(-5, None))],
            "read a turn after the first": float(np.mean(np.array(read[name])[:, 1:]))
            if name in read else None,
        }
        for name, rows in found.items()
    }  # fmt: skip
    results["answers as the library's"] = [same, len(talks) * turns]
    for name, result in results.items():
        print(name, result)
    if args.json:
        measure.append_json(args.json, measure.record("serving_recall", vars(args), results))


if __name__ == "__main__":
    main()
