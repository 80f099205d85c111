"""Needles in a haystack, as in RULER, generated offline (appendix "Evaluation data").

A prompt hides short statements among unrelated sentences, and asks for some of them. The score is
the share of the wanted values that the answer contains.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.models.language_model import LanguageModel

ADJECTIVES = (
    "amber brave calm clever cold dusty early faint gentle golden hidden hollow humble icy "
    "jolly keen lively lonely loud lucky mellow modest narrow noble odd pale patient plain "
    "proud quick quiet rapid rare rough rusty secret sharp shy silent silver simple slow "
    "small smooth solid steady stormy sudden sweet tall tame thin tidy tiny vast warm weary "
    "wild wise young"
).split()
NOUNS = (
    "anchor apple arrow autumn badger basket beacon bridge brook candle canyon castle cedar "
    "circle cloud comet copper corner crane desert dolphin eagle ember engine falcon feather "
    "field forest fountain garden glacier harbor hill island jacket kettle ladder lantern "
    "lemon letter marble meadow mirror mountain needle ocean orchard otter paper pebble "
    "pepper pilot planet pocket puzzle rabbit ribbon river rocket saddle shadow signal "
    "spring stone summer table temple thunder tiger tower valley velvet village violin "
    "wagon walnut whistle willow window winter"
).split()
SUBJECTS = (
    "The baker; A traveller; Our neighbour; The old clock; Every student; The gardener; "
    "A small boat; The library; Her brother; The morning train; A group of painters; The council"
).split("; ")
VERBS = (
    "waited near; had often admired; was seen beside; once described; moved slowly past; "
    "was thinking about; never spoke of; returned to"
).split("; ")
OBJECTS = (
    "the market square; a row of apple trees; the river bank; an unfinished letter; "
    "the harbour lights; a narrow staircase; the long winter; a map of the coast; "
    "the quiet garden; an open window; the last chapter; a wooden table"
).split("; ")
ENDINGS = (
    "before the rain came; in the early evening; without saying a word; "
    "for most of the afternoon; as it did every year; and then went home; while the others slept; "
    "because there was still time"
).split("; ")


@dataclass(frozen=True)
class Variant:
    """The number of keys in the haystack, of values per key, and of keys in the question."""

    keys: int
    values: int
    queries: int


VARIANTS = {
    "single": Variant(1, 1, 1),
    "multi-key": Variant(4, 1, 1),
    "multi-value": Variant(1, 4, 1),
    "multi-query": Variant(4, 1, 4),
}


@dataclass(frozen=True)
class Item:
    """One question about one haystack."""

    messages: tuple[dict[str, str], ...]  # the chat to answer
    references: tuple[str, ...]  # the values that the answer should contain
    # The place of each needle, from 0 (front) to 1 (end), in the order of the text.
    depths: tuple[float, ...]

    @property
    def context(self) -> list[dict[str, str]]:
        """The chat without its question, which is its last line."""
        (message,) = self.messages
        return [{**message, "content": message["content"].rpartition("\n")[0]}]


@dataclass(frozen=True)
class Style:
    """The form of needles, questions and the surrounding text."""

    # Draws random keys, each with the given number of different values.
    draw: Callable[[random.Random, int, int], list[tuple[str, list[str]]]]
    state: Callable[[str, str], str]  # states a key and one of its values as a sentence
    ask: Callable[[Sequence[str]], str]  # asks for the values of some keys
    opening: str  # the text before the haystack
    prose: Callable[[random.Random], str]  # draws one random sentence of the haystack


def _draw_magic(rng: random.Random, keys: int, values: int) -> list[tuple[str, list[str]]]:
    adjectives, nouns = rng.sample(ADJECTIVES, keys), rng.sample(NOUNS, keys)
    numbers = [str(n) for n in rng.sample(range(1_000_000, 10_000_000), keys * values)]
    return [
        (f"{adjective}-{noun}", numbers[i * values : (i + 1) * values])
        for i, (adjective, noun) in enumerate(zip(adjectives, nouns, strict=True))
    ]


def _ask_magic(keys: Sequence[str]) -> str:
    named = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    return (
        f"What are all the special magic numbers for {named} mentioned in the text above? "
        "Reply with the numbers."
    )


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS)) + "."


MAGIC = Style(
    _draw_magic,
    lambda key, value: f"One of the special magic numbers for {key} is: {value}.",
    _ask_magic,
    "Some special magic numbers are hidden within the following text. Make sure to memorize "
    "them. I will quiz you about the numbers afterwards.\n",
    _sentence,
)


def _draw_facts(rng: random.Random, keys: int, values: int) -> list[tuple[str, list[str]]]:
    pairs = [(n, a) for n in dialogues.NAMES for a in dialogues.ATTRIBUTES]
    return [
        (f"{attribute} of {name}", rng.sample(dialogues.VALUES[attribute], values))
        for name, attribute in rng.sample(pairs, keys)
    ]


# The embedded models' training text: they can answer one value and one question at a time.
FACTS = Style(
    _draw_facts,
    lambda key, value: f"The {key} is {value}.",
    lambda keys: f"What is the {' and the '.join(keys)}?",
    f"{dialogues.OPENINGS[0]} ",
    lambda rng: rng.choice(dialogues.FILLERS),
)
STYLES = {"magic": MAGIC, "facts": FACTS}


def make_item(
    index: int,
    variant: Variant,
    length: int,
    count_tokens: Callable[[Sequence[dict[str, str]]], int],
    *,
    seed: int = 0,
    style: Style = MAGIC,
    text: str | None = None,
) -> Item:
    """Item number ``index``, with as many sentences as fit into ``length`` tokens.

    Args:
        index: The item's number; the same arguments give the same item.
        variant: One of ``VARIANTS``.
        length: The most tokens of the whole prompt.
        count_tokens: Counts the tokens of a chat, template included.
        seed: Another seed gives other items.
        style: The kind of needles.
        text: The haystack to cut sentences from, repeated as needed; generated by default.

    Raises:
        ValueError: The needles alone exceed ``length``.
    """
    rng = random.Random(f"needles/{seed}/{index}")
    drawn = style.draw(rng, variant.keys, variant.values)
    needles = [style.state(key, value) for key, values in drawn for value in values]
    rng.shuffle(needles)
    asked = drawn[: variant.queries]
    question = style.ask([key for key, _ in asked])
    places = sorted(rng.random() for _ in needles)
    sentences = _Sentences(rng, style, text)

    def chat(count: int) -> tuple[dict[str, str], ...]:
        hay = sentences.first(count)
        cuts = [round(place * count) for place in places]
        parts = []
        for needle, start, stop in zip(needles, [0, *cuts], cuts, strict=False):
            parts += [*hay[start:stop], needle]
        body = " ".join([*parts, *hay[cuts[-1] :]])
        return ({"role": "user", "content": f"{style.opening}{body}\n{question}"},)

    shortest = count_tokens(chat(0))
    if shortest > length:
        raise ValueError(f"the needles alone take {shortest} tokens; the length is {length}")
    fits, beyond = 0, 1
    while count_tokens(chat(beyond)) <= length:
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if count_tokens(chat(middle)) <= length:
            fits = middle
        else:
            beyond = middle
    references = tuple(value for _, values in asked for value in values)
    return Item(chat(fits), references, tuple(places))


class _Sentences:
    """An endless haystack, drawn only as far as it is needed."""

    def __init__(self, rng: random.Random, style: Style, text: str | None) -> None:
        self.rng, self.style = rng, style
        self.given = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s] if text else []
        self.start = rng.randrange(len(self.given)) if self.given else 0
        self.drawn: list[str] = []

    def first(self, count: int) -> list[str]:
        while len(self.drawn) < count:
            if self.given:
                self.drawn.append(self.given[(self.start + len(self.drawn)) % len(self.given)])
            else:
                self.drawn.append(self.style.prose(self.rng))
        return self.drawn[:count]


def prose(model: LanguageModel, length: int) -> tuple[int, ...]:
    """Generated sentences, cut to ``length`` tokens."""
    rng = random.Random(length)
    text = " ".join(MAGIC.prose(rng) for _ in range(length))
    return tuple(model.tokenizer.encode(text)[:length])


def recall(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains, ignoring case."""
    folded = answer.casefold()
    return sum(reference.casefold() in folded for reference in references) / len(references)
