"""The attention that a continuation pays to its prefix, which the attention norms use."""

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.models.capture import Ear, move, tap, to_heads
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample

SCORE_NUMBERS = 2**26  # most attention scores in memory at once: 256 MB in float32


def attention_mass(target: LanguageModel, sample: Sample, step_size: int = 2048) -> np.ndarray:
    """The attention that a continuation pays to each prefix position (eq. "attn-norm").

    The target reads prefix and continuation natively. Each layer's attention is averaged over the
    continuation's queries, over heads, and, where several layers read this layer's cache, over
    these layers. Positions before a window get none. To a recurrent layer, all are alike.

    Returns:
        (N layers, T prefix tokens), float64.
    """
    cache = make_prompt_cache(target.model)
    prefix, continuation = sample.prefix, sample.continuation
    family, readers = target.family, target.family.readers(target.model)
    keys: list[list[mx.array]] = [[] for _ in target.attentions]
    ear = Ear(target)
    with ear.listening():

        def read(tokens: tuple[int, ...], start: int) -> None:
            target.model(mx.array(tokens)[None], cache=cache)
            states = move(ear.take(start), target, "post_rope")
            met = [
                family.attended(attention, *(to_heads(a, layer)[0] for a in pair))
                if layer.recurrence is None
                else pair[1][:, :0]  # nothing attends to it
                for attention, layer, *pair in zip(
                    target.attentions,
                    target.geometry.layers,
                    states.keys,
                    states.values,
                    strict=True,
                )
            ]
            mx.eval([c.state for c in cache], met)
            for parts, array in zip(keys, met, strict=True):
                parts.append(array)

        for start in range(0, len(prefix), step_size):
            read(prefix[start : start + step_size], start)
        modules = [
            family.query_projection(a)
            for group, layer in zip(readers, target.geometry.layers, strict=True)
            for a in group
            if layer.recurrence is None
        ]
        with tap(modules, nested=True) as recorder:  # fused projections write keys as well
            read(continuation, len(prefix))
            projected = iter(recorder.take())
    rows = []
    for layer, parts in enumerate(keys):
        if target.geometry.layers[layer].recurrence is not None:
            rows.append(np.full(len(prefix), 1 / len(prefix)))
            continue
        whole = mx.concatenate(parts, axis=2)[0]  # (H, T + M, D)
        window = target.geometry.layers[layer].window
        masses = [
            _mean_attention(
                family.queries(attention, next(projected), len(prefix))[0],
                whole,
                family.scale(attention),
                len(prefix),
                window,
                softcap=getattr(attention, "attn_logit_softcapping", None),
                sinks=attention.get("sinks"),
            )
            for attention in readers[layer]
        ]
        rows.append(np.mean(masses, axis=0))
    return np.stack(rows)


def _mean_attention(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    num_prefix: int,
    window: int | None,
    *,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> np.ndarray:
    """Mean over queries and heads of softmax(q k) on the prefix, in blocks of queries.

    The queries are (Hq, M, D), at positions from ``num_prefix`` on; the keys are (H, T + M, D).
    ``softcap`` bounds scores by a tanh. ``sinks`` (Hq,) are scores without a key that take part in
    each softmax.
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
        scores = part.reshape(kv_heads, -1, dim) @ keys * scale
        scores = scores.reshape(heads, size, total)
        scores = scores if softcap is None else softcap * mx.tanh(scores / softcap)
        own = mx.arange(start, start + size)[:, None] + num_prefix
        seen = positions <= own
        if window is not None:
            seen = seen & (positions > own - window)
        scores = mx.where(seen, scores, -mx.inf)
        if sinks is not None:
            column = mx.broadcast_to(sinks[:, None, None], (heads, size, 1))
            scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        mass += np.array(weights[..., :num_prefix].sum(axis=(0, 1)), np.float64)
    return mass / (heads * count)
