"""What samples a training stream is mixed of, by the lengths of their prefixes.

Appendix "Training data and training recipe": half the samples are natural conversations, half are
conversations concatenated until they are long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvlingo_mlx.tokenization.samples import MAX_CONTINUATION, MAX_PREFIX

Kind = Literal["natural", "packed", "text", "filler"]
Range = tuple[int, int]


@dataclass(frozen=True)
class Mixture:
    """Prefix lengths in tokens of the two kinds of samples (paragraph "Prefix lengths")."""

    natural: Range = (10, 10_000)  # of a single conversation
    packed: Range = (12_288, 16_384)  # of several, concatenated
    packed_share: float = 0.5  # of the samples, from 0 to 1
    max_prefix: int = MAX_PREFIX
    max_continuation: int = MAX_CONTINUATION  # continuations are cut to it
    # A continuation may go on through the later turns of its conversation: one reading of a prefix
    # then trains several answers.
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

    def scaled(self, context_length: int) -> PlainText:
        """The same windows, or proportionally smaller ones that fit ``context_length``."""
        needed = self.prefix + self.continuation
        if context_length >= needed:
            return self
        prefix = context_length * self.prefix // needed
        return PlainText(prefix, context_length - prefix)


def reach(mixture: Mixture | PlainText) -> tuple[float, float]:
    """The shortest and the longest usable natural prefix, or text, in tokens."""
    if isinstance(mixture, PlainText):
        return mixture.prefix + mixture.continuation, float("inf")
    return mixture.natural
