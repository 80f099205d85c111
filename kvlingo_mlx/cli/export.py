"""kvlingo-mlx export: write a translator's maps as other programs read them."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.cli.command import MaybeSource, MaybeTarget, Options, argument, option, verb
from kvlingo_mlx.cli.output import facts, keep, say
from kvlingo_mlx.errors import printable


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    translator: str = argument(..., "A translator's folder, its name in `list`, or a Hub id.")
    to: str = option(..., "The format: veloxquant.")
    out: str = option(..., "The folder to write.")
    source: MaybeSource = None
    target: MaybeTarget = None
    force: bool = option(False, "Replace another export there.", "--force")


@verb(ExportOptions)
def command(options: ExportOptions) -> None:
    """Write a translator's maps as other programs read them.

    A mapper of VeloxQuant-MLX also says how the models rotate keys, so they must be on this
    machine: those that the translator names, or those of --source and --target.
    """
    from pathlib import Path

    from kvlingo_mlx.store.formats import FORMATS, export

    models = None
    if options.source is not None and options.target is not None:
        models = options.source, options.target
    config = export(options.translator, options.to, options.out, models=models, force=options.force)
    ends = f"{config.source.name} to {config.target.name}"
    say(printable(f"exported {ends} to {options.out} ({options.to}):"))
    sizes = {name: (Path(options.out) / name).stat().st_size for name in FORMATS[options.to].FILES}
    facts({name: f"{size:,} bytes" for name, size in sizes.items()})
    asked = {"name": options.translator, "to": options.to}
    keep(options.json_file, "export", asked, {"folder": options.out, "bytes": sizes})
