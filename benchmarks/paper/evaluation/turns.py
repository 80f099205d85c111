"""Conversations in which two models answer by turns (appendix "Multi-turn cache translation").

A benchmark's conversation is a :class:`Talk`: questions that the models answer in turn, each with
its reference answers, or a history that was written before, after which one answer is asked for.
A :class:`Way` is how the two take over from one another: by alternated translation, by naive
translation, by a full re-prefill, or not at all, where one model answers alone. Answers are decoded
greedily and stay in the conversation, right or wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.paper.evaluation.naive import NaiveConversation
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation.conditions import shuffled
from kvlingo_mlx.loading.pairing import matches
from kvlingo_mlx.loading.translators import load_translator, resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, encode
from kvlingo_mlx.threads import finished
from kvlingo_mlx.translators.base import Translator

Models = Mapping[str, LanguageModel]
Directions = tuple[Translator, ...]  # a translator for each of the two directions
CONTROLS = ("hidden", "shuffled")
UNLIKELY = "\N{SNOWMAN}"  # no user's message begins with it


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        messages: The new messages, of which the last is the user's.
        bare: The same without the text that the conversation is about; empty if there is none.
        references: Answers to compare with.
        written: The answer, where it is given and not generated.
    """

    messages: tuple[Message, ...]
    bare: tuple[Message, ...] = ()
    references: tuple[str, ...] = ()
    written: str | None = None


