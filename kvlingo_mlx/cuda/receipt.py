"""The receipt of a translator: its quality on the bundled conversations, to be verified against."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvlingo_mlx.cuda.gradients import conversation_loss, entries, loss_of, read
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.embedded.bundled import spelled
from kvlingo_mlx.loading.grading import GUARD, MeasuredConversation, agreement, cuts
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.objectives import objective_named


def receipt(
    source: TorchModel, target: TorchModel, translator: TorchTranslator, own: HeldOut | None = None
) -> dict[str, Any] | None:
    """A :class:`~kvlingo_mlx.loading.grading.Receipt` as JSON; None if no prompt fits.

    It is measured with, and names, the translator's own ``native_layers``: `tune` may choose others
    later. ``own`` are samples of the user's data, measured besides.
    """
    measure = partial(_measured, source, target, translator)
    found = agreement(source, target, translator.config.native_layers, measure, own)
    return None if found is None else found.to_json(target.precision)


@torch.no_grad()
def _measured(
    source: TorchModel,
    target: TorchModel,
    translator: TorchTranslator,
    sample: Sample,
    value: tuple[int, ...] | None,
) -> MeasuredConversation:
    """A conversation from the translated cache, the target's own cache, and no cache."""
    kl, config = objective_named("kl"), translator.config
    reading = read(source, target, sample, config.capture, config.native_layers)
    alone = target.hidden((sample.prefix[-1], *sample.continuation[:-1]))
    teacher, labels = reading.teacher, sample.continuation
    losses = [
        conversation_loss(target, translator, reading, kl),
        *(
            loss_of(kl, target.logits, student, teacher, labels, with_gradient=False)
            for student in (teacher, alone)
        ),
    ]
    stops = cuts(len(sample.prefix) - 1) if value is not None and sample.aligned is None else []
    return MeasuredConversation(
        [loss.kl for loss in losses],
        losses[0].agreed,
        len(labels),
        [spelled(loss.best, sample, value) for loss in losses] if value else (),
        [_apart(source, target, translator, sample.prefix[: stop + 1]) for stop in stops],
    )


@torch.no_grad()
def _apart(
    source: TorchModel, target: TorchModel, translator: TorchTranslator, tokens: Sequence[int]
) -> float:
    """KL(source || target) over a prompt's last tokens, the target's from the translated cache."""
    last = len(tokens) - 1 - GUARD
    config, following = translator.config, tokens[last:-1]
    # A sample's last prefix token is run by the target, so it is the first of those compared.
    sample = Sample(tuple(tokens[: last + 1]), ())
    reading = read(source, target, sample, config.capture, config.native_layers)
    cache = target.cache(entries(target, translator, reading), last)
    own = source.logits(source.hidden(tokens[:-1])[last:])
    other = target.logits(target.hidden(following, cache)).to(own.device)
    rows = min(own.shape[-1], other.shape[-1])
    p, q = (torch.log_softmax(each[:, :rows].double(), dim=-1) for each in (own, other))
    return float((p.exp() * (p - q)).sum(-1).mean())
