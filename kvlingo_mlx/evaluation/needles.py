"""Needles in a haystack, as in RULER, generated offline (appendix "Evaluation data").

A prompt hides short statements among unrelated sentences, and asks for some of them. The score is
the share of the wanted values that the answer contains.
"""

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvlingo_mlx.embedded import dialogues

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
class NeedleItem:
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
    state: str  # a key and one of its values as a sentence
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


MAGIC = Style(
    _draw_magic,
    "One of the special magic numbers for {key} is: {value}.",
    _ask_magic,
    "Some special magic numbers are hidden within the following text. Make sure to memorize "
    "them. I will quiz you about the numbers afterwards.\n",
    lambda rng: " ".join(map(rng.choice, (SUBJECTS, VERBS, OBJECTS, ENDINGS))) + ".",
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
    "The {key} is {value}.",
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
) -> NeedleItem:
    """Item number ``index``: as many sentences as fit into a whole prompt of ``length`` tokens.

    ``count_tokens`` counts those of a chat, template included. ``text`` is the haystack to cut
    sentences from, repeated as needed; generated by default. The same arguments give the same item.

    Raises:
        ValueError: The needles alone exceed ``length``.
    """
    rng = random.Random(f"needles/{seed}/{index}")
    drawn = style.draw(rng, variant.keys, variant.values)
    needles = [style.state.format(key=k, value=v) for k, values in drawn for v in values]
    rng.shuffle(needles)
    asked = drawn[: variant.queries]
    question = style.ask([key for key, _ in asked])
    places = sorted(rng.random() for _ in needles)
    sentences, hay = _sentences(rng, style, text), list[str]()

    def chat(count: int) -> tuple[dict[str, str], ...]:
        hay.extend(itertools.islice(sentences, max(0, count - len(hay))))
        cuts = [*(round(place * count) for place in places), count]
        parts = hay[: cuts[0]]
        for needle, (start, stop) in zip(needles, itertools.pairwise(cuts), strict=True):
            parts += [needle, *hay[start:stop]]
        return ({"role": "user", "content": f"{style.opening}{' '.join(parts)}\n{question}"},)

    def is_long(count: int) -> bool:
        return count_tokens(chat(count)) > length

    if is_long(0):
        shortest = count_tokens(chat(0))
        raise ValueError(f"the needles alone take {shortest} tokens; the length is {length}")
    beyond = 1
    while not is_long(beyond):
        beyond *= 2
    fits = bisect.bisect_left(range(beyond), True, lo=beyond // 2, key=is_long) - 1
    references = tuple(value for _, values in asked for value in values)
    return NeedleItem(chat(fits), references, tuple(places))


def _sentences(rng: random.Random, style: Style, text: str | None) -> Iterator[str]:
    """An endless haystack, drawn only as far as it is needed."""
    given = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s] if text else []
    if given:
        start = rng.randrange(len(given))
        return itertools.cycle([*given[start:], *given[:start]])
    return (style.prose(rng) for _ in itertools.count())


def recall(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains, ignoring case."""
    folded = answer.casefold()
    return sum(reference.casefold() in folded for reference in references) / len(references)
