"""Norms and RoPE between capture points, batched over layers.

The same function serves both models: it moves the source's pre-norm keys to the translator's
capture point, and moves translated keys on to what the target's cache stores. If a family also
norms its values, "pre_norm" is before both norms.
"""

import functools
from collections.abc import Callable, Sequence

from kvlingo_mlx.backend import mx, on_gpu

from kvlingo_mlx.families.base import LATENT, POINTS, Finish
from kvlingo_mlx.format.geometry import RopeSpec

# Rotations that use only cosines and sines, without a gain.
SHARED = ("default", "linear", "llama3", "proportional")


class Rotation:
    """RoPE of some tokens, for all layers of a model.

    ``positions`` is the first position of a span, or an array (T,) with each token's own position.

    On a GPU the model's own module is one fused kernel. On a CPU it computes every cosine again for
    each layer. So on a CPU all layers share the cosines and sines that :meth:`unit` gives. The
    arithmetic on the keys is the module's own, so the result is bit-identical.
    """

    def __init__(self, positions: int | mx.array) -> None:
        self.positions = positions
        self._units: dict[tuple[RopeSpec | None, int], mx.array] = {}

    def __call__(self, keys: mx.array, finish: Finish) -> mx.array:
        """Rotate keys (..., H, T, D)."""
        if finish.rope_spec is None:
            return keys
        flat = keys.reshape(-1, *keys.shape[-3:])
        if on_gpu() or not _by_pairs(finish, keys) or keys.dtype != mx.float32:
            return self._turned(flat, finish).reshape(keys.shape)
        cos, sin = mx.split(self.unit(keys, finish, 0), 2, axis=-1)
        first, second = mx.split(flat, 2, axis=-1)
        turned = [first * cos - second * sin, first * sin + second * cos]
        return mx.concatenate(turned, axis=-1).reshape(keys.shape)

    def unit(self, keys: mx.array, finish: Finish, half: int) -> mx.array:
        """What becomes of ones in one half of each key and zeros in the other: (1, 1, T, D).

        Of the first half, 0, these are cosines and then sines; of the second negative sines first.
        """
        name, (tokens, dim) = (finish.rope_spec, half), keys.shape[-2:]
        if name not in self._units:
            unit = mx.array([float(i // (dim // 2) == half) for i in range(dim)])
            unit = mx.broadcast_to(unit, (1, 1, tokens, dim))
            self._units[name] = self._turned(unit, finish)
        return self._units[name]

    def _turned(self, heads: mx.array, finish: Finish) -> mx.array:
        """Rotate (F, H, T, D) by the model's own module."""
        if isinstance(self.positions, int):
            return finish.rope(heads, offset=self.positions)
        return at_positions(finish.rope, heads, self.positions)


def _by_pairs(finish: Finish, keys: mx.array) -> bool:
    """Whether the rotation turns each number of a key's first half with one of the second."""
    spec = finish.rope_spec
    return (
        spec is not None
        and spec.type in SHARED
        and not spec.traditional
        and spec.dims == keys.shape[-1]
    )


def at_positions(rope: Callable[..., mx.array], heads: mx.array, positions: mx.array) -> mx.array:
    """Rotate (F, H, T, D) by a rotary module, each token at its own of ``positions`` (T,).

    MLX takes one position per row of a batch, so tokens are moved to the batch axis for this.
    """
    rows, count, tokens, dim = heads.shape
    batch = heads.reshape(rows * count, tokens, 1, dim).swapaxes(0, 1)
    return rope(batch, offset=positions).swapaxes(0, 1).reshape(heads.shape)


def advance(
    keys: mx.array,
    finishes: Sequence[Finish],
    rotation: Rotation,
    origin: str,
    goal: str,
    by_token: bool = False,
) -> mx.array:
    """Move the keys of G layers from one capture point to a later one.

    Args:
        keys: (G, B, H, T, D).
        finishes: The G layers' norms and rotations.
        rotation: RoPE at the span's positions.
        origin: The capture point of ``keys``; keys of latents still need their rotation only.
        goal: The capture point to reach, at or after ``origin``.
        by_token: Whether a token's heads lie side by side in memory.

    Returns:
        (G, B, H, T, D).
    """
    if not all(_alike(finishes[0], finish) for finish in finishes):
        parts = [
            advance(keys[i : i + 1], [finish], rotation, origin, goal, by_token)
            for i, finish in enumerate(finishes)
        ]
        return mx.concatenate(parts)
    origin = "post_norm" if origin == LATENT else origin
    steps = POINTS[POINTS.index(origin) : POINTS.index(goal)]
    first, last = finishes[0], finishes[0].norm_last
    per_head = first.norm_weight is not None and first.norm_weight.size == keys.shape[-1]
    whole_way = steps == POINTS[:2] and per_head and not last and _by_pairs(first, keys)
    if on_gpu() and len(finishes) > 1 and whole_way:
        return _normed_and_turned(keys, finishes, rotation, by_token)
    if "pre_norm" in steps and not last:
        keys = _normalise(keys, finishes, by_token)
    if "post_norm" in steps:
        keys = rotation(keys, first)
    return _normalise(keys, finishes, False) if last and steps else keys


def rotate_back(keys: mx.array, finish: Finish, start: int) -> mx.array:
    """Undo RoPE on keys (B, H, T, D) of a cache whose first position is ``start``.

    Every module rotates by an angle proportional to the position, and some also apply a gain. The
    same rotation at negative positions undoes the angle; the gain is measured at position 0.
    """
    if finish.rope_spec is None:
        return keys
    last = start + keys.shape[-2] - 1
    turned = finish.rope(keys.astype(mx.float32)[..., ::-1, :], offset=-last)[..., ::-1, :]
    gain = finish.rope(mx.ones((1, 1, 1, keys.shape[-1])), offset=0)
    return (turned / gain**2).astype(keys.dtype)


def _normed_and_turned(
    keys: mx.array, finishes: Sequence[Finish], rotation: Rotation, by_token: bool
) -> mx.array:
    """Norm of each head and rotation on a GPU: two kernels, of which the second writes by heads."""
    normed = _rms(keys, None, finishes[0].norm_eps, by_token)
    units = (rotation.unit(keys, finishes[0], half) for half in (0, 1))
    parts = [mx.unflatten(a, -1, (2, -1)) for a in (normed, _weights_of(finishes), *units)]
    halves = (a[..., half : half + 1, :] for a in parts[:2] for half in (0, 1))
    return mx.flatten(turned_pairs(*halves, *parts[2:]), -2)


@functools.partial(mx.compile, shapeless=True)
def turned_pairs(
    one: mx.array, other: mx.array, weights: mx.array, others: mx.array,
    turned: mx.array, turned_other: mx.array,
) -> mx.array:  # fmt: skip
    """Halves of keys (..., 1, D / 2) times their weights, turned: (..., 2, D / 2).

    What becomes of each half is (T, 2, D / 2). One kernel, as nothing is joined.
    """
    first, second = (half.astype(mx.float32) for half in (one, other))
    return (first * weights * turned + second * others * turned_other).astype(one.dtype)


def _rms(array: mx.array, weight: mx.array | None, eps: float, by_token: bool) -> mx.array:
    """RMSNorm of (G, B, H, T, D), whose axes are put as the numbers lie: a GPU copies otherwise."""
    if not by_token:
        return mx.fast.rms_norm(array, weight, eps)
    return mx.fast.rms_norm(array.swapaxes(2, 3), weight, eps).swapaxes(2, 3)


def _normalise(keys: mx.array, finishes: Sequence[Finish], by_token: bool) -> mx.array:
    first = finishes[0]
    if first.norm_weight is None:
        return keys
    if first.norm_weight.size == keys.shape[-1]:
        return _rms_norm(keys, finishes, by_token)
    groups, batch, heads, tokens, dim = keys.shape  # here one norm covers all heads
    whole = keys.swapaxes(2, 3).reshape(groups, batch, 1, tokens, heads * dim)
    parts = _rms_norm(whole, finishes, False).reshape(groups, batch, tokens, heads, dim)
    return parts.swapaxes(2, 3)


def _rms_norm(keys: mx.array, finishes: Sequence[Finish], by_token: bool) -> mx.array:
    first = finishes[0]
    if len(finishes) == 1:
        return _rms(keys, first.norm_weight, first.norm_eps, by_token)
    return _rms(keys, None, first.norm_eps, by_token) * _weights_of(finishes)


def _weights_of(finishes: Sequence[Finish]) -> mx.array:
    """The weights of G layers' norms, (G, 1, 1, 1, width)."""
    return _stacked(tuple(f.norm_weight for f in finishes if f.norm_weight is not None))


@functools.lru_cache(maxsize=64)
def _stacked(weights: tuple[mx.array, ...]) -> mx.array:
    found = mx.stack(list(weights))[:, None, None, None]
    mx.eval(found)  # once for all translations: to stack is a launch a layer
    return found


def normalise_values(
    values: mx.array, finishes: Sequence[Finish], origin: str, by_token: bool = False
) -> mx.array:
    """Move the values of G layers, (G, B, H, T, D), from a capture point to the cache."""
    (eps,) = {finish.value_eps for finish in finishes}  # layers of one family
    return values if eps is None or origin != "pre_norm" else _rms(values, None, eps, by_token)


def _alike(a: Finish, b: Finish) -> bool:
    """Whether the keys of two layers can be finished in one batch."""
    return (
        a.rope_spec == b.rope_spec
        and a.norm_eps == b.norm_eps
        and (a.norm_weight is None) == (b.norm_weight is None)
    )
