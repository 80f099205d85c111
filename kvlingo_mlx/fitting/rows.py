"""What stage 1 needs of two MLX models: their states, row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.fitting.aligned import aligned_states
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.models.capture import move, prefill
from kvlingo_mlx.models.delta_rule import in_chunks, stepping_in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.tokenization.samples import Sample


@dataclass(frozen=True)
class Rows:
    """See :class:`kvlingo_mlx.stage1.passes.Rows`."""

    source: LanguageModel
    target: LanguageModel

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[KVStates, KVStates]]:
        """Both models' states, chunk by chunk; a model fitted to itself is run only once."""
        self._check(sample)
        yield from stepping_in_chunks(self._spans(sample, capture))

    def _spans(self, sample: Sample, capture: str) -> Iterator[tuple[KVStates, KVStates]]:
        if sample.aligned is not None:
            yield aligned_states(self.source, self.target, sample.aligned, capture)
            return
        with contextlib.closing(prefill(self.source, sample.prefix)) as read:
            if self.source is self.target:
                for states in read:
                    moved = move(states, self.source, capture)
                    yield moved, moved
                return
            with contextlib.closing(prefill(self.target, sample.prefix)) as wanted:
                for states, goal in zip(read, wanted, strict=True):
                    yield (
                        move(states, self.source, capture),
                        move(goal, self.target, capture),
                    )

    def _check(self, sample: Sample) -> None:
        """Refuse tokens that a model does not know."""
        own = (*sample.prefix, *sample.continuation)
        self.target.check_tokens(own)
        self.source.check_tokens(own if sample.aligned is None else sample.source_prefix)

    def rows(self, states: KVStates, side: str, layer: int) -> np.ndarray:
        array = states.side(side)[layer]
        return np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1])

    def wide(self, rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float64)

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)

    def array(self, array: np.ndarray) -> np.ndarray:
        return array

    @in_chunks(gradient=False)
    def kept(
        self, sample: Sample, tokens: int
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        self._check(sample)
        given = _states_after(self.source, sample.prefix[:tokens])
        if self.source is self.target:
            return given, given
        return given, _states_after(self.target, sample.prefix[:tokens])

    @in_chunks(gradient=False)
    def attention_mass(self, sample: Sample) -> np.ndarray:
        return attention_mass(self.target, sample)


def _states_after(model: LanguageModel, tokens: Sequence[int]) -> dict[int, np.ndarray]:
    """A model's recurrent states after ``tokens``, without a batch, by layer."""
    kept: Mapping[int, mx.array] = {}
    for states in prefill(model, tokens, kept=True):
        kept = states.kept or {}
    return {layer: np.array(state.astype(mx.float32))[0] for layer, state in kept.items()}
