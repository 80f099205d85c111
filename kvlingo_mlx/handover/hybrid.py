"""Hybrid hand-over: what of a prefix the target reads itself, between translation and re-prefill.

Keys and values of a model's first layers cost a run of those layers alone, j of N: a share of
j / N of a prefill. The layers above are translated. Likewise along the tokens: the target may
read the first and the last ones itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import working

AUTO = "auto"


@dataclass(frozen=True)
class Native:
    """What the target reads itself of a prefix.

    Attributes:
        layers: Its first so many cache layers, over all tokens.
        head: The first so many tokens, in every layer.
        tail: The last so many tokens, in every layer; what they attend to is the hybrid's.
    """

    layers: int = 0
    head: int = 0
    tail: int = 0

    def translated(self, num_tokens: int, num_layers: int) -> range:
        """The positions of a prefix of ``num_tokens`` at which some layer is translated."""
        stop = num_tokens - self.tail
        whole = self.layers == num_layers
        return range(0) if whole or stop <= self.head else range(self.head, stop)


def native_part(
    config: TranslatorConfig, layers: int | str | None = None, head: int = 0, tail: int = 0
) -> Native:
    """What the target is to read itself, checked.

    Args:
        config: Of the translator.
        layers: How many; None is what the translator was tuned to, else none; ``auto`` refuses one
            that was not tuned.
        head: First tokens.
        tail: Last tokens.

    Raises:
        ValueError: A number without meaning, or ``auto`` where the translator was not tuned.
    """
    most = len(config.target.layers)
    if layers == AUTO and "native_layers" not in config.provenance:
        raise ValueError(
            f"native_layers is 'auto', but the translator from {config.source.name} to "
            f"{config.target.name} has no tuned native layers; choose them with `kvlingo-mlx "
            f"tune`, or give a number from 0 to {most}"
        )
    chosen = config.native_layers if layers in (None, AUTO) else layers
    if type(chosen) is not int or not 0 <= chosen <= most:
        raise ValueError(
            f"native_layers is {layers!r}; give a number from 0 to {most}, the cache layers of "
            f"{config.target.name}, or 'auto'"
        )
    for name, value in (("native_head", head), ("native_tail", tail)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}; give a number of tokens, 0 or more")
    return Native(chosen, head, tail)


def allocate(
    model: LanguageModel, prefix: Sequence[int], native: Native, step_size: int
) -> list[Any]:
    """Caches of a prefix to be translated into, its native head read already.

    They hold all of ``prefix`` once the native layers have read what is left, by
    :func:`read_layers`, and the layers above have been written.
    """
    cache = caches.allocate(model, len(prefix))
    own = make_prompt_cache(model.model)
    if native.head and prefix:
        read_layers(model, prefix[: native.head], own, step_size)
        caches.copy(own[native.layers :], cache[native.layers :])
    return own[: native.layers] + cache[native.layers :]


def read_layers(
    model: LanguageModel,
    tokens: Sequence[int],
    cache: Sequence[Any],
    step_size: int = 2048,
    layers: int | None = None,
) -> None:
    """Run tokens through a model's first ``layers`` cache layers (default: all), in chunks.

    The run ends as soon as the last one's keys and values are known: its attention is not
    computed, and no later layer and no head is entered. Evaluated chunk by chunk.

    Args:
        model: The model.
        tokens: What follows in those caches.
        cache: The model's caches; later layers' stay as they are.
        step_size: Tokens a chunk.
        layers: How many.
    """
    layers = len(cache) if layers is None else layers
    if not layers:
        return
    own = list(cache[:layers])
    later = make_prompt_cache(model.model)[layers:]
    for start in range(0, len(tokens), step_size):
        for empty in later:  # masks are made of what a cache says of its length
            empty.offset = own[0].offset
        chunk = mx.array(list(tokens[start : start + step_size]))
        with working():
            with _end_at(own[-1]) if later else contextlib.nullcontext():
                model.model(chunk[None], cache=[*own, *later])
            mx.eval([c.state for c in own])
            mx.clear_cache()


class _KnownError(Exception):
    """A layer's keys and values are known: nothing above it is wanted."""


@contextlib.contextmanager
def _end_at(cache: Any) -> Iterator[None]:
    """End a forward pass as soon as a layer's cache has taken what the layer writes."""
    cls = type(cache)

    class Last(cls):  # type: ignore[misc, valid-type]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
            super().update_and_fetch(keys, values)
            raise _KnownError

    cache.__class__ = Last
    try:
        with contextlib.suppress(_KnownError):
            yield
    finally:
        cache.__class__ = cls
