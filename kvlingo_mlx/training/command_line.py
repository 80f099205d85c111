"""The work of ``kvlingo-mlx train`` between parsing its options and printing."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx import training
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.tokenization.samples import MAX_CONTINUATION, MAX_PREFIX, other_tokenizer
from kvlingo_mlx.training.data import Bin, Stream, Survey, prefix_histogram
from kvlingo_mlx.training.mixture import Mixture, PlainText
from kvlingo_mlx.training.paper_pairs import filled, rate_of
from kvlingo_mlx.training.pipeline import Progress, Training
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
from kvlingo_mlx.training.recipe import Recipe, require
from kvlingo_mlx.training.watch import lowest, outlook

SHORTEST = 64  # tokens: the least that --max-prefix takes
SHOWN = 480  # the number of samples that a run's histogram is made of


@dataclass(frozen=True)
class Options:
    """The models, the data and the device of a training."""

    source: str
    target: str
    data: tuple[str, ...]
    dtype: str | None = None
    device: str | None = None
    seed: int = 0
    plain_text: bool = False
    packed_share: float = 0.5
    max_prefix: int | None = None
    max_continuation: int | None = None

    def __post_init__(self) -> None:
        known = self.runtime.DTYPES
        if self.dtype is not None and self.dtype not in known:
            raise ValueError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(known)}")
        self._mixture()
        self.runtime.check_device(self.place)

    @property
    def place(self) -> str:
        """The device: ``mlx``, or PyTorch's name of one."""
        place = self.device or ("cuda" if training.has_cuda() else "mlx")
        if not re.fullmatch(r"mlx|cpu|cuda(:\d+)?", place):
            raise ValueError(f"--device is {place!r}; it must be mlx, cuda, cuda:N or cpu")
        return place

    @property
    def runtime(self) -> Any:
        """The module that opens models for the device.

        Raises:
            MissingExtraError: The device needs PyTorch, which is not installed.
        """
        if self.place != "mlx":
            training.check_extra()
        room = "on_mlx" if self.place == "mlx" else "on_torch"
        return importlib.import_module(f"kvlingo_mlx.training.{room}.runtime")

    def load(self, name: str) -> Any:
        """Load one of the two models onto this process's device."""
        return self.runtime.load(name, self.dtype, self.place)

    def stream(
        self, tokenizer: Any, context_length: int, planned: int, source_tokenizer: Any = None
    ) -> Stream:
        """The stream of samples, scaled to the shorter context of the two models.

        ``planned`` is the number of samples that the run draws. ``source_tokenizer`` is the
        source's tokenizer where it differs from ``tokenizer``.
        """
        mixture = self._mixture().scaled(context_length)
        return Stream(self.data, tokenizer, mixture, self.seed, source_tokenizer, planned)

    def settings(self, stream: Stream) -> dict[str, Any]:
        """The settings, beside plan and models, that must not change when a training is resumed."""
        names = ("plain_text", "packed_share", "max_prefix", "max_continuation")
        contents = {f"contents of {name}": text for name, text in stream.contents.items()}
        own = {name: getattr(self, name) for name in names}
        # The order of samples depends on their planned number.
        return {"data": list(self.data), **own, **contents, "samples": stream.survey.samples}

    def _mixture(self) -> Mixture | PlainText:
        longest, answer = self.max_prefix, self.max_continuation
        if self.plain_text:
            windows = PlainText()
            return PlainText(longest or windows.prefix, answer or windows.continuation)
        prefix, continuation = longest or MAX_PREFIX, answer or MAX_CONTINUATION
        require("tokens of the longest prefix (--max-prefix)", prefix, SHORTEST, MAX_PREFIX)
        most = MAX_CONTINUATION
        require("tokens of the longest answer (--max-continuation)", continuation, 1, most)
        return Mixture(packed_share=self.packed_share).limited(prefix, continuation)


@dataclass(frozen=True)
class Listeners:
    """Functions that hear how a training proceeds: steps, warnings, and what it takes."""

    progress: Progress
    warn: Callable[[str], None]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Done:
    """The result of a finished training: its folder and, after stage 2, its log and held-out KL.

    ``log``, ``first`` and ``best`` are None without a stage 2. ``outlook`` says what more time
    would bring, where the curve tells. ``before`` means that the training was already finished, so
    nothing was done.
    """

    folder: Path
    log: Path | None = None
    first: float | None = None
    best: float | None = None
    outlook: str | None = None
    before: bool = False


