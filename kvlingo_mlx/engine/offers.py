"""What lines hold of a conversation, and can offer to one line."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.reading import Reading
from kvlingo_mlx.engine.recording import Run
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.tokenization.alignment import Cuts, TokenAlignment, align
from kvlingo_mlx.tokenization.renderings import Rendering

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
    alike: bool = False  # whether both have one tokenizer, so that its one group may be divided

    def since(self, position: int) -> TokenAlignment | None:
        """The groups from a target position on, or None if there are none."""
        groups = np.maximum(self.groups, position) if self.alike else self.groups
        groups = groups[(groups[:, 2] >= position) & (groups[:, 2] < groups[:, 3])]
        return TokenAlignment(groups) if len(groups) else None

    def holds(self, position: int) -> bool:
        """Whether a target position lies between its first and its last."""
        return bool(self.groups[0, 2] <= position < self.groups[-1, 3])


def alike(one: Line, other: Line) -> bool:
    """Whether two lines' models have one tokenizer."""
    return one.model.tokenizer_fingerprint == other.model.tokenizer_fingerprint


def offers_of(
    source: Line,
    line: Line,
    tokens: Sequence[int],
    begun: int,
    known: Known | None,
    runs: Sequence[Run],
) -> list[Offer]:
    """What one line offers of another line's ``tokens``, of which that one has ``begun`` already.

    ``runs`` are the source's positions that can be given, in order and apart; of one tokenizer
    among the tokens that both share. Between two tokenizers only messages' contents count, which
    alone they have in common.
    """
    if alike(source, line):
        return [Offer(source, np.array([[*r, *r]]), alike=True) for r in runs if r[0] < r[1]]
    if known is None:
        return []
    target = known.target.rendering(len(tokens))
    readings = known.others.get(source.model.tokenizer_fingerprint, ())
    each = (offered(source, reading, target, begun, runs) for reading in readings)
    return list(itertools.chain(*each))


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


def wrote_itself(line: Line, most: int) -> list[Run]:
    """The positions before ``most`` that a line's own model ran."""
    return [(span.start, min(span.stop, most)) for span in line.spans if not span.passes]


def read_again(line: Line, begun: int, source: Line, known: Known | None) -> int:
    """The number of tokens from ``begun`` on that a line's model ran, and another's had run too."""
    ran, held = np.zeros((2, len(line)), bool)
    for start, stop in wrote_itself(line, len(line)):
        ran[max(start, begun) : stop] = True
    most = source.common(line.tokens) if alike(source, line) else len(source)
    runs = wrote_itself(source, most)
    for offer in offers_of(source, line, line.tokens, begun, known, runs):
        for *_, start, stop in offer.groups:
            held[start:stop] = True
    return int((ran & held).sum())


def furthest(offers: Sequence[Offer], position: int) -> tuple[Offer, TokenAlignment] | None:
    """The offer that can be taken up at a target position and reaches furthest.

    Those of the same tokenizer go first.
    """
    found = [
        (offer, rest)
        for offer in offers
        if (rest := offer.since(position)) is not None and rest.target[0] == position
    ]
    return max(found, key=lambda each: (each[0].alike, each[1].target[1]), default=None)


def next_start(offers: Sequence[Offer], position: int, end: int) -> int:
    """The first target position after ``position`` at which an offer can be taken up.

    It is ``end`` if there is none.
    """
    rests = (offer.since(position + 1) for offer in offers)
    return min((rest.target[0] for rest in rests if rest is not None), default=end)
