"""kvlingo-mlx pair: from two models to a translator, in the time there is."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.cli.command import Options, argument, option, verb
from kvlingo_mlx.cli.output import keep, progress_bar, say, warn

PARTS = 1000  # of the progress bar


@dataclass(frozen=True, kw_only=True)
class PairOptions(Options):
    source: str = argument(..., "The model that reads: a folder or Hub id.")
    target: str = argument(..., "The model that answers: a folder or Hub id.")
    data: list[str] | None = option(
        None,
        "JSONL file, folder, or Hugging Face dataset; NAME@WEIGHT, may be repeated. Default: "
        "generated conversations, for a first try.",
    )
    minutes: float = option(60.0, "The time for everything.")
    out: str | None = option(None, "The translator folder to write; default: SOURCE-to-TARGET.")
    max_kl: float | None = option(None, "Choose the fewest native layers with at most this KL.")
    min_recall: float | None = option(
        None, "Choose the fewest that recall this share of the dialogues' answers."
    )
    seed: int = option(0, "Seed of the data.")
    force: bool = option(
        False, "Make anew what is finished; replace another translator at --out.", "--force"
    )


@verb(PairOptions)
def command(options: PairOptions) -> None:
    """Make a translator from SOURCE to TARGET in the time there is, on this machine.

    It chooses lengths by how fast this machine is, tries closed forms, distils the best one, and
    puts the result into the local store. The same command resumes a stopped run.
    """
    from kvlingo_mlx.making import Told, pair

    with progress_bar("looking at the models", PARTS) as step:

        def show(stage: str, share: float | None, text: str) -> None:
            step(None if share is None else round(share * PARTS), text=f"{stage}: {text}")

        made = pair(
            options.source,
            options.target,
            options.data or (),
            **options.some("minutes out max_kl min_recall seed force"),
            told=Told(say, warn, show),
        )
    for line in made.lines:
        say(line)
    results = {
        "provenance": dict(made.config.provenance),
        "starts": list(made.starts),
        "curve": list(made.curve),
    }
    asked = options.some("source target data minutes out max_kl min_recall seed")
    keep(options.json_file, "pair", asked, results)
