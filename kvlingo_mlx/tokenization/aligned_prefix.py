"""How a target's cache is built where the two models' tokenizers cut a text differently.

Paper: section "Cross-tokenizer cache translation" and its appendix. Some source tokens are
translated; the keys of each are rotated at the position of the target token assigned to it. The
target prefills all other tokens itself. The MLX and the CUDA path share this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError, UnsupportedModelError
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.tokenization.renderings import Rendering, alignments


@dataclass(frozen=True, eq=False)
class AlignedPrefix:
    """A text as two models read it, and what the target's cache of it holds.

    The cache has one entry for each translated source token, in the source's order, then one for
    each token that the target prefills. Attention does not depend on the order of entries if a
    mask says which entries each token sees. The target's last token has no entry, since decoding
    starts with it.
    """

    source_ids: tuple[int, ...]  # tokens that the source reads
    target_ids: tuple[int, ...]  # tokens that the target would read
    rows: np.ndarray  # (S,) the source tokens that are translated, ascending
    positions: np.ndarray  # (S,) the target position at which the keys of each are rotated
    # (S, 2) the target tokens of each one's minimal group: first, one past the last
    groups: np.ndarray
    own: np.ndarray  # (B,) the target tokens that the target prefills itself, ascending

    @classmethod
    def of(cls, source: Rendering, target: Rendering) -> AlignedPrefix:
        """Align two renderings of one text or of the same messages.

        Raises:
            ValueError: The renderings are of different messages, or hold no token.
        """
        last = len(target.ids) - 1
        if last < 0:
            raise ValueError("the prompt is empty; give some text")
        aligned, own = alignments(source, target, last), np.ones(last, bool)
        for each in aligned:
            own[slice(*each.target)] = False
        rows = _joined([np.arange(*a.source) for a in aligned])
        order = np.argsort(rows)  # a template may move a content; the source is read in order
        return cls(
            tuple(source.ids.tolist()),
            tuple(target.ids.tolist()),
            rows[order],
            _joined([a.assigned for a in aligned])[order],
            _joined([a.groups[a.group_of][:, 2:] for a in aligned]).reshape(-1, 2)[order],
            np.flatnonzero(own),
        )

    @property
    def num_read(self) -> int:
        """How many tokens the source must read: all up to the last translated one."""
        return int(self.rows[-1]) + 1 if len(self.rows) else 0

    @property
    def num_entries(self) -> int:
        """The number of entries of the target's cache before the target runs its last token."""
        return len(self.rows) + len(self.own)

    @property
    def shift(self) -> int:
        """The offset added to every position, so that the next position is the number of entries.

        Rotations are relative, so a stock cache, whose next position is its length, can be used.
        """
        return self.num_entries - (len(self.target_ids) - 1)

    @property
    def is_identity(self) -> bool:
        """Whether the cache has an entry for every token, in order and at its own position."""
        return not len(self.own) and np.array_equal(
            self.positions, np.arange(len(self.target_ids) - 1)
        )

    @property
    def visible(self) -> np.ndarray:
        """(B, S + B) whether a token that the target prefills sees an entry: all up to its own."""
        return self.seen(self.own, self.own)

    def seen(self, tokens: np.ndarray, others: np.ndarray) -> np.ndarray:
        """(B, S + C) whether target tokens (B,) see the entries: translated, and of others (C,)."""
        translated = self.groups[:, 1] <= tokens[:, None] + 1
        return np.concatenate([translated, others <= tokens[:, None]], axis=1)

    def others(self, tokens: int) -> np.ndarray:
        """Which of a text's first target tokens no entry stands for, those after the prefix too."""
        return np.concatenate([self.own, np.arange(len(self.target_ids) - 1, tokens)])

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(K,) entries and (K,) target tokens: each translated entry with its group's tokens."""
        counts = self.groups[:, 1] - self.groups[:, 0]
        entries = np.repeat(np.arange(len(self.rows)), counts)
        first = self.groups[:, 0] - (np.cumsum(counts) - counts)
        return entries, np.arange(len(entries)) + np.repeat(first, counts)

    def spread(self, weights: np.ndarray) -> np.ndarray:
        """Convert weights of target tokens (L, T) into weights of translated entries (L, S).

        The weight of a group is the sum over its target tokens, split evenly over its source
        tokens.
        """
        entries, tokens = self.pairs
        _, group, sizes = np.unique(self.groups[:, 0], return_inverse=True, return_counts=True)
        sums = [np.bincount(entries, row[tokens], len(self.rows)) for row in weights]
        return np.stack(sums) / sizes[group]

    def between(self, start: int, stop: int) -> slice:
        """The slice of translated entries whose source tokens lie from ``start`` to ``stop``."""
        return slice(*np.searchsorted(self.rows, [start, stop]).tolist())


def check_capture(capture: str) -> None:
    """Refuse a capture point that cannot be used between two tokenizers.

    Raises:
        IncompatibleTranslatorError: Keys at that point are already rotated by the source's
            positions.
    """
    if capture == "post_rope":
        raise IncompatibleTranslatorError(
            "between two tokenizers keys are rotated at the target's positions, but those captured "
            "post_rope are rotated at the source's; use capture pre_norm or post_norm"
        )


def check_layers(layers: Sequence[LayerGeometry], name: str) -> None:
    """Refuse a target with sliding-window layers; ``name`` is the target's.

    Raises:
        UnsupportedModelError: A layer has a window, or a recurrent state.
    """
    if any(layer.recurrence is not None for layer in layers):
        raise UnsupportedModelError(
            f"{name} cannot take over from a model of another tokenizer: it keeps recurrent "
            "states, which depend on the order of tokens; choose another target"
        )
    windows = [layer.window for layer in layers if layer.window is not None]
    if windows:
        raise UnsupportedModelError(
            f"{name} cannot take over from a model of another tokenizer: it keeps windows of "
            f"{windows[0]} tokens, which count entries; choose another target"
        )


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
