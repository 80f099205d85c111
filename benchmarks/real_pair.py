"""A pair of real models judged: what translators keep, beside controls and native parts.

    python benchmarks/real_pair.py write --out CHATS
    kvlingo-mlx train A B --data CHATS --device cpu ...
    python benchmarks/real_pair.py read A B --out FOLDER
    python benchmarks/real_pair.py judge A B --readings FOLDER --scores FILE NAME=TRANSLATOR...

``write`` makes the conversations that ``pair`` trains on where no data are given.
``read`` keeps what both models make of items that no training reads: generated conversations that
must be looked back at, needles (one of four codes named amid the manual of Python), and with
``--held`` conversations of yours, 64 tokens after a prefix of 384; with ``--tasks`` HumanEval's
prompts, with ``--sessions`` agents' sessions and 64 tokens of the answer recorded. An item of 384
tokens is 15 MB.
``judge`` decodes each item's continuation behind every cache of :data:`WAYS`, with the target's own
predictions as the measure. A way's work is the share of the target's own reading: of layers that it
reads itself, and of rows in all others: at the front, at the end, or spread amid translated ones.
Both run on the CPU with PyTorch in bfloat16, and go on where they were stopped. With ``--against``
the figures are compared with a record's. ``make real`` does all of it.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from kvlingo_mlx.cuda import gradients, model
from kvlingo_mlx.cuda.gradients import Entry
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.runtime import PairReading

CHATS, PREFIX, FOLLOWING = 24, 384, 64  # conversations of each kind; tokens of each
TRAINING_CHATS, JUDGING_SEED = 6000, 1  # `pair` trains on the conversations of seed 0
DISTANCES = (1, 9, 17, 33)  # first tokens after the switch of what is told apart
HIDING = "archive garage cellar office boat studio museum kitchen".split()
Message = Mapping[str, str]


# ---- what is read -------------------------------------------------------------------------------


@dataclass
class Texts:
    """What judges, of conversations that no training reads."""

    tokenizer: Any
    held: Sequence[Sequence[Message]] = ()
    tasks: Sequence[Mapping[str, str]] = ()
    sessions: Sequence[Mapping[str, Any]] = ()

    def items(
        self, needles: int, lengths: Sequence[int], longest: int
    ) -> Iterator[tuple[str, Sample, Any]]:
        """Name, sample, and the places of a code in the continuation."""
        for task in self.tasks:
            yield f"task-{int(task['task_id'].split('/')[1]):03d}", self.task(task), []
        for number, session in enumerate(self.sessions):
            sample = self.answered(session["messages"], session["reference_response"])
            if len(sample.prefix) <= longest:
                yield f"session-{number:03d}", sample, []
        for kind, chats in (("chat", self.held), ("lookback", self._generated())):
            rng = random.Random("held")
            for number in range(CHATS if chats else 0):
                yield f"{kind}-{number:03d}", self.chat(rng, chats), []
        for length in lengths:
            rng = random.Random(f"needle {length}")
            for number in range(needles):
                yield f"needle{length}-{number:03d}", *self.needle(rng, length)

    def chat(self, rng: random.Random, chats: Sequence[Sequence[Message]]) -> Sample:
        """A conversation, cut after its prefix."""
        while True:
            tokens = self._tokens(self._rendered(rng.choice(chats))[:16000])
            if len(tokens) >= PREFIX + FOLLOWING + 8:
                return Sample(tuple(tokens[:PREFIX]), tuple(tokens[PREFIX : PREFIX + FOLLOWING]))

    def needle(self, rng: random.Random, length: int) -> tuple[Sample, list[int]]:
        """Four codes in the first third of the manual's text, one asked for at the end."""
        message, said, code = self.hidden_code(rng, length)
        prefix = self._tokens(self._rendered([message], asks=True))
        answer, digits = self.told(said, code)
        return Sample(tuple(prefix), answer), digits

    def hidden_code(self, rng: random.Random, length: int) -> tuple[Message, str, str]:
        """A message that asks for a code in itself, how its answer begins, and the code."""
        places, codes = rng.sample(HIDING, 4), [rng.randint(1000, 9999) for _ in range(4)]
        text = ""
        while len(self._tokens(text)) < length - 80:
            text += topics[rng.choice(sorted(topics))]
        text = self.tokenizer.decode(self._tokens(text)[: length - 80])
        both = zip(places, codes, strict=True)
        facts = " ".join(f"The code for the {place} is {code}." for place, code in both)
        n, chosen = len(text) // 3, rng.randrange(4)
        asked = f"{text[:n]}\n\n{facts}\n\n{text[n:]}\n\nWhat is the code for the "
        message = {"role": "user", "content": f"{asked}{places[chosen]}?"}
        return message, f"The code for the {places[chosen]} is", f" {codes[chosen]}"

    def told(self, said: str, code: str) -> tuple[tuple[int, ...], list[int]]:
        """The tokens of an answer, and the places of its code's digits."""
        first, whole = self._tokens(said), self._tokens(said + code + ".")
        return tuple(whole), [i for i in range(len(first), len(whole) - 1) if self._digit(whole[i])]

    def task(self, task: Mapping[str, str]) -> Sample:
        """A function to complete, up to where its code begins."""
        asked = "Complete this function. Answer with all of its code.\n\n```python\n{prompt}```"
        message = {"role": "user", "content": asked.format(**task)}
        return self.answered([message], task["prompt"] + task["canonical_solution"], "```python\n")

    def answered(self, messages: Sequence[Message], answer: str, begun: str = "") -> Sample:
        """Messages, and the answer's first tokens behind what of it is given."""
        prefix = self._tokens(self._rendered(messages, asks=True) + begun)
        return Sample(tuple(prefix), tuple(self._tokens(answer)[:FOLLOWING]))

    def _generated(self) -> Sequence[Sequence[Message]]:
        return list(lookback(8 * CHATS, seed=JUDGING_SEED))

    def _digit(self, token: int) -> bool:
        return any(c.isdigit() for c in self.tokenizer.decode([token]))

    def _rendered(self, messages: Sequence[Message], asks: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=asks
        )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def write(args: argparse.Namespace) -> None:
    """Write conversations to train on."""
    lines = (json.dumps({"messages": chat}) for chat in lookback(TRAINING_CHATS))
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(args: argparse.Namespace) -> None:
    """Read with both models what is not there yet."""
    source, target = opened(args)
    held = [line["messages"] for line in records(args.held)]
    sessions = json.loads(args.sessions.read_text("utf-8"))["cases"] if args.sessions else ()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = Texts(target.tokenizer, held, records(args.tasks), sessions)
    items = texts.items(args.needles, args.lengths, args.longest)
    for name, sample, places in items:
        path = args.out / f"{name}.pt"
        if path.exists() or not name.startswith(tuple(args.items)):
            continue
        own = gradients.read(source, target, sample, "pre_norm", len(target.attentions))
        found = {
            "p": list(sample.prefix), "c": list(sample.continuation), "extra": places,
            "sk": torch.stack(own.states.keys), "sv": torch.stack(own.states.values),
            "tk": torch.stack(own.native.keys), "tv": torch.stack(own.native.values),
            "teacher": own.teacher.clone(),
        }  # fmt: skip
        torch.save(found, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)


