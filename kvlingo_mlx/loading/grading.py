"""How good a translator is: its receipt, and the grade that follows from it.

A receipt holds what was measured when a translator was made: on the bundled conversations
(``embedded.bundled``) how many of the facts that they ask for are kept, and the share recovered,
1 - KL / KL(hidden), how much of the cost of hiding the prefix the translation saves; the share also
on conversations of the user's data that it was not made of. The grade is the worst of these. Only
receipts of the same bundled conversations are compared.
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
# The same limits of the share of facts kept: of 8 facts 7 are, and none is. Facts count where the
# target itself recalls half of them or more: it must know what is lost.
KEEPS, LOSES, KNOWN = 0.85, 0.1, 0.5
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
    """The shares of conversations in which every first choice spells the asked value.

    ``facts`` is their number; None in receipts of older versions.
    """

    translated: float
    native: float
    hidden: float
    facts: int | None = None

    @property
    def rank(self) -> int:
        """An index into ``GRADES``, by the facts kept beyond those that hiding the prefix keeps."""
        if not self.known:
            return 0
        share = (self.translated - self.hidden) / (self.native - self.hidden)
        return _rank(share, KEEPS, LOSES)

    @property
    def known(self) -> bool:
        """Whether the target itself recalls enough to judge by; NaN is judged."""
        return not self.native - self.hidden < KNOWN

    @property
    def kept(self) -> str:
        """What the translation keeps, in words."""
        of = "the facts" if self.facts is None else f"{self.facts} facts"
        return f"keeps {self._count(self.translated)} of {of}"

    def _count(self, share: float) -> str:
        return f"{share:.0%}" if self.facts is None else f"{share * self.facts:.0f}"

    def __str__(self) -> str:
        native, hidden = self._count(self.native), self._count(self.hidden)
        few = "" if self.known else ": too few to judge by"
        return f"{self.kept} (the target itself {native}, without the prefix {hidden}{few})"


@dataclass(frozen=True)
class OwnData:
    """What was measured on conversations of the user's data that the translator was not made of.

    Attributes:
        data: The data's name.
        conversations: How many.
        kl, hidden_kl: As in :class:`Receipt`.
    """

    data: str
    conversations: int
    kl: float
    hidden_kl: float

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.4f} on {self.conversations} held-out conversations of {self.data} "
            f"({self.hidden_kl:.4f} without the prefix)"
        )


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

    def __str__(self) -> str:
        return f"a KL of {self.mean:.2f} (spread {self.spread:.2f}) over {self.tokens} tokens"

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
    own: OwnData | None = None

    @property
    def recovered(self) -> float | None:
        """The share of the hidden prefix's KL that the translation removes.

        1 is the native cache, 0 is no cache.
        """
        return None if self.hidden_kl is None else _recovered(self.kl, self.hidden_kl)

    @property
    def grade(self) -> str:
        """One of ``GRADES``; ``UNGRADED`` if an older receipt has no KL of the hidden prefix."""
        if (share := self.recovered) is None:
            return UNGRADED
        ranks = [_rank(share, WORKS, SOME)]
        if self.recall is not None:
            ranks.append(self.recall.rank)
        if self.own is not None:
            ranks.append(_rank(_recovered(self.own.kl, self.own.hidden_kl), WORKS, SOME))
        return GRADES[max(ranks)]

    @property
    def reasons(self) -> str:
        """What was measured, and on what, in one line."""
        if self.hidden_kl is None:
            return (
                f"its receipt (KL {self.kl:.4f}) is of an older version, which did not measure the "
                "KL without the prefix"
            )
        recall = "" if self.recall is None else f"{self.recall} and has "
        own = "" if self.own is None else f"; {self.own}"
        return (
            f"{recall}KL {self.kl:.4f} in the bundled dialogues ({self.hidden_kl:.4f} without the "
            f"prefix){own}"
        )

    def __str__(self) -> str:
        """The grade and its reasons, in one line."""
        return f"{self.grade}: {self.reasons}"

    def to_json(self) -> dict[str, Any]:
        """The receipt as a translator's provenance stores it."""
        return {"prompts": NAME, **_without_none(asdict(self))}


def _without_none(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in found.items()
        if value is not None
    }


def _recovered(kl: float, hidden_kl: float) -> float:
    return 1.0 - kl / hidden_kl if hidden_kl > 0 else -math.inf


def _rank(share: float, works: float, some: float) -> int:
    """An index into ``GRADES``; that of NaN is the last."""
    return 0 if share >= works else 1 if share >= some else 2


def recall_of(hits: Sequence[Sequence[bool]]) -> Recall | None:
    """Recall, from whether the translated, the native and no cache spell each value."""
    count = len(hits)
    if not count:
        return None
    translated, native, hidden = (sum(way) / count for way in zip(*hits, strict=True))
    return Recall(translated, native, hidden, count)


def own_data(data: str, kls: Sequence[Sequence[float]]) -> OwnData | None:
    """From each conversation's KL from the translated, the native and no cache; None of none."""
    if not kls:
        return None
    kl, _, hidden_kl = (float(sum(way) / len(kls)) for way in zip(*kls, strict=True))
    return OwnData(data, len(kls), kl, hidden_kl)


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
    recall, guard, own = (left.get(name) for name in ("recall", "guard", "own"))
    return Receipt(kl, top1, layers, hidden_kl, _recall(recall), _apart(guard), _own(own))


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _recall(left: Any) -> Recall | None:
    """Read a stored recall; provenance is untrusted and may hold anything."""
    found: Mapping[str, Any] = left if isinstance(left, dict) else {}
    translated, native, hidden = (
        _number(found.get(name)) for name in ("translated", "native", "hidden")
    )
    if translated is None or native is None or hidden is None:
        return None
    facts = found.get("facts")
    return Recall(translated, native, hidden, facts if type(facts) is int else None)


def _own(left: Any) -> OwnData | None:
    """Read what was measured on the user's data from a stored receipt."""
    found: Mapping[str, Any] = left if isinstance(left, dict) else {}
    data, count = found.get("data"), found.get("conversations")
    kl, hidden_kl = (_number(found.get(name)) for name in ("kl", "hidden_kl"))
    if type(data) is not str or type(count) is not int or kl is None or hidden_kl is None:
        return None
    return OwnData(data, count, kl, hidden_kl)


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


def grade_of(config: TranslatorConfig) -> str:
    """A translator's grade by its receipt; ``UNGRADED`` also if `tune` chose native layers.

    A receipt does not count layers that were chosen after it was measured.
    """
    receipt = receipt_of(config)
    counts = receipt is not None and config.native_layers <= receipt.native_layers
    return receipt.grade if receipt is not None and counts else UNGRADED


def said_of(config: TranslatorConfig) -> str:
    """A translator's grade by its receipt, in one line."""
    receipt, tuned = receipt_of(config), tuned_of(config)
    told = f"{receipt}" if receipt else f"{UNGRADED}: it has no receipt of the bundled dialogues"
    if receipt is None or receipt.grade == UNGRADED:
        told += "; `kvlingo-mlx verify` with both models measures it"
    return told if tuned is None else f"{told}; {tuned}"


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
