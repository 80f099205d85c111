"""The work of ``kvlingo-mlx train`` between parsing its options and printing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.grading import NO_RECEIPT, said_of
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.tokenization.samples import other_tokenizer
from kvlingo_mlx.training import distributed, torch_model
from kvlingo_mlx.training.data import Bin, Stream, Survey, prefix_histogram
from kvlingo_mlx.training.mixture import Mixture, PlainText
from kvlingo_mlx.training.pipeline import Progress, Training
from kvlingo_mlx.training.plan import TrainingPlan, default_rate, reconstruction
from kvlingo_mlx.training.recipe import Recipe

SHOWN = 480  # the number of samples that a run's histogram is made of
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """The models, the data and the device of a training."""

    source: str
    target: str
    data: tuple[str, ...]
    dtype: str = "bfloat16"
    device: str | None = None
    seed: int = 0
    plain_text: bool = False
    packed_share: float = 0.5

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        self._mixture()
        self._place()

    def load(self, name: str) -> torch_model.TorchModel:
        """Load one of the two models onto this process's device."""
        return torch_model.load(name, dtype=DTYPES[self.dtype], device=self._place())

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
        names = ("dtype", "plain_text", "packed_share")
        contents = {f"contents of {name}": text for name, text in stream.contents.items()}
        own = {name: getattr(self, name) for name in names}
        # The order of samples depends on their planned number.
        return {"data": list(self.data), **own, **contents, "samples": stream.survey.samples}

    def _mixture(self) -> Mixture | PlainText:
        return PlainText() if self.plain_text else Mixture(packed_share=self.packed_share)

    def _place(self) -> str:
        """The name of this process's device in PyTorch."""
        gpus = torch.cuda.device_count()
        device = self.device or ("cuda" if gpus else "cpu")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError(f"--device is {device!r}; it must be cuda, cuda:N or cpu")
        place = distributed.local_device(device)
        if place != "cpu" and int(place.removeprefix("cuda:")) >= gpus:
            raise ValueError(
                f"--device is {place}, but PyTorch finds {gpus} CUDA GPUs here; use --device cpu, "
                "or a CUDA build of PyTorch where there is a GPU"
            )
        return place


@dataclass(frozen=True)
class Done:
    """The result of a finished training: its folder and, after stage 2, its log and held-out KL.

    ``log``, ``first`` and ``best`` are None without a stage 2. ``before`` means that the training
    was already finished, so nothing was done.
    """

    folder: Path
    log: Path | None = None
    first: float | None = None
    best: float | None = None
    before: bool = False


def train(
    options: Options,
    plan: Mapping[str, Any],
    recipe: Mapping[str, Any],
    out: str,
    progress: Progress,
    warn: Callable[[str], None],
    stage1: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Done | None:
    """Train, or resume a training; returns None in a process that does not lead.

    ``stage1`` has the ``rates`` and ``steps`` of an MLP's stage 1, and is None for other kinds.
    ``force`` trains again even if the training is finished, and replaces another translator at
    ``out``.

    Raises:
        ValueError: A bad option, unusable data, or a destination that holds something else.
        KVLingoError: A model cannot be used, training diverged, or the disk is full.
    """
    translator_folder.check_destination(out)
    # Bad options are refused before any model is loaded.
    rates = recipe["learning_rates"] or (default_rate(options.source, options.target),)
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
    group = distributed.join(str(target.device))
    try:
        training = Training(
            source,
            target,
            stream,
            whole,
            Path(out),
            group,
            progress,
            options.settings(stream),
            warn,
            notes=[str(stream.survey)] if stream.survey.falls_short else [],
            force=force,
        )
        before = training.finished()
        folder = training.run()
    finally:
        distributed.leave(group)
    if not group.leads:
        return None
    if before or stage2.steps == 0:
        return Done(folder, before=before)
    curve = [_lowest(line["held_out"]) for line in read_log(training.log)]
    return Done(folder, training.log, curve[0], min(curve))


def samples_of(steps: int, batch: int, fit_samples: int) -> int:
    """The number of samples that a training draws; stage 1 reads the first samples of stage 2."""
    return max(steps * batch, fit_samples)


def _lowest(held_out: list[float | None]) -> float:
    """The lowest KL of all runs; None stands for a run that has diverged."""
    return min((value for value in held_out if value is not None), default=math.nan)


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
    source, theirs = torch_model.read_config(options.source)
    target, tokenizer = torch_model.read_config(options.target)
    context = min(config["max_position_embeddings"] for config in (source, target))
    planned = samples_of(steps, batch, fit_samples)
    stream = options.stream(tokenizer, context, planned, other_tokenizer(theirs, tokenizer))
    stage1 = prefix_histogram(stream, fit_samples)
    # A few evenly spaced samples stand for the whole run.
    drawn = steps * batch
    stage2 = prefix_histogram(stream, min(drawn, SHOWN), every=max(1, drawn // SHOWN))
    return Lengths(stream.survey, stage1, stage2)


def provenance(folder: Path) -> dict[str, Any]:
    """The provenance in a finished translator's folder."""
    return dict(translator_folder.read_config(folder).provenance)


def grade(folder: Path) -> str:
    """The grade of a finished translator by its receipt, in one line."""
    config = translator_folder.read_config(folder)
    return said_of(config) if "receipt" in config.provenance else NO_RECEIPT


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
