"""The state of a training on disk: files of tensors and facts, replaced atomically.

The folder ``OUT.partial`` stands beside the translator that is being made. It holds
``initial.safetensors`` (the result of stage 1) and a folder for each unfinished stage. A closed
form keeps its sums in ``sums.safetensors``. A distillation keeps its state at the last
validation (``validated.safetensors``), its state since then (``latest.safetensors``), the best
translator so far (``best.safetensors``) and ``log.jsonl``. A process that is killed at any point
leaves either the previous state or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.atomic import sync_file
from kvlingo_mlx.group import Group
from kvlingo_mlx.reporting.measure import plain
from kvlingo_mlx.training.runs import Best, Run

VALIDATED, LATEST, BEST = "validated.safetensors", "latest.safetensors", "best.safetensors"
LOG, DIVERGED = "log.jsonl", "diverged"
KEEP_EVERY = 240.0  # the most seconds of work that a kill may lose


# ---- one file ---------------------------------------------------------------------------


def write_state(
    path: Path, what: str, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> None:
    """Replace a file of tensors and JSON facts atomically.

    Raises:
        KVLingoError: The file could not be written; the old one is still there. The message names
            its content, ``what``.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(what, path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), temporary, {"facts": json.dumps(facts)})
            _replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_facts(path: Path) -> dict[str, Any]:
    """The facts in a file that :func:`write_state` wrote.

    Raises:
        ValueError: The file is damaged, or :func:`write_state` did not write it.
    """
    try:
        with safe_open(path, framework="np") as file:
            return json.loads((file.metadata() or {})["facts"])
    except (SafetensorError, KeyError, ValueError):
        raise other_version(path) from None


def other_version(path: Path) -> ValueError:
    """The error for a file that cannot be what :func:`write_state` of this version wrote."""
    return ValueError(
        f"{path} is damaged, or of another version; remove it to start this stage anew"
    )


def log_of(folder: Path) -> Path:
    """The log of a finished stage 2, beside its translator: held-out KL and more, as JSON lines."""
    return folder.with_name(f"{folder.name}.log.jsonl")


def write_log(path: Path, curve: Sequence[Mapping[str, Any]]) -> None:
    """Replace a log atomically.

    Raises:
        KVLingoError: The file could not be written; the old one is still there.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors("the log", path.parent):
        lines = [json.dumps(plain(dict(line))) for line in curve]
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        _replace(temporary, path)


@contextlib.contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one line: ``what`` could not be kept in ``folder``."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps OSError in its own text
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise KVLingoError(
            f"{reason}: {what} could not be kept in {folder}; what was kept before is intact, "
            f"{'free some space' if full else 'mend that'} and run the same command"
        ) from None


def _replace(temporary: Path, path: Path) -> None:
    """Flush a finished file to the disk, then move it into place."""
    with open(temporary, "rb") as file:
        sync_file(file.fileno())
    os.replace(temporary, path)


def check_settings(folder: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse (ValueError) to resume with other settings; the message names those that differ."""
    changed = differences(kept, settings)
    if changed:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}); give the same "
            "ones to resume it, or remove the folder to start anew"
        )


