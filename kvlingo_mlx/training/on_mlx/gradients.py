"""One conversation's part in a step: two passes without gradient, one with gradient.

Source and target are frozen. Translated keys and values stand in mlx-lm's caches as the arrays in
which the gradient is taken. Then each layer's map runs once more, and its tensors receive the
gradients of its keys and values. So no graph of the translator exists beside the target's, and only
one layer's graph of the translator exists at a time.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import placed
from kvlingo_mlx.fitting.attention import heard
from kvlingo_mlx.format.maps import maps_states
from kvlingo_mlx.models.capture import Ear, move, whole
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import Loss, Objective
from kvlingo_mlx.training.on_mlx.layers import Entry, Pass
from kvlingo_mlx.training.on_mlx.losses import loss_of
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.runtime import Attended, PairReading, continued, matched_positions, shapes

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
    ``attends`` the target reads the text in one pass, and its attention can be matched.
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


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, visible: Any, **options: Any
) -> mx.array:
    """What queries gather, (1, Hq, M, D); ``options`` are scale and sinks."""
    given = {"cache": None, "mask": mx.array(visible), **options}
    found: mx.array = scaled_dot_product_attention(queries, keys, values, **given)
    return found.astype(mx.float32)


@contextlib.contextmanager
def attended(target: LanguageModel, places: np.ndarray) -> Iterator[list[list[Attended]]]:
    """For each cache layer, what its attention modules gather in the one pass over a text.

    A recurrent layer has none. ``places`` are those of the queries, the text's last one among them.
    """
    at, tokens = mx.array(places), int(places[-1]) + 1
    behind = at[:, None] - mx.arange(tokens)
    layers = target.geometry.layers
    found: list[list[Attended]] = [[] for _ in layers]

    def listener(
        layer: int, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> None:
        if keys.shape[2] == tokens:
            visible = (behind >= 0) & (behind < (layers[layer].reach or tokens))
            attend = functools.partial(_attend, scale=scale, sinks=sinks)
            both = shapes((keys, values))
            found[layer].append(Attended(queries[:, :, at], both, visible, attend))

    with heard(target, listener):
        yield found
    for each in found:
        mx.eval([own.queries for own in each])


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
    """See :meth:`kvlingo_mlx.training.runtime.Pair.loss`; the target runs the last prefix token."""
    num_read = len(reading.sample.prefix) - 1
    # Positions before a layer's window are not translated.
    starts = target.geometry.first_kept(num_read) if reading.states is not None else []
    first = len(reading.native)
    layers = [
        TranslatedLayer(target, translator, reading, first + t, start)
        for t, start in enumerate(starts[first:])
    ]
    with working():
        leaves = [layer.entry() for layer in layers]
        mx.eval(leaves)
    learns = scale != 0.0 and bool(leaves)
    cache = _cache(target, [*reading.native, *leaves], reading.sample)
    run, place = _continued(target, reading.sample, cache)
    with working(), contextlib.nullcontext() if learns else place():
        made = Pass(target, cache, run, place) if learns else None
        student = run() if made is None else made.hidden
        mx.eval(student)
    teacher, labels = reading.teacher, reading.sample.continuation
    loss = loss_of(objective, target, student, teacher, labels, with_gradient=learns)
    if made is None:
        return loss
    with working():
        for t, gradient in made.gradients(loss.gradient):
            translator.learn(layers[t - first].pulled(gradient, scale))
            if t == first:
                break
    return loss


@dataclass(frozen=True)
class TranslatedLayer:
    """A layer of the target whose cache entries, from position ``start`` on, are translated."""

    target: LanguageModel
    translator: MLXTranslator
    reading: PairReading
    layer: int
    start: int

    def entry(self) -> Entry:
        """The cache entries."""
        kept: Entry | None = None
        for span in self.spans():
            kept = self.part(span, kept=kept)
            if span.stop is not None:
                mx.eval(kept)  # else all steps of a recurrence would be in memory at once
        assert kept is not None
        return kept

    def spans(self) -> list[slice]:
        """The positions from ``start`` on; a recurrent layer's in segments of ``SEGMENT`` tokens.

        They are counted back from the end. So the first one is the shortest, since a segment of one
        token behind others would be mlx-lm's to decode, which has no gradient on Metal.
        """
        start, end = self.start, len(self.reading.sample.prefix) - 1
        recurrent = self.target.geometry.layers[self.layer].recurrence is not None
        mapped = maps_states(self.translator.config, self.layer)
        if not recurrent or end - start <= SEGMENT or mapped:
            return [slice(start, None)]
        cuts = [start, *sorted(range(end, start, -SEGMENT))]
        return [slice(first, last) for first, last in itertools.pairwise(cuts)]

    def part(
        self, span: slice, *, tensors: dict[str, mx.array] | None = None, kept: Entry | None = None
    ) -> Entry:
        """The cache entries of ``span``; what a recurrent layer then keeps.

        ``tensors`` stand in for the translator's own; ``kept`` is what a recurrence goes on from.
        """
        target, translator, layer = self.target, self.translator, self.layer
        states, aligned = self.reading.states, self.reading.sample.aligned
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

    def pulled(self, gradient: Entry, scale: float) -> dict[str, mx.array]:
        """``scale`` times the gradients of the layer's tensors from those of its cache entries."""
        tensors = self.translator.of_layer(self.layer)
        names, count = list(tensors), len(tensors)
        spans, befores = self.spans(), list[Entry | None]([None])
        for span in spans[:-1]:
            befores.append(self.part(span, kept=befores[-1]))
            mx.eval(befores[-1])
        wanted, sums = [scale * g for g in gradient], list[mx.array]()
        while spans:  # a segment runs again from what was kept before it, the last one first
            span, before = spans.pop(), befores.pop()

            def entry(*arrays: mx.array, span: slice = span) -> list[mx.array]:
                own = dict(zip(names, arrays[:count], strict=True))
                return list(self.part(span, tensors=own, kept=arrays[count:] or None))

            _, found = mx.vjp(entry, [*tensors.values(), *(before or ())], wanted)
            sums = [a + b for a, b in zip(sums, found, strict=False)] or found[:count]
            wanted = found[count:]
            if spans:
                mx.eval(sums, wanted)
        return dict(zip(names, sums, strict=True))


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
