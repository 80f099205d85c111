"""kvlingo-mlx in-mlx-lm: mlx-lm's own server, in which models take over from one another."""

import signal
from dataclasses import dataclass

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep
from kvlingo_mlx.options import option


@dataclass(frozen=True, kw_only=True)
class InMlxLmOptions(VerbOptions):
    PASSES_ON = True
    arguments: list[str] | None = option(None, "Options of mlx_lm.server.", word=True)
    reread: bool = option(
        True, "Read translated tokens anew while no request is running.", "--reread/--no-reread"
    )


@verb(InMlxLmOptions, long=True, waits=True)
def command(options: InMlxLmOptions) -> None:
    """Start mlx-lm's own server, in which a model takes over what another one has read.

    All options but these are mlx-lm's: see `mlx_lm.server --help`. Translators are those of the
    local store.
    """
    from kvlingo_mlx.serving import in_mlx_lm

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # mlx-lm's thread would outlive an exit
    keep(options.json_file, "in-mlx-lm", options.some("arguments reread"), {})
    in_mlx_lm.run(options.arguments or [], options.reread)
