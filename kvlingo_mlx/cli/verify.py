"""kvlingo-mlx verify: whether a translator computes here what it was made to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from kvlingo_mlx.cli.command import PerhapsTwoModels, verb
from kvlingo_mlx.cli.output import Worded, facts, keep, say
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.options import Need, is_set, option

if TYPE_CHECKING:
    from kvlingo_mlx.loading.grading import Agreement, Receipt


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(PerhapsTwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("allow_mismatch", "source", is_set, "MODEL", "against which nothing is checked"),
    )
    translator: str = option(
        ..., "A translator's folder, its name in `list`, or a Hub id.", word=True
    )
    allow_mismatch: bool = False


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
    probes = translator_folder.SELFTEST_FILE
    tested = (folder / probes).exists()
    rows: dict[str, Any] = {
        "files": "sound",
        "its own probes": "agree" if tested else f"none: it has no {probes}",
    }
    sound, useless, kept = _run_maps(config, weights, rows), False, False
    text = "the maps are computed as they are stored"
    measured: dict[str, Any] | None = None
    if not sound:
        text = "MLX computes something else here than the maps that are stored"
    elif options.pair is None:
        rows["grade"] = said_of(config)
    else:
        found, left = _run_models(config, weights, options, rows)
        sound, text = verdict(found.receipt, left)
        useless = found.receipt.grade == GRADES[-1]
        keeps = sound and not options.allow_mismatch
        kept = keeps and keep_receipt(folder, config, weights, found)
        more = {"recovered": found.receipt.recovered, "grade": found.receipt.grade}
        measured = {**found.receipt.to_json(), **more}
    results = facts(rows)
    word = "NOT SOUND:" if not sound else "sound, but" if useless else "sound:"
    say(f"verdict: {word} {text}")
    if kept:
        say(f"its receipt is kept in {folder}")
    results |= {"sound": sound, "measured": measured}
    keep(options.json_file, "verify", {"name": options.translator}, results)
    if not sound or useless:
        raise typer.Exit(1)


def _run_maps(config: Any, weights: Any, rows: dict[str, Any]) -> bool:
    """Whether every device computes the maps that are stored."""
    from kvlingo_mlx.backend import mx

    from kvlingo_mlx.evaluation.verification import devices, map_error
    from kvlingo_mlx.format.translator_folder import PROBE_TOLERANCE

    allowed = PROBE_TOLERANCE[weights.dtype]
    errors = []
    for device in devices():
        errors.append(error := map_error(config, weights, device))
        text = f"largest relative error {error:.2g}, allowed {allowed:g}"
        place = "GPU" if device.type == mx.DeviceType.gpu else "CPU"
        rows[f"maps on the {place}"] = Worded(error, text)
    return all(error <= allowed for error in errors)


def _run_models(
    config: Any, weights: Any, options: VerifyOptions, rows: dict[str, Any]
) -> tuple[Agreement, Receipt | None]:
    """The measurement on this machine, and the receipt from the translator's making."""
    from kvlingo_mlx.evaluation.verification import agreement
    from kvlingo_mlx.loading.grading import receipt_of
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_pair
    from kvlingo_mlx.translators import build

    models = load_pair(*(options.pair or ()))
    check_pair(config, *models, **options.some("allow_mismatch"))
    receipt = receipt_of(config)
    layers = receipt.native_layers if receipt else 0
    found = agreement(*models, build(config, weights), layers)
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
    rows |= _measured_rows(found.receipt, receipt)
    return found, receipt


def _measured_rows(mine: Receipt, receipt: Receipt | None) -> dict[str, Any]:
    """What was measured here, beside what the receipt says."""
    rows: dict[str, Any] = {}
    for title, name in (("KL, nats per token", "kl"), ("same first choice", "top1")):
        here = getattr(mine, name)
        left = "no receipt" if receipt is None else f"receipt {getattr(receipt, name):.4f}"
        rows[title] = Worded(here, f"{here:.4f}, {left}")
    rows["KL without the prefix"] = Worded(mine.hidden_kl, f"{mine.hidden_kl:.4f}")
    said = {"facts": mine.recall, "by its receipt": mine.own}
    rows |= {title: str(value) for title, value in said.items() if value is not None}
    return {**rows, "grade": mine.grade}
