"""The paper's cost tables on this machine: their phases, their lengths, and a time limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from benchmarks.paper.timing.healing import Meanwhile
from benchmarks.paper.timing.memory import peak_bytes
from benchmarks.paper.timing.paths import FEW, Paths
from benchmarks.paper.timing.phases import (
    HEAL_IDLE,
    HEAL_INTERLEAVED,
    HEAL_LAYERS,
    HYBRID,
    SPEEDS,
    STEPS,
)
from kvlingo_mlx.engine import healing, hybrid
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.reporting.measure import median, seconds
from kvlingo_mlx.timing.bench import BenchPair, lengths_to_time
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch, interleaved, prompt_of

RUNS = 3  # of every phase at least: two to warm up, and one that counts
PROBED = 4  # tokens that are decoded to warm up
WAYS = {  # to a first token, by the phase that is timed
    "switch": "switch",
    "eager switch": "eager_switch",
    "accelerator": "accelerator",
    "source first token": "source_step",
}


@dataclass(frozen=True)
class Table:
    """The contents of a table.

    Attributes:
        title: The table's title.
        lengths: Prompt lengths in tokens, if no others are asked for.
        phases: Methods of :class:`Paths`, in the order of the table's rows.
        peaks: The phases whose peak memory is shown.
    """

    title: str
    lengths: tuple[int, ...]
    phases: tuple[str, ...]
    peaks: tuple[str, ...] = ("native", "switch")

    @property
    def heals(self) -> bool:
        return HEAL_IDLE in self.phases


TABLES = {
    "moe-switch": Table(
        "Prefill, translation and first token (paper, app. Dense-to-MoE)",
        (64, 128, 256, 512, 1024),
        ("source_prefill", "native", "native_single", "translate", "target_step", "source_step",
         "switch", "eager_switch", "accelerator", *SPEEDS),
        ("native", "switch", "accelerator"),
    ),
    "switch": Table(
        "What a switch costs as the conversation grows (paper, table tab:cost)",
        (2048, 4096, 8192, 16384, 32768),
        ("translate", "target_step", "switch", "eager_switch", "native"),
    ),
    "quant": Table("The translation by the form of its maps", (64, 256, 1024), ("translate",), ()),
    "healing": Table(
        "From a switch to the target's own cache",
        (64, 256, 1024),
        ("switch", "native", HEAL_IDLE, HEAL_INTERLEAVED, "decode_native", "decode_translated"),
        (),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How a table is measured.

    Attributes:
        trials: Rounds at each length, if there is time.
        clock: The time that is left.
        decoded: The tokens over which decoding speeds are measured.
        step_size: Tokens per prefill chunk.
        progress: Called after each round.
    """

    trials: int
    clock: Stopwatch
    decoded: int = FEW
    step_size: int = 2048
    progress: Callable[[], None] = lambda: None


@dataclass
class Timing:
    """The measurements of one prompt length.

    Attributes:
        prompt_tokens: The prompt's length.
        samples: Raw seconds by phase; ``translate FORM`` for each form of the maps.
        peak: Peak bytes by phase.
        decoded: Tokens over which each decoding speed was measured.
        meanwhile: What was decoded while the target read the prompt, by phase, round by round.
    """

    prompt_tokens: int
    samples: dict[str, list[float]]
    peak: dict[str, int] = field(default_factory=dict)
    decoded: int = FEW
    meanwhile: dict[str, list[Meanwhile]] = field(default_factory=dict)

    def median(self, phase: str) -> float:
        return median(self.samples[phase])

    @property
    def speedups(self) -> dict[str, float]:
        """The factor by which each way reaches a first token before the target's own prefill."""
        if "native" not in self.samples:
            return {}
        native = self.median("native")
        return {w: native / self.median(p) for w, p in WAYS.items() if p in self.samples}

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Decoding speeds."""
        return {p: self.decoded / self.median(p) for p in SPEEDS if p in self.samples}

    @property
    def while_healed(self) -> dict[str, dict[str, float]]:
        """Decoding speeds from the first token until the cache is native, by phase.

        ``share`` is that of the speed from an untouched translation. A phase in which some round
        decoded fewer than ``FEW`` tokens has none.
        """
        found = {}
        for phase, rounds in self.meanwhile.items():
            if min(one.tokens for one in rounds) >= FEW:
                speed = median([one.tokens / one.seconds for one in rounds])
                whole = self.tokens_per_second["decode_translated"]
                found[phase] = {"tokens_per_second": speed, "share": speed / whole}
        return found

    @property
    def summary(self) -> dict[str, dict[str, float]]:
        return summary(self.samples)

    def as_json(self) -> dict[str, Any]:
        """All measurements, raw samples included, with their summary."""
        return {**asdict(self), "summary": self.summary}


def summary(samples: Any) -> dict[str, dict[str, float]]:
    """For each name, in the samples' unit: median, minimum, and distance of the quartiles."""
    found = {}
    for name, values in samples.items():
        low, high = np.percentile(values, (25, 75))
        found[name] = {"median": median(values), "min": min(values), "iqr": float(high - low)}
    return found


