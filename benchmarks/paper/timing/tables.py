"""The paper's cost tables on this machine: their phases, their lengths, and a time limit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from benchmarks.paper.timing.batches import PHASES, Batch
from benchmarks.paper.timing.experts import expert_layers, experts_touched
from benchmarks.paper.timing.healing import Meanwhile
from benchmarks.paper.timing.paths import FEW, Paths
from benchmarks.paper.timing.phases import (
    HEAL_IDLE,
    HEAL_INTERLEAVED,
    HEAL_LAYERS,
    HYBRID,
    SPEEDS,
    STEPS,
)
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import median, peak_bytes, seconds
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch, interleaved, prompt_of
from kvlingo_mlx.translators.base import Translator

RUNS = 3  # least runs of every phase: to count experts or take a peak, to warm up, to be timed
DECODED = 256  # tokens that decoding speeds are averaged over, as in the paper's app:tab:moespeed
COUNTS = (DECODED, 128, 64, 32, 16, FEW)  # what is tried where there is no time for so many
PROBED = 4  # tokens that are decoded to learn how long one takes
DECODING = 0.5  # the share of the time that decoding speeds may take


@dataclass(frozen=True)
class Table:
    """The contents of a table.

    Attributes:
        title: The table's title.
        lengths: Prompt lengths in tokens, if no others are asked for.
        phases: Methods of :class:`Paths`, in the order of the table's rows.
        peaks: The phases whose peak memory is shown.
        speeds_in_turns: Whether decoding speeds are timed in every round, not once before: other
            speeds are shown as shares of them.
    """

    title: str
    lengths: tuple[int, ...]
    phases: tuple[str, ...]
    peaks: tuple[str, ...] = ("native", "switch")
    speeds_in_turns: bool = False


TABLES = {
    "moe-switch": Table(
        "Prefill, translation and first token (paper, app. Dense-to-MoE)",
        (64, 128, 256, 512, 1024),
        (
            "source_prefill",
            "native",
            "native_single",
            "translate",
            "target_step",
            "source_step",
            "switch",
            "eager_switch",
            "accelerator",
            *SPEEDS,
        ),
        ("native", "switch", "accelerator"),
    ),
    "switch": Table(
        "What a switch costs as the conversation grows (paper, table tab:cost)",
        (2048, 4096, 8192, 16384, 32768),
        ("translate", "target_step", "switch", "eager_switch", "native"),
    ),
    "quant": Table(
        "The translation by the form of its maps",
        (64, 256, 1024),
        ("translate",),
        (),
    ),
    "healing": Table(
        "From a switch to the target's own cache",
        (64, 256, 1024),
        (
            "switch",
            "native",
            HEAL_IDLE,
            HEAL_INTERLEAVED,
            "decode_native",
            "decode_translated",
        ),
        (),
        speeds_in_turns=True,
    ),
}
HYBRIDS = {"switch": HYBRID, HEAL_INTERLEAVED: HEAL_LAYERS}  # phases that there are with layers too


def with_hybrids(table: Table, layers: Sequence[int]) -> Table:
    """The table with further phases, by numbers of native layers, each after the plain one."""
    phases: list[str] = []
    for phase in table.phases:
        phases += [phase, *(f"{HYBRIDS[phase]}{j}" for j in layers if phase in HYBRIDS)]
    return replace(table, phases=tuple(phases))


@dataclass
class Timing:
    """The measurements of one prompt length.

    Attributes:
        prompt_tokens: The prompt's length.
        samples: Raw seconds by phase; ``translate FORM`` for each form of the maps.
        peak: Peak bytes by phase.
        experts: The share of its experts that a layer of the target touches while it reads the
            prompt, and in one step; empty where it has none.
        batch: Prompts at once.
        decoded: Tokens over which each decoding speed was measured.
        meanwhile: What was decoded while the target read the prompt, by phase, round by round.
    """

    prompt_tokens: int
    samples: dict[str, list[float]]
    peak: dict[str, int] = field(default_factory=dict)
    experts: dict[str, float] = field(default_factory=dict)
    batch: int = 1
    decoded: int = FEW
    meanwhile: dict[str, list[Meanwhile]] = field(default_factory=dict)

    def median(self, phase: str) -> float:
        return median(self.samples[phase])

    def spread(self, phase: str) -> tuple[float, float]:
        """The least seconds, and the distance between the quartiles."""
        found = summary({phase: self.samples[phase]})[phase]
        return found["min"], found["iqr"]

    def summary(self) -> dict[str, dict[str, float]]:
        """By phase, seconds: the median, the least, and the distance between the quartiles."""
        return summary(self.samples)


def summary(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """For each name, in the samples' unit: median, minimum, and distance of the quartiles."""
    found = {}
    for name, values in samples.items():
        low, high = np.percentile(values, (25, 75))
        found[name] = {"median": median(values), "min": min(values), "iqr": float(high - low)}
    return found


