"""One conversation's part in a step: two passes without gradient, one with gradient.

Source and target are frozen. Translated keys and values stand in mlx-lm's caches as the arrays in
which the gradient is taken. Then each layer's map runs once more, and its tensors receive the
gradients of its keys and values. So no graph of the translator exists beside the target's, and only
one layer's graph of the translator exists at a time.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import placed
from kvlingo_mlx.format.maps import maps_states
from kvlingo_mlx.models.capture import Ear, move, whole
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import Loss, Objective
from kvlingo_mlx.training.on_mlx.attention import Attended, attended, match  # noqa: F401
from kvlingo_mlx.training.on_mlx.layers import Entry, Pass
from kvlingo_mlx.training.on_mlx.losses import loss_of
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.runtime import PairReading, continued, matched_positions

STEP = 2048  # tokens of a chunk in the passes without gradient
SEGMENT = 512  # tokens of a recurrence whose steps are in memory at once


@in_chunks(gradient=False)
def read(
    source: LanguageModel,
    target: LanguageModel,
    sample: Sample,
    capture: str,
    native_layers: int = 0,
    kept: bool = False,
    attends: bool = False,
) -> PairReading:
    """Read a conversation with both models.

    ``kept`` keeps the source's recurrent states in the place of what went into them. With
    ``attends`` the target reads the text in one pass, and :func:`.attention.match` can learn of it.
    """
    tokens, num_read = (*sample.prefix, *sample.continuation[:-1]), len(sample.prefix) - 1
    cache, reads = make_prompt_cache(target.model), (capture, kept)
    more: dict[str, Any] = {}
    if attends:
        with (
            working(),
            attended(target, matched_positions(len(tokens), sample.aligned)) as gathered,
        ):
            ear = Ear(target)
            with ear.listening():
                hidden = hidden_states(target, tokens, cache)
            own_states = move(ear.take(0), target, capture)
            mx.eval(hidden, own_states.arrays)
        if sample.aligned is not None:
            every = first = _source_states(source, sample, reads)
        else:
            every = whole(source, tokens, capture)
            first = every.part(0, num_read) if num_read else None
        more = {"whole": (every, own_states), "attended": gathered}
        if not native_layers:
            return PairReading(sample, first, [], hidden[num_read:], **more)
        cache = make_prompt_cache(target.model)
    for start in range(0, num_read, STEP):
        with working():
            target.model(mx.array([tokens[start : min(start + STEP, num_read)]]), cache=cache)
            mx.eval([c.state for c in cache])
    with working():
        own = [_content(each) for each in cache[:native_layers]]
        mx.eval(own)
    parts = []
    for start in range(num_read, len(tokens), STEP):
        with working():
            parts.append(hidden_states(target, tokens[start : start + STEP], cache))
            mx.eval(parts[-1], [c.state for c in cache])
    with working():
        teacher = mx.concatenate(parts)
        mx.eval(teacher)
    del cache
    states = _source_states(source, sample, reads)
    return PairReading(sample, states, own, teacher, **more)


def _content(cache: Any) -> Entry:
    """What a cache holds, apart from what will be written to it."""
    recurrent = caches.is_recurrent(cache)
    held = caches.arrays([cache]) if recurrent else caches.contents(cache)
    return tuple(array[...] for array in held)


def _source_states(
    source: LanguageModel, sample: Sample, reads: tuple[str, bool]
) -> KVStates | None:
    """The states to translate: of ``prefix[:-1]``, or of the shared tokens of two tokenizers."""
    aligned = sample.aligned
    tokens = sample.prefix[:-1] if aligned is None else aligned.source_ids[: aligned.num_read]
    if not tokens:
        return None
    states = whole(source, tokens, *reads)
    return states if aligned is None else states.gathered(mx.array(aligned.rows), 0)


@in_chunks()
def conversation_loss(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: PairReading,
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
    target: LanguageModel, translator: MLXTranslator, reading: PairReading, layer: int, start: int
) -> Entry:
    """A translated layer's cache entries from position ``start`` on."""
    kept: Entry | None = None
    for span in _spans(target, translator, reading, layer, start):
        kept = _part(target, translator, reading, layer, span, kept=kept)
        if span.stop is not None:
            mx.eval(kept)  # else all steps of a recurrence would be in memory at once
    assert kept is not None
    return kept


