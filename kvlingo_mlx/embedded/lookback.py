"""Generated conversations whose answers can only be read off earlier messages.

From text that must be looked back at a translator learns to recall (paper/LOG.md, "a real pair").
These are made of the source code and the manual of Python's own library, which every machine has:
excerpts with a few facts strewn in, functions, tables, notes, settings, and questions about them.
"""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from kvlingo_mlx.embedded.dialogues import CITIES, CODES, NAMES

Turn = tuple[str, str]  # what the user says, and the answer

WORDS = (
    "apple river stone cloud maple tiger copper violet anchor basket candle desert engine falcon "
    "garden hammer island jacket kettle lantern meadow needle orange pepper quartz rocket saddle"
).split()
OBJECTS = (
    "locker account room server package invoice ticket device branch order table port badge safe "
    "desk phone project printer"
).split()
KINDS = "code number key password PIN id value extension token".split()
STATEMENTS = (
    "The {kind} of {name}'s {object} is {value}.",
    "{name}'s {object} has the {kind} {value}.",
    "- {object} {kind} ({name}): {value}",
    "Note: {kind} for the {object} of {name} = {value}",
    '{name}_{object}_{kind} = "{value}"',
    "# {name}: {object} {kind} {value}",
)
QUESTIONS = (
    "What is the {kind} of {name}'s {object}?",
    "Which {kind} does the {object} of {name} have?",
    "Tell me the {object} {kind} of {name}.",
    "{name}, {object}: {kind}?",
)
ANSWERS = ("The {kind} of {name}'s {object} is {value}.", "{value}", "It is {value}.")
OPENINGS = ("Here is a text.\n\n", "Please read this and keep it in mind:\n\n", "```\n", "Notes:\n")
SYSTEMS = (
    "",
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are an assistant for programming questions.",
)
THINGS = (
    "apples bricks cables candles chairs clocks coats crates desks doors drums flutes forks gates "
    "jars keys lamps maps nails paints pans plates ropes rugs screws shelves shirts stamps tiles"
).split()
TEAMS = "billing search storage payments mobile support research security design sales".split()
VERBS = "fixed tested shipped reviewed documented moved renamed delayed measured removed".split()
PARTS = (
    "the login page|the nightly backup|the invoice export|the mail queue|the price table|"
    "the upload form|the error log|the image cache|the address book|the weekly report"
).split("|")


@cache
def _files() -> Sequence[Path]:
    """The source files of Python's library, without its tests and what was installed beside it."""
    library = Path(sysconfig.get_path("stdlib"))
    found = (file.relative_to(library) for file in library.rglob("*.py"))
    kept = (file for file in found if not {"test", "tests", "site-packages"} & set(file.parts))
    return [library / file for file in sorted(kept)]


@cache
def _functions(file: Path) -> Sequence[tuple[str, str, str]]:
    """A file's functions that say what they do: name, what they say, and code."""
    source = file.read_text("utf-8", errors="ignore")
    nodes, lines = ast.walk(ast.parse(source)), source.split("\n")
    found = ((n, ast.get_docstring(n) or "") for n in nodes if isinstance(n, ast.FunctionDef))
    parts = ((n.name, doc, lines[n.lineno - 1 : n.end_lineno]) for n, doc in found if len(doc) > 40)
    return [
        (name, doc, textwrap.dedent("\n".join(own))[:1200].rstrip()) for name, doc, own in parts
    ]


