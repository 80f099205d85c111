"""What a model's predictions cost."""

from __future__ import annotations

import torch


def losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and z-loss of each label, from logits (..., vocabulary), in nats.

    The z-loss is the square of the logits' log-sum-exp, which keeps them from drifting.
    """
    total = logits.logsumexp(dim=-1)
    return total - logits.gather(-1, labels[..., None])[..., 0], total.square()
