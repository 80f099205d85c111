"""What healing brings and costs: quality over an answer and over turns, and the share of decoding.

    python benchmarks/healing.py quality --json FILE
    python benchmarks/healing.py tokens --json FILE
    python benchmarks/healing.py turns --json FILE
    python benchmarks/healing.py cost --json FILE

``quality``: dialogues with six questions, answered one after the other in a known continuation.
The target reads the prompt behind its translation after the first answer, as while a user types,
and may read its answer again, too. Recall of each question, and KL to the target's own cache by
place, beside a translation that stays one, one or two native layers, re-prefill, and the controls:
hidden, and a translator with its layers shuffled, healed and not.

``tokens``: one answer of a hundred tokens, read on token by token in a known continuation, with a
chunk of the prompt read between two tokens or not, above native layers or not. KL and the share of
equal first choices at the first, tenth and hundredth token, and over the twenty that follow, which
stand for the next turn.

``turns``: twenty questions, one a turn, by two models in turns through ``Conversation``, healed
after every answer. ``kept`` leaves what a model wrote after translated tokens; ``read again`` does
not. Hits by turn, in both orders.

``cost``: decoding beside reading, on a prompt of so many tokens: its share of the speed it has
without, for each share that is asked for, and the longest chunk of idle healing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
from conversations import hit, talk_of
from quality import model_folder, standard_error

from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine import healing
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.fill import bring
from kvlingo_mlx.engine.generation import stream_generate
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure

PAIRS = ("tiny-qwen3-s:tiny-qwen3-l", "tiny-qwen3-l:tiny-qwen3-s", "tiny-qwen3-s:tiny-qwen3-moe")
CHUNK = 64  # tokens read at a time
SHARES = (0.25, 0.5, 0.75)
Maker = Callable[[Any], list]


# ---- quality over one answer ------------------------------------------------------------------


def read_on(
    target: LanguageModel, cache: list, sample: Any, heal: str
) -> Iterator[tuple[int, mx.array]]:
    """Log probabilities of a continuation, block by block, healed after the first answer."""
    tokens = [*sample.prefix, *sample.continuation[:-1]]
    begun, until = len(sample.prefix) - 1, len(tokens)
    answered = begun + sample.answers[1] if heal else until
    for start, stop in ((begun, answered), (answered, until)):
        if start == stop:
            continue
        if start == answered:
            last = answered if heal == "read again" else begun
            for place in range(0, last, CHUNK):
                healing.reread(target, cache, tokens[place : min(place + CHUNK, last)], place)
        logits = target.model(mx.array(tokens[start:stop])[None], cache=cache)[0]
        yield start - begun, nn.log_softmax(logits.astype(mx.float32))


def makers_of(
    source: LanguageModel, target: LanguageModel, folder: Path
) -> dict[str, tuple[Maker, str]]:
    """Each condition: what fills the cache, and how it is healed after the first answer."""
    found = load_translator(folder)
    plain = conditions.translated(source, target, found)
    wrong = conditions.translated(source, target, conditions.shuffled(found))
    return {
        "native": (conditions.native(target), ""),
        "translated": (plain, ""),
        "healed, answer kept": (plain, "kept"),
        "healed, answer read again": (plain, "read again"),
        "one native layer": (conditions.translated(source, target, found, 1), ""),
        "two native layers": (conditions.translated(source, target, found, 2), ""),
        "hidden": (conditions.hidden(target), ""),
        "shuffled": (wrong, ""),
        "shuffled, healed, answer kept": (wrong, "kept"),
        "shuffled, healed, answer read again": (wrong, "read again"),
    }


def judged(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    makers = makers_of(source, target, TRANSLATORS / "--".join(names))
    hits: dict[str, list[list[bool]]] = {name: [] for name in makers}
    kls: dict[str, list[list[float]]] = {name: [] for name in makers}
    for talk in dialogues.held_out(args.dialogues, seed=11, facts=tuple(args.facts)):
        sample = quality.recall_sample(target, talk, source)
        bounds = [*sample.answers, len(sample.continuation)]
        reference = None
        for name, (make, heal) in makers.items():
            parts = [logs for _, logs in read_on(target, make(sample.read), sample, heal)]
            logs = mx.concatenate(parts)
            reference = logs if reference is None else reference
            kl = np.array((mx.exp(reference) * (reference - logs)).sum(-1))
            right = np.array(mx.argmax(logs, axis=-1)) == np.array(sample.continuation)
            hits[name].append([bool(right[list(row)].all()) for row in sample.recalled])
            kls[name].append([float(kl[a:b].mean()) for a, b in itertools.pairwise(bounds)])
    print(f"\n{pair}")
    rows = {}
    for name in makers:
        by_hit, by_kl = np.array(hits[name], float), np.array(kls[name])
        rows[name] = {
            "recall": by_hit.mean(0).tolist(), "kl": by_kl.mean(0).tolist(),
            "recall_later": float(by_hit[:, 1:].mean()),
            "recall_later_se": standard_error(tuple(by_hit[:, 1:].mean(1))),
            "kl_later": float(by_kl[:, 1:].mean()),
            "kl_later_se": standard_error(tuple(by_kl[:, 1:].mean(1))),
        }  # fmt: skip
        row = rows[name]
        print(f"  {name:36s} first {row['recall'][0]:.2f} (KL {row['kl'][0]:.4f})  later "
              f"{row['recall_later']:.3f} +- {row['recall_later_se']:.3f} "
              f"(KL {row['kl_later']:.5f})", flush=True)  # fmt: skip
    return rows


# ---- quality over the tokens of an answer -----------------------------------------------------

STEP = 4  # prompt tokens that are read for each token of the answer
PLACES = {"1": (0, 1), "10": (9, 10), "100": (99, 100), "next": (100, 120)}
BEHIND = {
    "native": (None, False), "translated": (0, False), "interleaved": (0, True),
    "one native layer": (1, False), "two native layers": (2, False), "layers, one": (1, True),
    "layers, two": (2, True), "hidden": (None, False), "shuffled": (0, False),
    "shuffled, interleaved": (0, True),
}  # fmt: skip


def read_behind(
    source: LanguageModel, target: LanguageModel, translator: Any, sample: Any, name: str
) -> mx.array:
    """Log probabilities of a continuation's first 120 tokens, one after the other."""
    layers, heals = BEHIND[name]
    prefix, reader = list(sample.prefix), None
    if layers is None:
        make = conditions.native if name == "native" else conditions.hidden
        cache = make(target)(prefix)
    else:
        plan = Plan(source, target, prefix, translator, Native(layers))
        line = bring(plan)
        cache = line.cache
        reader = functools.partial(line.heal, answers=True) if heals else None
    rows = []
    for token in [prefix[-1], *sample.continuation[: PLACES["next"][1] - 1]]:
        logits = target.model(mx.array([[token]]), cache=cache)[0]
        rows.append(nn.log_softmax(logits.astype(mx.float32)))
        mx.eval(rows[-1])
        if reader is not None:
            reader(STEP)
    return mx.concatenate(rows)


