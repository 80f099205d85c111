"""lm-eval's tasks decoded with PyTorch: ways to fill a target's cache, and who decodes from it.

The ways have the names and arguments of those on MLX (``kvlingo_mlx.evaluation.conditions``), so
one line-up serves both. Prompts are read one by one, without padding; answers are written several
at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache

from kvlingo_mlx.cuda import gradients
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.harness.answers import Decoder
from kvlingo_mlx.tokenization.samples import Sample

CHUNK = 2048  # tokens of a prompt that are read at once
BLOCK = 256  # scored tokens whose logits are computed at once
# Marks of reasoning, as mlx-lm looks for them; a vocabulary must have the token that begins each.
THINK_MARKS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)

CacheMaker = Callable[[Sequence[int]], DynamicCache]


def native(target: TorchModel) -> CacheMaker:
    """Make caches that the target reads itself, of all tokens of a prefix but the last."""

    def make(prefix: Sequence[int]) -> DynamicCache:
        return _read_on(target, target.cache((), 0), prefix[:-1])

    return make


def hidden(target: TorchModel) -> CacheMaker:
    """Control: make empty caches, so that the prefix is hidden."""
    return lambda prefix: target.cache((), 0)


def translated(
    source: TorchModel, target: TorchModel, translator: Any, native_layers: int = 0
) -> CacheMaker:
    """Make caches that are translated from the source's, above the target's native layers.

    The ``translator`` is one that MLX has loaded, and found to fit; its numbers are copied once.
    """
    config = translator.config
    maps = TorchTranslator.from_arrays(config, translator.floats(), target.device)

    @torch.no_grad()
    def make(prefix: Sequence[int]) -> DynamicCache:
        if len(prefix) < 2:
            return target.cache((), 0)
        sample = Sample(tuple(prefix), ())
        reading = gradients.read(source, target, sample, config.capture, native_layers)
        return target.cache(gradients.entries(target, maps, reading), len(prefix) - 1)

    return make


@torch.no_grad()
def _read_on(target: TorchModel, cache: DynamicCache, tokens: Sequence[int]) -> DynamicCache:
    """A cache after the target has read more tokens."""
    for start in range(0, len(tokens), CHUNK):
        target.hidden(tokens[start : start + CHUNK], cache)
    return cache


class _Tokenizer:
    """transformers' tokenizer, with what mlx-lm's knows beside it: marks of reasoning."""

    def __init__(self, own: Any) -> None:
        self._own, vocabulary = own, own.get_vocab().keys()
        known = [
            both for both in THINK_MARKS if {both[0].removesuffix("thought"), both[1]} <= vocabulary
        ]
        self.think_start: str | None = known[0][0] if known else None
        self.think_end: str | None = known[0][1] if known else None
        self.has_chat_template = own.chat_template is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class TorchDecoder(Decoder):
    """With PyTorch; a model whose layers have windows writes one answer at a time."""

    def __init__(self, target: TorchModel, make_cache: CacheMaker, batch_size: int = 8) -> None:
        super().__init__(target, make_cache, batch_size)
        self.tokenizer = _Tokenizer(target.tokenizer)
        if any(layer.window is not None for layer in target.geometry.layers):
            self._size = 1

    @cached_property
    def _ends(self) -> set[int]:
        """The tokens that end a turn."""
        given = self._target.model.generation_config.eos_token_id
        listed = given if isinstance(given, list) else [given]
        return {*listed, self._target.tokenizer.eos_token_id} - {None}

    def _empty(self) -> DynamicCache:
        return self._target.cache((), 0)

    def _next(self, token: int, cache: DynamicCache) -> torch.Tensor:
        logs = self._logs([token], cache)[0]
        self._check_numbers(logs.isnan().any())
        return logs

    @torch.no_grad()
    def _follow(self, tokens: Sequence[int], cache: DynamicCache) -> tuple[float, bool]:
        total, first = 0.0, True
        for start in range(0, len(tokens) - 1, BLOCK):
            following = tokens[start + 1 : start + 1 + BLOCK]
            logs = self._logs(tokens[start : start + len(following)], cache)
            true = torch.tensor(following, device=logs.device)
            total += float(logs.gather(1, true[:, None]).sum())
            first &= bool((logs.argmax(-1) == true).all())
        return total, first

    @torch.no_grad()
    def _logs(self, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """The log probabilities (T, V) after each token."""
        return torch.log_softmax(self._target.logits(self._target.hidden(tokens, cache)), dim=-1)

    def write(self, wanted: Sequence[Any]) -> Iterator[Any]:
        waiting, batch = deque(wanted), _Batch(self._target)
        while waiting or batch.rows:
            try:
                done = self._join(waiting, batch) or self._step(batch)
            except torch.OutOfMemoryError as error:
                raise KVLingoError(
                    f"{self.name} lacks memory beside {len(batch.rows)} answers ({error}); give "
                    "a smaller --batch-size; what was answered is kept"
                ) from None
            yield from done

    def _join(self, waiting: deque[Any], batch: _Batch) -> list[Any]:
        """Let answers begin, while there are places; returns one that ended with its first token.

        A first token is run alone, so that every cache in the batch holds something.
        """
        while waiting and len(batch.rows) < self._size:
            row = _Row(waiting.popleft())
            cache = self.make_cache(row.wanted.tokens)
            if self._ended(row, self._next(row.wanted.tokens[-1], cache)):
                return [row.wanted]
            row.position = cache.get_seq_length()  # of a hidden prefix, too
            batch.join(row, cache)
        return []

    def _step(self, batch: _Batch) -> list[Any]:
        """Give every answer its next token; returns those that ended with it."""
        rows = batch.rows
        ended = [self._ended(row, logits) for row, logits in zip(rows, batch.step(), strict=True)]
        batch.keep([n for n, end in enumerate(ended) if not end])
        return [row.wanted for row, end in zip(rows, ended, strict=True) if end]

    def _ended(self, row: _Row, logits: torch.Tensor) -> bool:
        """Give a row its next token; returns whether its answer has ended."""
        row.token, row.count = int(logits.argmax()), row.count + 1
        row.position += 1
        return row.token in self._ends or row.wanted.take(row.token) or row.count == row.wanted.most

    def read_on(self, cache: DynamicCache, tokens: Sequence[int]) -> None:
        _read_on(self._target, cache, tokens)


@dataclass
class _Row:
    """An answer that is being written: the token to run next, and its position."""

    wanted: Any
    token: int = 0
    position: int = 0
    count: int = 0


class _Batch:
    """Answers of one model that take their steps together.

    Their caches are one, (rows, H, T, D) a layer, padded in front to the longest; ``_seen`` (rows,
    T) tells which entries are a row's own, as its positions are.
    """

    def __init__(self, target: TorchModel) -> None:
        self.rows: list[_Row] = []
        self._target: TorchModel = target
        self._cache: Any = None
        self._seen = torch.zeros(0, 0, dtype=torch.bool, device=target.device)

    def join(self, row: _Row, cache: DynamicCache) -> None:
        """Add a row with the cache of all its tokens but the one to run next."""
        length = cache.get_seq_length()
        own = self._seen.new_ones(1, length)
        if self.rows:
            width = max(length, self._seen.shape[1])
            for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
                for side in ("keys", "values"):
                    both = getattr(ours, side), getattr(theirs, side)
                    setattr(ours, side, torch.cat([_padded(array, width, 2) for array in both]))
            self._seen = torch.cat([_padded(array, width, 1) for array in (self._seen, own)])
        else:
            self._cache, self._seen = cache, own
        self.rows.append(row)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Run every row's token; returns the logits (rows, V) that follow."""
        target = self._target
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(self.rows), 1)], dim=1)
        tokens = torch.tensor([[row.token] for row in self.rows], device=target.device)
        more: dict[str, Any] = {}
        if len(self.rows) > 1:  # one has no padding, and a model with windows writes one at a time
            positions = torch.tensor([[row.position] for row in self.rows], device=target.device)
            more = {"position_ids": positions, "attention_mask": self._seen[:, None, None]}
        return target.logits(target.run(tokens, self._cache, **more)[:, 0])

    def keep(self, indices: Sequence[int]) -> None:
        """Go on with these rows alone, without padding that none of them needs."""
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in indices]
        if not indices:
            return
        at = torch.tensor(indices, device=self._target.device)
        first = int(self._seen[at].any(dim=0).int().argmax())
        self._seen = self._seen[at, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[at, :, first:], layer.values[at, :, first:]


def _padded(array: torch.Tensor, width: int, axis: int) -> torch.Tensor:
    """An array with zeros in front of an axis, which is then ``width`` long."""
    shape = list(array.shape)
    shape[axis] = width - shape[axis]
    return torch.cat([array.new_zeros(shape), array], dim=axis)
