"""Continuations within windows of plain texts, by which the paper measures base models."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvlingo_mlx.evaluation import compare, lineup
from kvlingo_mlx.evaluation.compare import Outcome, Scored, evaluate
from kvlingo_mlx.evaluation.conditions import CacheMaker
from kvlingo_mlx.evaluation.continuation import RecallSample
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.evaluation.journal import Journal, Scores
from kvlingo_mlx.evaluation.probes import Item, Records, Scorer, Task, teacher_forced
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization import samples
from kvlingo_mlx.tokenization.renderings import front, opened


def task(
    source: LanguageModel, target: LanguageModel, data: str, limit: int, size: tuple[int, int]
) -> Task:
    """The windows of a file's texts; with one tokenizer, which cuts them."""
    check_tokenizers(source, target, "window cuts by one tokenizer; leave it out")
    context = min(source.context_length, target.context_length)
    return windows(target, samples.read_jsonl(data), limit, size, context)


def windows(
    target: LanguageModel, records: Records, limit: int, size: tuple[int, int], context_length: int
) -> Task:
    """Predict continuations within windows of plain texts, as the paper does for base models.

    Each ``{"text": ...}`` is cut into windows that do not overlap, of ``size`` tokens of prefix and
    of continuation, from its first token on. Each text gives its first window, then each its
    second, so that no text counts more than it must. Windows of one text are one cluster. Where the
    tokenizer puts a token at a text's beginning, every window's prefix begins with it.

    Raises:
        ValueError: A record is no text, or none is long enough; or the windows do not fit.
    """
    whole, asked = sum(size), f"--window {size[0]}+{size[1]}"
    if whole > context_length:
        raise ValueError(
            f"{asked} takes {whole} tokens, and the shorter of the two contexts has "
            f"{context_length}; give smaller numbers"
        )
    cut = [(str(n), found) for n, record in enumerate(records)
           if (found := _windows_of(target, record, n, size))]  # fmt: skip
    if not cut:
        raise ValueError(
            f"no text of the data has the {whole} tokens of {asked}; give longer texts, or smaller "
            "numbers"
        )
    every = ((n, name, one) for name, found in cut for n, one in enumerate(found))
    rounds = sorted(every, key=lambda each: each[0])  # stable: each text's first window, then ...
    items = [Item(f"{name}/{n}", "text", name, one) for n, name, one in rounds]
    short = len(records) - len(cut)
    note = f"continuation: {short} of {len(records)} texts are shorter than a window, and left out"
    return Task(
        "continuation",
        ("perplexity", "gap", "kl"),
        items[:limit],
        beside_native,
        {"window": list(size)},
        (note,) if short else (),
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
    bare = samples.encode_plain(target.tokenizer, text)
    room = size[0] - len(begins)
    step = room + size[1]
    return [
        RecallSample((*begins, *bare[at : at + room]), bare[at + room : at + step])
        for at in range(0, len(bare) - step + 1, step)
    ]


def beside_native(target: LanguageModel, item: Item) -> Scorer:
    """The package's scores, and ``gap``: the log loss less that of the target's own cache."""
    score = teacher_forced(target, item)
    own = score(None)["nll"]

    def more(make: CacheMaker | None) -> Scores:
        found = score(make)
        return {**found, "gap": found["nll"] - own}

    return more


def outcome(task: Task, scored: Mapping[str, list[Scored]]) -> Outcome:
    """The package's, whose ``gap`` is over all tokens: the logarithm of the perplexities' ratio."""
    found = compare.outcome(task, scored)
    for name, items in scored.items():
        found.tables[name]["text"]["gap"] = _gap([s.scores for s in items], items)
        for number, table in enumerate(found.seeds.get(name, ())):
            table["text"]["gap"] = _gap([s.seeds[number] for s in items], items)
    return found


def _gap(scores: Sequence[Scores], items: Sequence[Scored]) -> Mean:
    means, tokens = ([each[name] for each in scores] for name in ("gap", "tokens"))
    return over_tokens(means, tokens, [item.cluster for item in items])


def over_tokens(
    means: Sequence[float], tokens: Sequence[float], clusters: Sequence[Hashable]
) -> Mean:
    """The mean over all tokens of items, whose errors are correlated within a cluster.

    ``means`` are the items' own means over their ``tokens``. The error is that of a ratio of
    clusters' sums (linearised); with one item of equal length per cluster it is that of
    ``over_items``.
    """
    values, weights = np.asarray(means, np.float64), np.asarray(tokens, np.float64)
    if not values.size:
        raise ValueError("there are no scores to average")
    value = float((weights * values).sum() / weights.sum())
    sums: dict[Hashable, float] = {}
    for left, cluster in zip(weights * (values - value), clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + float(left)
    count = len(sums)
    square = count / (count - 1) * sum(s**2 for s in sums.values()) if count > 1 else math.nan
    return Mean(value, math.sqrt(square) / float(weights.sum()), count)


def alone(
    source: LanguageModel, task: Task, native: Sequence[Scored], journal: Journal
) -> list[Scored]:
    """The log loss of a source with the same tokenizer, beside that of the target's own cache."""
    condition = lineup.native(source)
    found = evaluate(source, [task], [condition], journal)[task.name][condition.name]
    scored = []
    for own, theirs in zip(found, native, strict=True):
        scores = {name: own.scores[name] for name in ("nll", "tokens")}
        scores["gap"] = own.scores["nll"] - theirs.scores["nll"]
        scored.append(replace(own, scores=scores))
    return scored
