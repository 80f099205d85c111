"""What a guard catches: detections and false alarms, by what is wrong and by the limit.

    python benchmarks/guard.py --json FILE
    python benchmarks/guard.py --switches --json FILE

Prompts on which a translator does as on its receipt (other dialogues of its lengths), and six kinds
of trouble: its maps moved by one layer, or shuffled; prompts beyond its lengths; other texts (other
English, German, code, random tokens); targets whose weights were changed a little and a lot. For
each prompt: the KL between both models over its last 32 tokens (``--tokens``), which the guard
compares with the receipt; the excess of the target's loss over the source's, which it does not use;
and what was lost in fact, the KL of the target's answer to the one from its own cache, and whether
the asked value is right. The same KL with the target's own cache says how much of it is the
translation's.

An alarm is a KL above the receipt's mean by so many of its standard deviations. The area under the
curve is the chance that a prompt in trouble has more than one that is not.

``--switches``: the same in a ``Conversation`` of both models in turns, three switches each, where
the tokens compared are the first that the outgoing model lacks. Dialogues, wrong maps, other texts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from quality import model_folder

from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.fill import bring
from kvlingo_mlx.engine.guarding import predictions
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.evaluation import conditions, continuation, needles
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.grading import GUARD, receipt_of
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.threads import finished
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

PAIRS = ("tiny-qwen3-s:tiny-qwen3-l", "tiny-qwen3-l:tiny-qwen3-s", "tiny-qwen3-s:tiny-qwen3-moe")
WIDTHS = (2, 3, 4, 6, 8)  # standard deviations above the receipt's mean
LONG = (34, 68, 118)  # facts
NOISE = (0.1, 0.3, 0.6)  # of a weight's own standard deviation
ANSWER = 12  # tokens of an answer that nobody asked for a value
Asked = tuple[list[int], list[int], bool]  # a prompt, its answer, whether that names a value
TEXTS = {
    "German": (
        "Der alte Mann ging langsam durch die Strasse.", "Wir haben gestern viel gearbeitet.",
        "Das Wetter ist heute schlecht und kalt.", "Niemand wusste, wo der Schluessel lag.",
        "Die Kinder spielen im Garten hinter dem Haus.",
    ),
    "code": (
        "def f(x):\n    return x + 1", "for i in range(10):\n    print(i)", "import numpy as np",
        "if a == b:\n    raise ValueError('no')", "while True:\n    pass", "class A:\n    pass",
    ),
    "other English": tuple(
        f"{subject} {verb} {thing} {ending}."
        for subject, verb, thing, ending in itertools.product(
            needles.SUBJECTS, needles.VERBS[:3], needles.OBJECTS[:4], needles.ENDINGS[:2]
        )
    ),
}  # fmt: skip


# ---- prompts ----------------------------------------------------------------------------------


def asked(target: LanguageModel, source: LanguageModel, count: int, facts: tuple[int, int],
          seed: int = 11) -> Iterator[Asked]:  # fmt: skip
    """Dialogues up to their first question, and its right answer."""
    for talk in dialogues.held_out(count, seed=seed, facts=facts):
        sample = continuation.recall_sample(target, talk, source)
        answer = sample.continuation[: sample.recalled[0][-1] + 1]
        yield list(sample.prefix), list(answer), True


def told(target: LanguageModel, texts: Sequence[str], count: int) -> Iterator[Asked]:
    """Chats that say something and ask to go on, and what the target answers alone."""
    rng = random.Random(3)
    for _ in range(count):
        text = " ".join(rng.choice(texts) for _ in range(12))
        message = {"role": "user", "content": f"{text} {rng.choice(dialogues.QUESTIONS[:1])}"}
        tokens = target.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, enable_thinking=False
        )
        yield list(tokens), own_answer(target, tokens), False


def drawn(target: LanguageModel, count: int) -> Iterator[Asked]:
    """Random tokens, and what the target makes of them."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(5, 1000, 200).tolist()
        yield tokens, own_answer(target, tokens), False


def own_answer(target: LanguageModel, tokens: Sequence[int]) -> list[int]:
    cache = conditions.native(target)(tokens)
    steps = generate_step(
        mx.array(tokens[-1:]), target.model, prompt_cache=cache, max_tokens=ANSWER
    )
    return [int(token) for token, _ in steps]


# ---- what is wrong ----------------------------------------------------------------------------


