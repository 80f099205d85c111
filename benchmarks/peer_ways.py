"""Ways to get to the first token after a switch, for ``peers.py``: what others do instead.

A way is a function from a prompt to the work that is left once the source has read it. That work
gives the target's cache of all tokens but the last, which is timed and judged as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import prefill_between
from kvlingo_mlx.evaluation.conditions import prefill_layers
from kvlingo_mlx.fitting.attention import heard
from kvlingo_mlx.models.language_model import LanguageModel

Work = Callable[[], list[Any]]
Way = Callable[[Sequence[int]], Work]

LOOK = 16  # last tokens of a prompt, which are always read
AHEAD = 8  # tokens that the source writes ahead, whose attention chooses what the target reads
CHUNK = 8  # neighbouring tokens that are chosen together
POOL = 5  # tokens over which attention is smoothed


def truncated(target: LanguageModel, share: float) -> Way:
    """The target reads the last part of the prompt, as if nothing stood before it."""

    def way(tokens: Sequence[int]) -> Work:
        first = len(tokens) - max(2, round(share * len(tokens)))
        return lambda: prefill_layers(target, tokens[first:-1], 2048, len(target.attentions))

    return way


def last_turns(target: LanguageModel, share: float, opening: int) -> Way:
    """The target reads whole messages from the end, until they are a share of the prompt.

    ``opening`` is the token with which the template opens a message. The last message is always
    read, and so is the header of the answer.
    """

    def way(tokens: Sequence[int]) -> Work:
        begins = [i for i, token in enumerate(tokens) if token == opening]
        room = len(tokens) - share * len(tokens)
        first = next((i for i in begins if i >= room), begins[-2])
        first = min(first, begins[-2])
        return lambda: prefill_layers(target, tokens[first:-1], 2048, len(target.attentions))

    return way


def attention(
    source: LanguageModel, cache: Sequence[Any], tokens: Sequence[int], start: int, last: int
) -> np.ndarray:
    """The attention that the ``last`` of ``tokens`` pay to all before ``start``: (start,).

    The largest over layers and heads, the mean over these tokens. The cache holds the ``start``
    tokens before.
    """
    count, most = len(tokens), [mx.zeros((len(tokens), start))]

    def listener(
        layer: int, queries: Any, keys: Any, values: Any, scale: float, *others: Any
    ) -> None:
        seen = mx.arange(start + count) <= mx.arange(start, start + count)[:, None]
        own, held = queries[0].astype(mx.float32), keys[0].astype(mx.float32)  # (H, start + M, D)
        scores = own.reshape(held.shape[0], -1, own.shape[-1]) @ held.swapaxes(-1, -2) * scale
        scores = scores.reshape(len(own), count, -1)
        weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
        most[0] = mx.maximum(most[0], weights[..., :start].max(axis=0))

    with heard(source, listener):
        source.model(mx.array(tokens)[None], cache=list(cache))
    return np.array(most[0][-last:].mean(axis=0))


def written(source: LanguageModel, cache: Sequence[Any], tokens: Sequence[int]) -> list[int]:
    """The tokens that the source would write next; the cache is as it was."""
    held = cache[0].offset
    steps = generate_step(
        mx.array(list(tokens)), source.model, max_tokens=AHEAD, prompt_cache=list(cache)
    )
    found = [int(token) for token, _ in steps]
    trim_prompt_cache(cache, cache[0].offset - held)
    return found


def kept_tokens(paid: np.ndarray, share: float) -> np.ndarray:
    """The places of the tokens that are read: whole chunks, those with most attention first."""
    smooth = np.convolve(paid, np.ones(POOL) / POOL, "same")
    starts = np.arange(0, len(paid), CHUNK)
    worth = [smooth[s : s + CHUNK].mean() for s in starts]
    count = max(1, round(share * len(starts)))
    taken = starts[np.sort(np.argsort(worth)[::-1][:count])]
    places = (taken[:, None] + np.arange(CHUNK)).reshape(-1)
    return places[places < len(paid)]


def speculative(source: LanguageModel, target: LanguageModel, share: float) -> Way | None:
    """Speculative prefill: the target reads what the source's attention looks at, in its place.

    As published (SpecPrefill): the source writes some tokens ahead, and their attention chooses
    chunks of the prompt. None where a cache is a ring.
    """
    if any(layer.window for model in (source, target) for layer in model.geometry.layers):
        return None

    def way(tokens: Sequence[int]) -> Work:
        start = len(tokens) - LOOK
        cache = prefill_layers(source, tokens[:start], 2048, len(source.attentions))

        def run() -> list[Any]:
            ahead = written(source, cache, tokens[start:])
            paid = attention(source, cache, [*tokens[start:], *ahead], start, len(ahead))
            trim_prompt_cache(cache, cache[0].offset - start)
            places = np.concatenate([kept_tokens(paid, share), np.arange(start, len(tokens) - 1)])
            # Positions are shifted so that the cache's length is the next one.
            shifted = (places + len(places) - (len(tokens) - 1)).tolist()
            own = caches.empty(target)
            visible = mx.array(np.tri(len(places), dtype=bool))
            prefill_between(target, own, [tokens[p] for p in places], shifted, visible)
            return own

        return run

    return way


def mapped(source: LanguageModel, target: LanguageModel, mapper: Any) -> Way:
    """The peer's own ``transfer_cache``, by its mapper held in memory."""
    from veloxquant_mlx.transfer import transfer_cache

    def way(tokens: Sequence[int]) -> Work:
        read = read_by_layer(source, tokens[:-1])

        def run() -> list[Any]:
            found = transfer_cache(read, mapper, unload_after=False)
            own = make_prompt_cache(target.model)
            for layer, cache in enumerate(own):
                cache.keys, cache.values = (array[None] for array in found[layer])
                cache.offset = len(tokens) - 1
            mx.eval(caches.arrays(own))
            return own

        return run

    return way


def read_by_layer(model: LanguageModel, tokens: Sequence[int]) -> dict[int, tuple[mx.array, ...]]:
    """A model's own cache as the peer takes it: by layer, keys and values (heads, tokens, dim)."""
    cache = prefill_layers(model, tokens, 2048, len(model.attentions))
    return {i: tuple(a[0] for a in each.keys_and_values()) for i, each in enumerate(cache)}
