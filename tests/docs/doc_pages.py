"""What the pages for readers hold: their fenced blocks, commands, links and headings.

Two invisible comments before a block say what to do with it::

    <!-- not run: needs a GPU -->      it is not run; the reason is one of ``REASONS``
    <!-- file: rules.toml -->          its text is a file that later blocks of the page read
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.command_line import COMMANDS, PAPER

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(p for p in (ROOT / "benchmarks" / "paper").glob("*.md") if p.name != "LOG.md"),
]
RUN = ("python", "bash", "console")
# Why a block is not run. A new reason is a decision: most blocks can be made to run.
REASONS = (
    "installs packages",
    "needs a GPU",
    "needs several machines",
    "needs an extra",
    "needs the Hub",
    "takes minutes",
    "waits for a person",
)
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|file): (?P<about>[^>]*?) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    language: str  # as the fence names it; empty where it names none
    text: str
    line: int  # of the page, from 1, where its text begins
    reason: str | None = None  # why it is not run
    file: str | None = None  # what it is called, where it is a file's text

    @property
    def commands(self) -> list[str]:
        """A shell block's commands; of a console block, what stands after its prompts."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines()]
        if self.language == "console":
            lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    found = []
    for match in FENCE.finditer(text):
        mark, about = match["mark"], match["about"]
        found.append(
            Block(
                language=match["language"],
                text=match["text"],
                line=text.count("\n", 0, match.start("text")) + 1,
                reason=about if mark == "not run" else None,
                file=about if mark == "file" else None,
            )
        )
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def inline_code(text: str) -> list[str]:
    """What stands between backticks in a page's prose."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """What can be linked to within a page, as GitHub names its headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def mentioned(text: str) -> Iterator[list[str]]:
    """Every command of ours that a page mentions, as words, from its verb on."""
    code = [command for b in blocks(text) if b.language in RUN for command in b.commands]
    for command in [*code, *inline_code(text)]:
        words = words_of(command)
        if "kvlingo-mlx" in words:
            yield words[words.index("kvlingo-mlx") + 1 :]
        if "benchmarks.paper" in words:
            verb, *rest = words[words.index("benchmarks.paper") + 1 :] or [""]
            known = f"{PAPER}{verb}" in COMMANDS
            yield [f"{PAPER}{verb}", *rest] if known else [f"{PAPER}reproduce", verb, *rest]


def words_of(command: str) -> list[str]:
    """A command's words; a comment at its end is none of them."""
    try:
        return shlex.split(command, comments=True)
    except ValueError:  # an apostrophe in prose
        return command.split()
