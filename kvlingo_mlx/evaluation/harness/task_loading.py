"""Loads lm-eval tasks with their data by name: the caller's, the user's, lm-eval's own."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError, MissingExtraError, printable


@dataclass(frozen=True)
class AddedTasks:
    """A folder of task files that a caller adds, such as the paper's (``benchmarks/paper/tasks``).

    ``readers`` are those whose own code reads their records; it gets local files and the seed by
    its metadata. Such a task may have a method ``facts``, from a document to more facts of its
    item: ``id``, ``cluster``, ``subset``, ``to_judge``.
    """

    folder: Path | None = None
    readers: Collection[str] = ()

    def apart(self, files: Mapping[str, str]) -> dict[str, str]:
        """The local files of tasks that lm-eval reads, whose examples may come out of them."""
        return {name: file for name, file in files.items() if name not in self.readers}


NONE = AddedTasks()


def load_tasks(
    names: Sequence[str],
    include_path: str | Path | None,
    added: AddedTasks,
    data: Mapping[str, str],
    seed: int,
    metadata: Mapping[str, Any],
) -> Any:
    """lm-eval's ``TaskDict`` of tasks, groups and tags; errors as in :func:`.running.run`."""
    for name in sorted(set(data) - {*names, *added.readers}):
        raise ValueError(f"a local file is given for {name}, which is none of the tasks")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"{include_path} is no folder of task files")
    more = {} if added.folder is None else {"data": data, "seed": seed}
    folders = tuple(str(folder) for folder in (include_path, added.folder) if folder is not None)
    facts = json.dumps({**metadata, **more})
    manager = _manager(folders, False, facts)
    if not set(names) <= set(manager.all_subtasks):
        manager = _manager(folders, True, facts)
    found: list[Any] = []
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(_unknown(name, manager.all_tasks))
        loaded = _load(name, manager, added.apart(data).get(name))
        group = loaded.get("groups", {}).get(name)
        found += [group] if group is not None else loaded["tasks"].values()
    return manager.load(found)


@lru_cache
def _manager(folders: tuple[str, ...], everything: bool, metadata: str) -> Any:
    """An index of task files; indexing lm-eval's own files takes a while, so it is cached."""
    from lm_eval.tasks import TaskManager

    options: dict[str, Any] = {"include_defaults": everything, "metadata": json.loads(metadata)}
    return TaskManager(include_path=list(folders), **options)


def _unknown(name: str, known: Sequence[str]) -> str:
    close = dict.fromkeys(difflib.get_close_matches(name, known, n=4, cutoff=0.6))
    hint = "see lm-eval's list: lm-eval ls tasks"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    return f"there is no task {printable(name)}; {hint}"


def _load(name: str, manager: Any, local: str | None) -> Any:
    """A task, with a local file or folder in place of its data set if there is one."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Raised without network or access, or for data that are gone, have moved, or need code.
    theirs = HfHubHTTPError, HFValidationError, DatasetsError
    try:
        if local is None:
            return manager.load([name])
        spec = {"task": name, "dataset_path": "json", "dataset_name": None}
        files = {"dataset_kwargs": {"data_files": splits(local)}}
        found = manager.load([{"group": "local", "task": [spec | files]}])
        return found | {"groups": {}}
    except KVLingoError:
        raise
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        missing = f"needs {error.name}, which is not installed: pip install {package}"
        raise MissingExtraError(
            f"the task {name} {missing if package else f'cannot be loaded: {error}'}"
        ) from None
    except (*theirs, OSError, RuntimeError, ValueError) as error:
        raise KVLingoError(
            f"the data of {name} cannot be had ({_reason(error)}); they come from the network at "
            f"first use and are kept: run once online, or give a local file for {name}, or a "
            "folder with one for each split"
        ) from None


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "offline (HF_HUB_OFFLINE), and they are not in the cache"
    return " ".join(printable(str(error)).split()).split(". ")[0][:200] or type(error).__name__


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


def set_examples(
    tasks: Mapping[str, Any],
    num_fewshot: int | None,
    seed: int,
    files: Mapping[str, str],
    unsafe_code: bool,
) -> None:
    """Set the number of examples as lm-eval's own command line does.

    Raises:
        ValueError: A task shows examples of another split, and one local file holds all. Or it
            runs code which a model wrote, and ``unsafe_code`` does not allow that.
    """
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
            raise ValueError(
                f"the task {name} runs code that the model wrote; allow it explicitly "
                "(--confirm-run-unsafe-code)"
            )
        default = task.get_config("num_fewshot")
        shown = default if num_fewshot is None or default == 0 else num_fewshot
        task.set_config(key="num_fewshot", value=shown or 0)
        task.set_fewshot_seed(seed=seed)
        place = files.get(name)
        if place is not None and shown and len(set(splits(place).values())) == 1:
            raise ValueError(
                f"{name} shows {shown} examples, and {place} holds the questions; give a folder "
                "with a file for each split, such as train.jsonl and test.jsonl, or no examples"
            )
