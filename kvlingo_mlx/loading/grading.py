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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from kvlingo_mlx.embedded.bundled import NAME, bundled
from kvlingo_mlx.format.geometry import MAX_LAYERS
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.typed import read
from kvlingo_mlx.phases import counted
from kvlingo_mlx.tokenization.samples import HeldOut, Sample, other_tokenizer

# Limits of the share recovered, from measurements on the zoo (paper/LOG.md, "how much data"):
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

    EXTRA: ClassVar[bool] = True
    translated: float
    native: float
    hidden: float
    facts: int | None = None

    @classmethod
    def of(cls, hits: Sequence[Sequence[bool]]) -> Recall | None:
        """From whether each way spells each value; None of none."""
        if not hits:
            return None
        translated, native, hidden = (sum(way) / len(hits) for way in zip(*hits, strict=True))
        return cls(translated, native, hidden, len(hits))

    @property
    def known(self) -> bool:
        """Whether the target itself recalls enough to judge by; NaN is judged."""
        return not self.native - self.hidden < KNOWN

    @property
    def level(self) -> int:
        """An index into ``GRADES``, by the facts kept beyond those that hiding the prefix keeps."""
        if not self.known:
            return 0
        share = (self.translated - self.hidden) / (self.native - self.hidden)
        return _level(share, KEEPS, LOSES)

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
    """What was measured on conversations of the user's data that the translator was not made of."""

    EXTRA: ClassVar[bool] = True
    data: str  # its name
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

    The KL is KL(source || target) of the next token, in nats, the target's from a translated cache.
    """

    EXTRA: ClassVar[bool] = True
    tokens: Annotated[int, range(1, 2**31)]  # the last ones that are compared
    mean: float  # of the KL over these tokens and over prefixes
    spread: float  # the standard deviation of the prefixes' own means

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
    """What was measured on the bundled conversations; older receipts lack some of it."""

    EXTRA: ClassVar[bool] = True
    kl: float  # KL(native || translated) in nats per token, the mean over conversations
    top1: float  # the share of tokens at which both have the same first choice
    native_layers: Annotated[int, range(MAX_LAYERS + 1)] = (
        0  # with how many the receipt was measured
    )
    hidden_kl: float | None = None  # the same KL with the prefix hidden
    recall: Recall | None = None  # of the value that each conversation asks for
    guard: Apart | None = None  # what is usual over a prompt's last tokens; none of two tokenizers
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
        levels = [_level(share, WORKS, SOME)]
        if self.recall is not None:
            levels.append(self.recall.level)
        if self.own is not None:
            levels.append(_level(_recovered(self.own.kl, self.own.hidden_kl), WORKS, SOME))
        return GRADES[max(levels)]

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
        return {"prompts": NAME, **asdict(self, dict_factory=without_none)}


def without_none(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What ``asdict`` makes of fields, without those that are None."""
    return {name: value for name, value in pairs if value is not None}


def _recovered(kl: float, hidden_kl: float) -> float:
    return 1.0 - kl / hidden_kl if hidden_kl > 0 else -math.inf


def _level(share: float, works: float, some: float) -> int:
    """An index into ``GRADES``; that of NaN is the last."""
    return 0 if share >= works else 1 if share >= some else 2


@dataclass(frozen=True)
class MeasuredConversation:
    """What one conversation showed of three ways: a translated, the native and no cache."""

    kls: Sequence[float]  # the mean KL of each way
    agreed: int  # tokens at which the first two have the same first choice
    tokens: int  # of the continuation
    hits: Sequence[bool] = ()  # whether each way spells the value that is asked for
    apart: Sequence[float] = ()  # how far both models lie apart over the ends of prefixes


@dataclass(frozen=True)
class Agreement:
    """What was measured on the bundled conversations, and how many these and their tokens were."""

    receipt: Receipt
    samples: int
    tokens: int

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The receipt that goes into a new translator's provenance."""
        return {**self.receipt.to_json(), "tokens": self.tokens, "dtype": dtype}


def agreement(
    source: Any,
    target: Any,
    native_layers: int,
    measure: Callable[[Sample, tuple[int, ...] | None], MeasuredConversation],
    own: HeldOut | None = None,
) -> Agreement | None:
    """The quality of the target's continuations, with so many native layers, in either runtime.

    ``measure`` takes a bundled conversation and the places of the value that it asks for, or one of
    the user's (``own``) and None. None if no bundled conversation fits both contexts.
    """
    context = min(source.context_length, target.context_length)
    other = other_tokenizer(source.tokenizer, target.tokenizer)
    asked = bundled(target.tokenizer, context, other)
    if not asked:
        return None
    users = [] if own is None else own.samples
    samples = [*asked, *((sample, None) for sample in users)]
    found = [measure(*each) for each in counted("measuring the receipt", samples)]
    theirs, users_own = found[: len(asked)], found[len(asked) :]
    kl, _, hidden_kl = _means(theirs)
    tokens = sum(each.tokens for each in theirs)
    data = None
    if own is not None and users_own:
        kl_there, _, hidden_there = _means(users_own)
        data = OwnData(own.data, len(users_own), kl_there, hidden_there)
    receipt = Receipt(
        kl,
        sum(each.agreed for each in theirs) / tokens,
        native_layers,
        hidden_kl,
        Recall.of([each.hits for each in theirs if each.hits]),
        None if other else Apart.of([number for each in theirs for number in each.apart]),
        data,
    )
    return Agreement(receipt, len(asked), tokens)


def _means(found: Sequence[MeasuredConversation]) -> list[float]:
    """The mean KL of each way over conversations."""
    return [float(sum(way) / len(found)) for way in zip(*(e.kls for e in found), strict=True)]


def receipt_of(config: TranslatorConfig) -> Receipt | None:
    """A translator's receipt; None if it has none, or one of other conversations."""
    left: Any = config.provenance.get("receipt")
    if not isinstance(left, dict) or left.get("prompts") != NAME:
        return None
    try:
        found: Receipt = read(Receipt, left)
    except ValueError:  # it is a stranger's, and may hold anything
        return None
    return found if found.native_layers <= len(config.target.layers) else None


def watched(tokens: int, prefix: int) -> int:
    """The last tokens of a prefix that are compared where ``tokens`` are asked for.

    At least half of the prefix is translated.
    """
    return min(tokens, prefix // 2)


def cuts(prefix: int) -> list[int]:
    """Where a receipt cuts a prefix of so many tokens: at each quarter that is long enough."""
    return [stop for q in (1, 2, 3, 4) if (stop := q * prefix // 4) >= 2 * GUARD]


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
    text = f"{receipt}" if receipt else f"{UNGRADED}: it has no receipt of the bundled dialogues"
    if receipt is None or receipt.grade == UNGRADED:
        text += "; `kvlingo-mlx verify` with both models measures it"
    return text if tuned is None else f"{text}; {tuned}"


def tuned_of(config: TranslatorConfig) -> str | None:
    """The native layers that `tune` chose and what it measured with them; None if not tuned."""
    tuning: Any = config.provenance.get("tuning")
    if not isinstance(tuning, dict):
        return None
    names = {"measured_recall": "recall", "measured_kl": "KL"}
    found = {name: tuning.get(key) for key, name in names.items()}
    measured = "".join(f", {name} {n:.3g}" for name, n in found.items() if type(n) in (int, float))
    return f"tuned to {config.native_layers} native layers of {len(config.target.layers)}{measured}"
