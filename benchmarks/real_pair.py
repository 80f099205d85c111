"""A pair of real models, distilled on a CPU from readings that are kept on disk.

    python benchmarks/real_pair.py read A B --texts FOLDER... --chats TRAIN --held HELD --out FOLDER
    python benchmarks/real_pair.py learn A B --readings FOLDER --out FILE --way map --lr 3e-3

``read`` keeps what both models' passes without gradient give: of look-back chats (source code with
a few codes strewn in, and questions that only this text answers), of conversations, and of what
judges: held-out conversations, and needles, one of four codes named some 150 tokens before. That is
13 MB a conversation of 320 tokens. So ``learn`` reads nothing twice, and ways to learn are compared
on the same readings; it begins with a closed form of the first of them. Both go on where they were
stopped; ``learn`` may run beside ``read`` and takes what is there.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlingo_mlx.cuda import gradients, model
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.format.maps import Map, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1 import closed_form
from kvlingo_mlx.stage1.closed_form import Moments
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.plan import TrainingPlan, make_config

KL = objective_named("kl")
WAYS = ("weights", "layers", "map")  # what is white: nothing, each source layer, all that is read
LONGEST, ANSWERS, SHORTEST = 720, 160, 60  # tokens of a prefix, of what follows, of a prefix
HELD, NEEDLES = 24, 32  # items that judge
WORDS = (
    "apple river stone cloud maple tiger copper violet anchor basket candle desert engine falcon "
    "garden hammer island jacket kettle lantern meadow needle orange pepper quartz rocket saddle"
).split()
NAMES = "Anna Boris Chen Dalia Emeka Farah Goran Hiro Ines Jamal Keiko Lars Mina Noor Otto".split()
THINGS = "locker account room server package invoice ticket device branch order table port".split()
KINDS = "code number key password PIN id value extension token".split()
SAID = (
    "The {kind} of {name}'s {thing} is {value}.",
    "{name}'s {thing} has the {kind} {value}.",
    "- {thing} {kind} ({name}): {value}",
    '{name}_{thing}_{kind} = "{value}"',
    "# {name}: {thing} {kind} {value}",
)
ASKED = (
    "What is the {kind} of {name}'s {thing}?",
    "Which {kind} does the {thing} of {name} have?",
    "{name}, {thing}: {kind}?",
)
ANSWERED = ("The {kind} of {name}'s {thing} is {value}.", "{value}", "It is {value}.")
SYSTEMS = (None, "You are a helpful assistant.", "You answer exactly and briefly.")
HIDING = "archive garage cellar office boat studio museum kitchen".split()


# ---- what is read -------------------------------------------------------------------------------


@dataclass
class Texts:
    """Samples by their number, of files of source code and of conversations."""

    tokenizer: Any
    files: Sequence[Path]
    chats: Sequence[list[dict[str, str]]]
    held: Sequence[list[dict[str, str]]]

    def training(self, number: int) -> Sample:
        """Every third is a conversation, the others are look-back chats."""
        rng = random.Random(f"real/{number}")
        while True:
            made = self.chat(rng, self.chats) if number % 3 == 2 else self.lookback(rng)
            if SHORTEST < len(made.prefix) <= LONGEST and len(made.continuation) >= 8:
                return made

    def judging(self) -> Iterator[tuple[str, Sample, list[int]]]:
        """Name, sample, and the places of a code in the continuation."""
        rng = random.Random("held")
        for number in range(HELD):
            yield f"chat{number:03d}", self.chat(rng, self.held, 384, 64), []
        rng = random.Random("needle")
        for number in range(NEEDLES):
            yield f"needle{number:03d}", *self.needle(rng)

    def chat(
        self, rng: random.Random, chats: Sequence[Any], prefix: int = 0, following: int = 128
    ) -> Sample:
        """A conversation, cut anywhere, or after ``prefix`` tokens."""
        while True:
            tokens = self._tokens(self._rendered(rng.choice(chats))[:16000])
            cut = prefix or rng.randint(200, 640)
            if len(tokens) >= cut + following + 8:
                return Sample(tuple(tokens[:cut]), tuple(tokens[cut : cut + following]))

    def lookback(self, rng: random.Random) -> Sample:
        """Lines of a file with facts among them, and questions about both."""
        lines = self._lines(rng, rng.randint(250, 1100))
        asked = []
        for fact in self._facts(rng, rng.choice((0, 2, 3, 4, 4, 6, 8))):
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(SAID).format_map(fact))
            asked.append(tuple(rng.choice(of).format_map(fact) for of in (ASKED, ANSWERED)))
        asked = asked[:4] + self._about(rng, lines)
        rng.shuffle(asked)
        system = rng.choice(SYSTEMS)
        messages = [{"role": "system", "content": system}] if system else []
        opening = rng.choice(("Here is a text.\n\n", "Notes:\n", "```\n", ""))
        turns = [(opening + "\n".join(lines), "I have read it."), *asked[:5]]
        for question, answer in turns:
            messages += [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": answer}]
        count = len(messages) - 2 * len(asked[:5])
        whole, before = self._rendered(messages), self._rendered(messages[:count])
        if rng.random() < 0.5:  # the first question is read by the source, too
            before = self._rendered(messages[: count + 1], asks=True)
        tokens, cut = self._tokens(whole), len(self._tokens(before))
        return Sample(tuple(tokens[:cut]), tuple(tokens[cut : cut + ANSWERS]))

    def needle(self, rng: random.Random) -> tuple[Sample, list[int]]:
        """Four codes among other conversations' text, one of them asked for."""
        places, codes = rng.sample(HIDING, 4), [rng.randint(1000, 9999) for _ in range(4)]
        text = self.tokenizer.decode(self.chat(rng, self.held, 260, 8).prefix)
        text = text.replace("<|im_end|>", "").replace("<|im_start|>", "")
        both = zip(places, codes, strict=True)
        facts = " ".join(f"The code for the {place} is {code}." for place, code in both)
        n, chosen = len(text) // 5, rng.randrange(4)
        asked = f"{text[:n]}\n\n{facts}\n\n{text[n : 4 * n]}\n\nWhat is the code for the "
        message = {"role": "user", "content": f"{asked}{places[chosen]}?"}
        prefix = self._tokens(self._rendered([message], asks=True))
        said, code = f"The code for the {places[chosen]} is", f" {codes[chosen]}"
        first, whole = self._tokens(said), self._tokens(said + code + ".")
        digits = [i for i in range(len(first), len(whole) - 1) if self._digit(whole[i])]
        return Sample(tuple(prefix), tuple(whole)), digits

    def _digit(self, token: int) -> bool:
        return any(c.isdigit() for c in self.tokenizer.decode([token]))

    def _facts(self, rng: random.Random, count: int) -> list[dict[str, str]]:
        found = {}
        for _ in range(count):
            key = rng.choice(NAMES + WORDS), rng.choice(THINGS), rng.choice(KINDS)
            value = rng.choice((
                str(rng.randint(1000, 9999)), str(rng.randint(1000, 9999)), rng.choice(WORDS),
                f"{rng.choice(WORDS)}-{rng.randint(10, 99)}", f"{rng.randrange(16**6):06x}",
            ))  # fmt: skip
            found[key] = dict(zip(("name", "thing", "kind"), key, strict=True)) | {"value": value}
        return list(found.values())

    def _about(self, rng: random.Random, lines: Sequence[str]) -> list[tuple[str, ...]]:
        """Questions about lines: which one follows, how one goes on, some to be repeated."""
        whole = [n for n, line in enumerate(lines[:-1]) if 12 < len(line.strip()) < 110]
        found = []
        for n in rng.sample(whole, min(len(whole), rng.choice((1, 2, 2, 3)))):
            line, following = lines[n].strip(), lines[n + 1].strip()
            begun = " ".join(line.split()[: max(2, len(line.split()) // 3)])
            found.append(
                rng.choice(
                    (
                        (f"Which line follows `{line}`?", following[:140] or "An empty one."),
                        (f"Quote the line that begins with `{begun}`.", line[:140]),
                        (f"Repeat from `{line[:40]}` on.", "\n".join(lines[n : n + 3])[:220]),
                    )
                )
            )
        return found

    def _lines(self, rng: random.Random, size: int) -> list[str]:
        """About ``size`` characters of a file, in whole lines."""
        while True:
            lines = rng.choice(self.files).read_text(errors="ignore").split("\n")
            start = rng.randrange(len(lines))
            lengths = np.cumsum([len(line) + 1 for line in lines[start : start + 200]])
            stop = int(np.searchsorted(lengths, size)) + 1
            if stop <= len(lengths) and lengths[stop - 1] < 2 * size:
                return lines[start : start + stop]

    def _rendered(self, messages: Sequence[Any], asks: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=asks
        )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def read(args: argparse.Namespace) -> None:
    """Read with both models what is not there yet."""
    source, target = opened(args)
    chats, held = (
        [json.loads(line)["messages"] for line in Path(path).read_text("utf-8").splitlines()]
        for path in (args.chats, args.held)
    )
    files = sorted(path for folder in args.texts for path in Path(folder).rglob("*.py"))
    texts = Texts(target.tokenizer, files, chats, held)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, sample, places in texts.judging():
        keep(args.out / f"{name}.pt", source, target, sample, places)
    for number in range(args.count):
        keep(args.out / f"train{number:05d}.pt", source, target, texts.training(number), [])


def keep(
    path: Path, source: TorchModel, target: TorchModel, sample: Sample, places: list[int]
) -> None:
    """Write one reading, unless it is there."""
    if path.exists():
        return
    own = gradients.read(source, target, sample, "pre_norm", len(target.attentions))
    found = {
        "p": list(sample.prefix), "c": list(sample.continuation), "extra": places,
        "sk": torch.stack(own.states.keys), "sv": torch.stack(own.states.values),
        "tk": torch.stack(own.native.keys), "tv": torch.stack(own.native.values),
        "teacher": own.teacher.clone(),
    }  # fmt: skip
    torch.save(found, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def opened(args: argparse.Namespace) -> list[TorchModel]:
    torch.set_num_threads(args.threads)
    return [model.load(name, dtype=torch.bfloat16, device="cpu") for name in (args.a, args.b)]


# ---- what learns --------------------------------------------------------------------------------


@dataclass
class Reading:
    """A kept reading."""

    path: Path
    kept: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = torch.load(self.path, weights_only=True, mmap=True)

    @property
    def whole(self) -> gradients.TorchReading:
        """In the form that the package's passes take."""
        sample = Sample(tuple(self.kept["p"]), tuple(self.kept["c"]))
        states = States(tuple(self.kept["sk"]), tuple(self.kept["sv"]))
        return gradients.TorchReading(sample, states, States((), ()), self.kept["teacher"].clone())

    def inputs(self, m: Map) -> torch.Tensor:
        """What a map reads, (T, in)."""
        states = {"keys": self.kept["sk"], "values": self.kept["sv"]}
        return torch.cat([states[side][layer].float() for side, layer in m.reads], -1)

    def outputs(self, m: Map) -> torch.Tensor:
        """What the target itself has there, (T, out)."""
        states = {"keys": self.kept["tk"], "values": self.kept["tv"]}
        return torch.cat([states[side][m.layer].float() for side in m.writes], -1)


def closed(config: TranslatorConfig, paths: Sequence[Path], way: str) -> dict[str, np.ndarray]:
    """The closed form of some readings, with the coordinates of a way to learn."""
    arrays, sums, tokens = dict[str, np.ndarray](), dict[str, list[Any]](), 0
    for path in paths:
        one = Reading(path)
        tokens += one.kept["sk"].shape[1]
        for m in maps_of(config):
            x, y = one.inputs(m), one.outputs(m)
            products = [(x.T @ x).double(), (x.T @ y).double(), (y.double() ** 2).sum(0)]
            there = sums.setdefault(m.name, [0.0, 0.0, 0.0])
            sums[m.name] = [a + b for a, b in zip(there, products, strict=True)]
    for m in maps_of(config):
        xx, xy, yy = (each.numpy() for each in sums[m.name])
        moments = Moments(xx, xy, yy, tokens)
        solved = closed_form.solve(moments, ridge=None)
        arrays[f"{m.name}.weight"] = solved.weight.astype(np.float32)
        if way == "weights":
            continue
        if way == "layers":
            layers = np.repeat(range(len(m.reads)), m.inputs // len(m.reads))
            apart = np.where(layers[:, None] == layers, moments.xx, 0.0)
            moments = Moments(apart, moments.xy, moments.yy, tokens)
        found = closed_form.coordinates([moments], [solved])
        arrays |= {f"{m.name}.weight{what}": array[0] for what, array in found.items()}
    return arrays


def judged(target: TorchModel, made: TorchTranslator, folder: Path) -> tuple[float, float, float]:
    """KL on held-out conversations, recall of codes, and the KL of their answers."""
    chats = [
        gradients.conversation_loss(target, made, Reading(path).whole, KL).kl
        for path in sorted(folder.glob("chat*.pt"))
    ]
    hits, needles = [], []
    for path in sorted(folder.glob("needle*.pt")):
        one = Reading(path)
        loss = gradients.conversation_loss(target, made, one.whole, KL)
        hits.append(all(loss.best[k] == one.kept["c"][k] for k in one.kept["extra"]))
        needles.append(loss.kl)
    return float(np.mean(chats)), float(np.mean(hits)), float(np.mean(needles))


def learn(args: argparse.Namespace) -> None:
    """Distil, and print what the held-out items say."""
    source, target = opened(args)
    config = make_config(source, target, TrainingPlan(nu=args.nu))
    del source
    paths = sorted(args.readings.glob("train*.pt"))
    arrays = closed(config, paths[: args.fit], args.way)
    made = TorchTranslator.from_arrays(config, arrays, "cpu")
    spent, step = 0.0, 0
    if args.out.exists():
        kept = dict(np.load(args.out))
        spent, step = kept.pop("spent").item(), int(kept.pop("number"))
        made.restore(kept)
    order, rng, losses = list[Path](), random.Random(step), list[float]()
    said = time.process_time()  # of the process: what other programs take does not count
    started = said - spent
    while (gone := time.process_time() - started) < 60 * args.minutes and step < args.steps:
        paths = sorted(args.readings.glob("train*.pt"))
        for _ in range(args.batch):
            order = order or rng.sample(paths, len(paths))
            one = Reading(order.pop()).whole
            loss = gradients.conversation_loss(target, made, one, KL, scale=1 / args.batch)
            losses.append(loss.kl)
        step += 1
        place = max(gone / (60 * args.minutes), step / args.steps)
        fall = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * place))
        made.update(args.lr * min(1, step / 10) * fall, math.inf)
        if time.process_time() - said > args.every:
            tell(target, made, args, step, losses)
            said, losses = time.process_time(), []
            keep_state(args.out, made, step, time.process_time() - started)
    tell(target, made, args, step, losses)
    keep_state(args.out, made, step, time.process_time() - started)


def keep_state(path: Path, made: TorchTranslator, step: int, spent: float) -> None:
    """Replace what a run goes on from."""
    whole: dict[str, Any] = {"number": step, "spent": spent, **made.state()}
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **whole)
    temporary.rename(path)


def tell(
    target: TorchModel, made: TorchTranslator, args: argparse.Namespace, step: int, losses: Any
) -> None:
    """A line of the curve."""
    names = ("kl_of_chats", "recall", "kl_of_needles")
    found = dict(zip(names, judged(target, made, args.readings), strict=True))
    train = float(np.mean(losses)) if losses else None
    facts = {"way": args.way, "lr": args.lr, "nu": args.nu, "step": step, "train_kl": train}
    print(json.dumps({**facts, **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("read", "learn"))
    parser.add_argument("a", help="the source, a folder")
    parser.add_argument("b", help="the target, a folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", nargs="*", default=[], help="folders of source code")
    parser.add_argument("--chats", help="JSONL of conversations")
    parser.add_argument("--held", help="JSONL of others, which judge")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--readings", type=Path)
    parser.add_argument("--way", choices=WAYS, default="map")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--nu", type=int, default=4)
    parser.add_argument("--fit", type=int, default=100, help="readings of the closed form")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=1e6, help="of the process")
    parser.add_argument("--every", type=float, default=600, help="seconds between two judgements")
    args = parser.parse_args()
    {"read": read, "learn": learn}[args.step](args)


if __name__ == "__main__":
    main()
