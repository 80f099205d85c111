"""A space that several models share: found where there is one, and not where there is none."""

import itertools

import numpy as np
import pytest

from benchmarks.hub import Maps, joint, star

MODELS, WIDTH, SHARED = 4, 6, 3


def planted(seed: int, common: bool) -> tuple[Maps, list[np.ndarray]]:
    """Pairs' exact maps and the models' mean squares: each has shared parts, and parts of its own.

    Without ``common`` each pair shares other ones.
    """
    rng = np.random.default_rng(seed)
    draw = lambda: rng.standard_normal((WIDTH, SHARED))  # noqa: E731
    shared = [draw() for _ in range(MODELS)]
    squares = [a @ a.T + 0.3 * np.diag(rng.uniform(1, 2, WIDTH)) for a in shared]
    maps = {}
    for i, j in itertools.permutations(range(MODELS), 2):
        a, b = (shared[i], shared[j]) if common else (draw(), draw())
        maps[i, j] = b @ a.T @ np.linalg.inv(squares[i])
    return maps, squares


def furthest(maps: Maps, squares: list[np.ndarray], k: int, rounds: int = 300) -> float:
    """The largest relative error of a pair's way through the space."""
    units = [np.diag(square.diagonal() ** -0.5) for square in squares]
    found = joint(maps, squares, units, k, rounds)
    assert found[0, 1][0] is found[0, 2][0] and found[0, 1][1] is found[2, 1][1]  # one map each
    assert [m.shape for m in found[0, 1]] == [(k, WIDTH), (WIDTH, k)]
    return max(
        float(np.linalg.norm(out @ into - maps[pair]) / np.linalg.norm(maps[pair]))
        for pair, (into, out) in found.items()
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_space_is_found(seed: int) -> None:
    """Of its size; of a smaller one not, nor where a model's map to itself counts."""
    maps, squares = planted(seed, common=True)
    assert furthest(maps, squares, SHARED) < 1e-4
    assert furthest(maps, squares, SHARED - 1) > 0.05
    assert furthest(maps, squares, SHARED, rounds=1) > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_where_each_pair_shares_something_else_there_is_none(seed: int) -> None:
    assert furthest(*planted(seed, common=False), SHARED) > 0.3


def test_a_space_of_all_numbers_holds_any_maps() -> None:
    assert furthest(*planted(0, common=False), MODELS * WIDTH, rounds=1) < 1e-6


def test_a_star_goes_by_way_of_its_hub() -> None:
    maps, _ = planted(0, common=False)
    found = star(maps, 2)
    assert found[0, 2] == (maps[0, 2],) and found[2, 1] == (maps[2, 1],)
    assert all(a is b for a, b in zip(found[0, 1], (maps[0, 2], maps[2, 1]), strict=True))
