"""Every ratio that this package promises, measured anew; exit status 1 where one is missed.

    python benchmarks/ratios.py [--only NAME ...] [--trials 9] [--json FILE]

A ratio's two sides alternate within one run, so a busy machine slows both; its verdict is the
median over rounds. Beside it stand the least and the most, and the median of processor time, which
other processes disturb less. One function a ratio, in RATIOS; each says what it divides by what.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from kvlingo_mlx.backend import mx

import folded_decoding
import switch_cost
import translation_cost
import window_cost
from mlx_lm.generate import generate_step

from benchmarks.paper.timing import geometries, memory_budget
from benchmarks.paper.timing.memory import grown_bytes
from benchmarks.paper.timing.paths import Paths
from kvlingo_mlx import caches
from kvlingo_mlx.engine import fill
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.switching import prompt_of
from kvlingo_mlx.translators.base import Translator

BESIDE_CACHE = "alive_beside_source_cache"
Found = Mapping[str, Any]  # "ratios" by round; "processor_ratios" likewise, where it is of times


@dataclass(frozen=True)
class Ratio:
    """A promise.

    Attributes:
        what: Which over which.
        bound: Most it may be; least, if ``at_least``.
        measure: Takes the number of rounds.
        at_least: Whether larger is better.
    """

    what: str
    bound: float
    measure: Callable[[int], Found]
    at_least: bool = False

    def kept(self, median: float) -> bool:
        """Whether a median is within the bound."""
        return median >= self.bound if self.at_least else median <= self.bound


# ---- translation ------------------------------------------------------------------------------


def translation(shape: str, tokens: int, trials: int) -> Found:
    """Whole translation, cache write included, over the bare products of its shapes."""
    chosen = translation_cost.SHAPES[shape]
    rounds = trials if tokens > 100 else 4 * trials
    return translation_cost.run(tokens, chosen.target[0], rounds, chosen)


def head_wise(trials: int, tokens: int = 1024, layers: int = 28) -> Found:
    """Head-mixing maps over head-wise ones of the same width; maps alone, nothing finished."""
    ends = [translation_cost.model_of_shape("qwen3", layers, 8, 128) for _ in range(2)]
    states = translation_cost.random_states(ends[0], tokens)

    def maps(translator: Translator) -> Callable[[], None]:
        def run() -> None:
            done = translator(states)
            mx.eval([group.states for group in (*done.keys, *done.values)])

        return run

    mixing, wise = (
        translation_cost.random_translator(*ends, 1, head_mixing=mixed) for mixed in (True, False)
    )
    return translation_cost.alternated({"mixing": maps(mixing), "wise": maps(wise)}, trials)


def window(trials: int) -> Found:
    """A window alone over every token, Gemma-3 widths, 8192 tokens."""
    return window_cost.run(8192, 12, 1, 2048, max(3, trials // 3))


# ---- switches ---------------------------------------------------------------------------------


def eager(trials: int, tokens: int = 2048) -> Found:
    """First token after an eager switch over the same without a switch, in a Conversation."""
    models = switch_cost.random_models()
    small, large = models.values()
    pairs = ((small, large), (large, small))
    translators = [translation_cost.random_translator(*pair, 1) for pair in pairs]
    args = argparse.Namespace(steps=2 * trials, span=64)
    steps = switch_cost.all_steps(models, translators, tokens, args)
    return switch_cost.ratios(steps)["eager / no switch"]


def switch(trials: int, tokens: int = 512, layers: int = 4) -> Found:
    """A switch over the sum of its translation and the target's step, Qwen3-0.6B widths."""
    source, target = geometries.make(
        [geometries.unmade_model("qwen3-0.6b", layers, "float32", seed) for seed in (0, 1)]
    )
    form = {"float32": translation_cost.random_translator(source, target, 1)}
    paths = Paths(source, target, form, prompt_of(source, target, tokens, text=False))
    phases = ("switch", "translate", "target_step")
    actions = {name: paths.phase(name) for name in phases}
    return translation_cost.alternated(actions, 2 * trials)


