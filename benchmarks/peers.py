"""Ways to the first token after a switch, side by side: quality against time, on the same prompts.

    python benchmarks/peers.py ways --lengths 256 512 1024 2048 --json FILE
    python benchmarks/peers.py fit --json FILE

``ways``: on every pair of the zoo, dialogues of about so many tokens with facts to recall, and
RULER's needles in prompts of that length. Each way fills the target's cache once the source has
read the prompt: the target reads all of it (native); a closed form and the self-distilled
translator of this package, plain and with native layers; VeloxQuant-MLX's mapper, fitted by itself
on the same conversations; the source's cache verbatim; DroidSpeak; the last part of the prompt;
its last messages; and speculative prefill, in which the source's attention chooses what the target
reads. Hidden and shuffled are the controls. Times to the first token are of the same prompts,
taken in turns, as ratios to native. A summary is no way here: the zoo's models write none.

``fit``: seconds and memory of a closed form at equal source layers and on equal tokens, both
programs in turns, the reading of the conversations apart from what is solved. Ours also with the
receipt that ``fit`` measures on conversations of its own; the other program measures none.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from kvlingo_mlx.backend import mx

import numpy as np
import peer_ways as ways
from quality import PAIRS as EMBEDDED
from quality import model_folder, standard_error
from translation_cost import model_of_shape

from benchmarks.paper.evaluation import droidspeak, recalled, reuse
from benchmarks.paper.timing.memory import grown_bytes
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation import continuation, lineup, probes
from kvlingo_mlx.evaluation.conditions import shuffled, target_ids
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.fitting.rows import DeviceRows
from kvlingo_mlx.format.assignment import by_depth
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.timing.switching import interleaved, switch_times
from kvlingo_mlx.tokenization.samples import Sample, other_tokenizer, to_samples
from kvlingo_mlx.translators import build

PAIRS = (
    *EMBEDDED,
    "tiny-qwen3-s:tiny-mistral",
    "tiny-mistral:tiny-qwen3-s",
    "tiny-gemma3-s:tiny-gemma3-l",
    "tiny-gemma3-l:tiny-gemma3-s",
    "tiny-gemma4-s:tiny-gemma4-l",
    "tiny-gemma4-l:tiny-gemma4-s",
    "tiny-qwen3-narrow:tiny-qwen3-l",
)
K = 8  # the peer's default of source layers; no more than there are
SHARES = (0.25, 0.5)  # of the prompt that the target reads, where it reads a part
NATIVE = (1, 2)  # native layers
TOKENS_PER_FACT = 15
MOST_FACTS = 118  # of the 120 that can be told apart
ASKED = 6  # questions of a dialogue
Named = dict[str, tuple[ways.Way, Callable | None]]


def records(count: int, most: int) -> list[dict[str, Any]]:
    talks = dialogues.for_fitting(count, facts=(4, most))
    return [{"messages": talk.conversation()} for talk in talks]


def fitted_mapper(
    source: LanguageModel, target: LanguageModel, samples: Sequence[Sample], k: int
) -> Any:
    """The peer's mapper of these conversations, at its own settings but for ``k``."""
    read = [[ways.read_by_layer(m, s.prefix) for s in samples] for m in (source, target)]
    places = mx.concatenate([mx.arange(len(s.prefix)) for s in samples])
    return solved(source, target, *map(joined, read), places, k)


def joined(read: Sequence[dict[int, tuple[mx.array, ...]]]) -> dict[int, tuple[mx.array, ...]]:
    """The caches of several conversations as one."""
    found = {
        layer: tuple(mx.concatenate([r[layer][side] for r in read], axis=1) for side in (0, 1))
        for layer in read[0]
    }
    mx.eval(found)
    return found


def solved(source, target, theirs, own, places, k: int) -> Any:
    from veloxquant_mlx.transfer import MapperConfig, ModelKVSpec, fit_mapper

    specs = (ModelKVSpec.from_model(model.model) for model in (source, target))
    return fit_mapper(theirs, own, *specs, places, MapperConfig(k=k))


