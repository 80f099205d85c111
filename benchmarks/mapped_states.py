"""Recurrent states mapped from one hybrid to another, in closed form and self-distilled.

A head's state becomes A S B, where S is the state of the source's head at the same depth. The
convolution's tail goes through one matrix, or is left empty. ``benchmarks/recurrent.py`` compares
this with what ``fit`` makes. A translator brings the attention layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import DialogueStream
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import hidden_states, logits_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

ROUNDS, RIDGE = 20, 1e-4  # of alternating least squares
Tensors = dict[str, mx.array]
States = list[list[np.ndarray]]  # of each recurrent layer: the tail, and the heads' states


def states_of(model: LanguageModel, tokens: Sequence[int]) -> States:
    """The tail and the state of each recurrent layer after ``tokens``."""
    return held_by(conditions.prefill_layers(model, tokens, 2048, len(model.attentions)))


def held_by(cache: Sequence[Any]) -> States:
    """The tail and the state of each recurrent layer in a cache."""
    return [[np.array(a.astype(mx.float32))[0] for a in caches.held(c).values()]
            for c in cache if caches.is_recurrent(c)]  # fmt: skip


def put(cache: Sequence[Any], states: States) -> None:
    """Let the recurrent layers of a cache hold other states."""
    for each, own in zip(filter(caches.is_recurrent, cache), states, strict=True):
        for name, array in zip(caches.PARTS, own, strict=False):
            old = caches.held(each)[name]
            caches.put_part(each, name, mx.array(array[None]).astype(old.dtype))


def bilinear(given: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A (dv', dv) and B (dk, dk') with wanted (N, dv', dk') near A given (N, dv, dk) B."""
    b = np.eye(given.shape[2], wanted.shape[2])
    a = np.zeros((wanted.shape[1], given.shape[1]))
    for _ in range(ROUNDS):
        right = given @ b
        a = np.linalg.solve(
            _ridged(np.einsum("nik,njk->ij", right, right)), np.einsum("nik,njk->ij", right, wanted)
        ).T
        left = a @ given
        b = np.linalg.solve(
            _ridged(np.einsum("nki,nkj->ij", left, left)), np.einsum("nki,nkj->ij", left, wanted)
        )
    return a, b


def _ridged(square: np.ndarray) -> np.ndarray:
    return square + RIDGE * np.trace(square) / len(square) * np.eye(len(square))


