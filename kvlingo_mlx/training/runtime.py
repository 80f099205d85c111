"""What a training needs of a runtime: two frozen models, and translators that learn.

MLX (``on_mlx``) and PyTorch (the room ``cuda``) each have a :class:`Pair`. All else of a training
is the same code: data, recipe, stages, checkpoints, log, interruption. What crosses between the two
is NumPy; what a pair hands out as ``Any`` (readings, states, rows) goes back to the same pair only.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.passes import Rows
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.forward import Trainable
from kvlingo_mlx.training.objectives import Loss, Objective

# A frozen model and its tokenizer: a LanguageModel, or the TorchModel of ``cuda``. Both have name,
# revision, path, family, tokenizer, geometry, context_length, precision, projections,
# weights_fingerprint and spec().
Model = Any


QUERIES = 128  # of a text, whose attention is matched


def matched_positions(tokens: int, aligned: AlignedPrefix | None = None) -> np.ndarray:
    """The positions of the queries that are matched, evenly spaced over a text.

    Between two tokenizers none is amid tokens for which translated entries stand together.
    """
    found = np.arange(tokens)
    if aligned is not None:
        found = np.union1d(aligned.others(tokens), aligned.groups[:, 1] - 1)
    return found[np.linspace(0, len(found) - 1, min(len(found), QUERIES)).round().astype(int)]


def shapes(arrays: Iterable[Any]) -> list[tuple[int, ...]]:
    """The shapes of either runtime's arrays."""
    return [tuple(array.shape) for array in arrays]


def _unmatched(target: Model) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the attention of {target.name} does not read its cache's entries as they are, so what it "
        "gathers cannot be matched; leave matching out"
    )


def continued(sample: Sample) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """The pass between two tokenizers that predicts a continuation, after the translated entries.

    It also reads the prefix tokens that the target prefills itself, and begins with them; then come
    the last prefix token and the continuation.

    Returns:
        The tokens, their positions (C,), and which of them see which entries, (C, S + C).
    """
    aligned, following = sample.aligned, (sample.prefix[-1], *sample.continuation[:-1])
    assert aligned is not None
    positions = aligned.others(len(sample.prefix) - 1 + len(following))
    own = (sample.prefix[position] for position in aligned.own)
    return (*own, *following), positions, aligned.seen(positions, positions)


@dataclass(frozen=True)
class Attended:
    """Some queries of a text in one attention module."""

    queries: Any  # (1, Hq, M, D), normed and rotated
    shapes: Sequence[tuple[int, ...]]  # of the keys and values (1, H, T, D) that they gather from
    visible: Any  # (M, T)
    attend: Callable[..., Any]  # the runtime's attention, in float32

    def gathered(self, keys: Any, values: Any, visible: np.ndarray | None = None) -> Any:
        """What the queries gather from such entries; of others they see ``visible``."""
        return self.attend(self.queries, keys, values, self.visible if visible is None else visible)


@dataclass(frozen=True)
class PairReading:
    """The results of the two no-gradient passes over a conversation, which all translators share.

    States and queries are those of the pair's runtime.
    """

    sample: Sample
    states: Any  # the source's, of ``prefix[:-1]``; between two tokenizers, of translated tokens
    native: Any  # the target's own of ``prefix[:-1]``, in its native layers
    # (M, width) the target's final hidden states that predict the continuation, from its own cache
    teacher: Any
    # Of the whole text, where attention is matched: both models' states, and the target's queries.
    whole: tuple[Any, Any] | None = None
    attended: Sequence[Sequence[Attended]] = ()


