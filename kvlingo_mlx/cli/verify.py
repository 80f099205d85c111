"""kvlingo-mlx verify: whether a translator computes here what it was made to compute."""

from __future__ import annotations

from typing import Any

import typer

from kvlingo_mlx.cli.output import JSON_HELP, facts, keep_stdout_for_json, say
from kvlingo_mlx.errors import IncompatibleTranslatorError, MissingTranslatorError


def command(
    translator: str = typer.Argument(..., help="A translator folder or Hub id."),
    source: str = typer.Option(None, help="The source model: KL and agreement are measured."),
    target: str = typer.Option(None, help="The target model, likewise."),
    allow_mismatch: bool = typer.Option(
        False, "--allow-mismatch", help="Accept other checkpoints of the same shape."
    ),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Run a translator's self-test; with both models, hold it up to its training's receipt.

    Exit status 1 if it is not as it should be.
    """
    from kvlingo_mlx import checkpoint
    from kvlingo_mlx.hub import resolve

    keep_stdout_for_json(json_file)
    folder, _ = resolve(translator, None, checkpoint.OUR_FILES, MissingTranslatorError)
    config, weights = checkpoint.read(folder)
    checkpoint.check_sizes(folder, config, weights)
    tested = (folder / checkpoint.SELFTEST_FILE).exists()
    rows: dict[str, Any] = {
        "files": "sound",
        "its own probes": "agree" if tested else f"none: it has no {checkpoint.SELFTEST_FILE}",
    }
    sound = _run_maps(config, weights, rows)
    text = "the maps are computed as they are stored" if sound else "MLX computes other maps here"
    if source is not None and sound:
        sound, text = _run_models(config, weights, (source, target), allow_mismatch, rows)
    facts(rows)
    say(f"verdict: {'sound' if sound else 'NOT SOUND'}: {text}")
    if json_file:
        from kvlingo_mlx import measure

        results = {**{name: str(value) for name, value in rows.items()}, "sound": sound}
        measure.append_json(json_file, measure.record("verify", {"name": translator}, results))
    if not sound:
        raise typer.Exit(1)


def _run_maps(config, weights, rows: dict[str, Any]) -> bool:
    from kvlingo_mlx.checkpoint import PROBE_TOLERANCE
    from kvlingo_mlx.evaluation.verification import devices, map_error

    allowed = PROBE_TOLERANCE[weights.dtype]
    sound = True
    for device in devices():
        error = map_error(config, weights, device)
        sound = sound and error <= allowed
        rows[f"maps on {device}"] = f"largest relative error {error:.2g}, allowed {allowed:g}"
    return sound


def _run_models(
    config, weights, names: tuple[str, str], allow_mismatch: bool, rows: dict[str, Any]
) -> tuple[bool, str]:
    from kvlingo_mlx.evaluation.verification import agreement, receipt_of, verdict
    from kvlingo_mlx.loading import load_pair
    from kvlingo_mlx.pairing import check_pair
    from kvlingo_mlx.translators import build

    models = load_pair(*names)
    check_pair(config, *models, allow_mismatch=allow_mismatch)
    receipt = receipt_of(config)
    layers = receipt.native_layers if receipt else 0
    found = agreement(*models, build(config, weights), layers, allow_mismatch=allow_mismatch)
    if found is None:
        raise IncompatibleTranslatorError(
            "the contexts of these models are too short for the bundled conversations; verify "
            "without --source and --target, or use kvlingo-mlx eval"
        )
    rows["weights"] = ", ".join(f"{model.name} in {model.precision}" for model in models)
    rows["conversations"] = f"{found.samples}, with {found.tokens} tokens to predict"
    if layers:
        rows["native layers"] = f"{layers}, as its receipt has it"
    for title, mine, left in (
        ("KL, nats per token", found.kl, receipt and receipt.kl),
        ("same first choice", found.top1, receipt and receipt.top1),
    ):
        beside = ", no receipt" if left is None else f", receipt {left:.4f}"
        rows[title] = f"{mine:.4f}{beside}"
    rows["KL, prefix hidden"] = f"{found.hidden_kl:.4f}"
    return verdict(found, receipt)
