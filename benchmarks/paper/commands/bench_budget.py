"""``python -m benchmarks.paper bench --table memory-budget``: from a narrower model's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.paper.commands.bench_output import check_measured, making
from kvlingo_mlx.cli.output import keep, progress_bar, say, table, tell_of_machine

if TYPE_CHECKING:
    from benchmarks.paper.commands.bench_options import BenchOptions
    from benchmarks.paper.timing.memory_budget import Cell

TITLE = "Decoding under a memory budget (paper, app. of that name): {}, random weights and cache"
COLUMNS = [
    "context",
    "batch",
    "full (tokens/s)",
    "narrowed",
    "narrowed + translator",
    "translator's share",
    "full (GB)",
    "narrowed",
    "narrowed + translator",
]
LABEL = "app:tab:budget"
PAPERS_COLUMNS = [*COLUMNS[:5], "full (GB)", "narrowed + translator"]


def run(options: BenchOptions, contexts: Sequence[int] | None, batches: Sequence[int]) -> None:
    """Measure, print the table and append the record."""
    from benchmarks.paper.timing import memory_budget
    from benchmarks.paper.timing.paper import STATED
    from benchmarks.paper.timing.reference import PAPER, differences
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.timing.switching import Stopwatch

    if options.reference not in (None, PAPER):
        raise ValueError(
            f"--reference is {options.reference!r}; --table memory-budget stands beside {PAPER} "
            "alone"
        )
    tell_of_machine()
    precision, trials = options.precision or "4bit", options.num_trials
    clock = Stopwatch(options.time_limit)  # it includes making the models
    with making(clock) as progress:
        models = memory_budget.setup(options.layers, precision, progress)
    contexts = contexts or memory_budget.CONTEXTS
    decoded = options.decode_tokens or memory_budget.default_decoded()
    with progress_bar("timing memory-budget", len(contexts) * len(batches) * trials) as step:
        found = memory_budget.run(
            models, contexts, batches, trials=trials, decoded=decoded, clock=clock, progress=step
        )
        cells = list(found)
    check_measured(bool(cells), options.time_limit, "fewer --prompt-tokens, --layers or rows")
    table(TITLE.format(memory_budget.FULL), COLUMNS, [_row(cell) for cell in cells])
    left_out = len(contexts) * len(batches) - len(cells)
    if left_out:
        say(f"{left_out} of {left_out + len(cells)} cells left out: time or memory allow no more")
    depth, whole = len(models.full.attentions), memory_budget.whole_depth()
    if depth < whole:
        say(
            f"{depth} of {whole} layers are run: caches and layers' weights have that part of "
            "their full size, embeddings and head all of it"
        )
    say(
        f"{precision} weights, head-wise post-RoPE maps; {decoded} tokens a row, best of {trials}; "
        "memory: the most alive while decoding"
    )
    config = {"layers": depth, "whole_layers": whole, "precision": precision}
    config |= {"trials": trials, "decoded": decoded, "weights": models.full.precision}
    config |= {"machine": measure.environment()["chip"], "head_mixing": False}
    config |= {"capture": models.translator.config.capture}
    found_otherwise = [str(one) for one in differences(STATED[LABEL], config)]
    if options.reference is not None:
        _beside(cells, found_otherwise)
    say(measure.machine_line())
    config["reference"] = {"label": LABEL, "differences": found_otherwise}
    keep(options.json_file, "memory_budget", config, [cell.as_json() for cell in cells])


def _beside(cells: Sequence[Cell], otherwise: Sequence[str]) -> None:
    """Print the paper's values for the same contexts and batches, and how they were measured."""
    from benchmarks.paper.timing.paper import BUDGET

    known = [(cell.context, cell.batch) for cell in cells if (cell.context, cell.batch) in BUDGET]
    if not known:
        listed = "; ".join(f"{context} by {batch}" for context, batch in BUDGET)
        say(f"the paper has none of these contexts and batches: it has {listed}")
        return
    star = "*" if otherwise else ""
    rows = [[f"{c}", f"{b}", *(f"{value}{star}" for value in BUDGET[c, b])] for c, b in known]
    table(f"The same in the paper ({LABEL})", PAPERS_COLUMNS, rows)
    if otherwise:
        say(f"* measured otherwise: {'; '.join(otherwise)}")


def _row(cell: Cell) -> list[str]:
    peaks = [f"{cell.peak[way] / 1e9:.2f}" for way in ("full", "narrowed", "folded")]
    gains = [f"{cell.gain(way):+.0%}" for way in ("narrowed", "folded")]
    return [
        f"{cell.context}",
        f"{cell.batch}",
        f"{cell.rate('full'):.2f}",
        *gains,
        f"{cell.share:.1%}",
        *peaks,
    ]
