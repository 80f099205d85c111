"""kvlingo-mlx train: both stages, on MLX or PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import Configured, TwoModels, numbers, verb
from kvlingo_mlx.cli.output import draw, keep, phase, say, warn
from kvlingo_mlx.format.kinds import KINDS
from kvlingo_mlx.options import ABOVE_0, COUNT, FROM_0, Need, among, but, off, option, text_of
from kvlingo_mlx.training.recipe import STEPS, DataOptions, PlanOptions

if TYPE_CHECKING:
    from kvlingo_mlx.training import command_line
    from kvlingo_mlx.training.plan import TrainingPlan

HIDDEN = tuple(spec.kind for spec in KINDS if spec.has_hidden)
UNSOLVED = tuple(spec.kind for spec in KINDS if not spec.solved)  # not solved in closed form
LEAST_RATE = 5e-324  # any above 0


def _rates(text: str) -> tuple[float, ...]:
    """Learning rates such as ``1e-4,3e-4``."""
    return tuple(numbers(text, LEAST_RATE, float))


RATES = text_of(_rates, "a number above 0, or several: 1e-4,3e-4")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions, DataOptions, Configured, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("hidden", "kind", among(*HIDDEN), "mlp", "which has no hidden units"),
        Need("ridge", "kind", but(*UNSOLVED), "linear", "which has no closed form"),
        Need("norm fit_samples", "kind assignment",
             lambda kind, rule: kind not in UNSOLVED or rule != "relative_depth", "linear",
             "which has no closed form"),
        Need("ce_weight", "objective", among("mixed"), "mixed"),
        Need("stage1_steps stage1_lr gated", "kind", among(*UNSOLVED), "mlp",
             "whose stage 1 is a closed form"),
        Need("reads matching whitened objective ce_weight lr plot minutes", "steps", but(0), 5000,
             "which leaves stage 2 out"),
        Need("held_out batch_size val_every", "steps kind",
             lambda steps, kind: steps != 0 or kind in UNSOLVED, 5000, "which leaves stage 2 out"),
        Need("packed_share", "plain_text", off, why="which packs nothing"),
        Need("later_turns", "plain_text", off, why="which has no turns"),
        Need("whitened", "kind", among("linear"), "linear", "which has more than solved maps"),
    )  # fmt: skip
    KEYS: ClassVar[str] = (
        "head_mixing joint capture assignment state_maps norm ridge fit_samples "
        "hidden gated stage1_steps stage1_lr native_layers reads matching whitened objective "
        "ce_weight held_out val_every packed_share later_turns"
    )
    data: list[str] = option(
        ..., "JSONL file, folder, or Hugging Face dataset; NAME@WEIGHT, may be repeated."
    )
    out: str | None = option(None, "The translator folder to write.")
    steps: int = option(5000, "Stage 2 steps; 0 keeps the closed form.", kind=STEPS)
    minutes: float | None = option(
        None, "Most minutes of stage 2; its rates fall in the time that there is.", kind=ABOVE_0
    )
    batch_size: int = option(8, "Conversations per step, of an MLP's stage 1 too.", kind=COUNT)
    lr: tuple[float, ...] | None = option(
        None, "Learning rate; several as a,b,c: the best one wins. Default: 1e-4.", kind=RATES
    )
    val_every: int = option(250, "Steps between two scores of held-out ones.", kind=COUNT)
    stage1_steps: int | None = option(
        None, "With --kind mlp: steps that learn to reconstruct; default: 5000.", kind=STEPS
    )
    stage1_lr: tuple[float, ...] | None = option(
        None,
        "With --kind mlp: their learning rate, default: 3e-3. Several: the best wins.",
        kind=RATES,
    )
    reads: int | None = option(
        None, "Conversations read once, then learned from in turn; default: new ones.", kind=COUNT
    )
    whitened: bool = option(
        False, "Steps where states are made white, as pair does; --lr is then 3e-3.", "--whitened"
    )
    objective: str = option("kl", "kl, ce or mixed.")
    ce_weight: float = option(1.0, "Weight of the cross-entropy in mixed.", kind=FROM_0)
    plot: str | None = option(None, "Draw the held-out KL into this file (the [plot] extra).")
    force: bool = option(
        False, "Train anew what is finished; replace another translator at --out.", "--force"
    )


@verb(TrainOptions, long=True)
def command(options: TrainOptions) -> None:
    """Train a translator: closed form, then self-distillation, on MLX or PyTorch ([cuda] extra).

    The closed form wants 32 tokens or more for each number that a map reads: 400 conversations are
    enough. The same command resumes a stopped training; a finished one is left unchanged.
    """
    from kvlingo_mlx.reporting import pictures

    if options.out is None:
        raise ValueError("--out is missing; name the translator folder to write")

    from kvlingo_mlx.training import command_line

    own = options.some("source target") | options.part(DataOptions)
    asked = command_line.Options(data=tuple(options.data), **own)
    if options.plot:
        pictures.check(options.plot)
    plan = _plan(options)
    total, unit = (options.minutes, "minute") if options.minutes else (options.steps, "step")
    with phase("training", total) as step:

        def show(stage: str, report: Any) -> None:
            text, share = "stage 1", report.share
            if stage == "matching":
                text, share = (
                    f"attention, {report.kl:.1%} of it wrong, {unit}",
                    share * options.matching,
                )
            elif stage == "stage2":
                speed = f"{report.tokens_per_second:.0f} tokens/s"
                text = f"KL {report.kl:.4f}, held out {report.held_out:.4f}, {speed}, {unit}"
                share = options.matching + (1 - options.matching) * share
            step(share * total, text=text)

        listeners = command_line.Listeners(show, warn, say)
        done = command_line.train(asked, plan, options.out, listeners, force=options.force)
    if done is not None:  # this process leads
        config = asdict(asked) | asdict(plan) | asdict(plan.recipe)
        keep(options.json_file, "train", config, _print_result(options, done))


def _plan(options: TrainOptions) -> TrainingPlan:
    """What is trained, and how; bad options are refused before any model is loaded."""
    from kvlingo_mlx.training.coordinates import RATE
    from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
    from kvlingo_mlx.training.recipe import Recipe

    recipe = Recipe(
        batch=options.batch_size,
        learning_rates=options.lr or ((RATE,) if options.whitened else (1e-4,)),
        validate_every=options.val_every,
        seconds=None if options.minutes is None else 60.0 * options.minutes,
        **options.some("steps reads whitened objective ce_weight"),
    )
    plan: dict[str, Any] = options.part(PlanOptions) | options.some("seed")
    if options.kind in UNSOLVED:
        steps = 5000 if options.stage1_steps is None else options.stage1_steps
        plan["stage1_recipe"] = reconstruction(recipe, options.stage1_lr or (), steps)
    return TrainingPlan(**plan, recipe=recipe)


def _print_result(options: TrainOptions, done: command_line.Done) -> dict[str, Any]:
    """Print the result of a training, and draw its curve; returns what is recorded."""
    from kvlingo_mlx.format.translator_folder import read_config
    from kvlingo_mlx.loading.grading import NO_RECEIPT, said_of
    from kvlingo_mlx.training.checkpoints import read_log

    curve = [] if done.log is None else read_log(done.log)
    if done.before:
        say(f"{done.folder} is finished already, and was left as it is; --force trains it anew")
    elif done.log is None:
        say(f"wrote {done.folder}: stage 1 alone, as --steps is 0")
    else:
        _print_stage2(options, done, done.log, curve)
    config = read_config(done.folder)
    say(f"grade: {said_of(config) if 'receipt' in done.provenance else NO_RECEIPT}")
    return {"provenance": dict(done.provenance), "curve": curve}


def _print_stage2(
    options: TrainOptions, done: command_line.Done, log: Path, curve: Sequence[Any]
) -> None:
    from kvlingo_mlx.training import command_line
    from kvlingo_mlx.training.watch import outlook

    first, best = done.provenance["held_out_kl_at_first"], done.provenance["held_out_kl"]
    say(f"wrote {done.folder}: held-out KL {first:.4f} at first, {best:.4f} at best")
    if more := outlook(curve):
        say(more)
    say(f"the log is {log}")
    if options.plot:
        draw(command_line.figure(log), options.plot, options.source, options.target)
