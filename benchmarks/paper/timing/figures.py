"""A picture of times over prompt lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.timing.phases import HEAL, HYBRID, label
from benchmarks.paper.timing.tables import TABLES
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.reporting.measure import median

SHOWN = ("native", "switch", "eager_switch", "accelerator", "source_prefill")


def times(results: Mapping[str, Any]) -> Any:
    """One panel per table: median milliseconds by way, over the prompt's length.

    To the first token; in a table of healing also until the cache is native.
    """
    results = {name: result for name, result in results.items() if result["timings"]}
    drawn = {
        n: r for n, r in results.items() if any(p in r["timings"][0]["samples"] for p in SHOWN)
    }
    drawn = drawn or results
    figure = pictures.figure(width=pictures.WIDTH * len(drawn))
    for index, (name, result) in enumerate(drawn.items(), start=1):
        phases = result["timings"][0]["samples"]
        lengths = [t["prompt_tokens"] for t in result["timings"]]
        shown = [p for p in SHOWN if p in phases]
        shown += [p for p in phases if p.startswith((HYBRID, HEAL))]
        until = ", or a native cache" if any(p.startswith(HEAL) for p in shown) else ""
        what = f"to the first token{until}" if shown else "of a translation"
        title = TABLES[name].title.partition(" (")[0]
        named = {"title": title, "xlabel": "prompt tokens", "ylabel": f"ms {what}"}
        axes = figure.add_subplot(1, len(drawn), index, **named)
        heights: list[float] = []
        for phase in shown or list(phases):
            times = [1e3 * median(t["samples"][phase]) for t in result["timings"]]
            axes.plot(lengths, times, marker="o", label=label(phase))
            heights += times
        pictures.log_scale(axes, "y", heights)
        pictures.log_scale(axes, "x", lengths)
        axes.set_xticks(lengths)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    return figure
