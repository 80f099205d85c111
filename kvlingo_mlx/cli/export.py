"""kvlingo-mlx export: write a translator's maps as other programs read them."""

from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx.cli.command import PerhapsTwoModels, verb
from kvlingo_mlx.cli.output import facts, keep, say
from kvlingo_mlx.errors import printable
from kvlingo_mlx.options import option


@dataclass(frozen=True, kw_only=True)
class ExportOptions(PerhapsTwoModels):
    translator: str = option(
        ..., "A translator's folder, its name in `list`, or a Hub id.", word=True
    )
    to: str = option(..., "The format: veloxquant or semantic-router.")
    out: str = option(..., "The folder to write.")
    force: bool = option(False, "Replace another export there.", "--force")


@verb(ExportOptions)
def command(options: ExportOptions) -> None:
    """Write a translator's maps as other programs read them.

    A mapper also says how the models rotate keys, or their commits, so they must be on this
    machine: those that the translator names, or those of --source and --target.
    """
    from kvlingo_mlx.store.formats import FORMATS, export

    name, to, out = options.translator, options.to, options.out
    config = export(name, to, out, models=options.pair, force=options.force)
    say(printable(f"exported {config.source.name} to {config.target.name} to {out} ({to}):"))
    sizes = {file: (Path(out) / file).stat().st_size for file in FORMATS[to].FILES}
    facts({file: f"{size:,} bytes" for file, size in sizes.items()})
    keep(options.json_file, "export", {"name": name, "to": to}, {"folder": out, "bytes": sizes})
