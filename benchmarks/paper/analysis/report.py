"""The whole analysis of a pair: from two models and records to one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

import numpy as np

from benchmarks.paper.analysis import corpus as texts
from benchmarks.paper.analysis.corpus import Corpus
from benchmarks.paper.analysis.linearity import LayerFit, Summary, fit_layer, summarise
from benchmarks.paper.analysis.network import Recipe
from benchmarks.paper.analysis.random_init import randomly_initialised
from benchmarks.paper.analysis.states import States, check_memory, collect
from benchmarks.paper.analysis.statistics import (
    Correspondence,
    HeadAlignment,
    cka_grid,
    correspondence,
    effective_rank,
    head_alignment,
    spectrum,
    top_share,
)
from kvlingo_mlx.format.assignment import by_depth, relative_depth
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.translator_config import CAPTURES, capture_point
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.phases import counted
from kvlingo_mlx.reporting.measure import plain
from kvlingo_mlx.stage1.closed_form import Moments, solve

TOKENS_PER_WIDTH = 4  # the map of a layer has, per output, as many unknowns as its input is wide


@dataclass(frozen=True)
class Settings:
    """What to measure, and on how much text.

    Attributes:
        capture: The capture point of keys: pre_norm, post_norm or post_rope, or latent (MLA). None
            is pre_norm, or latent for models that cache latents.
        documents: The number of records to read, from the first on.
        tokens: The number of tokens in all; each document is cut at ``tokens`` / ``documents``.
        seed: The seed of the split by document, the MLPs, the permutations and random weights.
        random_init: Whether to give both models random weights first, which is the null.
        cka: Whether to compare every pair of layers.
        mlp: Whether to fit an MLP for each layer and side.
        heads: Whether to fit the joint map and align its heads.
        hidden: The MLP's hidden units beside the two for each input that hold the linear map; None
            is twice the width of its input.
        epochs: The most epochs of its training.
    """

    capture: str | None = None
    documents: int = 64
    tokens: int = 16_384
    seed: int = 0
    random_init: bool = False
    cka: bool = True
    mlp: bool = True
    heads: bool = True
    hidden: int | None = None
    epochs: int = 10

    def __post_init__(self) -> None:
        if self.capture not in (None, *CAPTURES):
            raise ValueError(
                f"capture is {self.capture!r}; it must be one of {', '.join(CAPTURES)}"
            )
        least = {"documents": 2, "tokens": self.documents, "hidden": 1, "epochs": 1, "seed": 0}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise ValueError(f"{name} is {value}; it must be at least {number}")


@dataclass(frozen=True)
class Grid:
    """CKA of every target layer (rows) with every source layer (columns)."""

    cka: np.ndarray
    summary: Correspondence


@dataclass(frozen=True)
class Rank:
    """A layer's effective rank, and the share of its variance along one direction."""

    effective: float
    top_share: float