def records(path: Path | None) -> list[dict[str, Any]]:
    """A JSONL file's; none without a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path else []


def opened(args: argparse.Namespace) -> list[TorchModel]:
    torch.set_num_threads(args.threads)
    return [model.load(name, dtype=torch.bfloat16, device="cpu") for name in (args.a, args.b)]


# ---- what judges --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A cache to decode from: what the target has of its own, and what the rest is."""

    name: str
    rest: str = "translated"  # or native, hidden, shuffled (maps at wrong layers), other (a prefix)
    layers: float = 0.0  # the share of the first layers that the target reads itself
    front: float = 0.0  # the share of rows that it reads itself, of the first ones
    tail: float = 0.0  # and of the last ones, behind whatever is before them
    spread: float = 0.0  # and of others, evenly spaced amid those that are translated

    @property
    def work(self) -> float:
        """The share of the target's own reading."""
        rows = 1.0 if self.rest == "native" else self.front + self.tail + self.spread
        return self.layers + (1 - self.layers) * rows


WAYS = (
    Way("native", "native"),
    Way("translated"),
    Way("hidden", "hidden"),
    Way("shuffled", "shuffled"),
    Way("wrong document", "other"),
    *(Way(f"layers {n}/28", layers=n / 28) for n in (2, 4, 7)),
    *(Way(f"tail {share:g}", tail=share) for share in (0.05, 0.125, 0.25)),
    *(Way(f"front {share:g}", front=share) for share in (0.125, 0.25)),
    *(Way(f"spread {share:g}", spread=share) for share in (0.125, 0.25, 0.5)),
    Way("spread 0.125, tail 0.125", spread=0.125, tail=0.125),
    Way("layers 4/28, tail 0.125", layers=4 / 28, tail=0.125),
    Way("hidden, tail 0.25", "hidden", tail=0.25),
    Way("hidden, spread 0.25", "hidden", spread=0.25),
)


