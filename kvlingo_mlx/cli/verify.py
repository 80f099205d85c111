"""kvlingo-mlx verify: whether a translator computes here what it was made to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.command import AllowMismatch, MaybeSource, MaybeTarget, Options, argument, verb
from kvlingo_mlx.cli.output import Told, facts, keep, plain, say
from kvlingo_mlx.errors import IncompatibleTranslatorError

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.verification import Agreement
    from kvlingo_mlx.loading.grading import Receipt


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    translator: str = argument(..., "A translator's folder, its name in `list`, or a Hub id.")
    source: MaybeSource = None
    target: MaybeTarget = None
    allow_mismatch: AllowMismatch = False


@verb(VerifyOptions, long=True)
def command(options: VerifyOptions) -> None:
    """Run a translator's self-test; with both models, measure its quality on this machine.

    With --source and --target, KL and agreement are measured and compared with the receipt that
    its training left. A stored translator that has none keeps this one.

    The exit status is 0 if it is sound, 1 if it is not or is useless, 2 if it cannot be read or
    does not fit the models.
    """
    from kvlingo_mlx.evaluation.verification import keep_receipt, verdict
    from kvlingo_mlx.format import translator_folder
    from kvlingo_mlx.loading.grading import GRADES, said_of
    from kvlingo_mlx.loading.translators import folder_of

    folder = folder_of(options.translator)
    config, weights = translator_folder.read(folder)
    translator_folder.check_sizes(folder, config, weights)
    tested = (folder / translator_folder.SELFTEST_FILE).exists()
    rows: dict[str, Any] = {
        "files": "sound",
        "its own probes": "agree"
        if tested
        else f"none: it has no {translator_folder.SELFTEST_FILE}",
    }
    sound = _run_maps(config, weights, rows)
    text = (
        "the maps are computed as they are stored"
        if sound
        else "MLX computes something else here than the maps that are stored"
    )
    numbers: dict[str, Any] = {}
    useless = kept = False
    if options.source is not None and options.target is not None and sound:
        names = options.source, options.target
        measured, left = _run_models(config, weights, names, options.allow_mismatch, rows)
        found = measured.receipt
        sound, text = verdict(found, left)
        useless = found.grade == GRADES[-1]
        keeps = sound and not options.allow_mismatch
        kept = keeps and keep_receipt(folder, config, weights, measured)
        numbers = {**found.to_json(), "recovered": found.recovered, "grade": found.grade}
    elif sound:
        rows["grade"] = said_of(config)
    facts(rows)
    word = "NOT SOUND:" if not sound else "sound, but" if useless else "sound:"
    say(f"verdict: {word} {text}")
    if kept:
        say(f"its receipt is kept in {folder}")
    results = {**plain(rows), "sound": sound, "measured": numbers or None}
    keep(options.json_file, "verify", {"name": options.translator}, results)
    if not sound or useless:
        raise typer.Exit(1)


def _run_maps(config, weights, rows: dict[str, Any]) -> bool:
    from kvlingo_mlx.backend import mx

    from kvlingo_mlx.evaluation.verification import devices, map_error
    from kvlingo_mlx.format.translator_folder import PROBE_TOLERANCE

    allowed = PROBE_TOLERANCE[weights.dtype]
    sound = True
    for device in devices():
        error = map_error(config, weights, device)
        sound = sound and error <= allowed
        text = f"largest relative error {error:.2g}, allowed {allowed:g}"
        place = "GPU" if device.type == mx.DeviceType.gpu else "CPU"
        rows[f"maps on the {place}"] = Told(error, text)
    return sound


def _run_models(
    config, weights, names: tuple[str, str], allow_mismatch: bool, rows: dict[str, Any]
) -> tuple[Agreement, Receipt | None]:
    """The measurement on this machine, and the receipt from the translator's making."""
    from kvlingo_mlx.evaluation.verification import agreement
    from kvlingo_mlx.loading.grading import receipt_of
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_pair
    from kvlingo_mlx.translators import build

    models = load_pair(*names)
    check_pair(config, *models, allow_mismatch=allow_mismatch)
    receipt = receipt_of(config)
    layers = receipt.native_layers if receipt else 0
    translator = build(config, weights)
    found = agreement(*models, translator, layers, allow_mismatch=allow_mismatch)
    if found is None:
        shorter = min(models, key=lambda model: model.context_length)
        raise IncompatibleTranslatorError(
            f"{shorter.name} has a context of {shorter.context_length} tokens, and no conversation "
            "that verify asks about fits it; leave out --source and --target, or use `kvlingo-mlx "
            "eval --tasks continuation --data FILE` with short conversations of your own"
        )
    rows["weights"] = ", ".join(f"{model.name} in {model.precision}" for model in models)
    rows["conversations"] = f"{found.samples}, with {found.tokens} tokens to predict"
    if layers:
        rows["native layers"] = f"{layers}, the number in its receipt"
    if receipt is not None:  # of data that are not here; they count
        found = replace(found, receipt=replace(found.receipt, own=receipt.own))
    mine = found.receipt
    for title, here, left in (
        ("KL, nats per token", mine.kl, receipt and receipt.kl),
        ("same first choice", mine.top1, receipt and receipt.top1),
    ):
        beside = ", no receipt" if left is None else f", receipt {left:.4f}"
        rows[title] = Told(here, f"{here:.4f}{beside}")
    rows["KL without the prefix"] = Told(mine.hidden_kl, f"{mine.hidden_kl:.4f}")
    if mine.recall is not None:
        rows["facts"] = str(mine.recall)
    if mine.own is not None:
        rows["by its receipt"] = str(mine.own)
    rows["grade"] = mine.grade
    return found, receipt
