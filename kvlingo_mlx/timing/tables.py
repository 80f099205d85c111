"""The paper's cost tables on this machine: which phases, at which lengths, within what time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.hybrid import Native, native_part
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.measure import median, peak_bytes, seconds
from kvlingo_mlx.timing.batches import PHASES, Batch
from kvlingo_mlx.timing.ceilings import (
    Costs,
    Rates,
    Work,
    expert_layers,
    experts_touched,
    translation_work,
)
from kvlingo_mlx.timing.paths import DECODED, HYBRID, Paths, interleaved
from kvlingo_mlx.translators.base import Translator

RUNS = 3  # of every phase at least: to count experts or take a peak, to warm up, to be timed
SPEEDS = ("decode_source", "decode_native", "decode_translated")
STEPS = ("target_step", "source_step", "eager_switch", *SPEEDS)  # whatever the prompt's length


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Attributes:
        title: What it is about.
        lengths: Prompt tokens, where nothing else is asked for.
        phases: Methods of :class:`Paths`, in the order of its rows.
        peaks: The phases whose peak memory is told.
    """

    title: str
    lengths: tuple[int, ...]
    phases: tuple[str, ...]
    peaks: tuple[str, ...] = ("native", "switch")


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
    "quant": Table(
        "The translation by the form of its maps", (64, 256, 1024), ("translate",), (),
    ),
}  # fmt: skip


FIRST_TOKENS = Table("Time to first token", (512,), ("native", "switch", "accelerator"), ())


def with_hybrids(table: Table, layers: Sequence[int]) -> Table:
    """A table that also has switches of so many native layers, after the plain one."""
    if "switch" not in table.phases:
        return table
    at = table.phases.index("switch") + 1
    more = tuple(f"{HYBRID}{j}" for j in layers)
    return replace(table, phases=(*table.phases[:at], *more, *table.phases[at:]))


@dataclass
class Timing:
    """One prompt length.

    Attributes:
        prompt_tokens: Its length.
        samples: Raw seconds by phase; ``translate FORM`` for each form of the maps.
        peak: Peak bytes by phase.
        experts: Share of its experts that a layer of the target touches while it reads the
            prompt, and in one step; empty where it has none.
        batch: Prompts at once.
    """

    prompt_tokens: int
    samples: dict[str, list[float]]
    peak: dict[str, int] = field(default_factory=dict)
    experts: dict[str, float] = field(default_factory=dict)
    batch: int = 1

    def median(self, phase: str) -> float:
        """Median seconds of a phase."""
        return median(self.samples[phase])

    def spread(self, phase: str) -> tuple[float, float]:
        """The least seconds, and the distance between the quartiles."""
        found = summary({phase: self.samples[phase]})[phase]
        return found["min"], found["iqr"]

    def summary(self) -> dict[str, dict[str, float]]:
        """By phase, seconds: the median, the least, and the distance between the quartiles."""
        return summary(self.samples)