@dataclass
class Talk:
    """A conversation in the making: its random numbers, and what can be asked about."""

    rng: random.Random
    questions: list[Turn] = field(default_factory=list)

    def excerpt(self) -> Turn:
        """Lines of a file or of the manual with facts among them, and questions about both."""
        lines, size = self._whole(), self.rng.randint(250, 1600)
        first = self.rng.randrange(len(lines))
        last = first + 1
        while last < len(lines) and sum(map(len, lines[first:last])) < size:
            last += 1
        lines = [line[:160] for line in lines[first:last]]
        place, together = self.rng.randrange(len(lines) + 1), self.rng.random() < 0.4
        for _ in range(self.rng.choice((0, 2, 3, 4, 6, 8))):
            fact = self._fact()
            at = place if together else self.rng.randrange(len(lines) + 1)
            lines.insert(at, self.rng.choice(STATEMENTS).format_map(fact))
            asked, answer = self.rng.choice(QUESTIONS), self.rng.choice(ANSWERS)
            self.questions.append((asked.format_map(fact), answer.format_map(fact)))
        self._about(lines)
        return self.rng.choice(OPENINGS) + "\n".join(lines), "I have read it."

    def function(self) -> Turn:
        """A function of the library: what it does, and its code."""
        while not (told := _functions(file := self.rng.choice(_files()))):
            pass
        name, doc, code = self.rng.choice(told)
        does = f"What does `{name}` do?", doc[:600]
        shows = f"Show me the code of `{name}` in `{file.stem}`.", f"```python\n{code}\n```"
        asked, later = (does, shows) if self.rng.random() < 0.5 else (shows, does)
        self.questions.append(later)
        return asked

    def table(self) -> Turn:
        """A table of goods, and questions about its cells and sums."""
        rows = [
            (thing, self.rng.randint(2, 90), self.rng.randint(1, 40), self.rng.choice(CITIES))
            for thing in self.rng.sample(THINGS, self.rng.randint(5, 14))
        ]
        lines = ["| item | count | price | store |", "|---|---|---|---|"]
        lines += [f"| {thing} | {count} | {price} | {city} |" for thing, count, price, city in rows]
        for thing, count, price, city in self.rng.sample(rows, 3):
            where = f"There are {count} {thing} in {city}."
            worth = f"{count} {thing} at {price} each are worth {count * price}."
            self.questions += [
                (f"How many {thing} are there, and where?", where),
                (f"What are all {thing} worth together?", worth),
            ]
        total = sum(count for _, count, _, _ in rows)
        text = "Here is our stock list. Please keep it in mind.\n\n" + "\n".join(lines)
        return text, f"I have read it: {len(rows)} kinds of items, {total} pieces in all."

    def notes(self) -> Turn:
        """Notes of a meeting, and questions about who did what."""
        people = self.rng.sample(NAMES, self.rng.randint(4, 9))
        done = [
            (name, self.rng.choice(VERBS), part, self.rng.choice(TEAMS))
            for name, part in zip(people, self.rng.sample(PARTS, len(people)), strict=True)
        ]
        lines = [f"- {name} ({team}) {verb} {part}." for name, verb, part, team in done]
        for name, verb, part, team in self.rng.sample(done, 3):
            self.questions += [
                (f"Who {verb} {part}?", f"{name} did, from the {team} team."),
                (f"What did {name} do?", f"{name} {verb} {part}."),
            ]
        text = "These are the notes of today's meeting:\n\n" + "\n".join(lines)
        return text, f"Thank you. {len(done)} people reported: {', '.join(people)}."

    def settings(self) -> Turn:
        """A configuration file, and questions about its values."""
        names = self.rng.sample(TEAMS, self.rng.randint(4, 8))
        values = {name: (self.rng.choice(CODES), self.rng.randint(1024, 9999)) for name in names}
        lines = [
            f'[{name}]\nzone = "{zone}"\nport = {port}\nenabled = true'
            for name, (zone, port) in values.items()
        ]
        for name in self.rng.sample(names, 3):
            zone, port = values[name]
            self.questions += [
                (f"Which port does {name} use?", f"The {name} service uses port {port}."),
                (f"What is the zone of {name}?", f'Its zone is "{zone}".'),
            ]
        text = "This is our configuration:\n\n```toml\n" + "\n\n".join(lines) + "\n```"
        return text, f"I see {len(names)} services: {', '.join(names)}."

    def _whole(self) -> Sequence[str]:
        """A whole text: of a source file, or of the manual."""
        if self.rng.random() < 0.3:
            return topics[self.rng.choice(sorted(topics))].splitlines()
        lines: list[str] = []
        while not lines:
            lines = self.rng.choice(_files()).read_text("utf-8", errors="ignore").splitlines()
        return lines

    def _fact(self) -> dict[str, str]:
        code = f"{self.rng.randrange(16**6):06x}"
        two = f"{self.rng.choice(WORDS)}-{self.rng.randint(10, 999)}"
        number = str(self.rng.randint(1000, 9999))
        value = self.rng.choice((number, number, code, two, self.rng.choice(WORDS)))
        name, thing, kind = (self.rng.choice(of) for of in (NAMES + WORDS, OBJECTS, KINDS))
        return {"name": name, "object": thing, "kind": kind, "value": value}

    def _about(self, lines: Sequence[str]) -> None:
        """Ask which line follows, how a line goes on, and for some lines once more."""
        whole = [n for n, line in enumerate(lines[:-1]) if 12 < len(line.strip()) < 110]
        for n in self.rng.sample(whole, min(len(whole), self.rng.choice((1, 2, 3)))):
            line, words = lines[n].strip(), lines[n].split()
            begun = " ".join(words[: max(2, len(words) // 3)])
            following = lines[n + 1].strip() or "An empty one."
            again = "\n".join(lines[n : n + 3])[:220]
            self.questions.append(
                self.rng.choice((
                    (f"Which line follows `{line}`?", following),
                    (f"Quote the line that begins with `{begun}`.", line),
                    (f"Repeat from `{line[:40]}` on.", again),
                ))
            )  # fmt: skip


def lookback(count: int, *, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Yield ``count`` conversations of 3 to 14 turns, as messages."""
    makers: tuple[Callable[[Talk], Turn], ...] = (Talk.table, Talk.notes, Talk.settings)
    for index in range(count):
        talk = Talk(random.Random(f"lookback/{seed}/{index}"))
        system = talk.rng.choice(SYSTEMS)
        messages = [{"role": "system", "content": system}] if system else []
        for number in range(talk.rng.randint(3, 14)):
            if number and talk.questions and talk.rng.random() < 0.7:
                turn = talk.questions.pop(talk.rng.randrange(len(talk.questions)))
            else:
                own = talk.rng.choice(makers)
                turn = talk.rng.choice((Talk.excerpt, Talk.excerpt, Talk.function, own))(talk)
            both = zip(("user", "assistant"), turn, strict=True)
            messages += [{"role": role, "content": text} for role, text in both]
        yield messages
