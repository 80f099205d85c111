"""The folder beside a translator in the making: what was found out so far, and the time spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlingo_mlx.training.checkpoints import check_settings, read_log, write_json

FACTS = "facts.json"


@dataclass
class RunState:
    """The folder ``OUT.pair``: results by name, each found out once, and kept for the same command.

    ``asked`` are the settings of the command; other settings refuse the folder.
    """

    folder: Path
    asked: Mapping[str, Any]
    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """Read what an earlier run of the same command kept.

        Raises:
            ValueError: The folder is of a command with other settings.
        """
        path = self.folder / FACTS
        if path.exists():
            (self.facts,) = read_log(path)
            check_settings(self.folder, self.facts["asked"], self.asked)
            self.started -= self.facts["spent"]
        self.keep()

    @property
    def spent(self) -> float:
        """The seconds of this run and of those before."""
        return time.monotonic() - self.started

    def find(self, name: str, find: Callable[[], Any]) -> Any:
        """The result of ``find``, or the kept one of an earlier run."""
        if name not in self.facts:
            self.facts[name] = find()
            self.keep()
        return self.facts[name]

    def keep(self) -> None:
        """Write everything, in place of what was there."""
        facts = {**self.facts, "asked": dict(self.asked), "spent": self.spent}
        write_json(self.folder / FACTS, "what was found out so far", [facts])
