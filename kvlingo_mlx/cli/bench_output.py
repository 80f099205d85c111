"""How a bench's tables look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli.output import ms, say, table

if TYPE_CHECKING:
    from kvlingo_mlx.language_model import LanguageModel
    from kvlingo_mlx.timing.ceilings import Rates
    from kvlingo_mlx.timing.reference import Reference
    from kvlingo_mlx.timing.tables import Table, Timing
    from kvlingo_mlx.translators.base import Translator

LABELS = {
    "source_prefill": "source prefill",
    "native": "target prefill, as mlx-lm",
    "native_single": "target prefill, one pass",
    "target_step": "target step (eager switch)",
    "source_step": "source step (source writes first token)",
    "switch": "switch",
    "accelerator": "accelerator",
}
SPEED_LABELS = {
    "decode_source": "source (tokens/s)",
    "decode_native": "target, own cache (tokens/s)",
    "decode_translated": "target, translated cache (tokens/s)",
}


@dataclass(frozen=True)
class Pair:
    """What is timed.

    Attributes:
        source: Reads.
        target: Answers.
        translators: By form.
        layers: Of both, measured and of the whole models; None where they are whole.
        notes: What a reader must know of the numbers.
    """

    source: LanguageModel
    target: LanguageModel
    translators: Mapping[str, Translator]
    layers: tuple[tuple[int, int], tuple[int, int]] | None
    notes: tuple[str, ...] = ()


def show(
    shown: Table,
    timings: Sequence[Timing],
    left_out: Sequence[int],
    pair: Pair,
    rates: Rates,
    beside: tuple[str, Reference] | None,
) -> dict[str, Any]:
    """Print a table; returns what its record holds."""
    from kvlingo_mlx.timing import tables

    if not timings:
        return _nothing(shown, left_out)
    ends = pair.source, pair.target
    least = [tables.floors(t, rates, *ends, pair.translators) for t in timings]
    rows = [_times(name, timings, least) for name in timings[0].samples if name not in SPEED_LABELS]
    for phase in shown.peaks:
        spreads = ["{} / {}".format(*map(ms, t.spread(phase))) for t in timings]
        rows.append([f"{LABELS[phase]}, least / IQR", *spreads])
    for way in tables.speedups(timings[0]):
        rows.append([f"{way}, times sooner", *(f"{tables.speedups(t)[way]:.2f}" for t in timings)])
    for name in tables.tokens_per_second(timings[0]):
        speeds = [tables.tokens_per_second(t)[name] for t in timings]
        rows.append([SPEED_LABELS[name], *(f"{speed:.1f}" for speed in speeds)])
    for phase in shown.peaks:
        peaks = [f"{t.peak[phase] / 1e6:.0f}" for t in timings]
        rows.append([f"{LABELS[phase]}, peak (MB)", *peaks])
    for name in timings[0].experts:
        rows.append([f"experts touched, {name}", *(f"{t.experts[name]:.0%}" for t in timings)])
    columns = ["prompt tokens", *(str(t.prompt_tokens) for t in timings)]
    table(f"{shown.title}\n{pair.source.name} to {pair.target.name}", columns, rows)
    say("Medians in ms; in brackets the share of the machine's own ceiling.")
    grown = _extrapolate(timings, pair, columns)
    if beside is not None:
        _beside(timings, beside)
    if left_out:
        say(_left_out(left_out))
    return {
        "timings": [tables.as_json(t) for t in timings], "floors": least,
        "extrapolated": grown, "left_out": list(left_out),
    }  # fmt: skip


def _left_out(lengths: Sequence[int]) -> str:
    return f"left out for want of time: {', '.join(map(str, lengths))} tokens (--time-limit)"


def _nothing(shown: Table, left_out: Sequence[int]) -> dict[str, Any]:
    """Say that there was no time for a table at all; returns what its record holds."""
    say(f"{shown.title}\n{_left_out(left_out)}")
    return {"timings": [], "floors": [], "extrapolated": [], "left_out": list(left_out)}


def _label(phase: str) -> str:
    kind, _, rest = phase.partition(" ")
    if kind == "hybrid":
        return f"switch, {rest} layers native"
    return LABELS.get(phase, phase.replace("translate", "translation,"))


def _times(
    phase: str, timings: Sequence[Timing], least: Sequence[Mapping[str, float]]
) -> list[str]:
    cells = []
    for timing, floor in zip(timings, least, strict=True):
        share = f" ({floor[phase] / timing.median(phase):.0%})" if phase in floor else ""
        cells.append(ms(timing.median(phase)) + share)
    return [_label(phase), *cells]


def _extrapolate(
    timings: Sequence[Timing], pair: Pair, columns: list[str]
) -> list[dict[str, float]]:
    """Print what the times would be at full depth, if the models are not whole."""
    from kvlingo_mlx.measure import seconds
    from kvlingo_mlx.timing import paths, tables

    if pair.layers is None:
        return []
    work = lambda: paths.run_head(pair.target)  # noqa: E731
    head = min(seconds(work) for _ in range(5))
    grown = [tables.extrapolated(timing, head, *pair.layers) for timing in timings]
    rows = [[_label(phase), *(ms(g[phase]) for g in grown)] for phase in grown[0]]
    depths = " and ".join(str(whole) for _, whole in pair.layers)
    table(f"Extrapolated to {depths} layers, not measured (ms)", columns, rows)
    return grown


def _beside(timings: Sequence[Timing], beside: tuple[str, Reference]) -> None:
    """Print a reference's times, and how many times as long this machine takes."""
    name, numbers = beside
    common = [t for t in timings if t.prompt_tokens in numbers]
    if not common:
        say(f"{name}: none of these prompt lengths")
        return
    rows = []
    for phase in common[0].samples:
        if all(phase in numbers[t.prompt_tokens] for t in common):
            pairs = [(t.median(phase), numbers[t.prompt_tokens][phase]) for t in common]
            rows.append([_label(phase), *(f"{ms(o)} ({m / o:.1f}x)" for m, o in pairs)])
    table("Reference (ms)", ["prompt tokens", *(str(t.prompt_tokens) for t in common)], rows)
    say(f"reference: {name}; in brackets how many times as long this machine takes")


def foot(pair: Pair, rates: Rates, text: bool) -> None:
    for note in pair.notes:
        say(note)
    say("prompts: " + ("bundled text" if text else "random token ids"))
    say(
        f"ceilings: {rates.flops / 1e9:,.0f} GFLOP/s in a large {rates.dtype} product, "
        f"{rates.bandwidth / 1e9:,.1f} GB/s in a large sum or matrix times vector, measured now"
    )


def draw(plot: str, results: Mapping[str, Any]) -> None:
    from kvlingo_mlx import pictures
    from kvlingo_mlx.timing.figures import times

    pictures.save(times(results), plot)


def keep_profile(shown: Table, timings: Sequence[Timing], pair: Pair) -> None:
    """Keep the times of a table that has all ways, for `generate --strategy auto`."""
    from kvlingo_mlx import profiles
    from kvlingo_mlx.timing import profiling

    if not profiling.serves(shown):
        return
    first = next(iter(pair.translators.values()))  # whole ways are timed with this one
    profile = profiling.profile_of(pair.source, pair.target, first, timings)
    profiles.write(profile)
    ways = ", ".join(f"{n} tokens {profile.best(n)}" for n in profile.prompt_tokens)
    say(f"profile kept for --strategy auto: {ways}")
