"""The cache of one target layer whose prefix stays in the source's cache, as mlx-lm meets it.

Where a cache has an attribute ``bits``, mlx-lm's attention passes on whatever that cache returns as
keys and values to ``quantized_scaled_dot_product_attention``. A ``FoldedCache`` has that attribute
and returns handles. We replace the one function that takes them: ours knows the handles and leaves
everything else, quantised caches too, to mlx-lm's.
"""

from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models import base

from kvlingo_mlx.folding.attention import Fold, attend


@dataclass(frozen=True)
class Segments:
    """A handle that stands for a layer's keys and values on their way to its attention."""

    fold: Fold | None  # the visible part of the prefix; None once all of it has left the window
    keys: mx.array  # the new tokens' own keys, (B, H, S, D)
    values: mx.array  # the new tokens' own values, (B, H, S, D)


class _Unsaved:
    """A leaf of a state that mlx-lm evaluates but cannot write; its error message quotes this."""

    def __repr__(self) -> str:
        return (
            "a folded cache, whose prefix is its source's own cache; save that one, and fold it "
            "again once it is loaded (kvlingo_mlx.folding.fold_caches)"
        )


class FoldedCache:
    """A prefix in the source's own cache, and the target's native keys and values after it.

    Attributes:
        fold: The prefix. It is shared: neither copied nor counted in ``nbytes``.
        suffix: A stock mlx-lm cache of the new tokens; a ring where the layer has a window.
        bits: None; mlx-lm's attention looks for this attribute.
        group_size: None, for the same reason.
    """

    def __init__(self, fold: Fold, prefix_tokens: int, suffix: Any, window: int | None) -> None:
        install()
        self.fold, self.suffix = fold, suffix
        self.bits = self.group_size = None
        self._prefix_tokens, self._window = prefix_tokens, window

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self._prefix_tokens + self.suffix.offset

    def _visible(self, count: int) -> int:
        """How many of the prefix's last tokens the first of ``count`` new ones may see."""
        kept = self.fold.tokens
        if self._window is None:
            return kept
        return max(0, min(kept, self._window - 1 - self.suffix.offset))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add new tokens' keys and values (B, H, L, D); return handles of all that is visible."""
        visible = self._visible(keys.shape[2])
        own = self.suffix.update_and_fetch(keys, values)
        segments = Segments(self.fold.last(visible) if visible else None, *own)
        return segments, segments

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """The mask of ``N`` new tokens, (N, P + S), oldest first; None if they see everything."""
        window = window_size or self._window
        own = self.suffix.offset
        if self._window is not None:
            own = min(own, self._window - 1)
        visible = self._visible(N) + own
        sees_all = window is None or visible + 1 <= window
        if N == 1 and sees_all and not return_array:
            return None
        first = self.offset - visible
        queries = mx.arange(self.offset, self.offset + N)[:, None]
        keys = mx.arange(first, self.offset + N)[None]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    @property
    def state(self) -> Any:
        """The arrays that mlx-lm evaluates: the new tokens' own, without the prefix.

        A saved copy would lack the prefix when it is loaded. So mlx-lm's ``save_prompt_cache``
        refuses to save it (ValueError), quoting the last leaf.
        """
        return *self.suffix.state, _Unsaved()

    @property
    def nbytes(self) -> int:
        """Bytes of the new tokens' keys and values; the prefix's are the source's."""
        return self.suffix.nbytes

    def is_trimmable(self) -> bool:
        """Whether new tokens can be taken back."""
        return self.suffix.is_trimmable()

    def trim(self, count: int) -> int:
        """Take back at most ``count`` new tokens, never the prefix; return how many."""
        return self.suffix.trim(count)

    def empty(self) -> bool:
        """Always False: there is a prefix."""
        return False


def _attention(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: mx.array | None,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    if not isinstance(q_keys, Segments):
        return _stock(queries, q_keys, q_values, scale, mask, group_size, bits)
    fold, keys, values = q_keys.fold, q_keys.keys, q_keys.values
    if fold is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return attend(queries, fold, keys, values, scale, mask)


_stock = base.quantized_scaled_dot_product_attention


def install() -> None:
    """Make mlx-lm's attention accept folded caches; a second call changes nothing."""
    base.quantized_scaled_dot_product_attention = _attention
