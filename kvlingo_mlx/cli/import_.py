"""kvlingo-mlx import: bring a translator that was trained elsewhere into the local store."""

from __future__ import annotations

import shlex

import typer

from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, say, warn
from kvlingo_mlx.errors import printable


def command(
    path_or_hub_id: str = typer.Argument(..., help="The translator: a folder or Hub id."),
    revision: str = typer.Option(None, help="Branch, tag or commit of a Hub id."),
    out: str = typer.Option(None, help="Folder to write instead of the local store's."),
    dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32."),
    source: str = typer.Option(None, help="Check that it is for this source model."),
    target: str = typer.Option(None, help="Check that it is for this target model."),
    allow_mismatch: bool = typer.Option(
        False, "--allow-mismatch", help="Accept other checkpoints of the same shape."
    ),
    force: bool = typer.Option(False, "--force", help="Replace another translator there."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Validate a translator and put it into the local store."""
    from kvlingo_mlx import embedded
    from kvlingo_mlx.format import tensor_file
    from kvlingo_mlx.loading.grading import said_of
    from kvlingo_mlx.loading.models import load
    from kvlingo_mlx.store.importing import import_translator

    keep_stdout_for_json(json_file)
    if dtype not in tensor_file.STORAGE:
        raise ValueError(
            f"--dtype is {dtype!r}; it must be one of {', '.join(tensor_file.STORAGE)}"
        )
    models = None if source is None else (load(source, lazy=True), load(target, lazy=True))
    done = import_translator(
        path_or_hub_id, revision=revision, out=out, dtype=dtype, models=models,
        allow_mismatch=allow_mismatch, force=force,
    )  # fmt: skip
    config = done.config
    for name, reason in done.unchecked.items():
        warn(f"not checked against {name}: {reason}")
    what = f"{config.form}, {config.capture}, nu = {config.nu}, {dtype}"
    ends = f"{config.source.name} to {config.target.name}"
    verb = "nothing to do: found" if done.unchanged else "imported"
    say(printable(f"{verb} {ends} {'in' if done.unchanged else 'into'} {done.folder} ({what})"))
    if done.replaced:
        say("another translator of the same models and form stood there and was replaced")
    toy = config.target.name in embedded.zoo_names()
    say(printable(f"grade: {said_of(config)}"))
    words = ["--prefill-model", config.source.name, "--decode-model", config.target.name,
             "--translator", str(done.folder), "--no-thinking",
             "--prompt", embedded.EXAMPLE if toy else "Hello"]  # fmt: skip
    say(printable("try: kvlingo-mlx generate " + shlex.join(words)))
    if json_file:
        from kvlingo_mlx.reporting import measure

        results = {
            "folder": str(done.folder), "unchanged": done.unchanged, "replaced": done.replaced,
            "source": config.source.name, "target": config.target.name, "kind": config.form,
            "capture": config.capture, "nu": config.nu, "unchecked": dict(done.unchecked),
        }  # fmt: skip
        asked = {"name": path_or_hub_id, "revision": revision, "dtype": dtype}
        measure.append_json(json_file, measure.record("import", asked, results))
