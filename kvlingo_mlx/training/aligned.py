"""Both models' states of a prefix, row by row what a map reads and what it should give."""

from __future__ import annotations

import numpy as np
import torch

from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.torch_model import States, TorchModel


@torch.no_grad()
def paired_states(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str
) -> tuple[States, States]:
    """The source's states of a prefix beside the target's.

    With one tokenizer, those of each token; with two, of each translated source token and the
    mean over the target tokens of its minimal group (appendix, figure panel b).
    """
    aligned = sample.aligned
    if aligned is None:
        return source.states(sample.prefix, capture), target.states(sample.prefix, capture)
    own = target.states(aligned.target_ids[:-1], capture)
    keys, values = (tuple(_means(a, aligned) for a in side) for side in (own.keys, own.values))
    return translated_rows(source, aligned, capture), States(keys, values)


def translated_rows(source: TorchModel, aligned: AlignedPrefix, capture: str) -> States:
    """The source's states of the tokens that are translated, which must be some."""
    read = source.states(aligned.source_ids[: aligned.num_read], capture)
    return read.rows(aligned.rows)


def paired_weights(sample: Sample, weights: np.ndarray | None) -> np.ndarray | None:
    """The weights (layers or 1, T) of a prefix's tokens as those of its rows."""
    if sample.aligned is None or weights is None:
        return weights
    return sample.aligned.spread(weights)


def _means(array: torch.Tensor, aligned: AlignedPrefix) -> torch.Tensor:
    """(S, d) the mean over each entry's group of (T, d), in float32 at least."""
    dtype = torch.promote_types(array.dtype, torch.float32)
    entries, tokens = (torch.tensor(side, device=array.device) for side in aligned.pairs)
    counts = torch.tensor(aligned.groups[:, 1] - aligned.groups[:, 0], device=array.device)
    sums = torch.zeros(len(aligned.rows), array.shape[1], dtype=dtype, device=array.device)
    return sums.index_add_(0, entries, array[tokens].to(dtype)) / counts[:, None]
