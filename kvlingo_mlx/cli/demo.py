"""kvlingo-mlx demo: the whole product on the embedded tiny models, no network."""

from dataclasses import dataclass

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, ms, phase, say, table, tell_of_machine
from kvlingo_mlx.options import option

SAMPLES = 12
# From dense to mixture of experts, and between two dense models in both directions.
PAIRS = (
    ("tiny-qwen3-s", "tiny-qwen3-moe"),
    ("tiny-qwen3-s", "tiny-qwen3-l"),
    ("tiny-qwen3-l", "tiny-qwen3-s"),
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(VerbOptions):
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
    found = {}
    with phase("demo", len(pairs) * SAMPLES) as step:
        for names in pairs:
            found[" to ".join(names)] = demonstrate(*names, SAMPLES, step)
    for pair, result in found.items():
        columns = ["question", "truth", "native", "translated", "prefix hidden"]
        table(pair, columns, result.answers)
    scores = []
    for pair, result in found.items():
        for name, score in result.scores.items():
            means = score["dialogues"]
            kl = "-" if name == "native" else f"{means['kl'].value:.3f}"
            scores.append([pair, name, f"{means['recall'].value:.2f}", kl])
    columns = ["pair", "cache", "recall", "KL (nats per token)"]
    table(f"Recall on {SAMPLES} held-out dialogues, first askings", columns, scores)
    ways = ["native", "switch", "accelerator"]
    times = [[pair, *(ms(r.latency.ways[way]) for way in ways)] for pair, r in found.items()]
    title = "Time to first token at 512 prompt tokens (ms, median of 3)"
    table(title, ["pair", *ways], times)
    tell_of_machine()
    say(measure.machine_line())
    keep(options.json_file, "demo", {"dialogues": SAMPLES}, found)
