"""The figure on prefix lengths of the training mixture."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.trained import english
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.errors import MissingModelError
from kvlingo_mlx.tokenization.samples import other_tokenizer
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.data import Stream

SAMPLES = 240  # of the paper's probe
Bin = tuple[int, int, int, int]


def make(entry: Entry, work: Work) -> Result:
    """Counts of prefix lengths, by whether the answer reasons (figure "prefixhist")."""
    source, target = work.models.pair(entry.pairs[0])
    asked = command_line.Options(
        source=source,
        target=target,
        data=work.training_data(),
        device=work.device,
        seed=entry.seeds[0],
        max_prefix=work.size.max_prefix,
        accepts=english(work),
    )
    (read, theirs), (written, tokenizer) = (_facts(asked.place, n) for n in (source, target))
    other = other_tokenizer(theirs, tokenizer)
    stream = asked.stream(tokenizer, min(read, written), SAMPLES, other)
    lines = [
        Line((f"{low} to {high - 1}",), (float(reasoning), float(without)))
        for low, high, reasoning, without in prefix_histogram(stream, SAMPLES)
    ]
    columns = ("with reasoning", "without")
    return Result(("tokens",), columns, tuple(lines), (str(stream.survey),))


def _facts(place: str, name: str) -> tuple[int, Any]:
    """A model's context in tokens, and its tokenizer, without its weights."""
    if place == "mlx":
        from kvlingo_mlx.loading.models import load

        model = load(name, lazy=True)
        return model.context_length, model.tokenizer
    from kvlingo_mlx.cuda.model import read_config
    from kvlingo_mlx.loading.hub import SMALL_FILES, resolve

    path, _ = resolve(name, None, SMALL_FILES, MissingModelError)
    config, tokenizer = read_config(name, path)
    # A Gemma may leave it to transformers.
    return config.get("max_position_embeddings", 131_072), tokenizer


def prefix_histogram(stream: Stream, count: int = 240, bins: int = 12) -> list[Bin]:
    """Prefix lengths of the first ``count`` samples, in bins of equal logarithmic width.

    Returns:
        For each bin its shortest length (tokens), its exclusive upper bound, and the number of
        samples with a reasoning trace and without (figure "prefixhist").
    """
    draws = [stream.draw(index) for index in range(count)]
    if not draws:
        return []
    lengths = np.array([len(draw.sample.prefix) for draw in draws])
    reasoning = np.array([draw.reasoning for draw in draws])
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(int))
    on, off = (np.histogram(lengths[kept], edges)[0] for kept in (reasoning, ~reasoning))
    columns = (edges[:-1], edges[1:], on, off)
    return [(a, b, c, d) for a, b, c, d in zip(*(x.tolist() for x in columns), strict=True)]
