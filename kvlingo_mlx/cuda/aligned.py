"""The states of both models on a prefix, row by row: a map's inputs and its desired outputs."""

from __future__ import annotations

import torch

from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import Sample


@torch.no_grad()
def paired_states(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str
) -> tuple[States, States]:
    """The source's and the target's states of a prefix, row by row.

    See :meth:`kvlingo_mlx.training.runtime.Pair.states`.
    """
    aligned = sample.aligned
    if aligned is None:
        return source.states(sample.prefix, capture), target.states(sample.prefix, capture)
    own = target.states(aligned.target_ids[:-1], capture)
    keys, values = (tuple(_means(a, aligned) for a in side) for side in (own.keys, own.values))
    return translated_rows(source, aligned, capture), States(keys, values)


def translated_rows(source: TorchModel, aligned: AlignedPrefix, capture: str) -> States:
    """The source's states of the translated tokens; the sample must have at least one."""
    read = source.states(aligned.source_ids[: aligned.num_read], capture)
    return read.rows(aligned.rows)


def _means(array: torch.Tensor, aligned: AlignedPrefix) -> torch.Tensor:
    """The mean of (T, d) over each entry's group of tokens: (S, d), in float32 or wider."""
    dtype = torch.promote_types(array.dtype, torch.float32)
    entries, tokens = (torch.tensor(side, device=array.device) for side in aligned.pairs)
    counts = torch.tensor(aligned.groups[:, 1] - aligned.groups[:, 0], device=array.device)
    sums = torch.zeros(len(aligned.rows), array.shape[1], dtype=dtype, device=array.device)
    return sums.index_add_(0, entries, array[tokens].to(dtype)) / counts[:, None]
