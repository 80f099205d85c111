"""Entries that are measured on two models' caches alone: R2, CKA, ranks, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.analysis.corpus import Corpus
from benchmarks.paper.analysis.report import Report, Settings, analyze
from benchmarks.paper.analysis.states import collect
from benchmarks.paper.analysis.statistics import r2
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.models import made_by
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.tables import (
    LARGE_TO_SMALL,
    SMALL_TO_LARGE,
    WAYS,
    Pair,
    meaning,
    tables,
)
from benchmarks.paper.reproducing.trained import english
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.tokenization.records import open_source
from kvlingo_mlx.training import command_line

# Paragraph "Protocol": 512 documents of 256 tokens. A tiny run reads fewer.
DOCUMENTS, TOKENS = 512, 512 * 256
# Figures "cka": keys behind their norm, 16k tokens.
CKA = {"cka": True, "capture": "post_norm", "documents": 64, "tokens": 64 * 256}
TINY_SIZE = {"documents": 24, "tokens": 24 * 128, "epochs": 2, "hidden": 16}
PREFIXES, PREFIX = 16, 1024  # held-out prefixes of table "cachedist", and their most tokens
SIDE_OF = {"K": "keys", "V": "values"}
SCRATCH = "-scratch"  # in names of models without a chat template


def report_of(work: Work, pair: Pair, way: str, **asked: Any) -> Report:
    """What two models' caches have in common, in one direction; ``asked`` are settings."""
    ends = work.models.pair(pair)
    source, target = load_pair(*(ends if way == SMALL_TO_LARGE else ends[::-1]))
    size = {"documents": DOCUMENTS, "tokens": TOKENS, "cka": False, "mlp": False, "heads": False}
    settings = Settings(**(size | asked | (TINY_SIZE if work.tiny else {})))
    work.heard.progress(f"reading {source.name} and {target.name}")
    read = records(work, settings.documents, plain=SCRATCH in pair[0])
    return analyze(source, target, read, settings)


def records(work: Work, count: int, plain: bool = False) -> Iterator[Mapping[str, Any]]:
    """The first records of the training data, and some more, since some are of no use."""
    for name in work.training_data(plain):
        source, _ = open_source(name)
        records = (source.read(row)[0] for row in range(min(len(source.sizes), 4 * count)))
        yield from filter(None, records)


def keys_r2(work: Work, pair: Pair, way: str, folder: Path) -> float:
    """The mean R2 of a translator's own maps of keys, on prefixes held out of its training."""
    ends = work.models.pair(pair)
    source, target = load_pair(*(ends if way == SMALL_TO_LARGE else ends[::-1]))
    config, weights = translator_folder.read(folder)
    options = command_line.Options(
        source="", target="", data=work.training_data(), device="mlx", seed=42,
        max_prefix=work.size.max_prefix, accepts=english(work),
    )  # fmt: skip
    context = min(source.context_length, target.context_length)
    held_out = options.stream(target.tokenizer, context, PREFIXES).held_out(PREFIXES)
    corpus = Corpus(tuple(sample.prefix[:PREFIX] for sample in held_out), frozenset())
    read, wanted = (collect(m, corpus, str(config.capture)).keys for m in (source, target))
    found = []
    for layer, (reads, *_) in enumerate(config.assignment.keys):
        y = wanted[layer]
        made = read[reads] @ weights.arrays[f"keys.{layer}.weight"].T
        found.append(r2(made, y, y.mean(axis=0, dtype=np.float64)))
    return float(np.mean(found))


def make(entry: Entry, work: Work) -> Result:
    """The result of an entry of statistics; of pairs that nobody released, those that are here."""
    here = (pair for pair in entry.extra["made"] if not work.models.lacks(pair))
    entry = replace(entry, pairs=(*entry.pairs, *here))
    return MAKERS[entry.extra["statistic"]](entry, work)


# ---- tables -----------------------------------------------------------------------------------


