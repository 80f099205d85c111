"""Taps: record what a model's projections write during an ordinary mlx-lm prefill.

A tap swaps the class of a projection instance for a subclass that records its output.
Parameters, quantisation and isinstance checks stay as they were, and the class is put
back on exit (research: bit-exact on every family tried).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.keys import Rotation, advance
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import KVStates


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
        """All outputs since the last call, one a module; the recorder lets go of them."""
        if len(self._outputs) != len(self.modules):
            raise RuntimeError(
                f"{len(self._outputs)} of {len(self.modules)} tapped projections ran; "
                "is the model compiled, or are its layers split over machines?"
            )
        outputs = [self._outputs[index] for index in range(len(self.modules))]
        self._outputs = {}
        return outputs


def _tapped(cls: type[nn.Module], record: Callable[[mx.array], None]) -> type[nn.Module]:
    class Tapped(cls):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            output = super().__call__(x)
            record(output)
            return output

    Tapped.__name__ = cls.__name__
    return Tapped


@contextlib.contextmanager
def tap(modules: Sequence[nn.Module]) -> Iterator[Recorder]:
    """Record the outputs of ``modules`` while the context lasts.

    Raises:
        RuntimeError: A module is tapped already (one capture at a time per model).
    """
    recorder = Recorder(modules)
    classes = [type(module) for module in modules]
    if any(cls.__qualname__.startswith("_tapped") for cls in classes):
        raise RuntimeError("this model is being captured already: one capture at a time")
    try:
        for index, (module, cls) in enumerate(zip(modules, classes, strict=True)):
            record = lambda output, index=index: recorder.put(index, output)  # noqa: E731
            module.__class__ = _tapped(cls, record)
        yield recorder
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


@contextlib.contextmanager
def tap_keys_and_values(model: LanguageModel) -> Iterator[Callable[[int], KVStates]]:
    """Tap a model's key and value projections; yields a function that takes a span.

    The function gets the span's first position and returns its pre-norm ``KVStates``.
    """
    attentions = model.attentions
    modules = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
    with tap(modules) as recorder:

        def take(start: int) -> KVStates:
            outputs = recorder.take()
            half = len(attentions)
            return KVStates(tuple(outputs[:half]), tuple(outputs[half:]), "pre_norm", start)

        yield take


def prefill(
    model: LanguageModel, tokens: Sequence[int], step_size: int = 2048
) -> Generator[KVStates, None, None]:
    """Prefill a model in chunks; yield what each chunk wrote, evaluated, pre-norm.

    The model's own cache lives only as long as the iteration. Each chunk costs one
    synchronisation, as in mlx-lm's own prefill.
    """
    cache = make_prompt_cache(model.model)
    with tap_keys_and_values(model) as take:
        for start in range(0, len(tokens), step_size):
            chunk = mx.array(list(tokens[start : start + step_size]))
            model.model(chunk[None], cache=cache)
            states = take(start)
            mx.eval([c.state for c in cache], states.arrays)
            yield states
            del states
            mx.clear_cache()


def move(states: KVStates, model: LanguageModel, goal: str) -> KVStates:
    """Take a span's keys on to the capture point ``goal`` with the model's own k_norm and RoPE."""
    if states.capture == goal:
        return states
    rotation, keys = Rotation(states.start), []
    for array, layer, finish in zip(
        states.keys, model.geometry.layers, model.key_finishes, strict=True
    ):
        batch, tokens, width = array.shape
        heads = array.reshape(1, batch, tokens, layer.kv_heads, -1).swapaxes(2, 3)
        heads = advance(heads, [finish], rotation, states.capture, goal)
        keys.append(heads[0].swapaxes(1, 2).reshape(batch, tokens, width))
    return KVStates(tuple(keys), states.values, goal, states.start)
