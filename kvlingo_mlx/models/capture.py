"""Taps: record what a model's projections write during an ordinary mlx-lm prefill.

A tap replaces the class of a projection instance by a subclass that records its output. Parameters,
quantisation and isinstance checks stay the same, and the class is restored on exit. Recording is
bit-exact on every family tried.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.models.keys import Rotation, advance, normalise_values
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, flat
from kvlingo_mlx.threads import working


class Recorder:
    """The outputs of tapped modules, in the order in which the modules were given."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._outputs: dict[int, mx.array] = {}

    def put(self, index: int, output: mx.array) -> None:
        """Keep one module's output; called by the tap."""
        if index in self._outputs:
            raise RuntimeError("a tapped projection ran twice before its output was taken")
        self._outputs[index] = output

    def take(self) -> list[mx.array]:
        """All outputs since the last call, one per module; the recorder then drops them."""
        if len(self._outputs) != len(self.modules):
            raise RuntimeError(
                f"{len(self._outputs)} of {len(self.modules)} tapped projections ran; "
                "is the model compiled, or are its layers split over machines?"
            )
        outputs = [self._outputs[index] for index in range(len(self.modules))]
        self._outputs = {}
        return outputs


class Log(Recorder):
    """Keeps the outputs of every run, oldest first, for a decoding loop that runs ahead."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._runs: dict[int, list[mx.array]] = {index: [] for index in range(len(modules))}

    def put(self, index: int, output: mx.array) -> None:
        self._runs[index].append(output)

    def take(self) -> list[mx.array]:
        """All outputs since the last call, one per module, with the runs concatenated."""
        outputs = [mx.concatenate(self._runs[i], axis=1) for i in range(len(self.modules))]
        self._runs = {index: [] for index in range(len(self.modules))}
        return outputs


def _tapped(cls: type[nn.Module], record: Callable[[mx.array], None]) -> type[nn.Module]:
    listener = threading.get_ident()

    class Tapped(cls):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            output = super().__call__(x)
            if threading.get_ident() == listener:  # another thread may run plain mlx-lm on it
                record(output)
            return output

    Tapped.__name__ = cls.__name__
    return Tapped


@contextlib.contextmanager
def tap(
    modules: Sequence[nn.Module],
    *,
    nested: bool = False,
    recorder: Callable[[Sequence[nn.Module]], Recorder] = Recorder,
) -> Iterator[Recorder]:
    """Record the outputs of ``modules`` in this thread during the context, which is a unit of work.

    ``nested`` allows modules that a surrounding tap already records; ``recorder`` makes the object
    that keeps the outputs.

    Raises:
        RuntimeError: This thread already taps one of the modules; captures cannot overlap.
    """
    kept = recorder(modules)
    with working():
        classes = [type(module) for module in modules]
        if not nested and any(cls.__qualname__.startswith("_tapped") for cls in classes):
            raise RuntimeError("this model is being captured already: one capture at a time")
        try:
            for index, (module, cls) in enumerate(zip(modules, classes, strict=True)):
                record = lambda output, index=index: kept.put(index, output)  # noqa: E731
                module.__class__ = _tapped(cls, record)
            yield kept
        finally:
            for module, cls in zip(modules, classes, strict=True):
                module.__class__ = cls


class Ear:
    """Taps of a model's key and value projections that record only inside ``listening``.

    Outside it the model is unchanged, and what others run on it is not recorded. Recurrent layers
    are tapped only for their ``inputs``.
    """

    def __init__(self, model: LanguageModel, *, inputs: bool = True) -> None:
        self._model = model
        self._modules = taps_of(model, inputs=inputs)
        self._log = Log([module for modules in self._modules for module in modules])

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record what the model writes inside this context."""
        with tap(self._log.modules, recorder=lambda _: self._log):
            yield

    def take(self, start: int) -> KVStates:
        """The states written since the last call; ``start`` is their first position."""
        return _states(self._model, self._modules, self._log, start)


def taps_of(model: LanguageModel, *, inputs: bool) -> list[tuple[nn.Module, ...]]:
    """The modules of each layer that are tapped; of recurrent ones none without ``inputs``."""
    layers = zip(model.attentions, model.geometry.layers, strict=True)
    return [
        model.family.taps(attention) if inputs or layer.recurrence is None else ()
        for attention, layer in layers
    ]


@contextlib.contextmanager
def tap_keys_and_values(
    model: LanguageModel, inputs: bool = True
) -> Iterator[Callable[[int], KVStates]]:
    """Tap a model's key and value projections; yields a function that takes the next span.

    The function's argument is the span's first position. It returns the span's ``KVStates``, at
    the first of the family's capture points. Recurrent layers are tapped only for their ``inputs``.
    """
    taps = taps_of(model, inputs=inputs)
    with tap([module for modules in taps for module in modules]) as kept:
        yield lambda start: _states(model, taps, kept, start)


