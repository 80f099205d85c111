"""Figures derived from a table's times: ceilings, speed-ups, times at full depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.paper.timing.paths import FEW
from benchmarks.paper.timing.phases import SPEEDS
from benchmarks.paper.timing.tables import Timing
from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import median
from kvlingo_mlx.timing.ceilings import Costs, Rates, Work, translation_work
from kvlingo_mlx.translators.base import Translator


def floors(
    timing: Timing,
    rates: Rates,
    source: LanguageModel,
    target: LanguageModel,
    translators: Mapping[str, Translator],
) -> dict[str, float]:
    """For each phase, the least seconds that its work can take at this machine's measured rates.

    Only for single prompts; a batch gets an empty result.
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
    part = native_part(translators[first].config, tokens=count)
    if part == Native():  # else the target reads some of it
        work["accelerator"] = work["source_prefill"] + work["switch"]
    return {name: rates.floor(work[name]) for name in timing.samples if name in work}


def _experts(model: LanguageModel) -> int:
    return int(model.facts.get("num_experts") or 1)


def speedups(timing: Timing) -> dict[str, float]:
    """The factor by which each way reaches the first token sooner than the target's own prefill."""
    native = timing.median("native") if "native" in timing.samples else None
    ways = {
        "switch": "switch",
        "eager switch": "eager_switch",
        "accelerator": "accelerator",
        "source first token": "source_step",
    }
    return {
        way: native / timing.median(phase)
        for way, phase in ways.items()
        if native is not None and phase in timing.samples
    }


def tokens_per_second(timing: Timing) -> dict[str, float]:
    """Decoding speeds, in tokens per second."""
    known = [name for name in SPEEDS if name in timing.samples]
    return {name: timing.decoded / timing.median(name) for name in known}


def speeds_while_healing(timing: Timing) -> dict[str, float]:
    """Decoding speeds from the first token until the cache is native, in tokens per second.

    By phase, medians; a phase in which some round decoded fewer than ``FEW`` tokens has none.
    """
    return {
        phase: median([one.tokens / one.seconds for one in rounds])
        for phase, rounds in timing.meanwhile.items()
        if min(one.tokens for one in rounds) >= FEW
    }


@dataclass(frozen=True)
class Depth:
    """The depth of a model.

    Attributes:
        measured: The layers of the measured model.
        whole: The layers of the model that it stands for.
        last: The share of the last layer's work for its keys and values, with which a prefill
            ends (:class:`Costs`).
    """

    measured: int
    whole: int
    last: float

    @property
    def passes(self) -> float:
        """The factor by which a pass through all layers takes longer at full depth."""
        return self.whole / self.measured

    @property
    def prefills(self) -> float:
        """The factor by which reading a prompt takes longer at full depth."""
        return (self.whole - 1 + self.last) / (self.measured - 1 + self.last)


def extrapolated(
    timing: Timing, head: float, source: Depth, target: Depth, *, steps: int = 1
) -> dict[str, float]:
    """For each phase, the seconds at full depth, where the part that grows with depth is scaled.

    Args:
        timing: Times of models with fewer layers.
        head: Seconds of the target's output head, which runs once per step at any depth.
        source: The depth of the source.
        target: The depth of the target. There are as many maps as target layers.
        steps: The number of steps that a first token takes.
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