@dataclass
class Item:
    """A kept reading."""

    path: Path
    kept: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = torch.load(self.path, weights_only=True, mmap=True)

    @property
    def rows(self) -> int:
        return int(self.kept["sk"].shape[1])

    def reading(self, native: int = 0) -> PairReading:
        """In the form that the package's passes take, with the target's first layers."""
        kept = self.kept
        sample = Sample(tuple(kept["p"]), tuple(kept["c"]))
        own = States(tuple(kept["tk"][:native]), tuple(kept["tv"][:native]))
        states = States(tuple(kept["sk"]), tuple(kept["sv"]))
        return PairReading(sample, states, own, kept["teacher"])


def entries_of(
    way: Way, item: Item, other: Item, target: TorchModel, made: TorchTranslator | None
) -> list[Entry]:
    """The cache entries of all rows but those of the tail."""
    depth, rows = len(target.attentions), item.rows
    own = item.reading(depth)
    native = [
        target.entry(t, own.native.keys[t], own.native.values[t], target.family.points[0], 0)
        for t in range(depth)
    ]
    stop = rows - round(way.tail * rows)
    if way.rest == "native":
        return native
    if way.rest == "hidden":
        return [(keys[:, :, :0], values[:, :, :0]) for keys, values in native]
    rest = rows_of(way, item)[1]
    assert made is not None
    reading = item.reading(round(way.layers * depth))
    if way.rest == "other":
        strange = other.reading().states.map(lambda array: array[:rows])
        reading = replace(reading, states=strange)
    front = round(way.front * rows)
    found = gradients.entries(target, made, reading)
    rest = [row for row in rest if row < found[0][0].shape[2]]  # the other one may be shorter
    return [
        tuple(
            torch.cat([n[:, :, :front], f[:, :, front:stop]], 2)[:, :, rest]
            for n, f in zip(*pair, strict=True)
        )
        for pair in zip(native, found, strict=True)
    ]


def rows_of(way: Way, item: Item) -> tuple[list[int], list[int]]:
    """The rows before the tail that the target reads amid the others, and these others."""
    if way.rest == "native":
        return [], list(range(item.rows))
    stop = item.rows - round(way.tail * item.rows)
    count = round(way.spread * item.rows)
    own = sorted({int((n + 0.5) * stop / count) for n in range(count)})
    return own, sorted(set(range(stop)) - set(own))


@torch.no_grad()
def scored(
    way: Way, item: Item, other: Item, target: TorchModel, made: TorchTranslator | None
) -> dict[str, Any]:
    """See :func:`compared`."""
    following = item.kept["c"]
    hidden = filled(way, item, other, target, made, following[:-1])[1][-len(following) :]
    return compared(target, hidden, item)


