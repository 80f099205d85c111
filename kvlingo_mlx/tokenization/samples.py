"""Convert records (conversations or plain text, from JSONL) into (prefix, continuation) token ids.

The MLX and the CUDA path both use this module. ``tokenizer`` is any transformers tokenizer, bare or
wrapped by mlx-lm.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.format.geometry import vocabulary_fingerprint
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.alignment import NO_END
from kvlingo_mlx.tokenization.chat_messages import checked_record
from kvlingo_mlx.tokenization.records import Skipped, open_lines
from kvlingo_mlx.tokenization.renderings import chat, text_ids, text_of
from kvlingo_mlx.tokenization.templates import rendered

MAX_PREFIX, MAX_CONTINUATION = 16_384, 2048
# Of held-out samples a receipt reads at most so many, so much of each prefix and continuation: some
# 2,300 tokens by each model, less than the bundled dialogues have.
JUDGES, JUDGED, PREDICTED = 8, 256, 32


@dataclass(frozen=True)
class Sample:
    """A prefix whose cache is translated, and its continuation, which may be empty.

    Both are in the target's tokens. Between two tokenizers, ``aligned`` holds the prefix as each of
    them cuts it; without it, the source has the same tokens.
    """

    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    aligned: AlignedPrefix | None = field(default=None, compare=False, repr=False)

    @property
    def source_prefix(self) -> tuple[int, ...]:
        """The prefix in the source's tokens."""
        return self.prefix if self.aligned is None else self.aligned.source_ids

    @property
    def num_translated(self) -> int:
        """How many tokens of the prefix are translated and so can be fitted on."""
        return len(self.prefix) if self.aligned is None else len(self.aligned.rows)

    @property
    def num_read(self) -> int:
        """The number of tokens of the longer of the two prefixes."""
        return max(len(self.prefix), len(self.source_prefix))


@dataclass(frozen=True)
class HeldOut:
    """Samples of the user's data that nothing is fitted or trained on, and the data's name."""

    data: str
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, data: str, samples: Iterable[Sample]) -> HeldOut:
        """The first few of some samples, cut short, since reading them takes time.

        One with a longer prefix is cut within it; between two tokenizers it is left out.
        """
        return cls(data, tuple(itertools.islice(filter(None, map(_cut_short, samples)), JUDGES)))


