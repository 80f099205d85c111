"""Sections on what `kvlingo-mlx bench` said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.paper.timing.phases import label
from benchmarks.paper.timing.reference import BEFORE
from kvlingo_mlx.cli.output import ms
from rendering.records import records, source, table


def benches() -> str:
    """Every phase of every table, beside the machine's own ceiling; the newest run of a pair."""
    latest = {
        (*(r["config"][name] for name in ("source", "target", "precision")), *r["results"]): r
        for r in records("bench")
    }
    if not latest:
        return ""
    parts = [
        "## What a switch saves: `kvlingo-mlx bench`\n\n"
        "Medians in ms; in brackets the share that the least possible time has in it, by the\n"
        "machine's own rates in a large product and a large sum. A switch starts from a source\n"
        "that has read the prompt; the accelerator counts that, too.\n"
    ]
    for (reader, writer, *_), record in latest.items():
        config = record["config"]
        depths = ", ".join(f"{some} of {whole}" for some, whole in config["layers"] or [])
        what = f"; {depths} layers, {config['precision']}" if depths else ""
        parts.append(
            f"### {reader} to {writer}{what}\n\nnu = {config['nu']}, {config['prompt']}; "
            f"ceilings {config['rates']['flops'] / 1e9:.0f} GFLOP/s, "
            f"{config['rates']['bandwidth'] / 1e9:.1f} GB/s.\n"
        )
        for name, found in record["results"].items():
            parts += bench_table(name, found)
        parts.append(source(record))
    return "\n".join(parts)


def bench_table(name: str, found: dict) -> Iterable[str]:
    """One table as it was measured, and at full depth where it was extrapolated."""
    timings, floors, grown = found["timings"], found["floors"], found["extrapolated"]
    if not timings:
        return
    columns = [f"{name}, prompt tokens", *(str(t["prompt_tokens"]) for t in timings)]
    rows = []
    for phase in timings[0]["samples"]:
        cells = [
            milliseconds(t["samples"][phase]) + share(t["samples"][phase], floor.get(phase))
            for t, floor in zip(timings, floors, strict=True)
        ]
        rows.append([label(phase, timings[0].get("decoded", BEFORE)), *cells])
    rows += while_healed(found)
    yield table(columns, rows)
    if grown and grown[0]:
        yield "Extrapolated to all layers, not measured:\n"
        rows = [[label(phase), *(milliseconds([g[phase]]) for g in grown)] for phase in grown[0]]
        yield table(columns, rows)


def while_healed(found: dict) -> list[list[str]]:
    """Decoding speeds while the target reads, and the work of each way, where a table has them."""
    if "work" not in found:
        return []
    speeds = [
        [f"{label(phase)}: tokens/s meanwhile (of undisturbed)",
         *(f"{each[phase]['tokens_per_second']:.0f} ({each[phase]['share']:.0%})"
           if phase in each else "" for each in found["while_healed"])]
        for phase in found["timings"][0]["meanwhile"]
    ]  # fmt: skip
    work = [
        [f"{label(way)}: GFLOP, to the first token / in all",
         *(" / ".join(f"{flops / 1e9:.3g}" for flops in each[way].values())
           for each in found["work"])]
        for way in found["work"][0]
    ]  # fmt: skip
    return speeds + work


def milliseconds(seconds: Sequence[float]) -> str:
    return ms(float(np.median(seconds)))


def share(seconds: Sequence[float], floor: float | None) -> str:
    return "" if floor is None else f" ({floor / float(np.median(seconds)):.0%})"


def memory_budgets() -> str:
    """Decoding under a memory budget, as the command measures it."""
    rows, sources = [], []
    for record in records("memory_budget"):
        config = record["config"]
        for cell in record["results"]:
            best = {way: min(samples) for way, samples in cell["samples"].items()}
            rows.append([
                f"{config['layers']} of {config['whole_layers']}", config["precision"],
                str(cell["context"]), str(cell["batch"]),
                f"{cell['batch'] * cell['decoded'] / best['full']:.2f}",
                *(f"{cell['gain'][way]:+.0%}" for way in ("narrowed", "folded")),
                f"{100 * cell['translator_share']:.1f} %",
                *(f"{cell['peak'][way] / 1e9:.2f}" for way in ("full", "narrowed", "folded")),
            ])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["layers", "weights", "tokens", "batch", "full (tokens/s)", "narrowed", "folded",
               "translator", "full (GB)", "narrowed", "folded"]  # fmt: skip
    return "\n".join([
        "### `python -m benchmarks.paper bench --table memory-budget`\n\n"
        "Gemma-3-12B's widths, random weights; the best of some samples, and the most alive.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip
