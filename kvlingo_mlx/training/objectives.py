"""The objectives of stage 2.

Paper: section "Training the translator", equation (3.3); appendix "Objective ablation:
cross-entropy and mixed objectives".

Losses are means over a continuation's tokens. They are computed from final hidden states, one block
of tokens at a time: with a vocabulary of 150,000, two copies of a whole continuation's logits would
not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax

BLOCK = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Objective:
    """``kl`` times KL(native || translated) plus ``ce`` times the cross-entropy of the text."""

    kl: float
    ce: float


OBJECTIVES = {"kl": (1.0, 0.0), "ce": (0.0, 1.0), "mixed": (1.0, 1.0)}


def objective_named(name: str, ce_weight: float = 1.0) -> Objective:
    """The objective ``kl``, ``ce`` or ``mixed`` (KL plus ``ce_weight`` times cross-entropy).

    Raises:
        ValueError: There is no such objective, or ``ce_weight`` leaves nothing of it.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective is {name!r}; it must be one of {', '.join(OBJECTIVES)}")
    kl, ce = OBJECTIVES[name]
    if not kl and not ce * ce_weight:
        raise ValueError(
            f"the weight of the cross-entropy (--ce-weight) is {ce_weight:g}, and the objective "
            f"{name!r} is nothing else: no step would train anything; give more than 0, or kl"
        )
    return Objective(kl, ce * ce_weight)


@dataclass(frozen=True)
class Loss:
    """A continuation's mean objective and mean KL, and the gradient of the objective.

    ``gradient`` is with respect to the student's hidden states, (M, width). If it was not asked
    for, ``best`` are the student's most likely tokens, and ``agreed`` counts those that are the
    teacher's most likely tokens, too.
    """

    value: float
    kl: float
    gradient: torch.Tensor | None
    agreed: int = 0
    best: tuple[int, ...] = ()


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
