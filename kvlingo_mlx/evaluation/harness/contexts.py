"""lm-eval's contexts between two tokenizers: each model's own rendering of the same messages.

lm-eval gives a context as text that the target's template rendered, and a condition gets its
tokens. The source has other tokens and another template, so what was rendered is remembered, and a
context becomes an ``AlignedPrefix`` (section "Cross-tokenizer cache translation").
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.conditions import CacheMaker, target_ids
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.renderings import Messages, Rendering, chat, text_of


class Contexts:
    """What the contexts of a run are, as text and as messages, between two tokenizers.

    ``thinking`` is the templates' switch; None leaves it to them.
    """

    def __init__(self, source: Any, target: Any, thinking: bool | None = None) -> None:
        self.both = source, target
        self.switch = {} if thinking is None else {"enable_thinking": thinking}
        self._messages: dict[str, tuple[Messages, bool]] = {}
        self._texts: dict[bytes, str] = {}

    def rendered(self, text: str, messages: Messages, opens: bool) -> None:
        """Remember what was rendered as ``text``; ``opens`` is whether a new answer begins."""
        self._messages[text] = [dict(message) for message in messages], opens

    def cut(self, text: str, tokens: Sequence[int]) -> None:
        """Remember which text was cut into these target tokens."""
        self._texts[_key(tokens)] = text

    def aligning(self, make: CacheMaker) -> CacheMaker:
        """A condition that is given prefixes as both models read them."""
        return lambda prefix: make(self.aligned(target_ids(prefix)))

    def aligned(self, tokens: Sequence[int]) -> AlignedPrefix:
        """A context's target tokens beside the source's.

        Raises:
            KVLingoError: The tokens are no whole context, the source's template does not take the
                messages, or the target's tokens cannot be found again.
        """
        text = self._texts.get(_key(tokens))
        if text is None:
            raise KVLingoError(
                f"a prompt of {len(tokens):,} tokens was cut, or changes hands within; between two "
                "tokenizers a whole prompt is handed over: take shorter ones"
            )
        source, target = (self._rendering(tokenizer, text) for tokenizer in self.both)
        if target.ids.tolist() != list(tokens):
            raise KVLingoError(
                "the target's template renders a task's messages differently a second time, so "
                "they cannot be aligned with the source's; run the task without it"
            )
        return AlignedPrefix.of(source, target)

    def _rendering(self, tokenizer: Any, text: str) -> Rendering:
        if text not in self._messages:
            return text_of(tokenizer, text)
        messages, opens = self._messages[text]
        how = {"add_generation_prompt": opens, "continue_final_message": not opens, **self.switch}

        def render(those: Messages) -> str:
            try:
                return tokenizer.apply_chat_template(list(those), tokenize=False, **how)
            except TemplateError as error:
                raise ValueError(str(error)) from None

        try:
            return chat(tokenizer, render, messages)
        except (TypeError, ValueError) as error:
            name = getattr(tokenizer, "name_or_path", "a model")
            raise KVLingoError(
                f"the chat template of {name} does not take a task's messages ({error}); run the "
                "task without it"
            ) from None


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()
