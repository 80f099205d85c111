"""The conversations on which a training leaves its receipt, and ``verify`` holds it up to.

The same in both runtimes: records of generated dialogues, tokenised as training data are.
"""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.embedded.dialogues import held_out
from kvlingo_mlx.samples import Sample, to_samples

NAME, COUNT = "dialogues-1", 8  # changes when any of them does


def bundled_samples(tokenizer: Any, context_length: int) -> list[Sample]:
    """The bundled conversations, each cut where its last answer opens.

    Without a chat template they are plain texts, cut in the middle. Those beyond
    ``context_length`` are left out.
    """
    records: list[dict[str, Any]] = [
        {"messages": talk.conversation()} for talk in held_out(COUNT, seed=0)
    ]
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template is not None):
        records = [{"text": "\n".join(m["content"] for m in r["messages"])} for r in records]
    return [s for s in to_samples(records, tokenizer, context_length) if s.continuation]
