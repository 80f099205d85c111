"""Set up programs that talk to `serve`: a row of programs.toml each."""

import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from kvlingo_mlx.agents.insertion import with_lines, with_members


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A program; ``$plan``, ``$url`` and others in its texts stand for a server's values."""

    title: str
    signs: Sequence[str]  # commands, or folders, of which one is there where the program is
    folders: Sequence[str] = ()  # of its configuration: the first that can be, or the last
    files: Sequence[str] = ()  # the configuration: the first that is there, or the last
    content: str = ""  # what a .json file gets, or a .yaml at its end; all of a .toml
    then: str  # what a user does then

    @property
    def found(self) -> bool:
        """Whether the program is on this machine, as far as one can see."""
        return any(shutil.which(sign) or Path(sign).expanduser().is_dir() for sign in self.signs)

    @property
    def path(self) -> Path | None:
        """Its configuration file; None if a person has to set it up."""
        if not self.files:
            return None
        places = [Path(os.path.expandvars(f)).expanduser() for f in self.folders]
        fitting = (p for p in places if "$" not in str(p) and p.parent.exists())
        folder = next(fitting, places[-1])
        known = [folder / file for file in self.files]
        return next(filter(Path.exists, known), known[-1])

    def snippet(self, offer: Mapping[str, str]) -> str:
        """What its file gets for a server's values."""
        values = {name: json.dumps(value)[1:-1] for name, value in offer.items()}
        return Template(self.content).substitute(values)

    def put(self, text: str, snippet: str) -> str:
        """Its file's text with the snippet (ValueError: a person has to put it in)."""
        form = self.path.suffix if self.path else ""
        if form == ".yaml":
            return with_lines(text, snippet)
        return snippet if form == ".toml" else with_members(text, json.loads(snippet))


def agents() -> dict[str, Agent]:
    """The programs, by the names that are typed."""
    rows = tomllib.loads(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))
    return {name: Agent(**row) for name, row in rows.items()}
