"""One entry from end to end: what it needs is made, measured, laid out and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.paper import converted_mla
from benchmarks.paper.reproducing import (
    comparisons,
    curves,
    decoding,
    drawing,
    held_in_turn,
    lengths,
    scores,
    sizes,
    statistics,
    texts,
    times,
)
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.listing import pairs_of, unused
from benchmarks.paper.reproducing.results import Result, keep
from benchmarks.paper.reproducing.stand_ins import LATENTS
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.format.atomic import alone

MAKERS: dict[str, Callable[[Entry, Work], Result]] = {
    "curves": curves.make,
    "lengths": lengths.make,
    "scores": scores.make,
    "statistics": statistics.make,
    "times": times.make,
    "turns": held_in_turn.make,
    "perplexity": texts.make,
    "seeds": comparisons.make,
    "signs": comparisons.make,
}
ON_MLX = {  # what MLX alone measures
    "turns": ("conversations of turns",),
    "perplexity": ("perplexity",),
    "statistics": ("statistics of caches",),
}


def reproduce(entry: Entry, work: Work) -> tuple[Result, Path]:
    """An entry's numbers, and the page that keeps them; what is known already is not made again.

    Raises:
        ValueError: The entry draws or describes something.
        KVLingoError: A model, a translator or data cannot be had, or another process works in the
            same room.
    """
    if entry.maker == "protocol":
        raise ValueError(f"{entry.label} has no numbers to reproduce; {entry.why} describes it")
    pairs = pairs_of(entry)
    work.models.check(entry.label, pairs)
    if any(LATENTS in name for pair in pairs for name in pair):
        converted_mla.register()
    for note in filter(None, map(work.models.stands_in, pairs)):
        work.heard.warn(note)
    work = decoding.with_mlx(replace(work, used={}), ON_MLX.get(entry.maker, ()))
    if not work.tiny and entry.maker not in ("times", "lengths"):
        judge = None if unused([entry], ["judge"]) else work.benchmarks.get("judge")
        for pair in pairs:
            sizes.check_memory(work, pair, judge)
    work.room.mkdir(parents=True, exist_ok=True)
    with alone(work.room):
        result = MAKERS[entry.maker](entry, work)
    page = keep(work, entry, result)
    if entry.kind == "figure":
        try:
            drawing.draw(entry, result, page.with_suffix(".png"))
        except MissingExtraError as error:
            work.heard.warn(f"{entry.label} is not drawn: {error}")
    return result, page
