"""Where a training run's state is kept: safetensors and JSON, replaced all at once.

A folder ``OUT.partial`` beside the translator to come: ``state.json`` (settings, step, and the
name of the tensors' file, written last), ``step-N.safetensors`` (every run's tensors and Adam
moments) and ``log.jsonl``. A process killed at any point leaves the state before or after.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from kvlingo_mlx.errors import KVLingoError

if TYPE_CHECKING:
    from kvlingo_mlx.training.distill import Distillation, Run

STATE, LOG = "state.json", "log.jsonl"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoints:
    """The state of one training run on disk.

    ``settings`` is what must not change between a run and its resumption.
    """

    folder: Path
    settings: Mapping[str, Any]

    def restore(self, training: Distillation) -> None:
        """Continue from the last checkpoint, if there is one.

        Raises:
            ValueError: It was made with other settings; names those that differ.
        """
        if not (self.folder / STATE).exists():
            return
        state = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        check_settings(self.folder, state["settings"], self.settings)
        tensors = load_file(self.folder / state["tensors"], device=str(training.target.device))
        for index, (run, kept) in enumerate(zip(training.runs, state["runs"], strict=True)):
            _restore_run(run, f"{index}/", tensors)
            run.diverged_at = kept["diverged_at"]
            run.held_out = math.inf if kept["held_out"] is None else kept["held_out"]
        training.step, training.tokens = state["step"], state["tokens"]
        training.seconds = state["seconds"]
        self._trim_log(training.step)

    def save(self, training: Distillation, entry: Mapping[str, object]) -> None:
        """Keep the state of this step and append ``entry`` to the log.

        Raises:
            KVLingoError: The disk is full; the checkpoint before is still there.
        """
        name = f"step-{training.step}.safetensors"
        tensors = {}
        for index, run in enumerate(training.runs):
            tensors.update(_tensors_of(run, f"{index}/"))
        state = {
            "settings": dict(self.settings), "step": training.step, "tokens": training.tokens,
            "seconds": training.seconds, "tensors": name,
            "runs": [
                {"diverged_at": run.diverged_at,
                 "held_out": run.held_out if math.isfinite(run.held_out) else None}
                for run in training.runs
            ],
        }  # fmt: skip
        with self._disk_errors(training.step):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, self.folder / f"{name}.tmp")
            os.replace(self.folder / f"{name}.tmp", self.folder / name)
            # The log first: a line too many is dropped on resuming, a lost one is lost.
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(_finite(entry)) + "\n")
            write_text(self.folder / STATE, json.dumps(state, indent=2) + "\n")
        for old in self.folder.glob("step-*.safetensors"):
            if old.name != name:
                old.unlink()

    def finish(self, log: Path | None = None) -> None:
        """Remove the folder once the translator is written; the log goes to ``log``."""
        if log is not None and (self.folder / LOG).exists():
            os.replace(self.folder / LOG, log)
        shutil.rmtree(self.folder)

    def _trim_log(self, step: int) -> None:
        """Drop what was logged after the checkpoint that is resumed."""
        path = self.folder / LOG
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_text(path, "".join(kept))

    @contextlib.contextmanager
    def _disk_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # safetensors wraps the system's error in its own
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if not (full or "No space left" in str(error) or "os error 28" in str(error)):
                raise
            for half in self.folder.glob("*.tmp"):
                half.unlink(missing_ok=True)
            raise KVLingoError(
                f"the disk is full: step {step} could not be kept in {self.folder}; the "
                "checkpoint before it is intact, free some space and run the same command"
            ) from None


def check_settings(folder: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse (ValueError) to resume with other settings; names those that differ."""
    current = json.loads(json.dumps(dict(settings)))
    changed = [n for n in sorted({*kept, *current}) if kept.get(n) != current.get(n)]
    if changed:
        listed = "; ".join(f"{n} was {kept.get(n)!r}, is {current.get(n)!r}" for n in changed)
        raise ValueError(
            f"{folder} holds a run with other settings ({listed}); give the same ones "
            "to resume it, or remove the folder to start anew"
        )


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: the old text or the new, never half of it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _tensors_of(run: Run, prefix: str) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in run.translator.tensors.items():
        out[f"{prefix}{name}"] = tensor.detach().contiguous()
        moments = run.optimizer.state.get(tensor, {})
        for moment in MOMENTS:
            if moment in moments:
                out[f"{prefix}{name}/{moment}"] = moments[moment].contiguous()
        if "step" in moments:
            out[f"{prefix}{name}/step"] = moments["step"].reshape(1)
    return out


def _restore_run(run: Run, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in run.translator.tensors.items():
            tensor.copy_(tensors[f"{prefix}{name}"])
            if f"{prefix}{name}/step" in tensors:
                moments = {m: tensors[f"{prefix}{name}/{m}"].clone() for m in MOMENTS}
                step = tensors[f"{prefix}{name}/step"].reshape(()).cpu().clone()
                run.optimizer.state[tensor] = {"step": step, **moments}


def _finite(entry: Mapping[str, object]) -> dict[str, object]:
    """JSON knows no NaN: None stands for it."""

    def clean(value: object) -> object:
        if isinstance(value, list):
            return [clean(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: clean(value) for key, value in entry.items()}