@dataclass(frozen=True)
class Talk:
    """A conversation to be held.

    Attributes:
        name: Its name in the data.
        turns: The turns. Those that are written come before those to be answered.
        judge: What a judge is asked of the last answer, as in :mod:`.harness.judge`.
    """

    name: str
    turns: tuple[Turn, ...]
    judge: Mapping[str, Any] | None = None

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The turns whose answers are generated."""
        return tuple(turn for turn in self.turns if turn.written is None)

    def messages(self, turns: int) -> list[Message]:
        """All messages of the first turns, with those of their answers that are written."""
        said: list[Message] = []
        for turn in self.turns[:turns]:
            said += turn.messages
            if turn.written is not None:
                said.append({"role": "assistant", "content": turn.written})
        return said


@dataclass(frozen=True)
class Way:
    """One way to take over at every turn.

    Attributes:
        name: The name in tables.
        switching: As for :class:`~kvlingo_mlx.engine.conversation.Conversation`; or ``naive``.
        seeds: The translators of both directions, once for each seed; scores are averaged.
        alone: The one model that answers every turn.
        hidden: Whether the conversation's text is left out.
        once: The first model answers every turn; the second one's answers, at even turns, are those
            that it gives on a branch, after the first switch of the conversation.
    """

    name: str
    switching: str = "reprefill"
    seeds: tuple[Directions, ...] = ((),)
    alone: str | None = None
    hidden: bool = False
    once: bool = False

    def identity(self, seed: int) -> dict[str, Any]:
        """All that its answers depend on beside the models and the conversation."""
        facts = asdict(replace(self, name="", seeds=(), alone=None))
        return facts | {"translators": [[t.digest, t.bits] for t in self.seeds[seed]]}


@dataclass(frozen=True)
class Manner:
    """How every answer is given.

    Attributes:
        max_tokens: The most tokens of an answer.
        thinking: The chat template's reasoning switch; a trace is no part of an answer.
        native_layers: Cache layers that the incoming model reads itself, unless naive.
        verbatim: As for :class:`~kvlingo_mlx.engine.conversation.Conversation`.
        allow_mismatch: Likewise.
    """

    max_tokens: int = 128
    thinking: bool = False
    native_layers: int | str | None = None
    verbatim: bool = True
    allow_mismatch: bool = False


# ---- what is compared ------------------------------------------------------------------------


def names_of(models: Sequence[LanguageModel]) -> dict[str, LanguageModel]:
    """The two models by short names, which differ."""
    short = [model.name.rstrip("/").rsplit("/", 1)[-1] for model in models]
    if len(set(short)) < len(short):
        short = [f"{letter}: {name}" for letter, name in zip("AB", short, strict=True)]
    return dict(zip(short, models, strict=True))


def directed(
    places: Sequence[str | None],
    models: Sequence[LanguageModel],
    bits: int | None = None,
    *,
    allow_mismatch: bool = False,
) -> tuple[Directions, ...]:
    """The translators of both directions, one pair of them for each seed.

    Args:
        places: Folders or Hub ids of either direction, in the order of their seeds; None stands
            for the local store's translators of both directions.
        models: The two models.
        bits: The bits of the translators' weights.
        allow_mismatch: Whether translators may be made for other checkpoints.

    Raises:
        IncompatibleTranslatorError: A translator is for other models.
        ValueError: One direction has more translators than the other.
    """
    match: dict[str, Any] = {"allow_mismatch": allow_mismatch}
    ways = list(itertools.permutations(models))
    found: list[list[Translator]] = [[], []]
    for place in places:
        if place is None:
            for side, ends in zip(found, ways, strict=True):
                side.append(resolve_translator(None, *ends, quantize=bits, **match))
            continue
        translator = load_translator(place, quantize=bits)
        config = translator.config
        fits = [
            matches(config.source, a, **match) and matches(config.target, b, **match)
            for a, b in ways
        ]
        if not any(fits):
            raise IncompatibleTranslatorError(
                f"{place} translates from {config.source.name} to {config.target.name}, which "
                f"are not {' and '.join(model.name for model in models)}, in either order"
            )
        for side, fit in zip(found, fits, strict=True):
            side += [translator] if fit else []
    if len(found[0]) != len(found[1]):
        counts = (f"{len(side)} from {a.name} to {b.name}"
                  for side, (a, b) in zip(found, ways, strict=True))  # fmt: skip
        raise ValueError(
            f"conversations need a translator of each direction, and there are "
            f"{' and '.join(counts)}; give as many of both"
        )
    return tuple(zip(*found, strict=True))


def ways_of(
    models: Models,
    named: Mapping[str, Sequence[Directions]],
    controls: Sequence[str] = CONTROLS,
    manner: Manner = Manner(),
) -> tuple[list[Way], list[str]]:
    """What the paper compares, with each model alone and controls; and why some way is left out.

    ``named`` has the translators of each method. ``controls`` are of the first method, alternated:
    ``hidden`` leaves the conversation's text out, ``shuffled`` has every map at a wrong layer.
    """
    ways = [Way("re-prefill")]
    for switching, (name, seeds) in itertools.product(("alternated", "naive"), named.items()):
        label = switching if len(named) == 1 else f"{name}: {switching}"
        ways.append(Way(label, switching, tuple(seeds)))
    first = next(iter(named.values()), ())
    if "hidden" in controls:
        ways.append(Way("text hidden", "alternated", tuple(first[:1]), hidden=True))
    if "shuffled" in controls:
        wrong = tuple(shuffled(translator) for translator in first[0])
        ways.append(Way("shuffled", "alternated", (wrong,)))
    ways += [Way(f"{name} alone", alone=name) for name in models]
    refused = {way.name: said for way in ways if (said := _refused(models, way, manner))}
    notes = [f"{name} is left out: {said}" for name, said in refused.items()]
    return [way for way in ways if way.name not in refused], notes


def _refused(models: Models, way: Way, manner: Manner) -> str:
    """Why these models cannot take over naively; empty for what they can do."""
    try:
        for seed in range(len(way.seeds)):
            with begun(models, way, manner, seed):
                pass
    except (ValueError, IncompatibleTranslatorError) as error:
        if way.switching != "naive":
            raise
        return str(error)
    return ""


# ---- one conversation ------------------------------------------------------------------------


def begun(
    models: Models, way: Way, manner: Manner, seed: int = 0
) -> Conversation | NaiveConversation:
    """An empty conversation; not eager, since answers do not depend on when one translates."""
    shared: dict[str, Any] = {"enable_thinking": manner.thinking, "verbatim": manner.verbatim}
    if way.alone is not None:
        return Conversation({way.alone: models[way.alone]}, **shared)
    if way.switching == "naive":
        return NaiveConversation(models, way.seeds[seed], **shared)
    return Conversation(
        models,
        way.seeds[seed],
        switching=way.switching,
        eager=False,
        native_layers=manner.native_layers,
        allow_mismatch=manner.allow_mismatch,
        **shared,
    )


def answers(
    models: Models, way: Way, talk: Talk, order: Sequence[str], manner: Manner, seed: int = 0
) -> list[str]:
    """The answers of a conversation in which the models of ``order`` take turns.

    Who answers a turn also writes the line's span of a turn that is given: both come from the
    turn's number, so that the caches divide a written history as they would one of their own.
    """
    names = order if way.alone is None else [way.alone]
    said: list[str] = []
    with begun(models, way, manner, seed) as conversation:
        written = [] if way.hidden else _listened(conversation, models, talk, names, manner)
        for number, turn in enumerate(talk.turns):
            if turn.written is not None:
                continue
            new = list((way.hidden and turn.bare) or turn.messages)
            asked, name = conversation, names[number % len(names)]
            if way.once and number % len(names):
                assert isinstance(conversation, Conversation)
                asked = conversation.branch()
                conversation.reply(names[0], new, max_tokens=manner.max_tokens)
            answer = asked.reply(name, [*written, *new], max_tokens=manner.max_tokens)
            end = models[name].tokenizer.think_end
            said.append(answer.rpartition(end)[2] if end else answer)
            written = []
    return said


def _listened(
    conversation: Conversation | NaiveConversation,
    models: Models,
    talk: Talk,
    names: Sequence[str],
    manner: Manner,
) -> list[Message]:
    """The messages of the written turns, of which each model has read its own, in the lines.

    Every way reads the same tokens: those of the prompt of the first question that is asked.
    """
    turns = len(talk.turns) - len(talk.asked)
    if not turns:
        return []
    switch = {"enable_thinking": manner.thinking}
    tokens = encode(models[names[0]], talk.messages(turns + 1), **switch)
    for number in range(turns):
        name = names[number % len(names)]
        following = [*talk.messages(number + 1), {"role": "user", "content": UNLIKELY}]
        read = tokens[: common_prefix(tokens, encode(models[name], following, **switch))]
        if isinstance(conversation, NaiveConversation):
            conversation.bring(name, read)
        else:
            finished(conversation.exchange.bring(name, read))
    return talk.messages(turns)
