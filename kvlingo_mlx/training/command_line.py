"""What ``kvlingo-mlx train`` does between its options and its printing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvlingo_mlx import checkpoint
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.training import distributed, torch_model
from kvlingo_mlx.training.data import Stream, prefix_histogram
from kvlingo_mlx.training.distill import Recipe
from kvlingo_mlx.training.mixture import Mixture, PlainText
from kvlingo_mlx.training.pipeline import Plan, Progress, Training, default_rate

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """Which models, which data, where to compute."""

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

    def load(self, name: str) -> torch_model.TorchModel:
        """One of the two models, where this process computes."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        device = distributed.local_device(device)
        return torch_model.load(name, dtype=DTYPES[self.dtype], device=device)

    def stream(self, tokenizer: Any, context_length: int) -> Stream:
        """The samples, scaled to the shorter context of the two models."""
        mixture = PlainText() if self.plain_text else Mixture(packed_share=self.packed_share)
        return Stream(self.data, tokenizer, mixture.scaled(context_length), self.seed)


@dataclass(frozen=True)
class Done:
    """What a finished training left: its folder, its log, held-out KL at its ends."""

    folder: Path
    log: Path
    first: float
    last: float


def train(
    options: Options,
    plan: Mapping[str, Any],
    recipe: Mapping[str, Any],
    out: str,
    progress: Progress,
) -> Done | None:
    """Train, or resume; None in a process that does not lead.

    Raises:
        ValueError: A bad option, unusable data, or a destination that is not ours.
        KVLingoError: A model cannot be used, training diverged, or the disk is full.
    """
    checkpoint.check_destination(out)
    # Bad options are refused before anything is loaded.
    whole = Plan(**plan, seed=options.seed, recipe=Recipe(**recipe))
    source, target = options.load(options.source), options.load(options.target)
    rates = recipe["learning_rates"] or (default_rate(source.name, target.name),)
    whole = replace(whole, recipe=Recipe(**{**recipe, "learning_rates": rates}))
    stream = options.stream(target.tokenizer, min(source.context_length, target.context_length))
    group = distributed.join(str(target.device))
    try:
        names = ("data", "dtype", "plain_text", "packed_share")
        settings = {name: getattr(options, name) for name in names}
        training = Training(source, target, stream, whole, Path(out), group, progress, settings)
        folder = training.run()
    finally:
        distributed.leave(group)
    if not group.leads:
        return None
    ends = [min(line["held_out"]) for line in read_log(training.log)] or [math.nan]
    return Done(folder, training.log, ends[0], ends[-1])


def histogram(options: Options) -> list[tuple[int, int, int, int]]:
    """Prefix lengths of the stream that :func:`train` would read (figure "prefixhist")."""
    from transformers import AutoConfig, AutoTokenizer

    ends = [AutoConfig.from_pretrained(name) for name in (options.source, options.target)]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    context = min(config.max_position_embeddings for config in ends)
    return prefix_histogram(options.stream(tokenizer, context))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a training's log; an empty list where no step was made."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(log: Path, picture: str) -> None:
    """Draw held-out KL over steps, a curve for each learning rate.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("--plot needs matplotlib: pip install matplotlib") from None
    lines = read_log(log)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="held-out KL (nats per token)", yscale="log")
    for index, rate in enumerate(lines[-1]["learning_rates"] if lines else ()):
        points = [(line["step"], line["held_out"][index]) for line in lines]
        axes.plot(*zip(*points, strict=True), label=f"{rate:g}")
    axes.legend(title="learning rate")
    figure.savefig(picture)