def _spans(
    target: LanguageModel, translator: MLXTranslator, reading: PairReading, layer: int, start: int
) -> list[slice]:
    """The positions from ``start`` on; a recurrent layer's in segments of ``SEGMENT`` tokens.

    They are counted back from the end. So the first one is the shortest, since a segment of one
    token behind others would be mlx-lm's to decode, which has no gradient on Metal.
    """
    end = len(reading.sample.prefix) - 1
    recurrent = target.geometry.layers[layer].recurrence is not None
    if not recurrent or end - start <= SEGMENT or maps_states(translator.config, layer):
        return [slice(start, None)]
    cuts = [start, *sorted(range(end, start, -SEGMENT))]
    return [slice(first, last) for first, last in itertools.pairwise(cuts)]


def _part(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: PairReading,
    layer: int,
    span: slice,
    *,
    tensors: dict[str, mx.array] | None = None,
    kept: Entry | None = None,
) -> Entry:
    """A translated layer's cache entries of ``span``; what a recurrent one then keeps.

    ``tensors`` stand in for the translator's own; ``kept`` is what a recurrence goes on from.
    """
    states, aligned = reading.states, reading.sample.aligned
    assert states is not None
    if maps_states(translator.config, layer):
        assert states.kept is not None
        state = translator.mapped_state(layer, states.kept, tensors)
        return caches.with_tail(target, layer, state)
    keys, values = translator.layer(layer, states, tensors, target.cache_dtype, span)
    at = None if aligned is None else mx.array(aligned.positions + aligned.shift)
    more: dict[str, Any] = {} if kept is None else {"kept": kept}
    capture, first = translator.config.capture, span.start
    return caches.entry(target, layer, keys, values, capture, first, at, **more)


def _cache(target: LanguageModel, entries: Sequence[Entry], sample: Sample) -> list[Any]:
    """Stock caches that hold ``entries``; empty ones where there are none."""
    aligned, made = sample.aligned, make_prompt_cache(target.model)
    held = len(sample.prefix) - 1 if aligned is None else len(aligned.rows)
    for cache, entry in zip(made, entries, strict=False):
        names = caches.PARTS if caches.is_recurrent(cache) else caches.SIDES
        for name, array in zip(names, entry, strict=False):  # a convolution alone has one
            caches.put_part(cache, name, array)
        if not caches.is_recurrent(cache):
            cache.offset = held
        if caches.is_ring(cache):
            cache._idx = cache.keys.shape[2]
    return made


def _continued(
    target: LanguageModel, sample: Sample, cache: list[Any]
) -> tuple[Callable[[], mx.array], Callable[[], AbstractContextManager[None]]]:
    """The pass that gives the hidden states (M, width) which predict the continuation.

    Returns:
        The pass, and the context in which it and its parts run.
    """
    aligned = sample.aligned
    if aligned is None:
        following = (sample.prefix[-1], *sample.continuation[:-1])
        return lambda: hidden_states(target, following, cache), contextlib.nullcontext
    tokens, positions, visible = continued(sample)
    places, seen = mx.array(positions + aligned.shift), mx.array(visible)[None, None]
    return (
        lambda: hidden_states(target, tokens, cache)[len(aligned.own) :],
        functools.partial(placed, target, cache, places, seen),
    )


def _pulled(
    target: LanguageModel,
    translator: MLXTranslator,
    reading: PairReading,
    layer: int,
    start: int,
    gradient: Entry,
    scale: float,
) -> dict[str, mx.array]:
    """The gradients of a layer's tensors from those of its cache entries."""
    tensors = translator.of_layer(layer)
    names, count = list(tensors), len(tensors)
    spans, befores = _spans(target, translator, reading, layer, start), list[Entry | None]([None])
    for span in spans[:-1]:
        befores.append(_part(target, translator, reading, layer, span, kept=befores[-1]))
        mx.eval(befores[-1])
    wanted, sums = [scale * g for g in gradient], list[mx.array]()
    while spans:  # a segment of a recurrence runs again from what was kept before it, last first
        span, before = spans.pop(), befores.pop()

        def entry(*arrays: mx.array, span: slice = span) -> list[mx.array]:
            own = dict(zip(names, arrays[:count], strict=True))
            kept = arrays[count:] or None
            return list(_part(target, translator, reading, layer, span, tensors=own, kept=kept))

        _, found = mx.vjp(entry, [*tensors.values(), *(before or ())], wanted)
        sums = [a + b for a, b in zip(sums, found, strict=False)] or found[:count]
        wanted = found[count:]
        if spans:
            mx.eval(sums, wanted)
    return dict(zip(names, sums, strict=True))


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
            outputs = translator.layer(t, read, tensors)
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