def measure_length(
    paths: Paths,
    table: Table,
    *,
    trials: int,
    enough: Callable[[Timing], bool] = lambda found: False,
    progress: Callable[[], None] = lambda: None,
) -> Timing:
    """Time a table's phases for one prompt, interleaved, and take their peak memory.

    Decoding is timed once, before the rounds, if the table does not say otherwise: its time is an
    average over many steps already. After each round ``enough`` is asked whether the measurements
    so far are enough.
    """
    names: list[str] = []
    for phase in table.phases:
        forms = [f"translate {form}" for form in paths.translators]
        names += forms if phase == "translate" else [phase]
    once = [n for n in names if n in SPEEDS and not table.speeds_in_turns]
    runs = {name: paths.phase(name) for name in names if name not in once}
    found = Timing(len(paths.tokens), {}, batch=paths.batch, decoded=paths.decoded)
    # Runs that are not timed come first and count as warm-up, so a long prompt is read less often.
    spent = dict.fromkeys(runs, 0.0)
    for name, phase in (("prompt", "native"), ("step", "target_step")):
        if phase in runs:
            spent[phase] += seconds(partial(_count_experts, paths, name, phase, found))
    for phase in table.peaks:
        spent[phase] += seconds(partial(_take_peak, paths, phase, found))
    found.samples.update({name: [] for name in names})
    for name in (n for n in names if n in SPEEDS):
        _decode(paths, name, PROBED)
        spent[name] = float("inf")  # and this was all of its warming up
    for name in once:
        found.samples[name].append(_decode(paths, name, paths.decoded))
    interleaved(runs, trials, progress, lambda: enough(found), spent, found.samples)
    for name in (n for n in runs if n in paths.meanwhile):
        found.meanwhile[name] = paths.meanwhile[name][-len(found.samples[name]) :]  # not warming up
    return found


def _decode(paths: Paths, phase: str, count: int) -> float:
    """The seconds of a phase that decodes, over ``count`` tokens."""
    before, paths.decoded = paths.decoded, count
    try:
        return seconds(paths.phase(phase))
    finally:
        paths.decoded = before


def affordable(paths: Paths, table: Table, clock: Stopwatch, lengths: int, trials: int = 1) -> int:
    """The most tokens of ``COUNTS`` for which so many lengths' speeds take their share of the time.

    A few tokens are decoded to find out; a phase's first run also fills its cache. ``trials`` are
    the rounds, which count where a table times its speeds in turns.
    """
    phases = [phase for phase in table.phases if phase in SPEEDS]
    if not phases or clock.left() == float("inf"):
        return DECODED
    for phase in phases:
        _decode(paths, phase, 1)
    token = sum(_decode(paths, phase, PROBED) / PROBED for phase in phases)
    rounds = trials if table.speeds_in_turns else 1
    room = DECODING * clock.left() / (lengths * rounds * token)
    return next((count for count in COUNTS if count <= room), FEW)


def _count_experts(paths: Paths, name: str, phase: str, found: Timing) -> None:
    """Run a phase of the target; note the share of its experts that a layer touches, if any."""
    with experts_touched(paths.target) as shares:
        paths.phase(phase)()
    if shares and paths.batch == 1:
        # The prompt's passes come first, one per chunk; steps follow, one of them queued ahead.
        chunks = math.ceil((found.prompt_tokens - 1) / paths.step_size)
        a_pass = len(expert_layers(paths.target))
        kept = chunks * a_pass if phase == "native" else len(shares)
        found.experts[name] = float(np.mean(shares[:kept]))


