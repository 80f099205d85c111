"""The attention that a continuation pays to its prefix, for the norms that weigh by it."""

from __future__ import annotations

from kvlingo_mlx.backend import mx, nn

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.capture import tap
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.samples import Sample

SCORE_NUMBERS = 2**26  # most attention scores alive at once: 256 MB in float32


def attention_mass(target: LanguageModel, sample: Sample, step_size: int = 2048) -> np.ndarray:
    """Attention that the continuation's queries pay to each prefix position (eq. "attn-norm").

    The target reads prefix and continuation natively; each layer's attention is
    averaged over the continuation's queries and over heads.

    Returns:
        (N layers, T prefix tokens), float64.
    """
    cache = make_prompt_cache(target.model)
    prefix, continuation = sample.prefix, sample.continuation
    for start in range(0, len(prefix), step_size):
        chunk = mx.array(prefix[start : start + step_size])
        target.model(chunk[None], cache=cache)
        mx.eval([c.state for c in cache])
    with tap([attention.q_proj for attention in target.attentions]) as recorder:
        target.model(mx.array(continuation)[None], cache=cache)
        projected = recorder.take()
    rows = []
    for attention, queries, layer_cache in zip(target.attentions, projected, cache, strict=True):
        queries = target.family.queries(attention, queries, len(prefix))
        keys, _ = layer_cache.keys_and_values()
        rows.append(_mean_attention(attention, queries[0], keys[0], len(prefix)))
    return np.stack(rows)


def _mean_attention(
    attention: nn.Module, queries: mx.array, keys: mx.array, num_prefix: int
) -> np.ndarray:
    """Mean over queries and heads of softmax(q k) on the prefix, in blocks of queries.

    queries (Hq, M, D) at positions num_prefix.., keys (H, T + M, D).
    """
    heads, count, dim = queries.shape
    kv_heads, total, _ = keys.shape
    block = max(1, SCORE_NUMBERS // (heads * total))
    keys = keys.astype(mx.float32).swapaxes(-1, -2)
    positions = mx.arange(total)
    mass = np.zeros(num_prefix)
    for start in range(0, count, block):
        part = queries[:, start : start + block].astype(mx.float32)
        size = part.shape[1]
        scores = part.reshape(kv_heads, -1, dim) @ keys * attention.scale
        scores = scores.reshape(heads, size, total)
        seen = positions <= mx.arange(start, start + size)[:, None] + num_prefix
        weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
        mass += np.array(weights[..., :num_prefix].sum(axis=(0, 1)), np.float64)
    return mass / (heads * count)
