"""The tasks: continuations to predict, facts to recall, needles to find.

A task is a list of items and a way to score one. Items of one group (a length, a kind of record)
are averaged together. A task's mean is over all items; items that share a question count as one.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import stream_generate

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.engine.plan import align
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.evaluation import needles
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, native
from kvlingo_mlx.evaluation.continuation import RecallSample, comparer, recall_sample
from kvlingo_mlx.evaluation.journal import Scores
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization import samples
from kvlingo_mlx.tokenization.records import Skipped

LENGTHS = (4096, 8192, 16384, 32768)
Scorer = Callable[[CacheMaker | None], Scores]
Records = Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True)
class TaskOptions:
    """The options of our tasks."""

    limit: int = 64  # the most items of a task; for needles, of each variant and length
    seed: int = 0  # the seed of generated items
    data: str | None = None  # a JSONL file for ``continuation``; None uses generated dialogues
    needles: Sequence[str] = ()  # names in ``needles.VARIANTS``
    # The lengths of haystacks in tokens; None uses those of ``LENGTHS`` that fit
    lengths: Sequence[int] | None = None
    style: str = "magic"  # a name in ``needles.STYLES``
    haystack: str | None = None  # the text that hides needles; generated sentences by default
    max_tokens: int = 128  # the most tokens of an answer
    thinking: bool = False  # the chat template's reasoning switch


def make(name: str, source: LanguageModel, target: LanguageModel, options: TaskOptions) -> Task:
    """The task ``continuation``, ``recall`` or ``needles``, with prompts that fit both contexts.

    Raises:
        ValueError: The data hold no usable item, or a haystack does not fit.
    """
    context = min(source.context_length, target.context_length)
    if name == "recall":
        return recall(target, options.limit, options.seed, source)
    if name == "needles":
        lengths = lengths_within(options.lengths, context - options.max_tokens)
        return find_needles(target, lengths, options, source)
    if options.data:
        records: Records = samples.read_jsonl(options.data)
    else:
        found = dialogues.held_out(options.limit, seed=options.seed)
        records = [{"messages": dialogue.conversation()} for dialogue in found]
    other = samples.other_tokenizer(source.tokenizer, target.tokenizer)
    return continuation(target, records, options.limit, context, other)


def fingerprint(item: Item) -> str:
    """The sha256 of an item's contents, which keeps scores of different items apart."""
    return hashlib.sha256(repr(item).encode()).hexdigest()


# ---- a known continuation ---------------------------------------------------------------


def teacher_forced(target: LanguageModel, item: Item) -> Scorer:
    """Score by KL, log loss, agreement with the target's own first choice, and recall."""
    sample, compare = item.sample, comparer(target, item.sample)
    own = compare(None)

    def score(make: CacheMaker | None) -> Scores:
        found = compare(make)
        scores = {
            "kl": float(found.kl.mean()),
            "nll": float(found.nll.mean()),
            "agreement": float((found.best == own.best).mean()),
            "tokens": len(sample.continuation),
        }
        if sample.recalled:
            scores["recall"] = sum(found.hits(sample)) / len(sample.recalled)
        return scores

    return score


def perplexity(scores: Sequence[Scores]) -> float:
    """The perplexity over all tokens of some items: e to the mean log loss."""
    tokens = sum(s["tokens"] for s in scores)
    return math.exp(sum(s["nll"] * s["tokens"] for s in scores) / tokens)


def _known(
    name: str, group: str, sample: samples.Sample, spans: tuple[tuple[int, ...], ...] = ()
) -> Item:
    """A prefix with its continuation; every record is a question of its own."""
    return Item(name, group, name, RecallSample(**vars(sample), recalled=spans))


def continuation(
    target: LanguageModel,
    records: Records,
    limit: int,
    context_length: int,
    source_tokenizer: Any = None,
) -> Task:
    """Predict the continuations of held-out conversations, with and without reasoning.

    Records are ``{"messages": [...]}`` or ``{"text": ...}``. ``source_tokenizer`` is the source's
    where it differs from the target's.

    Raises:
        ValueError: No record has a continuation.
    """
    items, skipped = list[Item](), Skipped()
    for number, record in enumerate(records):
        if len(items) == limit:
            break
        asked = [record], target.tokenizer, context_length, source_tokenizer, number + 1, skipped
        for sample in samples.to_samples(*asked):
            if sample.continuation:
                items.append(_known(str(number), _kind(record), sample))
    told = (str(skipped),) if skipped else ()
    if not items:
        raise ValueError(
            "; ".join(["no record of the data has a prefix that fits and a continuation", *told])
        )
    return Task(
        "continuation", ("kl", "perplexity", "agreement"), items, teacher_forced, notes=told
    )


def _kind(record: Mapping[str, Any]) -> str:
    replies = [m for m in record.get("messages") or () if m["role"] == "assistant"]
    if not replies:
        return "text"
    return "reasoning" if samples.reasons(replies[-1]) else "no reasoning"


