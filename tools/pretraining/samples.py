"""What the tiny models learn from: dialogues whose answers depend on the prefix, and drills."""

from __future__ import annotations

import functools
import pydoc_data.topics
import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from zoo_chats import QWEN, SPECIAL, Chat, train_mistral, train_qwen

from kvlingo_mlx.embedded import dialogues

VOCAB_SIZE = 1024
CONTEXT = 2048
# Mistral's tokenizer sees so few turns that it spells the rarer names: 83 % of the groups of a
# dialogue hold one token of Qwen's and one of its own, as the paper has it for the real pair.
FEW_TURNS = 1000


@dataclass(frozen=True)
class Stage:
    """What samples look like until recall passes ``goal``.

    ``facts`` is the fewest and most per dialogue, None for no dialogues at all;
    ``mixed`` the share of dialogues whose facts are about several attributes;
    ``drills`` the share of samples of random tokens, ``pairs`` that of key-value pairs
    among those, the others being sequences that repeat; ``noise`` the standard deviation
    of what is added to keys and values (:class:`curriculum.NoisyCache`); ``marks`` the most tokens
    between a key and its value; ``copied`` the loss weight of what repeats.

    Of hybrids alone: ``shares`` of the samples lose attention, and either way; ``point`` is the
    weight of the loss that points attention at the told value (:class:`curriculum.Ways`).
    """

    facts: tuple[int, int] | None
    styles: int
    mixed: float
    drills: float
    pairs: float
    look_back: bool
    noise: float
    tokens: int
    goal: float
    marks: int = 3
    copied: float = 1.0
    shares: tuple[float, float] = (0.5, 0.75)
    point: float = 0.0


STAGES = (
    Stage(None, 0, 0.0, 1.0, 0.6, True, 0.0, 1500, 0.6),
    Stage(None, 0, 0.0, 1.0, 0.9, True, 0.0, 1500, 0.75),
    Stage((2, 4), 1, 0.0, 0.3, 0.9, True, 0.3, 2000, 0.9),
    Stage((2, 8), 2, 0.3, 0.2, 0.9, True, 0.5, 3000, 0.9),
    Stage((3, 16), 5, 0.6, 0.1, 0.9, False, 0.6, 3000, 0.9),
    Stage((4, 28), 5, 0.8, 0.1, 0.9, False, 0.6, 3000, 0.9),
)
# Up to 16 facts alone, 70 to 270 tokens, in smaller steps: half the work.
SHORT = (*STAGES[:4], replace(STAGES[4], tokens=2000))
# What keeps an attribute in a hybrid, of each kind of value one or two.
ATTENTION, STATES = 1, 2
KEPT_BY = {"key": ATTENTION, "school": ATTENTION, "hotel": ATTENTION,
           "code": STATES, "home": STATES, "friend": STATES}  # fmt: skip
# Each way in which a hybrid looks back must reach a goal by itself, so goals are lower, and noise
# comes later. One stage of drills is enough, with marks of one token: a state's heads begin at one
# distance each (``Ways``). Naming the last tokens would take the heads that bind.
BY_EACH_WAY = tuple(
    replace(stage, look_back=False, marks=1, copied=0.5, **own)
    for stage, own in zip(
        SHORT[1:],
        (
            dict(pairs=0.7, goal=0.75, shares=(0.45, 0.9), point=0.5),
            dict(pairs=0.9, goal=0.75, noise=0.0, point=0.2),
            dict(pairs=0.9, goal=0.7, noise=0.3, point=0.2),
            dict(pairs=0.9, goal=0.8, noise=0.5),
        ),
        strict=True,
    )
)
PLAIN_SHARE = 0.12
VALUE_WEIGHT, PREFIX_WEIGHT = 4.0, 0.3
PADDING = -1.0
PAIR = "pair"  # what a drill recalls, beside the attributes of dialogues


# ---- tokenizer -----------------------------------------------------------------------


def plain_english() -> str:
    """The Python language reference: about 460 kB of English at hand on any machine."""
    return "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))


def train_tokenizer(chat: Chat = QWEN) -> PreTrainedTokenizerFast:
    """A family's tokenizer over dialogues and plain English."""
    rng = random.Random(0)
    talk = [
        turn["content"]
        for _ in range(4000)
        for turn in dialogues.dialogue(rng, 12, 6).conversation()
    ]
    if chat is QWEN:
        return train_qwen([plain_english(), *talk], VOCAB_SIZE, CONTEXT)
    return train_mistral([plain_english(), *talk[:FEW_TURNS]], VOCAB_SIZE, CONTEXT)


# ---- samples -------------------------------------------------------------------------


