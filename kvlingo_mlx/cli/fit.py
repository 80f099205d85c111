"""kvlingo-mlx fit: make a translator in closed form, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, progress_bar, say, warn

if TYPE_CHECKING:
    from kvlingo_mlx.format.assignment import Assignment
    from kvlingo_mlx.models.language_model import LanguageModel


def command(
    source: str = typer.Option(..., help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(..., help="Who decodes from it: a folder or Hub id."),
    data: str = typer.Option(..., help='JSONL of {"messages": [...]} or {"text": ...}.'),
    out: str = typer.Option(..., help="The translator folder to write."),
    norm: str = typer.Option("frobenius", help="frobenius, attention, sink_2 ... sink_32."),
    capture: str = typer.Option(
        None, help="pre_norm (default), post_norm or post_rope; latent for MLA models."
    ),
    assignment: str = typer.Option(
        "relative_depth",
        help='relative_depth, r2, greedy, or a JSON file {"keys": [[0], ...], "values": ...}.',
    ),
    nu: int = typer.Option(1, help="Source layers per target layer."),
    head_mixing: bool = typer.Option(True, help="Off: block-diagonal maps, head by head."),
    memory_gb: float = typer.Option(
        8.0, help="Most GB of sums at once; with less, the data are read several times."
    ),
    force: bool = typer.Option(False, "--force", help="Replace another translator at --out."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Fit a translator in closed form on your own text.

    Give 32 tokens or more for each number that a map reads (KV heads x head dim x --nu; off
    --head-mixing, of one head): 32,768 for a KV width of 1,024. Fewer are told, fewer than one are
    refused.
    """
    if memory_gb <= 0:
        raise ValueError(f"--memory-gb is {memory_gb}; give a positive number")

    from kvlingo_mlx.fitting import fit
    from kvlingo_mlx.format import translator_folder
    from kvlingo_mlx.format.assignment import narrow_groups
    from kvlingo_mlx.loading.grading import said_of
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.tokenization.samples import read_jsonl

    keep_stdout_for_json(json_file)
    translator_folder.check_destination(out)
    if not force:
        translator_folder.check_free(out)
    records = read_jsonl(data)
    models = load_pair(source, target)
    with progress_bar("fitting", len(records)) as step:
        translator = fit(
            *models,
            records,
            norm=norm,
            capture=capture,
            assignment=_assignment(assignment, *models),
            nu=nu,
            memory=int(memory_gb * 2**30),
            head_mixing=head_mixing,
            progress=lambda done, total: step(done, total, "fitting: reading samples"),
            solving=lambda done, total: step(done, total, "fitting: solving maps"),
        )
    ends = translator.config.source.layers, translator.config.target.layers
    narrow = "" if assignment.endswith(".json") else narrow_groups(*ends, nu)
    if narrow:
        warn(narrow)
    folder = translator.save(out, overwrite=force)
    made = translator.config.provenance
    skipped = len(records) - made["samples"]
    say(
        f"wrote {folder}: {translator.num_parameters:,} parameters from {made['samples']} samples"
        + (f" ({skipped} of no use left out)" if skipped else "")
        + f", {made['prefix_tokens']} prefix tokens"
    )
    say(f"grade: {said_of(translator.config)}")
    if json_file:
        config = {"source": models[0].name, "target": models[1].name, "data": data}
        results = {"parameters": translator.num_parameters, "skipped": skipped, **made}
        measure.append_json(json_file, measure.record("fit", config, results))


def _assignment(text: str, source: LanguageModel, target: LanguageModel) -> Assignment | str:
    """A rule's name as it is, a file as what it lists."""
    if not text.endswith(".json"):
        return text
    from pathlib import Path

    from kvlingo_mlx.format.config_reading import parse_assignment, parse_json

    path = Path(text)
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--assignment {text} cannot be read: {error.strerror}") from None
    return parse_assignment(path, parse_json(path, blob), source.spec(), target.spec())
