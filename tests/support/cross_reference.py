"""Hand-overs and conversations between two tokenizers in PyTorch: loops over tokens and groups.

It shares no code with the package. Every token is run alone at its own position; what another
model wrote is put where it belongs, entry by entry, before the next token is run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from tests.support import reference
from tests.support.two_tokenizers import Script

Message = Mapping[str, str]
Group = tuple[int, int, int, int]
read_translator = functools.cache(reference.read_translator)  # it is asked for by every token


def cuts(ends: Sequence[int | None], start: int, length: int) -> dict[int, int]:
    """Tokens up to and with the one that ends at each character of a content, or before it."""
    return {
        end - start: index + 1
        for index, end in enumerate(ends)
        if end is not None and start <= end <= start + length
    }


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


def write(model: Any, cache: Any, entries: Sequence[tuple[Tensor, Tensor]], position: int) -> None:
    """Put one entry (H, D) a layer into a cache, its keys rotated at ``position``."""
    for layer, attention in enumerate(reference.owners(model)):
        key, value = (array[None] for array in entries[layer])
        key = reference.rotate(model, attention, key, position)
        cache.update(*(array.transpose(0, 1)[None].contiguous() for array in (key, value)), layer)


class SlowLine:
    """What one model holds, and how its tokens stand in the text."""

    def __init__(self, folder: Path) -> None:
        self.model = reference.load_model(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.cache: Any = DynamicCache()
        self.text, self.ids = "", list[int]()
        self.ends: list[int | None] = []
        self.states: list[list[tuple[Tensor, Tensor]] | None] = []  # None: translated

    def prompt(
        self, messages: Sequence[Message], begun: str = ""
    ) -> tuple[str, list[int], list[int | None]]:
        """The text up to the answer's header, or to what is begun of the answer; its ids and ends.

        The model's own are kept.
        """
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        text += begun
        assert text.startswith(self.text)
        at = len(self.text)
        encoded = self.tokenizer(text[at:], add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(a + at, b + at) for a, b in encoded["offset_mapping"]]
        starts = [start for start, _ in offsets[1:]] + [len(text)]
        ends = [b if b <= after else None for (_, b), after in zip(offsets, starts, strict=True)]
        return text, [*self.ids, *encoded["input_ids"]], [*self.ends, *ends]

    def run(self, token: int) -> np.ndarray:
        """Run the next token at its own position; its log probabilities (vocabulary,)."""
        owners = reference.owners(self.model)
        taps = [reference.projections(attention) for attention in owners]
        outputs: dict[Any, Tensor] = {}
        hooks = [
            p.register_forward_hook(lambda m, _, out: outputs.__setitem__(m, out[0]))
            for pair in taps
            for p in pair
        ]
        logits = step(self.model, self.cache, token, len(self.ids))
        for hook in hooks:
            hook.remove()
        self.states.append([
            reference.split(a, [outputs[p] for p in pair])
            for a, pair in zip(owners, taps, strict=True)
        ])  # fmt: skip
        self.ids.append(token)
        return torch.log_softmax(torch.tensor(logits).double(), -1).numpy()

    def entry(self, row: int, target: SlowLine, translator: Path) -> list[tuple[Tensor, Tensor]]:
        """What it wrote of one token as the target's keys, not rotated, and values, by layer."""
        config, tensors = read_translator(translator)
        states = self.states[row]
        assert states is not None
        made = []
        for number, side in enumerate(reference.SIDES):
            read = [
                reference.finish(self.model, side, l, each[number], "pre_norm", config["capture"])
                for l, each in enumerate(states)  # noqa: E741
            ]
            layers = range(len(config["target"]["layers"]))
            made.append([
                reference.translate_layer(config, tensors, side, layer, read) for layer in layers
            ])  # fmt: skip
        keys = [
            reference.finish(target.model, "keys", layer, array, config["capture"], "post_norm")
            for layer, array in enumerate(made[0])
        ]
        return [(k[0], v[0]) for k, v in zip(keys, made[1], strict=True)]


@torch.no_grad()
def listen(line: SlowLine, messages: Sequence[Message]) -> None:
    """Let a model read a prompt, but for its last token, which another one then answers."""
    text, ids, ends = line.prompt(messages)
    for token in ids[len(line.ids) : -1]:
        line.run(token)
    line.text, line.ends = text, ends


@torch.no_grad()
def answer(
    line: SlowLine, source: SlowLine | None, translator: Path | None, messages: Sequence[Message],
    script: Script, *, shift: int = 0, begun: tuple[str, ...] = ("", ""),
) -> np.ndarray:  # fmt: skip
    """Log probabilities (A, vocabulary) of a scripted answer's tokens; the line then holds it.

    What ``source`` ran itself of the contents is translated, all else is read. ``shift`` puts
    translated entries that far from where they belong. ``begun`` is what the source wrote of the
    answer: as it stands after the header, and the part of it that is content.
    """
    text, ids, ends = line.prompt(messages, begun[0])
    contents = [message["content"] for message in messages] + [b for b in begun[1:] if b]
    groups = {} if source is None else groups_of(source, text, ends, contents)
    last = len(ids) - 1
    line.ends = ends
    while len(line.ids) < last:
        at = len(line.ids)
        group = groups.get(at)
        if source is None or group is None or group[3] > last:
            line.run(ids[at])
            continue
        first, stop, low, high = group
        for row in range(first, stop):
            assert translator is not None
            p, q, i = stop - first, high - low, row - first + 1
            j = 1 if p == 1 else 1 + round((i - 1) * (q - 1) / (p - 1))
            entries = source.entry(row, line, translator)
            write(line.model, line.cache, entries, low + j - 1 + shift)
        line.ids += ids[low:high]
        line.states += [None] * (high - low)
    found = [line.run(token) for token in (ids[last], *script.ids[:-1])]
    line.run(script.ids[-1])
    stop = line.tokenizer.convert_ids_to_tokens(script.ids[-1])
    line.text = text + script.text + stop
    line.ends = [*ends, *(len(text) + end for end in script.ends), len(line.text)]
    assert len(line.ends) == len(line.ids) == len(line.states)
    return np.stack(found)


def groups_of(
    source: SlowLine, text: str, ends: Sequence[int | None], contents: Sequence[str]
) -> dict[int, Group]:
    """Minimal groups by the first target position, of what the source ran itself."""
    found = {}
    for content in contents:
        assert text.count(content) == 1
        if source.text.count(content) != 1:
            continue
        ours = cuts(source.ends, source.text.index(content), len(content))
        theirs = cuts(ends, text.index(content), len(content))
        for low, high in itertools.pairwise(sorted(set(ours) & set(theirs))):
            group = ours[low], ours[high], theirs[low], theirs[high]
            if all(source.states[row] is not None for row in range(group[0], group[1])):
                found[group[2]] = group
    return found
