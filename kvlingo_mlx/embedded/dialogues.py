"""Generated English dialogues whose answers depend on facts in the prefix.

On plain text a tiny model hardly uses its prefix, so any translator looks perfect. Here the answer
to every question is a value drawn at random a few hundred tokens earlier, so a model that cannot
read its prefix can only guess.

The content vocabulary is small on purpose (64 words of one token each): a narrow cache can carry
only so many identities across two independently trained models. There are many values of each kind
(100 codes, 24 cities, 20 names), so that a guess is seldom right.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Hugo Iris Jonas Kate Leo "
    "Maria Nora Oscar Paul Rosa Simon Tina Victor"
).split()
CITIES = (
    "Lima Oslo Paris Rome Cairo Delhi Tokyo Boston Berlin Madrid Dublin Vienna "
    "London Milan Athens Prague Seoul Dallas Denver Geneva Havana Lisbon Moscow Sydney"
).split()
LETTERS, DIGITS = "ABCDEFGHKM", "0123456789"
CODES = tuple(letter + digit for letter in LETTERS for digit in DIGITS)
VALUES = {
    "code": CODES,
    "key": CODES,
    "home": CITIES,
    "school": CITIES,
    "hotel": CITIES,
    "friend": NAMES,
}
ATTRIBUTES = tuple(VALUES)

# In every style the name stands two tokens before the value: a tiny model binds the two with
# one attention head, but with "Anna's city is Lima" it only guessed between cities.
STATEMENTS = (
    "The {attribute} of {name} is {value}.",
    "I know that the {attribute} of {name} is {value}.",
    "- {attribute} of {name}: {value}",
    "{name} has {value} as {attribute}.",
    "Someone told me that the {attribute} of {name} was {value}.",
)
LIST_STYLE = 2
QUESTIONS = (
    "What is the {attribute} of {name}?",
    "Tell me the {attribute} of {name}.",
    "What is {name}'s {attribute}?",
    "Do you remember the {attribute} of {name}?",
)
ANSWER = "The {attribute} of {name} is {value}."
THOUGHT = "I look for the {attribute} of {name}."
OPENINGS = (
    "Here are some notes. Please keep them in mind.",
    "I want you to remember a few things about my friends.",
    "Please read this list and remember it.",
    "Hello! Let me tell you about the people here.",
    "I met many people today. Let me tell you about them.",
)
FILLERS = (
    "It was a long day.",
    "The weather is nice today.",
    "We had a good time.",
    "I hope this helps.",
    "It rained in the morning.",
    "That is all I know about it.",
    "We talked for a while.",
    "The train was late again.",
)
CLOSINGS = ("Can you remember that?", "That is all for now.", "Please keep this.", "")
ACKNOWLEDGEMENTS = (
    "I will remember that.",
    "Thank you. I have read it.",
    "Noted.",
    "Of course. I will keep it in mind.",
)


def states_a_fact(text: str) -> bool:
    """Whether a text states a fact such as the tiny models were trained to repeat."""
    words = {"name": r"\w+", "attribute": "|".join(ATTRIBUTES), "value": r"\w+"}
    ways = (s.rstrip(".").format_map({k: f"(?:{v})" for k, v in words.items()}) for s in STATEMENTS)
    return any(re.search(way, text) for way in ways)


MOST_FACTS = len(NAMES) * len(ATTRIBUTES)  # that can be told apart


@dataclass(frozen=True)
class Fact:
    """One fact: ``name``'s ``attribute`` is ``value``."""

    name: str
    attribute: str
    value: str

    def say(self, template: str) -> str:
        """Fill one of the sentence templates of this module."""
        return template.format(name=self.name, attribute=self.attribute, value=self.value)


@dataclass(frozen=True)
class Dialogue:
    """A conversation that states ``facts`` and afterwards asks about ``asked``.

    ``messages`` hold the part that states the facts and, last, the question about ``asked[0]``.
    The answers and the other questions follow from ``asked`` and ``questions``.
    """

    messages: tuple[dict[str, str], ...]
    facts: tuple[Fact, ...]
    asked: tuple[Fact, ...]
    questions: tuple[str, ...]

    def conversation(self) -> list[dict[str, str]]:
        """All turns: the facts, then each question with its answer."""
        turns = list(self.messages[:-1])
        for fact, question in zip(self.asked, self.questions, strict=True):
            turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": fact.say(ANSWER)},
            ]
        return turns


def _draw_facts(rng: random.Random, count: int, attributes: Sequence[str]) -> list[Fact]:
    keys = rng.sample([(n, a) for n in NAMES for a in attributes], count)
    return [Fact(name, attribute, rng.choice(VALUES[attribute])) for name, attribute in keys]


def _tell(rng: random.Random, facts: list[Fact], styles: int) -> str:
    """One user turn that states ``facts``, in one style or with a random style per sentence."""
    mixed = rng.random() < 0.5
    style = rng.randrange(styles)
    sentences = []
    for fact in facts:
        template = STATEMENTS[rng.randrange(styles) if mixed else style]
        sentences.append(fact.say(template))
        if rng.random() < 0.25:
            sentences.append(rng.choice(FILLERS))
    separator = "\n" if style == LIST_STYLE and not mixed else " "
    return separator.join(sentences)


def dialogue(
    rng: random.Random,
    num_facts: int,
    num_questions: int,
    *,
    styles: int = len(STATEMENTS),
    attributes: Sequence[str] = ATTRIBUTES,
) -> Dialogue:
    """Draw one dialogue that states ``num_facts`` facts in one to four user turns.

    All are about different keys; ``num_questions`` of them, at least 1, are asked about, each once.
    Of the sentence styles the first ``styles`` are used. ``rng`` is the only source of randomness.
    """
    facts = _draw_facts(rng, num_facts, attributes)
    turns = min(rng.randint(1, 4), num_facts)
    cuts = sorted(rng.sample(range(1, num_facts), turns - 1))
    parts = [facts[a:b] for a, b in zip([0, *cuts], [*cuts, num_facts], strict=True)]
    messages = []
    for index, part in enumerate(parts):
        pieces = [_tell(rng, part, styles), rng.choice(CLOSINGS)]
        if index == 0:
            pieces.insert(0, rng.choice(OPENINGS))
        text = " ".join(piece for piece in pieces if piece)
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": rng.choice(ACKNOWLEDGEMENTS)},
        ]
    asked = rng.sample(facts, min(num_questions, num_facts))
    questions = tuple(fact.say(rng.choice(QUESTIONS)) for fact in asked)
    messages.append({"role": "user", "content": questions[0]})
    return Dialogue(tuple(messages), tuple(facts), tuple(asked), questions)


def drawn(
    kind: str, count: int, *, seed: int = 0, facts: tuple[int, int], questions: int = 6
) -> Iterator[Dialogue]:
    """Yield ``count`` dialogues of a kind; kinds are disjoint.

    Training draws none of them, since its seeds are integers.
    """
    for index in range(count):
        rng = random.Random(f"{kind}/{seed}/{index}")
        yield dialogue(rng, rng.randint(*facts), questions)


held_out = partial(drawn, "held-out", facts=(12, 28))
for_fitting = partial(drawn, "fit", facts=(4, 28))
