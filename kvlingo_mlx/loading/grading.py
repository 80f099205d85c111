"""How good a translator is: its receipt, and the grade that follows from it.

A receipt holds what was measured on the bundled conversations (``embedded.bundled``) when a
translator was made. Its main measure is the share recovered, 1 - KL / KL(hidden): how much of the
cost of hiding the prefix the translation saves. Only receipts of the same conversations are
compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlingo_mlx.embedded.bundled import NAME
from kvlingo_mlx.format.translator_config import TranslatorConfig

# Limits of the share recovered, from measurements on the zoo (benchmarks/LOG.md, "how much data"):
# self-distilled translators reach 0.95 to 1.00, two hard pairs 0.89 and 0.66; closed forms on
# enough data reach 0.72 to 0.85, with a fifth of the facts recalled; fits on three tokens reach
# 0.17 to 0.52, with none recalled; shuffled layers reach at most 0.40.
WORKS, SOME = 0.9, 0.5
# Standard deviations above the receipt's mean from which a translation is in doubt
# (benchmarks/guard.py: detections and false alarms at each).
UNUSUAL = 4.0
GUARD = 32  # the last tokens of a prompt over which receipts compare both models
GRADES = ("works", "better than nothing", "useless")
UNGRADED = "ungraded"
# What a fit says where it could leave no receipt; measuring again would leave none either.
NO_RECEIPT = (
    f"{UNGRADED}: these models cannot read the bundled conversations, most of all where a context "
    "is short; `kvlingo-mlx eval` measures it on conversations of yours"
)


@dataclass(frozen=True)
class Recall:
    """The shares of conversations in which every first choice spells the asked value."""

    translated: float
    native: float
    hidden: float

    def __str__(self) -> str:
        return f"recall {self.translated:.2f} (native {self.native:.2f}, hidden {self.hidden:.2f})"


@dataclass(frozen=True)
class Apart:
    """How far both models lie apart over the last tokens of the bundled prefixes, cut in quarters.

    Attributes:
        tokens: The number of last tokens that are compared.
        mean: KL(source || target) of the next token, in nats, the target's from a translated cache;
            the mean over these tokens and over prefixes.
        spread: The standard deviation of the prefixes' own means.
    """

    tokens: int
    mean: float
    spread: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Apart | None:
        """From the prefixes' own means; None of fewer than two."""
        if len(found) < 2:
            return None
        return cls(GUARD, statistics.mean(found), statistics.stdev(found))

    def limit(self, tokens: int) -> float:
        """The largest mean over so many tokens that is nothing unusual.

        A mean over fewer tokens than the receipt's is less certain, by the root of their number.
        """
        return self.mean + UNUSUAL * self.spread * math.sqrt(max(1.0, self.tokens / tokens))


@dataclass(frozen=True)
class Receipt:
    """What was measured on the bundled conversations.

    Attributes:
        kl: KL(native || translated) in nats per token, the mean over conversations.
        top1: The share of tokens at which both caches give the same first choice.
        native_layers: The number of native layers.
        hidden_kl: The same KL with the prefix hidden; None in receipts of older versions.
        recall: Recall of the value that each conversation asks for; None in older receipts, and if
            the conversations were read as plain texts.
        guard: What is usual over a prompt's last tokens; None in older receipts, and between two
            tokenizers.
    """

    kl: float
    top1: float
    native_layers: int = 0
    hidden_kl: float | None = None
    recall: Recall | None = None
    guard: Apart | None = None

    @property
    def recovered(self) -> float | None:
        """The share of the hidden prefix's KL that the translation removes.

        1 is the native cache, 0 is no cache.
        """
        if self.hidden_kl is None:
            return None
        return 1.0 - self.kl / self.hidden_kl if self.hidden_kl > 0 else -math.inf

    @property
    def grade(self) -> str:
        """One of ``GRADES``; ``UNGRADED`` if an older receipt has no KL of the hidden prefix."""
        if (share := self.recovered) is None:
            return UNGRADED
        if share >= WORKS:
            return GRADES[0]
        return GRADES[1] if share >= SOME else GRADES[2]  # NaN, too, is useless

    def __str__(self) -> str:
        """The grade and its reasons, in one line."""
        if self.hidden_kl is None or self.recovered is None:
            return (
                f"{UNGRADED}: its receipt (KL {self.kl:.4f}) is of an older version, which did not "
                "measure what hiding the prefix costs; `kvlingo-mlx verify` with both models does"
            )
        share = f"{100 * self.recovered:.0f} %" if self.recovered > 0 else "nothing"
        beside = "" if self.recall is None else f", {self.recall}"
        return (
            f"{self.grade}: it recovers {share} of what hiding the prefix costs (KL {self.kl:.4f}, "
            f"hidden {self.hidden_kl:.4f}{beside})"
        )

    def to_json(self) -> dict[str, Any]:
        """The receipt as a translator's provenance stores it."""
        kept = {name: value for name, value in asdict(self).items() if value is not None}
        return {"prompts": NAME, **kept}


