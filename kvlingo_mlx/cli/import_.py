"""kvlingo-mlx import: bring a translator that was trained elsewhere into the local store."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import PerhapsTwoModels, verb
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.errors import printable
from kvlingo_mlx.options import one_of, option

if TYPE_CHECKING:
    from kvlingo_mlx.store.importing import Imported

PROMPT = "My sister Emma lives in Lima and her cat is called Otto. Where does Emma live?"


@dataclass(frozen=True, kw_only=True)
class ImportOptions(PerhapsTwoModels):
    path_or_hub_id: str = option(..., "The translator: a folder or Hub id.", word=True)
    revision: str | None = option(None, "Branch, tag or commit of a Hub id.")
    out: str | None = option(None, "Folder to write instead of the local store's.")
    dtype: str | None = option(
        None,
        "bfloat16, float16 or float32; default: bfloat16 for translators of this package, else as "
        "they are.",
        kind=one_of("bfloat16", "float16", "float32"),
    )
    format: str | None = option(
        None, "kvlingo, veloxquant or semantic-router; default: what the files say.", "--from"
    )
    allow_mismatch: bool = False
    force: bool = False


@verb(ImportOptions)
def command(options: ImportOptions) -> None:
    """Validate a translator and put it into the local store; those of others are converted.

    With --source and --target check that it is for these models.
    """
    from kvlingo_mlx.loading.grading import said_of
    from kvlingo_mlx.store.importing import import_translator

    given = options.some("revision out dtype allow_mismatch force format")
    done = import_translator(options.path_or_hub_id, models=options.pair, **given)
    config = done.config
    for name, reason in done.unchecked.items():
        warn(f"not checked against {name}: {reason}")
    what = f"{config.form}, {config.capture}, nu = {config.nu_told}, {done.dtype}"
    ends = f"{config.source.name} to {config.target.name}"
    begin = f"nothing to do: found {ends} in" if done.unchanged else f"imported {ends} into"
    say(printable(f"{begin} {done.folder} ({what})"))
    if done.replaced:
        say("another translator of the same models and form stood there and was replaced")
    say(printable(f"grade: {said_of(config)}"))
    say(printable(f"try: {shlex.join(['kvlingo-mlx', *_words_to_try(done)])}"))
    results = {
        "folder": str(done.folder),
        "unchanged": done.unchanged,
        "replaced": done.replaced,
        "source": config.source.name,
        "target": config.target.name,
        "kind": config.form,
        "capture": config.capture,
        "nu": config.nu,
        "dtype": done.dtype,
        "unchecked": dict(done.unchecked),
    }
    asked = {"name": options.path_or_hub_id, **options.some("revision dtype format")}
    keep(options.json_file, "import", asked, results)


def _words_to_try(done: Imported) -> list[str]:
    from kvlingo_mlx import embedded
    from kvlingo_mlx.loading.translators import name_of

    ends = done.config.source.name, done.config.target.name
    prompt = embedded.EXAMPLE if {*ends} <= {*embedded.zoo_names()} else PROMPT
    named = name_of(done.folder) or str(done.folder)
    return ["generate", "--source", ends[0], "--target", ends[1], "--prompt", prompt,
            "--translator", named]  # fmt: skip
