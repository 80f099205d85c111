"""A hand-over between two tokenizers in PyTorch and transformers: a loop over groups and stretches.

It shares no code with the package. Translated keys are rotated at their true positions, each
alone; the target reads the text stretch by stretch, and what it has not read yet is not there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from tests.support import reference

Messages = Sequence[Mapping[str, str]]


class Side:
    """A conversation as one model reads it: ids, where tokens end, where contents stand."""

    def __init__(self, folder: Path, messages: Messages) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.ids = encoded["input_ids"]
        offsets = encoded["offset_mapping"]
        # A mark that no space stands for shares its character with the next token.
        starts = [start for start, _ in offsets[1:]] + [len(text)]
        self.ends = [
            stop if stop <= after else None
            for (_, stop), after in zip(offsets, starts, strict=True)
        ]
        assert all(text.count(m["content"]) == 1 for m in messages)  # plain search will do
        self.contents = [(text.index(m["content"]), len(m["content"])) for m in messages]

    def cuts(self, message: int) -> dict[int, int]:
        return cuts(self.ends, *self.contents[message])


def cuts(ends: Sequence[int | None], start: int, length: int) -> dict[int, int]:
    """Tokens up to and with the one that ends at each character of a content, or before it."""
    return {
        end - start: index + 1
        for index, end in enumerate(ends)
        if end is not None and start <= end <= start + length
    }


def assignments(source: Side, target: Side, count: int) -> dict[int, int]:
    """Target position of each translated source token, by the appendix's rule."""
    found: dict[int, int] = {}
    for message in range(count):
        ours, theirs = source.cuts(message), target.cuts(message)
        shared = sorted(set(ours) & set(theirs))
        for low, high in itertools.pairwise(shared):
            p, q = ours[high] - ours[low], theirs[high] - theirs[low]
            for i in range(1, p + 1):
                j = 1 if p == 1 else 1 + round((i - 1) * (q - 1) / (p - 1))
                found[ours[low] + i - 1] = theirs[low] + j - 1
    return found


def covered(source: Side, target: Side, count: int) -> set[int]:
    """Target positions in some group: those that the target does not read."""
    found: set[int] = set()
    for message in range(count):
        ours, theirs = source.cuts(message), target.cuts(message)
        shared = sorted(set(ours) & set(theirs))
        if len(shared) > 1:
            found |= set(range(theirs[shared[0]], theirs[shared[-1]]))
    return found


@torch.no_grad()
def hand_over(
    source_folder: Path,
    target_folder: Path,
    translator_folder: Path,
    messages: Messages,
    following: Sequence[int],
    *,
    canonical: bool = False,
) -> np.ndarray:
    """Logits (1 + len(following), vocabulary) after the prompt and after each of ``following``.

    ``canonical`` rotates translated keys at the source's own positions instead.
    """
    source, target = (reference.load_model(f) for f in (source_folder, target_folder))
    sides = Side(source_folder, messages), Side(target_folder, messages)
    placed = assignments(*sides, len(messages))
    skipped = covered(*sides, len(messages))
    rows = sorted(placed, key=lambda row: (placed[row], row))
    entries = translated(source, target, translator_folder, sides[0].ids, rows)
    cache: Any = DynamicCache()
    last = len(sides[1].ids) - 1
    done = 0
    for position in range(last):
        if position not in skipped:
            step(target, cache, sides[1].ids[position], position)
            continue
        while done < len(rows) and placed[rows[done]] == position:
            at = rows[done] if canonical else position
            write(target, cache, [(k[done], v[done]) for k, v in entries], at)
            done += 1
    assert done == len(rows)
    logits = [
        step(target, cache, token, last + index)
        for index, token in enumerate([sides[1].ids[-1], *following])
    ]
    return np.stack(logits)


def step(model: Any, cache: Any, token: int, position: int) -> np.ndarray:
    """Run one token at a position; its logits (vocabulary,)."""
    seen = torch.ones(1, cache.get_seq_length() + 1, dtype=torch.long)
    output = model(
        torch.tensor([[token]]),
        past_key_values=cache,
        attention_mask=seen,
        position_ids=torch.tensor([[position]]),
    )
    return output.logits[0, -1].float().numpy()


def translated(
    source: Any, target: Any, folder: Path, ids: Sequence[int], rows: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (S, H, D) of each target layer, normed and not rotated."""
    config, tensors = reference.read_translator(folder)
    sides = {}
    for side, states in zip(("keys", "values"), reference.capture_projections(source, ids),
                            strict=True):  # fmt: skip
        read = [
            reference.finish(source, side, layer, array, "pre_norm", config["capture"])[list(rows)]
            for layer, array in enumerate(states)
        ]
        sides[side] = [
            reference.translate_layer(config, tensors, side, layer, read)
            for layer in range(len(config["target"]["layers"]))
        ]
    keys = [
        reference.finish(target, "keys", layer, array, config["capture"], "post_norm")
        for layer, array in enumerate(sides["keys"])
    ]
    return list(zip(keys, sides["values"], strict=True))


def write(model: Any, cache: Any, entries: Sequence[tuple[Tensor, Tensor]], position: int) -> None:
    """Put one entry (H, D) a layer into a cache, its keys rotated at ``position``."""
    for layer, attention in enumerate(reference.owners(model)):
        key, value = (array[None] for array in entries[layer])
        key = reference.rotate(model, attention, key, position)
        cache.update(*(array.transpose(0, 1)[None].contiguous() for array in (key, value)), layer)
