"""The work of ``kvlingo-mlx train`` between parsing its options and printing."""

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx import training
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.group import launched
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.tokenization.samples import other_tokenizer
from kvlingo_mlx.training.checkpoints import log_of, read_log
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.mixture import Mixture, plain_text
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import DataOptions
from kvlingo_mlx.training.trainer import Progress, Trainer


def checked_place(place: str) -> str:
    """A device by its name in ``--device``; ValueError for any other name."""
    if not re.fullmatch(r"mlx|cpu|cuda(:\d+)?", place):
        raise ValueError(f"--device is {place!r}; it must be mlx, cuda, cuda:N or cpu")
    return place


def runtime_of(place: str) -> Any:
    """The module that opens models for a device.

    Raises:
        ValueError: ``mlx.launch`` started this program, and the device is none of MLX's.
        MissingExtraError: The device needs PyTorch, which is not installed.
    """
    if place != "mlx":
        if launched():
            raise ValueError(
                f"mlx.launch starts processes of MLX, and --device is {place}: give --device mlx, "
                "or start PyTorch's processes by torchrun"
            )
        training.check_extra()
    room = "training.on_mlx" if place == "mlx" else "cuda"
    return importlib.import_module(f"kvlingo_mlx.{room}.runtime")


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """The models, the data and the device of a training.

    ``accepts`` leaves out records (the laboratory's ``RecordFilter``).
    """

    source: str
    target: str
    data: tuple[str, ...]
    accepts: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.runtime.DTYPES
        if self.dtype is not None and self.dtype not in known:
            raise ValueError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(known)}")
        self.runtime.check_device(self.place)

    @property
    def place(self) -> str:
        """The device: ``mlx``, or PyTorch's name of one."""
        cuda = not launched() and training.has_cuda()
        return checked_place(self.device or ("cuda" if cuda else "mlx"))

    @property
    def runtime(self) -> Any:
        """The module that opens models for the device; raises as :func:`runtime_of` does."""
        return runtime_of(self.place)

    def stream(
        self, tokenizer: Any, context_length: int, planned: int, source_tokenizer: Any = None
    ) -> Stream:
        """The stream of samples, scaled to the shorter context of the two models.

        ``planned`` is the number of samples that the run draws. ``source_tokenizer`` is the
        source's tokenizer where it differs from ``tokenizer``.
        """
        talks = Mixture(packed_share=self.packed_share, later_turns=self.later_turns)
        whole = plain_text() if self.plain_text else talks
        longest, answer = self.max_prefix, self.max_continuation
        mixture = whole.limited(longest or whole.max_prefix, answer or whole.max_continuation)
        mixture = mixture.scaled(context_length)
        return Stream(
            self.data, tokenizer, mixture, self.seed, source_tokenizer, planned, self.accepts
        )

    def settings(self, stream: Stream) -> dict[str, Any]:
        """The settings, beside plan and models, that must not change when a training is resumed."""
        names = ("plain_text", "packed_share", "max_prefix", "max_continuation")
        contents = {f"contents of {name}": text for name, text in stream.contents.items()}
        own = {name: getattr(self, name) for name in names}
        if self.later_turns:
            own["later_turns"] = True
        if self.accepts:
            own |= self.accepts.settings
        # The order of samples depends on their planned number.
        return {"data": list(self.data), **own, **contents, "samples": stream.survey.samples}


@dataclass(frozen=True)
class Listeners:
    """Functions that hear how a training proceeds: steps, warnings, and what it takes."""

    progress: Progress
    warn: Callable[[str], None]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Done:
    """The result of a finished training."""

    folder: Path
    provenance: Mapping[str, Any]
    before: bool  # it was finished already, so nothing was done

    @property
    def log(self) -> Path | None:
        """The log of stage 2, if that was made now."""
        return None if self.before or self.provenance["stage"] == 1 else log_of(self.folder)


def train(
    options: Options,
    plan: TrainingPlan,
    out: str,
    listeners: Listeners,
    *,
    force: bool = False,
    trainer: type[Trainer] = Trainer,
) -> Done | None:
    """Train, or resume a training; None in a process that does not lead.

    ``force`` trains again what is finished, and replaces another translator.

    Raises:
        ValueError: Unusable data, or a destination that holds something else.
        KVLingoError: A model cannot be used, training diverged, or the disk is full.
    """
    translator_folder.check_destination(out)
    stage2 = plan.recipe
    source, target = (
        options.runtime.load(name, options.dtype, options.place)
        for name in (options.source, options.target)
    )
    stream = options.stream(
        target.tokenizer,
        min(source.context_length, target.context_length),
        # Stage 1 reads the first samples of stage 2.
        max(stage2.steps * stage2.batch, plan.fit_samples),
        other_tokenizer(source.tokenizer, target.tokenizer),
    )
    group = options.runtime.join(options.place)
    try:
        if options.accepts and group.leads:
            listeners.say(f"data: left out {options.accepts}")
        made = trainer(
            source,
            target,
            stream,
            plan,
            Path(out),
            group,
            listeners.progress,
            options.settings(stream),
            listeners.warn,
            notes=stream.notes,
            force=force,
            lengths=stream.longest,
            say=listeners.say,
        )
        before = made.finished()
        folder = made.run()
        found = group.firsts(lambda: dict(translator_folder.read_config(folder).provenance))
    finally:
        options.runtime.leave(group)
    return Done(folder, found, before) if group.leads else None


def figure(log: Path) -> Any:
    """A figure of held-out KL over steps, a curve for each learning rate.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    drawn = pictures.figure()
    axes = drawn.add_subplot(xlabel="step", ylabel="held-out KL (nats per token)")
    for index, rate in enumerate(lines[-1]["learning_rates"]):
        points = [(line["step"], line["held_out"][index]) for line in lines]
        sound = [point for point in points if point[1] is not None]
        axes.plot(*zip(*sound, strict=True), label=f"{rate:g}")
    found = [kl for line in lines for kl in line["held_out"] if kl is not None]
    pictures.log_scale(axes, "y", found)
    axes.legend(title="learning rate")
    return drawn