def _linearity(entry: Entry, work: Work) -> Result:
    """Tables "linearity" and "affine": a row for each pair, way and side."""
    table = tables()[entry.label]
    affine = entry.extra["statistic"] == "affine"
    reports: dict[tuple[Pair, str], Report] = {}
    lines = []
    for row in range(len(table.rows)):
        names = [name for name in table.names(row) if name]
        said = meaning(names)
        if said["pair"] not in entry.pairs:
            continue
        key = said["pair"], said.get("way", LARGE_TO_SMALL)
        if key not in reports:
            reports[key] = report_of(work, *key, mlp=not affine)
        m = reports[key].summary[SIDE_OF[names[-1]]]
        numbers = (m.linear, m.affine) if affine else (m.linear, m.mlp, m.extra, m.rho)
        lines.append(Line(tuple(names), numbers, table.values(row)))
    return Result(table.columns[: table.labels], table.columns[table.labels :], tuple(lines))


def _rank(entry: Entry, work: Work) -> Result:
    """Table "erank": the models of each pair, trained and with random weights.

    Effective ranks of the first, the middle and the last layer, and the top direction's shares of
    variance in the first and the last, each as one text, as in the paper. It does not say whether
    it means keys, as here, or values; each is 1024 wide there.
    """
    table = tables()[entry.label]
    places = {table.names(row)[-1]: row for row in range(len(table.rows))}
    lines = []
    for pair in entry.pairs:
        made = made_by(pair[0]) != ""
        for random_init in (False,) if made else (False, True):
            report = report_of(work, pair, SMALL_TO_LARGE, random_init=random_init)
            for model, end in zip(pair, ("source", "target"), strict=True):
                shape = f"from-scratch {model.split('-')[1]}" if made else model
                name = f"{shape}, {'random init' if random_init else 'trained'}"
                layers = report.rank[end]["keys"]
                first, middle, last = layers[0], layers[len(layers) // 2], layers[-1]
                ranks = " → ".join(f"{layer.effective:.0f}" for layer in (first, middle, last))
                shares = " → ".join(f"{layer.top_share:.2f}" for layer in (first, last))
                paper = table.values(places[name]) if name in places else ()
                lines.append(Line((name,), (ranks, shares), paper))
    return Result(table.columns[:1], table.columns[1:], tuple(lines))


# ---- figures ----------------------------------------------------------------------------------


def _grids(entry: Entry, work: Work) -> Result:
    """Figure "cka": how alike each target layer's keys are to each source layer's, by pair."""
    lines: list[Line] = []
    for pair in entry.pairs:
        grid = report_of(work, pair, SMALL_TO_LARGE, **CKA).cka["keys"].cka
        lines += [Line((_named(pair), str(at)), tuple(row)) for at, row in enumerate(grid.tolist())]
    widest = max(len(line.values) for line in lines)
    padded = [(*line.values, *[None] * (widest - len(line.values))) for line in lines]
    whole = (Line(line.names, row) for line, row in zip(lines, padded, strict=True))
    return Result(("pair", "target layer"), tuple(map(str, range(widest))), tuple(whole))


def _by_pair(
    columns: tuple[str, ...], numbers: Callable[[Report], Sequence[float]], **asked: Any
) -> Callable[[Entry, Work], Result]:
    """A maker of a row for each pair and way."""

    def rows(entry: Entry, work: Work) -> Result:
        models = [(pair, False) for pair in entry.pairs]
        models += [(pair, True) for pair in entry.extra.get("random", ())]
        lines = [
            Line(
                (_named(pair) + ", random weights" * null, way),
                tuple(numbers(report_of(work, pair, way, **asked, random_init=null))),
            )
            for pair, null in models
            for way in WAYS
        ]
        return Result(("pair", "way"), columns, tuple(lines))

    return rows


def _contrast(report: Report) -> tuple[float, float]:
    """The diagonal contrast of keys, and how far a row's largest entry is from the diagonal."""
    summary = report.cka["keys"].summary
    return summary.contrast, summary.offset


def _heads(report: Report) -> list[float]:
    """The mean diagonals of the keys' and the values' grid of heads."""
    if not report.heads:
        raise ValueError(f"no head alignment: {'; '.join(report.notes) or 'not run'}")
    return [report.heads[side].diagonal for side in SIDES]


def _named(pair: Pair) -> str:
    return f"{pair[0]} and {pair[1]}"


MAKERS: dict[str, Callable[[Entry, Work], Result]] = {
    "linearity": _linearity,
    "affine": _linearity,
    "rank": _rank,
    "cka": _grids,
    "contrast": _by_pair(("contrast", "offset"), _contrast, **CKA),
    "heads": _by_pair(("share of keys", "share of values"), _heads, heads=True),
}
