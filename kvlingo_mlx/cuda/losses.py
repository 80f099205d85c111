"""The loss of a continuation, and its gradient in the student's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import log_softmax

from kvlingo_mlx.training.objectives import BLOCK, Loss, Objective

Head = Callable[[torch.Tensor], torch.Tensor]


def loss_of(
    objective: Objective,
    head: Head,
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: Sequence[int],
    *,
    with_gradient: bool = True,
) -> Loss:
    """The objective of one continuation.

    Args:
        objective: The objective to minimise.
        head: Maps hidden states (B, width) to logits (B, vocabulary).
        student: (M, width) final hidden states that predict the M tokens of ``labels``.
        teacher: The same hidden states from the native cache.
        labels: The continuation itself.
        with_gradient: Whether to compute ``gradient``.
    """
    total = kl_total = 0.0
    agreed = 0
    best: list[int] = []
    gradients = []
    targets = torch.tensor(list(labels), device=student.device)
    for start in range(0, len(targets), BLOCK):
        span = slice(start, start + BLOCK)
        hidden = student[span].detach().requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            logits = head(hidden)
        with torch.no_grad():
            native = head(teacher[span])
            if not with_gradient:
                first = logits.argmax(dim=-1)
                agreed += int((first == native.argmax(dim=-1)).sum())
                best += first.tolist()
            kl, ce, slope = _block(objective, logits.detach(), native, targets[span], with_gradient)
        if slope is not None:
            logits.backward(slope.div_(len(targets)))
            assert hidden.grad is not None
            gradients.append(hidden.grad)
        total += (objective.kl * kl + objective.ce * ce) / len(targets)
        kl_total += kl / len(targets)
    gradient = torch.cat(gradients) if with_gradient else None
    return Loss(total, kl_total, gradient, agreed, tuple(best))


def _block(
    objective: Objective,
    translated: torch.Tensor,
    native: torch.Tensor,
    labels: torch.Tensor,
    with_gradient: bool,
) -> tuple[float, float, torch.Tensor | None]:
    """The sums of KL and cross-entropy over a block of logits (B, V), and their gradient.

    With p the native and q the translated distribution, the gradient in q's logits is q - p for
    KL(p || q) and q - onehot for cross-entropy. Written out, it needs less memory than autograd.
    """
    log_q, log_p = log_softmax(translated, dim=-1), log_softmax(native, dim=-1)
    p = log_p.exp()
    kl = log_p.sub_(log_q).mul_(p).sum().item()
    rows = torch.arange(len(labels), device=labels.device)
    ce = -log_q[rows, labels].sum().item()
    if not with_gradient:
        return kl, ce, None
    slope = log_q.exp_().mul_(objective.kl + objective.ce).sub_(p, alpha=objective.kl)
    slope[rows, labels] -= objective.ce
    return kl, ce, slope
