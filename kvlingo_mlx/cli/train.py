"""kvlingo-mlx train: both stages in PyTorch, on a GPU or at small size on a CPU."""

from __future__ import annotations

from typing import Any

import typer

from kvlingo_mlx.cli.output import (
    JSON_HELP,
    keep_stdout_for_json,
    progress_bar,
    say,
    table,
    warn,
)


def command(
    source: str = typer.Option(..., help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(..., help="Who decodes from it: a folder or Hub id."),
    data: list[str] = typer.Option(
        ..., help="JSONL file, folder, or Hugging Face dataset; NAME@WEIGHT, may be repeated."
    ),
    out: str = typer.Option(None, help="The translator folder to write."),
    kind: str = typer.Option("linear", help="linear, mlp or linear_mlp."),
    head_mixing: bool = typer.Option(True, help="Off: block-diagonal maps, head by head."),
    joint: bool = typer.Option(False, help="One map over keys and values together."),
    capture: str = typer.Option(
        None, help="pre_norm (the default), post_norm or post_rope; latents have one point."
    ),
    nu: int = typer.Option(1, help="Source layers per target layer."),
    assignment: str = typer.Option(
        "relative_depth", help="How they are chosen: relative_depth, r2 or greedy."
    ),
    norm: str = typer.Option("frobenius", help="The closed form's: frobenius, attention, sink_8."),
    fit_samples: int = typer.Option(400, help="Conversations for the closed form."),
    hidden: int = typer.Option(2048, help="Hidden width of an MLP."),
    gated: bool = typer.Option(None, help="Of --kind mlp: output gates (the default) or none."),
    stage1_steps: int = typer.Option(
        None, help="Of --kind mlp: steps that learn to reconstruct first; default 5000."
    ),
    stage1_lr: str = typer.Option(
        None, help="Of --kind mlp: their learning rate; default 3e-3. Several: the best one wins."
    ),
    native_layers: int = typer.Option(
        0, help="Cache layers, from the first on, that the target reads itself."
    ),
    objective: str = typer.Option("kl", help="kl, ce or mixed."),
    ce_weight: float = typer.Option(1.0, help="Weight of the cross-entropy in mixed."),
    steps: int = typer.Option(5000, help="Stage 2 steps; 0 keeps the closed form."),
    batch_size: int = typer.Option(8, help="Conversations per step, of an MLP's stage 1 too."),
    lr: str = typer.Option(None, help="Learning rate; several as a,b,c: the best one wins."),
    held_out: int = typer.Option(64, help="Conversations that choose the learning rate."),
    val_every: int = typer.Option(250, help="Steps between two looks at them, likewise."),
    plain_text: bool = typer.Option(False, help="Windows of 256 + 256 tokens, for base models."),
    packed_share: float = typer.Option(0.5, help="Share of samples concatenated to full length."),
    seed: int = typer.Option(0, help="Seed of the data and of an MLP's start."),
    dtype: str = typer.Option("bfloat16", help="The frozen models': bfloat16 or float32."),
    device: str = typer.Option(None, help="cuda, cuda:N or cpu; default: cuda where it is."),
    plot: str = typer.Option(None, help="Draw the held-out KL into this file (the [plot] extra)."),
    histogram: bool = typer.Option(False, help="Only show what a run would read."),
    force: bool = typer.Option(
        False, "--force", help="Train anew what is finished; replace another translator at --out."
    ),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Train a translator: closed form, then self-distillation (needs the [cuda] extra).

    The closed form wants 32 tokens or more for each number that a map reads: 400 conversations are
    plenty. The same command goes on with what was stopped, and leaves alone what is finished.
    """
    from kvlingo_mlx import training
    from kvlingo_mlx.reporting import pictures

    training.check_extra()
    keep_stdout_for_json(json_file)
    rates = _rates("--lr", lr)
    stage1 = None if kind != "mlp" else {
        "steps": 5000 if stage1_steps is None else stage1_steps,
        "rates": _rates("--stage1-lr", stage1_lr),
    }  # fmt: skip
    if out is None and not histogram:
        raise ValueError("--out is missing; name the translator folder to write")

    from kvlingo_mlx.training import command_line

    options = command_line.Options(
        source=source, target=target, data=tuple(data), dtype=dtype, device=device, seed=seed,
        plain_text=plain_text, packed_share=packed_share,
    )  # fmt: skip
    if histogram:
        found = command_line.histogram(options, steps, batch_size, fit_samples)
        stages = {"stage1": found.stage1, "stage2": found.stage2}
        for rows, title in zip(stages.values(), TITLES, strict=True):
            if rows:
                _print_histogram(title, rows)
        say(str(found.survey))
        if json_file:
            results: dict[str, Any] = {"survey": vars(found.survey)}
            for stage, rows in stages.items():
                results[stage] = [dict(zip(HISTOGRAM, row, strict=True)) for row in rows]
            _record(json_file, "prefix_lengths", vars(options), results)
        return
    if plot:
        pictures.check(plot)
    recipe = {
        "steps": steps, "batch": batch_size, "learning_rates": rates, "objective": objective,
        "ce_weight": ce_weight, "validate_every": val_every,
    }  # fmt: skip
    plan = {
        "kind": kind, "head_mixing": head_mixing, "joint": joint, "capture": capture, "nu": nu,
        "assignment": assignment, "norm": norm, "fit_samples": fit_samples,
        "held_out": held_out, "hidden": hidden, "native_layers": native_layers,
        "gated": gated is not False,
    }  # fmt: skip
    with progress_bar("training", steps) as step:

        def show(stage: str, report: Any) -> None:
            if stage == "stage2":
                text = (
                    f"KL {report.kl:.4f}, held out {report.held_out:.4f}, "
                    f"{report.tokens_per_second:.0f} tokens/s"
                )
                step(report.step, text=text)
            else:
                step(text=f"{stage}: {getattr(report, 'step', report)}")

        done = command_line.train(options, plan, recipe, out, show, warn, stage1, force)
    if done is None:  # a process that does not lead
        return
    if done.before:
        say(f"{done.folder} is finished already, and was left as it is; --force trains it anew")
    elif done.log is None:
        say(f"wrote {done.folder}: stage 1 alone, as --steps is 0")
    else:
        say(f"wrote {done.folder}: held-out KL {done.first:.4f} at first, {done.best:.4f} at best")
        say(f"the log is {done.log}")
        if plot:
            command_line.draw(done.log, plot, pictures.pair(source, target))
            say(f"drew {plot}")
    say(f"grade: {command_line.grade(done.folder)}")
    if json_file:
        curve = [] if done.log is None else command_line.read_log(done.log)
        results = {"provenance": command_line.provenance(done.folder), "curve": curve}
        asked = vars(options) | plan | recipe | {"stage1": stage1}
        _record(json_file, "train", asked, results)


HISTOGRAM = ("from", "below", "reasoning", "without")
TITLES = ("Stage 1: prefix lengths", "Stage 2: prefix lengths")


def _record(json_file: str, kind: str, config: dict[str, Any], results: Any) -> None:
    from kvlingo_mlx.reporting import measure

    measure.append_json(json_file, measure.record(kind, config, results))


def _rates(option: str, text: str | None) -> tuple[float, ...]:
    """The rates of an option; none stands for the default."""
    try:
        rates = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give a number, or several: 1e-4,3e-4") from None
    if any(not 0 < rate < float("inf") for rate in rates):
        raise ValueError(f"{option} is {text!r}; learning rates are positive")
    return rates


def _print_histogram(title: str, rows: list[tuple[int, int, int, int]]) -> None:
    cells = [[f"{a} to {b - 1}", str(on), str(off)] for a, b, on, off in rows]
    table(title, ["tokens", "reasoning", "without"], cells)
