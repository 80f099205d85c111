"""Stage 1 on the device: run both models, sum moments, solve every map in closed form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx import __version__
from kvlingo_mlx import assignment as assignments
from kvlingo_mlx.assignment import Assignment
from kvlingo_mlx.capture import move, prefill
from kvlingo_mlx.closed_form import Moments, solve
from kvlingo_mlx.fitting.norms import ALIASES, ATTENTION_NORMS, NORMS, token_weights
from kvlingo_mlx.fitting.samples import Sample, to_samples
from kvlingo_mlx.keys import POINTS
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.loading import load
from kvlingo_mlx.pairing import check_tokenizers
from kvlingo_mlx.states import KVStates
from kvlingo_mlx.tensor_file import Weights
from kvlingo_mlx.translator_config import SIDES, TranslatorConfig, head_map_of
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

Progress = Callable[[int, int | None], None]
AllMoments = dict[str, list[Moments]]


def fit(
    source: LanguageModel | str,
    target: LanguageModel | str,
    samples: Iterable[Mapping[str, Any] | Sample],
    *,
    capture: str = "pre_norm",
    norm: str = "frobenius",
    assignment: Assignment | None = None,
    nu: int = 1,
    head_mixing: bool = True,
    progress: Progress | None = None,
) -> Translator:
    """Fit a translator in closed form (section 3.2, stage 1).

    Args:
        source: Whose cache will be translated.
        target: Who will decode from the translation.
        samples: Records {"messages": [...]} or {"text": ...}, or ``Sample`` objects.
        capture: Where keys are read and written: pre_norm, post_norm or post_rope.
        norm: frobenius, sink_2 to sink_32, attention_mass (or attention) or
            attention_fisher.
        assignment: Source layers of each target layer; None takes the relative-depth
            band of ``nu`` layers (layer to layer for equal depth and nu = 1).
        nu: Source layers that each target layer reads.
        head_mixing: False for block-diagonal maps, head by head.
        progress: Called with (samples done, samples in all or None).

    Raises:
        ValueError: A bad argument, or no usable sample.
        IncompatibleTranslatorError: The tokenizers differ.
    """
    source, target = load(source), load(target)
    norm = ALIASES.get(norm, norm)
    _check_choice("norm", norm, NORMS)
    _check_choice("capture", capture, POINTS)
    check_tokenizers(source, target)
    depths = (len(source.attentions), len(target.attentions))
    assignment = assignment or assignments.relative_depth(*depths, nu)
    config = TranslatorConfig(
        source.spec(), target.spec(), assignment, head_mixing=head_mixing, capture=capture
    )
    moments = _empty_moments(config)
    used = _accumulate(moments, config, source, target, samples, norm, progress)
    if used == 0:
        raise ValueError("the data hold no usable sample: every prefix is empty or too long")
    weights, ranks = _solve_all(config, moments)
    provenance = {
        "stage": 1,
        "norm": norm,
        "samples": used,
        "prefix_tokens": moments["keys"][0].tokens,
        "lowest_rank": min(ranks),
        "kvlingo_mlx": __version__,
        "mlx": mx.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    config = TranslatorConfig(**{**vars(config), "provenance": provenance})
    return build(config, Weights.from_float32(weights, "float32"))


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _empty_moments(config: TranslatorConfig) -> AllMoments:
    moments: AllMoments = {}
    for side in SIDES:
        moments[side] = []
        for layers, target in zip(config.assignment.side(side), config.target.layers, strict=True):
            width = sum(config.source.layers[s].width(side) for s in layers)
            moments[side].append(Moments(width, target.width(side)))
    return moments


def _accumulate(
    moments: AllMoments,
    config: TranslatorConfig,
    source: LanguageModel,
    target: LanguageModel,
    samples: Iterable[Mapping[str, Any] | Sample],
    norm: str,
    progress: Progress | None,
) -> int:
    """Run both models over every sample's prefix; returns how many samples were used."""
    total = len(samples) if isinstance(samples, Sequence) else None
    used = 0
    for sample in to_samples(samples, target):
        for model in (source, target):
            model.check_tokens(sample.prefix)
        if norm in ATTENTION_NORMS and not sample.continuation:
            continue  # nothing attends to this prefix
        weights = token_weights(norm, target, sample)
        with contextlib.closing(_spans(source, target, sample.prefix)) as spans:
            for read, wanted in spans:
                read = move(read, source, config.capture)
                wanted = move(wanted, target, config.capture)
                _add_span(moments, config.assignment, read, wanted, weights)
        used += 1
        if progress is not None:
            progress(used, total)
    return used


def _spans(
    source: LanguageModel, target: LanguageModel, tokens: Sequence[int]
) -> Generator[tuple[KVStates, KVStates], None, None]:
    """Both models' states, chunk by chunk; a model fitted to itself is run once."""
    with contextlib.closing(prefill(source, tokens)) as read:
        if source is target:
            yield from ((states, states) for states in read)
            return
        with contextlib.closing(prefill(target, tokens)) as wanted:
            yield from zip(read, wanted, strict=True)


def _add_span(
    moments: AllMoments,
    assignment: Assignment,
    read: KVStates,
    wanted: KVStates,
    weights: np.ndarray | None,
) -> None:
    span = slice(read.start, read.start + read.num_tokens)
    for side in SIDES:
        inputs = [_rows(array) for array in read.side(side)]
        for layer, array in enumerate(wanted.side(side)):
            x = np.concatenate([inputs[s] for s in assignment.side(side)[layer]], axis=1)
            layer_weights = None if weights is None else weights[layer, span]
            moments[side][layer].add(x, _rows(array), layer_weights)


def _rows(array: mx.array) -> np.ndarray:
    """(B, T, d) to (B * T, d), float32."""
    return np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1])


def _solve_all(
    config: TranslatorConfig, moments: AllMoments
) -> tuple[dict[str, np.ndarray], list[int]]:
    weights: dict[str, np.ndarray] = {}
    ranks = []
    for side in SIDES:
        for layer, sums in enumerate(moments[side]):
            blocks = _blocks(config, side, layer)
            solutions = [solve(sums if block is None else sums.block(*block)) for block in blocks]
            matrices = [solution.weight for solution in solutions]
            weights[f"{side}.{layer}.weight"] = (
                matrices[0] if config.head_mixing else np.stack(matrices)
            )
            ranks += [solution.rank for solution in solutions]
    return weights, ranks


def _blocks(
    config: TranslatorConfig, side: str, layer: int
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Inputs and outputs of each map of a layer: all at once, or one block a target head."""
    if config.head_mixing:
        return [None]
    target = config.target.layers[layer]
    blocks: list[tuple[np.ndarray, np.ndarray] | None] = []
    for head, source_head in enumerate(head_map_of(config)):
        rows, start = [], 0
        for s in config.assignment.side(side)[layer]:
            geometry = config.source.layers[s]
            dim = geometry.head_dim(side)
            rows.append(start + source_head * dim + np.arange(dim))
            start += geometry.width(side)
        dim = target.head_dim(side)
        blocks.append((np.concatenate(rows), head * dim + np.arange(dim)))
    return blocks
