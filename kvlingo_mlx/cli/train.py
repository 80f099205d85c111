"""kvlingo-mlx train: both stages, on MLX or PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import Configured, TwoModels, numbers, text_of, verb
from kvlingo_mlx.cli.output import keep, phase, say, warn
from kvlingo_mlx.format.kinds import KINDS, NAMES
from kvlingo_mlx.options import COUNT, FROM_0, Need, among, but, number, off, one_of, option, whole

if TYPE_CHECKING:
    from kvlingo_mlx.training import command_line
    from kvlingo_mlx.training.plan import TrainingPlan

HIDDEN = tuple(spec.kind for spec in KINDS if spec.has_hidden)
UNSOLVED = tuple(spec.kind for spec in KINDS if not spec.solved)  # not solved in closed form
STEPS = whole("a whole number, 0 or more", 0)
ABOVE_0 = number("a number above 0", lambda value: 0 < value < float("inf"))

LEAST_RATE = 5e-324  # any above 0


def _rates(text: str | None) -> tuple[float, ...]:
    """Learning rates such as ``1e-4,3e-4``; empty for the default."""
    return tuple(numbers(text, LEAST_RATE, float)) if text else ()


RATES = text_of(_rates, "a number above 0, or several: 1e-4,3e-4")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Configured, TwoModels):
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
    kind: str = option("linear", f"What the maps are: {', '.join(NAMES)}.")
    head_mixing: bool = True
    joint: bool = option(False, "One map over keys and values together.")
    capture: str | None = option(
        None,
        "pre_norm (the default), post_norm or post_rope; latents have one point.",
        kind=one_of("pre_norm", "post_norm", "post_rope", "latent"),
    )
    nu: int = option(1, "Source layers per target layer.", kind=COUNT)
    assignment: str = option(
        "relative_depth",
        "How they are chosen: relative_depth, r2 or greedy.",
        kind=one_of("relative_depth", "r2", "greedy"),
    )
    state_maps: bool = False
    norm: str = option("frobenius", "Norm of the closed form: frobenius, attention, sink_8.")
    ridge: float | None = option(
        None,
        "Its ridge, as a share of the inputs' mean square; default: chosen for each map.",
        kind=FROM_0,
    )
    fit_samples: int = option(400, "Conversations for the closed form.", kind=COUNT)
    hidden: int = option(2048, "Hidden width of an MLP.", kind=COUNT)
    gated: bool | None = option(None, "With --kind mlp: output gates (the default) or none.")
    stage1_steps: int | None = option(
        None, "With --kind mlp: steps that learn to reconstruct; default: 5000.", kind=STEPS
    )
    stage1_lr: str | None = option(
        None,
        "With --kind mlp: their learning rate, default: 3e-3. Several: the best wins.",
        kind=RATES,
    )
    native_layers: int = option(
        0, "How many first cache layers the target reads itself.", kind=STEPS
    )
    reads: int | None = option(
        None, "Conversations read once, then learned from in turn; default: new ones.", kind=COUNT
    )
    matching: float = option(
        0.0,
        "Share of the steps or minutes that learn what the target's attention gathers, before the "
        "KL.",
        kind=number("a share from 0 to below 1", lambda value: 0 <= value < 1),
    )
    whitened: bool = option(
        False, "Steps where states are made white, as pair does; --lr is then 3e-3.", "--whitened"
    )
    objective: str = option("kl", "kl, ce or mixed.")
    ce_weight: float = option(1.0, "Weight of the cross-entropy in mixed.", kind=FROM_0)
    steps: int = option(5000, "Stage 2 steps; 0 keeps the closed form.", kind=STEPS)
    minutes: float | None = option(
        None, "Most minutes of stage 2; its rates fall in the time that there is.", kind=ABOVE_0
    )
    batch_size: int = option(8, "Conversations per step, of an MLP's stage 1 too.", kind=COUNT)
    lr: str | None = option(
        None, "Learning rate; several as a,b,c: the best one wins. Default: 1e-4.", kind=RATES
    )
    held_out: int = option(64, "Conversations that choose the learning rate.", kind=COUNT)
    val_every: int = option(250, "Steps between two scores of these.", kind=COUNT)
    plain_text: bool = option(False, "Windows of 256 + 256 tokens, for base models.")
    packed_share: float = option(
        0.5,
        "Share of samples concatenated to full length.",
        kind=number("a share from 0 to 1", lambda value: 0 <= value <= 1),
    )
    max_prefix: int | None = option(
        None,
        "Longest prefix in tokens, default: 16384.",
        kind=whole("1 to 16384 tokens", 1, 16_384),
    )
    max_continuation: int | None = option(
        None,
        "Tokens to which answers are cut, default: 2048. Fewer of either need less memory.",
        kind=whole("1 to 2048 tokens", 1, 2048),
    )
    later_turns: bool = option(
        False, "Let an answer go on through the later turns of its conversation, as pair does."
    )
    seed: int = option(
        0,
        "Seed of the data and of an MLP's start.",
        kind=whole("a whole number from 0 to 2^63 - 1", 0, 2**63 - 1),
    )
    dtype: str | None = option(
        None, "The frozen models': bfloat16 or float32; default: as stored, with PyTorch bfloat16."
    )
    device: str | None = option(
        None, "mlx, or PyTorch's cuda, cuda:N or cpu; default: cuda where it is, else mlx."
    )
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

    names = (
        "source target dtype device seed plain_text packed_share max_prefix max_continuation "
        "later_turns"
    )
    asked = command_line.Options(data=tuple(options.data), **options.some(names))
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
        learning_rates=_rates(options.lr) or ((RATE,) if options.whitened else (1e-4,)),
        validate_every=options.val_every,
        seconds=None if options.minutes is None else 60.0 * options.minutes,
        **options.some("steps reads whitened objective ce_weight"),
    )
    plan = options.some(
        "kind head_mixing joint capture nu assignment state_maps norm ridge fit_samples held_out "
        "hidden native_layers matching seed"
    )
    if options.kind in UNSOLVED:
        steps = 5000 if options.stage1_steps is None else options.stage1_steps
        plan["stage1_recipe"] = reconstruction(recipe, _rates(options.stage1_lr), steps)
    return TrainingPlan(**plan, gated=options.gated is not False, recipe=recipe)


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
    from kvlingo_mlx.reporting import pictures
    from kvlingo_mlx.training import command_line
    from kvlingo_mlx.training.watch import outlook

    first, best = done.provenance["held_out_kl_at_first"], done.provenance["held_out_kl"]
    say(f"wrote {done.folder}: held-out KL {first:.4f} at first, {best:.4f} at best")
    if more := outlook(curve):
        say(more)
    say(f"the log is {log}")
    if options.plot:
        command_line.draw(log, options.plot, pictures.pair(options.source, options.target))
        say(f"drew {options.plot}")
