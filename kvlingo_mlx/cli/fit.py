"""kvlingo-mlx fit: make a translator in closed form, on this machine."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, progress_bar, say


def command(
    source: str = typer.Option(..., help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(..., help="Who decodes from it: a folder or Hub id."),
    data: str = typer.Option(..., help='JSONL of {"messages": [...]} or {"text": ...}.'),
    out: str = typer.Option(..., help="The translator folder to write."),
    norm: str = typer.Option("frobenius", help="frobenius, attention, sink_2 ... sink_32."),
    capture: str = typer.Option(
        None, help="pre_norm (default), post_norm or post_rope; latent for MLA models."
    ),
    assignment: str = typer.Option("relative_depth", help="How source layers are chosen."),
    nu: int = typer.Option(1, help="Source layers per target layer."),
    head_mixing: bool = typer.Option(True, help="Off: block-diagonal maps, head by head."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Fit a translator in closed form on your own text."""
    if assignment != "relative_depth":
        raise ValueError(f"--assignment is {assignment!r}; this version knows relative_depth")

    from kvlingo_mlx import checkpoint, measure
    from kvlingo_mlx.fitting import fit
    from kvlingo_mlx.loading import load
    from kvlingo_mlx.samples import read_jsonl

    keep_stdout_for_json(json_file)
    checkpoint.check_destination(out)
    records = read_jsonl(data)
    models = load(source), load(target)
    with progress_bar("fitting", len(records)) as step:
        translator = fit(
            *models,
            records,
            norm=norm,
            capture=capture,
            nu=nu,
            head_mixing=head_mixing,
            progress=step,
        )
    folder = translator.save(out)
    made = translator.config.provenance
    skipped = len(records) - made["samples"]
    say(
        f"wrote {folder}: {translator.num_parameters:,} parameters from {made['samples']} samples"
        + (f" ({skipped} of no use left out)" if skipped else "")
        + f", {made['prefix_tokens']} prefix tokens"
    )
    if json_file:
        config = {"source": models[0].name, "target": models[1].name, "data": data}
        results = {"parameters": translator.num_parameters, "skipped": skipped, **made}
        measure.append_json(json_file, measure.record("fit", config, results))
