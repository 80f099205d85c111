"""A gradient that is taken one layer at a time, from the last layer down.

A pass without gradient keeps what each layer read; then each layer runs once more, with its
gradient. So one layer's activations are in memory at a time, and since each layer is evaluated by
itself, MLX does not work ahead. mlx-lm's own ``grad_checkpoint`` would give gradients of zero for a
cache's keys and values, as the cache object hides them; here they are arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx.utils import tree_flatten, tree_map

from kvlingo_mlx import caches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import Call, calling

Entry = tuple[mx.array, ...]  # what a layer's cache holds: keys and values, or a tail and a state


@dataclass(frozen=True)
class LayerCall:
    """A layer's call in a pass: what it was given, and what it returned.

    ``inputs`` are the arrays it was given that layers before it returned; ``caches`` are those of
    the pass among its arguments. Most layers have one of each.
    """

    call: Call
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: list[mx.array]
    caches: list[Any]
    output: Any = None

    def run(self, inputs: Sequence[mx.array], entries: Sequence[mx.array]) -> Any:
        """The same call with other arrays; ``entries`` are its caches', one after the other."""
        parts = zip(self.caches, self.by_cache(entries), strict=True)
        copies = [_with(each, arrays) for each, arrays in parts]
        both = zip([*self.inputs, *self.caches], [*inputs, *copies], strict=True)
        new = {id(old): each for old, each in both}
        args, kwargs = tree_map(lambda each: new.get(id(each), each), self.arguments)
        return self.call(*args, **kwargs)

    @property
    def entries(self) -> list[mx.array]:
        """The arrays of its caches: keys and values, or a tail and a state."""
        return caches.arrays(self.caches)

    def by_cache(self, arrays: Sequence[mx.array]) -> Iterator[Entry]:
        """As many arrays as ``entries`` has, by cache."""
        left = iter(arrays)
        for cache in self.caches:
            yield tuple(next(left) for _ in caches.held(cache))


class Pass:
    """One pass of a model over ``cache``, which stays as it was before.

    ``run`` is the pass, which returns (M, width) final hidden states; ``place`` is the context in
    which it, and each layer of it, runs.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: Sequence[Any],
        run: Callable[[], mx.array],
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._layers, self._run, self._place = model.model.layers, run, place
        self._numbers = {id(each): number for number, each in enumerate(cache)}
        self._steps: list[LayerCall] = []
        returned: set[int] = set()

        def kept(call: Call) -> Call:
            def once(*args: Any, **kwargs: Any) -> Any:
                given = _leaves((args, kwargs))
                inputs = [each for each in given if id(each) in returned]
                if self._steps and not inputs:
                    raise ValueError(f"the layers of {model.name} do not read others' outputs")
                own = [each for each in given if id(each) in self._numbers]
                step = LayerCall(call, (args, kwargs), inputs, own)
                output = step.run(inputs, step.entries)
                mx.eval(output)
                returned.update(map(id, _floats(output)))
                self._steps.append(replace(step, output=output))
                return output

            return once

        with place(), calling(self._layers, kept):
            self.hidden = run()
            mx.eval(self.hidden)

    def gradients(self, gradient: mx.array) -> Iterator[tuple[int, Entry]]:
        """The gradients of each cache's entries from that of ``hidden``, the last cache's first.

        Yields:
            The cache's number, and the gradients of its arrays. Whoever needs no more ends the
            iteration, and the layers below are not run.
        """
        wanted: dict[int, mx.array] = {}  # gradients of what layers returned

        def add(arrays: Sequence[mx.array], found: Sequence[mx.array]) -> None:
            mx.eval(found)
            for array, each in zip(arrays, found, strict=True):
                wanted[id(array)] = wanted[id(array)] + each if id(array) in wanted else each

        last = _floats(self._steps[-1].output)
        with self._place():
            found = mx.vjp(self._after, last, [gradient])[1]
        add(last, found)
        while self._steps:
            step = self._steps.pop()
            outputs, count = _floats(step.output), len(step.inputs)

            def again(
                *arrays: mx.array, step: LayerCall = step, count: int = count
            ) -> list[mx.array]:
                return _floats(step.run(arrays[:count], arrays[count:]))

            known = [wanted.pop(id(each), None) for each in outputs]
            both = zip(known, outputs, strict=True)
            gradients = [mx.zeros_like(out) if each is None else each for each, out in both]
            with self._place():
                _, found = mx.vjp(again, [*step.inputs, *step.entries], gradients)
            add(step.inputs, found[:count])
            entries = found[count:]
            mx.eval(entries)
            for cache, entry in zip(step.caches, step.by_cache(entries), strict=True):
                yield self._numbers[id(cache)], entry

    def _after(self, *last: mx.array) -> mx.array:
        """The final hidden states from the last layer's output."""
        outputs = [step.output for step in self._steps]
        new = dict(zip(map(id, _floats(outputs[-1])), last, strict=True))
        outputs[-1] = tree_map(lambda each: new.get(id(each), each), outputs[-1])
        told = iter(outputs)
        with calling(self._layers, lambda call: lambda *args, **kwargs: next(told)):
            return self._run()


def _floats(found: Any) -> list[mx.array]:
    """The arrays of numbers that may have a gradient in what a layer returned."""
    arrays = [each for each in _leaves(found) if isinstance(each, mx.array)]
    return [each for each in arrays if mx.issubdtype(each.dtype, mx.floating)]


def _leaves(tree: Any) -> list[Any]:
    pairs: Any = tree_flatten(tree)
    return [each for _, each in pairs]


def _with(cache: Any, arrays: Sequence[mx.array]) -> Any:
    """A copy of a cache with other arrays; what a layer writes to it the cache does not see."""
    made = caches.shared(cache)
    for name, array in zip(caches.held(cache), arrays, strict=True):
        caches.put_part(made, name, array)
    return made
