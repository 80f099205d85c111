"""The text that both models read: tokenised documents, cut to a common maximum length.

Whole documents are either fitted on or scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvlingo_mlx.embedded.dialogues import held_out as held_out_dialogues
from kvlingo_mlx.tokenization.samples import tokenise

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Corpus:
    """A sequence of documents; its token i is row i of every layer's states.

    Attributes:
        documents: Token ids; a token's position is its index within its document.
        held_out: The indices of documents that are scored and never fitted.
    """

    documents: tuple[tuple[int, ...], ...]
    held_out: frozenset[int]

    @cached_property
    def positions(self) -> np.ndarray:
        """The position of every token (T,)."""
        return np.concatenate([np.arange(len(d)) for d in self.documents])

    @cached_property
    def scored(self) -> np.ndarray:
        """Whether each token's document is held out (T,)."""
        flags = [np.full(len(d), i in self.held_out) for i, d in enumerate(self.documents)]
        return np.concatenate(flags)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def split(documents: Sequence[Sequence[int]], seed: int) -> Corpus:
    """Hold out a fifth of the documents, drawn at random (paragraph "Protocol").

    Raises:
        ValueError: There are fewer than two documents.
    """
    count = len(documents)
    if count < 2:
        raise ValueError(
            f"the data hold {count} usable document(s); at least 2 are needed, since some are "
            "fitted on and others scored"
        )
    order = np.random.default_rng(seed).permutation(count)
    held_out = order[: max(1, round(HELD_OUT_SHARE * count))].tolist()
    return Corpus(tuple(map(tuple, documents)), frozenset(held_out))


def read(
    records: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    documents: int,
    tokens: int,
    context_length: int,
) -> list[tuple[int, ...]]:
    """The first ``documents`` records with text, as whole conversations or texts.

    Each is cut at ``tokens`` divided by the number of documents, and at the models' context length.
    """
    found: list[tuple[int, ...]] = []
    for record in records:
        sample = tokenise(record, tokenizer)
        if ids := sample.prefix + sample.continuation:
            found.append(ids)
        if len(found) == documents:
            break
    longest = min(tokens // max(len(found), 1), context_length)
    return [ids[:longest] for ids in found]


def bundled(documents: int) -> Iterator[dict[str, Any]]:
    """Records of the package's own dialogues that no embedded translator was fitted on."""
    for talk in held_out_dialogues(documents):
        yield {"messages": talk.conversation()}
