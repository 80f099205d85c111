"""Activation checkpointing of layers whose caches hold what is to be learnt.

mlx-lm's own ``grad_checkpoint`` gives gradients of zero for a cache's keys and values: the cache
object hides them from ``mx.checkpoint``. Here they are arguments of the checkpointed function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import Call, calling


def checkpointed(
    model: LanguageModel, cache: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    """Keep each layer's inputs alone for the backward pass, which runs the layer once more.

    The layers of one forward pass read ``cache``, which stays as it was before that pass.
    """
    ours = {id(each) for each in cache}

    def change(call: Call) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            held = [each for each in (*args, *kwargs.values()) if id(each) in ours]

            def inner(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
                fresh = [_with(each, *pair) for each, *pair in zip(held, keys, values, strict=True)]
                new = {id(old): each for old, each in zip(held, fresh, strict=True)}
                args = tuple(new.get(id(each), each) for each in args)
                kwargs = {name: new.get(id(each), each) for name, each in kwargs.items()}
                return call(*args, **kwargs)

            keys, values = ([getattr(each, side) for each in held] for side in ("keys", "values"))
            return mx.checkpoint(inner)(keys, values, *args, **kwargs)

        return run

    return calling(model.model.layers, change)


def _with(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """A copy of a cache with other arrays."""
    made = object.__new__(type(cache))
    vars(made).update(vars(cache))
    made.keys, made.values = keys, values
    return made
