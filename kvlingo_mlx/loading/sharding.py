"""Models that the ranks of ``mlx.launch`` hold together, as mlx-lm shards them.

Every rank runs the same program. A rank's part of a target is a model of its own to the rest of the
package; the source is whole on every rank, which costs no communication, or spread too
(:mod:`.spreading`). What has to be the same everywhere is compared once, and whatever could differ,
as a token drawn or a time measured, goes by the first rank.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import KVLingoError, UnsupportedModelError
from kvlingo_mlx.families.base import LATENT
from kvlingo_mlx.group import RANK
from kvlingo_mlx.models.hidden import decoder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.parts import FIRST, PIPELINE, TENSOR, Part
from kvlingo_mlx.threads import unit
from kvlingo_mlx.version import __version__

KINDS = (TENSOR, PIPELINE, FIRST)
_messages = itertools.count(0x6B76_6C67)  # which all ranks count alike
SHOWN = 60  # characters of a fact in which ranks differ
ENDED = "another rank has ended; what it printed says why"
LOST = "[ring] connection to a peer was lost"  # what MLX says of it, if it does
ENDS_S = 30.0  # in which the launcher ends a rank after another one has ended
Sampler = Callable[[mx.array], mx.array]


@functools.cache
def group() -> Any:
    """The ranks of ``mlx.launch``; None where one program runs alone."""
    if RANK not in os.environ:
        return None
    try:
        found = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise KVLingoError(
            f"the ranks of mlx.launch cannot reach one another ({error!s:.120}); start at least "
            "2 (mlx.launch -n 2), and look at the hosts' addresses"
        ) from None
    return found if found.size() > 1 else None


def part_of(model: LanguageModel, whole: LanguageModel, kind: str | None) -> LanguageModel:
    """This rank's part of a model whose weights are unread.

    Args:
        model: The model, whose module is changed in place.
        whole: The same model, opened once more; it stays whole, and unread.
        kind: ``tensor``, ``pipeline``, or None: the first of both that mlx-lm can do; ``first``:
            the whole model on the first rank, and nothing on the others.

    Raises:
        ValueError: ``kind`` is unknown, there are no ranks, or they cannot share the model's heads
            or layers.
        UnsupportedModelError: mlx-lm cannot shard this family in that way, or it is a hybrid.
    """
    ranks = group()
    if kind not in (None, *KINDS):
        raise ValueError(f"shard is {kind!r}; give {', '.join(KINDS)} or auto, or leave it out")
    if ranks is None:
        raise ValueError(
            "only ranks can share a model (shard, sharded, placement), and this program runs "
            "alone; start it on several ranks: mlx.launch -n 2 kvlingo-mlx generate ..."
        )
    rank, size = ranks.rank(), ranks.size()
    if kind == FIRST:
        layers = range(len(model.attentions))
        heads = tuple(range(layer.kv_heads) for layer in model.geometry.layers)
        return replace(model, whole=whole, part=Part(kind, rank, size, layers, heads))
    if whole.geometry.recurrent:
        raise UnsupportedModelError(
            f"{whole.name} keeps recurrent states, which ranks cannot hold together: run it on one "
            "machine, or, if it only reads prompts, on the first rank (placement first)"
        )
    decoder = decoder_of(model)
    ways: dict[str, Any] = {
        TENSOR: getattr(model.model, "shard", None),
        PIPELINE: getattr(decoder, "pipeline", None),
    }
    can = [name for name, way in ways.items() if way is not None]
    kind = kind or next(iter(can), TENSOR)
    if kind not in can:
        other = f"; give {can[0]}" if can else ", nor in any other; run it on one machine"
        raise UnsupportedModelError(
            f"mlx-lm cannot shard {model.name} ({model.config['model_type']}) by {kind}{other}"
        )
    _check_shares(whole, kind, size)
    ways[kind](ranks)
    begun = decoder.start_idx if kind == PIPELINE else 0
    own = replace(model, whole=whole)
    layers = range(begun, begun + len(own.attentions))
    heads = tuple(
        _share(of.kv_heads, has.kv_heads, rank)
        for of, has in zip(whole.geometry.layers[begun:], own.geometry.layers, strict=False)
    )
    return replace(own, part=Part(kind, rank, size, layers, heads))


def has_weights(model: LanguageModel) -> bool:
    """Whether this rank has weights of a model: all, or a part of them."""
    return model.part is None or model.part.kind != FIRST or model.part.rank == 0


def _share(of: int, has: int, rank: int) -> range:
    """The heads of a rank: all where they are not split, as in latent caches."""
    return range(of) if has == of else range(rank * has, (rank + 1) * has)


def _check_shares(whole: LanguageModel, kind: str, size: int) -> None:
    """Refuse (ValueError) more ranks than the heads or layers can be shared by."""
    layers = whole.geometry.layers
    if kind == PIPELINE:
        if size > len(layers):
            raise ValueError(
                f"{whole.name} has {len(layers)} layers, and there are {size} ranks: start at most "
                f"{len(layers)} (mlx.launch -n)"
            )
        return
    counts = {layer.kv_heads for layer in layers if layer.attention != LATENT}
    counts.add(int(whole.facts["num_attention_heads"]))
    if odd := sorted(count for count in counts if count % size):
        fitting = [n for n in range(2, min(counts) + 1) if not any(c % n for c in counts)]
        can = (
            f"start {' or '.join(map(str, fitting))}"
            if fitting
            else "give shard pipeline (-c shard=pipeline)"
        )
        raise ValueError(
            f"{whole.name} has {odd[0]} heads, which {size} ranks cannot share evenly: {can} "
            "(mlx.launch -n)"
        )


def check_use(models: Sequence[LanguageModel], refused: Mapping[str, bool]) -> None:
    """Refuse what models that several ranks hold cannot do.

    Args:
        models: The source and the target, whole or parts.
        refused: Whether each of some arguments is given that would let ranks do different things.

    Raises:
        UnsupportedModelError: One of them is given, or only the first rank has the target.
    """
    if (part := models[-1].part) is not None and part.kind == FIRST:
        raise UnsupportedModelError(
            f"{models[-1].name} is on the first rank alone, and every rank has to decode with it: "
            "load it by tensor or pipeline, or without shard"
        )
    spread = next((model for model in models if model.part is not None), None)
    for name, given in refused.items():
        if given and spread is not None and spread.part is not None:
            raise UnsupportedModelError(
                f"{spread.name} is spread over {spread.part.size} ranks by {spread.part.kind}, "
                f"which cannot be used with {name}; leave one of them out"
            )


def agree(told: Mapping[str, str]) -> None:
    """Compare facts over all ranks.

    Args:
        told: What must be the same everywhere, in words, and a digest or name of it here.

    Raises:
        KVLingoError: Something differs, and every rank raises it; or another rank has ended.
    """
    every = gathered({name: [digest_of(fact), fact[:SHOWN]] for name, fact in told.items()})
    for name in dict.fromkeys(name for each in every for name in each):
        facts = [each.get(name, ["", "none"]) for each in every]
        for rank, (digest, fact) in enumerate(facts):
            if digest != facts[0][0]:
                raise KVLingoError(
                    f"rank {rank} has another {name} than rank 0 ({fact}, and not {facts[0][1]}); "
                    "give all machines the same, and start again"
                )


def facts_of(models: Mapping[str, LanguageModel]) -> dict[str, str]:
    """What all ranks must have in common before they work: versions, and models by their roles."""
    told = {"version": versions()}
    for role, model in models.items():
        whole = model.full
        shape = f"{whole.norms_fingerprint} {memory.weights_bytes(whole)}"
        text = json.dumps(whole.config, sort_keys=True, default=str)
        told[f"model for {role}"] = digest_of(f"{shape} {text}")
        told[f"way to share {role}"] = "none" if model.part is None else model.part.kind
    return told


def versions() -> str:
    """What computes here."""
    others = (f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    return ", ".join([f"kvlingo-mlx {__version__}", *others])


def facts_of_work(models: Sequence[LanguageModel], **more: str) -> dict[str, str]:
    """:func:`facts_of` a source and a target of which every weight counts, as in a fit."""
    roles = dict(zip(("source", "target"), models, strict=True))
    weights = {f"{role}'s weights": model.weights_fingerprint for role, model in roles.items()}
    return facts_of(roles) | weights | more


def digests_of(values: Mapping[str, object]) -> dict[str, str]:
    """The :func:`digest_of` each value, by name."""
    return {name: digest_of(value) for name, value in values.items()}


def digest_of(value: Any) -> str:
    """Sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def spread(models: Iterable[LanguageModel]) -> bool:
    """Whether several ranks hold some of the models together."""
    return any(model.part is not None for model in models)