def _take_peak(paths: Paths, phase: str, found: Timing) -> None:
    found.peak[phase] = peak_bytes(paths.phase(phase))


def _least(table: Table, length: int, before: Timing) -> float:
    """The least seconds for a length, estimated from another length: warm-ups, and one round.

    One source prefill and one translation come before these and are not timed. The time of a step
    does not depend on the length.
    """
    grows = max(1.0, length / before.prompt_tokens)
    took = {
        name: before.median(name) * (1.0 if name in STEPS else grows) for name in before.samples
    }
    each = {n: t for n, t in took.items() if n in table.phases or n.startswith("translate ")}
    times = (t if name in SPEEDS else RUNS * t for name, t in each.items())
    return sum(times) + took.get("source_prefill", 0.0)


@dataclass(frozen=True)
class Effort:
    """How a table is measured.

    Attributes:
        text: Whether prompts are text; otherwise they are random ids.
        trials: Rounds at each length, if there is time.
        clock: The time that is left.
        step_size: Tokens per prefill chunk.
        progress: Called after each round.
        before: Another table's measurements, to estimate how long a length takes.
        batch: How many prompts of one length at once.
        decoded: The tokens over which decoding speeds are measured; None is the paper's 256, or
            fewer where the time allows no more (:func:`affordable`).
    """

    text: bool
    trials: int
    clock: Stopwatch
    step_size: int = 2048
    progress: Callable[[], None] = lambda: None
    before: Timing | None = None
    batch: int = 1
    decoded: int | None = None


def run_table(
    source: LanguageModel,
    target: LanguageModel,
    translators: Mapping[str, Translator],
    table: Table,
    lengths: Sequence[int],
    effort: Effort,
) -> tuple[list[Timing], list[int]]:
    """Measure a table's columns, shortest prompt first; also return the lengths left out.

    A length is left out if it would take more than all the time that is left, and dropped if it
    does. The first is estimated from the length before, of this table or of another one
    (``effort.before``). Rounds beyond the first get an equal share of the time for each length to
    come, unless the next length would not fit: then they get all of it.
    """
    done: list[Timing] = []
    lengths = sorted(lengths)
    with contextlib.suppress(OutOfTime), effort.clock.limiting():
        for index in range(len(lengths)):
            known = done[-1] if done else effort.before
            if known is not None and _least(table, lengths[index], known) > effort.clock.left():
                break
            decoded = done[0].decoded if done else effort.decoded
            one = replace(effort, decoded=decoded)
            done.append(_measured((source, target, translators), table, lengths[index:], one))
            mx.clear_cache()
    return done, lengths[len(done) :]


def _measured(
    pair: tuple[LanguageModel, LanguageModel, Mapping[str, Translator]],
    table: Table,
    lengths: Sequence[int],
    effort: Effort,
) -> Timing:
    """The first of some lengths measured, with its share of the time."""
    clock, share = effort.clock, effort.clock.part(len(lengths))
    tokens = prompt_of(*pair[:2], lengths[0], text=effort.text)
    arguments = *pair, tokens, effort.step_size
    paths = Paths(*arguments) if effort.batch == 1 else Batch(*arguments, effort.batch)
    paths.decoded = effort.decoded or affordable(paths, table, clock, len(lengths), effort.trials)

    def enough(found: Timing) -> bool:
        follows = any(_least(table, n, found) <= clock.left() for n in lengths[1:2])
        return (share if follows else clock).over()

    return measure_length(
        paths, table, trials=effort.trials, enough=enough, progress=effort.progress
    )


def batched(table: Table, batch: int) -> Table:
    """The part of a table that can be timed for a batch of prompts; all of it for one prompt."""
    if batch == 1:
        return table
    phases, peaks = (tuple(p for p in of if p in PHASES) for of in (table.phases, table.peaks))
    return Table(f"{table.title}, {batch} prompts at once", table.lengths, phases, peaks)


def as_json(timing: Timing) -> dict[str, Any]:
    """All measurements, raw samples included, with their summary."""
    return {**asdict(timing), "summary": timing.summary()}
