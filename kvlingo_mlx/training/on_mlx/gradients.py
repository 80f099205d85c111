"""One conversation's part in a step: two passes without gradient, one with gradient.

Source and target are frozen. Translated keys and values stand in mlx-lm's caches as the arrays in
which the gradient is taken. Then each layer's map runs once more, and its tensors receive the
gradients of its keys and values. So no graph of the translator exists beside the target's, and only
one layer's graph of the translator exists at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import placed
from kvlingo_mlx.models.capture import whole
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import Loss, Objective
from kvlingo_mlx.training.on_mlx.layers import Entry, Pass
from kvlingo_mlx.training.on_mlx.losses import loss_of
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator

STEP = 2048  # tokens of a chunk in the passes without gradient


@dataclass(frozen=True)
class Reading:
    """The results of the two no-gradient passes, which all translators of a pair share.

    Attributes:
        sample: The conversation.
        states: The source's states of ``prefix[:-1]``; with two tokenizers, of its translated
            tokens. None if there are none.
        native: The target's own cache entries of ``prefix[:-1]`` in its native layers.
        teacher: (M, width) the target's final hidden states that predict the continuation, from its
            own cache.
    """

    sample: Sample
    states: KVStates | None
    native: list[Entry]
    teacher: mx.array


def read(
    source: LanguageModel,
    target: LanguageModel,
    sample: Sample,
    capture: str,
    native_layers: int = 0,
) -> Reading:
    """Read a conversation with both models."""
    prefix, continuation = sample.prefix, sample.continuation
    cache = make_prompt_cache(target.model)
    for start in range(0, len(prefix) - 1, STEP):
        with working():
            target.model(
                mx.array([prefix[start : min(start + STEP, len(prefix) - 1)]]), cache=cache
            )
            mx.eval([c.state for c in cache])
    with working():
        held = map(caches.contents, cache[:native_layers])
        own: list[Entry] = [(keys[...], values[...]) for keys, values in held]
        mx.eval(own)
    parts, following = [], (prefix[-1], *continuation[:-1])
    for start in range(0, len(following), STEP):
        with working():
            parts.append(hidden_states(target, following[start : start + STEP], cache))
            mx.eval(parts[-1], [c.state for c in cache])
    with working():
        teacher = mx.concatenate(parts)
        mx.eval(teacher)
    del cache
    return Reading(sample, _source_states(source, target, sample, capture), own, teacher)


def _source_states(
    source: LanguageModel, target: LanguageModel, sample: Sample, capture: str
) -> KVStates | None:
    """The states to translate: of ``prefix[:-1]``, or of the shared tokens of two tokenizers."""
    aligned = sample.aligned
    tokens = sample.prefix[:-1] if aligned is None else aligned.source_ids[: aligned.num_read]
    if not tokens:
        return None
    states = whole(source, tokens, capture)
    return states if aligned is None else states.gathered(mx.array(aligned.rows), 0)


def conversation_loss(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: Reading,
    objective: Objective,
    *,
    scale: float = 0.0,
) -> Loss:
    """The loss of one conversation decoded from its translated cache (equation for L).

    The target runs the last prefix token. A ``scale`` other than 0 adds that multiple of the loss's
    gradient to the translator's.
    """
    num_read = len(reading.sample.prefix) - 1
    # Positions before a layer's window are not translated.
    starts = target.geometry.first_kept(num_read) if reading.states is not None else []
    first = len(reading.native)
    with working():
        leaves = [
            _entry(target, translator, reading, t, starts[t]) for t in range(first, len(starts))
        ]
        mx.eval(leaves)
    learns = scale != 0.0 and bool(leaves)
    cache = _cache(target, [*reading.native, *leaves], reading.sample)
    run, place = _continued(target, reading.sample, cache)
    with working():
        made = Pass(target, cache, run, place) if learns else None
        if made is None:
            with place():
                student = run()
                mx.eval(student)
        else:
            student = made.hidden
    loss = loss_of(
        *(objective, target, student, reading.teacher, reading.sample.continuation),
        with_gradient=learns,
    )
    if made is None:
        return loss
    with working():
        for t, gradient in made.gradients(loss.gradient):
            pulled = _pulled(target, translator, reading, t, starts[t], gradient, scale)
            translator.learn(pulled)
            if t == first:
                break
    return loss


def _entry(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: Reading,
    layer: int,
    start: int,
    tensors: dict[str, mx.array] | None = None,
) -> Entry:
    """A translated layer's cache entries from position ``start`` on."""
    states, aligned = reading.states, reading.sample.aligned
    assert states is not None
    dtype = target.cache_dtype
    read = lambda side, s: states.side(side)[s][0, start:].astype(dtype)  # noqa: E731
    keys, values = translator.layer(layer, read, tensors)
    at = None if aligned is None else mx.array(aligned.positions + aligned.shift)
    return caches.entry(target, layer, keys, values, translator.config.capture, start, at)


