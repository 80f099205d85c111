"""The gated delta rule in chunks of tokens: matmuls, with a gradient on every machine.

mlx-lm runs the rule token by token: by a kernel on Metal, which has no gradient, and by a loop of
Python elsewhere, which is slow. Here a chunk's tokens are one triangular system. A token's state is

    S_t = g_t S_(t-1) + u_t k_t^T    with    u_t = beta_t (v_t - g_t S_(t-1) k_t)

so the writes U of a chunk solve (1 + A) U = beta (V - d K S_0^T). There d is the decay since the
chunk's begin, and A_ij = beta_i G_ij k_i . k_j for j < i, with G_ij the decay from token j to token
i. Results differ from mlx-lm's by rounding, so a hand-over does not use this.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from kvlingo_mlx.backend import mx, on_gpu

from mlx_lm.models import gated_delta, ssm

CHUNK = 64  # tokens, a power of 2
BLOCK = 4  # tokens whose triangular system is solved at once
LEAST = 1e-37  # a smaller gate is no divisor in float32, and leaves nothing either
Rule = Callable[..., tuple[mx.array, mx.array]]
Step = TypeVar("Step")


def gated_delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """What mlx-lm's ``gated_delta_ops`` gives, lazily: outputs, and the state after them.

    It is computed in float32. Masks, which only padded batches have, and gates of several numbers
    a head are left to mlx-lm's loop.

    Args:
        q: (B, T, Hk, Dk) queries.
        k: (B, T, Hk, Dk) keys.
        v: (B, T, Hv, Dv) values; Hv is a multiple of Hk.
        g: (B, T, Hv) gates, from 0 to 1.
        beta: (B, T, Hv) write strengths.
        state: (B, Hv, Dv, Dk) the state before; zeros if None.
        mask: (B, T) the tokens that count.

    Returns:
        (B, T, Hv, Dv) in ``q``'s dtype, and (B, Hv, Dv, Dk).
    """
    if mask is not None or g.ndim != 3:
        return _loop(q, k, v, g, beta, state, mask)
    batch, tokens, heads, width = v.shape
    groups = q.shape[2]
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    queries, keys, values, gates, strengths = (
        _cut(each.astype(mx.float32), groups, size, fill)
        for each, fill in (
            *((each, 0.0) for each in (q, k, v)),
            (g[..., None], 1.0),  # what fills the last chunk up changes no state
            (beta[..., None], 0.0),
        )
    )
    shape = batch, groups, heads // groups, width, q.shape[3]
    states = mx.zeros(shape) if state is None else state.astype(mx.float32).reshape(shape)
    inner, last, decay = _decays(gates[..., 0])
    places = mx.tri(size, size, -1)
    met = strengths * inner * (keys @ keys.swapaxes(-1, -2)) * places
    solved: mx.array = _inverse(met)
    fresh, erased = solved @ (strengths * values), solved @ (strengths * decay * keys)
    scores = inner * (queries @ keys.swapaxes(-1, -2))
    parts = fresh, erased, scores, decay * queries, last * keys, decay[..., -1:, :]
    outputs, chunks = [], keys.shape[3]
    # Cut by one operation each: the gradients of slices would each be as large as the whole.
    for each in zip(*(mx.split(part, chunks, axis=3) for part in parts), strict=True):
        given, erases, met_by, reads, lasts, decayed = (part.squeeze(3) for part in each)
        before = states.swapaxes(-1, -2)
        writes = given - erases @ before
        outputs.append(reads @ before + met_by @ writes)
        states = decayed * states + writes.swapaxes(-1, -2) @ lasts
    found = mx.concatenate(outputs, axis=-2)[..., :tokens, :]
    found = found.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, width)
    kept = states.reshape(batch, heads, width, -1)
    return found.astype(q.dtype), kept if state is None else kept.astype(state.dtype)


def _cut(array: mx.array, groups: int, size: int, fill: float) -> mx.array:
    """An array (B, T, H, D) as (B, groups, H / groups, chunks, size, D)."""
    batch, tokens, heads, width = array.shape
    if more := -tokens % size:
        array = mx.pad(array, [(0, 0), (0, more), (0, 0), (0, 0)], constant_values=fill)
    parts = array.reshape(batch, -1, size, groups, heads // groups, width)
    return parts.transpose(0, 3, 4, 1, 2, 5)


def _decays(gates: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The decays within chunks of gates (..., C).

    Each is a product of its own: quotients of products from the begin would lose the digits of
    small ones.

    Returns:
        (..., C, C) from each token j to each i not before it, 0 elsewhere; (..., C, 1) from each
        token to the chunk's end; (..., C, 1) from the chunk's begin to each token.
    """
    # A token in front, whose gate is never read, stands for the chunk's begin.
    whole = _products(mx.pad(gates, [(0, 0)] * (gates.ndim - 1) + [(1, 0)], constant_values=1.0))
    inner = whole[..., 1:, 1:]
    return inner, inner[..., -1, :, None], whole[..., 1:, :1]


