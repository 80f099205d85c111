"""One conversation's part in a step: two passes without gradient, one with gradient.

Source and target are frozen. Translated keys and values enter the target as leaves of the graph.
After the backward pass through the target, each layer's map runs once more, with gradient, and
receives the gradients of its leaves. So no graph of the translator exists beside the target's, and
only one layer's graph of the translator exists at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from kvlingo_mlx.cuda.aligned import translated_rows
from kvlingo_mlx.cuda.losses import loss_of
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import Loss, Objective

Entry = tuple[torch.Tensor, torch.Tensor]  # one layer's keys and values in the cache's form


@dataclass(frozen=True)
class TorchReading:
    """The results of the two no-gradient passes, which all translators of a pair share.

    Attributes:
        sample: The conversation.
        states: The source's states of ``prefix[:-1]``; with two tokenizers, of its translated
            tokens.
        native: The target's own states of ``prefix[:-1]`` in its native layers.
        teacher: (M, width) the target's final hidden states that predict the continuation, from its
            own cache.
    """

    sample: Sample
    states: States
    native: States
    teacher: torch.Tensor


@torch.no_grad()
def read(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str, native_layers: int = 0
) -> TorchReading:
    """Read a conversation with both models (about 80 % of a step's work)."""
    tokens, num_read = (*sample.prefix, *sample.continuation[:-1]), len(sample.prefix) - 1
    with target.tapped(native_layers) as taken:
        teacher = target.hidden(tokens)[num_read:].clone()
    native = target.states_of(taken, target.family.points[0], native_layers).first(num_read)
    return TorchReading(sample, _source_states(source, target, sample, capture), native, teacher)


@torch.no_grad()
def handed_over(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str, native_layers: int = 0
) -> TorchReading:
    """What a hand-over reads of a prefix (one tokenizer); nothing follows it, so no teacher."""
    with target.tapped(native_layers) as taken:
        if native_layers:
            target.hidden(sample.prefix[:-1])
    native = target.states_of(taken, target.family.points[0], native_layers)
    states = _source_states(source, target, sample, capture)
    return TorchReading(sample, states, native, torch.empty(0))


def _source_states(source: TorchModel, target: TorchModel, sample: Sample, capture: str) -> States:
    """The states to translate: of ``prefix[:-1]``, or of the shared tokens of two tokenizers."""
    if len(sample.prefix) < 2 or (sample.aligned is not None and not sample.num_translated):
        return States((), ())
    if sample.aligned is None:
        states = source.states(sample.prefix[:-1], capture)
    else:
        states = translated_rows(source, sample.aligned, capture)
    return states.map(lambda array: array.to(target.device, target.dtype))


def conversation_loss(
    target: TorchModel,
    translator: TorchTranslator,
    reading: TorchReading,
    objective: Objective,
    *,
    scale: float = 0.0,
) -> Loss:
    """The loss of one conversation decoded from its translated cache (equation for L).

    The target runs the last prefix token. A ``scale`` other than 0 adds that multiple of the loss's
    gradient to the translator's tensors.
    """
    sample, num_read = reading.sample, len(reading.sample.prefix) - 1
    starts, first = _starts(target, reading), len(reading.native.keys)
    own = entries(target, translator, reading)
    own, above = own[:first], own[first:]
    learns = scale != 0.0
    leaves = [
        (keys.detach().requires_grad_(learns), values.detach().requires_grad_(learns))
        for keys, values in above
    ]
    del above
    cache = target.cache([*own, *leaves], num_read)
    with torch.set_grad_enabled(learns):
        student = _student(target, sample, cache)
    loss = loss_of(
        objective,
        target.logits,
        student,
        reading.teacher,
        sample.continuation,
        with_gradient=learns,
    )
    if loss.gradient is not None and leaves:
        student.backward(loss.gradient * scale)
        _pull_back(target, translator, reading, leaves, starts, first)
    return loss


@torch.no_grad()
def entries(target: TorchModel, translator: TorchTranslator, reading: TorchReading) -> list[Entry]:
    """The cache entries of every layer: the native layers' own, then translated ones."""
    starts, first = _starts(target, reading), len(reading.native.keys)
    own = [_native(target, reading.native, t, start) for t, start in enumerate(starts[:first])]
    above = range(first, len(starts))
    return own + [_entry(target, translator, reading, t, starts[t]) for t in above]


def _starts(target: TorchModel, reading: TorchReading) -> Sequence[int]:
    """Each layer's first position: those before a layer's window are not translated."""
    num_read = len(reading.sample.prefix) - 1
    return target.geometry.first_kept(num_read) if reading.states.keys else []


def _native(
    target: TorchModel, native: States, layer: int, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A native layer's cache entries from position ``start`` on."""
    keys, values = native.keys[layer][start:], native.values[layer][start:]
    return target.entry(layer, keys, values, target.family.points[0], start)


def _entry(
    target: TorchModel, translator: TorchTranslator, reading: TorchReading, layer: int, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A translated layer's cache entries from position ``start`` on."""
    keys, values = translator.layer(layer, reading.states, start)
    aligned = reading.sample.aligned
    at = start if aligned is None else torch.tensor(aligned.positions, device=keys.device)
    return target.entry(layer, keys, values, translator.config.capture, at)


def _student(target: TorchModel, sample: Sample, cache: DynamicCache) -> torch.Tensor:
    """The hidden states (M, width) that predict the continuation.

    Between two tokenizers, the same pass also reads the prefix tokens that the target prefills
    itself. The order is then: translated entries, those tokens, the last prefix token, the
    continuation.
    """
    following = (sample.prefix[-1], *sample.continuation[:-1])
    aligned = sample.aligned
    if aligned is None:
        return target.hidden(following, cache)
    own = [sample.prefix[position] for position in aligned.own]
    last = len(sample.prefix) - 1
    positions = np.concatenate([aligned.own, np.arange(last, last + len(following))])
    before = aligned.num_entries
    visible = np.tril(np.ones((len(positions), before + len(following)), bool), before - len(own))
    visible[: len(own), :before] = aligned.visible
    more = {
        "position_ids": torch.tensor(positions, device=target.device)[None],
        "attention_mask": torch.tensor(visible, device=target.device)[None, None],
    }
    return target.hidden((*own, *following), cache, **more)[len(own) :]


def _pull_back(
    target: TorchModel,
    translator: TorchTranslator,
    reading: TorchReading,
    leaves: Sequence[tuple[torch.Tensor, torch.Tensor]],
    starts: Sequence[int],
    first: int,
) -> None:
    """Propagate the gradients of the leaves, from layer ``first`` on, back through the maps."""
    for t, entry in enumerate(leaves, start=first):
        outputs = _entry(target, translator, reading, t, starts[t])
        torch.autograd.backward(outputs, [leaf.grad for leaf in entry])
        for leaf in entry:
            leaf.grad = None


def reconstruction_loss(
    translator: TorchTranslator, read: States, wanted: States, *, scale: float = 0.0
) -> float:
    """The squared error of the target's states on a prefix, summed over tokens, widths and maps.

    See :meth:`kvlingo_mlx.training.runtime.Pair.reconstruction`.
    """
    total = 0.0
    with torch.set_grad_enabled(scale != 0.0):
        for t in range(len(translator.config.target.layers)):
            goals = (wanted.keys[t], wanted.values[t])
            keys, values = (
                (out.float() - goal.float()).square().sum()
                for out, goal in zip(translator.layer(t, read), goals, strict=True)
            )
            loss = keys + values
            if scale != 0.0:
                (loss * scale).backward()
            total += loss.item()
    return total
