"""What mlx-lm cannot do with a model's caches; it is refused before anything is computed."""

from collections.abc import Sequence
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from kvlingo_mlx.caches import stored_shape
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.models.language_model import LanguageModel

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # the values that MLX supports
# Not their subclasses, whose entries may be more than tokens.
MERGED = (KVCache, RotatingKVCache, ArraysCache)


def check_bits(model: LanguageModel, bits: int, group_size: int) -> None:
    """Refuse ``kv_bits`` for a model whose cache mlx-lm cannot quantise.

    mlx-lm itself would fail later, perhaps in the middle of an answer: it quantises as soon as
    ``quantized_kv_start`` tokens are cached.

    Raises:
        UnsupportedModelError: A layer has a window, other layers read its cache too, or its
            attention uses the cached arrays directly.
        ValueError: MLX does not support the bits, or the groups do not divide a layer's widths.
    """
    shared = [len(readers) > 1 for readers in model.family.readers(model.model)]
    reasons = {
        "which keep a window in a RotatingKVCache": [bool(g.window) for g in model.geometry.layers],
        "which later layers read too": shared,
        "whose attention handles the cached arrays itself": [not model.family.quantised_cache]
        * len(shared),
    }
    for reason, layers in reasons.items():
        if any(layers):
            raise UnsupportedModelError(
                f"kv_bits cannot be used with {model.name}: mlx-lm cannot quantise {sum(layers)} "
                f"of its {len(layers)} cache layers (the first: layer {layers.index(True)}), "
                f"{reason}; leave out kv_bits (--kv-bits)"
            )
    check_groups(model, bits, group_size)


def check_going_back(model: LanguageModel, cannot: str, gone: str) -> None:
    """Refuse a model that cannot go back to fewer tokens; the message says what it ``cannot`` do.

    Raises:
        UnsupportedModelError: A layer keeps a window or a state, without what came before.
    """
    kinds = {
        "window": [g.window is not None for g in model.geometry.layers],
        "recurrent state": [g.recurrence is not None for g in model.geometry.layers],
    }
    for kind, found in kinds.items():
        if any(found):
            raise UnsupportedModelError(
                f"{model.name} {cannot}: {sum(found)} of its {len(found)} cache layers (the first: "
                f"layer {found.index(True)}) keep a {kind}, and {gone}"
            )


def check_interleaving(model: LanguageModel) -> None:
    """Refuse a model whose entries cannot be replaced while an answer grows behind them."""
    check_going_back(
        model,
        "cannot be healed while it answers",
        "what it read before is gone; heal between two answers (Conversation.heal, chat "
        "-c heal=idle)",
    )


def check_groups(model: LanguageModel, bits: int, group_size: int) -> None:
    """Refuse (ValueError) bits that MLX does not support, and groups that do not divide a row."""
    if bits not in BITS:
        raise ValueError(f"kv_bits is {bits!r}; give {_listed(BITS)}")
    layers = enumerate(model.geometry.layers)
    shapes = (stored_shape(model, index) for index, g in layers if g.recurrence is None)
    widths = sorted({width for both in shapes for _, width in both})
    possible = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
    if group_size not in possible:
        wanted = f"make it {_listed(possible)}" if possible else "leave out kv_bits (--kv-bits)"
        raise ValueError(
            f"kv_group_size is {group_size}, but the keys and values that {model.name} caches are "
            f"{_listed(widths, 'and')} numbers wide; {wanted}"
        )


def _listed(numbers: Sequence[int], word: str = "or") -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} {word} {last}" if first else last


def check_draft(
    target: LanguageModel, draft: LanguageModel, num_tokens: int, max_tokens: int
) -> None:
    """Refuse speculative decoding if mlx-lm could not undo a draft's rejected tokens.

    A full window has lost what a rejected token replaced. mlx-lm checks for that before it starts,
    and for the target only; if a window fills later, its answers are silently wrong.

    Raises:
        UnsupportedModelError: A window would fill within ``num_tokens + max_tokens``, or some of
            the target's layers have no cache, so mlx-lm cannot tell its caches from the draft's.
    """
    for model in (target, draft):
        if model.geometry.recurrent:
            raise UnsupportedModelError(
                f"draft_model cannot be used: {model.name} keeps recurrent states, from which "
                "mlx-lm cannot take back rejected tokens; leave out draft_model (--draft-model)"
            )
        windows = [g.window for g in model.geometry.layers if g.window is not None]
        if windows and num_tokens + max_tokens >= min(windows):
            raise UnsupportedModelError(
                f"draft_model cannot be used: {model.name} keeps windows of {min(windows)} tokens "
                "(RotatingKVCache), from which mlx-lm cannot take back rejected tokens once they "
                f"are full; {num_tokens} tokens of the prompt and max_tokens={max_tokens} fill "
                "them; leave out draft_model (--draft-model)"
            )
    owners, layers = len(target.attentions), len(target.model.layers)
    if owners < layers:
        raise UnsupportedModelError(
            f"draft_model cannot be used: {target.name} has {layers} layers but caches for only "
            f"{owners}, which mlx-lm's speculative decoding does not allow for; leave out "
            "draft_model (--draft-model)"
        )


def can_merge(cache: Sequence[Any]) -> bool:
    """Whether mlx-lm can decode from these caches together with those of other answers."""
    return all(
        can_merge(each.caches) if isinstance(each, CacheList) else type(each) in MERGED
        for each in cache
    )