def moved(translator: Translator) -> Translator:
    """A translator whose maps are those of the next layer."""
    depth, weights = len(translator.config.target.layers), translator.to_weights()
    arrays = {}
    for name, array in weights.arrays.items():
        side, layer, rest = name.split(".", 2)
        arrays[f"{side}.{(int(layer) + 1) % depth}.{rest}"] = array
    return build(translator.config, Weights(weights.dtype, arrays))


def tuned(folder: Path, noise: float) -> LanguageModel:
    """A model whose layers' matrices were changed by noise, as a fine-tune would change them."""
    model = load(folder)
    mx.random.seed(1)
    changed = [
        (name, w + noise * mx.std(w) * mx.random.normal(w.shape) if is_matrix(name, w) else w)
        for name, w in tree_flatten(model.model.parameters())
    ]
    model.model.update(tree_unflatten(changed))
    mx.eval(model.model.parameters())
    return model


def is_matrix(name: str, weight: mx.array) -> bool:
    return "layers." in name and weight.ndim >= 2


# ---- measuring --------------------------------------------------------------------------------


def measured(
    source: LanguageModel, target: LanguageModel, translator: Translator, given: Asked, number: int
) -> dict[str, float]:
    """What the guard sees of a prompt, and what its translation costs."""
    tokens, answer, is_value = given
    read, heard = tokens[-1 - number : -1], []
    line = bring(Plan(source, target, tokens[:-number], translator))
    finished(line.read(read, number, heard.append))
    hidden = hidden_states(source, tokens[:-1], make_prompt_cache(source.model))[-number:]
    p, q = predictions((source, hidden), (target, *heard))
    true = mx.array(tokens[-number:])[:, None]
    losses = [-mx.take_along_axis(each, true, axis=-1).mean().item() for each in (p, q)]
    ways = [conditions.translated(source, target, translator), conditions.native(target)]
    run = mx.array([[tokens[-1], *answer[:-1]]])
    logs = [nn.log_softmax(target.model(run, cache=make(tokens))[0]) for make in ways]
    lost = (mx.exp(logs[1]) * (logs[1] - logs[0])).sum(-1).mean().item()
    hits = [np.array_equal(np.array(each.argmax(-1)), answer) for each in logs]
    return {
        "divergence": (mx.exp(p) * (p - q)).sum(-1).mean().item(),
        "excess": losses[1] - losses[0], "answer_kl": lost,
        "hit": float(hits[0]) if is_value else float("nan"),
        "native_hit": float(hits[1]) if is_value else float("nan"),
        "own_divergence": own_divergence(source, target, tokens, number),
    }  # fmt: skip


def own_divergence(
    source: LanguageModel, target: LanguageModel, tokens: Sequence[int], number: int
) -> float:
    """The same KL where the target has read everything itself."""
    found = []
    for model in (source, target):
        logits = model.model(mx.array([tokens[:-1]]))[0, -number:]
        found.append(nn.log_softmax(logits.astype(mx.float32)))
    return (mx.exp(found[0]) * (found[0] - found[1])).sum(-1).mean().item()


