"""Records as conversations, and the turns of a conversation that make a training sample.

Appendix "Training data and training recipe": how a sample is built, and where the reasoning trace
goes. ``samples.tokenise`` renders the turns by the family's own chat template.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvlingo_mlx.tokenization.chat_messages import checked_record
from kvlingo_mlx.tokenization.probes import TemplateNeeds
from kvlingo_mlx.tokenization.samples import (
    Sample,
    asked_next,
    encode_plain,
    reasons,
    said,
    tokenise,
)
from kvlingo_mlx.tokenization.templates import fit_to_template

Message = dict[str, Any]

CLOSE = "</think>"


def normalise(record: Any, where: str) -> dict[str, Any]:
    """A record of any accepted schema as ``{"text": ...}`` or ``{"messages": [...]}``.

    The schemas are those of :func:`~kvlingo_mlx.tokenization.chat_messages.checked_record`. The
    returned messages are an optional system message, then user and assistant in turn, none of them
    empty; a reasoning trace is kept apart in ``reasoning_content``, and calls of tools and their
    results are text. A conversation begins with a question and ends before its first turn without
    text. The list is empty if no usable assistant turn is left.

    Raises:
        ValueError: The record has no such schema; the message starts with ``where``.
    """
    if isinstance(record, dict) and [] in (record.get("messages"), record.get("conversations")):
        return {"messages": []}
    checked = checked_record(record, where)
    if "messages" not in checked or checked["messages"] is None:
        return {"text": checked["text"]}
    messages = list(map(_trace_apart, checked["messages"]))
    begun = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    messages[:begun] = [message for message in messages[:begun] if message["role"] == "system"]
    alternating = list(_readable(fit_to_template(None, messages, strict=True, opens=False)))
    return {"messages": alternating if replies(alternating) else []}


def replies(messages: Sequence[Message]) -> list[int]:
    """The indices of a conversation's assistant turns."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _trace_apart(message: Message) -> Message:
    """A message whose content has no think block; an assistant's has the block's text apart."""
    found, content = dict(message), message["content"]
    trace = found.pop("reasoning_content", "")
    if found["role"] != "assistant":
        return found
    if CLOSE in content:
        head, content = content.split(CLOSE, 1)
        trace = trace or head.strip().removeprefix("<think>")
    elif content.lstrip().startswith("<think>"):
        content = ""  # cut off inside its trace, so there is no answer
    trace = trace.strip()
    found["content"] = content.lstrip("\n")
    return {**found, "reasoning_content": trace} if trace else found


def _readable(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages up to the first unusable one, without empty system messages (as in Nemotron)."""
    for message in messages:
        blank = not message["content"].strip()
        if blank and message["role"] != "system":
            return
        if not blank:
            yield message


def keeps_system(tokenizer: Any) -> bool:
    """Whether a chat template keeps a system message in front, whatever follows.

    Gemma's template refuses a system message. Mistral's moves it to the last user turn, so that a
    conversation with its reply does not begin like the conversation without it.
    """
    needs = TemplateNeeds(tokenizer)
    return needs.takes("system") and needs.takes("system, no user last")


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its system message, if any, prepended to the first user turn."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [messages[1] | {"content": content}, *messages[2:]]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Earlier turns without their reasoning traces, which only Qwen3's template would remove."""
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def until(messages: Sequence[Message], turn: int, *, fold: bool) -> list[Message]:
    """A conversation up to and including the reply ``turn`` (paragraph "How a sample is built").

    The reply's content begins with its reasoning trace as a think block, which every family's
    template keeps there; earlier turns carry no trace.
    """
    reply = messages[turn]
    trace = reply.get("reasoning_content")
    block = f"<think>\n{trace}\n</think>\n\n" if trace else ""
    spoken = {"role": "assistant", "content": block + reply["content"]}
    before = _plain(messages[:turn])
    return [*(fold_system(before) if fold else before), spoken]


def pack(
    conversations: Sequence[Sequence[Message]], lifted: int, exchanges: int = 1
) -> tuple[list[Message], list[Message]]:
    """Whole conversations as one, with the last questions of conversation ``lifted`` at the end.

    These questions and their answers are moved to the end. All other turns, including the earlier
    ones of conversation ``lifted``, keep their order.

    Returns:
        The conversation up to the answer to the first of these questions, and the turns after it.
    """
    wholes = [fold_system(messages[: replies(messages)[-1] + 1]) for messages in conversations]
    moved = wholes[lifted][-2 * exchanges :]
    wholes[lifted] = wholes[lifted][: -2 * exchanges]
    turns = [turn for whole in wholes for turn in whole]
    return until([*turns, *moved], len(turns) + 1, fold=False), moved[2:]


def to_sample(
    messages: Sequence[Message],
    tokenizer: Any,
    max_continuation: int,
    source_tokenizer: Any = None,
    later: Sequence[Message] = (),
) -> Sample:
    """The tokens of a conversation that ends with a reply, cut to ``max_continuation`` tokens.

    ``source_tokenizer`` is the source's tokenizer where it differs from ``tokenizer``. The
    continuation goes on through ``later``, the turns after the reply, each answer after the header
    with which it is generated; up to a reply with a reasoning trace, which templates take out of
    what lies behind.
    """
    whole = tokenise({"messages": messages}, tokenizer, source_tokenizer=source_tokenizer)
    more = encode_plain(tokenizer, _going_on(messages, later, tokenizer))
    return replace(whole, continuation=(whole.continuation + more)[:max_continuation])


def _going_on(messages: Sequence[Message], later: Sequence[Message], tokenizer: Any) -> str:
    """The text of later questions and answers, as far as none has a reasoning trace."""
    text, (before, reply) = "", messages[-2:]
    for question, answer in zip(later[::2], later[1::2], strict=False):
        if reasons(reply) or reasons(answer):
            break
        opened = asked_next(before["content"], reply["content"], question["content"], tokenizer)
        if not opened:
            break
        text += opened + said(question["content"], answer["content"], tokenizer)
        before, reply = question, answer
    return text


def boilerplate(tokenizer: Any, source_tokenizer: Any = None) -> tuple[float, float]:
    """How many tokens a chat template adds to a prefix once, and how many to each message."""
    asked, said = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}
    own = len(encode_plain(tokenizer, "Hello!"))
    short, long = (
        to_sample([*[asked, said] * rounds, asked, said], tokenizer, 1, source_tokenizer).num_read
        for rounds in (0, 1)
    )
    header = (long - short) / 2 - own
    return short - own - header, header


def excerpt(text: str, characters: int, rng: np.random.Generator) -> str:
    """Up to ``characters`` of a text, from a random word on (a book is not tokenised whole)."""
    if len(text) <= characters:
        return text
    start = int(rng.integers(len(text) - characters + 1))
    space = text.find(" ", start, start + characters // 2)
    return text[max(start, space + 1) :][:characters]