def all_ways(
    names: Sequence[str], source: LanguageModel, target: LanguageModel, args: argparse.Namespace
) -> dict[str, ways.Way]:
    """What is compared, by name."""
    k = min(K, len(source.attentions))
    talks = records(args.fit_dialogues, args.fit_facts)
    both = source, target
    closed = fit(*both, talks, nu=min(k, most_layers(source, target)))
    kinds = {
        f"closed form, nu = {closed.config.nu}": closed,
        "closed form, nu = 1": fit(*both, talks),
    }
    for root in (TRANSLATORS, args.zoo / "translators"):
        if (root / "--".join(names)).exists():
            kinds["self-distilled"] = load_translator(root / "--".join(names))
    found: dict[str, ways.Way] = {}
    for name, translator in kinds.items():
        hybrid = name == "self-distilled" and translator.config.alignment is None
        numbers = (0, *NATIVE) if hybrid else (0,)
        for j in numbers:
            told = f"{name}, {j} native" if j else name
            found[told] = lineup.translated(told, *both, [translator], j).at_switch
    last = list(kinds.values())[-1]
    found["shuffled"] = lineup.translated("shuffled", *both, [shuffled(last)]).at_switch
    found["hidden"] = lambda tokens: functools.partial(lineup.conditions.empty, target)
    for name in ("reuse", "droidspeak"):
        try:
            spec = droidspeak.spelt(name, *both)
            found[name] = reuse.baseline(spec, *both).at_switch
        except IncompatibleTranslatorError as problem:
            print(f"no {name}: {problem}")
    try:
        check_tokenizers(source, target)
        samples = [s for s in to_samples(talks, target.tokenizer, target.context_length)]
        mapper = fitted_mapper(*both, samples, k)
        found[f"VeloxQuant, k = {k}"] = ways.mapped(*both, mapper)
    except (ValueError, AttributeError, IncompatibleTranslatorError) as problem:
        print(f"no VeloxQuant: {' '.join(str(problem).split())[:150]}")
    opening = target.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    one = other_tokenizer(source.tokenizer, target.tokenizer) is None
    for share in SHARES:
        found[f"last {share:.0%} of the prompt"] = by_target(ways.truncated(target, share))
        if len(opening) == 1:
            turns = ways.last_turns(target, share, opening[0])
            found[f"last messages, {share:.0%}"] = by_target(turns)
        if one and (chosen := ways.speculative(*both, share)) is not None:
            found[f"speculative prefill, {share:.0%}"] = chosen
    if not one:
        found["text"] = lineup.baseline("text", *both, [last]).at_switch
    return found


def by_target(way: ways.Way) -> ways.Way:
    """A way for which the target's own tokens are enough, also between two tokenizers."""
    return lambda prefix: way(list(target_ids(prefix)))


def most_layers(source: LanguageModel, target: LanguageModel) -> int:
    """The most source layers that one target layer can read: those of the largest kind."""
    kinds = [layer.attention for layer in source.geometry.layers]
    there = {layer.attention for layer in target.geometry.layers}
    return max(kinds.count(kind) for kind in set(kinds) & there)


