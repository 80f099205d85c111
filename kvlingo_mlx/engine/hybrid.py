"""Hybrid hand-over: the target reads a part of the prefix itself, and the rest is translated.

To compute the keys and values of a model's first j of N layers, only these layers have to run. That
costs j / N of a prefill. The layers above are translated. The target may also read the first and
the last tokens itself, in all layers, and some of those between them.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading import notes
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import reclassed
from kvlingo_mlx.threads import working

AUTO = "auto"
FIRST_SHARE = 0.25  # of the layers, which are read at once where nobody says how many


@dataclass(frozen=True)
class Native:
    """The part of a prefix that the target reads itself."""

    layers: int = 0  # the number of first cache layers that it runs over all tokens
    head: int = 0  # the number of first tokens that it reads in every layer
    # The number of last tokens that it reads in every layer. They attend to the hybrid cache.
    tail: int = 0
    # The number of tokens between head and tail that it reads in every layer, at even distances.
    # They attend to the translated entries before them.
    middle: int = 0

    def amid(self, span: range) -> list[int]:
        """The positions of a translated ``span`` that it reads in every layer."""
        count = min(self.middle, len(span))
        return [span.start + (2 * n + 1) * len(span) // (2 * count) for n in range(count)]

    def translated(self, num_tokens: int, num_layers: int) -> range:
        """The positions of a prefix of ``num_tokens`` at which some layer is translated."""
        stop = num_tokens - self.tail
        whole = self.layers == num_layers
        return range(0) if whole or stop <= self.head else range(self.head, stop)


def native_part(
    config: TranslatorConfig,
    layers: int | str | None = None,
    head: int = 0,
    tail: int = 0,
    middle: int = 0,
    at_once: bool = False,
) -> Native:
    """The part that the target is to read itself, with its numbers checked.

    Args:
        layers: The number of native layers. None takes the tuned number, or 0 if the translator
            was not tuned; ``auto`` refuses a translator that was not tuned.
        head, tail, middle: Those of :class:`Native`.
        at_once: Whether the target reads its first layers at once where ``layers`` is None: the
            tuned number, else a quarter of all.

    Raises:
        ValueError: A number is out of range, or ``auto`` is given and the translator is not tuned.
    """
    most = len(config.target.layers)
    if layers is None and at_once:
        layers = first_layers(config)
    if layers == AUTO and "native_layers" not in config.provenance:
        tune = notes.to_tune(config, None)
        instead = f"choose them with {tune}, or give a number from 0 to {most}"
        raise ValueError(
            f"native_layers is 'auto', but {config.title} has no tuned native layers; "
            + (instead if tune else "between two tokenizers there are none; leave it out")
        )
    chosen = config.native_layers if layers in (None, AUTO) else layers
    if type(chosen) is not int or not 0 <= chosen <= most:
        raise ValueError(
            f"native_layers is {layers!r}; give a number from 0 to {most}, the cache layers of "
            f"{config.target.name}, or 'auto'"
        )
    return Native(chosen, head, tail, middle)


def first_layers(config: TranslatorConfig) -> int:
    """The tuned number of native layers, else a quarter of all."""
    return config.native_layers or math.ceil(FIRST_SHARE * len(config.target.layers))


def read_layers(
    model: LanguageModel,
    tokens: Sequence[int],
    cache: Sequence[Any],
    step_size: int = 2048,
    layers: int | None = None,
) -> None:
    """Run tokens through a model's first ``layers`` cache layers (default: all), in chunks.

    The run ends as soon as the last of these layers has written its keys and values. Its attention,
    the later layers and the output head are not computed. Each chunk is evaluated. The caches
    hold what comes before the ``tokens``; those of later layers stay unchanged.
    """
    layers = len(cache) if layers is None else layers
    if not layers:
        return
    own = list(cache[:layers])
    later = make_prompt_cache(model.model)[layers:]
    for start in range(0, len(tokens), step_size):
        chunk = mx.array(list(tokens[start : start + step_size]))
        with working():
            with _end_at(own[-1]) if later else contextlib.nullcontext():
                model.model(chunk[None], cache=[*own, *later])
            mx.eval([c.state for c in own])
            mx.clear_cache()


class _KnownError(Exception):
    """Raised once a layer's keys and values are known, to skip everything above that layer."""


@contextlib.contextmanager
def _end_at(cache: Any) -> Iterator[None]:
    """End a forward pass as soon as a layer has written all that its cache keeps."""

    def ending(cls: type) -> type:
        class Last(cls):  # type: ignore[misc, valid-type]
            def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
                super().update_and_fetch(keys, values)
                raise _KnownError

            def __setitem__(self, index: int, array: mx.array) -> None:
                super().__setitem__(index, array)
                if index + 1 == len(self.cache):
                    raise _KnownError

        return Last

    with reclassed([cache], ending), contextlib.suppress(_KnownError):
        yield