def by_token(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    found = load_translator(TRANSLATORS / "--".join(names))
    wrong = conditions.shuffled(found)
    kls: dict[str, list[np.ndarray]] = {name: [] for name in BEHIND}
    same: dict[str, list[np.ndarray]] = {name: [] for name in BEHIND}
    for talk in dialogues.held_out(args.dialogues, seed=11, facts=tuple(args.facts)):
        sample = quality.recall_sample(target, talk, source)
        reference = None
        for name in BEHIND:
            maps = wrong if name.startswith("shuffled") else found
            logs = read_behind(source, target, maps, sample, name)
            reference = logs if reference is None else reference
            kls[name].append(np.array((mx.exp(reference) * (reference - logs)).sum(-1)))
            same[name].append(np.array(logs.argmax(-1) == reference.argmax(-1)))
    print(f"\n{pair}")
    rows: dict[str, Any] = {}
    for name in BEHIND:
        rows[name] = {}
        for place, (start, stop) in PLACES.items():
            kl = np.array([each[start:stop].mean() for each in kls[name]])
            equal = np.array([each[start:stop].mean() for each in same[name]])
            rows[name][place] = {
                "kl": float(kl.mean()), "kl_se": standard_error(tuple(kl)),
                "same": float(equal.mean()), "same_se": standard_error(tuple(equal)),
            }  # fmt: skip
        told = "  ".join(f"{p}: {r['kl']:.4f} ({r['same']:.2f})" for p, r in rows[name].items())
        print(f"  {name:24s} {told}", flush=True)
    return rows


# ---- twenty turns -----------------------------------------------------------------------------

HEALED = {"reprefill": None, "alternated": None, "healed, kept": False, "healed, read again": True}


def turns_of(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    models = {name: load(model_folder(name, args.zoo)) for name in names}
    folders = [TRANSLATORS / "--".join(each) for each in itertools.permutations(names)]
    found: dict[str, Any] = {}
    drawn = list(
        dialogues.held_out(
            args.dialogues, seed=0, facts=(args.questions, args.questions), questions=args.questions
        )
    )
    for order in itertools.permutations(names):
        rows: dict[str, list[list[int]]] = {way: [] for way in HEALED}
        for talk, (way, answers) in itertools.product(map(talk_of, drawn), HEALED.items()):
            switching = "reprefill" if way == "reprefill" else "alternated"
            held = Conversation(
                models, folders, switching=switching, enable_thinking=False, verbatim=True
            )
            rows[way].append([])
            for number, turn in enumerate(talk.turns):
                said = held.reply(order[number % 2], list(turn.messages), max_tokens=24)
                rows[way][-1].append(hit(said, turn))
                if answers is not None:
                    for name in names:
                        assert held.heal(name, answers=answers) == 0
        found[f"{order[0]} first"] = rows
        print(f"\n{pair}, {order[0]} first, hits of turns 1-10, 11-20, and 20")
        for way, each in rows.items():
            by = np.mean(each, axis=0)
            print(
                f"  {way:20s} {by[:10].mean():.3f}  {by[10:].mean():.3f}  {by[-1]:.3f}", flush=True
            )
    return found


# ---- cost -------------------------------------------------------------------------------------


def cost_of(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token of an answer, without healing and beside it, in turns."""
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    translator = load_translator(TRANSLATORS / "--".join(names))
    rng = np.random.default_rng(0)
    prompt = rng.integers(5, 200, args.tokens).tolist()
    never = lambda tokens, logits: mx.where(ends(target, logits), -mx.inf, logits)  # noqa: E731

    def run(**options: Any) -> dict[str, Any]:
        """An answer: seconds to its first token, then a token while the prompt is being read."""
        reread, chunks = healing.reread, list[tuple[float, float, int]]()

        def counted(
            model: Any, cache: Any, tokens: Sequence[int], start: int, above: Any = None
        ) -> None:
            began = time.perf_counter()
            reread(model, cache, tokens, start, above)
            chunks.append((began, time.perf_counter(), len(tokens)))

        begun, stamps = time.perf_counter(), list[float]()
        healing.reread = counted
        try:
            for _ in stream_generate(
                source, target, prompt, translator=translator, max_tokens=args.answer,
                logits_processors=[never], **options,
            ):  # fmt: skip
                stamps.append(time.perf_counter())
        finally:
            healing.reread = reread
        assert len(stamps) == args.answer
        over = chunks[-1][1] if chunks else stamps[-1]
        during = [stamp for stamp in stamps if stamp <= over] or stamps[:1]
        return {
            "first_s": stamps[0] - begun,
            "token_s": (during[-1] - stamps[0]) / max(1, len(during) - 1),
            "tokens": len(during),
            "read": sum(number for *_, number in chunks),
            "longest_chunk_s": max((end - began for began, end, _ in chunks), default=0.0),
        }

    ways: dict[str, dict[str, Any]] = {"none": {}} | {
        f"{share:g}": {"heal": "interleaved", "heal_share": share} for share in SHARES
    }
    run()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _, (name, options) in itertools.product(range(args.trials), ways.items()):
        found[name].append(run(**options))
    base = measure.median([each["token_s"] for each in found["none"]])
    print(f"\n{pair}, a prompt of {args.tokens} tokens")
    for name, runs in found.items():
        each = {key: measure.median([run[key] for run in runs]) for key in runs[0]}
        print(f"  share {name:5s}: {base / each['token_s']:.2f} of the speed without it, over the "
              f"{each['tokens']:.0f} tokens during which {each['read']:.0f} were read; longest "
              f"chunk {1e3 * each['longest_chunk_s']:.0f} ms", flush=True)  # fmt: skip
    return found


def ends(target: LanguageModel, logits: mx.array) -> mx.array:
    """Which of the logits are of tokens that end an answer."""
    stops = mx.array(sorted(target.tokenizer.eos_token_ids))
    return (mx.arange(logits.shape[-1])[:, None] == stops).any(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["quality", "tokens", "turns", "cost"])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--facts", type=int, nargs=2, default=[12, 28], metavar=("FEWEST", "MOST"))
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", help="append a record a pair to this file")
    args = parser.parse_args()
    run = {"quality": judged, "tokens": by_token, "turns": turns_of, "cost": cost_of}[args.what]
    for pair in args.pairs:
        results = run(pair, args)
        if args.json:
            config = {k: v for k, v in vars(args).items() if k not in ("json", "zoo", "pairs")}
            record = measure.record("healing", {**config, "pair": pair}, results)
            measure.append_json(args.json, record)
    print(measure.machine_line())


if __name__ == "__main__":
    main()
