"""A pair of real models in use: HumanEval, and conversations with a switch at every turn.

    python benchmarks/real_use.py solve A B NAME=FOLDER --readings FOLDER --tasks FILE --out FILE
    python benchmarks/real_use.py told A B --readings FOLDER --out FILE
    python benchmarks/real_use.py turns A B forth=FOLDER back=FOLDER --held FILE --out FILE

``solve``: the source has read HumanEval's prompts (``real_pair.py read --tasks``), the target
writes the functions, greedily; they are run, and pass or fail. Beside it both models do all alone.
``told``: a hand-over in words, of the items that translators are judged by: the source writes a
summary, the target reads it and the prefix's last 32 tokens.
``turns``: ten turns are given, and the models answer by turns, each from its own rows of what it
read itself and translated rows of all else; rows are translated as they lie in the other's cache,
so what is lost adds up (with ``--healed`` only the last turn is translated, as the model that does
not answer reads all before it). The measure is the same model that has read the transcript itself:
whether a code is told, in how many tokens of an answer the first choice is the same, and the KL.
Both run on the CPU with PyTorch in bfloat16, keep a line of each result in ``--out``, and go on
where they were stopped.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.real_pair import (
    HIDING,
    WAYS,
    Item,
    compared,
    error,
    filled,
    opened,
    opened_translator,
    records,
    summary,
)  # fmt: skip
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.reporting import measure

BATCH, ANSWER, SECONDS = 8, 320, 15  # functions written at once; tokens of one; to run it
SUMMARY, LAST = 128, 32  # tokens of a summary, and of the prefix that are read beside it
ASKED = (
    "Summarise all of this for an assistant that goes on with it and sees nothing else. Keep "
    "names, numbers and codes. Use at most 80 words."
)
ROOMS = [*HIDING, "attic", "garden"]  # of the codes, one in each turn
TURNS, MESSAGE = len(ROOMS), 80  # tokens of a message of people, at most


# ---- HumanEval ----------------------------------------------------------------------------------


@torch.no_grad()
def written(
    model: TorchModel, caches: Sequence[Any], lasts: Sequence[int], most: int = ANSWER
) -> list[list[int]]:
    """What a model writes behind each cache and its prefix's last token, greedily."""
    sizes = [cache.get_seq_length() for cache in caches]
    room, ends = max(sizes), _ends(model)
    sides = [
        [
            torch.cat([_padded(getattr(c.layers[t], side), room) for c in caches])
            for side in ("keys", "values")
        ]
        for t in range(len(model.attentions))
    ]
    cache = model.cache([tuple(each) for each in sides], room)
    visible = torch.arange(room) >= room - torch.tensor(sizes)[:, None]
    ids, at, found = torch.tensor(lasts)[:, None], torch.tensor(sizes)[:, None], []
    done = torch.zeros(len(caches), dtype=torch.bool)
    while len(found) < most and not done.all():
        visible = torch.cat([visible, torch.ones(len(caches), 1, dtype=torch.bool)], dim=1)
        more = {"position_ids": at, "attention_mask": visible[:, None, None]}
        ids = model.logits(model.run(ids, cache, **more)[:, -1]).argmax(-1)[:, None]
        found.append(ids[:, 0].tolist())
        done |= torch.tensor([token in ends for token in found[-1]])
        at = at + 1
    return [_until(list(column), ends) for column in zip(*found, strict=True)]


def _padded(array: torch.Tensor, room: int) -> torch.Tensor:
    return torch.nn.functional.pad(array, (0, 0, room - array.shape[2], 0))


def _ends(model: TorchModel) -> set[int]:
    """The tokens that end an answer, or the code in it."""
    vocabulary = model.tokenizer.get_vocab()
    fences = {n for text, n in vocabulary.items() if "```" in text}
    return {model.tokenizer.eos_token_id, vocabulary["<|endoftext|>"], *fences}


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[: next((n for n, token in enumerate(tokens) if token in ends), len(tokens))]