def train(
    options: Options,
    plan: Mapping[str, Any],
    recipe: Mapping[str, Any],
    out: str,
    listeners: Listeners,
    stage1: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Done | None:
    """Train, or resume a training; returns None in a process that does not lead.

    Where a ``plan``'s ``nu`` or ``norm`` and a ``recipe``'s ``learning_rates`` are not given, they
    are the paper's for the pair. ``stage1`` has the ``rates`` and ``steps`` of an MLP's stage 1,
    and is None for other kinds.
    ``force`` trains again even if the training is finished, and replaces another translator at
    ``out``.

    Raises:
        ValueError: A bad option, unusable data, or a destination that holds something else.
        KVLingoError: A model cannot be used, training diverged, or the disk is full.
    """
    translator_folder.check_destination(out)
    # Bad options are refused before any model is loaded.
    plan = filled(plan, options.source, options.target)
    rates = recipe["learning_rates"] or (rate_of(options.source, options.target, plan),)
    stage2 = Recipe(**{**recipe, "learning_rates": rates})
    first: dict[str, Any] = {}
    if stage1 is not None:
        first["stage1_recipe"] = reconstruction(stage2, **stage1)
    whole = TrainingPlan(**plan, **first, seed=options.seed, recipe=stage2)
    source, target = options.load(options.source), options.load(options.target)
    stream = options.stream(
        target.tokenizer,
        min(source.context_length, target.context_length),
        samples_of(stage2.steps, stage2.batch, whole.fit_samples),
        other_tokenizer(source.tokenizer, target.tokenizer),
    )
    group = options.runtime.join(options.place)
    try:
        training = Training(
            source,
            target,
            stream,
            whole,
            Path(out),
            group,
            listeners.progress,
            options.settings(stream),
            listeners.warn,
            notes=[str(stream.survey)] if stream.survey.falls_short else [],
            force=force,
            lengths=stream.longest,
            say=listeners.say,
        )
        before = training.finished()
        folder = training.run()
    finally:
        options.runtime.leave(group)
    if not group.leads:
        return None
    if before or stage2.steps == 0:
        return Done(folder, before=before)
    log = read_log(training.log)
    curve = [lowest(line["held_out"]) for line in log]
    return Done(folder, training.log, curve[0], min(curve), outlook(log))


def samples_of(steps: int, batch: int, fit_samples: int) -> int:
    """The number of samples that a training draws; stage 1 reads the first samples of stage 2."""
    return max(steps * batch, fit_samples)


@dataclass(frozen=True)
class Lengths:
    """The lengths of the samples that :func:`train` would read.

    ``stage1`` and ``stage2`` are rows of ``data.prefix_histogram``; those of ``stage1`` cover the
    first samples.
    """

    survey: Survey
    stage1: list[Bin]
    stage2: list[Bin]


def histogram(options: Options, steps: int, batch: int, fit_samples: int) -> Lengths:
    """Prefix lengths of the stream that :func:`train` would read (figure "prefixhist")."""
    (read, theirs), (written, tokenizer) = (
        options.runtime.facts(name) for name in (options.source, options.target)
    )
    context = min(read, written)
    planned = samples_of(steps, batch, fit_samples)
    stream = options.stream(tokenizer, context, planned, other_tokenizer(theirs, tokenizer))
    stage1 = prefix_histogram(stream, fit_samples)
    # A few evenly spaced samples stand for the whole run.
    drawn = steps * batch
    stage2 = prefix_histogram(stream, min(drawn, SHOWN), every=max(1, drawn // SHOWN))
    return Lengths(stream.survey, stage1, stage2)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished training's log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(log: Path, picture: str, title: str) -> None:
    """Draw held-out KL over steps, a curve for each learning rate.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    figure = pictures.figure()
    axes = figure.add_subplot(xlabel="step", ylabel="held-out KL (nats per token)")
    for index, rate in enumerate(lines[-1]["learning_rates"]):
        points = [(line["step"], line["held_out"][index]) for line in lines]
        sound = [point for point in points if point[1] is not None]
        axes.plot(*zip(*sound, strict=True), label=f"{rate:g}")
    found = [kl for line in lines for kl in line["held_out"] if kl is not None]
    pictures.log_scale(axes, "y", found)
    axes.legend(title="learning rate")
    pictures.save(figure, picture, title)