@dataclass
class Sample:
    """Token ids, the loss weight of each, and the attribute of those that are recalled values.

    ``asked`` is where questions begin, None where nothing is told before it is asked. ``told_at``
    has, for the place of an asked value, the place where it was told.
    """

    ids: list[int]
    weights: list[float]
    recalled: list[str]
    asked: int | None = None
    told_at: dict[int, int] = field(default_factory=dict)


class Text:
    """A string under construction, with a loss weight and a recalled attribute per character."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float, str]] = []
        self.asked = 0
        self.told_at: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return sum(len(part) for part, _, _ in self.parts)

    def find(self, fact: dialogues.Fact) -> None:
        """Note where the fact was told whose value comes next."""
        whole = "".join(part for part, _, _ in self.parts)[: self.asked]
        for sentence in map(fact.say, dialogues.STATEMENTS):
            if (place := whole.find(sentence)) >= 0:
                behind = sentence.index(fact.name) + len(fact.name)  # a friend may have one's name
                told = place + sentence.index(fact.value, behind)
                self.told_at.append((len(self), told, len(fact.value)))
                return
        raise ValueError(f"nothing tells that {fact.say(dialogues.ANSWER)}")

    def add(self, text: str, weight: float, recalled: str = "") -> None:
        self.parts.append((text, weight, recalled))

    def encode(self, tokenizer: PreTrainedTokenizerFast) -> Sample:
        text = "".join(part for part, _, _ in self.parts)
        weights = [w for part, w, _ in self.parts for _ in part]
        recalled = [r for part, _, r in self.parts for _ in part]
        encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        # A token counts as its last character does: " Lima" ends inside the value.
        ends = [end - 1 for _, end in encoding["offset_mapping"]]
        asked = sum(end < self.asked for end in ends)
        token_at = {end: index for index, end in enumerate(ends)}
        told_at = {
            token_at[first + place]: token_at[told + place]
            for first, told, width in self.told_at
            for place in range(width)
            if first + place in token_at and told + place in token_at
        }
        return Sample(
            encoding["input_ids"], [weights[e] for e in ends], [recalled[e] for e in ends], asked,
            told_at,
        )  # fmt: skip


def chat_sample(
    rng: random.Random,
    tokenizer,
    facts: int,
    questions: int,
    styles: int,
    mixed: float,
    chat: Chat = QWEN,
) -> Sample:
    """A dialogue as the chat template renders it, its answers weighted up.

    Earlier assistant turns are bare or carry the empty think block, since a decoded
    conversation holds either; what follows a bare header is not learnt, so that a
    bare header always means: think first.
    """
    # Facts about one attribute can only be told apart by name. Where attributes mix,
    # a model learns to match those and stays blind to names for a thousand steps.
    alike = facts <= len(dialogues.NAMES) and rng.random() >= mixed
    attributes = (rng.choice(dialogues.ATTRIBUTES),) if alike else dialogues.ATTRIBUTES
    talk = dialogues.dialogue(rng, facts, questions, styles=styles, attributes=attributes)
    text = Text()
    header, opening, closing = chat.assistant
    text.add(chat.start, PREFIX_WEIGHT)
    for turn in talk.messages[:-1]:
        around = chat.user if turn["role"] == "user" else (header + opening, closing + chat.gap)
        text.add(turn["content"].join(around), PREFIX_WEIGHT)
    text.asked = len(text)
    last = len(talk.asked) - 1
    for index, (fact, question) in enumerate(zip(talk.asked, talk.questions, strict=True)):
        text.add(question.join(chat.user), PREFIX_WEIGHT)
        text.add(header, PREFIX_WEIGHT)
        if not chat.thinks:
            text.add(opening, 1.0)
        elif index == last and rng.random() < 0.25:
            text.add(f"<think>\n{fact.say(dialogues.THOUGHT)}\n</think>\n\n", 1.0)
        elif index == last or rng.random() < 0.5:
            text.add("<think>\n\n</think>\n\n", 0.0)
        before, after = fact.say(dialogues.ANSWER).rsplit(fact.value, 1)
        text.add(before[:3], 1.0 if index == last else 0.0)  # "The"
        text.add(before[3:], 1.0)
        text.find(fact)
        text.add(fact.value, VALUE_WEIGHT, recalled=fact.attribute)
        text.add(after + closing, 1.0)
        text.add(chat.gap, PREFIX_WEIGHT)
    return text.encode(tokenizer)


@functools.cache
def content_words(tokenizer) -> list[int]:
    """The tokens that facts are made of. Copying is learnt on these: over the whole
    vocabulary each token would come by too rarely, and copying never appeared."""
    words = [f" {word}" for word in (*dialogues.NAMES, *dialogues.CITIES, *dialogues.LETTERS)]
    words += [*dialogues.NAMES, *dialogues.DIGITS]
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))[0] for word in words]
    return list(dict.fromkeys(ids))  # where a first word always has a space in front, some are one


def copy_sample(rng: random.Random, words: list[int], length: int, weight: float) -> Sample:
    """A random sequence that repeats until ``length``: the quickest way to copying.

    What counts less repeats once: a state that begins anew would learn it from the first repeat.
    """
    period = rng.randint(4, max(5, length // 2))
    block = rng.sample(words, min(period, len(words)))
    period = len(block)
    if weight < 1.0:
        length = min(length, 2 * period)
    ids = (block * (length // period + 1))[:length]
    weights = [0.0] * length
    weights[period + 2 :] = [weight] * len(weights[period + 2 :])  # two tokens tell where we are
    told_at = {place: place - period for place in range(period + 2, length)}
    return Sample(ids, weights, [""] * length, period, told_at)


def pairs_sample(rng: random.Random, words: list[int], length: int, marks: int) -> Sample:
    """Key-value pairs told once and, after some noise, asked in another order.

    A fact is such a pair: a name, a mark ("is", ": ", "has") and a value, among other
    words. Repeating text alone teaches a model to match the word before; this teaches it
    to match the name, across any mark and any distance.
    """
    mark = [rng.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(rng.randint(1, marks))]
    count = min(len(words), max(2, length // (2 * (3 + len(mark)))))
    pairs = [(key, rng.choice(words)) for key in rng.sample(words, count)]
    sample, told = Sample([], [], []), {}

    def add(ids: list[int], weight: float = 0.0) -> None:
        sample.ids.extend(ids)
        sample.weights.extend([weight] * len(ids))
        sample.recalled.extend([PAIR if weight else ""] * len(ids))

    for asked in (0.0, 1.0):
        sample.asked = len(sample.ids)
        rng.shuffle(pairs)
        for key, value in pairs:
            add([key, *mark])
            if asked:
                sample.told_at[len(sample.ids)] = told[key]
            told[key] = len(sample.ids)
            add([value], asked)
            add(_noise(rng, 2))
        add(_noise(rng, length // 2))
    return sample


def _noise(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(rng.randint(0, most))]


def plain_sample(rng: random.Random, corpus: np.ndarray, length: int) -> Sample:
    start = rng.randrange(len(corpus) - length)
    return Sample(corpus[start : start + length].tolist(), [1.0] * length, [""] * length)


def draw_batch(rng, tokenizer, corpus, stage: Stage, chat: Chat = QWEN) -> dict[str, torch.Tensor]:
    """One step's samples, right-padded."""
    words = content_words(tokenizer)
    facts = rng.randint(*stage.facts) if stage.facts else 0
    questions = rng.randint(1, 8)  # one number for the whole batch, so little is padding
    length = rng.randint(32, 128)
    samples: list[Sample] = []
    while sum(len(s.ids) for s in samples) < stage.tokens:
        draw = rng.random() if samples or not facts else 1.0  # a dialogue sets the length
        if draw < stage.drills:
            if rng.random() < stage.pairs:
                samples.append(pairs_sample(rng, words, length, stage.marks))
            else:
                samples.append(copy_sample(rng, words, length, stage.copied))
        elif draw < stage.drills + PLAIN_SHARE:
            samples.append(plain_sample(rng, corpus, length))
        else:
            talk = chat_sample(rng, tokenizer, facts, questions, stage.styles, stage.mixed, chat)
            samples.append(talk)
            length = len(talk.ids)
    width = max(len(s.ids) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    weights = torch.full((len(samples), width), PADDING)
    recalled = torch.zeros(len(samples), width, dtype=torch.bool)
    kept_by = torch.zeros(len(samples), width, dtype=torch.long)
    asked = torch.full((len(samples),), -1)
    told_at = torch.full((len(samples), width), -1)
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        ids[row, :n] = torch.tensor(sample.ids)
        weights[row, :n] = torch.tensor(sample.weights)
        if facts:
            marks = [mark not in ("", PAIR) for mark in sample.recalled]
        else:  # of drills, all that counts fully
            marks = [weight >= 1.0 for weight in sample.weights]
        recalled[row, :n] = torch.tensor(marks)
        for place, told in sample.told_at.items():
            told_at[row, place] = told
        kept_by[row, :n] = torch.tensor([KEPT_BY.get(a, 0) for a in sample.recalled])
        asked[row] = -1 if sample.asked is None else sample.asked
    return {
        "ids": ids, "weights": weights, "recalled": recalled, "kept_by": kept_by, "asked": asked,
        "told_at": told_at,
    }  # fmt: skip