def differences(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The settings in which two runs differ, each as a phrase.

    A setting with several parts differs where the parts that both have do, or where there are none:
    what identifies a model's weights depends on the runtime, its files do not.
    """
    current = json.loads(json.dumps(dict(settings)))

    def same(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            both = ours.keys() & theirs.keys()
            return bool(both) and all(ours[part] == theirs[part] for part in both)
        return ours == theirs

    changed = [n for n in sorted({*kept, *current}) if not same(kept.get(n), current.get(n))]
    return [f"{n} was {kept.get(n)!r}, is {current.get(n)!r}" for n in changed]


# ---- a distillation ---------------------------------------------------------------------


class Training(Protocol):
    """The parts of a :class:`~kvlingo_mlx.training.distill.Distillation` that are kept."""

    group: Group
    runs: list[Run]
    best: Best | None
    curve: list[Mapping[str, Any]]
    told: set[str]
    step: int
    tokens: int
    seconds: float
    validating: float


@dataclass(frozen=True)
class Checkpoints:
    """The state of one distillation on disk.

    ``settings`` are the settings that must not change between a run and its resumption.
    """

    folder: Path
    settings: Mapping[str, Any]

    def restore(self, training: Training) -> bool:
        """Restore the last checkpoint; returns whether there was one.

        Raises:
            ValueError: It was made with other settings; the message names those that differ.
        """
        kept = training.group.firsts(self._kept)
        if kept is not None:
            facts = kept["facts"]
            for index, (run, own) in enumerate(zip(training.runs, facts["runs"], strict=True)):
                run.translator.restore(_under(f"{index}/", kept["tensors"]))
                run.diverged_at, run.dropped_at = own["diverged_at"], own.get("dropped_at")
                run.held_out = math.inf if own["held_out"] is None else own["held_out"]
                run.kl_sum, run.kl_steps = own["kl_sum"], own["kl_steps"]
            training.step, training.tokens = facts["step"], facts["tokens"]
            training.seconds = facts["seconds"]
            training.validating = facts.get("validating", 0.0)  # older files lack it
            training.best = Best(**kept["best"])
            training.curve = [json.loads(line) for line in kept["log"]]
            training.told = set(facts["told"])
        if training.group.leads:
            self._trim_log(-1 if kept is None else training.step)
            (self.folder / DIVERGED).unlink(missing_ok=True)
        return kept is not None

    def _kept(self) -> dict[str, Any] | None:
        """All of the last checkpoint, if there is one."""
        newest = self._newest()
        if newest is None:
            return None
        path, facts = newest
        check_settings(self.folder, facts["settings"], self.settings)
        best = self.folder / BEST
        return {
            "facts": facts,
            "tensors": load_file(path),
            "best": {"tensors": load_file(best), **read_facts(best)},
            "log": self._log(facts["step"]),
        }

    def save(self, training: Training, entry: Mapping[str, object] | None = None) -> None:
        """Write the state of this step, as a validated one where an ``entry`` for the log is given.

        Raises:
            KVLingoError: The disk is full; the previous checkpoint is still there.
        """
        tensors: dict[str, np.ndarray] = {}
        for index, run in enumerate(training.runs):
            tensors |= {f"{index}/{n}": a for n, a in run.translator.state().items()}
        facts = {
            "settings": dict(self.settings),
            "step": training.step,
            "tokens": training.tokens,
            "seconds": training.seconds,
            "validating": training.validating,
            "told": sorted(training.told),
            "runs": [
                {
                    "rate": run.rate,
                    "diverged_at": run.diverged_at,
                    "dropped_at": run.dropped_at,
                    "kl_sum": run.kl_sum,
                    "kl_steps": run.kl_steps,
                    "held_out": run.held_out if math.isfinite(run.held_out) else None,
                }
                for run in training.runs
            ],
        }
        what = f"step {training.step}"
        if entry is None:
            write_state(self.folder / LATEST, what, tensors, facts)
            return
        # The best translator and the log are written before the checkpoint. If the process is
        # killed in between, they are one validation ahead, and the resumed run comes to the same
        # values again. A surplus log line is dropped on resuming; a missing one could not be
        # restored.
        best = training.best
        if best is not None and best.step == training.step:
            written = {"rate": best.rate, "step": best.step, "held_out": best.held_out}
            write_state(self.folder / BEST, what, best.tensors, written)
        with disk_errors(what, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(plain(dict(entry))) + "\n")
                log.flush()
                sync_file(log.fileno())
        write_state(self.folder / VALIDATED, what, tensors, facts)
        (self.folder / LATEST).unlink(missing_ok=True)

    def mark_diverged(self) -> None:
        """Keep only the last validated checkpoint, and let a run with other settings replace it."""
        (self.folder / LATEST).unlink(missing_ok=True)  # it may already be unsound
        with disk_errors("the divergence", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / DIVERGED).touch()

    def stale(self) -> bool:
        """Whether the folder holds a diverged run with other settings, which may be removed.

        Raises:
            ValueError: It holds a sound run with other settings; the message names those that
                differ.
        """
        newest = self._newest()
        if newest is None:
            return False
        if not (self.folder / DIVERGED).exists():
            check_settings(self.folder, newest[1]["settings"], self.settings)
        return bool(differences(newest[1]["settings"], self.settings))

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the last checkpoint's runs; none without a checkpoint."""
        newest = self._newest()
        return () if newest is None else tuple(run["rate"] for run in newest[1]["runs"])

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        paths = (self.folder / name for name in (VALIDATED, LATEST))
        found = [(path, read_facts(path)) for path in paths if path.exists()]
        return max(found, key=lambda item: item[1]["step"], default=None)

    def _trim_log(self, step: int) -> None:
        """Drop log lines later than the checkpoint that is resumed, and an incomplete last line."""
        path = self.folder / LOG
        if not path.exists():
            return
        temporary = path.with_name(f"{LOG}.tmp")
        with disk_errors("the log", self.folder):
            temporary.write_text("".join(self._log(step)), encoding="utf-8")
            _replace(temporary, path)

    def _log(self, step: int) -> list[str]:
        """The log's complete lines up to a step."""
        kept = []
        for line in (self.folder / LOG).read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(f"{line}\n")
            except ValueError:
                break  # incomplete: the process was killed while writing it, so it is the last line
        return kept


def _under(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}
