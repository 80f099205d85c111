"""The tasks: continuations to predict, facts to recall, needles to find.

A task is a list of items and a way to score one. Items of one group (a length, a kind of record)
are averaged together. A task's mean is over all items; items that share a question count as one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import stream_generate

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.engine.plan import align
from kvlingo_mlx.evaluation import needles
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, native
from kvlingo_mlx.evaluation.continuation import RecallSample, hits_of, recall_sample
from kvlingo_mlx.evaluation.harness.decoding import shared_start
from kvlingo_mlx.evaluation.journal import Scores
from kvlingo_mlx.evaluation.teacher_forcing import per_token, predicted
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.renderings import front, opened
from kvlingo_mlx.tokenization.samples import (
    Sample,
    encode_plain,
    other_tokenizer,
    reasons,
    to_samples,
)

Scorer = Callable[[CacheMaker | None], Scores]


@dataclass(frozen=True)
class Item:
    """One question."""

    name: str  # the item's name within the task
    group: str  # the group in which it is averaged
    # The name shared with items of other groups that ask the same question at another length.
    cluster: str
    # The prefix whose cache the conditions fill, and its continuation if it is known.
    sample: RecallSample
    # The values that an answer should contain, where the target writes it.
    references: tuple[str, ...] = ()
    # The token at which the question begins, where there is one place for that.
    question: int | None = field(default=None, repr=False)  # no part of the fingerprint

    @property
    def prefix(self) -> tuple[int, ...]:
        """The target's token ids."""
        return self.sample.prefix

    @property
    def read(self) -> Prefix:
        """The prefix in the form that conditions take."""
        return self.sample.read


@dataclass(frozen=True)
class Task:
    """A list of items and the way to score them."""

    name: str  # in tables and on the command line
    metrics: tuple[str, ...]  # the scores of an item that tables show, in order
    items: Sequence[Item]
    # Maps the target and an item to a function. That function takes a condition's cache maker (None
    # for the target's own cache) and returns the item's scores.
    scorer: Callable[[LanguageModel, Item], Scorer]
    # All that scores depend on beside the items themselves; JSON-able.
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # remarks that a reader of its tables needs


# ---- a known continuation ---------------------------------------------------------------


def _known(name: str, group: str, sample: RecallSample) -> Item:
    """A prefix with its continuation; every record is a question of its own."""
    return Item(name, group, name, sample)


def _teacher_forced(target: LanguageModel, item: Item) -> Scorer:
    """Score by KL, log loss (alone, and less native), agreement with the target's own first choice,
    and recall.
    """
    sample, continuation = item.sample, item.sample.continuation
    reference = list(predicted(target, native(target), sample))
    own = per_token(reference, reference, continuation)

    def score(make: CacheMaker | None) -> Scores:
        found = own
        if make is not None:
            found = per_token(reference, predicted(target, make, sample), continuation)
        scores = {
            "kl": float(found.kl.mean()),
            "nll": float(found.nll.mean()),
            "gap": float(found.nll.mean() - own.nll.mean()),
            "agreement": float((found.best == own.best).mean()),
            "tokens": len(continuation),
        }
        if sample.recalled:
            hits = hits_of(found, sample)
            scores["recall"] = sum(hits) / len(hits)
        return scores

    return score


def continuation(
    target: LanguageModel,
    records: Sequence[Mapping[str, Any]],
    limit: int,
    context_length: int,
    source_tokenizer: Any = None,
) -> Task:
    """Predict the continuations of held-out conversations, with and without reasoning.

    Args:
        target: The model whose tokenizer and template cut the records.
        records: ``{"messages": [...]}`` or ``{"text": ...}``.
        limit: The most items.
        context_length: The shorter context of the two models.
        source_tokenizer: The source's tokenizer where it differs from the target's.

    Raises:
        ValueError: No record has a continuation.
    """
    items: list[Item] = []
    for number, record in enumerate(records):
        if len(items) == limit:
            break
        for sample in to_samples([record], target.tokenizer, context_length, source_tokenizer):
            if sample.continuation:
                whole = _recall((), sample)
                items.append(_known(str(number), _kind(record), whole))
    if not items:
        raise ValueError("no record of the data has both a prefix that fits and a continuation")
    return Task("continuation", ("kl", "perplexity", "agreement"), items, _teacher_forced)