def _cache(target: LanguageModel, entries: Sequence[Entry], sample: Sample) -> list[Any]:
    """Stock caches that hold ``entries``; empty ones where there are none."""
    aligned, made = sample.aligned, make_prompt_cache(target.model)
    held = len(sample.prefix) - 1 if aligned is None else len(aligned.rows)
    for cache, (keys, values) in zip(made, entries, strict=False):
        cache.keys, cache.values, cache.offset = keys, values, held
        if caches.is_ring(cache):
            cache._idx = keys.shape[2]
    return made


def _continued(
    target: LanguageModel, sample: Sample, cache: list[Any]
) -> tuple[Callable[[], mx.array], Callable[[], AbstractContextManager[None]]]:
    """The pass that gives the hidden states (M, width) which predict the continuation.

    Returns:
        The pass, and the context in which it and its parts run.

    Between two tokenizers, the same pass also reads the prefix tokens that the target prefills
    itself. The order is then: translated entries, those tokens, the last prefix token, the
    continuation.
    """
    following = (sample.prefix[-1], *sample.continuation[:-1])
    aligned = sample.aligned
    if aligned is None:
        return lambda: hidden_states(target, following, cache), contextlib.nullcontext
    own = [sample.prefix[position] for position in aligned.own]
    last = len(sample.prefix) - 1
    positions = np.concatenate([aligned.own, np.arange(last, last + len(following))])
    before = aligned.num_entries
    visible = np.tril(np.ones((len(positions), before + len(following)), bool), before - len(own))
    visible[: len(own), :before] = aligned.visible
    places, seen = mx.array(positions + aligned.shift), mx.array(visible)[None, None]
    return (
        lambda: hidden_states(target, (*own, *following), cache)[len(own) :],
        functools.partial(placed, target, cache, places, seen),
    )


def _pulled(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: Reading,
    layer: int,
    start: int,
    gradient: Entry,
    scale: float,
) -> dict[str, mx.array]:
    """The gradients of a layer's tensors from those of its cache entries."""
    tensors = translator.of_layer(layer)
    names = list(tensors)

    def entry(*arrays: mx.array) -> list[mx.array]:
        own = dict(zip(names, arrays, strict=True))
        return list(_entry(target, translator, reading, layer, start, own))

    wanted = [scale * g for g in gradient]
    _, found = mx.vjp(entry, list(tensors.values()), wanted)
    return dict(zip(names, found, strict=True))


def reconstruction_loss(
    translator: MLXTranslator, read: KVStates, wanted: KVStates, *, scale: float = 0.0
) -> float:
    """The squared error of the target's states on a prefix, summed over tokens, widths and maps.

    See :meth:`kvlingo_mlx.training.runtime.Pair.reconstruction`.
    """
    total = 0.0
    for t in range(len(translator.config.target.layers)):
        tensors = translator.of_layer(t)

        def error(tensors: dict[str, mx.array], t: int = t) -> mx.array:
            outputs = translator.layer(t, lambda side, s: read.side(side)[s][0], tensors)
            goals = (wanted.keys[t][0], wanted.values[t][0])
            keys, values = (
                (out.astype(mx.float32) - goal.astype(mx.float32)).square().sum()
                for out, goal in zip(outputs, goals, strict=True)
            )
            return keys + values

        with working():
            if scale == 0.0:
                total += float(error(tensors).item())  # type: ignore[arg-type]
                continue
            value, gradients = mx.value_and_grad(error)(tensors)
            translator.learn({name: scale * g for name, g in gradients.items()})
            total += float(value.item())  # type: ignore[arg-type]
    return total
