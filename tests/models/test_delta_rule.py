"""The gated delta rule in chunks, against a loop in float64 and against mlx-lm's."""

import threading
from collections.abc import Iterator

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models import gated_delta

from kvlingo_mlx.models import delta_rule
from kvlingo_mlx.models.delta_rule import gated_delta_rule, in_chunks, stepping_in_chunks

Arrays = list[np.ndarray]
GATES = ("usual", "mixed", "ones", "zeros", "alike")
SHAPE = 2, 4, 12, 6  # heads of keys, of values; their widths


def inputs(tokens: int, gates: str, seed: int = 0) -> Arrays:
    """Queries, keys, values, gates, write strengths and a state."""
    key_heads, heads, width, out = SHAPE
    draw = np.random.default_rng(seed)
    q, k = draw.standard_normal((2, 2, tokens, key_heads, width))
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    g = np.exp(-np.exp(draw.standard_normal((2, tokens, heads)) - 3))
    beta = 1 / (1 + np.exp(-3 * draw.standard_normal(g.shape)))
    if gates == "mixed":
        g = draw.choice([0.0, 1e-30, 1e-3, 0.5, 0.999, 1 - 1e-6, 1.0], g.shape)
    elif gates in ("ones", "zeros"):
        g = np.full(g.shape, float(gates == "ones"))
    elif gates == "alike":  # one key, written over and over
        g, beta, k = np.full(g.shape, 0.9999), np.ones(g.shape), np.repeat(k[:, :1], tokens, 1)
    v = draw.standard_normal((2, tokens, heads, out))
    state = draw.standard_normal((2, heads, out, width))
    return [each.astype(np.float32) for each in (q, k, v, g, beta, state)]


def loop(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The rule as it is defined, in float64."""
    q, k, v, g, beta, state = (each.astype(np.float64) for each in arrays)
    q, k = (np.repeat(each, v.shape[2] // each.shape[2], axis=2) for each in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        met = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        written = (v[:, t] - met) * beta[:, t, :, None]
        state = state + written[..., None] * k[:, t, :, None]
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return np.stack(outputs, axis=1), state


def check(found: tuple[mx.array, mx.array], wanted: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(np.array(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_it_is_the_rule(tokens: int, gates: str) -> None:
    arrays = inputs(tokens, gates)
    given = list(map(mx.array, arrays))
    check(gated_delta_rule(*given), loop(arrays))
    check(gated_delta_rule(*given), tuple(map(np.array, gated_delta.gated_delta_ops(*given))))


@pytest.mark.parametrize("other", ["mask", "wide gates"])
def test_what_mlx_lms_loop_does(other: str) -> None:
    q, k, v, g, beta, state = map(mx.array, inputs(9, "usual"))
    mask = mx.arange(9)[None] >= mx.array([[4], [0]]) if other == "mask" else None
    if other == "wide gates":
        g = mx.broadcast_to(g[..., None], (*g.shape, k.shape[-1]))
    given = q, k, v, g, beta, state, mask
    for ours, theirs in zip(
        gated_delta_rule(*given), gated_delta.gated_delta_ops(*given), strict=True
    ):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("gates", ["usual", "alike"])
@pytest.mark.parametrize("tokens", [1, 150])
def test_gradient(tokens: int, gates: str) -> None:
    """Against central differences of the loop in float64, each input along a line of its own."""
    arrays, draw = inputs(tokens, gates), np.random.default_rng(1)
    wanted = [draw.standard_normal(each.shape) for each in loop(arrays)]
    given = [mx.array(each) for each in arrays]
    _, found = mx.vjp(
        lambda *each: list(gated_delta_rule(*each)),
        given,
        [mx.array(each.astype(np.float32)) for each in wanted],
    )

    def value(n: int, along: np.ndarray) -> float:
        changed = [each.astype(np.float64) for each in arrays]
        changed[n] = changed[n] + along
        return sum(float((a * b).sum()) for a, b in zip(loop(changed), wanted, strict=True))

    for n, gradient in enumerate(found):
        line = 1e-5 * draw.standard_normal(arrays[n].shape)
        slope = (value(n, line) - value(n, -line)) / 2
        size = np.linalg.norm(np.array(gradient)) * np.linalg.norm(line)
        assert abs(float((np.array(gradient) * line).sum()) - slope) < 2e-5 * size


def test_gates_of_zero_have_a_finite_gradient() -> None:
    given = list(map(mx.array, inputs(70, "mixed")))
    gradients = mx.grad(lambda *each: gated_delta_rule(*each)[1].sum(), list(range(6)))(*given)
    assert all(mx.isfinite(each).all().item() for each in gradients)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which the rule in chunks has run, a call each."""
    calls: list[int] = []

    def run(*args: mx.array) -> tuple[mx.array, mx.array]:
        calls.append(threading.get_ident())
        return gated_delta_rule(*args)

    monkeypatch.setattr(delta_rule, "gated_delta_rule", run)
    return calls


def test_other_threads_are_left_alone(counted: list[int]) -> None:
    given = list(map(mx.array, inputs(3, "usual")))

    def elsewhere() -> None:
        gated_delta.gated_delta_ops(*given)

    with in_chunks():
        with in_chunks():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert not counted
        gated_delta.gated_delta_kernel(*given)  # Metal's own has no gradient
        gated_delta.gated_delta_ops(*given)
    assert counted == [threading.get_ident()] * 2


def test_steps_alone_run_in_chunks(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "on_gpu", lambda: False)  # which would keep its kernels
    given = list(map(mx.array, inputs(3, "usual")))
    closed: list[bool] = []

    def read() -> Iterator[int]:
        try:
            for n in range(3):
                gated_delta.gated_delta_ops(*given)
                yield n
        finally:
            closed.append(True)

    steps = stepping_in_chunks(read())
    for n in range(2):
        assert next(steps) == n and len(counted) == n + 1
        gated_delta.gated_delta_ops(*given)
        assert len(counted) == n + 1
    steps.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert list(stepping_in_chunks(read())) == [0, 1, 2]