class Pair(Rows, Protocol):
    """Two models of one runtime, and all that a training computes with them."""

    source: Any
    target: Any
    runtime: ClassVar[str]  # mlx or torch
    gradients: ClassVar[Any]  # the runtime's module of passes

    @property
    def versions(self) -> Mapping[str, str]: ...

    def trainable(self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]) -> Trainable:
        """A translator that begins with ``arrays``."""

    def read(self, sample: Sample, config: TranslatorConfig, attends: bool = False) -> PairReading:
        """Both no-gradient passes over a conversation; with ``attends`` it can be matched."""
        more = {"kept": True} if config.state_maps else {}  # which PyTorch does not know
        read = partial(self.gradients.read, self.source, self.target, sample, config.capture)
        found: PairReading = read(config.native_layers, attends=attends, **more)
        if attends:
            layers = zip(self.target.geometry.layers, found.attended, strict=True)
            if any(layer.attends and not heard for layer, heard in layers):
                raise _unmatched(self.target)
        return found

    def entry(self, layer: int, sides: Sequence[Any], capture: str, at: Any = None) -> Any:
        """Keys and values (T, width) as the target's cache has them, at positions ``at`` (T,)."""

    def match(self, translator: Trainable, reading: PairReading, scale: float = 0.0) -> float:
        """The share of what the target's attention gathers that is wrong: a mean over layers.

        It is the squared error of the heads' outputs where every entry is translated. Like
        ``loss``, it adds ``scale`` times its gradient.

        Every position of a text stands for a switch there, and each layer learns by itself, from
        the target's own queries: no gradient goes through the model. Between two tokenizers the
        tokens that the target prefills have its own entries.
        """
        first, own = translator.config.native_layers, reading.attended
        layers = [t for t in range(first, len(own)) if own[t] and reading.sample.num_translated]
        errors = ((t, partial(self._unlike, translator, reading, t)) for t in layers)
        found = [translator.descend(t, error, scale / len(layers)) for t, error in errors]
        return sum(each / len(layers) for each in found)

    def _unlike(
        self, translator: Trainable, reading: PairReading, layer: int, tensors: Mapping[str, Any]
    ) -> Any:
        """One layer's share; refuses a target whose attention is given entries of other shapes."""
        assert reading.whole is not None
        (states, native), aligned, do = reading.whole, reading.sample.aligned, translator.operations
        ours: Sequence[Any] = translator.layer(layer, states, tensors, self.target.cache_dtype)
        its = [side[layer].reshape(side[layer].shape[-2:]) for side in (native.keys, native.values)]
        placed = partial(self.entry, layer, capture=translator.config.capture)
        at: Any = None
        seen: Any = None
        if aligned is not None:  # the target's own entries stand behind the translated ones
            tokens, both = len(its[0]), zip(ours, its, strict=True)
            others = aligned.others(tokens)
            at = np.concatenate([aligned.positions, others])
            seen = aligned.seen(matched_positions(tokens, aligned), others)
            ours = [do.joined([a.T, b[others.tolist()].T]).T for a, b in both]
        (keys, values), right, errors = placed(ours, at=at), placed(its), list[Any]()
        for each in reading.attended[layer]:
            if shapes(right) != each.shapes:
                raise _unmatched(self.target)
            wanted = each.gathered(*right)
            wrong = (each.gathered(keys, values, seen) - wanted).square().sum()
            errors.append(wrong / wanted.square().sum())
        return sum(errors) / len(errors)

    def loss(self, translator: Any, reading: Any, objective: Objective, scale: float = 0.0) -> Loss:
        """The loss of one conversation decoded from its translated cache (equation for L).

        A ``scale`` other than 0 adds that multiple of its gradient to the translator's.
        """
        return self.gradients.conversation_loss(  # type: ignore[no-any-return]
            self.target, translator, reading, objective, scale=scale
        )

    def check_gradients(self, sample: Sample, config: TranslatorConfig) -> None:
        """Refuse (UnsupportedModelError) a target through which no gradient reaches its cache.

        PyTorch has every gradient of the families that it opens.
        """

    def check_memory(
        self, config: TranslatorConfig, lengths: tuple[int, int], rates: int, plan: Any
    ) -> str:
        """A line that says what a training takes; empty where that is not known.

        ``lengths`` are the tokens of the longest prefix and continuation, ``plan`` is a
        :class:`.plan.TrainingPlan`.

        Raises:
            NotEnoughMemoryError: The message says what would fit.
        """
        return ""  # as of what a GPU's allocator takes with PyTorch

    def reconstruction(
        self, translator: Trainable, states: tuple[Any, Any], scale: float = 0.0
    ) -> float:
        """The squared error of the target's states in a span, summed over tokens, widths and maps.

        A translator without a closed form is first trained on it (equation for the closed form;
        appendix "Training protocol", MLP translators). Every position is charged equally.
        """
        read, wanted = states

        def error(t: int, tensors: Mapping[str, Any]) -> Any:
            goals = wanted.keys[t], wanted.values[t]
            both = zip(translator.layer(t, read, tensors), goals, strict=True)
            cast, float32 = translator.operations.cast, translator.operations.float32
            pairs = ((cast(each, float32) for each in pair) for pair in both)
            return sum((ours - goal).square().sum() for ours, goal in pairs)

        layers = range(len(translator.config.target.layers))
        return sum(translator.descend(t, partial(error, t), scale) for t in layers)

    def receipt(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], own: HeldOut | None = None
    ) -> dict[str, Any] | None:
        """The quality on the bundled conversations, and on samples of the user's (``own``).

        None if no conversation fits.
        """


@dataclass
class Readings:
    """Both models' passes over conversations, kept where stages learn from them in turn.

    In a pair's place it gives a closed form every token of the first ``reads`` conversations, as a
    training that matches attention needs them. So they are read once for both.
    """

    pair: Pair
    config: TranslatorConfig  # its capture point and native layers count
    reads: int | None  # conversations that are learned from in turn; None: ever new ones
    kept: dict[Sample, Any] = field(default_factory=dict)

    def of(self, sample: Sample, attends: bool = False) -> Any:
        """A conversation read by both models; see :meth:`Pair.read`."""
        found = self.kept.get(sample)
        if found is None or (attends and found.whole is None):
            found = self.pair.read(sample, self.config, attends)
            if self.reads is not None:
                self.kept[sample] = found
        return found

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[Any, Any]]:
        """See :meth:`.Rows.spans`."""
        if sample.aligned is None and (len(self.kept) < (self.reads or 0) or sample in self.kept):
            yield self.of(sample, attends=True).whole
        else:
            yield from self.pair.spans(sample, capture)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)


def pair_of(source: Model, target: Model) -> Pair:
    """Two models for a training, on the runtime that loaded them.

    Raises:
        ValueError: They were loaded by different runtimes.
    """
    kinds = {type(model).__name__ for model in (source, target)}
    if len(kinds) > 1:
        raise ValueError(
            f"{source.name} and {target.name} were loaded by different runtimes; load both with "
            "kvlingo_mlx.load, or both for PyTorch"
        )
    room, name = ("cuda", "Torch") if kinds == {"TorchModel"} else ("training.on_mlx", "MLX")
    pairs: Any = importlib.import_module(f"kvlingo_mlx.{room}.pair")
    return getattr(pairs, f"{name}Pair")(source, target)  # type: ignore[no-any-return]
