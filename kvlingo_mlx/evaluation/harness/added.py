"""Tasks for lm-eval that a caller adds, such as those of the paper (``benchmarks/paper/tasks``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AddedTasks:
    """A folder of task files, and what they need that lm-eval's own do not.

    Attributes:
        folder: The files; None where there are none.
        names: Of all its tasks.
        readers: Those of the names whose own code reads their records; each is told of local files
            and seed by its metadata. Such a task may have a method ``facts``, from a document to
            more facts of its item: ``id``, ``cluster``, ``subset``, ``to_judge``.
        settings: What of a run's metadata is for these tasks.
    """

    folder: Path | None = None
    names: Collection[str] = ()
    readers: Collection[str] = ()
    settings: Collection[str] = ()

    def apart(self, files: Mapping[str, str]) -> dict[str, str]:
        """The local files of tasks that lm-eval reads, whose examples may come out of them."""
        return {name: file for name, file in files.items() if name not in self.readers}


NONE = AddedTasks()
