"""Which source layers a target layer reads, against exact fractions and hand-made tables."""

from dataclasses import replace
from fractions import Fraction

import pytest

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.assignment import by_depth, narrow_groups, relative_depth
from kvlingo_mlx.format.geometry import LayerGeometry, Recurrence

DEPTHS = (1, 2, 3, 4, 5, 7, 12, 13, 28, 36)


def test_kinds_with_few_layers_are_told() -> None:
    """In one line; none where all layers read what was asked, or where that is refused anyway."""
    local, whole = (LayerGeometry(0, 2, 16, 16, attention=kind) for kind in ("sliding", "full"))
    layers = [local, local, whole, local]
    assert narrow_groups(layers, layers, 1) == "" == narrow_groups(layers, [local] * 2, 3)
    assert narrow_groups(layers, layers, 3) == (
        "nu is 3, but the source has 1 of full attention: layers of that kind "
        "read no more than these"
    )
    assert narrow_groups(layers, layers, 4) == ""


def slow_band(index: int, num_source: int, num_target: int, nu: int) -> tuple[int, ...]:
    """Try every band that begins anywhere near, then shift the nearest one inward."""
    steps = max(num_target - 1, 1)  # a single target layer has relative depth 0
    counterpart = Fraction(index * (num_source - 1), steps)
    starts = range(-nu, num_source + nu)
    nearest = min(
        starts, key=lambda start: (abs(start + Fraction(nu - 1, 2) - counterpart), -start)
    )
    while nearest < 0:
        nearest += 1
    while nearest + nu > num_source:
        nearest -= 1
    return tuple(range(nearest, nearest + nu))


def check(num_source: int, num_target: int, nu: int) -> None:
    """Compare all bands of one pair of depths with the slow reference."""
    expected = tuple(slow_band(t, num_source, num_target, nu) for t in range(num_target))
    found = relative_depth(num_source, num_target, nu)
    assert found.keys == expected
    assert found.values == expected


@pytest.mark.parametrize("num_source", DEPTHS)
def test_bands_are_nearest(num_source: int) -> None:
    for num_target in DEPTHS:
        for nu in {1, 2, 3, 4, 5, num_source - 1, num_source}:
            if 1 <= nu <= num_source:
                check(num_source, num_target, nu)


def layers_of(kinds: str) -> list[LayerGeometry]:
    """Layers by letter: (f)ull, (s)liding, (g)ated delta, (m)amba2, (c)onvolution."""
    delta = Recurrence(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4)
    mamba = Recurrence(key_heads=1, value_heads=3, key_dim=4, value_dim=2, kernel=2)
    short = Recurrence(key_heads=0, value_heads=1, key_dim=0, value_dim=6, kernel=3)
    made = {
        "f": LayerGeometry(0, 2, 4, 4),
        "s": LayerGeometry(0, 2, 4, 4, "sliding", 8),
        "g": LayerGeometry(0, 1, 32, 8, "gated_delta", recurrence=delta),
        "m": LayerGeometry(0, 1, 14, 3, "mamba2", recurrence=mamba),
        "c": LayerGeometry(0, 1, 6, 6, "short_conv", recurrence=short),
    }
    return [replace(made[kind], layer=i) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("source", "target", "nu", "expected"),
    [
        ("ggfggf", "gggfgggf", 2, [[0, 1], [0, 1], [1, 3], [2, 5], [1, 3], [3, 4], [3, 4], [2, 5]]),
        ("ssfs", "sfss", 1, [[0], [2], [1], [3]]),
        ("ffff", "ggfggf", 2, [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]),
        ("ggfggf", "ffff", 1, [[0], [2], [3], [5]]),
        ("mfm", "ccfcf", 1, [[0], [1], [1], [2], [2]]),
        ("ssfssf", "gf", 1, [[2], [5]]),
        ("ssgf", "sf", 2, [[0, 1], [2, 3]]),
    ],
)  # fmt: skip
def test_kinds(source: str, target: str, nu: int, expected: list[list[int]]) -> None:
    found = by_depth(layers_of(source), layers_of(target), nu)
    assert [list(read) for read in found.keys] == expected == [list(r) for r in found.values]


@pytest.mark.parametrize("num_source", DEPTHS)
def test_a_plain_source_is_read_as_by_a_plain_target(num_source: int) -> None:
    """Every layer of it can be read, so bands are those of relative depth."""
    for num_target in DEPTHS:
        target = layers_of("ggf" * 48)[:num_target]
        for nu in {1, 2, 3, num_source}:
            if 1 <= nu <= num_source:
                found = by_depth(layers_of("f" * num_source), target, nu)
                assert found == relative_depth(num_source, num_target, nu)


@pytest.mark.parametrize(("source", "target"), [("ss", "gf"), ("ff", "sf"), ("gs", "gf")])
def test_a_kind_that_nothing_can_be_read_for(source: str, target: str) -> None:
    with pytest.raises(IncompatibleTranslatorError, match="which these cannot read"):
        by_depth(layers_of(source), layers_of(target))