def marked(target: LanguageModel, records: Records, limit: int, context_length: int) -> Task:
    """Predict the last replies of conversations in which ``"answers"`` marks recalled text.

    Raises:
        ValueError: A record has no answers, or one that its reply does not contain.
    """
    items, skipped = list[Item](), Skipped()
    for number, record in enumerate(records[:limit], 1):
        asked = [record], target.tokenizer, context_length, None, number, skipped
        for sample in samples.to_samples(*asked):
            spans = _places(target, sample.continuation, record.get("answers"), number)
            items.append(_known(str(number), "marked", sample, spans))
    if not items:
        raise ValueError("no record of the data has a prefix that fits")
    told = (str(skipped),) if skipped else ()
    return Task("marked answers", ("recall", "kl"), items, teacher_forced, notes=told)


def _places(
    target: LanguageModel, tokens: Sequence[int], answers: object, number: int
) -> tuple[tuple[int, ...], ...]:
    """The continuation indices of the tokens of each answer's last occurrence."""
    decode = target.tokenizer.decode
    if not isinstance(answers, list) or not answers:
        raise ValueError(
            f'record {number} marks no answers, but others do; give it "answers": ["..."]'
        )
    text = decode(list(tokens))
    ends = [0, *(len(decode(list(tokens[: i + 1]))) for i in range(len(tokens)))]
    found = []
    for answer in answers:
        start = text.rfind(answer) if isinstance(answer, str) and answer else -1
        if start < 0:
            raise ValueError(f"record {number}: its last reply does not hold {answer!r:.60}")
        stop = start + len(answer)
        inside = (i for i in range(len(tokens)) if ends[i + 1] > start and ends[i] < stop)
        found.append(tuple(inside))
    return tuple(found)


def recall(
    target: LanguageModel, limit: int, seed: int, source: LanguageModel | None = None
) -> Task:
    """Recall facts of generated dialogues; each dialogue asks six questions, each fact once.

    ``source`` is the model that reads them first, if it may have another tokenizer.
    """
    items = [
        Item(f"{seed}/{n}", "dialogues", f"{seed}/{n}", recall_sample(target, dialogue, source))
        for n, dialogue in enumerate(dialogues.held_out(limit, seed=seed))
    ]
    return Task("recall", ("recall", "kl"), items, teacher_forced)


# ---- needles ----------------------------------------------------------------------------


def lengths_within(lengths: Sequence[int] | None, room: int) -> Sequence[int]:
    """The lengths of haystacks that leave room for an answer.

    Raises:
        ValueError: A length that is asked for does not.
    """
    if lengths is None:
        return [length for length in LENGTHS if length <= room] or [room]
    for length in lengths:
        if not 1 <= length <= room:
            raise ValueError(
                f"--lengths holds {length}; give numbers of tokens from 1 to {room}, which is what "
                "the shorter of the two contexts leaves for a prompt"
            )
    return lengths


def find_needles(
    target: LanguageModel,
    lengths: Sequence[int],
    options: TaskOptions,
    source: LanguageModel | None = None,
) -> Task:
    """RULER's needles in prompts of some lengths; the score is the share of wanted values answered.

    ``source`` is the model that reads the prefix first, if it may have another tokenizer.

    Raises:
        ValueError: An unknown variant or style, or a length that is too short.
    """
    for what, names, known in (
        ("variant", options.needles, needles.VARIANTS),
        ("style", [options.style], needles.STYLES),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no needle {what}; known are {', '.join(known)}")
    two = source if source and samples.other_tokenizer(source.tokenizer, target.tokenizer) else None
    items = [
        _needle(target, two, options, length, variant, index)
        for length in lengths
        for variant in options.needles
        for index in range(options.limit)
    ]
    most = options.max_tokens
    scorer = partial(_answer_scorer, most=most)
    return Task("needles", ("recall",), items, scorer, {"max_tokens": most})


def _needle(
    target: LanguageModel,
    source: LanguageModel | None,
    options: TaskOptions,
    length: int,
    variant: str,
    index: int,
) -> Item:
    """One item; ``source`` is given if it has another tokenizer."""

    def tokens(messages: Sequence[dict[str, str]]) -> list[int]:
        return list(encode(target, list(messages), options.thinking))

    made = needles.make_item(
        index,
        needles.VARIANTS[variant],
        length,
        lambda messages: len(tokens(messages)),
        seed=options.seed,
        style=needles.STYLES[options.style],
        text=options.haystack,
    )
    prefix, both = tuple(tokens(made.messages)), None
    if source is not None:
        both = align(source, target, list(made.messages), enable_thinking=options.thinking)
    cluster = f"{variant}/{options.seed}/{index}"
    name, group = f"{cluster}/{length}", f"{variant}, {length}"
    question = common_prefix(prefix, tokens(made.context))
    sample = RecallSample(prefix, (), both)
    return Item(name, group, cluster, sample, made.references, question)


def _answer_scorer(target: LanguageModel, item: Item, most: int) -> Scorer:
    """Score by what the target's greedy answer contains, its reasoning trace left out."""

    def score(make: CacheMaker | None) -> Scores:
        cache = (make or native(target))(item.read)
        last, options = [item.prefix[-1]], {"max_tokens": most, "prompt_cache": cache}
        responses = stream_generate(target.model, target.tokenizer, last, **options)  # type: ignore[arg-type]
        text = "".join(response.text for response in responses)
        return {"recall": needles.recall(text.rpartition("</think>")[2], item.references)}

    return score
