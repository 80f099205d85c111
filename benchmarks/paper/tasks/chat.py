"""Tasks whose items are conversations, passed to the chat template turn by turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

from benchmarks.paper.tasks.records import transcript


class ChatTask(ConfigurableTask):
    """A task with the documents of :mod:`benchmarks.paper.tasks.sources`.

    lm-eval's own tasks turn a document into one user message. Here all messages of a document are
    the context. No examples are shown (num_fewshot is 0).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def facts(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """What an item's results hold beside its scores."""
        facts = {name: document[name] for name in ("id", "cluster", "subset")}
        return facts | ({"to_judge": json.loads(document["judge"])} if document["judge"] else {})

    def doc_to_text(self, doc: dict[str, Any], doc_to_text: Any = None) -> str:
        """The turn to answer."""
        return doc["messages"][-1]["content"]

    def doc_to_target(self, doc: dict[str, Any], doc_to_target: Any = None) -> list[str]:
        """The reference answers; empty if a judge needs none."""
        return doc["references"]

    def fewshot_context(
        self,
        doc: dict[str, Any],
        num_fewshot: int = 0,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., str] | None = None,
        gen_prefix: str | None = None,
    ) -> str:
        """The whole conversation, rendered, up to the start of the answer."""
        messages = list(doc["messages"])
        if system_instruction:
            messages.insert(0, {"role": "system", "content": system_instruction})
        if apply_chat_template and chat_template is not None:
            return chat_template(messages)
        return transcript(messages) + "\n\nAssistant:"