def compared(target: TorchModel, hidden: torch.Tensor, item: Item) -> dict[str, Any]:
    """KL and NLL of each token of the continuation (nats), and whether a code is told.

    ``hidden`` (M, width) predict the M tokens.
    """
    continuation = item.kept["c"]
    ours, theirs = (
        target.logits(each).log_softmax(-1) for each in (hidden, item.kept["teacher"].clone())
    )
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    nll = -ours[torch.arange(len(continuation)), torch.tensor(continuation)]
    told = ours.argmax(-1).tolist()
    found = [told[k] == continuation[k] for k in item.kept["extra"]]
    return {"kl": kl.tolist(), "nll": nll.tolist(), "told": all(found) if found else None}


@torch.no_grad()
def filled(
    way: Way, item: Item, other: Item, target: TorchModel, made: TorchTranslator | None,
    following: Sequence[int] = (),
) -> tuple[Any, torch.Tensor]:  # fmt: skip
    """The cache behind the prefix and what follows, and the hidden states of what was read."""
    entries = entries_of(way, item, other, target, made)
    own, rest = rows_of(way, item)
    text = (*item.kept["p"], *following)
    held = rest[: entries[0][0].shape[2]]  # none where the rest is hidden
    at = torch.tensor([*own, *range(len(own) + len(rest), len(text))])
    visible = torch.cat([torch.tensor(held, dtype=at.dtype), at]) <= at[:, None]
    places = {"position_ids": at[None], "attention_mask": visible[None, None]}
    cache = target.cache(entries, len(held))
    return cache, target.hidden([text[n] for n in at], cache, **places)


def judge(args: argparse.Namespace) -> None:
    """Score what is not scored yet, print a table, and keep a record of it."""
    _, target = opened(args)
    lines = records(args.scores if args.scores.exists() else None)
    done = {(line["translator"], line["way"], line["item"]): line for line in lines}
    paths = sorted(args.readings.glob("*.pt"))
    for name, folder in (each.split("=", 1) for each in args.translators):
        made, shuffled = (opened_translator(Path(folder), wrong) for wrong in (False, True))
        for way in [way for way in WAYS if not args.ways or way.name in args.ways]:
            plain = way.rest in ("native", "hidden")  # no translator
            used = None if plain else shuffled if way.rest == "shuffled" else made
            for number, path in enumerate(paths):
                key = ("" if plain else name, way.name, path.stem)
                if key in done or not path.stem.startswith(tuple(args.items)):
                    continue
                began, other = time.perf_counter(), Item(paths[number - 1])
                found = scored(way, Item(path), other, target, used)
                facts = dict(zip(("translator", "way", "item"), key, strict=True))
                seconds = round(time.perf_counter() - began, 2)
                done[key] = {**facts, "work": way.work, **found, "seconds": seconds}
                with args.scores.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
    found = summary(list(done.values()))
    print(table(found))
    if args.json:
        asked = {"a": Path(args.a).name, "b": Path(args.b).name, "readings": len(paths)}
        measure.append_json(args.json, measure.record("real_pair", asked, found))
    if args.against:
        (*_, last) = args.against.read_text().splitlines()
        if worse := strays(found, json.loads(last)["results"]):
            raise SystemExit("not as the record says:\n" + "\n".join(worse))
        print(f"as the record says: {args.against}")


