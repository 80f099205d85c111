"""Hybrid hand-over: the target reads a part of the prefix itself, and the rest is translated.

To compute the keys and values of a model's first j of N layers, only these layers have to run. That
costs j / N of a prefill. The layers above are translated. The target may also read the first and
the last tokens itself, in all layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading import advice
from kvlingo_mlx.models.hidden import decoder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.parts import PIPELINE
from kvlingo_mlx.models.reclassed import Call, calling
from kvlingo_mlx.threads import working

AUTO = "auto"


@dataclass(frozen=True)
class Native:
    """The part of a prefix that the target reads itself.

    Attributes:
        layers: The number of first cache layers that it runs over all tokens.
        head: The number of first tokens that it reads in every layer.
        tail: The number of last tokens that it reads in every layer. They attend to the hybrid
            cache.
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
    config: TranslatorConfig,
    layers: int | str | None = None,
    head: int = 0,
    tail: int = 0,
    tokens: int | None = None,
) -> Native:
    """The part that the target is to read itself, with its numbers checked.

    Args:
        config: The translator's config.
        layers: The number of native layers. None takes the tuned number, or 0 if the translator
            was not tuned; ``auto`` refuses a translator that was not tuned.
        head: The number of first tokens.
        tail: The number of last tokens.
        tokens: The length of the prefix, by which the tuned number may differ; None for one beyond
            all lengths to which the translator was tuned.

    Raises:
        ValueError: A number is out of range, or ``auto`` is given and the translator is not tuned.
    """
    most = len(config.target.layers)
    if layers == AUTO and "native_layers" not in config.provenance:
        tune = advice.to_tune(config, None)
        instead = f"choose them with {tune}, or give a number from 0 to {most}"
        raise ValueError(
            f"native_layers is 'auto', but {config.title} has no tuned native layers; "
            + (instead if tune else "between two tokenizers there are none; leave it out")
        )
    chosen = config.native_layers_at(tokens) if layers in (None, AUTO) else layers
    if type(chosen) is not int or not 0 <= chosen <= most:
        raise ValueError(
            f"native_layers is {layers!r}; give a number from 0 to {most}, the cache layers of "
            f"{config.target.name}, or 'auto'"
        )
    for name, value in (("native_head", head), ("native_tail", tail)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}; give a number of tokens, 0 or more")
    return Native(chosen, head, tail)


def check_first_layers(target: LanguageModel, layers: int) -> None:
    """Refuse native layers of a pipeline.

    Raises:
        UnsupportedModelError: The last rank alone has these layers.
    """
    if layers and target.part is not None and target.part.kind == PIPELINE:
        raise UnsupportedModelError(
            f"native_layers is {layers}, and a pipeline has these layers on its last rank only; "
            "give native_layers=0 (-c native_layers=0), or shard by tensor"
        )


class Below:
    """The hidden states on which a model's first layers ended, from which the others can go on.

    A run of the first ``layers`` cache layers ends in the last of them, as soon as its keys and
    values are known. So what is kept is that layer's input, (1, T, width) in all. The layers before
    it are not run again.
    """

    def __init__(self, model: LanguageModel, layers: int) -> None:
        self._name, owner = model.name, model.attentions[layers - 1]
        blocks = list(decoder_of(model).layers)
        last = next(i for i, b in enumerate(blocks) if any(m is owner for m in b.modules()))
        self._before, self._last = blocks[:last], blocks[last]
        self._parts: list[mx.array] = []

    def __len__(self) -> int:
        """The number of tokens heard."""
        return sum(part.shape[1] for part in self._parts)

    @property
    def parts(self) -> list[mx.array]:
        """What was heard so far, in order."""
        return self._parts

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what enters the last of the layers in a run inside this context."""

        def heard(call: Call) -> Call:
            def run(hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
                self._parts.append(hidden)
                return call(hidden, *args, **kwargs)

            return run

        def plain(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                found = call(*args, **kwargs)
                if not isinstance(found, mx.array):
                    raise UnsupportedModelError(
                        f"the layers of {self._name} hand on more than hidden states, so it cannot "
                        "go on above its native layers; leave out native_layers, or heal"
                    )
                return found

            return run

        with calling(self._before, plain), calling([self._last], heard):
            yield

    @contextlib.contextmanager
    def going_on(self, start: int, stop: int) -> Iterator[None]:
        """Let a run of the tokens from ``start`` to ``stop`` of those heard begin above."""
        if len(self._parts) > 1:
            self._parts = [mx.concatenate(self._parts, axis=1)]
        held = self._parts[0][:, start:stop]
        skipped = calling(self._before, lambda call: lambda hidden, *args, **kwargs: hidden)
        entered = calling([self._last], lambda call: lambda _, *args, **kw: call(held, *args, **kw))
        with skipped, entered:
            yield


def allocate(
    model: LanguageModel, prefix: Sequence[int], native: Native, step_size: int
) -> list[Any]:
    """Allocate caches for a prefix and read the native head into them.

    They hold all of ``prefix`` once :func:`read_layers` has read the rest of the native layers and
    the layers above have been written.
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
    below: Below | None = None,
) -> None:
    """Run tokens through a model's first ``layers`` cache layers (default: all), in chunks.

    The run ends as soon as the last of these layers has written its keys and values. Its attention,
    the later layers and the output head are not computed. Each chunk is evaluated.

    Args:
        model: The model.
        tokens: The tokens that follow those in the caches.
        cache: The model's caches, of which those of later layers stay unchanged.
        step_size: Tokens per chunk.
        layers: The number of layers.
        below: Keeps the hidden states on which these layers end.
    """
    layers = len(cache) if layers is None else layers
    if not layers:
        return
    own = list(cache[:layers])
    later = make_prompt_cache(model.model)[layers:]
    for start in range(0, len(tokens), step_size):
        for empty in later:  # mlx-lm makes masks from a cache's offset
            if not caches.is_recurrent(empty):
                empty.offset = caches.length(own)
        chunk = mx.array(list(tokens[start : start + step_size]))
        with working():
            with (
                _end_at(own[-1]) if later else contextlib.nullcontext(),
                below.listening() if below is not None else contextlib.nullcontext(),
            ):
                model.model(chunk[None], cache=[*own, *later])
            mx.eval([c.state for c in own], below.parts if below is not None else [])
            mx.clear_cache()


class _KnownError(Exception):
    """Raised once a layer's keys and values are known, to skip everything above that layer."""


@contextlib.contextmanager
def _end_at(cache: Any) -> Iterator[None]:
    """End a forward pass as soon as a layer has written all that its cache keeps."""
    cls = type(cache)

    class Last(cls):  # type: ignore[misc, valid-type]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
            super().update_and_fetch(keys, values)
            raise _KnownError

        def __setitem__(self, index: int, array: mx.array) -> None:
            super().__setitem__(index, array)
            if index + 1 == len(self.cache):
                raise _KnownError

    cache.__class__ = Last
    try:
        with contextlib.suppress(_KnownError):
            yield
    finally:
        cache.__class__ = cls
