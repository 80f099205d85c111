"""The inputs and outputs of stage 1's regression between two tokenizers.

See the paper's appendix "Cross-tokenizer cache translation", paragraph "Initialising the
translators".
"""

from __future__ import annotations

from kvlingo_mlx.backend import mx

from kvlingo_mlx.models.capture import whole
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix


def aligned_states(
    source: LanguageModel, target: LanguageModel, aligned: AlignedPrefix, capture: str
) -> tuple[KVStates, KVStates]:
    """The source's states of translated tokens, and the means of their target groups.

    A group may extend over two chunks, so all states of a text are in memory at once.

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
