"""What samples a training stream is mixed of, by the lengths of their prefixes.

Appendix "Training data and training recipe": half the samples are natural conversations, half are
conversations concatenated until they are long. For base models there are windows of plain text.
"""

from __future__ import annotations

import math
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
    # Each sample is a window of a plain text, of ``max_prefix`` and ``max_continuation`` tokens.
    windows: bool = False

    def __post_init__(self) -> None:
        both = () if self.windows else (("natural", self.natural), ("packed", self.packed))
        for name, (low, high) in both:
            if not 0 < low <= high <= self.max_prefix:
                raise ValueError(
                    f"{name} prefixes of {low} to {high} tokens: expected "
                    f"0 < low <= high <= max_prefix, which is {self.max_prefix}"
                )
        if not 0 <= self.packed_share <= 1:
            raise ValueError(f"packed_share {self.packed_share}: expected a share from 0 to 1")

    @property
    def own(self) -> Kind:
        """The kind of the samples that are made of one record."""
        return "text" if self.windows else "natural"

    @property
    def reach(self) -> tuple[float, float]:
        """The shortest and the longest natural prefix, or text, that can be used, in tokens."""
        return (self.max_prefix + self.max_continuation, math.inf) if self.windows else self.natural

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


def plain_text(prefix: int = 256, continuation: int = 256) -> Mixture:
    """Windows of plain text for base models, of so many tokens each."""
    return Mixture(packed_share=0.0, windows=True).limited(prefix, continuation)