class StateMaps:
    """Maps of states between the recurrent layers of two models.

    ``tensors`` holds, by the number T of a recurrent layer: ``T.a`` (H', dv', dv) and ``T.b``
    (H', dk, dk') of its heads, and, if there are ``tails``, ``T.tail``, the matrix of its tail as
    one row.
    """

    def __init__(self, source: LanguageModel, target: LanguageModel, tails: bool = True) -> None:
        self.source, self.names = source, ("tail", "a", "b")[not tails :]
        theirs, ours = (
            [g.recurrence.parts for g in model.geometry.layers if g.recurrence is not None]
            for model in (source, target)
        )
        self.shapes = [tail for tail, _ in ours]
        self.layers = [round(t * (len(theirs) - 1) / max(1, len(ours) - 1))
                       for t in range(len(ours))]  # fmt: skip
        self.tensors: Tensors = {}

    def fit(self, target: LanguageModel, prefixes: Sequence[Sequence[int]]) -> None:
        """Solve the maps from both models' states after ``prefixes``."""
        both = [(states_of(self.source, p), states_of(target, p)) for p in prefixes]
        for t, s in enumerate(self.layers):
            given, wanted = ([np.stack([each[side][n][part] for each in both]).astype(np.float64)
                              for part in (0, 1)] for side, n in ((0, s), (1, t)))  # fmt: skip
            heads = self._heads(given[1].shape[1], wanted[1].shape[1])
            pairs = [bilinear(given[1][:, h], wanted[1][:, own]) for own, h in enumerate(heads)]
            found = {name: np.stack(each) for name, each in zip("ab", zip(*pairs, strict=True),
                                                                strict=True)}  # fmt: skip
            if "tail" in self.names:
                tails, goals = (each[0].reshape(len(both), -1) for each in (given, wanted))
                found["tail"] = np.linalg.solve(_ridged(tails.T @ tails), tails.T @ goals)
            for name, array in found.items():
                self.tensors[f"{t}.{name}"] = mx.array(array.astype(np.float32))

    def shuffled(self) -> StateMaps:
        """Control: each layer has the maps of the one before it."""
        made, layers = copy.copy(self), range(len(self.layers))
        made.tensors = {
            f"{t}.{name}": self.tensors[f"{t - 1 if t else layers[-1]}.{name}"]
            for t in layers
            for name in self.names
        }
        return made

    @staticmethod
    def _heads(theirs: int, ours: int) -> list[int]:
        return [own * theirs // ours for own in range(ours)]

    def mapped(self, t: int, found: States, tensors: Tensors) -> tuple[mx.array, mx.array]:
        """The tail and the state of the target's recurrent layer ``t``, without a batch."""
        tail, state = (mx.array(each) for each in found[self.layers[t]])
        a, b = tensors[f"{t}.a"], tensors[f"{t}.b"]
        state = a @ state[mx.array(self._heads(state.shape[0], a.shape[0]))] @ b
        if "tail" not in self.names:
            return mx.zeros(self.shapes[t]), state
        tail = tail.reshape(1, -1) @ tensors[f"{t}.tail"]
        return tail.reshape(self.shapes[t]), state

    def __call__(self, found: States) -> States:
        """The target's tails and states from the source's."""
        return [list(map(np.array, self.mapped(t, found, self.tensors)))
                for t in range(len(self.layers))]  # fmt: skip


@dataclass(frozen=True)
class Crossing:
    """A way from one model to another: makes the target's cache of a prefix.

    Attributes:
        source: The model that reads the prefix.
        target: The model whose cache is made.
        translator: Makes all of it, or all but the states.
        maps: What the target's states are made of the source's by, if there is such.
    """

    source: LanguageModel
    target: LanguageModel
    translator: Translator
    maps: Callable[[States], States] | None = None

    def __call__(self, prefix: Any) -> list[Any]:
        cache = conditions.translated(self.source, self.target, self.translator)(prefix)
        if self.maps is not None:
            put(cache, self.maps(states_of(self.source, prefix[:-1])))
        return cache

    def shuffled(self) -> Crossing:
        """Control: each layer has the maps of the one before it."""
        translator = conditions.shuffled(self.translator)
        maps = self.maps.shuffled() if isinstance(self.maps, StateMaps) else self.maps
        return replace(self, translator=translator, maps=maps)

    def go_on(self, own: list[Any], spans: Sequence[KVStates], other: list[Any]) -> None:
        """Bring ``own``, a cache of the target, to where ``other``, one of the source, is.

        ``spans`` are what the source wrote of the tokens that ``own`` does not hold.
        """
        for span in spans:
            moved = capture.move(span, self.source, self.translator.config.capture)
            made = self.translator(moved, self.target.geometry.first_kept(span.end))
            caches.append(own, made, self.target)
            mx.eval(caches.arrays(own))
        if self.maps is not None:
            put(own, self.maps(held_by(other)))


def there_and_back(there: Crossing, back: Crossing) -> Callable[[Any], list[Any]]:
    """The first model's cache of a prefix of which the second one reads the second half.

    The second model reads it on what it was handed, and hands it back.
    """

    def made(prefix: Any) -> list[Any]:
        half, first = len(prefix) // 2, there.source
        own = conditions.prefill_layers(first, prefix[:half], 2048, len(first.attentions))
        other = there(prefix[: half + 1])
        spans = list(capture.prefill(there.target, prefix[:-1], cache=other, begun=half))
        back.go_on(own, spans, other)
        return own

    return made


def distilled(
    target: LanguageModel,
    translator: Translator,
    maps: StateMaps,
    stream: DialogueStream,
    recipe: Recipe,
    told: Callable[[int, float], None] = lambda step, kl: None,
) -> Translator:
    """Refine ``maps`` and the attention layers' translator together, by stage 2's loss.

    Unlike ``train`` it differentiates the whole continuation at once, so it is for short ones.

    Args:
        target: The model that reads what is made.
        translator: Its maps of attention layers are refined, the others are left as they are.
        maps: Changed in place.
        stream: Sample number i is read at step i // ``recipe.batch``.
        recipe: Steps, batch, the first learning rate, warm-up and clipping.
        told: Is given each step's number and the mean KL of its samples.
    """
    layers = target.geometry.layers
    attention = [t for t, layer in enumerate(layers) if layer.recurrence is None]
    whole = MLXTranslator.from_arrays(translator.config, translator.floats())
    own = {name: a for t in attention for name, a in whole.of_layer(t).items()}
    made = MLXTranslator(translator.config, own | maps.tensors)
    for step in range(recipe.steps):
        divergence = 0.0
        for number in range(recipe.batch):
            sample = stream.sample(step * recipe.batch + number)
            reading = gradients.read(maps.source, target, sample, translator.config.capture)
            found = states_of(maps.source, sample.prefix[:-1])

            def loss(tensors: Tensors, reading: Any = reading, found: States = found) -> mx.array:
                cache = _cache(target, made, maps, tensors, reading, found)
                return _divergence(target, cache, reading)

            kl, slopes = mx.value_and_grad(loss)(made.tensors)
            made.learn({name: slope / recipe.batch for name, slope in slopes.items()})
            divergence += float(kl.item()) / recipe.batch  # type: ignore[arg-type]
        made.update(recipe.learning_rates[0] * recipe.rate_factor(step), recipe.clip)
        told(step, divergence)
    maps.tensors = {name: made.tensors[name] for name in maps.tensors}
    arrays = whole.arrays() | {name: np.array(made.tensors[name]) for name in own}
    return build(translator.config, Weights.from_float32(arrays, "float32"))


def _cache(
    target: LanguageModel,
    made: MLXTranslator,
    maps: StateMaps,
    tensors: Tensors,
    reading: gradients.Reading,
    found: States,
) -> list[Any]:
    """Caches with translated keys and values and with mapped states, lazily."""
    states, number = reading.states, 0
    assert states is not None
    cache = make_prompt_cache(target.model)
    for t, each in enumerate(cache):
        names, parts = caches.SIDES, tuple[mx.array, ...]()
        if caches.is_recurrent(each):
            names, parts = caches.PARTS, maps.mapped(number, found, tensors)
            parts, number = tuple(part[None] for part in parts), number + 1
        else:
            read = lambda side, s: states.side(side)[s][0].astype(target.cache_dtype)  # noqa: E731
            keys, values = made.layer(t, read, tensors)
            parts = caches.entry(target, t, keys, values, made.config.capture, 0, None)
            each.offset = len(reading.sample.prefix) - 1
        for name, array in zip(names, parts, strict=True):
            caches.put_part(each, name, array)
    return cache


def _divergence(target: LanguageModel, cache: list[Any], reading: gradients.Reading) -> mx.array:
    """KL(native || student), a mean over the continuation's tokens."""
    prefix, continuation = reading.sample.prefix, reading.sample.continuation
    student = hidden_states(target, (prefix[-1], *continuation[:-1]), cache)
    native, seen = (logits_of(target, each).astype(mx.float32)
                    for each in (reading.teacher, student))  # fmt: skip
    native, seen = (each - mx.logsumexp(each, axis=-1, keepdims=True) for each in (native, seen))
    found: mx.array = (mx.exp(native) * (native - seen)).sum(-1).mean()
    return found
