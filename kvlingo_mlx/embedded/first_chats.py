"""Generated English conversations for a first try, where a user has no data at hand.

They are made by us from templates (this package's licence), and say little. What makes them of use
is that many answers can only be read off earlier messages: tables, notes, lists and code that a
user gave some turns before. A translator for real use wants real conversations.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvlingo_mlx.embedded.dialogues import CITIES, CODES, NAMES

Turn = tuple[str, str]  # what the user says, and the answer

THINGS = (
    "apples bricks cables candles chairs clocks coats crates desks doors drums flutes forks gates "
    "jars keys lamps maps nails paints pans plates ropes rugs screws shelves shirts stamps tiles "
    "towels tents wheels"
).split()
TEAMS = "billing search storage payments mobile support research security design sales".split()
VERBS = "fixed tested shipped reviewed documented moved renamed delayed measured removed".split()
PARTS = (
    "the login page|the nightly backup|the invoice export|the mail queue|the price table|"
    "the upload form|the error log|the image cache|the address book|the weekly report"
).split("|")
PLACES = "harbour mill garden station bridge market library forest tower valley".split()
SYSTEMS = (
    "You are a helpful assistant. Answer briefly.",
    "You help a small team with notes and tables. Be exact.",
    "You are an assistant for programming questions.",
    "",
)
EXPLANATIONS = {
    "why bread rises": (
        "Yeast eats sugar in the dough and gives off carbon dioxide. The gluten holds the gas "
        "in small bubbles, so the dough grows. Heat makes the bubbles larger and sets the "
        "crumb."
    ),
    "what a hash table is": (
        "It keeps each value in a slot whose number is computed from its key. A look-up "
        "computes the same number again, so it takes about the same time however many there "
        "are."
    ),
    "how a lock keeps a canal level": (
        "Boats enter a chamber between two gates. Water is let in or out until the chamber is "
        "level with the other side, and then the second gate opens."
    ),
    "why the sky is blue": (
        "Air scatters short waves of light more than long ones. So blue light reaches us from "
        "every direction, and the light that comes straight from the sun looks yellow."
    ),
    "what a cache is for": (
        "It keeps what was computed or fetched before, close at hand. When the same thing is "
        "wanted again, it is read from there instead of being made anew."
    ),
    "how to keep a knife sharp": (
        "Hone it often with a steel, at the same angle on both sides. Use a wooden board, wash "
        "it by hand, and grind it on a stone when honing no longer helps."
    ),
    "why tests should be able to fail": (
        "A test that passes whatever the code does shows nothing. Break the code on purpose "
        "once: if the test still passes, it looks at the wrong thing."
    ),
    "how compound interest works": (
        "Each year's interest is added to the sum, and next year it earns interest too. So "
        "growth is slow at first and fast later; time matters more than the rate."
    ),
}


@dataclass
class Talk:
    """A conversation in the making: its random numbers, and what can be asked about."""

    rng: random.Random
    questions: list[Turn] = field(default_factory=list)

    def table(self) -> Turn:
        """A table of goods, and questions about its cells and sums."""
        rows = [
            (thing, self.rng.randint(2, 90), self.rng.randint(1, 40), self.rng.choice(CITIES))
            for thing in self.rng.sample(THINGS, self.rng.randint(5, 14))
        ]
        lines = ["| item | count | price | store |", "|---|---|---|---|"]
        lines += [f"| {thing} | {count} | {price} | {city} |" for thing, count, price, city in rows]
        for thing, count, price, city in self.rng.sample(rows, 3):
            self.questions += [
                (
                    f"How many {thing} are there, and where?",
                    f"There are {count} {thing} in {city}.",
                ),
                (
                    f"What are all {thing} worth together?",
                    f"{count} {thing} at {price} each are worth {count * price}.",
                ),
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

    def function(self) -> Turn:
        """A small function to be written, and a question about what it returns."""
        thing, factor, more = (
            self.rng.choice(THINGS),
            self.rng.randint(2, 9),
            self.rng.randint(1, 9),
        )
        number = self.rng.randint(2, 30)
        self.questions.append(
            (
                f"What does price_of_{thing}({number}) return?",
                f"It returns {number * factor + more}, as {number} * {factor} + {more} is that.",
            )
        )
        return (
            f"Write a Python function for the price of {thing}: {factor} each, and {more} for the "
            "delivery.",
            f"```python\ndef price_of_{thing}(count: int) -> int:\n"
            f'    """The price of some {thing}, delivery included."""\n'
            f"    return count * {factor} + {more}\n```",
        )

    def story(self) -> Turn:
        """A short story, and questions about its persons and places."""
        first, second = self.rng.sample(NAMES, 2)
        place, other = self.rng.sample(PLACES, 2)
        thing, count = self.rng.choice(THINGS), self.rng.randint(3, 19)
        self.questions += [
            (f"What did {first} lose in the story?", f"{first} lost {count} {thing}."),
            ("Where were they found in the story?", f"They were found at the {other}."),
        ]
        return (
            f"Tell me a short story about {first}, {second} and some {thing}.",
            f"{first} carried {count} {thing} from the {place} to the {other}, and lost them all "
            f"on the way, or so it seemed. {second} had followed with a lamp. One after the other, "
            f"the {thing} came out of the dark; the last lay at the {other}, where {first} waited.",
        )

    def explanation(self) -> Turn:
        """A question of general knowledge."""
        what = self.rng.choice(list(EXPLANATIONS))
        return f"Explain {what}.", EXPLANATIONS[what]

    def sum(self) -> Turn:
        """A sum with its way."""
        a, b, c = (self.rng.randint(11, 99) for _ in range(3))
        return (
            f"What is {a} * {b} + {c}?",
            f"{a} * {b} is {a * b}, and {a * b} + {c} is {a * b + c}.",
        )


def first_chats(count: int, *, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Yield ``count`` conversations of 2 to 14 turns, as messages."""
    makers: tuple[Callable[[Talk], Turn], ...] = (
        Talk.table,
        Talk.notes,
        Talk.settings,
        Talk.function,
        Talk.story,
        Talk.explanation,
        Talk.sum,
    )
    for index in range(count):
        talk = Talk(random.Random(f"first/{seed}/{index}"))
        system = talk.rng.choice(SYSTEMS)
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(talk.rng.randint(2, 14)):
            asks = talk.questions and talk.rng.random() < 0.5
            turn = (
                talk.questions.pop(talk.rng.randrange(len(talk.questions)))
                if asks
                else talk.rng.choice(makers)(talk)
            )
            messages += [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        yield messages
