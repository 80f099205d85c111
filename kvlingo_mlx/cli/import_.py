"""kvlingo-mlx import: bring a translator that was trained elsewhere into the local store."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import say


def command(
    path_or_hub_id: str = typer.Argument(..., help="The translator: a folder or Hub id."),
    out: str = typer.Option(None, help="Folder to write instead of the local store's."),
    dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32."),
    source: str = typer.Option(None, help="Check that it is for this source model."),
    target: str = typer.Option(None, help="Check that it is for this target model."),
) -> None:
    """Validate a translator and put it into the local store."""
    from kvlingo_mlx import checkpoint, tensor_file
    from kvlingo_mlx.loading import import_translator, load

    if dtype not in tensor_file.STORAGE:
        raise ValueError(
            f"--dtype is {dtype!r}; it must be one of {', '.join(tensor_file.STORAGE)}"
        )
    if (source is None) != (target is None):
        raise ValueError("give both --source and --target, or neither")
    models = None if source is None else (load(source), load(target))
    folder = import_translator(path_or_hub_id, out=out, dtype=dtype, models=models)
    config = checkpoint.read_config(folder)
    say(f"imported {config.source.name} to {config.target.name} into {folder} ({dtype})")
    if models is None:
        say("its models were not checked; give --source and --target to do so")
    say(
        f"try: kvlingo-mlx generate --prefill-model {config.source.name} "
        f"--decode-model {config.target.name} --translator {folder} --prompt Hello"
    )