def talks_of(
    source: LanguageModel, target: LanguageModel, length: int, count: int
) -> list[continuation.RecallSample]:
    """Dialogues that nothing was made with, of about ``length`` tokens."""
    facts = min(MOST_FACTS, max(4, length // TOKENS_PER_FACT))
    drawn = dialogues.held_out(count, seed=11, facts=(facts, facts))
    return [continuation.recall_sample(target, talk, source) for talk in drawn]


def judged(
    source: LanguageModel,
    target: LanguageModel,
    found: dict[str, ways.Way],
    length: int,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Recall and KL on dialogues, and the needles found, by each way."""
    samples = talks_of(source, target, length, args.dialogues)
    makers = {name: lambda tokens, way=way: way(tokens)() for name, way in found.items()}
    scores = recalled.score(target, samples, makers)
    rows = {
        name: {
            "recall": score.recall, "recall_se": standard_error(score.hits),
            "kl": float(np.mean(score.kl)), "kl_se": standard_error(score.kl),
            # Of the question that stands in the prompt; the others come after the answer.
            "asked": float(np.mean(score.hits[::ASKED])),
            "asked_se": standard_error(score.hits[::ASKED]),
        }
        for name, score in scores.items()
    }  # fmt: skip
    options = probes.TaskOptions(
        limit=args.needles, needles=["multi-key"], style="facts", max_tokens=24
    )
    task = probes.find_needles(target, [length], options, source)
    for name, make in {"native": None, **makers}.items():
        hits = [task.scorer(target, item)(make)["recall"] for item in task.items]
        rows[name] |= {"needles": float(np.mean(hits)), "needles_se": standard_error(hits)}
    rows["native"]["tokens"] = float(np.mean([len(s.prefix) for s in samples]))
    return rows


def run_pair(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    names = pair.split(":")
    source, target = (load(model_folder(name, args.zoo)) for name in names)
    found = all_ways(names, source, target, args)
    results = {}
    for length in args.lengths:
        rows = judged(source, target, found, length, args)
        (sample,) = talks_of(source, target, length, 1)
        own = {"native": lambda t: lambda: lineup.conditions.native(target)(t), **found}
        actions = {name: way(sample.read) for name, way in own.items()}
        times = switch_times(target, actions, sample.prefix[-1], trials=args.trials)
        base = measure.median(times["native"])
        for name, taken in times.items():
            rows[name] |= {"first_token_s": measure.median(taken)}
            rows[name] |= {"of_native": measure.median(taken) / base}
        results[length] = rows
        print(f"\n{pair}, {rows['native']['tokens']:.0f} tokens")
        for name, row in rows.items():
            print(f"  {name:32s} recall {row['recall']:.3f} +- {row['recall_se']:.3f} "
                  f"(asked {row['asked']:.2f})  KL "
                  f"{row['kl']:.4f}  needles {row['needles']:.2f}  time {row['of_native']:.2f}",
                  flush=True)  # fmt: skip
    return results


# ---- fitting --------------------------------------------------------------------------------


def closed(
    source: LanguageModel,
    target: LanguageModel,
    samples: Sequence[Sample],
    nu: int,
    method: str | None = None,
) -> Any:
    """What ``fit`` makes before it measures the receipt, which the other program has none of."""
    ends = source.geometry.layers, target.geometry.layers
    config = TranslatorConfig(
        source.spec(), target.spec(), by_depth(*ends, nu), capture="post_norm"
    )
    work = ClosedForm(config, DeviceRows(source, target), lambda: samples, method=method, nu=nu)
    work.run()
    return build(work.config, Weights.from_float32(work.weights, "float32"))


def run_fit(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A closed form by both programs on the same tokens, at equal source layers."""
    size = {"hidden_size": args.width, "intermediate_size": 2 * args.width}
    shape = "qwen3", args.layers, args.heads, args.head_dim
    source, target = model_of_shape(*shape), model_of_shape(*shape, **size)
    rng = np.random.default_rng(0)
    rows = [tuple(rng.integers(0, 900, args.tokens).tolist()) for _ in range(args.texts)]
    samples = [Sample(row, ()) for row in rows]
    for k in args.k:
        read = [[ways.read_by_layer(m, s.prefix) for s in samples] for m in (source, target)]
        places = mx.concatenate([mx.arange(args.tokens)] * args.texts)
        both = tuple(map(joined, read))
        ends = source, target
        part = functools.partial
        runs = {
            "ours": part(closed, *ends, samples, k),
            "ours, layers by R2": part(closed, *ends, samples, k, "r2"),
            "ours, with its receipt": part(fit, *ends, samples, nu=k, capture="post_norm"),
            "theirs": part(fitted_mapper, *ends, samples, k),
            "their solving alone": part(solved, *ends, *both, places, k),
            "reading alone": lambda: [
                mx.eval(ways.read_by_layer(m, s.prefix)) for m in (source, target) for s in samples
            ],
        }
        found = interleaved(runs, args.trials)
        peaks = {name: grown_bytes(runs[name]) for name in ("ours", "theirs")}
        medians = {name: measure.median(taken) for name, taken in found.items()}
        print(f"k = {k}: " + ", ".join(f"{n} {s:.2f} s" for n, s in medians.items()))
        print("  memory: " + ", ".join(f"{n} {b / 2**20:,.0f} MiB" for n, b in peaks.items()))
        yield {"k": k}, {"samples_s": found, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["ways", "fit"])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--needles", type=int, default=24)
    parser.add_argument("--fit-dialogues", type=int, default=200)
    parser.add_argument("--fit-facts", type=int, default=28)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", help="append a record for each pair to this file")
    args = parser.parse_args()
    mx.random.seed(0)
    names = {
        "ways": "dialogues needles fit_dialogues fit_facts trials".split(),
        "fit": "layers width heads head_dim texts tokens trials".split(),
    }[args.what]
    config = {"what": args.what, **{name: getattr(args, name) for name in names}}
    if args.what == "fit":
        found = run_fit(args)
    else:
        found = (({"pair": pair}, run_pair(pair, args)) for pair in args.pairs)
    for more, results in found:
        if args.json:
            measure.append_json(args.json, measure.record("peers", config | more, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
