"""Warnings from a training's own curve: it overfits, stalls, or gets worse."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

BY_HEART = 0.5  # overfitting: the training KL is below this share of the held-out KL
IN_A_ROW = 2  # validations, as a single one may be chance
WORTH_IT = 0.03  # of the held-out KL: less is hardly seen in answers
PATIENCE = 4  # validations without a new lowest KL


def complaints(curve: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The problems of a training so far, as messages by name.

    ``curve`` is the log's lines. A line has, for each learning rate, the mean KL of the training
    conversations since the previous line (``train_kl``) and the KL on held-out conversations
    (``held_out``), or None for a run that has diverged. Only the best learning rate is judged.
    """
    held_out = [lowest(line["held_out"]) for line in curve]
    if len(curve) < 2:
        return {}
    found, step = {}, curve[-1]["step"]
    best = held_out.index(min(held_out))
    recent = [_leading(line) for line in curve[1:][-IN_A_ROW:]]
    if len(recent) == IN_A_ROW and all(
        train < BY_HEART * held < math.inf for train, held in recent
    ):
        train, held = recent[-1]
        found["by heart"] = (
            f"step {step}: the KL on the training conversations, {train:.4f}, is far below "
            f"that on held-out ones, {held:.4f}; the translator learns its data by heart: give "
            "more data, or fewer steps (--steps)"
        )
    if len(curve) - 1 - best >= PATIENCE:
        found["stalled"] = (
            f"step {step}: the held-out KL has not fallen since step "
            f"{curve[best]['step']} ({held_out[best]:.4f}, now {held_out[-1]:.4f}), which is what "
            "will be kept; a lower --lr or more data may help"
        )
    if held_out[-1] > held_out[0]:
        found["worse"] = (
            f"step {step}: the held-out KL is {held_out[-1]:.4f}, worse than the "
            f"{held_out[0]:.4f} that training began with; the best step is what will be kept; "
            "give a lower --lr, or more data"
        )
    return found


def outlook(curve: Sequence[Mapping[str, Any]]) -> str | None:
    """What the second half of a finished training brought; None where a curve does not tell.

    The rate falls towards the end of a training, which helps the second half. So a run of twice the
    length rarely brings more than that half did.
    """
    values, middle = [lowest(line["held_out"]) for line in curve], curve[-1]["step"] / 2
    count = sum(line["step"] <= middle for line in curve)
    if count < 2 or count == len(values) or min(values) == values[0]:
        return None
    first, second = min(values[:count]), min(values)
    gain = 1 - second / first
    more = "more time will bring little"
    if gain >= WORTH_IT:
        more = "twice the time may bring up to as much again"
    return (
        f"the second half of the steps lowered the held-out KL by {100 * gain:.0f} % "
        f"({first:.4f} to {second:.4f}): {more}"
    )


def _leading(line: Mapping[str, Any]) -> tuple[float, float]:
    """The training and held-out KL of the best learning rate in a line."""
    held = lowest(line["held_out"])
    if held == math.inf:
        return math.inf, held
    train = line["train_kl"][line["held_out"].index(held)]
    return math.inf if train is None else train, held


def lowest(values: Sequence[float | None]) -> float:
    """The lowest KL of all learning rates; None stands for a run that has diverged."""
    return min((v for v in values if v is not None and math.isfinite(v)), default=math.inf)
