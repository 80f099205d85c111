"""Decoding under a memory budget: the target reads the prefix from its source's own cache.

The translator is folded into the target's queries and pooled values, so the target's own cache of
the prefix is never made (appendix "Decoding under a memory budget").
"""

from kvlingo_mlx.folding.cache import FoldedCache
from kvlingo_mlx.folding.decoding import (
    folded_generate,
    folded_hand_over,
    folded_stream_generate,
    prefill,
)
from kvlingo_mlx.folding.folds import check_foldable, fold_caches

__all__ = [
    "FoldedCache",
    "check_foldable",
    "fold_caches",
    "folded_generate",
    "folded_hand_over",
    "folded_stream_generate",
    "prefill",
]