def windows(
    target: LanguageModel,
    records: Sequence[Mapping[str, Any]],
    limit: int,
    size: tuple[int, int],
    context_length: int,
) -> Task:
    """Predict continuations within windows of plain texts, as the paper does for base models.

    A text is cut into windows that do not overlap, from its first token on; its last tokens are
    left over. Each text gives its first window, then each its second, up to the limit, so that no
    text counts more than it must. Windows of one text are one cluster. Where the tokenizer puts a
    token at a text's beginning, every window's prefix begins with it.

    Args:
        target: The model whose tokenizer cuts the texts; the source must have the same.
        records: ``{"text": ...}``.
        limit: The most windows.
        size: The tokens of a prefix and of its continuation.
        context_length: The shorter context of the two models.

    Raises:
        ValueError: A record is no text, or none is long enough; or the windows do not fit.
    """
    read, predicted = size
    if read + predicted > context_length:
        raise ValueError(
            f"-c window={read}+{predicted} takes {read + predicted} tokens, and the shorter of the "
            f"two contexts has {context_length}; give smaller numbers"
        )
    cut = [(str(number), found) for number, record in enumerate(records)
           if (found := _windows_of(target, record, number, size))]  # fmt: skip
    if not cut:
        raise ValueError(
            f"no text of the data has the {read + predicted} tokens of -c window={read}+{predicted}"
            "; give longer texts, or smaller numbers"
        )
    rounds = range(max(len(found) for _, found in cut))
    items = [
        Item(f"{name}/{index}", "text", name, found[index])
        for index in rounds
        for name, found in cut
        if index < len(found)
    ]
    short = len(records) - len(cut)
    told = f"continuation: {short} of {len(records)} texts are shorter than a window, and left out"
    return Task(
        "continuation",
        ("perplexity", "gap", "kl"),
        items[:limit],
        _teacher_forced,
        {"window": list(size)},
        (told,) if short else (),
    )


def _windows_of(
    target: LanguageModel, record: Mapping[str, Any], number: int, size: tuple[int, int]
) -> list[RecallSample]:
    if not isinstance(record.get("text"), str):
        raise ValueError(
            f"record {number + 1} of the data is a conversation, and window cuts plain texts; "
            'give {"text": ...}, or leave window out'
        )
    begins, text = front(target.tokenizer), record["text"]
    if opened(target.tokenizer, text):
        text = text.removeprefix(target.tokenizer.bos_token)
    bare = encode_plain(target.tokenizer, text)
    room = size[0] - len(begins)
    step = room + size[1]
    return [
        RecallSample((*begins, *bare[at : at + room]), bare[at + room : at + step], ())
        for at in range(0, len(bare) - step + 1, step)
    ]


def _recall(spans: tuple[tuple[int, ...], ...], sample: Sample) -> RecallSample:
    """A sample with the places of the recalled values in its continuation."""
    return RecallSample(sample.prefix, sample.continuation, spans, aligned=sample.aligned)


def marked(
    target: LanguageModel, records: Sequence[Mapping[str, Any]], limit: int, context_length: int
) -> Task:
    """Predict the last replies of conversations in which ``"answers"`` marks recalled text.

    Args:
        target: The model whose tokenizer and template cut the records.
        records: ``{"messages": [...], "answers": ["..."]}``; the last reply contains each answer.
        limit: The most items.
        context_length: The shorter context of the two models.

    Raises:
        ValueError: A record has no answers, or one that its reply does not contain.
    """
    items = []
    for number, record in enumerate(records[:limit], 1):
        for sample in to_samples([record], target.tokenizer, context_length):
            spans = _places(target, sample.continuation, record.get("answers"), number)
            whole = _recall(spans, sample)
            items.append(_known(str(number), "marked", whole))
    if not items:
        raise ValueError("no record of the data has a prefix that fits")
    return Task("marked answers", ("recall", "kl"), items, _teacher_forced)


def _places(
    target: LanguageModel, tokens: Sequence[int], answers: object, number: int
) -> tuple[tuple[int, ...], ...]:
    """The continuation indices of the tokens of each answer's last occurrence."""
    text = target.tokenizer.decode(list(tokens))
    if not isinstance(answers, list) or not answers:
        raise ValueError(
            f'record {number} marks no answers, but others do; give it "answers": ["..."]'
        )
    ends = [len(target.tokenizer.decode(list(tokens[: i + 1]))) for i in range(len(tokens))]
    found = []
    for answer in answers:
        start = text.rfind(answer) if isinstance(answer, str) and answer else -1
        if start < 0:
            raise ValueError(f"record {number}: its last reply does not hold {answer!r:.60}")
        stop = start + len(answer)
        inside = [
            i for i, end in enumerate(ends) if end > start and (ends[i - 1] if i else 0) < stop
        ]
        found.append(tuple(inside))
    return tuple(found)