def judged(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    folders = [model_folder(name, args.zoo) for name in names]
    source, target = map(load, folders)
    translator = load_translator(TRANSLATORS / "--".join(names))
    usual = receipt_of(translator.config).guard
    few, shapes = args.prompts, (12, 28)
    fine = list(asked(target, source, 2 * few, shapes))
    groups: dict[str, Callable[[], tuple[Any, Translator, Sequence[Asked]]]] = {
        "as on the receipt": lambda: (target, translator, fine),
        "maps moved by a layer": lambda: (target, moved(translator), fine[:few]),
        "maps shuffled": lambda: (target, conditions.shuffled(translator), fine[:few]),
    }
    for facts in LONG:
        groups[f"{facts} facts"] = lambda facts=facts: (
            target, translator, list(asked(target, source, few, (facts, facts)))
        )  # fmt: skip
    for name, texts in TEXTS.items():
        groups[name] = lambda texts=texts: (target, translator, list(told(target, texts, few)))
    groups["random tokens"] = lambda: (target, translator, list(drawn(target, few)))
    for noise in NOISE:
        groups[f"target changed by {noise:g}"] = lambda noise=noise: (
            tuned(folders[1], noise), translator, fine[:few]
        )  # fmt: skip
    rows: dict[str, Any] = {}
    for name, make in groups.items():
        model, found, prompts = make()
        rows[name] = [measured(source, model, found, each, args.tokens) for each in prompts]
    return {"usual": vars(usual), "groups": rows, "rates": rates(rows, usual, args.tokens)}


def switched(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a guard finds at the switches of conversations, by what is wrong with them."""
    names = pair.split(":")
    ends = dict(zip("ab", (load(model_folder(name, args.zoo)) for name in names), strict=True))
    good = [load_translator(TRANSLATORS / "--".join(order)) for order in (names, names[::-1])]
    rng = random.Random(5)
    known = [
        [[*t.messages[:-1], {"role": "user", "content": t.questions[0]}], *t.questions[1:]]
        for t in dialogues.held_out(args.prompts, seed=11, facts=(12, 24), questions=4)
    ]
    groups: dict[str, tuple[list[Translator], list[list[Any]]]] = {
        "as on the receipt": (good, known),
        "maps moved by a layer": ([moved(t) for t in good], known),
        "maps shuffled": ([conditions.shuffled(t) for t in good], known),
    }
    for name, texts in TEXTS.items():
        said = [[" ".join(rng.choices(texts, k=12)) for _ in range(4)] for _ in known]
        groups[name] = good, said
    results = {}
    for name, (translators, talks) in groups.items():
        rows = []
        for turns in talks:
            talk = Conversation(
                ends, translators, enable_thinking=False, verbatim=True, guard=args.tokens
            )
            for number, message in enumerate(turns):
                *_, last = talk.stream_reply("ab"[number % 2], message, max_tokens=16)
                if last.guarded is not None:
                    found = last.guarded
                    rows.append({"turn": number, "tokens": found.tokens, "limit": found.limit,
                                 "divergence": found.divergence})  # fmt: skip
        alarms = float(np.mean([row["divergence"] > row["limit"] for row in rows]))
        results[name] = {"switches": len(rows), "alarms": alarms, "rows": rows}
        print(f"  {pair}, {name:24s} {len(rows)} switches, in doubt {alarms:.2f}", flush=True)
    return {"switches": results}


def rates(
    rows: dict[str, list[dict[str, float]]], usual: Any, number: int
) -> dict[str, dict[str, Any]]:
    """For each group: alarms at each limit, areas under both curves, and what was lost."""
    base, spread = (
        rows["as on the receipt"],
        usual.spread * (max(1.0, usual.tokens / number)) ** 0.5,
    )
    found = {}
    for name, each in rows.items():
        column = {key: np.array([row[key] for row in each]) for key in each[0]}
        alarms = {
            str(width): float((column["divergence"] > usual.mean + width * spread).mean())
            for width in WIDTHS
        }
        means = {key: float(np.mean(column[key])) for key in column}
        found[name] = {"alarms": alarms, "means": means, "prompts": len(each)} | {
            f"area_{key}": area(column[key], np.array([row[key] for row in base]))
            for key in ("divergence", "excess")
        }
    return found


def area(bad: np.ndarray, good: np.ndarray) -> float:
    """The chance that one of the bad is above one of the good; a tie counts half."""
    above = (bad[:, None] > good).mean() + 0.5 * (bad[:, None] == good).mean()
    return float(above)


def show(pair: str, results: dict[str, Any]) -> None:
    print(f"\n{pair}: usual {results['usual']}")
    for name, row in results["rates"].items():
        alarms = "  ".join(f"{width} sd {share:.2f}" for width, share in row["alarms"].items())
        means, areas = row["means"], (row["area_divergence"], row["area_excess"])
        print(f"  {name:24s} KL {means['divergence']:.2f} (own cache "
              f"{means['own_divergence']:.2f})  alarms {alarms}  area {areas[0]:.2f} "
              f"(loss {areas[1]:.2f})  answer's KL {means['answer_kl']:.3f}, right "
              f"{means['hit']:.2f} of {means['native_hit']:.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=GUARD, help="that are compared")
    parser.add_argument("--json", help="append a record a pair to this file")
    parser.add_argument("--switches", action="store_true", help="in conversations")
    args = parser.parse_args()
    warnings.simplefilter("ignore", KVLingoWarning)  # each doubt warns
    for pair in args.pairs:
        results = switched(pair, args) if args.switches else judged(pair, args)
        if not args.switches:
            show(pair, results)
        if args.json:
            config = {"pair": pair, "prompts": args.prompts, "tokens": args.tokens}
            kept = {
                name: results[name] for name in ("usual", "rates", "switches") if name in results
            }
            measure.append_json(args.json, measure.record("guard", config, kept))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
