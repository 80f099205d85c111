"""kvlingo-mlx import: bring a translator that was trained elsewhere into the local store."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import (
    AllowMismatch,
    Force,
    MaybeSource,
    MaybeTarget,
    Options,
    argument,
    option,
    verb,
)
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.errors import printable

if TYPE_CHECKING:
    from kvlingo_mlx.store.importing import Imported


PROMPT = "My sister Emma lives in Lima and her cat is called Otto. Where does Emma live?"


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    path_or_hub_id: str = argument(..., "The translator: a folder or Hub id.")
    revision: str | None = option(None, "Branch, tag or commit of a Hub id.")
    out: str | None = option(None, "Folder to write instead of the local store's.")
    dtype: str | None = option(
        None,
        "bfloat16, float16 or float32; default: bfloat16 for translators of this package, else as "
        "they are.",
    )
    format: str | None = option(
        None,
        "kvlingo or veloxquant; default: what the files say.",
        "--from",
    )
    source: MaybeSource = None
    target: MaybeTarget = None
    allow_mismatch: AllowMismatch = False
    force: Force = False


@verb(ImportOptions)
def command(options: ImportOptions) -> None:
    """Validate a translator and put it into the local store; those of others are converted.

    With --source and --target check that it is for these models.
    """
    from kvlingo_mlx.format import tensor_file
    from kvlingo_mlx.loading.grading import said_of
    from kvlingo_mlx.store.importing import import_translator

    known = ", ".join(tensor_file.STORAGE)
    if options.dtype is not None and options.dtype not in tensor_file.STORAGE:
        raise ValueError(f"--dtype is {options.dtype!r}; it must be one of {known}")
    models = None
    if options.source is not None and options.target is not None:
        models = options.source, options.target
    given = options.some("revision out dtype allow_mismatch force format")
    done = import_translator(options.path_or_hub_id, models=models, **given)
    config = done.config
    for name, reason in done.unchecked.items():
        warn(f"not checked against {name}: {reason}")
    what = f"{config.form}, {config.capture}, nu = {config.nu_told}, {done.dtype}"
    ends = f"{config.source.name} to {config.target.name}"
    told = "nothing to do: found" if done.unchanged else "imported"
    say(printable(f"{told} {ends} {'in' if done.unchanged else 'into'} {done.folder} ({what})"))
    if done.replaced:
        say("another translator of the same models and form stood there and was replaced")
    say(printable(f"grade: {said_of(config)}"))
    _say_what_to_try(done)
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


def _say_what_to_try(done: Imported) -> None:
    from kvlingo_mlx import embedded
    from kvlingo_mlx.loading.translators import name_of

    ends = done.config.source.name, done.config.target.name
    words = ["generate", "--source", ends[0], "--target", ends[1], "--prompt"]
    words += [embedded.EXAMPLE] if {*ends} <= {*embedded.zoo_names()} else [PROMPT]
    words += ["--translator", name_of(done.folder) or str(done.folder)]
    say(printable(f"try: {shlex.join(['kvlingo-mlx', *words])}"))
