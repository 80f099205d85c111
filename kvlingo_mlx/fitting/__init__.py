"""Stage 1 on the device: run both models, sum moments, solve every map in closed form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx import __version__
from kvlingo_mlx.assignment import Assignment, by_depth, check_windows
from kvlingo_mlx.capture import move, prefill
from kvlingo_mlx.closed_form import Moments, moment_widths, solve_maps
from kvlingo_mlx.families.base import POINTS
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.loading import load
from kvlingo_mlx.norms import ATTENTION_NORMS, norm_named, token_weights
from kvlingo_mlx.pairing import check_tokenizers
from kvlingo_mlx.samples import Sample, to_samples
from kvlingo_mlx.states import KVStates
from kvlingo_mlx.tensor_file import Weights
from kvlingo_mlx.translator_config import SIDES, TranslatorConfig, check_head_ratio
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

Progress = Callable[[int, int | None], None]


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
    norm = norm_named(norm)
    if capture not in POINTS:
        raise ValueError(f"capture is {capture!r}; it must be one of {', '.join(POINTS)}")
    check_tokenizers(source, target)
    if not head_mixing:
        check_head_ratio(source.spec(), target.spec())
    check_windows(source.geometry.layers, target.geometry.layers)
    if assignment is None:
        assignment = by_depth(source.geometry.layers, target.geometry.layers, nu)
    config = TranslatorConfig(
        source.spec(), target.spec(), assignment, head_mixing=head_mixing, capture=capture
    )
    moments = {name: Moments(*widths) for name, widths in moment_widths(config).items()}
    used = _accumulate(moments, config, source, target, samples, norm, progress)
    if used == 0:
        raise ValueError(
            "the data hold no usable sample: every prefix is empty or too long"
            + (", or nothing follows it" if norm in ATTENTION_NORMS else "")
        )
    weights, ranks = solve_maps(config, moments)
    provenance = {
        "stage": 1,
        "norm": norm,
        "samples": used,
        "prefix_tokens": moments["keys.0"].tokens,
        "lowest_rank": min(ranks),
        "kvlingo_mlx": __version__,
        "mlx": version("mlx"),
        "date": time.strftime("%Y-%m-%d"),
    }
    config = TranslatorConfig(**{**vars(config), "provenance": provenance})
    return build(config, Weights.from_float32(weights, "float32"))


def _accumulate(
    moments: dict[str, Moments],
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
    context = min(source.context_length, target.context_length)
    for sample in to_samples(samples, target.tokenizer, context):
        for model in (source, target):
            model.check_tokens((*sample.prefix, *sample.continuation))
        if norm in ATTENTION_NORMS and not sample.continuation:
            continue  # nothing attends to this prefix
        weights = token_weights(norm, len(sample.prefix), partial(attention_mass, target, sample))
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
    moments: dict[str, Moments],
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
            layer_weights = None if weights is None else weights[layer % len(weights), span]
            moments[f"{side}.{layer}"].add(x, _rows(array), layer_weights)


def _rows(array: mx.array) -> np.ndarray:
    """(B, T, d) to (B * T, d), float32."""
    return np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1])