@dataclass(frozen=True)
class Report:
    """What two models' caches have in common over one corpus.

    Attributes:
        capture: The capture point of keys.
        documents: The number of documents read.
        fitted: The number of tokens in the documents fitted on.
        scored: The number of tokens in the held-out documents.
        source_layers: For each target layer, the source layer that predicts it: the one at its
            relative depth.
        linearity: By side, for each target layer.
        summary: By side, the means over layers.
        rank: By model ("source", "target") and side, for each layer.
        cka: By side; empty if not asked for.
        heads: Of the closed form's joint map, by side; empty if not asked for.
        notes: Measurements that were left out or are unreliable, and why; one sentence each.
    """

    capture: str | None
    documents: int
    fitted: int
    scored: int
    source_layers: list[int]
    linearity: dict[str, list[LayerFit]]
    summary: dict[str, Summary]
    rank: dict[str, dict[str, list[Rank]]]
    cka: dict[str, Grid]
    heads: dict[str, HeadAlignment]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The report as plain lists and numbers; numbers that are not finite become None."""
        return plain(asdict(self))


def analyze(
    source: LanguageModel,
    target: LanguageModel,
    records: Iterable[Mapping[str, Any]],
    settings: Settings,
) -> Report:
    """Measure what two models' caches have in common (paper: "Motivating measurements").

    Args:
        source: The model whose cache would be translated.
        target: The model whose cache is wanted.
        records: {"messages": [...]} or {"text": ...}.
        settings: What to measure.

    Raises:
        ValueError: A bad argument, or no usable text.
        IncompatibleTranslatorError: The tokenizers differ.
    """
    check_tokenizers(source, target, "an analysis compares them token by token")
    settings = replace(settings, capture=capture_point(source, target, settings.capture))
    corpus = texts.split(
        texts.read(
            records,
            target.tokenizer,
            documents=settings.documents,
            tokens=settings.tokens,
            context_length=min(source.context_length, target.context_length),
        ),
        settings.seed,
    )
    check_memory((source, target), corpus.num_tokens)
    if settings.random_init:
        source = randomly_initialised(source, 2 * settings.seed)
        target = randomly_initialised(target, 2 * settings.seed + 1)
    read, wanted = (collect(model, corpus, str(settings.capture)) for model in (source, target))
    heads = [{g.kv_heads for g in model.geometry.layers} for model in (source, target)]
    layers = source.geometry.layers, target.geometry.layers
    reads = [own[0] for own in by_depth(*layers).keys]
    report = compare(read, wanted, corpus, settings, heads, reads)
    return replace(report, notes=[*report.notes, *_of_other_kinds(*layers, reads)])


def _of_other_kinds(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry], reads: Sequence[int]
) -> list[str]:
    """A note on target layers that read a source layer of another kind."""
    pairs = enumerate(zip(target, reads, strict=True))
    found = [str(t) for t, (layer, s) in pairs if layer.attention != source[s].attention]
    if not found:
        return []
    told = f"layer {found[0]} reads" if len(found) == 1 else f"layers {', '.join(found)} read"
    return [
        f"{told} source layers of another kind: R2 is of keys by keys and of values by values, but "
        "there a map reads both, so a translator's own is higher"
    ]


def compare(
    source: States,
    target: States,
    corpus: Corpus,
    settings: Settings,
    heads: Sequence[set[int]],
    reads: Sequence[int] | None = None,
) -> Report:
    """All statistics of two models' states over ``corpus``; ``heads`` are their KV heads.

    ``reads`` gives, for each target layer, the source layer that explains it; by default the one at
    its relative depth.
    """
    depths = len(source.keys), len(target.keys)
    source_layers = list(reads or (layers[0] for layers in relative_depth(*depths).keys))
    recipe = Recipe(settings.hidden, settings.epochs, seed=settings.seed) if settings.mlp else None
    linearity: dict[str, list[LayerFit]] = {side: [] for side in SIDES}
    for side in SIDES:
        for layer, source_layer in enumerate(counted(f"fitting {side}", source_layers)):
            x, y = source.side(side)[source_layer], target.side(side)[layer]
            linearity[side].append(fit_layer(x, y, corpus.scored, recipe))
    rank = {
        name: {side: [_rank(x) for x in states.side(side)] for side in SIDES}
        for name, states in (("source", source), ("target", target))
    }
    grids = {}
    for side in SIDES if settings.cka else ():
        grid = cka_grid(source.side(side), target.side(side))
        grids[side] = Grid(grid, correspondence(grid))
    aligned, notes = dict[str, HeadAlignment](), list[str]()
    if settings.heads:
        aligned, notes = _align(source, target, source_layers, heads, settings.seed)
    scored = int(corpus.scored.sum())
    fitted = corpus.num_tokens - scored
    widest = max(x.shape[1] for side in SIDES for x in source.side(side))
    return Report(
        settings.capture,
        len(corpus.documents),
        fitted,
        scored,
        source_layers,
        linearity,
        {side: summarise(linearity[side]) for side in SIDES},
        rank,
        grids,
        aligned,
        [*_scarce(fitted, widest), *_unfinished(linearity, settings.epochs), *notes],
    )


def _rank(x: np.ndarray) -> Rank:
    eigenvalues = spectrum(x)
    return Rank(effective_rank(eigenvalues), top_share(eigenvalues))


def _align(
    source: States,
    target: States,
    source_layers: Sequence[int],
    heads: Sequence[set[int]],
    seed: int,
) -> tuple[dict[str, HeadAlignment], list[str]]:
    """Which heads the closed form's joint map aligns, by side; or a note on why not."""
    if any(len(counts) > 1 for counts in heads):
        return {}, ["no head alignment: the layers of a model differ in their KV heads"]
    counts, notes = (min(heads[0]), min(heads[1])), []
    if counts[0] != counts[1]:
        notes.append(
            f"{counts[0]} source heads have no counterparts of their own among {counts[1]} target "
            "heads: the grid shows where they go, its diagonal and p say little"
        )
    return closed_form_alignment(source, target, source_layers, counts, seed), notes


def closed_form_alignment(
    source: States, target: States, source_layers: Sequence[int], heads: tuple[int, int], seed: int
) -> dict[str, HeadAlignment]:
    """The alignment of the closed-form joint map [K; V] fitted on all tokens, by side.

    ``source_layers`` are those that the target layers read, ``heads`` both models' KV heads, and
    ``seed`` is that of the null's permutations.
    """
    maps: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    for layer, source_layer in enumerate(counted("aligning heads", source_layers)):
        x = [source.side(side)[source_layer] for side in SIDES]
        y = [target.side(side)[layer] for side in SIDES]
        weight = solve(Moments.of(np.concatenate(x, axis=1), np.concatenate(y, axis=1))).weight
        keys_in, keys_out = x[0].shape[1], y[0].shape[1]
        maps["keys"].append(weight[:keys_out, :keys_in])
        maps["values"].append(weight[keys_out:, keys_in:])
    return {side: head_alignment(maps[side], *heads, seed=seed) for side in SIDES}


def _scarce(fitted: int, widest: int) -> list[str]:
    if fitted >= TOKENS_PER_WIDTH * widest:
        return []
    return [
        f"{fitted} tokens to fit on are few for inputs {widest} wide: R2 is low for lack of text; "
        "raise --tokens"
    ]


def _unfinished(linearity: Mapping[str, Sequence[LayerFit]], epochs: int) -> list[str]:
    fits = [fit for fits in linearity.values() for fit in fits]
    count = sum(fit.epochs == epochs for fit in fits)
    if not count:
        return []
    return [
        f"{count} of {len(fits)} MLPs were best after their last epoch ({epochs}), so more can be "
        "explained than they do; raise --epochs"
    ]
