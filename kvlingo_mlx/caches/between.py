"""Prefill of tokens that stand between entries that the caches already hold."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import arrays
from kvlingo_mlx.models.keys import at_positions
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import Call, calling, reclassed
from kvlingo_mlx.threads import working


def prefill_between(
    model: LanguageModel,
    cache: Sequence[Any],
    tokens: Sequence[int],
    positions: Sequence[int],
    visible: mx.array,
    step_size: int = 2048,
) -> None:
    """Prefill tokens whose places lie between entries that the caches already hold.

    The tokens' entries follow the E entries in the caches. Attention does not depend on the order
    of entries, so only the mask decides which entries a token sees. Each chunk is evaluated.

    Args:
        cache: Its caches, with E entries written in each; none of them is a ring.
        tokens: (B,) the tokens to read, in the text's order.
        positions: (B,) the position at which each token is rotated; any integers.
        visible: (B, E + B) whether a token sees an entry, its own included.
    """
    held = visible.shape[1] - len(tokens)
    for each in cache:
        each.offset = held
    for start in range(0, len(tokens), step_size):
        stop = min(start + step_size, len(tokens))
        seen = visible[start:stop, : held + stop][None, None]
        places = mx.array(list(positions[start:stop]))
        with working():
            with placed(model, cache, places, seen):
                model.model(mx.array(list(tokens[start:stop]))[None], cache=cache)
            mx.eval(arrays(cache))
            mx.clear_cache()


def read_amid(
    model: LanguageModel, cache: Sequence[Any], tokens: Sequence[int], positions: Sequence[int]
) -> None:
    """Let a model read some tokens of a text in the place of the entries that caches hold of them.

    Each sees what the caches hold of the tokens before it: the model's own entries of those that
    it reads here, and of the others the entries that were there.

    Args:
        cache: Its caches of a text, an entry for each token.
        tokens: (B,) the tokens to read, in the text's order.
        positions: (B,) their positions in the text.
    """
    held, at = cache[0].offset, mx.array(list(positions))
    others = ~(mx.arange(held)[:, None] == at).any(axis=1)
    visible = mx.concatenate([others & (mx.arange(held) < at[:, None]), at <= at[:, None]], axis=1)
    prefill_between(model, cache, tokens, positions, visible, len(tokens))
    for each in cache:
        for array in (each.keys, each.values):
            array[..., at, :] = array[..., held : each.offset, :]
        each.offset = held
    with working():
        mx.eval(arrays(cache))


@contextlib.contextmanager
def placed(
    model: LanguageModel, cache: Sequence[Any], positions: mx.array, visible: mx.array
) -> Iterator[None]:
    """Let a forward pass rotate its T tokens at ``positions`` (T,) and see only ``visible``.

    ``visible`` is (1, 1, T, E): whether a token sees an entry, those of the pass included.
    """

    def moved(call: Call) -> Call:  # at its own position, whatever the cache's length
        return lambda x, *args, **kwargs: at_positions(call, x, positions)

    def masked(cls: type) -> type:
        class Masked(cls):  # type: ignore[misc, valid-type]
            def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
                return visible

        return Masked

    ropes = {id(r): r for r in map(model.family.rotary, model.attentions)}.values()
    with calling(ropes, moved), reclassed(cache, masked):
        yield
