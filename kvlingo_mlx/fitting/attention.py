"""The attention that a continuation pays to its prefix, which the attention norms use."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import Call, calling
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.samples import Sample

SCORE_NUMBERS = 2**26  # most attention scores in memory at once: 256 MB in float32
HOOK = scaled_dot_product_attention.__name__  # which the modules of mlx-lm's models import


@contextlib.contextmanager
def heard(model: LanguageModel, listener: Callable[..., None]) -> Iterator[None]:
    """Let ``listener`` have what mlx-lm's attention is given in this thread.

    That is the number of the cache layer, queries (1, Hq, L, D) and keys (1, H, K, D) as they are
    multiplied, values, the scale, the mask and the sinks.
    """
    readers, running = model.family.readers(model.model), list[int]()
    own = threading.get_ident()

    def within(call: Call, layer: int) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(layer)
            try:
                return call(*args, **kwargs)
            finally:
                running.pop()

        return run

    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any, sinks: Any = None
    ) -> Any:
        if running and threading.get_ident() == own:
            listener(running[-1], queries, keys, values, scale, mask, sinks)
        return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)

    rooms = {sys.modules[type(module).__module__] for group in readers for module in group}
    with contextlib.ExitStack() as stack:
        for layer, group in enumerate(readers):
            stack.enter_context(calling(group, partial(within, layer=layer)))
        for room in rooms:
            if hasattr(room, HOOK):
                setattr(room, HOOK, attention)
                stack.callback(setattr, room, HOOK, scaled_dot_product_attention)
        yield


def attention_mass(target: LanguageModel, sample: Sample, step_size: int = 2048) -> np.ndarray:
    """The attention that a continuation pays to each prefix position (eq. "attn-norm").

    The target reads prefix and continuation natively. Each layer's attention is averaged over the
    continuation's queries, over heads, and, where several layers read this layer's cache, over
    these layers. Positions before a window get none. To a recurrent layer, all are alike.

    Returns:
        (N layers, T prefix tokens), float64.

    Raises:
        UnsupportedModelError: The target computes its attention by itself.
    """
    layers, cache = target.geometry.layers, make_prompt_cache(target.model)
    *before, last = sample.prefix
    paid: list[list[np.ndarray]] = [[] for _ in layers]

    def listener(
        layer: int, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> None:
        seen = mask[..., 1:, :] if isinstance(mask, mx.array) else mask
        own = _mean_attention(queries[:, :, 1:], keys, scale, seen, sinks)
        first = len(sample.continuation) + len(sample.prefix) - len(own)  # that a window keeps
        paid[layer].append(np.pad(own, (first, 0))[: len(sample.prefix)])

    for start in range(0, len(before), step_size):
        with working():
            target.model(mx.array(before[start : start + step_size])[None], cache=cache)
            mx.eval([c.state for c in cache])
    # With the prefix's last token there are several, whose keys a ring gives in their order.
    with working(), heard(target, listener):
        target.model(mx.array([[last, *sample.continuation]]), cache=cache)
    if not all(paid[t] or layer.recurrence for t, layer in enumerate(layers)):
        raise UnsupportedModelError(
            f"{target.name} computes its attention by itself, so what it pays to a token is not "
            "known; take another norm (--norm frobenius)"
        )
    alike = np.full(len(sample.prefix), 1 / len(sample.prefix))
    return np.stack([np.mean(each, axis=0) if each else alike for each in paid])


def _mean_attention(
    queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> np.ndarray:
    """What each key gets of softmax(q k), the mean over queries and heads: (K,).

    It is the slope of what is gathered in the key's value, taken for a block of queries at a time.
    The queries are (1, Hq, M, D), of the last M keys (1, H, K, D).
    """
    heads, count, total = queries.shape[1], queries.shape[2], keys.shape[2]
    block, mass = max(1, SCORE_NUMBERS // (heads * total)), np.zeros(total)
    queries, keys = queries.astype(mx.float32), keys.astype(mx.float32)
    values = mx.zeros((*keys.shape[:3], 1))
    if isinstance(mask, str):  # causal
        mask = mx.arange(total) <= mx.arange(total - count, total)[:, None]
    for start in range(0, count, block):
        part = queries[:, :, start : start + block]
        seen = None if mask is None else mask[..., start : start + block, :]
        given: Any = {"scale": scale, "mask": seen, "sinks": sinks}
        gathered = partial(mx.fast.scaled_dot_product_attention, part, keys, **given)
        (slope,) = mx.vjp(gathered, [values], [mx.ones((*part.shape[:3], 1))])[1]
        mass += np.array(slope.sum((0, 1, 3)), np.float64)
    return mass / (heads * count)
