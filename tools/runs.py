"""What the tools in PyTorch share: their options and errors, and how long runs are kept.

Runs of several processes stop together, and go on only as they began.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[1]))  # for the laboratory, which is not installed

from kvlingo_mlx.errors import KVLingoError, MissingModelError
from kvlingo_mlx.format.fingerprints import files_fingerprint
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve
from kvlingo_mlx.tokenization.records import Source, open_source
from kvlingo_mlx.training.checkpoints import check_settings
from kvlingo_mlx.training.distill import postponed

LOG, SETTINGS = "log.jsonl", "settings.json"  # in the folder of a run
TOLD = (ValueError, OSError, KVLingoError, FloatingPointError, SafetensorError)


class Run(Protocol):
    """A run that takes step after step, and keeps itself in a folder."""

    step: int

    def keep(self, folder: Path) -> None:
        """Replace what is kept; an earlier state is there until this one is whole."""


# ---- commands -------------------------------------------------------------------------


def told(main: Callable[[], None]) -> Callable[[], None]:
    """A command that ends with one line where it cannot begin, or cannot go on."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except TOLD as error:  # transformers' have several lines
            sys.exit(f"error: {' '.join(str(error).split())}")

    return run


def check_above_0(options: Mapping[str, float | None]) -> None:
    """Refuse (ValueError) options, by their names, whose values are not above 0."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give more than 0")


def check_least(options: Mapping[str, float | None], least: int) -> None:
    """Refuse (ValueError) options, by their names, whose values are below ``least``."""
    for name, value in options.items():
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give {least} or more")


def check_device(device: str) -> None:
    """Refuse (ValueError) a GPU where there is none for this process."""
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; leave out --device")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ValueError(
            f"torchrun started more processes than this machine has GPUs, {count}; give "
            f"--nproc-per-node {count}"
        )


def check_free(out: Path) -> None:
    """Refuse (ValueError) to write over what is there."""
    if out.exists():
        raise ValueError(f"{out} exists; name another folder, or remove it")


# ---- data and models ------------------------------------------------------------------


def open_data(spec: str) -> Source:
    """The records of a JSONL file, a folder of them, or a Hugging Face dataset.

    Raises:
        ValueError: There is nothing by that name, or it has a weight: all records count alike.
    """
    source, weight = open_source(spec)
    if weight != 1:
        raise ValueError(f"{spec}: a weight has no effect here; leave it out")
    return source


def model_folder(name: str) -> Path:
    """The folder of a model: itself, an embedded model's, or a snapshot from the Hub.

    Raises:
        MissingModelError: There is none.
        ValueError: A file of it is damaged.
    """
    folder = resolve(name, None, MODEL_FILES, MissingModelError)[0]
    try:
        json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise MissingModelError(
            f"{folder} has no config.json that can be read ({error}); give a model's folder or a "
            "Hub id"
        ) from None
    files_fingerprint(folder)
    return folder


def tokenizer_of(name: str | Path) -> Any:
    """A tokenizer by folder or Hub id.

    Raises:
        MissingModelError: There is no such folder.
        ValueError: It holds none, of which transformers makes an empty one.
    """
    folder = resolve(str(name), None, MODEL_FILES, MissingModelError)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.encode("Hello there", add_special_tokens=False):
        raise ValueError(f"{folder} has no tokenizer; give a folder with tokenizer.json")
    return tokenizer


def beside_weights(folder: Path) -> list[Path]:
    """The files of a model's folder that hold no weights: config, tokenizer, licence, ..."""
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx"}
    return [
        path for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in weights and not path.name.endswith(".index.json")
    ]  # fmt: skip


# ---- runs -----------------------------------------------------------------------------


def begin(folder: Path, settings: Mapping[str, Any], group: Group) -> None:
    """Note a run's settings in its folder.

    Raises:
        ValueError: The folder holds a run with other settings.
    """
    path = folder / SETTINGS
    folder.mkdir(parents=True, exist_ok=True)
    known = path.exists()
    if known:
        check_settings(folder, json.loads(path.read_text()), settings)
    group.wait()
    if group.leads and not known:
        path.write_text(json.dumps(settings))


def trim_log(folder: Path, made_anew: Callable[[dict[str, Any]], bool]) -> None:
    """Take out of a run's log the lines that it writes again, and one that was cut off."""
    if (path := folder / LOG).exists():
        lines = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]
        new = path.with_name(f"{LOG}.new")
        new.write_text("".join(line for line in lines if not made_anew(json.loads(line))))
        os.replace(new, path)


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
            f"the gradient of step {step} is {norm}; remove OUT.partial and give a lower rate, or "
            "leave out the data of that step"
        )
    return norm
