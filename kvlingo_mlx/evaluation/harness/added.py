"""Tasks for lm-eval that a caller adds, such as those of the paper (``benchmarks/paper/tasks``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AddedTasks:
    """A folder of task files, and what they need that lm-eval's own do not."""

    folder: Path | None = None  # the files; None where there are none
    names: Collection[str] = ()  # of all its tasks
    # Those of the names whose own code reads their records; each is told of local files and seed by
    # its metadata. Such a task may have a method ``facts``, from a document to more facts of its
    # item: ``id``, ``cluster``, ``subset``, ``to_judge``.
    readers: Collection[str] = ()
    settings: Collection[str] = ()  # what of a run's metadata is for these tasks

    def apart(self, files: Mapping[str, str]) -> dict[str, str]:
        """The local files of tasks that lm-eval reads, whose examples may come out of them."""
        return {name: file for name, file in files.items() if name not in self.readers}


NONE = AddedTasks()
