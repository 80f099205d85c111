"""Loads lm-eval tasks with their data by name: the caller's, the user's, lm-eval's own."""

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
from kvlingo_mlx.evaluation.harness.added import AddedTasks

# Errors that `datasets` and the Hub's client raise without network or access, or for a data set
# that is gone, has moved, or needs code of its own.
PROBLEMS = (OSError, HfHubHTTPError, HFValidationError, DatasetsError, RuntimeError, ValueError)


def load_tasks(
    names: Sequence[str],
    include_path: str | Path | None,
    added: AddedTasks,
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
    for name in sorted(set(data) - {*names, *added.names}):
        raise ValueError(f"a local file is given for {name}, which is none of the tasks")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"{include_path} is no folder of task files")
    settings = {key: metadata[key] for key in added.settings if key in metadata}
    facts = json.dumps({"data": data, "seed": seed, **settings})
    ours = _manager(None if added.folder is None else str(added.folder), False, facts)
    others = [name for name in names if name not in added.names]
    folder, facts = (None if include_path is None else str(include_path)), json.dumps(metadata)
    theirs = _manager(folder, False, facts)
    if not set(others) <= set(theirs.all_subtasks):
        theirs = _manager(folder, True, facts)
    found: list[Any] = []
    for name in names:
        manager = ours if name in added.names else theirs
        if name not in manager.all_tasks:
            raise ValueError(_unknown(name, [*added.names, *manager.all_tasks]))
        loaded = _load(name, manager, added.apart(data).get(name))
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
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.6)
    close = list(dict.fromkeys(close))
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "see lm-eval's list: lm-eval ls tasks"
    )
    return f"there is no task {printable(name)}; {hint}"


def _load(name: str, manager: TaskManager, local: str | None) -> Any:
    """A task, with a local file or folder in place of its data set if there is one."""
    try:
        if local is None:
            return manager.load([name])
        spec = {"task": name, "dataset_path": "json", "dataset_name": None}
        found = manager.load(
            [{"group": "local", "task": [spec | {"dataset_kwargs": {"data_files": splits(local)}}]}]
        )
        return found | {"groups": {}}
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


def splits(place: str) -> dict[str, str]:
    """The files of a task's splits: those of a folder by their names, or one file for all.

    Raises:
        KVLingoError: There is no such file, or no JSON file in the folder.
    """
    path = Path(place)
    if path.is_dir():
        files = {f.stem: str(f) for f in sorted(path.iterdir()) if f.suffix in (".json", ".jsonl")}
        if files:
            return files
        raise KVLingoError(f"{place} holds no file of records, such as test.jsonl")
    if not path.is_file():
        raise KVLingoError(f"{place} cannot be read; give a file of records, or a folder of splits")
    return dict.fromkeys(("train", "validation", "test"), str(path))


def check_examples(tasks: Mapping[str, Any], data: Mapping[str, str]) -> None:
    """Refuse to show examples out of the file that holds the questions.

    Raises:
        ValueError: A task shows examples of another split, and has one local file for all.
    """
    for name, task in tasks.items():
        place = data.get(name)
        shown = task.get_config("num_fewshot") or 0
        if place is not None and shown and len(set(splits(place).values())) == 1:
            raise ValueError(
                f"{name} shows {shown} examples, and {place} holds the questions; give a folder "
                "with a file for each split, such as train.jsonl and test.jsonl, or no examples"
            )


def _reason(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "offline (HF_HUB_OFFLINE), and they are not in the cache"
    return " ".join(printable(str(error)).split()).split(". ")[0][:200] or type(error).__name__


def _instead(name: str) -> str:
    return f"give a local file for {name}, or a folder with one for each split"