def strays(found: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """The figures that differ from a record's by more than a tenth and three standard errors."""
    lines = []
    for kind, ways in found.items():
        for name, way in ways.items():
            for measured in ("kl", "nll", "recall"):
                known = record.get(kind, {}).get(name, {}).get(measured)
                if known is None or measured not in way:
                    continue
                (ours, spread), (theirs, their_spread) = way[measured], known
                margin = 0.1 * theirs + 3 * (spread**2 + their_spread**2) ** 0.5
                if abs(ours - theirs) > margin:
                    lines.append(f"{kind}, {name}: {measured} {ours}, the record has {theirs}")
    return lines


def opened_translator(folder: Path, wrong: bool) -> TorchTranslator:
    """A translator, or one whose maps are half the layers away from theirs."""
    config, weights = translator_folder.read(folder)
    depth, arrays = len(config.target.layers), {}
    for name in weights.arrays:
        side, layer, what = name.split(".")
        place = (int(layer) + depth // 2) % depth if wrong else int(layer)
        arrays[f"{side}.{place}.{what}"] = weights.as_float32(name)
    return TorchTranslator.from_arrays(config, arrays, "cpu")


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each kind of item, translator and way: means over items, and their standard errors."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        kind, name = line["item"].rpartition("-")[0], f"{line['translator']} {line['way']}".strip()
        groups.setdefault(kind, {}).setdefault(name, []).append(line)
    return {
        kind: {name: of_items(some) for name, some in ways.items()} for kind, ways in groups.items()
    }


def of_items(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one translator and way on items of one kind."""
    found: dict[str, Any] = {
        "work": round(float(np.mean([line["work"] for line in some])), 3),
        "items": len(some),
    }
    for measured in ("kl", "nll"):
        found[measured] = error([float(np.mean(line[measured])) for line in some])
    ends = zip(DISTANCES, (*DISTANCES[1:], 1000), strict=True)
    far = [np.concatenate([line["kl"][a - 1 : b - 1] for line in some]) for a, b in ends]
    found["kl_by_distance"] = [round(float(part.mean()), 4) for part in far if len(part)]
    told = [float(line["told"]) for line in some if line["told"] is not None]
    return found | ({"recall": error(told)} if told else {})


def error(values: Sequence[float]) -> list[float]:
    """The mean and its standard error."""
    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [round(float(np.mean(values)), 4), round(spread, 4)]


def table(found: Mapping[str, Any]) -> str:
    """A row for each kind of item, translator and way."""
    columns = ["", "work", "items", "KL", "NLL", f"KL from token {DISTANCES}", "recall"]
    rows = [columns, ["---"] * len(columns)]
    for kind, ways in found.items():
        for name, way in ways.items():
            both = [f"{way[of][0]:.3f} ± {way[of][1]:.3f}" for of in ("kl", "nll")]
            far = ", ".join(f"{each:.3f}" for each in way["kl_by_distance"])
            told = "{:.2f} ± {:.2f}".format(*way["recall"]) if "recall" in way else ""
            first = f"{kind}: {name}", f"{way['work']:.2f}", str(way["items"])
            rows.append([*first, *both, far, told])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("write", "read", "judge"))
    parser.add_argument("a", nargs="?", help="the source, a folder or Hub id")
    parser.add_argument("b", nargs="?", help="the target, a folder or Hub id")
    parser.add_argument("translators", nargs="*", help="NAME=FOLDER")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--held", type=Path, help="read: JSONL of conversations")
    parser.add_argument("--tasks", type=Path, help="read: HumanEval, JSONL")
    parser.add_argument("--sessions", type=Path, help="read: recorded sessions, JSON")
    parser.add_argument("--longest", type=int, default=8192, help="read: a session's most tokens")
    parser.add_argument("--out", type=Path, help="write: the file; read: the folder")
    parser.add_argument("--needles", type=int, default=32, help="read: of each length")
    parser.add_argument("--lengths", type=int, nargs="*", default=[320, 1024])
    parser.add_argument("--readings", type=Path, help="judge: the folder of readings")
    parser.add_argument("--scores", type=Path, help="judge: the items' scores, a line each")
    parser.add_argument("--ways", nargs="*", help="judge: some of the ways, by name")
    parser.add_argument("--items", nargs="*", default=[""], help="kinds; else all")
    parser.add_argument("--json", help="judge: append the record to this file")
    parser.add_argument("--against", type=Path, help="judge: the record to compare with")
    args = parser.parse_args()
    {"write": write, "read": read, "judge": judge}[args.step](args)


if __name__ == "__main__":
    main()
