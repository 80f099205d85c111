"""Decoding under a memory budget: the target reads the prefix from its source's own cache.

The translator is folded into the target's queries and pooled values, so the target's own cache of
the prefix is never made (appendix "Decoding under a memory budget").
"""

from kvlingo_mlx.folding.cache import FoldedCache as FoldedCache
from kvlingo_mlx.folding.decoding import folded_generate as folded_generate
from kvlingo_mlx.folding.decoding import folded_hand_over as folded_hand_over
from kvlingo_mlx.folding.decoding import folded_stream_generate as folded_stream_generate
from kvlingo_mlx.folding.decoding import prefill as prefill
from kvlingo_mlx.folding.folds import check_foldable as check_foldable
from kvlingo_mlx.folding.folds import fold_caches as fold_caches
