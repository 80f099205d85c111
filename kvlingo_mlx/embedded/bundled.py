"""The conversations on which a training leaves its receipt, and ``verify`` holds it up to.

The same in both runtimes: records of generated dialogues, tokenised as training data are.
"""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.embedded.dialogues import held_out
from kvlingo_mlx.samples import Sample, to_samples

NAME, COUNT = "dialogues-1", 8  # changes when any of them does


def bundled_samples(
    tokenizer: Any, context_length: int, source_tokenizer: Any = None
) -> list[Sample]:
    """The bundled conversations, each cut where its last answer opens.

    Without a chat template they are plain texts, cut in the middle. Those beyond
    ``context_length`` are left out. ``source_tokenizer`` is the source's where it has another one.
    """
    records: list[dict[str, Any]] = [
        {"messages": talk.conversation()} for talk in held_out(COUNT, seed=0)
    ]
    both = [tokenizer] if source_tokenizer is None else [tokenizer, source_tokenizer]
    if not all(getattr(t, "has_chat_template", t.chat_template is not None) for t in both):
        records = [{"text": "\n".join(m["content"] for m in r["messages"])} for r in records]
    found = to_samples(records, tokenizer, context_length, source_tokenizer)
    return [sample for sample in found if sample.continuation]