def recall_of(hits: Sequence[Sequence[bool]]) -> Recall | None:
    """Recall, from whether the translated, the native and no cache spell each value."""
    count = len(hits)
    return Recall(*(sum(way) / count for way in zip(*hits, strict=True))) if count else None


def receipt_of(config: TranslatorConfig) -> Receipt | None:
    """A translator's receipt; None if it has none, or one of other conversations."""
    left: Any = config.provenance.get("receipt")
    if not isinstance(left, dict) or left.get("prompts") != NAME:
        return None
    kl, top1, hidden_kl = (_number(left.get(name)) for name in ("kl", "top1", "hidden_kl"))
    layers: Any = left.get("native_layers", 0)
    if kl is None or top1 is None or type(layers) is not int:
        return None
    if not 0 <= layers <= len(config.target.layers):
        return None
    return Receipt(
        kl, top1, layers, hidden_kl, _recall(left.get("recall")), _apart(left.get("guard"))
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _recall(left: Any) -> Recall | None:
    """Read a stored recall; provenance is untrusted and may hold anything."""
    found: Mapping[str, Any] = left if isinstance(left, dict) else {}
    shares = [_number(found.get(name)) for name in ("translated", "native", "hidden")]
    return None if None in shares else Recall(*(share for share in shares if share is not None))


def watched(tokens: int, prefix: int) -> int:
    """The last tokens of a prefix that are compared where ``tokens`` are asked for.

    At least half of the prefix is translated.
    """
    return min(tokens, prefix // 2)


def cuts(prefix: int) -> list[int]:
    """Where a receipt cuts a prefix of so many tokens: at each quarter that is long enough."""
    return [stop for q in (1, 2, 3, 4) if (stop := q * prefix // 4) >= 2 * GUARD]


def _apart(left: Any) -> Apart | None:
    """Read how far models lay apart from a stored receipt."""
    found: Mapping[str, Any] = left if isinstance(left, dict) else {}
    tokens = found.get("tokens")
    mean, spread = (_number(found.get(name)) for name in ("mean", "spread"))
    if type(tokens) is not int or tokens < 1 or mean is None or spread is None:
        return None
    return Apart(tokens, mean, spread) if mean >= 0 and spread >= 0 else None


def said_of(config: TranslatorConfig) -> str:
    """A translator's grade by its receipt, in one line."""
    receipt = receipt_of(config)
    tuned = "" if (found := tuned_of(config)) is None else f"; {found}"
    if receipt is not None:
        return f"{receipt}{tuned}"
    return (
        f"{UNGRADED}: it has no receipt of the bundled conversations ({NAME}); `kvlingo-mlx "
        f"verify` with both models measures it{tuned}"
    )


def tuned_of(config: TranslatorConfig) -> str | None:
    """The native layers that `tune` chose and what it measured with them; None if not tuned."""
    tuning: Any = config.provenance.get("tuning")
    if not isinstance(tuning, dict):
        return None
    depth = len(config.target.layers)
    names = {"measured_recall": "recall", "measured_kl": "KL"}
    found = {names[key]: _number(tuning.get(key)) for key in names}
    measured = "".join(f", {name} {n:.3g}" for name, n in found.items() if n is not None)
    return f"tuned to {config.native_layers} native layers of {depth}{measured}"
