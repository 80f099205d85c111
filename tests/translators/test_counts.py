"""What a translation launches and moves on a GPU, counted from its graph; and the count itself."""

from collections.abc import Callable

from kvlingo_mlx.backend import mx

import pytest

from benchmarks.translation_counts import BACKENDS, count_graph, made
from kvlingo_mlx.models.states import KVStates, Stacked, stacked
from tests.support.as_on_gpu import planned_for_a_gpu

each_backend = pytest.mark.parametrize("backend", BACKENDS)
# Bounds for a pair of one shape: launches whatever the depth and for each layer, bytes over least.
LAUNCHES, EACH_LAYER, BYTES = 12, 2, 3.1

ROWS = (4, 16, 32)  # a batch of matrices
SIZE = 4 * 16 * 32 * 4  # its bytes in float32


# A graph of x, the launches on CUDA and on Metal, and the bytes of x's size that CUDA moves.
PLANTED: dict[str, tuple[Callable[[mx.array], mx.array], int, int, float]] = {
    "views": (lambda x: x[:, ::2].swapaxes(0, 1)[None], 0, 0, 0),
    "reshape that copies": (lambda x: x.swapaxes(0, 1).reshape(64, 32), 1, 1, 2),
    "reshape that does not": (
        lambda x: x.reshape(4, 16, 2, 16).swapaxes(1, 2).reshape(2, 2, 2, 16, 16), 0, 0, 0
    ),
    "in a row": (lambda x: mx.exp(-x), 2, 2, 4),
    "joined": (lambda x: mx.concatenate([x, x + 1, x + 2]), 5, 5, 10),
    "one batch": (lambda x: x @ x.swapaxes(-1, -2), 1, 1, 2.5),
    "a matrix for all": (lambda x: x @ mx.zeros((32, 32)), 1, 1, 2.5),
    "two batch axes": (lambda x: x[:, None] @ mx.zeros((4, 3, 32, 32)), 2, 1, None),
    "rows apart": (lambda x: x[..., :16] @ mx.zeros((4, 16, 32)), 2, 1, None),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("name", PLANTED)
def test_launches_of_planted_graphs(name: str, backend: str) -> None:
    run, cuda, metal, passes = PLANTED[name]
    count = count_graph(lambda x: [run(x)], [mx.zeros(ROWS)], backend)
    assert len(count.kernels) == (cuda if backend == "cuda" else metal)
    if passes is not None:
        assert count.nbytes == pytest.approx(passes * SIZE, rel=1e-2)
    assert count.irregular == (name == "two batch axes")


@each_backend
def test_only_what_nobody_holds_is_written_in_place(backend: str) -> None:
    def run(x: mx.array) -> list[mx.array]:
        own, fresh = x + 1, mx.zeros(ROWS)
        for array in (x, own, fresh):
            array[:, :1] = x[:, :1] + 2
        return [own, fresh, x]

    names = [kernel.name for kernel in count_graph(run, [mx.zeros(ROWS)], backend).kernels]
    assert names.count("SliceUpdate") == 3 and names.count("Full") == 1
    assert names.count("copy for SliceUpdate") == 1


@each_backend
def test_a_translation_keeps_its_bounds(backend: str) -> None:
    few, many = (
        made(layers, heads=4, dim=64, tokens=1024).count(backend) for layers in (3, 9)
    )  # fmt: skip
    each = (len(many.kernels) - len(few.kernels)) / 6
    assert each <= EACH_LAYER
    assert len(few.kernels) - 3 * each <= LAUNCHES
    translation = made(6, heads=4, dim=64, tokens=1024)
    assert translation.count(backend).nbytes <= BYTES * translation.least


@pytest.mark.parametrize(("depth", "nu"), [(4, 1), (6, 1), (3, 2)])
def test_states_in_one_array_are_the_same_states(depth: int, nu: int) -> None:
    """Of all tokens and of some; layers read in order, some only, several together."""
    translator = made(4, heads=2, dim=16, tokens=9, nu=nu, depth=depth).translator
    sides = [mx.random.normal((depth, 1, 9, 32)) for _ in range(2)]
    apart = KVStates(*map(tuple, sides), "pre_norm", 0)
    together = KVStates(*map(stacked, (apart.keys, apart.values)), "pre_norm", 0)
    for part in (slice(0, 9), slice(2, 7)):
        one, other = (states.part(part.start, part.stop) for states in (apart, together))
        assert isinstance(other.keys, Stacked) and not isinstance(one.keys, Stacked)
        with planned_for_a_gpu():
            found = [translator(states).states(4) for states in (one, other)]
        pairs = zip(*(states.arrays for states in found), strict=True)
        assert all(mx.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)
        assert not mx.allclose(found[0].keys[0], found[0].keys[1])