def _states(
    model: LanguageModel, taps: Sequence[Sequence[nn.Module]], kept: Recorder, start: int
) -> KVStates:
    """The states of all layers from a recorder's outputs, split as the family splits them."""
    outputs, none = iter(kept.take()), mx.zeros((1, 0, 0))
    pairs = [
        model.family.states(attention, list(itertools.islice(outputs, len(modules))))
        if modules
        else (none, none)
        for attention, modules in zip(model.attentions, taps, strict=True)
    ]
    keys, values = zip(*pairs, strict=True)
    return KVStates(keys, values, model.family.points[0], start)


def prefill(
    model: LanguageModel,
    tokens: Sequence[int],
    step_size: int = 2048,
    cache: list[Any] | None = None,
    begun: int = 0,
    kept: bool = False,
) -> Generator[KVStates, None, None]:
    """Prefill a model in chunks; yield what each chunk's projections wrote, evaluated.

    ``kept`` keeps recurrent layers' states after each chunk, and not what went into them.
    ``cache`` is the model's own cache, which holds the first ``begun`` tokens. If it is None, a
    cache is made that lives as long as the iteration. Each chunk costs one synchronisation, as in
    mlx-lm's own prefill.
    """
    cache = make_prompt_cache(model.model) if cache is None else cache
    for start in range(begun, len(tokens), step_size):
        chunk = mx.array(list(tokens[start : start + step_size]))
        with working():
            with tap_keys_and_values(model, inputs=not kept) as take:
                model.model(chunk[None], cache=cache)
                states = take(start)
            if kept:
                states = replace(states, kept=recurrent_states(model, cache))
            mx.eval([c.state for c in cache], states.arrays)
            del take
        yield states  # the caller may run the model before it asks for the next chunk
        del states
        mx.clear_cache()


def unread(model: LanguageModel, tokens: Sequence[int], start: int) -> KVStates:
    """What :func:`prefill` yields of a chunk, by shape and dtype alone: nothing is computed."""
    with tap_keys_and_values(model) as take:
        model.model(mx.array(list(tokens))[None], cache=make_prompt_cache(model.model))
        return take(start)


def recurrent_states(model: LanguageModel, cache: Sequence[Any]) -> dict[int, mx.array]:
    """The states in a hybrid's caches by layer, without the tails; see ``KVStates.kept``."""
    layers = enumerate(zip(model.geometry.layers, cache, strict=True))
    return {
        t: each.cache[1]
        for t, (layer, each) in layers
        if layer.recurrence is not None and len(layer.recurrence.parts) > 1
    }


def whole(
    model: LanguageModel, tokens: Sequence[int], capture: str, kept: bool = False
) -> KVStates:
    """All states that a model writes of a text, at the point ``capture``, evaluated.

    ``kept`` is as in :func:`prefill`.
    """
    read = prefill(model, tokens, kept=kept)
    spans = [move(states, model, capture) for states in read]
    keys, values = (
        tuple(mx.concatenate(list(parts), axis=1) for parts in zip(*side, strict=True))
        for side in ([span.keys for span in spans], [span.values for span in spans])
    )
    with working():
        mx.eval(keys, values)
    return KVStates(keys, values, capture, 0, spans[-1].kept)


def move(states: KVStates, model: LanguageModel, goal: str) -> KVStates:
    """Move a span's states to the capture point ``goal`` by the model's own norms and RoPE."""
    origin = states.capture
    if origin == goal:
        return states
    keys, values = [], []
    rotations = {start: Rotation(start) for start in map(states.first, range(len(states.keys)))}
    layers = zip(model.geometry.layers, model.finishes, strict=True)
    for index, (layer, finish) in enumerate(layers):
        if layer.recurrence is not None:  # its inputs have no norm and no position
            keys.append(states.keys[index])
            values.append(states.values[index])
            continue
        rotation = rotations[states.first(index)]
        heads = advance(to_heads(states.keys[index], layer), [finish], rotation, origin, goal)
        keys.append(flat(heads[0]))
        array = states.values[index]
        if finish.value_eps is not None:
            array = flat(normalise_values(to_heads(array, layer), [finish], origin)[0])
        values.append(array)
    return KVStates(tuple(keys), tuple(values), goal, states.start, states.kept)


def to_heads(array: mx.array, layer: LayerGeometry) -> mx.array:
    """Reshape (B, T, H * D) to (1, B, H, T, D)."""
    batch, tokens, _ = array.shape
    return array.reshape(1, batch, tokens, layer.kv_heads, -1).swapaxes(2, 3)
