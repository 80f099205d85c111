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


def align(
    source_ends: np.ndarray,
    target_ends: np.ndarray,
    source_span: Span | None = None,
    target_span: Span | None = None,
) -> TokenAlignment:
    """The minimal mismatching groups of a text that two tokenizers have cut.

    Args:
        source_ends: (S,) where the source's tokens end, as :func:`token_ends` has it.
        target_ends: (T,) the same for the target's.
        source_span: The characters that are to be aligned, by the source's text; None for all.
        target_span: The same characters by the target's text.

    Returns:
        The groups from the first offset within the spans at which both sides end a token to the
        last one; none where there are fewer than two. A token that lies across the border of
        the spans is in none, and one that holds no character (``<s>``) at neither end of them.

    Raises:
        ValueError: The two spans differ in length.
    """
    source_span = _whole(source_ends) if source_span is None else source_span
    target_span = _whole(target_ends) if target_span is None else target_span
    lengths = [stop - start for start, stop in (source_span, target_span)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"the source's text has {lengths[0]} characters and the target's {lengths[1]}; "
            "align two tokenizations of the same text"
        )
    cuts, first, last = _cuts(source_ends, source_span)
    others, target_first, target_last = _cuts(target_ends, target_span)
    _, ours, theirs = np.intersect1d(cuts, others, assume_unique=True, return_indices=True)
    if len(ours) < 2:
        return TokenAlignment(np.zeros((0, 4), np.int64))
    columns = []
    for fewest, most in ((first[ours], last[ours]), (target_first[theirs], target_last[theirs])):
        columns += [np.append(most[:1], fewest[1:-1]), fewest[1:]]
    return TokenAlignment(np.stack(columns, axis=1))


def _whole(ends: np.ndarray) -> Span:
    return 0, int(ends.max(initial=0))


def _cuts(ends: np.ndarray, span: Span) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The offsets within a span at which tokens end, from its start on, in order.

    With each come the fewest and the most tokens that end there or before: tokens of no
    characters make the difference.
    """
    bounds = np.append(0, ends)  # bounds[k]: where the first k tokens end
    counts = np.flatnonzero((bounds >= span[0]) & (bounds <= span[1]))
    offsets, first, times = np.unique(bounds[counts], return_index=True, return_counts=True)
    return offsets - span[0], counts[first], counts[first + times - 1]