def passes(task: Mapping[str, str], code: str) -> bool:
    """Whether the task's own tests pass on a function."""
    program = f"{task['prompt']}\n{code}\n{task['test']}\ncheck({task['entry_point']})\n"

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))

    with tempfile.TemporaryDirectory() as there:
        command = [sys.executable, "-I", "-c", program]
        try:
            done = subprocess.run(
                command, cwd=there, capture_output=True, timeout=2 * SECONDS, preexec_fn=limits
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


@torch.no_grad()
def solve(args: argparse.Namespace) -> dict[str, Any]:
    """Shares of the functions that pass, by way."""
    models = opened(args)
    tasks = {f"task-{int(t['task_id'].split('/')[1]):03d}": t for t in records(args.tasks)}
    paths = sorted(args.readings.glob("task-*.pt"), key=lambda path: Item(path).rows)
    ways = {way.name: way for way in WAYS}
    runs = [("source", "native", models[0], None), ("target", "native", models[1], None)]
    for name, folder in args.translators.items():
        made = opened_translator(folder, wrong=False)
        runs += [(name, way, models[1], made) for way in args.ways]
    done = {(line["who"], line["way"], line["item"]) for line in args.done}
    for who, way, model, made in runs:
        left = [path for path in paths if (who, way, path.stem) not in done]
        for start in range(0, len(left), BATCH):
            items = [Item(path) for path in left[start : start + BATCH]]
            others = [Item(paths[paths.index(item.path) - 1]) for item in items]
            filling = None if who == "source" else (ways[way], others, made)
            caches = _caches(model, items, filling)
            texts = written(model, caches, [item.kept["p"][-1] for item in items])
            for item, tokens in zip(items, texts, strict=True):
                code = model.tokenizer.decode(tokens).split("```")[0]
                passed = passes(tasks[item.path.stem], code)
                keep(args, who=who, way=way, item=item.path.stem, passed=passed, code=code)
    groups: dict[str, list[float]] = {}
    for line in args.done:
        groups.setdefault(f"{line['who']} {line['way']}", []).append(float(line["passed"]))
    return {name: {"tasks": len(some), "passed": error(some)} for name, some in groups.items()}


def _caches(model: TorchModel, items: Sequence[Item], filling: Any) -> list[Any]:
    """Caches of prefixes but for their last tokens: the source's own, or filled in some way."""
    if filling is None:
        return [_own(model, item) for item in items]
    way, others, made = filling
    caches = [filled(way, *both, model, made)[0] for both in zip(items, others, strict=True)]
    for cache in caches:
        cache.crop(-1)
    return caches


def _own(model: TorchModel, item: Item) -> Any:
    """The source's own cache of a prefix but for its last token."""
    sides = zip(item.kept["sk"], item.kept["sv"], strict=True)
    return model.cache(
        [model.entry(t, *both, "pre_norm") for t, both in enumerate(sides)], item.rows
    )


# ---- in words -----------------------------------------------------------------------------------


@torch.no_grad()
def told(args: argparse.Namespace) -> dict[str, Any]:
    """By kind: KL and NLL of the continuation, codes told, and tokens that the target reads."""
    models = opened(args)
    tokenizer = models[1].tokenizer

    def rendered(*messages: tuple[str, str], asks: bool = False) -> list[int]:
        chat = [{"role": role, "content": text} for role, text in messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
        return list(tokenizer.encode(text, add_special_tokens=False))

    plain = rendered(("user", ""))  # with the template's own system message
    asked = rendered(("user", ASKED), asks=True)[
        plain.index(plain[-2]) :
    ]  # from the end of a message on
    done = {line["item"] for line in args.done}
    paths = [path for path in sorted(args.readings.glob("*.pt")) if path.stem not in done]
    for start in range(0, len(paths), BATCH):
        items = [Item(path) for path in paths[start : start + BATCH]]
        caches = [_own(models[0], item) for item in items]
        for cache, item in zip(caches, items, strict=True):
            models[0].hidden([item.kept["p"][-1], *asked[:-1]], cache)
        texts = written(models[0], caches, [asked[-1]] * len(items), SUMMARY)
        for item, tokens in zip(items, texts, strict=True):
            text, following = tokenizer.decode(tokens), item.kept["c"]
            said = rendered(("system", f"What was said so far: {text}"))
            shown = [*said, *item.kept["p"][-LAST:]]
            hidden = models[1].hidden([*shown, *following[:-1]])[-len(following) :]
            found = compared(models[1], hidden, item)
            keep(args, item=item.path.stem, summary=text, read=len(shown) / item.rows, **found)
    found = summary([{"translator": "", "way": "in words", "work": 0.0, **d} for d in args.done])
    for kind, ways in found.items():
        mine = [d["read"] for d in args.done if d["item"].startswith(kind)]
        ways["in words"]["work"] = error(mine)
    return found


# ---- a switch at every turn ---------------------------------------------------------------------


@dataclass
class Reader:
    """A model and its cache, which grows by tokens read and by rows taken over."""

    model: TorchModel
    cache: Any = None
    rows: int = 0

    def read(self, tokens: Sequence[int]) -> tuple[torch.Tensor, States]:
        """The hidden states of new tokens, and their states to translate."""
        self.cache = self.cache or self.model.cache((), 0)
        with torch.no_grad(), self.model.tapped() as taken:
            hidden = self.model.hidden(tokens, self.cache)
        self.rows += len(tokens)
        return hidden, self.model.states_of(taken, "pre_norm")

    @torch.no_grad()
    def take_over(self, states: States, translator: TorchTranslator) -> None:
        """Append the translated rows of another model's states."""
        self.cache = self.cache or self.model.cache((), 0)
        capture = translator.config.capture
        for t in range(len(self.model.attentions)):
            both = translator.layer(t, states)
            entry = self.model.entry(t, *both, capture, self.rows)
            self.cache.update(*entry, t)
        self.rows += len(states.keys[0])


# Of one turn: what is said to a model, its answer, and the places of a code's digits in it.
Turn = tuple[list[int], list[int], list[int]]


@dataclass
class Texts:
    """Conversations of :data:`TURNS` turns, as tokens of Qwen's template."""

    tokenizer: Any
    held: Sequence[Sequence[Mapping[str, str]]]

    def conversations(self, count: int) -> Iterator[tuple[str, list[Turn]]]:
        """``count`` of codes to recall, and as many of people with an assistant."""
        rng = random.Random("turns")
        for number in range(count):
            yield f"codes-{number:03d}", self.codes(rng)
        long = [chat for chat in self.held if len(chat) >= 2 * TURNS]
        for number, chat in enumerate(long[:count]):
            cut = [self.tokens(message["content"])[:MESSAGE] for message in chat[: 2 * TURNS]]
            said = map(self.said, map(self.tokenizer.decode, cut[::2]))
            answers = ([*answer, *self.end] for answer in cut[1::2])
            yield f"chats-{number:03d}", [(a, b, []) for a, b in zip(said, answers, strict=True)]

    def codes(self, rng: random.Random) -> list[Turn]:
        """In each turn a piece of Python's manual, a code, and a question for one of all so far."""
        known, found = dict[str, int](), list[Turn]()
        for place in ROOMS:
            known[place] = rng.randint(1000, 9999)
            text = self.tokenizer.decode(self.tokens(topics[rng.choice(sorted(topics))])[:MESSAGE])
            asked = rng.choice(sorted(known))
            first = f"The code for the {asked} is"
            whole = self.tokens(f"{first} {known[asked]}.")
            behind = range(len(self.tokens(first)), len(whole) - 1)
            digits = [n for n in behind if self.tokenizer.decode([whole[n]]).strip().isdigit()]
            said = f"{text}\n\nThe code for the {place} is {known[place]}. What is the code for the"
            found.append((self.said(f"{said} {asked}?"), [*whole, *self.end], digits))
        return found

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def said(self, text: str) -> list[int]:
        return self.tokens(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    @property
    def end(self) -> list[int]:
        return self.tokens("<|im_end|>\n")


@torch.no_grad()
def turns(args: argparse.Namespace) -> dict[str, Any]:
    """By kind, first model and half: codes told, first choices that agree, and the KL."""
    models = opened(args)
    into = [opened_translator(args.translators[way], wrong=False) for way in ("back", "forth")]
    texts = Texts(models[1].tokenizer, [line["messages"] for line in records(args.held)])
    done = {(line["item"], line["first"]) for line in args.done}
    for name, conversation in texts.conversations(args.count):
        left = [first for first in (0, 1) if (name, first) not in done]
        alone = [_alone(model, conversation) if left else [] for model in models]
        for first in left:
            lines, found, spoken = [Reader(model) for model in models], [], list[int]()
            for turn, (said, told, digits) in enumerate(conversation):
                mine = (first + turn) % 2
                hidden, states = lines[mine].read([*said, *told])
                if args.healed and spoken:
                    lines[1 - mine] = Reader(models[1 - mine])
                    lines[1 - mine].read(spoken)
                lines[1 - mine].take_over(states, into[1 - mine])
                spoken += [*said, *told]
                both = (hidden, alone[mine][turn])
                ours, theirs = (_answer(models[mine], each, told) for each in both)
                found.append(_scored(turn, mine, told, digits, ours, theirs))
            keep(args, item=name, first=first, turns=found)
    return by_half(args.done)


def _scored(
    turn: int, model: int, told: Sequence[int], digits: Sequence[int],
    ours: torch.Tensor, theirs: torch.Tensor,
) -> dict[str, Any]:  # fmt: skip
    """An answer's figures; ``told`` is whether a code is, from our cache and from the model's."""
    choices, wanted = [each.argmax(-1) for each in (ours, theirs)], torch.tensor(told)
    codes = [bool((each[digits] == wanted[digits]).all()) for each in choices]
    return {
        "turn": turn,
        "model": model,
        "agreed": float((choices[0] == choices[1]).float().mean()),
        "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        "told": codes if digits else None,
    }


def _alone(model: TorchModel, conversation: Sequence[Turn]) -> list[torch.Tensor]:
    """The hidden states of each turn, of a model that reads all of it by itself."""
    line = Reader(model)
    return [line.read([*said, *told])[0] for said, told, _ in conversation]


def _answer(model: TorchModel, hidden: torch.Tensor, told: Sequence[int]) -> torch.Tensor:
    """The predictions (M, vocabulary) of an answer's tokens."""
    return model.logits(hidden[-len(told) - 1 : -1]).log_softmax(-1)


def by_half(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over conversations and their standard errors, of turns 1 to 5 and 6 to 10."""
    found: dict[str, Any] = {}
    for kind, first in sorted({(line["item"].split("-")[0], line["first"]) for line in done}):
        mine = [d["turns"] for d in done if d["item"].startswith(kind) and d["first"] == first]
        halves = {"1 to 5": slice(0, TURNS // 2), "6 to 10": slice(TURNS // 2, TURNS)}
        for half, span in halves.items():
            means = {}
            for what in ("agreed", "kl"):
                means[what] = error([_mean(turn[what] for turn in line[span]) for line in mine])
            if mine[0][0]["told"]:
                for n, who in enumerate(("told", "told by itself")):
                    means[who] = error([_mean(t["told"][n] for t in line[span]) for line in mine])
            name = f"{kind}, {('the source', 'the target')[first]} first, turns {half}"
            found[name] = {"conversations": len(mine), **means}
    return found


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)


def keep(args: argparse.Namespace, **found: Any) -> None:
    """Add a result to those in the file."""
    args.done.append(found)
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("solve", "told", "turns"))
    parser.add_argument("a", help="the source, a folder or Hub id")
    parser.add_argument("b", help="the target, a folder or Hub id")
    parser.add_argument("translators", nargs="*", help="NAME=FOLDER; of turns: forth and back")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--readings", type=Path, help="solve, told: the folder of readings")
    parser.add_argument("--tasks", type=Path, help="solve: HumanEval, JSONL")
    parser.add_argument("--ways", nargs="*", default=["translated", "spread 0.25"], help="solve")
    parser.add_argument("--held", type=Path, help="turns: JSONL of conversations")
    parser.add_argument("--count", type=int, default=12, help="turns: conversations of each kind")
    parser.add_argument(
        "--healed", action="store_true",
        help="turns: while one model answers, the other one reads all that was said before",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="results, a line each")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    args.translators = dict(each.split("=", 1) for each in args.translators)
    args.done = records(args.out if args.out.exists() else None)
    found = {"solve": solve, "told": told, "turns": turns}[args.step](args)
    for name, way in found.items():
        print(f"{name}: {way}")
    if args.json:
        asked = {"a": Path(args.a).name, "b": Path(args.b).name, "step": args.step}
        measure.append_json(args.json, measure.record("real_use", asked, found))


if __name__ == "__main__":
    main()
