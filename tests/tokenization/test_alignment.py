"""Minimal groups across tokenizers, against plain loops over characters, on many languages."""

import functools
import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from kvlingo_mlx.tokenization.alignment import NO_END, Cuts, TokenAlignment, align, token_ends
from tests.support.languages import TEXTS, byte_level, sentencepiece

Offsets = list[tuple[int, int]]
NORMALISED = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
KINDS = {
    "byte-level": byte_level,
    "byte-level, trimmed": functools.partial(byte_level, prefix=True, trim=True),
    "byte-level, NFKC": functools.partial(byte_level, normaliser=NORMALISED),
    "byte-level, NFD": functools.partial(byte_level, normaliser=normalizers.NFD()),
    "sentencepiece": sentencepiece,
    "sentencepiece, not legacy": functools.partial(sentencepiece, legacy=False),
    "sentencepiece, unigram": functools.partial(sentencepiece, unigram=True),
}
often = functools.partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


def offsets_of(kind: str, text: str, *, special: bool = False) -> Offsets:
    return tokenizer(kind).encode(text, add_special_tokens=special).offsets


def slow_owners(offsets: Offsets, text: str) -> list[set[int]]:
    """For each character, the tokens that hold part of it."""
    owners: list[set[int]] = [set() for _ in text]
    reached = 0
    for token, (start, stop) in enumerate(offsets):
        if start == stop > reached:  # white space, trimmed away to nothing
            start = reached
        for character in range(start, stop):
            owners[character].add(token)
        reached = max(reached, stop)
    held = [i for i, found in enumerate(owners) if found]
    if not held:
        return [{len(offsets) - 1} for _ in text]
    for i in range(len(text)):
        if owners[i]:
            continue
        before = [j for j in held if j < i]
        after = [j for j in held if j > i]
        # White space up to the next held character leads that character's token.
        leads = after and all(text[j].isspace() for j in range(i, after[0]))
        near = after[0] if leads or not before else before[-1]
        owners[i] = {min(owners[near])} if near > i else {max(owners[near])}
    return owners


def slow_cuts(offsets: Offsets, text: str) -> dict[int, tuple[int, int]]:
    """Offsets between tokens, each with the fewest and most tokens before it."""
    owners = slow_owners(offsets, text)
    cuts = {}
    for cut in range(len(text) + 1):
        left = {token for found in owners[:cut] for token in found}
        right = {token for found in owners[cut:] for token in found}
        fewest = max(left) + 1 if left else 0
        most = min(right) if right else len(offsets)
        if fewest <= most:
            cuts[cut] = (fewest, most)
    return cuts


def slow_groups(source: Offsets, target: Offsets, text: str) -> list[tuple[int, int, int, int]]:
    ours, theirs = slow_cuts(source, text), slow_cuts(target, text)
    groups, begun = [], None
    for cut in range(len(text) + 1):
        if cut not in ours or cut not in theirs:
            continue
        if begun is None:
            begun = ours[cut][1], theirs[cut][1]
        else:
            groups.append((begun[0], ours[cut][0], begun[1], theirs[cut][0]))
            begun = ours[cut][0], theirs[cut][0]
    return groups


def slow_positions(groups: list[tuple[int, int, int, int]]) -> list[int]:
    """The appendix's rule, as it is written: i, j, p and q count from 1."""
    positions = []
    for start, stop, first, last in groups:
        p, q = stop - start, last - first
        for i in range(1, p + 1):
            j = 1 + round((i - 1) * (q - 1) / (p - 1)) if p >= 2 else 1
            positions.append(first + j - 1)
    return positions


def aligned(source: Offsets, target: Offsets, text: str) -> TokenAlignment:
    return align(*(Cuts.of(token_ends(offsets, text)) for offsets in (source, target)))


