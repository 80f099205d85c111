"""Which target tokens each source token stands for, where two tokenizers cut the same text.

Paper: section "Cross-tokenizer cache translation" and its appendix. Each side is described by the
character offsets at which its tokens end in the given text. An offset at which both sides end a
token is a cut; the tokens between two neighbouring cuts are a minimal mismatching group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_END = -1  # the token ends inside a character, or inside a normaliser's replacement of some
Span = tuple[int, int]  # the start, and one past the end


@dataclass(frozen=True, eq=False)
class TokenAlignment:
    """The minimal mismatching groups of two token sequences, and where source tokens go.

    Tokens count from the start of each rendering, so a target token's number is its position.
    """

    # (G, 4) source start, source stop, target start, target stop of each group, in order. On both
    # sides each group begins where the previous one ends and holds at least one token.
    groups: np.ndarray

    @property
    def source(self) -> Span:
        """The span of source tokens that are translated."""
        return self._ends(0)

    @property
    def target(self) -> Span:
        """The span of target tokens for which the source tokens stand."""
        return self._ends(2)

    def _ends(self, column: int) -> Span:
        if not len(self.groups):
            return 0, 0
        return int(self.groups[0, column]), int(self.groups[-1, column + 1])

    @cached_property
    def group_of(self) -> np.ndarray:
        """(S,) the group of each source token, starting at the first translated one."""
        return np.repeat(np.arange(len(self.groups)), self.groups[:, 1] - self.groups[:, 0])

    @cached_property
    def assigned(self) -> np.ndarray:
        """(S,) the target position at which each source token's keys are rotated.

        In a group of p >= 2 source and q target tokens, the i-th source token goes to the target
        token j(i) = 1 + round((i - 1)(q - 1) / (p - 1)); a single source token goes to the first.
        The paper does not say how halves are rounded; here they go to the even neighbour, as in
        Python and PyTorch. A quotient of small integers is a half only if the exact one is.
        """
        start, stop, first, last = self.groups[self.group_of].T
        steps = np.arange(*self.source) - start
        spread = steps * (last - first - 1) / np.maximum(stop - start - 1, 1)
        return first + np.rint(spread).astype(np.int64)


def token_ends(offsets: Sequence[Span] | np.ndarray, text: str) -> np.ndarray:
    """The character at which each token ends in ``text``, from a tokenizer's offset mapping.

    Offsets overlap where a token holds only some bytes of a character, a leading-space mark for
    which the text has no space, or part of what a normaliser made of one character. Such a token
    has no end of its own. Offsets leave gaps where white space was trimmed or dropped, and where
    characters were composed or deleted. White space in a gap belongs to the token after it, as
    leading spaces do; all else belongs to the token before. A token of no characters (``<s>``)
    ends where it stands.

    Args:
        offsets: (T, 2) the first character of each token and one past its last, in order.
        text: The text that was tokenised, before any normaliser.

    Returns:
        (T,) int64, ``NO_END`` for tokens without an end of their own. The other ends ascend, and
        the last token that holds a character ends at the end of the text.

    Raises:
        ValueError: An offset lies outside the text.
    """
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    if not len(spans):
        return np.zeros(0, np.int64)
    if not 0 <= spans.min() <= spans.max() <= len(text):
        raise ValueError(
            f"the offsets run from {spans.min()} to {spans.max()}, but the text has {len(text)} "
            "characters; give the text that was tokenised"
        )
    starts, stops = spans.T
    reached = np.maximum.accumulate(stops)
    before = np.append(0, reached[:-1])
    trimmed = (starts == stops) & (stops > before)  # yet no other token holds its text
    holds = (starts < stops) | trimmed
    first, last = np.flatnonzero(holds)[[0, -1]] if holds.any() else (0, len(spans) - 1)
    begins = np.where(trimmed, before, np.where(holds, starts, len(text)))
    ahead = np.minimum.accumulate(np.append(begins[1:], len(text))[::-1])[::-1]
    ends = np.where(ahead >= reached, reached, NO_END)
    for token in np.flatnonzero(ahead > reached):
        if token >= first:
            gap = text[reached[token] : ahead[token]]
            ends[token] = reached[token] + len(gap.rstrip())
    ends[last:] = len(text)
    return ends


@dataclass(frozen=True, eq=False)
class Cuts:
    """The offsets at which one side's tokens end in a text or in a part of it."""

    # (K,) the characters at which tokens end, ascending, counted from the part's start
    offsets: np.ndarray
    fewest: np.ndarray  # (K,) how many tokens end there or before
    most: np.ndarray  # (K,) the same, plus the tokens right after them that hold no character
    length: int  # number of characters of the part

    @classmethod
    def of(cls, ends: np.ndarray) -> Cuts:
        """The cuts of a whole text, from the :func:`token_ends` of its tokens."""
        bounds = np.append(0, ends)  # bounds[k]: where the first k tokens end
        counts = np.flatnonzero(bounds != NO_END)
        offsets, first, times = np.unique(bounds[counts], return_index=True, return_counts=True)
        return cls(offsets, counts[first], counts[first + times - 1], int(offsets[-1]))

    def within(self, span: Span) -> Cuts:
        """The cuts within a span of the text's characters."""
        start, stop = span
        kept = slice(*np.searchsorted(self.offsets, [start, stop + 1]))
        return Cuts(self.offsets[kept] - start, self.fewest[kept], self.most[kept], stop - start)


def align(source: Cuts, target: Cuts) -> TokenAlignment:
    """The minimal mismatching groups of a text that two tokenizers have cut.

    Both arguments are of the same text or the same part of it. The groups run from the first
    offset at which both sides end a token (or the text begins) to the last such offset; with fewer
    than two such offsets there are no groups. A token that crosses the border of a part is in no
    group. Neither is a token of no characters (``<s>``) at either end.

    Raises:
        ValueError: The two parts differ in length.
    """
    if source.length != target.length:
        raise ValueError(
            f"the source's text has {source.length} characters and the target's {target.length}; "
            "align two tokenizations of the same text"
        )
    _, ours, theirs = np.intersect1d(
        source.offsets, target.offsets, assume_unique=True, return_indices=True
    )
    if len(ours) < 2:
        return TokenAlignment(np.zeros((0, 4), np.int64))
    columns = []
    for side, shared in ((source, ours), (target, theirs)):
        fewest, most = side.fewest[shared], side.most[shared]
        columns += [np.append(most[:1], fewest[1:-1]), fewest[1:]]
    return TokenAlignment(np.stack(columns, axis=1))
