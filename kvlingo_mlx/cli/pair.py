"""kvlingo-mlx pair: from two models to a translator, in the time there is."""

from dataclasses import dataclass

from kvlingo_mlx.cli.command import TwoModels, verb
from kvlingo_mlx.cli.output import draw, keep, phase, say, warn
from kvlingo_mlx.options import option
from kvlingo_mlx.training.recipe import BoundOptions


@dataclass(frozen=True, kw_only=True)
class PairOptions(BoundOptions, TwoModels):
    data: list[str] | None = option(
        None,
        "JSONL file, folder, or Hugging Face dataset; NAME@WEIGHT, may be repeated. Default: "
        "generated conversations, for a first try.",
    )
    minutes: float = option(60.0, "The time for everything.")
    out: str | None = option(None, "The translator folder to write; default: A-to-B.")
    nu: int | None = option(
        None, "Source layers per target layer; default: as many as there is time to fit."
    )
    capture: str | None = option(
        None, "Where keys are read: pre_norm (default), post_norm, post_rope."
    )
    seed: int = option(0, "Seed of the data.")
    plot: str | None = option(None, "Draw the held-out KL into this file (the [plot] extra).")
    force: bool = option(
        False, "Make anew what is finished; replace another translator at --out.", "--force"
    )


@verb(PairOptions, long=True)
def command(options: PairOptions) -> None:
    """Make a translator of two models in the time there is, on this machine.

    It chooses lengths by how fast this machine is, fits a closed form, trains it, and puts the
    result into the local store. The same command resumes a stopped run.
    """
    from kvlingo_mlx.reporting import pictures

    if options.plot:
        pictures.check(options.plot)

    from kvlingo_mlx.making import Callbacks, pair

    models = options.source, options.target
    with phase("looking at the models", options.minutes) as step:

        def show(stage: str, share: float, text: str) -> None:
            step(share * options.minutes, text=f"{stage}: {text}")

        try:
            given = options.some("minutes out max_kl min_recall nu capture seed force")
            heard = Callbacks(say, warn, show)
            made = pair(*models, options.data or (), **given, callbacks=heard)
        except KeyboardInterrupt:
            warn("stopped; the same command goes on with what is kept")
            raise
    if options.plot and made.curve:
        from kvlingo_mlx.training import command_line

        draw(command_line.figure(made.log), options.plot, *models)
    for line in made.lines:
        say(line)
    results = {"provenance": dict(made.config.provenance), "curve": list(made.curve)}
    asked = options.some("source target data minutes out max_kl min_recall nu capture seed")
    keep(options.json_file, "pair", asked, results)
