"""The folder beside a translator in the making: what was found out so far, and the time spent."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlingo_mlx.format.atomic import sync_file
from kvlingo_mlx.training.checkpoints import disk_errors

FACTS = "facts.json"


@dataclass
class Work:
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
            self.facts = json.loads(path.read_text(encoding="utf-8"))
            kept = self.facts["asked"]
            asked = json.loads(json.dumps(dict(self.asked)))
            if changed := sorted(n for n in {*kept, *asked} if kept.get(n) != asked.get(n)):
                listed = ", ".join(f"{n} was {kept.get(n)!r}, is {asked.get(n)!r}" for n in changed)
                raise ValueError(
                    f"{self.folder} holds unfinished work with other settings ({listed}); give "
                    f"these again, name another --out, or remove that folder{self._partial()}"
                )
            self.started -= self.facts["spent"]
        self.keep()

    def _partial(self) -> str:
        partial = self.folder.with_suffix(".partial")
        return f" and {partial.name}" if partial.exists() else ""

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
        temporary = self.folder / f"{FACTS}.tmp"
        with disk_errors("what was found out so far", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(facts, file)
                file.flush()
                sync_file(file.fileno())
            os.replace(temporary, self.folder / FACTS)

    def remove(self) -> None:
        """Remove the folder, once all is done."""
        shutil.rmtree(self.folder)