def _cut_short(sample: Sample) -> Sample | None:
    if sample.num_read <= (JUDGED if sample.aligned is None else 2 * JUDGED):
        told = sample.continuation[:PREDICTED]
        return replace(sample, continuation=told) if told else None
    if sample.aligned is not None:
        return None
    whole = sample.prefix + sample.continuation
    return Sample(whole[:JUDGED], whole[JUDGED : JUDGED + PREDICTED])


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file that :func:`checked_record` takes, one per line, without blank lines.

    Raises:
        ValueError: The file is missing or empty, or no line is such a record.

    Warns:
        KVLingoWarning: Some lines are none; it names the first of them.
    """
    lines, skipped, found = open_lines(Path(path)), Skipped(), list[dict[str, Any]]()
    for number in range(len(lines)):
        with skipped.those_of(ValueError):
            record, where = lines.read(number)
            found += [] if record is None else [checked_record(record, where)]
    if not found:
        raise ValueError(f"no record of {path} can be used; {skipped}")
    if skipped:
        warnings.warn(str(skipped), KVLingoWarning, stacklevel=2)
    return found


def other_tokenizer(source: Any, target: Any) -> Any:
    """The source's tokenizer if its vocabulary differs from the target's, else None."""
    ours, theirs = (vocabulary_fingerprint(t.get_vocab()) for t in (source, target))
    return None if ours == theirs else source


def to_samples(
    records: Iterable[Mapping[str, Any] | Sample],
    tokenizer: Any,
    context_length: int,
    source_tokenizer: Any = None,
    first: int = 1,
    skipped: Skipped | None = None,
) -> Iterator[Sample]:
    """Tokenise records for a pair that shares ``tokenizer`` and its chat template.

    ``source_tokenizer`` is given if the source has another tokenizer. Records whose prefix is empty
    or longer than ``context_length`` are left out. ``first`` is the first one's number, for errors.
    ``skipped`` takes the errors of records, which are then left out, too.

    Raises:
        ValueError: A record is malformed, or a ``Sample`` has one tokenizer's tokens for a pair
            with two.
    """
    limit = min(MAX_PREFIX, context_length)
    for number, record in enumerate(records, first):
        sample = None
        with nullcontext() if skipped is None else skipped.those_of(ValueError):
            sample = _sample_of(record, f"record {number}", tokenizer, source_tokenizer)
        if sample is not None and 0 < sample.num_read <= limit:
            room = min(MAX_CONTINUATION, context_length - len(sample.prefix))
            yield replace(sample, continuation=sample.continuation[:room])


def _sample_of(
    record: Mapping[str, Any] | Sample, where: str, tokenizer: Any, source_tokenizer: Any
) -> Sample:
    if not isinstance(record, Sample):
        checked = checked_record(record, where)
        try:
            return tokenise(checked, tokenizer, source_tokenizer=source_tokenizer)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if source_tokenizer is not None and record.aligned is None:
        raise ValueError(
            f"{where} has the tokens of one tokenizer, and this pair has two; give records of "
            "text or messages"
        )
    return record


def tokenise(record: Mapping[str, Any], tokenizer: Any, *, source_tokenizer: Any = None) -> Sample:
    """One record as token ids.

    A conversation is cut where its last assistant turn after the first question opens: the prefix
    is the chat template's text up to and including that turn's header, and the turn is the
    continuation. A turn without reasoning leaves Qwen3's empty think block in the prefix (appendix
    "Training data"). A conversation without such a turn has no continuation. A plain text is
    tokenised as a text prompt, with ``<s>`` first if the tokenizer has one, and is cut in the
    middle. ``source_tokenizer`` is given if the source has another tokenizer.
    """
    if record.get("messages") is None:
        if source_tokenizer is not None:
            return _text_of_two(record["text"], source_tokenizer, tokenizer)
        tokens = tuple(text_ids(tokenizer, record["text"]))
        middle = len(tokens) // 2
        return Sample(tokens[:middle], tokens[middle:])
    messages, switch = list(record["messages"]), dict[str, Any]()
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > first]
    if replies:
        prefix, continuation = cut(messages[: replies[-1] + 1], tokenizer)
        switch["enable_thinking"] = reasons(messages[replies[-1]])
    else:
        prefix, continuation = _render(tokenizer, messages, True), ""
    answer = encode_plain(tokenizer, continuation)
    if source_tokenizer is None:
        return Sample(encode_plain(tokenizer, prefix), answer)
    before = messages[: replies[-1]] if replies else messages
    return replace(between(before, source_tokenizer, tokenizer, **switch), continuation=answer)


def between(
    messages: Sequence[Mapping[str, Any]], source: Any, target: Any, **switch: Any
) -> Sample:
    """Messages up to the header of the answer, as two tokenizers and templates read them."""
    both = (
        chat(tokenizer, partial(_render, tokenizer, opens=True, **switch), messages)
        for tokenizer in (source, target)
    )
    found = AlignedPrefix.of(*both)
    return Sample(found.target_ids, (), found)


def _text_of_two(text: str, source: Any, target: Any) -> Sample:
    """A text as a sample, cut near its middle, where the target ends a token.

    The second half keeps the target tokens that it has in the whole text.
    """
    whole = text_of(target, text)
    ends = np.flatnonzero(whole.ends[: (len(whole.ids) + 1) // 2] != NO_END)
    last = int(ends[-1]) if len(ends) else len(whole.ids) - 1
    found = AlignedPrefix.of(*(text_of(t, text[: whole.ends[last]]) for t in (source, target)))
    return Sample(found.target_ids, tuple(whole.ids[last + 1 :].tolist()), found)


def cut(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[str, str]:
    """Split a conversation that ends with a reply into the text before the reply and from it on."""
    reply = messages[-1]
    prefix = _render(tokenizer, messages[:-1], True, enable_thinking=reasons(reply))
    whole = _render(tokenizer, messages, False)
    if whole.startswith(prefix):
        return prefix, whole[len(prefix) :].rstrip("\n")
    return prefix, reply["content"] + (tokenizer.eos_token or "")


def said(question: str, answer: str, tokenizer: Any) -> str:
    """An answer as the template renders it after its header, with its end-of-turn text."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return cut(turns, tokenizer)[1]


def asked_next(before: str, answer: str, question: str, tokenizer: Any) -> str:
    """The template's text after an answer to ``before``: the next question, and the next header.

    Empty where the template renders the answer otherwise once something follows it.
    """
    answered = said(before, answer, tokenizer)
    turns = [("user", before), ("assistant", answer), ("user", question)]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = _render(tokenizer, messages, True, enable_thinking=False)
    return text.rpartition(answered)[2] if answered in text else ""


def reasons(reply: Mapping[str, Any]) -> bool:
    """Whether a reply, as recorded, opens with a reasoning trace."""
    trace, closed, _ = reply["content"].lstrip().partition("</think>")
    opens = bool(closed) and trace.startswith("<think>") and trace != "<think>"
    return bool(reply.get("reasoning_content")) or (opens and not trace[7:].isspace())


def encode_plain(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The token ids of a rendered text, with no tokens added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], opens: bool, **switch: bool
) -> str:
    # mlx-lm's wrapper also knows chat templates that are written in Python.
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template is not None):
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(
            f'the tokenizer {name} has no chat template; give {{"text": ...}} records instead '
            "(train: --plain-text)"
        )
    name = getattr(tokenizer, "name_or_path", "") or "the data's model"
    given = {"tokenize": False, "add_generation_prompt": opens, **switch}
    return rendered(tokenizer, messages, name, **given)
