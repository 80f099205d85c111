"""Which target tokens each source token stands for, where two tokenizers cut the same text.

Section "Cross-tokenizer cache translation" and its appendix. Both sides are described by the
character offsets at which their tokens end in the text as it was given. Every offset at which
both end a token is a cut; what lies between two cuts is a minimal mismatching group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_END = -1  # a token that ends within a character, or in what a normaliser made of several
Span = tuple[int, int]  # where something begins, and one past where it ends


@dataclass(frozen=True, eq=False)
class TokenAlignment:
    """Minimal mismatching groups of two token sequences, and where source tokens go.

    Tokens count from the first one of each rendering, so a target token's number is its position.

    Attributes:
        groups: (G, 4) source start, source stop, target start, target stop of each group, in
            order. Each begins where the one before it ends, on both sides, and holds at least one
            token of each.
    """

    groups: np.ndarray

    @property
    def source(self) -> Span:
        """The source tokens that are translated."""
        return self._ends(0)

    @property
    def target(self) -> Span:
        """The target tokens that they stand for."""
        return self._ends(2)

    def _ends(self, column: int) -> Span:
        if not len(self.groups):
            return 0, 0
        return int(self.groups[0, column]), int(self.groups[-1, column + 1])

    @cached_property
    def group_of(self) -> np.ndarray:
        """(S,) the group of each source token, from the first translated one on."""
        return np.repeat(np.arange(len(self.groups)), self.groups[:, 1] - self.groups[:, 0])

    @cached_property
    def assigned(self) -> np.ndarray:
        """(S,) the target position at which each source token's keys are rotated.

        Within a group of p >= 2 source and q target tokens the i-th goes to the one numbered
        j(i) = 1 + round((i - 1)(q - 1) / (p - 1)), a single one to the first. The paper does not
        say where a half goes: to the even neighbour, as Python and PyTorch round. A quotient of
        small integers is a half only where it is one exactly.
        """
        start, stop, first, last = self.groups[self.group_of].T
        steps = np.arange(*self.source) - start
        spread = steps * (last - first - 1) / np.maximum(stop - start - 1, 1)
        return first + np.rint(spread).astype(np.int64)

    @cached_property
    def entries(self) -> np.ndarray:
        """(T,) how many source tokens each target position gets, from the first one on; some none.

        A position that gets none is not missing: its group's entries stand for its text.
        """
        start, stop = self.target
        return np.bincount(self.assigned - start, minlength=stop - start)

    @property
    def one_to_one(self) -> np.ndarray:
        """(G,) whether a group holds a single token on each side."""
        return (self.groups[:, 1::2] - self.groups[:, ::2] == 1).all(axis=1)

    @property
    def is_identity(self) -> bool:
        """Whether every source token goes to the position that it has itself."""
        return np.array_equal(self.groups[:, :2], self.groups[:, 2:])


def token_ends(offsets: Sequence[Span] | np.ndarray, text: str) -> np.ndarray:
    """Where each token ends in ``text``, from a fast tokenizer's offset mapping.

    Offsets overlap where a token holds part of a character's bytes, a leading-space mark that no
    space stands for, or part of what a normaliser made of one character: such a token has no end
    of its own. They leave gaps where white space was trimmed off a token or dropped, and where
    characters were composed or deleted: white space belongs to the token after it, as leading
    spaces do, all else to the one before. Tokens of no characters (``<s>``) end where they stand.

    Args:
        offsets: (T, 2) first character, and one past the last, of each token, in order.
        text: What was tokenised, before any normaliser.

    Returns:
        (T,) int64, ``NO_END`` for tokens without an end of their own. The others ascend, and
        the last token that holds a character ends with the text.

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
    trimmed = (starts == stops) & (stops > before)  # to nothing: it holds what no other one does
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
    """Where in a text, or part of one, a side's tokens end.

    Attributes:
        offsets: (K,) the characters at which tokens end, ascending, counted from the part's first.
        fewest: (K,) how many tokens end there or before.
        most: (K,) the same and those after them that hold no character.
        length: Characters of the part.
    """

    offsets: np.ndarray
    fewest: np.ndarray
    most: np.ndarray
    length: int

    @classmethod
    def of(cls, ends: np.ndarray) -> Cuts:
        """Those of a whole text, from its start on, by its tokens' :func:`token_ends`."""
        bounds = np.append(0, ends)  # bounds[k]: where the first k tokens end
        counts = np.flatnonzero(bounds != NO_END)
        offsets, first, times = np.unique(bounds[counts], return_index=True, return_counts=True)
        return cls(offsets, counts[first], counts[first + times - 1], int(offsets[-1]))

    def within(self, span: Span) -> Cuts:
        """Those of some of the text's characters."""
        start, stop = span
        kept = slice(*np.searchsorted(self.offsets, [start, stop + 1]))
        return Cuts(self.offsets[kept] - start, self.fewest[kept], self.most[kept], stop - start)


def align(source: Cuts, target: Cuts) -> TokenAlignment:
    """The minimal mismatching groups of a text that two tokenizers have cut.

    Both are of the same text or the same part of it. The groups run from the first offset at which
    both sides end a token, or the text begins, to the last; there are none where there are
    fewer than two. A token that lies across the border of a part is in no group, and one that
    holds no character (``<s>``) in none at either end.

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
