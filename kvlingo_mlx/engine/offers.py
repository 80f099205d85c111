"""What the lines of other tokenizers hold of a conversation, and can offer to one line."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.reading import Reading
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.tokenization.alignment import Cuts, TokenAlignment, align
from kvlingo_mlx.tokenization.renderings import Rendering

Offers = tuple[Sequence["Offer"], Sequence["Offer"]]  # offers, and those without a translator
Run = tuple[int, int]  # positions from the first up to, not including, the second
EMPTY = np.zeros((0, 4), np.int64)


@dataclass(frozen=True)
class Known:
    """A conversation as models of several tokenizers have read it."""

    target: Reading  # the reading of the line that is to be brought up to date
    # by tokenizer, the readings of other models; later readings come first
    others: Mapping[str, Sequence[Reading]]


@dataclass(frozen=True, eq=False)
class Offer:
    """Consecutive minimal groups, adjacent on both sides, that one line's model wrote."""

    source: Line  # the line
    groups: np.ndarray  # (G, 4) as in ``TokenAlignment``

    def since(self, position: int) -> TokenAlignment | None:
        """The groups from a target position on, or None if there are none."""
        groups = self.groups[self.groups[:, 2] >= position]
        return TokenAlignment(groups) if len(groups) else None


def contents(source: Rendering, target: Rendering) -> Iterator[np.ndarray]:
    """The minimal groups (G, 4) of each part of the contents that neither side lacks.

    The parts end with the first that differ, of which what both begin with is aligned: what comes
    later was read after another history.
    """
    ours, theirs = Cuts.of(source.ends), Cuts.of(target.ends)
    for a, b in zip(source.contents, target.contents, strict=False):
        if a is None or b is None:
            continue
        shared = common_prefix(source.text[slice(*a)], target.text[slice(*b)])
        sides = ours.within((a[0], a[0] + shared)), theirs.within((b[0], b[0] + shared))
        yield align(*sides).groups
        if not a[1] - a[0] == shared == b[1] - b[0]:
            return


def offered(
    source: Line, reading: Reading, target: Rendering, begun: int, runs: Sequence[Run]
) -> list[Offer]:
    """The offers of a line for a target's rendering from position ``begun`` on.

    Args:
        reading: How its models have read the conversation; it may be shorter than the target's.
        begun: The number of tokens that the target has already.
        runs: The source's positions that can be given, in order and apart.
    """
    usable = source.common(reading.tokens)
    groups = np.concatenate([EMPTY, *contents(reading.rendering(usable), target)])
    inside = np.zeros(len(groups), bool)
    for start, stop in runs:
        inside |= (groups[:, 0] >= start) & (groups[:, 1] <= stop)
    groups = groups[inside & (groups[:, 2] >= begun)]
    groups = groups[np.argsort(groups[:, 2], kind="stable")]
    breaks = (groups[1:, ::2] != groups[:-1, 1::2]).any(axis=1)
    return [
        Offer(source, part) for part in np.split(groups, np.flatnonzero(breaks) + 1) if len(part)
    ]


def recorded(line: Line) -> list[Run]:
    """The positions of which a line keeps the states that its model's projections wrote."""
    starts, ends = ({getattr(p, side) for p in line.native.parts} for side in ("start", "end"))
    return list(zip(sorted(starts - ends), sorted(ends - starts), strict=True))


def wrote_itself(line: Line) -> list[Run]:
    """The positions that a line's own model ran."""
    return [(span.start, span.stop) for span in line.spans if not span.passes]


def read_again(line: Line, begun: int, source: Line, known: Known | None) -> int:
    """The number of tokens from ``begun`` on that a line's model ran, and another's had run too.

    Between two tokenizers only messages' contents count, which alone they have in common.
    """
    ran, held = np.zeros((2, len(line)), bool)
    for start, stop in wrote_itself(line):
        ran[max(start, begun) : stop] = True
    if line.model.tokenizer_fingerprint == source.model.tokenizer_fingerprint:
        shared = source.common(line.tokens)
        runs = [(start, min(stop, shared)) for start, stop in wrote_itself(source)]
    elif known is None:
        runs = []
    else:
        target = known.target.rendering(len(line))
        given = (
            offered(source, reading, target, begun, wrote_itself(source))
            for reading in known.others.get(source.model.tokenizer_fingerprint, ())
        )
        runs = [(first, last) for o in itertools.chain(*given) for *_, first, last in o.groups]
    for start, stop in runs:
        held[start:stop] = True
    return int((ran & held).sum())


def furthest(offers: Sequence[Offer], position: int) -> tuple[Offer, TokenAlignment] | None:
    """The offer that can be taken up at a target position and reaches furthest."""
    found = [
        (offer, rest)
        for offer in offers
        if (rest := offer.since(position)) is not None and rest.target[0] == position
    ]
    return max(found, key=lambda each: each[1].target[1], default=None)


def next_start(offers: Sequence[Offer], position: int) -> int | None:
    """The first target position after ``position`` at which an offer can be taken up."""
    rests = (offer.since(position + 1) for offer in offers)
    return min((rest.target[0] for rest in rests if rest is not None), default=None)