def summary(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By name, in the samples' unit: the median, the least, and the distance of the quartiles."""
    found = {}
    for name, values in samples.items():
        low, high = np.percentile(values, (25, 75))
        found[name] = {"median": median(values), "min": min(values), "iqr": float(high - low)}
    return found


class Clock:
    """How much time is left for measuring; None for no limit."""

    def __init__(self, limit: float | None) -> None:
        self._end = None if limit is None else time.perf_counter() + limit

    def left(self) -> float:
        """Seconds, perhaps negative."""
        return float("inf") if self._end is None else self._end - time.perf_counter()

    def over(self) -> bool:
        """Whether it is used up."""
        return self.left() <= 0

    def part(self, of: int) -> Clock:
        """A clock for the first of so many things that are yet to be measured."""
        return Clock(None if self._end is None else self.left() / of)


def prompt_of(source: LanguageModel, target: LanguageModel, count: int, *, text: bool) -> list[int]:
    """Token ids of a prompt: the bundled dialogues one after the other, or random ids.

    A mixture of experts touches fewer experts on text than on random ids.

    Raises:
        ValueError: Fewer than 2 tokens, or beyond a model's context.
    """
    if count < 2:
        raise ValueError(f"a prompt of {count} tokens leaves nothing to hand over; give 2 or more")
    rows = min(source.geometry.embedding_rows, target.geometry.embedding_rows)
    rng = random.Random(0)
    tokens = [rng.randrange(rows) for _ in range(0 if text else count)]
    for talk in dialogues.held_out(count) if text else ():  # each is longer than a token
        turns = "\n".join(str(turn["content"]) for turn in talk.conversation())
        tokens += target.tokenizer.encode(turns + "\n", add_special_tokens=not tokens)
        if len(tokens) >= count:
            break
    for model in (source, target):
        model.check_tokens(tokens[:count])
    return tokens[:count]


def measure_length(
    paths: Paths,
    table: Table,
    *,
    trials: int,
    enough: Callable[[Timing], bool] = lambda found: False,
    progress: Callable[[], None] = lambda: None,
) -> Timing:
    """Time a table's phases for one prompt, interleaved, and take their peak memory.

    ``enough`` is asked after each round whether what was found will do.
    """
    names: list[str] = []
    for phase in table.phases:
        forms = [f"translate {form}" for form in paths.translators]
        names += forms if phase == "translate" else [phase]
    runs = {name: paths.phase(name) for name in names}
    found = Timing(len(paths.tokens), {}, batch=paths.batch)
    # What is not timed comes first, as part of the warm-up: a long prompt is read no oftener.
    spent = dict.fromkeys(runs, 0.0)
    for name, phase in (("prompt", "native"), ("step", "target_step")):
        if phase in runs:
            spent[phase] += seconds(partial(_count_experts, paths, name, phase, found))
    for phase in table.peaks:
        spent[phase] += seconds(partial(_take_peak, paths, phase, found))
    found.samples.update({name: [] for name in runs})
    interleaved(runs, trials, progress, lambda: enough(found), spent, found.samples)
    return found


def _count_experts(paths: Paths, name: str, phase: str, found: Timing) -> None:
    """Run a phase of the target; note the share of its experts that a layer touches, if any."""
    with experts_touched(paths.target) as shares:
        paths.phase(phase)()
    if shares and paths.batch == 1:
        # Reading a prompt is the first passes, one a chunk; steps follow, one queued ahead.
        chunks = math.ceil((found.prompt_tokens - 1) / paths.step_size)
        a_pass = len(expert_layers(paths.target))
        kept = chunks * a_pass if phase == "native" else len(shares)
        found.experts[name] = float(np.mean(shares[:kept]))


def _take_peak(paths: Paths, phase: str, found: Timing) -> None:
    found.peak[phase] = peak_bytes(paths.phase(phase))


def _least(table: Table, length: int, before: Timing) -> float:
    """Seconds that a length takes at least, going by another's tokens: warm-ups, and one round.

    Before it come the source's prefill and a translation, not timed. Steps take as long whatever
    the length.
    """
    grows = max(1.0, length / before.prompt_tokens)
    took = {
        name: before.median(name) * (1.0 if name in STEPS else grows) for name in before.samples
    }
    each = [t for n, t in took.items() if n in table.phases or n.startswith("translate ")]
    return RUNS * sum(each) + took.get("source_prefill", 0.0)


def run_table(
    source: LanguageModel,
    target: LanguageModel,
    translators: Mapping[str, Translator],
    table: Table,
    lengths: Sequence[int],
    *,
    text: bool,
    trials: int,
    clock: Clock,
    step_size: int = 2048,
    progress: Callable[[], None] = lambda: None,
    before: Timing | None = None,
    batch: int = 1,
) -> tuple[list[Timing], list[int]]:
    """A table's columns, shortest prompt first; and the lengths that time did not allow.

    A length is left out where it would take more than all the time that is left, going by the
    tokens of the length before: of this table, or ``before`` of another one. Without either it is
    measured, whatever it takes. Rounds beyond the first share the time evenly among the lengths
    that are yet to come, as far as one is.
    """
    done: list[Timing] = []
    lengths = sorted(lengths)
    for index, length in enumerate(lengths):
        known = done[-1] if done else before
        if known is not None and _least(table, length, known) > clock.left():
            return done, lengths[index:]
        tokens = prompt_of(source, target, length, text=text)
        if batch == 1:
            paths = Paths(source, target, translators, tokens, step_size)
        else:
            paths = Batch(source, target, translators, tokens, step_size, batch)
        share = clock.part(len(lengths) - index)

        def enough(found: Timing, index: int = index, share: Clock = share) -> bool:
            more = lengths[index + 1 : index + 2]
            follows = any(_least(table, n, found) <= clock.left() for n in more)
            return (share if follows else clock).over()

        done.append(measure_length(paths, table, trials=trials, enough=enough, progress=progress))
        del paths
        mx.clear_cache()
    return done, []


# ---- beside the machine's ceilings ------------------------------------------------------------


def floors(
    timing: Timing,
    rates: Rates,
    source: LanguageModel,
    target: LanguageModel,
    translators: Mapping[str, Translator],
) -> dict[str, float]:
    """By phase, the least seconds that its work can take at this machine's measured rates.

    Of single prompts alone: nothing for several at once.
    """
    if timing.batch > 1:
        return {}
    count = timing.prompt_tokens - 1
    reads, steps = Costs(source), Costs(target)
    touched = timing.experts.get("prompt", 1.0)
    one = timing.experts.get("step", steps.active / max(1, _experts(target)))
    step = steps.tokens(1, count, one)
    work: dict[str, Work] = {
        "source_prefill": reads.reading(count),
        "native": steps.reading(count, touched) + step,
        "native_single": steps.tokens(count + 1, 0, touched),
        "target_step": step,
        "eager_switch": step,
        "source_step": reads.tokens(1, count),
    }
    for form, translator in translators.items():
        work[f"translate {form}"] = translation_work(translator, source, target, count)
    first = next(iter(translators))
    work["switch"] = work[f"translate {first}"] + step
    if native_part(translators[first].config) == Native():  # else the target reads a part of it
        work["accelerator"] = work["source_prefill"] + work["switch"]
    return {name: rates.floor(work[name]) for name in timing.samples if name in work}


def _experts(model: LanguageModel) -> int:
    return int(model.facts.get("num_experts") or 1)


def batched(table: Table, batch: int) -> Table:
    """What of a table can be timed for so many prompts at once: all of it for one."""
    if batch == 1:
        return table
    phases, peaks = (tuple(p for p in of if p in PHASES) for of in (table.phases, table.peaks))
    return Table(f"{table.title}, {batch} prompts at once", table.lengths, phases, peaks)


def speedups(timing: Timing) -> dict[str, float]:
    """How many times sooner each way reaches the first token than the target's own prefill."""
    native = timing.median("native") if "native" in timing.samples else None
    ways = {
        "switch": "switch", "eager switch": "eager_switch", "accelerator": "accelerator",
        "source first token": "source_step",
    }  # fmt: skip
    return {
        way: native / timing.median(phase)
        for way, phase in ways.items()
        if native is not None and phase in timing.samples
    }


def tokens_per_second(timing: Timing) -> dict[str, float]:
    """Decoding speeds."""
    return {name: DECODED / timing.median(name) for name in SPEEDS if name in timing.samples}


@dataclass(frozen=True)
class Depth:
    """How deep a model is.

    Attributes:
        measured: Its layers.
        whole: Those of the model that it stands for.
        last: What part of the last one's work its keys and values are (:class:`Costs`), with
            which a prefill ends.
    """

    measured: int
    whole: int
    last: float

    @property
    def passes(self) -> float:
        """How many times as long a pass through all layers takes."""
        return self.whole / self.measured

    @property
    def prefills(self) -> float:
        """How many times as long reading a prompt takes."""
        return (self.whole - 1 + self.last) / (self.measured - 1 + self.last)


def extrapolated(
    timing: Timing, head: float, source: Depth, target: Depth, *, steps: int = 1
) -> dict[str, float]:
    """By phase, seconds at full depth: what grows with the depth times what is left out.

    Args:
        timing: Of models of fewer layers.
        head: Seconds of the target's head, which runs once a step whatever the depth.
        source: Depth of the one.
        target: Of the other. Maps are as many as its layers.
        steps: How many a first token takes.
    """
    grown: dict[str, float] = {}
    for name in timing.samples:
        took = timing.median(name)
        if name.startswith("translate "):
            grown[name] = took * target.passes
        elif name == "source_prefill":
            grown[name] = took * source.prefills
        elif name in ("native_single", "target_step", "eager_switch"):
            heads = head if name == "native_single" else steps * head
            grown[name] = heads + max(0.0, took - heads) * target.passes
    if "native" in timing.samples and "target_step" in timing.samples:  # a prefill and a step
        reading = max(0.0, timing.median("native") - timing.median("target_step"))
        grown["native"] = reading * target.prefills + grown["target_step"]
    first = next((name for name in grown if name.startswith("translate ")), None)
    if first is not None and "target_step" in grown:
        grown["switch"] = grown[first] + grown["target_step"]
    if "switch" in grown and "source_prefill" in grown:
        grown["accelerator"] = grown["source_prefill"] + grown["switch"]
    return grown


def as_json(timing: Timing) -> dict[str, Any]:
    """Everything, raw samples included, and what is to be quoted of them."""
    return {**asdict(timing), "summary": timing.summary()}
