"""What long runs in PyTorch share: they stop together, are kept, and go on only as they began."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvlingo_mlx.errors import MissingModelError
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve
from kvlingo_mlx.training.checkpoints import check_settings
from kvlingo_mlx.training.interruption import postponed


class Run(Protocol):
    """A run that takes step after step, and keeps itself in a folder."""

    step: int

    def keep(self, folder: Path) -> None:
        """Replace what is kept; an earlier state is there until this one is whole."""


def model_folder(name: str) -> Path:
    """The folder of a model: itself, an embedded model's, or a snapshot from the Hub.

    Raises:
        MissingModelError: There is none.
    """
    return resolve(name, None, MODEL_FILES, MissingModelError)[0]


def begin(folder: Path, settings: Mapping[str, Any], group: Group) -> None:
    """Note a run's settings in its folder.

    Raises:
        ValueError: The folder holds a run with other settings.
    """
    path = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    known = path.exists()
    if known:
        check_settings(folder, json.loads(path.read_text()), settings)
    group.wait()
    if group.leads and not known:
        path.write_text(json.dumps(settings))


def go_on(
    run: Run,
    advance: Callable[[], Iterable[dict[str, Any]]],
    steps: int,
    folder: Path,
    group: Group,
    every: int,
) -> Iterator[dict[str, Any]]:
    """Take steps up to number ``steps``; yields what each ``advance`` tells.

    The run is kept each ``every`` steps, at the end, and when a process was told to stop: that ends
    all of them, after the step that they are in.
    """
    with postponed() as asked:
        while run.step < steps:
            yield from advance()
            stop = group.total(np.array([float(bool(asked))]))[0]
            if stop or run.step % every == 0 or run.step == steps:
                run.keep(folder)
            if stop:
                raise asked.error() if asked else SystemExit(1)


def clipped(parameters: Iterable[torch.nn.Parameter], most: float, step: int) -> float:
    """Scale a step's gradient down to a norm of ``most``; returns the norm that it had.

    Raises:
        FloatingPointError: It is not finite.
    """
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, most)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient of step {step} is {norm}; resume from OUT.partial with a lower rate in "
            "a copy of it, or leave out the data of that step"
        )
    return norm
