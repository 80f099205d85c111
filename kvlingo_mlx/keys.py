"""k_norm and RoPE between capture points, batched over layers.

One function serves both ends: it takes a source's pre-norm keys to the point where a
translator reads, and translated keys on to what the target's cache stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlingo_mlx.backend import mx

from kvlingo_mlx.families.base import KeyFinish

POINTS = ("pre_norm", "post_norm", "post_rope")


def advance(
    keys: mx.array, finishes: Sequence[KeyFinish], start: int, origin: str, goal: str
) -> mx.array:
    """Take the keys of G layers from one capture point to a later one.

    Args:
        keys: (G, B, H, T, D), heads normalised one by one and rotated by position.
        finishes: The G layers' norms and rotations.
        start: Position of the first token.
        origin: The point ``keys`` are at.
        goal: The point wanted, at or after ``origin``.

    Returns:
        (G, B, H, T, D).
    """
    if not all(_alike(finishes[0], finish) for finish in finishes):
        parts = [
            advance(keys[i : i + 1], [finish], start, origin, goal)
            for i, finish in enumerate(finishes)
        ]
        return mx.concatenate(parts)
    steps = POINTS[POINTS.index(origin) : POINTS.index(goal)]
    if "pre_norm" in steps:
        keys = _normalise(keys, finishes)
    if "post_norm" in steps:
        keys = _rotate(keys, finishes, start)
    return keys


def _normalise(keys: mx.array, finishes: Sequence[KeyFinish]) -> mx.array:
    first = finishes[0]
    if first.norm_weight is None:
        return keys
    if len(finishes) == 1:
        return mx.fast.rms_norm(keys, first.norm_weight, first.norm_eps)
    weights = mx.stack([finish.norm_weight for finish in finishes])  # (G, D)
    return mx.fast.rms_norm(keys, None, first.norm_eps) * weights[:, None, None, None]


def _rotate(keys: mx.array, finishes: Sequence[KeyFinish], start: int) -> mx.array:
    groups, batch = keys.shape[:2]
    flat = keys.reshape(groups * batch, *keys.shape[2:])
    return finishes[0].rope(flat, offset=start).reshape(keys.shape)


def _alike(a: KeyFinish, b: KeyFinish) -> bool:
    """Whether two layers' keys can be finished in one batch."""
    return (
        a.rope_spec == b.rope_spec
        and a.norm_eps == b.norm_eps
        and (a.norm_weight is None) == (b.norm_weight is None)
    )