def _reader(width: int, layers: int, kv_heads: int = 2, head_dim: int = 64) -> LanguageModel:
    """A random model that has a tokenizer."""
    tokenizer = switch_cost.plain_tokenizer()
    model = translation_cost.model_of_shape(
        "qwen3", layers, kv_heads, head_dim, hidden_size=width, intermediate_size=3 * width,
        num_attention_heads=max(4, kv_heads), vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    return dataclasses.replace(model, tokenizer=tokenizer, name=f"random of width {width}")


def memory(trials: int, tokens: int = 2048, step: int = 256) -> Found:
    """Peak of a hand-over over source's prefill, target's cache and one chunk together."""
    source, target = (_reader(64, 6, 4, 128) for _ in range(2))
    translator = translation_cost.random_translator(source, target, 1)
    prompt = [i % 1000 for i in range(tokens)]
    prefill = lambda: next(generate_step(  # noqa: E731
        mx.array(prompt), source.model, prefill_step_size=step, max_tokens=0
    ), None)  # fmt: skip
    own = caches.bytes_per_token(target)
    room = (tokens + caches.GROW) * own + step * (caches.bytes_per_token(source) + 2 * own)
    ratios = []
    for _ in range(min(2, trials)):
        handed = grown_bytes(lambda: fill.hand_over(
            source, target, prompt, translator=translator, prefill_step_size=step
        ))  # fmt: skip
        ratios.append(handed / (grown_bytes(prefill) + room))
    return {"ratios": ratios}


# ---- folded decoding --------------------------------------------------------------------------


def folded(name: str, trials: int, context: int = 8192, layers: int = 6) -> Found:
    """One ratio of a folded decoder at Gemma-3-12B's widths, 4 bits, a batch of one."""
    models = memory_budget.setup(layers, "4bit")
    mx.synchronize()
    mx.clear_cache()
    weights = mx.get_active_memory()
    cell = memory_budget.measure_cell(models, context, 1, trials=max(3, trials // 3), decoded=2)
    if name == "memory":
        return {"ratios": [folded_decoding.summary(cell, models, weights)[BESIDE_CACHE]]}
    steps = zip(cell.maps, cell.samples["folded"], strict=True)
    return {"ratios": [maps / step for maps, step in steps]}


# ---- all of them ------------------------------------------------------------------------------

RATIOS = {
    "translation-1024": Ratio(
        "translation / bare products, 4B to 30B-A3B widths, nu = 3, 1024 tokens", 1.35,
        lambda trials: translation("moe", 1024, trials),
    ),
    "translation-64": Ratio(
        "the same, 64 tokens", 2.0, lambda trials: translation("moe", 64, trials)
    ),
    "translation-preserving": Ratio(
        "the same, 1024 to 1024 wide, nu = 1, 1024 tokens", 1.7,
        lambda trials: translation("preserving", 1024, trials),
    ),
    "head-wise": Ratio(
        "head-mixing maps / head-wise maps, 1024 wide, 1024 tokens", 5.0, head_wise, at_least=True
    ),
    "eager": Ratio("first token after an eager switch / without a switch", 1.05, eager),
    "switch": Ratio("switch / (translation + step)", 1.05, switch),
    "window": Ratio("window-only layers / every token, Gemma-3 widths", 0.30, window),
    "memory": Ratio("hand-over's peak / (source prefill + target cache + chunk)", 1.0, memory),
    "folded-memory": Ratio(
        "alive in folded decoding beyond weights / the source's cache", 1.1,
        lambda trials: folded("memory", trials),
    ),
    "folded-translator": Ratio(
        "the translator's products / a folded decoding step", 0.1,
        lambda trials: folded("maps", trials),
    ),
}  # fmt: skip


def line(name: str, ratio: Ratio, found: Found) -> str:
    """A verdict with its numbers."""
    ratios = found["ratios"]
    middle = measure.median(ratios)
    sign, verdict = (">=" if ratio.at_least else "<="), ("ok" if ratio.kept(middle) else "MISSED")
    processor = found.get("processor_ratios")
    beside = f", of processor time {measure.median(processor):.3f}" if processor else ""
    return (
        f"{verdict:6s} {name:22s} {sign} {ratio.bound:4.2f}: {middle:6.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}{beside})  {ratio.what}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RATIOS, default=list(RATIOS))
    parser.add_argument("--trials", type=int, default=9, help="rounds, more of quick ones")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    results, missed = {}, []
    for name in args.only:
        ratio = RATIOS[name]
        results[name] = dict(ratio.measure(args.trials))
        print(line(name, ratio, results[name]), flush=True)
        if not ratio.kept(measure.median(results[name]["ratios"])):
            missed.append(name)
        mx.clear_cache()
    print(measure.machine_line())
    if args.json:
        config = {"trials": args.trials, "bounds": {n: RATIOS[n].bound for n in args.only}}
        measure.append_json(args.json, measure.record("ratios", config, results))
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