def _multiplied(gates: mx.array) -> mx.array:
    """The products (..., C, C) of the gates behind each token j up to each i not before it."""
    size = gates.shape[-1]
    steps = mx.where(mx.tri(size, size, -1, mx.bool_), gates[..., None], 1.0)
    return mx.where(mx.tri(size, size, 0, mx.bool_), mx.cumprod(steps, axis=-2), 0.0)


_products: Any = mx.custom_function(_multiplied)


@_products.vjp  # type: ignore[untyped-decorator]
def _products_slope(gates: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    """A gate is a factor of all products that begin before it and end at it or behind it."""
    size = gates.shape[-1]
    behind = mx.cumsum(cotangent * output, axis=-2, reverse=True)
    return (behind * mx.tri(size, size, -1)).sum(-1) / mx.maximum(gates, LEAST)


def _inverted(below: mx.array) -> mx.array:
    """The inverse of 1 + ``below`` (..., C, C), which is 0 on and above the diagonal.

    C is a power of 2. The blocks on the diagonal are inverted, then twice as large ones:
    [[P, 0], [B, Q]] has the inverse [[P', 0], [-Q' B P', Q']]. A series of powers for the whole
    would take fewer steps, but its terms cancel where keys are alike.
    """
    *batch, size, _ = below.shape

    def blocks(width: int) -> mx.array:
        """Those on the diagonal, (..., C / width, width, width)."""
        parts = below.reshape(*batch, size // width, width, size // width, width)
        return mx.moveaxis(mx.diagonal(parts, axis1=-4, axis2=-2), -1, -3)

    width = min(BLOCK, size)
    first = blocks(width)
    found = (mx.eye(width) - first) @ (mx.eye(width) + first @ first)  # first to the fourth is 0
    while width < size:
        upper, lower = found[..., ::2, :, :], found[..., 1::2, :, :]
        corner = -(lower @ blocks(2 * width)[..., width:, :width] @ upper)
        above = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        found = mx.concatenate([above, mx.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return found.squeeze(-3)


_inverse: Any = mx.custom_function(_inverted)


@_inverse.vjp  # type: ignore[untyped-decorator]
def _inverse_slope(below: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    turned = output.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)


_loop: Rule = gated_delta.gated_delta_ops


class _Here(threading.local):
    depth = 0  # how many contexts this thread has open


_here = _Here()


@contextlib.contextmanager
def in_chunks(gradient: bool = True) -> Iterator[None]:
    """Let mlx-lm's models run their gated delta layers in chunks, in this thread.

    No recurrence runs by a kernel of Metal, which would have no gradient. Plain mlx-lm may run the
    same models in another thread meanwhile. Without ``gradient`` a GPU keeps its kernels, which
    are fast.
    """
    if not gradient and on_gpu():
        yield
        return
    _install()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


@functools.cache
def _install() -> None:
    """Let mlx-lm's layers find these rules by the names that they call, inside the contexts.

    Mamba-2 decodes a token by a kernel on Metal, and reads several by operations that have a
    gradient.
    """

    def put(module: Any, name: str, rule: Rule) -> None:
        stock = getattr(module, name)
        setattr(module, name, lambda *a, **more: (rule if _here.depth else stock)(*a, **more))

    for name in ("gated_delta_ops", "gated_delta_kernel"):
        put(gated_delta, name, lambda *a, **more: gated_delta_rule(*a, **more))
    put(ssm, "ssm_update_kernel", ssm.ssm_attn)


def stepping_in_chunks(read: Iterator[Step]) -> Iterator[Step]:
    """The same steps, each of them :func:`in_chunks` without gradient; what is between is not."""
    try:
        while True:
            with in_chunks(gradient=False):
                found = next(read, None)
            if found is None:
                return
            yield found
    finally:
        if isinstance(read, Generator):
            read.close()
