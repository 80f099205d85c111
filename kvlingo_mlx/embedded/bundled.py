"""The bundled conversations, on which training measures a receipt and ``verify`` checks it.

They are the same in both runtimes: generated dialogues, tokenised as training data are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlingo_mlx.embedded.dialogues import Dialogue, held_out
from kvlingo_mlx.tokenization.renderings import bare
from kvlingo_mlx.tokenization.samples import Sample, cut, to_samples

NAME, COUNT = "dialogues-1", 8  # the name changes whenever a conversation does
Asked = tuple[Sample, tuple[int, ...]]


def bundled(tokenizer: Any, context_length: int, source_tokenizer: Any = None) -> list[Asked]:
    """The bundled conversations, each with the indices of the asked value in its continuation.

    Each is cut where its last answer opens. Without a chat template they are plain texts, cut in
    the middle and without indices. Conversations longer than ``context_length`` are left out.
    ``source_tokenizer`` is given if the source has another one.
    """
    both = [tokenizer] if source_tokenizer is None else [tokenizer, source_tokenizer]
    chats = all(getattr(t, "has_chat_template", t.chat_template is not None) for t in both)
    found = []
    for talk in held_out(COUNT, seed=0):
        record: dict[str, Any] = {"messages": talk.conversation()}
        if not chats:
            record = {"text": "\n".join(m["content"] for m in record["messages"])}
        for sample in to_samples([record], tokenizer, context_length, source_tokenizer):
            if sample.continuation:
                found.append((sample, _value(tokenizer, talk) if chats else ()))
    return found


def receipt_rows(tokenizer: Any, context_length: int, source_tokenizer: Any = None) -> float:
    """A receipt's cost, in tokens that both models read once, as a fit reads them.

    The source reads each prefix twice, the target once, and each continuation three times, with
    logits: that is taken as two passes of them all.
    """
    asked = bundled(tokenizer, context_length, source_tokenizer)
    return 2.0 * sum(len(s.prefix) + 3 * len(s.continuation) for s, _ in asked)


def _value(tokenizer: Any, talk: Dialogue) -> tuple[int, ...]:
    """The indices of the tokens of the last answer that spell the value."""
    text, value = cut(talk.conversation(), tokenizer)[1], talk.asked[-1].value
    stop = text.rindex(value) + len(value)
    ends = bare(tokenizer, text).ends
    return tuple(np.flatnonzero((stop - len(value) < ends) & (ends <= stop)).tolist())


def spelled(best: Sequence[int], sample: Sample, value: tuple[int, ...]) -> bool:
    """Whether the first choices ``best`` spell the value at the continuation's tokens."""
    return all(best[i] == sample.continuation[i] for i in value)
