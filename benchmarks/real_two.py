"""A pair of real models with two tokenizers, judged: what a translator keeps, beside controls.

    python benchmarks/real_two.py A B NAME=TRANSLATOR... --held CHATS --scores FILE --json FILE

As ``real_pair.py`` does for one tokenizer: codes (one of four amid the manual of Python, right
if each digit is the first choice), generated look-back conversations and conversations of yours,
each up to the header of an answer, as both models' templates render them; the first 64 tokens of
the answer are judged by the target's own predictions. The target prefills what no token of the
source stands for; *hidden* is a cache with that alone. With PyTorch in bfloat16 on the CPU.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from real_pair import (
    JUDGING_SEED,
    Message,
    Texts,
    compared,
    opened,
    opened_translator,
    records,
    summary,
    table,
)

from kvlingo_mlx.cuda import gradients
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample, between, tokenise
from kvlingo_mlx.training.runtime import PairReading

LEAST, MOST, FOLLOWING, CODES = 150, 700, 64, 384  # tokens of prefixes, answers, codes' prompts
NEVER = 10**9  # a position that no token is at


def items(
    source: Any, target: Any, held: Sequence[Sequence[Message]], count: int
) -> Iterator[tuple[str, Sample, list[int]]]:
    """Name, sample and the places of a code in its continuation."""
    texts, rng = Texts(target), random.Random("codes of two")
    for number in range(count):
        message, said, code = texts.hidden_code(rng, CODES)
        told, digits = texts.told(said, code)
        yield (
            f"code-{number:03d}",
            replace(between([message], source, target), continuation=told),
            digits,
        )
    generated = [chat for chat in lookback(8 * count, seed=JUDGING_SEED)]
    for kind, chats in (("lookback", generated), ("chat", held)):
        found, rng = 0, random.Random(f"{kind} of two")
        while chats and found < count:
            if sample := longest(rng.choice(chats), source, target):
                yield f"{kind}-{found:03d}", sample, []
                found += 1


def longest(chat: Sequence[Message], source: Any, target: Any) -> Sample | None:
    """The longest prefix of fitting length that ends before an answer of the chat."""
    for end in range(len(chat), 1, -1):
        if chat[end - 1]["role"] != "assistant":
            continue
        sample = tokenise({"messages": chat[:end]}, target, source_tokenizer=source)
        if LEAST <= len(sample.prefix) <= MOST and len(sample.continuation) > 16:
            return replace(sample, continuation=sample.continuation[:FOLLOWING])
    return None


@torch.no_grad()
def predicting(
    way: str, target: TorchModel, made: TorchTranslator, reading: PairReading
) -> torch.Tensor:
    """The hidden states (M, width) that predict the continuation behind a way's cache."""
    if way == "native":
        return reading.teacher
    cache = target.cache(gradients.entries(target, made, reading), len(reading.sample.prefix) - 1)
    return gradients._student(target, reading.sample, cache)


def ways(reading: PairReading, other: PairReading) -> dict[str, PairReading]:
    """The readings to decode from: as it is, with a hidden prefix, with another one's states."""
    aligned = reading.sample.aligned
    assert aligned is not None
    unseen = replace(aligned, groups=aligned.groups + NEVER)
    rows = [n % len(other.states.keys[0]) for n in range(len(aligned.rows))]
    strange = other.states.map(lambda array: array[rows])
    return {
        "native": reading,
        "translated": reading,
        "hidden": replace(reading, sample=replace(reading.sample, aligned=unseen)),
        "wrong document": replace(reading, states=strange),
    }


def scores(
    target: TorchModel, made: TorchTranslator, reading: PairReading, other: PairReading,
    places: Sequence[int],
) -> list[dict[str, Any]]:  # fmt: skip
    """What each way keeps; ``work`` is the share of the prefix that the target prefills itself."""
    sample = reading.sample
    assert sample.aligned is not None
    work = len(sample.aligned.own) / len(sample.prefix)
    kept = {"c": sample.continuation, "teacher": reading.teacher, "extra": places}
    judged: Any = SimpleNamespace(kept=kept)
    return [
        {"way": way, "work": work} | compared(target, predicting(way, target, made, given), judged)
        for way, given in ways(reading, other).items()
        if other is not reading or way != "wrong document"  # the first one has no other
    ]


def judge(args: argparse.Namespace) -> None:
    """Score what is not scored yet, print a table, and keep a record of it."""
    source, target = opened(args)
    lines = records(args.scores if args.scores.exists() else None)
    done = {(line["translator"], line["item"]) for line in lines}
    named = (each.split("=", 1) for each in args.translators)
    made = {name: opened_translator(Path(folder), wrong=False) for name, folder in named}
    held, last = [line["messages"] for line in records(args.held)], None
    for item, sample, places in items(source.tokenizer, target.tokenizer, held, args.count):
        left = [name for name in made if (name, item) not in done]
        if not left:
            continue
        reading = gradients.read(source, target, sample, made[left[0]].config.capture)
        new = [
            {"translator": name, "item": item, **line}
            for name in left
            for line in scores(target, made[name], reading, last or reading, places)
        ]
        with args.scores.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in new)
        lines, last = lines + new, reading
    print(table(found := summary(lines)))
    if args.json:
        asked = {"a": Path(args.a).name, "b": Path(args.b).name, "items": args.count}
        measure.append_json(args.json, measure.record("real_two", asked, found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("translators", nargs="+", metavar="NAME=TRANSLATOR")
    parser.add_argument("--held", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    judge(parser.parse_args())
