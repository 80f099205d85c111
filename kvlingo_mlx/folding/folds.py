"""What can be folded, and how a target's folded caches are made over its source's caches."""

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.errors import IncompatibleTranslatorError, UnsupportedModelError
from kvlingo_mlx.families.base import LATENT
from kvlingo_mlx.folding.attention import Fold, FoldedPrefix, QueryRows, Side
from kvlingo_mlx.folding.cache import FoldedCache
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import head_map_of
from kvlingo_mlx.format.translator_config import TranslatorConfig, unfoldable
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator

# The new tokens' caches grow by this many tokens. With mlx-lm's 256, those of Gemma-3-12B take a
# fifth of what its source's cache of 8192 tokens takes (paper/LOG.md).
STEP = 32
Parts = dict[tuple[str, int], FoldedPrefix]


def check_foldable(source: LanguageModel, target: LanguageModel, translator: Translator) -> None:
    """Refuse a translator or models for which folded decoding does not work.

    Whether they are the very checkpoints was found out when the translator was resolved.

    Raises:
        IncompatibleTranslatorError: The translator is not linear, does not read post-RoPE keys, or
            is not from ``source`` to ``target``; or a layer keeps a recurrent state.
        UnsupportedModelError: A model caches latents, the target's attention handles the cached
            arrays itself, or several of the target's layers share a cache.
    """
    why = unfoldable(translator.config)
    if why is not None:
        raise IncompatibleTranslatorError(
            f"{target.name} cannot decode from the cache of {source.name} by this translator: "
            f"{why}; leave out memory_budget (generate)"
        )
    for model in (source, target):
        if LATENT in model.family.points:
            raise UnsupportedModelError(
                f"{model.name} caches latents, which folded decoding does not know: use generate "
                "(leave out memory_budget)"
            )
    readers = target.family.readers(target.model)
    shared = next((i for i, found in enumerate(readers) if len(found) > 1), None)
    reasons = {
        "its attention handles the cached arrays itself": not target.family.quantised_cache,
        f"other layers read the cache of layer {shared}": shared is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise UnsupportedModelError(
                f"{target.name} cannot decode from another model's cache, since {reason}: use "
                "generate (leave out memory_budget)"
            )
    check_pair(translator.config, source, target, allow_mismatch=True)


def check_whole(config: TranslatorConfig, native_layers: int | str | None = None) -> None:
    """Refuse to fold every layer where the target is to read some layers itself.

    ``native_layers`` is as in :func:`kvlingo_mlx.engine.hybrid.native_part`: None takes the tuned
    number, and 0 folds every layer of any translator.

    Raises:
        IncompatibleTranslatorError: There are native layers; the message names both ways out.
    """
    layers = native_part(config, native_layers).layers
    if layers:
        raise IncompatibleTranslatorError(
            f"the translator from {config.source.name} to {config.target.name} is used with "
            f"{layers} native layers (native_layers in its provenance, or as asked for), and "
            "folded decoding has none: use generate (leave out memory_budget), or give "
            "native_layers=0 (-c native_layers=0) to fold every layer"
        )


def fold_caches(
    source_cache: Sequence[Any],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
) -> list[Any]:
    """A target's caches whose prefix stays in the source's caches; nothing is computed.

    If the source later writes to the same caches, MLX copies the arrays that it writes to.

    Args:
        source_cache: Stock mlx-lm caches that ``source`` has filled from position 0 on, with any
            number of batch rows; one row serves any number of rows of the target's tokens.
        translator: From ``source`` to ``target``, linear and of post-RoPE keys.

    Returns:
        One cache per layer, for the target's model or for mlx-lm as ``prompt_cache``.

    Raises:
        IncompatibleTranslatorError, UnsupportedModelError: As for :func:`check_foldable`, or a
            cache is of a class that cannot be read.
        ValueError: The caches are empty, end at different positions, or have dropped tokens that
            the target's layers read.
    """
    check_foldable(source, target, translator)
    ends = {cache.offset for cache in source_cache}
    if len(ends) != 1 or ends == {0} or len(source_cache) != len(source.attentions):
        raise ValueError(
            f"the caches of {source.name} are {len(source_cache)} that end at {sorted(ends)}; "
            f"expected {len(source.attentions)}, filled to one position"
        )
    parts: Parts = {}
    for index, cache in enumerate(source_cache):
        *sides, packing = caches.viewed(cache)
        parts |= {(s, index): FoldedPrefix(a, packing) for s, a in zip(SIDES, sides, strict=True)}
    mx.eval([part.arrays for part in parts.values()])
    length = ends.pop()
    windows = [geometry.window for geometry in target.geometry.layers]
    made = zip(caches.empty(target, STEP), windows, strict=True)
    return [
        FoldedCache(_fold(translator, parts, layer, window, length), length, suffix, window)
        for layer, (suffix, window) in enumerate(made)
    ]


def _fold(
    translator: Translator, parts: Parts, layer: int, window: int | None, length: int
) -> Fold:
    """The fold of one target layer; a layer with a window reads at most that many tokens."""
    config = translator.config
    head_map = None if config.head_mixing else head_map_of(config)
    rows = QueryRows.of(head_map, config.source.layers[0].kv_heads)
    tokens = min(length, window or length)
    keys, values = (
        Side.of(translator, side, layer, lambda read: parts[read].last(tokens)) for side in SIDES
    )
    return Fold(keys, values, rows)
