"""kvlingo-mlx demo: the whole product on the embedded tiny models, no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import Options, option, verb
from kvlingo_mlx.cli.output import keep, ms, progress_bar, say, table, tell_of_machine

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.demonstration import Demonstration

    Found = dict[str, Demonstration]  # by pair

SAMPLES = 12
# From dense to mixture of experts, and between two dense models in both directions.
PAIRS = (
    ("tiny-qwen3-s", "tiny-qwen3-moe"),
    ("tiny-qwen3-s", "tiny-qwen3-l"),
    ("tiny-qwen3-l", "tiny-qwen3-s"),
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    every_pair: bool = option(False, "All six pairs, not three.", "--every-pair")


@verb(DemoOptions, long=True)
def command(options: DemoOptions) -> None:
    """Answer questions from a translated cache, beside native and hidden-prefix answers."""
    from kvlingo_mlx.embedded import zoo_pairs
    from kvlingo_mlx.evaluation.demonstration import demonstrate
    from kvlingo_mlx.reporting import measure

    pairs = zoo_pairs() if options.every_pair else PAIRS
    say("Each dialogue tells 12 to 28 facts, then asks about some. One tiny model reads it; a")
    say("second one answers from the first one's translated cache, without reading it again.")
    results = {}
    with progress_bar("demo", len(pairs) * SAMPLES) as step:
        for names in pairs:
            results[" to ".join(names)] = demonstrate(*names, SAMPLES, step)
    _print_answers(results)
    _print_quality(results)
    _print_latency(results)
    tell_of_machine()
    say(measure.machine_line())
    keep(
        options.json_file,
        "demo",
        {"dialogues": SAMPLES},
        {pair: found.as_json() for pair, found in results.items()},
    )


def _print_answers(results: Found) -> None:
    for pair, result in results.items():
        columns = ["question", "truth", "native", "translated", "prefix hidden"]
        table(pair, columns, result.answers)


def _print_quality(results: Found) -> None:
    rows = []
    for pair, result in results.items():
        for name, score in result.scores.items():
            kl = "-" if name == "native" else f"{sum(score.kl) / len(score.kl):.3f}"
            rows.append([pair, name, f"{score.recall:.2f}", kl])
    columns = ["pair", "cache", "recall", "KL (nats per token)"]
    table(f"Recall on {SAMPLES} held-out dialogues, first askings", columns, rows)


def _print_latency(results: Found) -> None:
    columns = ["pair", "native", "switch", "accelerator"]
    rows = [
        [pair, *(ms(result.latency.ways[path]) for path in columns[1:])]
        for pair, result in results.items()
    ]
    table("Time to first token at 512 prompt tokens (ms, median of 3)", columns, rows)
