"""Taps: record what a model's projections write during an ordinary mlx-lm prefill.

A tap gives a projection a subclass of its own class, whose calls are recorded. Parameters,
quantisation and isinstance checks stay the same, and the class is restored on exit. Recording is
bit-exact on every family tried.
"""

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx, nn, on_gpu

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.models.keys import Rotation, advance, normalise_values
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import hearing, is_changed
from kvlingo_mlx.models.states import KVStates, flat, joined, stacked
from kvlingo_mlx.threads import working


class Recorder:
    """The outputs of tapped modules since they were last taken, oldest first."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._runs: list[list[mx.array]] = [[] for _ in modules]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread runs inside the context, which is a unit of work.

        Raises:
            RuntimeError: This thread already taps one of the modules; captures cannot overlap.
        """
        runs = {id(each): run for each, run in zip(self.modules, self._runs, strict=True)}
        with working():
            if any(map(is_changed, self.modules)):
                raise RuntimeError("this model is being captured already: one capture at a time")
            with hearing(self.modules, lambda module, output: runs[id(module)].append(output)):
                yield

    def take(self) -> list[mx.array]:
        """One output per module, of all its runs since the last call; they are then dropped."""
        counts = list(map(len, self._runs))
        if len({*counts}) != 1 or not counts[0]:
            raise RuntimeError(
                f"{sum(map(bool, counts))} of {len(counts)} tapped projections ran, "
                f"{min(counts)} to {max(counts)} times; is the model compiled, or are its layers "
                "split over machines?"
            )
        outputs = [runs[0] if counts[0] == 1 else mx.concatenate(runs, 1) for runs in self._runs]
        for runs in self._runs:
            runs.clear()
        return outputs


class Ear:
    """Taps of a model's key and value projections that record only inside ``listening``.

    Outside it the model is unchanged, and what others run on it is not recorded. Recurrent layers
    are tapped only for their ``inputs``.
    """

    def __init__(self, model: LanguageModel, *, inputs: bool = True) -> None:
        self._model = model
        self._taps: list[tuple[nn.Module, ...]] = [
            model.family.taps(attention) if inputs or layer.recurrence is None else ()
            for attention, layer in zip(model.attentions, model.geometry.layers, strict=True)
        ]
        self._recorder = Recorder([module for modules in self._taps for module in modules])
        self.listening = self._recorder.recording

    def take(self, start: int) -> KVStates:
        """The states written since the last call, at the first of the family's capture points.

        ``start`` is the position of the first of them.
        """
        outputs, none = iter(self._recorder.take()), mx.zeros((1, 0, 0))
        pairs = [
            self._model.family.states(attention, list(itertools.islice(outputs, len(modules))))
            if modules
            else (none, none)
            for attention, modules in zip(self._model.attentions, self._taps, strict=True)
        ]
        sides = zip(*pairs, strict=True)
        keys, values = map(stacked, sides) if on_gpu() else sides
        return KVStates(keys, values, self._model.family.points[0], start)


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
            ear = Ear(model, inputs=not kept)
            with ear.listening():
                model.model(chunk[None], cache=cache)
                states = ear.take(start)
            if kept:
                states = replace(states, kept=recurrent_states(model, cache))
            mx.eval([c.state for c in cache], states.arrays)
            del ear
        yield states  # the caller may run the model before it asks for the next chunk
        del states
        mx.clear_cache()


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
    found = joined([move(states, model, capture) for states in read])
    with working():
        mx.eval(found.arrays)
    return found


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