def firsts_count(count: int) -> int:
    """The first rank's whole number; this one's where it is alone."""
    ranks = group()
    if ranks is None:
        return count
    own = mx.array(count if ranks.rank() == 0 else 0, mx.int32)
    return int(np.array(mx.distributed.all_sum(own)))


def least(count: int | None) -> int | None:
    """The least of all ranks' numbers; None where one does not know its own."""
    every = gathered(count)
    return None if None in every else min(every)


def firsts(value: Any) -> Any:
    """The first rank's value, which JSON can hold; this one's where it is alone."""
    return gathered(value)[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, which JSON can hold, in the order of the ranks."""
    return list(map(json.loads, gathered_bytes(json.dumps(value).encode())))


@unit
def gathered_bytes(own: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of the ranks.

    Raises:
        KVLingoError: Another rank has ended.
    """
    ranks = group()
    if ranks is None:
        return [own]
    try:
        sizes = _marked(np.array([[len(own)]], np.int32))[:, 0].tolist()
        if not any(sizes):
            return [b""] * len(sizes)
        padded = np.zeros((1, -(-max(sizes) // 4)), np.int32)
        padded.view(np.uint8)[0, : len(own)] = np.frombuffer(own, np.uint8)
        every = _marked(padded)
    except RuntimeError as error:
        if str(error) != LOST:
            raise
        raise KVLingoError(ENDED) from None
    return [row.tobytes()[:size] for row, size in zip(every, sizes, strict=True)]


def _marked(own: np.ndarray) -> np.ndarray:
    """Every rank's row of int32.

    Raises:
        RuntimeError: Another rank has ended. MLX may then give what happens to be there: an earlier
            message, even. So each has a mark of its own.
    """
    mark = next(_messages) % 2**31
    told = mx.array(np.insert(own, 0, mark, axis=1))
    every = np.array(mx.distributed.all_gather(told))
    if (every[:, 0] != mark).any():
        raise RuntimeError(LOST)
    return every[:, 1:]


def lost(error: Exception) -> KVLingoError | None:
    """What is to be said of an error where it shows that another rank has ended; else None.

    This waits for the launcher to end this rank: else it would stand beside the line that says why.
    """
    if str(error) not in (ENDED, LOST):
        return None
    time.sleep(ENDS_S)
    return KVLingoError(ENDED)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Work that may fail on one rank alone, such as reading a file: then it fails on all.

    The body sends nothing to other ranks.

    Raises:
        KVLingoError: It failed on another rank.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others hear of it
        problem = error
    told = gathered("" if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text:
            raise KVLingoError(f"rank {rank} failed: {text}")


def firsts_choice(sampler: Sampler | None) -> Sampler:
    """A sampler by which the first rank's choice counts for all.

    Each rank has its own random numbers, and two devices may round two tokens' tie apart.
    """
    ranks = group()
    assert ranks is not None

    def sample(logprobs: mx.array) -> mx.array:
        chosen = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
        own = chosen if ranks.rank() == 0 else mx.zeros_like(chosen)
        return mx.distributed.all_sum(own)

    return sample
