"""Both models' states of a prefix, row by row what a map reads and what it should give."""

from __future__ import annotations

import numpy as np
import torch

from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.tokenization.two_tokenizers import Handover
from kvlingo_mlx.training.torch_model import States, TorchModel


@torch.no_grad()
def paired_states(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str
) -> tuple[States, States]:
    """The source's states of a prefix beside the target's.

    With one tokenizer, those of each token; with two, of each translated source token and the
    mean over the target tokens of its minimal group (paper: appendix
    "Cross-tokenizer cache translation", paragraph "Initialising the translators").
    """
    handover = sample.handover
    if handover is None:
        return source.states(sample.prefix, capture), target.states(sample.prefix, capture)
    own = target.states(handover.target_ids[:-1], capture)
    keys, values = (tuple(_means(a, handover) for a in side) for side in (own.keys, own.values))
    return translated_rows(source, handover, capture), States(keys, values)


def translated_rows(source: TorchModel, handover: Handover, capture: str) -> States:
    """The source's states of the tokens that are translated, which must be some."""
    read = source.states(handover.source_ids[: handover.num_read], capture)
    return read.rows(handover.rows)


def paired_weights(sample: Sample, weights: np.ndarray | None) -> np.ndarray | None:
    """The weights (layers or 1, T) of a prefix's tokens as those of its rows."""
    if sample.handover is None or weights is None:
        return weights
    return sample.handover.spread(weights)


def _means(array: torch.Tensor, handover: Handover) -> torch.Tensor:
    """(S, d) the mean over each entry's group of (T, d), in float32 at least."""
    dtype = torch.promote_types(array.dtype, torch.float32)
    entries, tokens = (torch.tensor(side, device=array.device) for side in handover.pairs)
    counts = torch.tensor(handover.groups[:, 1] - handover.groups[:, 0], device=array.device)
    sums = torch.zeros(len(handover.rows), array.shape[1], dtype=dtype, device=array.device)
    return sums.index_add_(0, entries, array[tokens].to(dtype)) / counts[:, None]