def _kind(record: Mapping[str, Any]) -> str:
    replies = [m for m in record.get("messages") or () if m["role"] == "assistant"]
    if not replies:
        return "text"
    return "reasoning" if reasons(replies[-1]) else "no reasoning"


def recall(
    target: LanguageModel,
    limit: int,
    seed: int,
    source: LanguageModel | None = None,
    facts: tuple[int, int] | None = None,
) -> Task:
    """Recall facts of generated dialogues; each dialogue asks six questions, each fact once.

    ``source`` is the model that reads them first, if it may have another tokenizer. ``facts`` are
    the fewest and the most that a dialogue states.
    """
    told: dict[str, Any] = {} if facts is None else {"facts": facts}
    items = [
        _known(f"{seed}/{number}", "dialogues", recall_sample(target, talk, source))
        for number, talk in enumerate(dialogues.held_out(limit, seed=seed, **told))
    ]
    return Task("recall", ("recall", "kl"), items, _teacher_forced)


# ---- needles ----------------------------------------------------------------------------


def find_needles(
    target: LanguageModel,
    variants: Sequence[str],
    lengths: Sequence[int],
    limit: int,
    *,
    seed: int = 0,
    style: str = "magic",
    text: str | None = None,
    max_tokens: int = 128,
    thinking: bool = False,
    source: LanguageModel | None = None,
) -> Task:
    """RULER's needles at several lengths; the score is the share of wanted values in the answer.

    Args:
        target: The model whose template and tokenizer determine the lengths.
        variants: Names in ``needles.VARIANTS``.
        lengths: The lengths of whole prompts, in tokens.
        limit: The number of items per variant and length.
        seed: Another seed gives other items.
        style: A name in ``needles.STYLES``.
        text: The haystack; generated sentences by default.
        max_tokens: The most tokens of an answer.
        thinking: The chat template's reasoning switch.
        source: The model that reads the prefix first, if it may have another tokenizer.

    Raises:
        ValueError: An unknown variant or style, or a length that is too short.
    """
    for what, names, known in (
        ("variant", variants, needles.VARIANTS),
        ("style", [style], needles.STYLES),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no needle {what}; known are {', '.join(known)}")

    def count(messages: Sequence[dict[str, str]]) -> int:
        return len(encode(target, list(messages), thinking))

    items = []
    two = source if source and other_tokenizer(source.tokenizer, target.tokenizer) else None
    for length in lengths:
        for variant in variants:
            for index in range(limit):
                item = needles.make_item(
                    index,
                    needles.VARIANTS[variant],
                    length,
                    count,
                    seed=seed,
                    style=needles.STYLES[style],
                    text=text,
                )
                messages = list(item.messages)
                prefix = tuple(encode(target, messages, thinking))
                both = align(two, target, messages, enable_thinking=thinking) if two else None
                question = f"{variant}/{seed}/{index}"
                name, group = f"{question}/{length}", f"{variant}, {length}"
                sample = RecallSample(prefix, (), (), aligned=both)
                asked = shared_start(prefix, encode(target, item.context, thinking))
                items.append(Item(name, group, question, sample, item.references, asked))

    def scorer(target: LanguageModel, item: Item) -> Scorer:
        own = native(target)

        def score(make: CacheMaker | None) -> Scores:
            cache = (make or own)(item.read)
            answer = _answer(target, cache, item.prefix[-1], max_tokens)
            return {"recall": needles.recall(answer, item.references)}

        return score

    return Task("needles", ("recall",), items, scorer, {"max_tokens": max_tokens})


def _answer(target: LanguageModel, cache: list, last: int, max_tokens: int) -> str:
    """The target's greedy answer, without its reasoning trace."""
    responses = stream_generate(
        target.model, target.tokenizer, [last], max_tokens=max_tokens, prompt_cache=cache
    )
    text = "".join(response.text for response in responses)
    return text.rpartition("</think>")[2]


def fingerprint(item: Item) -> str:
    """The sha256 of an item's contents, which keeps scores of different items apart."""
    return hashlib.sha256(repr(item).encode()).hexdigest()


def perplexity(scores: Sequence[Scores]) -> float:
    """The perplexity over all tokens of some items: e to the mean log loss."""
    tokens = sum(s["tokens"] for s in scores)
    return math.exp(sum(s["nll"] * s["tokens"] for s in scores) / tokens)
