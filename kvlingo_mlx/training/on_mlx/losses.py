"""The loss of a continuation, and its gradient in the student's hidden states."""

import functools
from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.models.hidden import logits_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import working
from kvlingo_mlx.training.objectives import BLOCK, Loss, Objective

LOGITS = 2**24  # of a block at most, of each model; some five such arrays are in memory at once


def loss_of(
    objective: Objective,
    target: LanguageModel,
    student: mx.array,
    teacher: mx.array,
    labels: Sequence[int],
    *,
    with_gradient: bool = True,
) -> Loss:
    """The objective of one continuation, and its gradient in the student's hidden states.

    ``student`` (M, width) are final hidden states that predict the M tokens of ``labels``, and
    ``teacher`` the same ones from the native cache; the target's head turns them into logits.
    """
    vocabulary = logits_of(target, student[:1]).shape[-1]  # nothing is computed for it
    block = max(1, min(BLOCK, LOGITS // vocabulary))
    head, gradients = functools.partial(logits_of, target), list[mx.array]()
    sums: Any = mx.zeros(2)
    for start in range(0, len(labels), block):
        span = slice(start, start + block)
        with working():
            hidden, true = student[span], mx.array(list(labels[span]))[:, None]
            part, slope = _block(objective, head(hidden), head(teacher[span]), true, with_gradient)
            if slope is not None:
                gradients += mx.vjp(head, [hidden], [slope / len(labels)])[1]
            sums = sums + part
            mx.eval(sums, gradients)
    kl, ce = (each / len(labels) for each in sums.tolist())
    gradient = mx.concatenate(gradients) if with_gradient else None
    return Loss(objective.kl * kl + objective.ce * ce, kl, gradient)


def _block(
    objective: Objective, logits: mx.array, native: mx.array, labels: mx.array, with_gradient: bool
) -> tuple[mx.array, mx.array | None]:
    """The sums of KL and cross-entropy over a block of logits (B, V), and their gradient.

    With p the native and q the translated distribution, the gradient in q's logits is q - p for
    KL(p || q) and q - onehot for cross-entropy. Written out, it needs less memory than automatic
    differentiation.
    """
    student, teacher = mx.softmax(logits, axis=-1), mx.softmax(native, axis=-1)
    norms = _norm(logits, student), _norm(native, teacher)
    divergence = _divergence(teacher, logits, native, norms[0] - norms[1]).sum()
    entropy = (norms[0] - mx.take_along_axis(logits, labels, axis=-1)).sum()
    part = mx.stack([divergence, entropy])
    if not with_gradient:
        return part, None
    slope = _slope(student, teacher, mx.array(objective.kl), mx.array(objective.ce))
    if objective.ce:
        true = mx.take_along_axis(slope, labels, axis=-1) - objective.ce
        slope = mx.put_along_axis(slope, labels, true, axis=-1)
    return part, slope


def _norm(logits: mx.array, probabilities: mx.array) -> mx.array:
    """Each row's logarithm of the sum of exponentials, from its likeliest token.

    Two maxima are cheaper than exponentials of the whole vocabulary once more.
    """
    return logits.max(-1, keepdims=True) - mx.log(probabilities.max(-1, keepdims=True))


@mx.compile
def _divergence(teacher: mx.array, logits: mx.array, native: mx.array, norm: mx.array) -> mx.array:
    return teacher * ((native - logits) + norm)


@mx.compile
def _slope(student: mx.array, teacher: mx.array, kl: mx.array, ce: mx.array) -> mx.array:
    return (kl + ce) * student - kl * teacher
