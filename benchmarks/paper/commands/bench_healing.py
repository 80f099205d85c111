"""kvlingo-mlx bench --table healing: decoding while the target reads, and the work of each way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.paper.timing.phases import HEAL_IDLE, HEAL_INTERLEAVED, HEAL_LAYERS, layers_of
from kvlingo_mlx.cli.output import say, table

if TYPE_CHECKING:
    from benchmarks.paper.timing.pairs import Pair
    from benchmarks.paper.timing.tables import Table, Timing

NONE = "-"


def rows(timings: Sequence[Timing]) -> list[list[str]]:
    """The rows of decoding while the target reads; none where it did not."""
    found = []
    speeds = [_speeds(timing) for timing in timings]
    for phase in timings[0].meanwhile:
        cells = [
            f"{each[phase]['tokens_per_second']:.1f} ({each[phase]['share']:.0%})"
            if phase in each
            else NONE
            for each in speeds
        ]
        layers = phase.removeprefix(HEAL_LAYERS)
        way = "healed meanwhile" if phase == HEAL_INTERLEAVED else f"{layers_of(layers)} at once"
        found.append([f"target, {way} (tokens/s)", *cells])
    return found


def _speeds(timing: Timing) -> dict[str, dict[str, float]]:
    """By phase, the speed while healing, and its share of that from an untouched translation."""
    from benchmarks.paper.timing import derived

    speeds = derived.speeds_while_healing(timing)
    undisturbed = derived.tokens_per_second(timing).get("decode_translated", math.nan)
    return {
        phase: {"tokens_per_second": speed, "share": speed / undisturbed}
        for phase, speed in speeds.items()
    }


def show(
    shown: Table, pair: Pair, timings: Sequence[Timing], columns: list[str]
) -> dict[str, list[Any]]:
    """Print the work of each way to a native cache; return what a record holds of healing.

    A table without healing prints nothing, and its record holds nothing more.
    """
    from benchmarks.paper.timing import healing
    from benchmarks.paper.timing.paths import FEW

    if HEAL_IDLE not in shown.phases:
        return {}
    say("Healed idle: nothing is decoded, the first token neither.")
    say(
        "Healed meanwhile, layers at once: from the first token until the cache is native; in "
        f"brackets the share of the translated cache's speed; {NONE}: fewer than {FEW} tokens."
    )
    if any(one.left for t in timings for rounds in t.meanwhile.values() for one in rounds):
        say("an answer filled the context before; the rest was read without it")
    names = [p for p in shown.phases if p.startswith(HEAL_LAYERS)]
    layers = [int(name.removeprefix(HEAL_LAYERS)) for name in names]
    ends = pair.source, pair.target, next(iter(pair.translators.values()))
    work = [healing.work(*ends, layers, t.prompt_tokens - 1) for t in timings]
    ways = {"switch": "switch, not healed", HEAL_IDLE: "healed idle or between tokens"}
    ways |= {name: f"{layers_of(name.removeprefix(HEAL_LAYERS))} at once" for name in names}
    ways |= {"native": "target prefill"}
    table(
        "Work before the first token / until the cache is native (GFLOP)",
        columns,
        [[told, *(_gflop(one[phase]) for one in work)] for phase, told in ways.items()],
    )
    say("Work is counted: linear layers, maps, causal attention; decoding steps are left out.")
    return {"work": work, "while_healed": [_speeds(t) for t in timings]}


def _gflop(work: Mapping[str, float]) -> str:
    """Both numbers of a way; a plain switch has no second one."""
    from benchmarks.paper.timing.healing import FIRST_TOKEN, UNTIL_NATIVE

    both = (work.get(name) for name in (FIRST_TOKEN, UNTIL_NATIVE))
    return " / ".join(NONE if flops is None else f"{flops / 1e9:.3g}" for flops in both)
