"""Several threads on the same models: do they get the answers that one thread gets?

    python benchmarks/thread_stress.py [--threads 8] [--actions 500] [--json FILE]

Each thread holds a conversation of the three embedded models and does what chance says: replies by
any of them, answers left in the middle, undo, branches, save and resume, `generate`, `hand_over`,
and mlx-lm's own `generate` on the same models. The same lists of actions run in one thread before,
one after the other. Every answer, token for token, must be the same.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlingo_mlx.backend import mx

import mlx_lm
from mlx_lm.generate import generate_step

import kvlingo_mlx as kv
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.translators.base import Translator

KINDS = ("reply", "reply", "reply", "left", "undo", "branch", "resume", "generate", "hand_over",
         "plain")  # fmt: skip
WORDS = "the use of an other is it on and you hi there".split()
Action = tuple[str, str, str, str]  # kind, two models, what is said


def drawn(seed: int, count: int, names: Sequence[str]) -> list[Action]:
    """Actions by chance."""
    chance = random.Random(seed)
    return [
        (chance.choice(KINDS), chance.choice(names), chance.choice(names),
         " ".join(chance.choices(WORDS, k=chance.randint(2, 12))))
        for _ in range(count)
    ]  # fmt: skip


class User:
    """One conversation, and what is done to it."""

    def __init__(
        self, models: Mapping[str, LanguageModel], translators: Sequence[Translator], folder: Path,
        *, new: int = 4, longest: int = 250,
    ) -> None:  # fmt: skip
        self.models, self.translators, self.folder = models, translators, folder
        self.new, self.longest = new, longest
        self.talk = self._begin()

    def _begin(self) -> Conversation:
        return Conversation(self.models, self.translators, prefill_step_size=32)

    def do(self, action: Action) -> str:
        """What an action answers."""
        kind, name, other, text = action
        if max(len(line) for line in self.talk.lines.values()) > self.longest:
            self.talk.close()
            self.talk = self._begin()
        if kind in ("generate", "hand_over", "plain"):
            return self._apart(kind, self.models[name], self.models[other], text)
        if kind == "undo" and self.talk.messages:
            self.talk.undo()
        elif kind == "branch":
            with self.talk.branch() as branch:
                return branch.reply(other, text, max_tokens=self.new)
        elif kind == "resume":
            saved = self.talk.save(self.folder)
            self.talk = Conversation.resume(
                saved, self.models, self.translators, prefill_step_size=32
            )
        elif kind == "left":
            answer = self.talk.stream_reply(name, text, max_tokens=self.new)
            next(answer), next(answer, None)
            answer.close()
            return str(self.talk.messages[-1]["content"])
        return self.talk.reply(name, text, max_tokens=self.new)

    def _apart(self, kind: str, source: LanguageModel, target: LanguageModel, text: str) -> str:
        """An answer outside of the conversation."""
        tokens = target.tokenizer.encode(text)
        if kind == "plain":
            return mlx_lm.generate(target.model, target.tokenizer, tokens, max_tokens=self.new)
        if source is target and not self.translators:  # no stored one of a model to itself
            return ""
        translator = self.translators[0] if self.translators else None
        if kind == "generate":
            options = {"translator": translator, "max_tokens": self.new, "prefill_step_size": 5}
            return kv.generate(source, target, tokens, **options)
        cache = kv.hand_over(source, target, tokens, translator=translator, prefill_step_size=5)
        last = mx.array(tokens[-1:])
        steps = generate_step(last, target.model, max_tokens=self.new, prompt_cache=cache)
        return " ".join(str(int(token)) for token, _ in steps)


def used(user: User, actions: Sequence[Action]) -> list[str]:
    """What one user hears; an error is an answer as well."""
    heard = []
    for action in actions:
        try:
            heard.append(user.do(action))
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    user.talk.close()
    return heard


def run(threads: int, actions: int, seed: int) -> dict[str, float]:
    """Both ways, compared."""
    models = {name: kv.load(f"tiny-qwen3-{name}") for name in ("s", "l", "moe")}
    lists = [drawn(seed + i, len(range(i, actions, threads)), list(models)) for i in range(threads)]
    with tempfile.TemporaryDirectory() as root:

        def user(way: str, index: int) -> User:
            return User(models, (), Path(root) / f"{way}-{index}")

        begun = time.perf_counter()
        alone = [used(user("alone", i), todo) for i, todo in enumerate(lists)]
        single_s = time.perf_counter() - begun
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(used, user("beside", i), todo) for i, todo in enumerate(lists)]
            beside = [job.result() for job in jobs]
        beside_s = time.perf_counter() - begun
    pairs = [pair for a, b in zip(alone, beside, strict=True) for pair in zip(a, b, strict=True)]
    differ = [pair for pair in pairs if pair[0] != pair[1]]
    for one, other in differ[:5]:
        print(f"alone {one!r}, beside others {other!r}")
    errors = sum("Error: " in one for one, _ in pairs)
    return {
        "actions": len(pairs), "differ": len(differ), "errors": errors,
        "single_s": single_s, "threads_s": beside_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--actions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    found = run(args.threads, args.actions, args.seed)
    print(
        f"{args.threads} threads, {found['actions']} actions: {found['differ']} answers differ, "
        f"{found['errors']} errors; {found['single_s']:.1f} s by one thread, "
        f"{found['threads_s']:.1f} s by all"
    )
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("thread_stress", config, found))


if __name__ == "__main__":
    main()
