"""The figure on prefix lengths of the training mixture."""

from __future__ import annotations

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.training import command_line

SAMPLES = 240  # of the paper's probe
BATCH = 8


def make(entry: Entry, work: Work) -> Result:
    """Counts of prefix lengths, by whether the answer reasons (figure "prefixhist")."""
    source, target = work.models.pair(entry.pairs[0])
    asked = command_line.Options(
        source=source,
        target=target,
        data=work.training_data(),
        device=work.device,
        seed=entry.seeds[0],
        max_prefix=work.size.max_prefix,
    )
    found = command_line.histogram(asked, SAMPLES // BATCH, BATCH, SAMPLES)
    lines = [
        Line((f"{low} to {high - 1}",), (float(reasoning), float(without)))
        for low, high, reasoning, without in found.stage2
    ]
    columns = ("with reasoning", "without")
    return Result(("tokens",), columns, tuple(lines), (str(found.survey),))
