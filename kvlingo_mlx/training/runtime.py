"""What a training needs of a runtime: two frozen models, and translators that learn.

MLX (``on_mlx``) and PyTorch (the room ``cuda``) each have a :class:`Pair`. All else of a training
is the same code: data, recipe, stages, checkpoints, log, interruption. What crosses between the two
is NumPy; what a pair hands out as ``Any`` (readings, states, rows) goes back to the same pair only.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.stage1.passes import Rows
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
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


def entries_seen(aligned: AlignedPrefix, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The positions of translated entries (S,) and of others (C,), and which queries see them.

    It is for two tokenizers; the queries are those of :func:`matched_positions`, (M, S + C).
    """
    others = aligned.others(tokens)
    return aligned.positions, others, aligned.seen(matched_positions(tokens, aligned), others)


def shapes(arrays: Iterable[Any]) -> list[tuple[int, ...]]:
    """The shapes of either runtime's arrays."""
    return [tuple(array.shape) for array in arrays]


def check_entries(target: Model, ours: Sequence[Any], theirs: Sequence[tuple[int, ...]]) -> None:
    """Refuse (UnsupportedModelError) a target whose attention is given entries of other shapes."""
    if shapes(ours) != theirs:
        raise _unmatched(target)


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
    attended: Sequence[Sequence[Any]] = ()


class Trainable(Protocol):
    """A translator in training, with its AdamW optimizer and the gradients so far."""

    @property
    def config(self) -> TranslatorConfig: ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of its tensors by name, in float32."""

    def state(self) -> dict[str, np.ndarray]:
        """Its tensors and, as ``NAME/exp_avg``, ``/exp_avg_sq`` and ``/step``, its optimizer."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what gave :meth:`state`, in either runtime."""

    def gather(self, group: Group) -> bool:
        """Sum the gradients over all processes; returns whether they are finite."""

    def update(self, rate: float, clip: float) -> None:
        """Take one AdamW step, the gradients clipped to the norm ``clip``; drop the gradients."""

    def forget(self) -> None:
        """Drop the gradients."""


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

    def match(self, translator: Any, reading: Any, scale: float = 0.0) -> float:
        """The share of what the target's attention gathers that is wrong: a mean over layers.

        It is the squared error of the heads' outputs where every entry is translated. Like
        ``loss``, it adds ``scale`` times its gradient.

        Every position of a text stands for a switch there, and each layer learns by itself, from
        the target's own queries: no gradient goes through the model. Between two tokenizers the
        tokens that the target prefills have its own entries.
        """
        first, own, match = translator.config.native_layers, reading.attended, self.gradients.match
        layers = [t for t in range(first, len(own)) if own[t] and reading.sample.num_translated]
        aligned, tokens = reading.sample.aligned, reading.whole[1].keys[0].shape[-2]
        between = None if aligned is None else entries_seen(aligned, tokens)
        passes = self.target, translator, reading
        return sum(match(*passes, t, scale / len(layers), between) / len(layers) for t in layers)

    def loss(self, translator: Any, reading: Any, objective: Objective, scale: float = 0.0) -> Loss:
        """The loss of one conversation decoded from its translated cache (equation for L).

        A ``scale`` other than 0 adds that multiple of its gradient to the translator's.
        """
        return self.gradients.conversation_loss(  # type: ignore[no-any-return]
            self.target, translator, reading, objective, scale=scale
        )

    def check_gradients(self, sample: Sample, config: TranslatorConfig) -> None:
        """Refuse (UnsupportedModelError) a target through which no gradient reaches its cache."""

    def check_memory(
        self, config: TranslatorConfig, lengths: tuple[int, int], rates: int, plan: Any
    ) -> str:
        """A line that says what a training takes; empty where that is not known.

        ``lengths`` are the tokens of the longest prefix and continuation, ``plan`` is a
        :class:`.plan.TrainingPlan`.

        Raises:
            NotEnoughMemoryError: The message says what would fit.
        """

    def states(self, sample: Sample, capture: str) -> tuple[Any, Any]:
        """The source's and the target's states of a whole prefix, row by row."""

    def reconstruction(self, translator: Any, states: tuple[Any, Any], scale: float = 0.0) -> float:
        """The squared error of the target's states, summed over tokens, widths and maps.

        A translator without a closed form is first trained on it (equation for the closed form;
        appendix "Training protocol", MLP translators). Every position is charged equally.
        """
        found: float = self.gradients.reconstruction_loss(translator, *states, scale=scale)
        return found

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
