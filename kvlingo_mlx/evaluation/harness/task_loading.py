"""Loads lm-eval tasks with their data by name: ours, the user's, lm-eval's own."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from lm_eval.tasks import TaskManager

from kvlingo_mlx.errors import KVLingoError, MissingExtraError, printable
from kvlingo_mlx.evaluation.harness import tasks as own

OWN_FOLDER = Path(own.__file__).parent
# Errors that `datasets` and the Hub's client raise without network or access, or for a data set
# that is gone, has moved, or needs code of its own.
PROBLEMS = (OSError, HfHubHTTPError, HFValidationError, DatasetsError, RuntimeError, ValueError)


def load_tasks(
    names: Sequence[str],
    include_path: str | Path | None,
    data: Mapping[str, str],
    seed: int,
    metadata: Mapping[str, Any],
) -> Any:
    """lm-eval's ``TaskDict`` of tasks, groups and tags.

    Raises:
        ValueError: There is no such task, or one is named twice.
        MissingExtraError: A task needs a module that is not installed.
        KVLingoError: A task's data cannot be fetched or read.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"{include_path} is no folder of task files")
    ours = _manager(str(OWN_FOLDER), False, json.dumps({"data": data, "seed": seed}))
    others = [name for name in names if name not in own.NAMES]
    folder, facts = (None if include_path is None else str(include_path)), json.dumps(metadata)
    theirs = _manager(folder, False, facts)
    if not set(others) <= set(theirs.all_subtasks):
        theirs = _manager(folder, True, facts)
    found: list[Any] = []
    for name in names:
        manager = ours if name in own.NAMES else theirs
        if name not in manager.all_tasks:
            raise ValueError(_unknown(name, manager.all_tasks))
        loaded = _load(name, manager)
        group = loaded.get("groups", {}).get(name)
        found += [group] if group is not None else loaded["tasks"].values()
    return ours.load(found)


@lru_cache
def _manager(folder: str | None, everything: bool, metadata: str) -> TaskManager:
    """An index of task files; indexing lm-eval's own files takes a while, so it is cached."""
    return TaskManager(
        include_path=folder, include_defaults=everything, metadata=json.loads(metadata)
    )


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, [*own.NAMES, *known], n=4, cutoff=0.6)
    close = list(dict.fromkeys(close))
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "see lm-eval's list: lm-eval ls tasks"
    )
    return f"there is no task {printable(name)}; {hint}"


def _load(name: str, manager: TaskManager) -> Any:
    try:
        return manager.load([name])
    except KVLingoError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"the task {name} needs {error.name or error}, which is not installed: "
            f"pip install {(error.name or 'it').split('.')[0]}"
        ) from None
    except PROBLEMS as error:
        raise KVLingoError(
            f"the data of {name} cannot be had ({_reason(error)}); they come from the network at "
            f"first use and are kept: run once online, or {_instead(name)}"
        ) from None


def _reason(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "offline (HF_HUB_OFFLINE), and they are not in the cache"
    return " ".join(printable(str(error)).split()).split(". ")[0][:200] or type(error).__name__


def _instead(name: str) -> str:
    if name in own.NAMES:
        return f"give a local file for {name}"
    return "write a task file with dataset_path: json and pass its folder"
