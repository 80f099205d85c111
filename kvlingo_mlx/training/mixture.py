"""The mixture of the training stream, and the arithmetic of seeded choices.

Appendix "Training data and training recipe": half the samples are natural conversations, half are
conversations concatenated until they are long. This file only computes with numbers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvlingo_mlx.tokenization.samples import MAX_CONTINUATION, MAX_PREFIX

Kind = Literal["natural", "packed", "text"]
Range = tuple[int, int]

BLOCK = 8  # samples in a block; every block keeps the shares
WORD = (1 << 64) - 1
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Mixture:
    """Prefix lengths in tokens of the two kinds of samples (paragraph "Prefix lengths").

    Attributes:
        natural: The shortest and the longest prefix of a single conversation.
        packed: The shortest and the longest prefix of concatenated conversations.
        packed_share: The share of samples that are packed, from 0 to 1.
        max_prefix: The length of the longest prefix.
        max_continuation: The length to which continuations are cut.
        later_turns: Whether a continuation goes on through the later turns of its conversation. One
            reading of a prefix then trains several answers from it.
    """

    natural: Range = (10, 10_000)
    packed: Range = (12_288, 16_384)
    packed_share: float = 0.5
    max_prefix: int = MAX_PREFIX
    max_continuation: int = MAX_CONTINUATION
    later_turns: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in (("natural", self.natural), ("packed", self.packed)):
            if not 0 < low <= high <= self.max_prefix:
                raise ValueError(
                    f"{name} prefixes of {low} to {high} tokens: expected "
                    f"0 < low <= high <= max_prefix, which is {self.max_prefix}"
                )
        if not 0 <= self.packed_share <= 1:
            raise ValueError(f"packed_share {self.packed_share}: expected a share from 0 to 1")
        if self.max_continuation < 1:
            raise ValueError(f"max_continuation {self.max_continuation}: expected at least 1")

    def scaled(self, context_length: int) -> Mixture:
        """The same mixture with proportionally shorter lengths, for models with a short context."""
        needed = self.max_prefix + self.max_continuation
        if context_length >= needed:
            return self
        longest = context_length * self.max_prefix // needed
        return self.limited(longest, context_length - longest)

    def limited(self, longest: int, continuation: int) -> Mixture:
        """The same mixture with proportionally shorter prefixes, and shorter continuations."""
        natural, packed = (
            (low * longest // self.max_prefix, high * longest // self.max_prefix)
            for low, high in (self.natural, self.packed)
        )
        # The shortest prefix stays: 10 tokens are a question of a few words in any context.
        return replace(
            self,
            natural=(min(self.natural[0], natural[1]), natural[1]),
            packed=packed,
            max_prefix=longest,
            max_continuation=continuation,
        )


@dataclass(frozen=True)
class PlainText:
    """Windows of plain text for base models: the tokens of a prefix and of a continuation."""

    prefix: int = 256
    continuation: int = 256

    def __post_init__(self) -> None:
        if min(self.prefix, self.continuation) < 1:
            raise ValueError(
                f"windows of {self.prefix} + {self.continuation} tokens: expected at least 1 + 1"
            )

    def scaled(self, context_length: int) -> PlainText:
        """The same windows, or proportionally smaller ones that fit ``context_length``."""
        needed = self.prefix + self.continuation
        if context_length >= needed:
            return self
        prefix = context_length * self.prefix // needed
        return PlainText(prefix, context_length - prefix)


@dataclass(frozen=True)
class Slot:
    """The place of a sample in the stream: its kind, and its number among samples of that kind."""

    kind: Kind
    ordinal: int


def slot_at(index: int, mixture: Mixture | PlainText, seed: int) -> Slot:
    """The slot of sample ``index``; each block of samples keeps the shares of both kinds."""
    if isinstance(mixture, PlainText):
        return Slot("text", index)
    packed, ordinal = split(index, mixture.packed_share, key_of(seed, "kind"))
    return Slot("packed" if packed else "natural", ordinal)


def split(index: int, share: float, key: int) -> tuple[bool, int]:
    """Whether item ``index`` belongs to a ``share`` of all items, and its number within its part.

    Every block of items keeps the share. The order within a block is shuffled, so that processes
    which take every other item get both kinds.
    """
    block, place = divmod(index, BLOCK)
    before = math.floor(block * BLOCK * share)
    inside = math.floor((block + 1) * BLOCK * share) - before
    order = [shuffled(i, BLOCK, key_of(key, block)) for i in range(place + 1)]
    earlier = sum(position < inside for position in order[:-1])
    if order[-1] < inside:
        return True, before + earlier
    return False, index - before - earlier


def key_of(*parts: object) -> int:
    """A 64-bit key that depends on the text of ``parts`` only, on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(value: Any) -> Any:
    """The last step of splitmix64, for an int or an array of uint64."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def hashed(key: int, numbers: np.ndarray) -> np.ndarray:
    """A pseudo-random 64-bit number for each of ``numbers`` (uint64)."""
    return _mixed(_mixed(numbers.astype(np.uint64)) ^ np.uint64(key))


def shuffled(position: int, size: int, key: int) -> int:
    """The image of ``position`` under a seeded permutation of ``range(size)``.

    This is a four-round Feistel network. It needs no table, so millions of records cost no memory,
    and no library's generator, so a resumed run meets the same records.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (_mixed(key + (right << 2) + turn) & mask)
        position = left << half | right
        if position < size:
            return position


def spread(ordinal: int, seed: int) -> float:
    """Element ``ordinal`` of an evenly spread sequence from 0 to 1 (a golden-ratio sequence)."""
    return (key_of(seed, "spread") / 2**64 + ordinal * GOLDEN) % 1.0
