"""What it costs to hand a conversation to a hybrid, beside its own reading, by length.

    python benchmarks/recurrent_speed.py [--layers 8] [--tokens 256 512] [--json FILE]

Random models of Qwen3.5-0.8B's and 4B's widths, cut to their first layers (of four, three are
recurrent), random maps, float32: of inputs, for each ``--nu``, and of states. A switch counts all
between what was recorded of the source and a cache from which the target can decode: products,
norms, RoPE, with maps of inputs the recurrences. Reading is the target's own prefill, without what
nothing needs (its last layer beyond keys and values, its head).
Both alternate in one run, once as mlx-lm runs recurrences on this machine and once in chunks, which
is nearer to what a GPU's kernels cost.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache
from translation_cost import alternated, random_translator

from kvlingo_mlx import caches
from kvlingo_mlx.engine import hybrid
from kvlingo_mlx.engine.fill import translate_span
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.geometries import random_model

NAMES = "qwen3.5-0.8b", "qwen3.5-4b"


def run(
    source: LanguageModel, target: LanguageModel, nu: int, tokens: int, trials: int, mapped: bool
) -> dict[str, Any]:
    """Seconds of both, as mlx-lm has recurrences and in chunks."""
    ids = [(7 * i * i + 3 * i) % 1000 for i in range(tokens)]
    translator = random_translator(source, target, nu, state_maps=mapped)
    with in_chunks():
        (states,) = capture.prefill(source, ids, kept=mapped)

    def switch() -> None:
        cache = caches.allocate(target, tokens)
        translate_span(cache, states, source, target, translator, tokens)
        mx.eval(caches.arrays(cache))

    def read() -> None:
        hybrid.read_layers(target, ids, make_prompt_cache(target.model), tokens)

    found = {}
    for name, context in (("mlx-lm", contextlib.nullcontext()), ("chunks", in_chunks())):
        with context:
            found[name] = alternated({"switch": switch, "read": read}, trials)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--nu", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", help="append a record to this file")
    args = parser.parse_args()
    source, target = (random_model(name, args.layers, "float32") for name in NAMES)
    results = {}
    for tokens in args.tokens:
        for nu, mapped in [(nu, False) for nu in args.nu] + [(1, True)]:
            case = f"{tokens}, " + ("states" if mapped else f"nu={nu}")
            found = results[case] = run(source, target, nu, tokens, args.trials, mapped)
            for name, each in found.items():
                both = [min(each["samples_s"][way]) for way in ("switch", "read")]
                print(f"{case}, {name:6s}: switch {both[0]:.2f} s, read "
                      f"{both[1]:.2f} s, ratio {each['ratio']:.2f} ({each['ratio_min']:.2f} to "
                      f"{each['ratio_max']:.2f})", flush=True)  # fmt: skip
    print(measure.machine_line())
    if args.json:
        config = {name: getattr(args, name) for name in ("layers", "tokens", "nu", "trials")}
        measure.append_json(args.json, measure.record("recurrent_speed", config, results))


if __name__ == "__main__":
    main()
