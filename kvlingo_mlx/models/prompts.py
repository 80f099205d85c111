"""Convert prompts to token ids: text, messages rendered by a chat template, or ids."""

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from kvlingo_mlx.embedded import is_embedded
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.probes import Message, announces_tools
from kvlingo_mlx.tokenization.renderings import (
    Rendering,
    chat,
    text_ids,
    text_of,
    with_joined_parts,
)
from kvlingo_mlx.tokenization.templates import rendered

Prompt = str | Sequence[int] | Sequence[Message]


def encode(
    model: LanguageModel, prompt: Prompt, enable_thinking: bool | None = None, **switches: Any
) -> list[int]:
    """The token ids of a prompt: text, ids, or messages rendered by the chat template.

    ``enable_thinking`` and other ``switches`` are passed to the template; None leaves one out. Left
    out, ``enable_thinking`` is False for the embedded models, and True (as in mlx-lm) for others.

    Raises:
        ValueError: The prompt is empty, or it holds messages and the model has no template.
    """
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        _check_text(prompt)
        tokens = text_ids(tokenizer, prompt)
    elif is_chat(prompt):
        tokens = list(_render(model, prompt, {"enable_thinking": enable_thinking, **switches}))
    else:
        tokens = as_ids(cast(Sequence[int], prompt))
    if not tokens:
        raise ValueError("the prompt is empty; give some text")
    return tokens


def rendering(
    model: LanguageModel, prompt: Prompt, enable_thinking: bool | None = None, **switches: Any
) -> Rendering:
    """A prompt as a model reads it, with its tokens' places, for alignment with another model.

    Raises:
        ValueError: The prompt is empty, or it is token ids, or it holds messages and the model has
            no template, or the model has no fast tokenizer.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
        return text_of(model.tokenizer, prompt)
    if not is_chat(prompt):
        raise ValueError(
            "the prompt is token ids, which the two tokenizers of this pair read differently; "
            "give text or messages"
        )
    return chat(
        model.tokenizer,
        lambda messages: _render(
            model, messages, {"enable_thinking": enable_thinking, **switches}, tokenize=False
        ),
        with_joined_parts(prompt),
    )


def is_message(found: Any) -> TypeGuard[Message]:
    """Whether something is a chat message: what a role says, or which tools it calls."""
    named = isinstance(found, dict) and isinstance(found.get("role"), str)
    return named and not found.keys().isdisjoint(("content", "tool_calls"))


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is chat messages, which a template renders.

    Raises:
        ValueError: It is nothing that a prompt can be, or a message lacks its role.
    """
    if isinstance(prompt, str):
        return False
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not listed and not hasattr(prompt, "tolist"):  # such as one message outside a list
        raise _unread(prompt)
    chat = len(prompt) > 0 and isinstance(prompt[0], dict)
    for message in prompt if chat else ():
        if not is_message(message):
            raise ValueError(
                f'a message is {message!r:.60}; each needs a "role" and a "content", as in '
                '{"role": "user", "content": "Hello"}'
            )
    return chat


def render_text(model: LanguageModel, messages: Sequence[Message], **switches: Any) -> str:
    """The chat template's text of messages, up to the header of the next answer.

    ``switches`` are passed to the template (``enable_thinking``, ``tools``); None leaves one out.
    ``add_generation_prompt=False`` leaves out the header.

    Raises:
        ValueError: There is no template, or it does not accept these messages.
    """
    return _render(model, messages, switches, tokenize=False)


def header_of(
    model: LanguageModel, messages: Sequence[Message], whole: str = "", **switches: Any
) -> str:
    """The text that the template puts between messages and the answer to them; "" if unknown.

    ``whole`` is what it renders of both, if that is known.
    """
    try:
        bare = render_text(model, messages, **switches, add_generation_prompt=False)
    except ValueError:  # a template may take them before an answer alone
        return ""
    whole = whole or render_text(model, messages, **switches)
    return whole[len(bare) :] if whole.startswith(bare) else ""


def _render(
    model: LanguageModel,
    messages: Sequence[Mapping[str, Any]],
    switches: Mapping[str, Any],
    **options: Any,
) -> Any:
    if not model.tokenizer.has_chat_template:
        raise ValueError(f"{model.name} has no chat template; pass the prompt as text")
    for message in messages:
        if isinstance(message.get("content"), str):
            _check_text(message["content"])
    given = {name: value for name, value in switches.items() if value is not None}
    if is_embedded(model.path):
        # Their translators were distilled without thinking. mlx-lm switches it on by default.
        given.setdefault("enable_thinking", False)
    given = {"add_generation_prompt": True, **given, **options}
    return rendered(model.tokenizer, messages, model.name, **given)


def check_tools(
    model: LanguageModel, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None
) -> None:
    """Refuse (ValueError) tools that the prompt would not contain: only a template adds them."""
    if not tools:
        return
    check_json(tools)
    if not is_chat(prompt):
        raise ValueError(
            "tools are announced by a chat template, but the prompt is no messages; give it as "
            "messages, or leave out tools"
        )
    if not announces_tools(model.tokenizer):
        raise ValueError(
            f"the chat template of {model.name} does not announce tools; put them into a message, "
            "or leave out tools"
        )


def check_json(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse (ValueError) tools that cannot be written as JSON."""
    try:
        json.dumps(tools)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tools must be what JSON can hold ({error})") from None


def _check_text(text: str) -> None:
    """Refuse text that is not valid Unicode, such as half an emoji or undecoded bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid Unicode ({error.reason}); give UTF-8 text, and set "
            "PYTHONUTF8=1 where the locale has another encoding"
        ) from None


def as_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as a list of Python integers, from a list or a NumPy or MLX vector.

    Raises:
        ValueError: They are something else, such as several prompts or images.
    """
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        return [operator.index(token) for token in listed]
    except TypeError:
        raise _unread(tokens) from None


def _unread(prompt: object) -> ValueError:
    return ValueError(
        f"the prompt is {prompt!r:.60}; give text, a list of messages of text, or the token ids of "
        "one prompt (several prompts: hand each over, then mlx_lm's batch_generate)"
    )
