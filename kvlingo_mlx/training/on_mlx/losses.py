"""The loss of a continuation, and its gradient in the student's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.models.hidden import logits_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training.objectives import BLOCK, Loss, Objective

# Logits of a block at most. MLX holds some twenty such arrays, those of the next blocks included,
# while it computes: with a vocabulary of 150,000, 1.3 GB.
LOGITS = 2**24


def sums_of(
    objective: Objective,
    target: LanguageModel,
    student: mx.array,
    teacher: mx.array,
    labels: Sequence[int],
    *,
    with_gradient: bool = True,
) -> tuple[mx.array, mx.array | None]:
    """A continuation's mean KL and cross-entropy, (2,), and the objective's gradient, lazily.

    Args:
        objective: The objective to minimise.
        target: The model whose head turns hidden states into logits.
        student: (M, width) final hidden states that predict the M tokens of ``labels``.
        teacher: The same hidden states from the native cache.
        labels: The continuation itself.
        with_gradient: Whether to compute the gradient in ``student``, (M, width).
    """
    weights = mx.array([objective.kl, objective.ce]) / len(labels)
    vocabulary = logits_of(target, student[:1]).shape[-1]  # nothing is computed for it
    block = max(1, min(BLOCK, LOGITS // vocabulary))
    parts, gradients = list[mx.array](), list[mx.array]()
    for start in range(0, len(labels), block):
        span = slice(start, start + block)
        hidden, native, true = student[span], teacher[span], mx.array(list(labels[span]))[:, None]
        if parts:  # one block after the other, or the logits of all would be in memory at once
            done = [parts[-1], *gradients[-1:]]
            hidden, native = mx.depends([hidden, native], done)
        native = _log_probabilities(target, native)

        def sums(hidden: mx.array, native: mx.array = native, true: mx.array = true) -> mx.array:
            found = _log_probabilities(target, hidden)
            divergence = (mx.exp(native) * (native - found)).sum()
            entropy = -mx.take_along_axis(found, true, axis=-1).sum()
            return mx.stack([divergence, entropy])

        if with_gradient:
            (part,), (gradient,) = mx.vjp(sums, [hidden], [weights])
            gradients.append(gradient)
        else:
            part = sums(hidden)
        parts.append(part)
    means = mx.stack(parts).sum(axis=0) / len(labels)
    return means, mx.concatenate(gradients) if with_gradient else None


def loss_of(objective: Objective, means: mx.array) -> Loss:
    """The loss of the mean KL and cross-entropy (2,)."""
    values: Any = means.tolist()
    kl, ce = map(float, values)
    return Loss(objective.kl * kl + objective.ce * ce, kl)


def _log_probabilities(target: LanguageModel, hidden: mx.array) -> mx.array:
    logits = logits_of(target, hidden)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
