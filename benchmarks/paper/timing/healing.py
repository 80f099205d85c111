"""What it takes until a target's cache is its own: runs to be timed, and their work, counted.

A translated cache is native once the target has read the prefix behind it
(:mod:`kvlingo_mlx.engine.healing`). The work is the same on every machine, so it stands
for energy.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generate_step

from benchmarks.paper.timing.costs import translation_work
from benchmarks.paper.timing.layers import LayerCosts
from benchmarks.paper.timing.phases import HEAL_IDLE, HEAL_INTERLEAVED, HEAL_LAYERS
from kvlingo_mlx.caches.validation import room_for
from kvlingo_mlx.engine.fill import HealingCache, take_over
from kvlingo_mlx.engine.healing import Interleaved
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.translators.base import Translator

FIRST_TOKEN, UNTIL_NATIVE = "first_token", "until_native"


@dataclass(frozen=True)
class Meanwhile:
    """What was decoded while a target read the prefix.

    Attributes:
        tokens: The tokens after the first one, until the cache was native or the context full.
        seconds: The time from the first token until then.
        left: The tokens of the prefix that were yet to be read then; 0 unless the context was full.
    """

    tokens: int
    seconds: float
    left: int


def read_on(line: Line) -> None:
    """Read what is left of a prefix in chunks, as :class:`HealingCache` does between answers."""
    healing = HealingCache(line)
    while healing.left:
        healing.heal()


def answered(plan: Plan, recorded: Sequence[KVStates]) -> Meanwhile:
    """Translate, and answer until the prefix is read between the answer's tokens.

    An answer that fills the context ends before; then the rest is read without it.
    """
    line = take_over(plan, recorded)
    reader = functools.partial(line.heal, answers=True)
    between, tokens, first = Interleaved(reader), -1, 0.0
    steps = generate_step(
        mx.array(plan.tokens[-1:]),
        plan.target.model,
        max_tokens=room_for(plan.target, len(plan.tokens), -1),
        prompt_cache=line.cache,
    )
    between.began()
    with contextlib.closing(steps):
        for _ in steps:
            tokens += 1
            first = first or time.perf_counter()
            between()
            if not line.left(answers=True):
                break
            between.began()
    found = Meanwhile(tokens, time.perf_counter() - first, line.left(answers=True))
    read_on(line)
    return found


def work(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    layers: Sequence[int],
    count: int,
) -> dict[str, dict[str, float]]:
    """The operations of each way to a native cache of ``count`` tokens, without decoding steps.

    Linear layers, maps and causal attention are counted, as they are run: a run of the first layers
    ends with the last one's keys and values.

    Returns:
        By phase, ``first_token``: what comes before the first step; ``until_native``: that and all
        reading behind it. A plain ``switch`` never has a native cache.
    """
    costs, maps = LayerCosts(target), translation_work(translator, source, target, count).flops
    reading = costs.reading(count).flops
    whole, keys = costs.by_layer(count), costs.keys_by_layer(count)
    healed = {FIRST_TOKEN: maps, UNTIL_NATIVE: maps + reading}
    found = {
        "switch": {FIRST_TOKEN: maps},
        "native": {FIRST_TOKEN: reading, UNTIL_NATIVE: reading},
        HEAL_IDLE: healed,
        HEAL_INTERLEAVED: healed,
    }
    for j in layers:
        above = translation_work(translator.above(j), source, target, count).flops
        first = sum(whole[: j - 1]) + keys[j - 1] + above
        rest = 0.0 if j == len(whole) else reading
        found[f"{HEAL_LAYERS}{j}"] = {FIRST_TOKEN: first, UNTIL_NATIVE: first + rest}
    return found
