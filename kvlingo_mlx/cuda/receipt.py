"""The receipt of a translator: its quality on the bundled conversations, to be verified against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvlingo_mlx.cuda.gradients import conversation_loss, entries, loss_of, read
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.embedded.bundled import bundled, spelled
from kvlingo_mlx.loading.grading import GUARD, Apart, Receipt, cuts, own_data, recall_of
from kvlingo_mlx.phases import counted
from kvlingo_mlx.tokenization.samples import HeldOut, Sample, other_tokenizer
from kvlingo_mlx.training.objectives import Loss, objective_named


def receipt(
    source: TorchModel, target: TorchModel, translator: TorchTranslator, own: HeldOut | None = None
) -> dict[str, Any] | None:
    """A :class:`~kvlingo_mlx.loading.grading.Receipt` as JSON; None if no prompt fits.

    It is measured with, and names, the translator's own ``native_layers``: `tune` may choose others
    later. ``own`` are samples of the user's data, measured besides.
    """
    context = min(source.context_length, target.context_length)
    other = other_tokenizer(source.tokenizer, target.tokenizer)
    asked = bundled(target.tokenizer, context, other)
    if not asked:
        return None
    losses, numbers = [], []
    samples = [*(sample for sample, _ in asked), *(() if own is None else own.samples)]
    for done, sample in enumerate(counted("measuring the receipt", samples), 1):
        losses.append(_losses(source, target, translator, sample))
        if other is None and done <= len(asked):
            numbers += [
                _apart(source, target, translator, sample.prefix[: stop + 1])
                for stop in cuts(len(sample.prefix) - 1)
            ]
    of_own = [[loss.kl for loss in ways] for ways in losses[len(asked) :]]
    losses = losses[: len(asked)]
    tokens = sum(len(sample.continuation) for sample, _ in asked)
    ways = zip(*losses, strict=True)
    kl, _, hidden_kl = (sum(loss.kl for loss in way) / len(asked) for way in ways)
    hits = [
        tuple(spelled(loss.best, sample, value) for loss in ways)
        for ways, (sample, value) in zip(losses, asked, strict=True)
        if value
    ]
    found = Receipt(
        kl,
        sum(translated.agreed for translated, _, _ in losses) / tokens,
        translator.config.native_layers,
        hidden_kl,
        recall_of(hits),
        None if other else Apart.of(numbers),
        None if own is None else own_data(own.data, of_own),
    )
    return {**found.to_json(), "tokens": tokens, "dtype": target.precision}


@torch.no_grad()
def _losses(
    source: TorchModel, target: TorchModel, translator: TorchTranslator, sample: Sample
) -> tuple[Loss, Loss, Loss]:
    """A conversation's losses from the translated cache, the target's own cache, and no cache."""
    kl, config = objective_named("kl"), translator.config
    reading = read(source, target, sample, config.capture, config.native_layers)
    alone = target.hidden((sample.prefix[-1], *sample.continuation[:-1]))
    translated = conversation_loss(target, translator, reading, kl)
    teacher, labels = reading.teacher, sample.continuation
    native, hidden = (
        loss_of(kl, target.logits, student, teacher, labels, with_gradient=False)
        for student in (teacher, alone)
    )
    return translated, native, hidden


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