def lengths_of(pair: BenchPair, table: Table, asked: Sequence[int] | None) -> list[int]:
    """The lengths to be measured: those asked for, or a table's own that fit.

    Raises:
        ValueError: A length is beyond a context.
        NotEnoughMemoryError: The caches of the longest prompt asked for do not fit.
        UnsupportedModelError: Nothing heals behind translations of this pair.
    """
    if table.heals:
        try:
            healing.check_models(pair.source, pair.target)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"--table healing has nothing to time: {error}; give another --table"
            ) from None
    return lengths_to_time(pair, asked or None, table.lengths)


def run_table(
    pair: BenchPair, table: Table, lengths: Sequence[int], effort: Effort
) -> tuple[list[Timing], list[int]]:
    """Measure a table's columns, shortest prompt first; also return the lengths left out.

    A length is left out if it would take more than the time that is left, estimated from the one
    before it, and dropped if it does. Rounds beyond the first get an equal share of the time for
    each length to come.
    """
    done: list[Timing] = []
    with contextlib.suppress(OutOfTime), effort.clock.limiting():
        for index, count in enumerate(lengths):
            if done and _least(done[-1], count) > effort.clock.left():
                break
            tokens = prompt_of(pair.source, pair.target, count, text=pair.text)
            ends = pair.source, pair.target, pair.translators
            paths = Paths(*ends, tokens, effort.step_size, effort.decoded)
            share = effort.clock.part(len(lengths) - index)
            done.append(measure_length(paths, table, effort, share.over))
            mx.clear_cache()
    return done, list(lengths[len(done) :])


def measure_length(
    paths: Paths, table: Table, effort: Effort, out_of_time: Callable[[], bool] = lambda: False
) -> Timing:
    """Time a table's phases for one prompt, interleaved, and take their peak memory.

    Decoding is timed once, before the rounds: its time is an average over many steps already. A
    table of healing times it in every round, as other speeds are shares of it.
    """
    names = names_of(paths, table)
    found = Timing(len(paths.tokens), {name: [] for name in names}, decoded=paths.decoded)
    spent = dict.fromkeys(names, 0.0)  # runs that are not timed warm up
    for phase in table.peaks:
        found.peak[phase] = peak_bytes(paths.phase(phase))
    for name in (n for n in names if n in SPEEDS):
        paths.decode(name, PROBED)
        spent[name] = float("inf")  # and this was all of its warming up
    once = [n for n in names if n in SPEEDS and not table.heals]
    for name in once:
        found.samples[name].append(seconds(paths.phase(name)))
    runs = {name: paths.phase(name) for name in names if name not in once}
    interleaved(runs, effort.trials, effort.progress, out_of_time, spent, found.samples)
    for name in (n for n in runs if n in paths.meanwhile):
        found.meanwhile[name] = paths.meanwhile[name][-len(found.samples[name]) :]  # not warming up
    return found


def names_of(paths: Paths, table: Table) -> list[str]:
    """The phases of a table: each form of the maps, and in one of healing those with layers."""
    layers = hybrid.first_layers(paths.first.config) if table.heals else None
    hybrids = {"switch": HYBRID, HEAL_INTERLEAVED: HEAL_LAYERS} if layers else {}
    names: list[str] = []
    for phase in table.phases:
        forms = [f"translate {form}" for form in paths.translators]
        names += forms if phase == "translate" else [phase]
        names += [f"{hybrids[phase]}{layers}"] if phase in hybrids else []
    return names


def _least(before: Timing, count: int) -> float:
    """The least seconds for a length, from another one; a step's do not depend on it."""
    grows = count / before.prompt_tokens
    return sum(
        (1 if name in SPEEDS else RUNS) * before.median(name) * (1.0 if name in STEPS else grows)
        for name in before.samples
    )
