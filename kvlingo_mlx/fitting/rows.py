"""What stage 1 needs of two MLX models: their states, row by row."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.models.capture import move, prefill, whole
from kvlingo_mlx.models.delta_rule import in_chunks, stepping_in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.stage1.passes import State
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import Sample


@dataclass(frozen=True)
class DeviceRows:
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
        with contextlib.ExitStack() as stack:
            models = [self.source, self.target][: 1 + (self.source is not self.target)]
            opened = (contextlib.closing(prefill(model, sample.prefix)) for model in models)
            read = [stack.enter_context(each) for each in opened]
            for states in zip(*read, strict=True):
                own = [move(each, m, capture) for each, m in zip(states, models, strict=True)]
                yield own[0], own[-1]

    def _check(self, sample: Sample) -> None:
        """Refuse tokens that a model does not know."""
        own = (*sample.prefix, *sample.continuation)
        self.target.check_tokens(own)
        self.source.check_tokens(own if sample.aligned is None else sample.source_prefix)

    def rows(self, states: KVStates, reads: Sequence[State]) -> np.ndarray:
        arrays = (np.array(states.side(side)[t].astype(mx.float32)) for side, t in reads)
        return np.concatenate([a.reshape(-1, a.shape[-1]) for a in arrays], 1, dtype=np.float64)

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


def aligned_states(
    source: LanguageModel, target: LanguageModel, aligned: AlignedPrefix, capture: str
) -> tuple[KVStates, KVStates]:
    """The source's states of translated tokens, and the means of their target groups.

    A group may extend over two chunks, so all states of a text are in memory at once. See the
    paper's appendix "Cross-tokenizer cache translation", "Initialising the translators".

    Returns:
        Two spans of S tokens at the point ``capture``, with one row per translated source token.
    """
    rows = mx.array(aligned.rows)
    read = whole(source, aligned.source_ids[: aligned.num_read], capture).gathered(rows, 0)
    own = whole(target, aligned.target_ids[:-1], capture)
    keys, values = (
        tuple(_means(array, aligned) for array in side) for side in (own.keys, own.values)
    )
    return read, KVStates(keys, values, capture, 0)


def _means(array: mx.array, aligned: AlignedPrefix) -> mx.array:
    """The mean of (B, T, d) over each entry's group, (B, S, d), in float32."""
    entries, tokens = (mx.array(side) for side in aligned.pairs)
    counts = mx.array(aligned.groups[:, 1] - aligned.groups[:, 0])[:, None]
    batch, _, width = array.shape
    sums = mx.zeros((batch, len(aligned.rows), width))
    return sums.at[:, entries].add(array[:, tokens].astype(mx.float32)) / counts