def check(source: Offsets, target: Offsets, text: str) -> TokenAlignment:
    found = aligned(source, target, text)
    groups = found.groups.tolist()
    assert [tuple(g) for g in groups] == slow_groups(source, target, text)
    assert found.assigned.tolist() == slow_positions(groups)
    ours, theirs = slow_cuts(source, text), slow_cuts(target, text)
    at = 0  # the character up to which the groups cover the text
    for index, (start, stop, first, last) in enumerate(groups):
        assert start < stop and first < last
        if index:
            assert [start, first] == [groups[index - 1][1], groups[index - 1][3]]
        ends = [c for c in ours if c > at and ours[c][0] == stop]
        others = [c for c in theirs if c > at and theirs[c][0] == last]
        assert ends == others and len(ends) == 1  # both sides end at the same character
        assert not any(c in theirs for c in ours if at < c < ends[0])  # cannot be split
        inside = found.assigned[start - found.source[0] : stop - found.source[0]]
        assert inside[0] == first and (stop - start == 1 or inside[-1] == last - 1)
        at = ends[0]
    assert at == len(text)
    assert (np.diff(found.assigned) >= 0).all()
    assert (found.group_of == np.repeat(range(len(groups)), [g[1] - g[0] for g in groups])).all()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_every_language(name: str) -> None:
    text = unicodedata.normalize("NFC", TEXTS[name])[:160]
    for source in KINDS:
        for target in ("byte-level", "sentencepiece"):
            check(offsets_of(source, text), offsets_of(target, text), text)


@st.composite
def tokenised(draw: st.DrawFn, text: str) -> Offsets:
    """A random cut of a text's bytes, as a byte-level tokenizer reports it."""
    spelled = [i for i, character in enumerate(text) for _ in character.encode()]
    inner = range(1, len(spelled))
    cuts = sorted(draw(st.sets(st.sampled_from(inner)))) if len(spelled) > 1 else []
    bounds = [0, *cuts, len(spelled)]
    offsets = [(spelled[a], spelled[b - 1] + 1) for a, b in itertools.pairwise(bounds)]
    if draw(st.booleans()):  # leading spaces trimmed off
        offsets = [(b - len(text[a:b].lstrip(" ")), b) for a, b in offsets]
    if draw(st.booleans()):  # a token that stands for no character, at either end
        offsets = [(0, 0), *offsets, (0, 0)]
    return offsets


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[str, Offsets, Offsets]:
    text = draw(st.text("ab  é漢👩", min_size=1, max_size=12))
    return text, draw(tokenised(text)), draw(tokenised(text))


@often(max_examples=150)
@given(cut_twice())
@example(("aé", [(0, 2), (1, 2)], [(0, 1), (1, 2), (1, 2)]))
def test_random_cuts(drawn: tuple[str, Offsets, Offsets]) -> None:
    text, source, target = drawn
    check(source, target, text)


def test_offsets_beyond_the_text_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 3, but the text has 2 characters"):
        token_ends([(0, 3)], "ab")


def test_different_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="source's text has 2 characters and the target's 3"):
        align(Cuts.of(np.array([1, 2])), Cuts.of(np.array([3])))


def test_spans_leave_out_what_crosses_their_border() -> None:
    # "x|ab|c" within "[ xabc ]": the source merges "[ " with nothing, the target "[ x".
    source, target = (Cuts.of(np.array(ends)) for ends in ([2, 3, 5, 6, 8], [3, 5, 8]))
    found = align(source.within((2, 6)), target.within((2, 6)))
    assert found.groups.tolist() == [[2, 3, 1, 2]]
    assert align(source.within((3, 4)), target.within((3, 4))).groups.shape == (0, 4)
    assert NO_END not in found.groups


@pytest.mark.parametrize(("p", "q", "expected"), [
    (1, 4, [0]), (4, 1, [0, 0, 0, 0]), (2, 5, [0, 4]), (3, 3, [0, 1, 2]), (3, 2, [0, 0, 1]),
    (3, 4, [0, 2, 3]), (5, 3, [0, 0, 1, 2, 2]), (5, 2, [0, 0, 0, 1, 1]), (4, 3, [0, 1, 1, 2]),
])  # fmt: skip
def test_rule(p: int, q: int, expected: list[int]) -> None:
    assert TokenAlignment(np.array([[0, p, 0, q]])).assigned.tolist() == expected
