"""A conversation as each of two models reads it, and what of it can be translated.

Each model renders the conversation by its own chat template. The renderings share the contents of
the messages, which are matched by message and aligned. The templates' boilerplate is never
translated: the target prefills it itself, in place (appendix "Cross-tokenizer cache translation").
``tokenizer`` is any fast transformers tokenizer, bare or wrapped by mlx-lm, or a plain one of the
``tokenizers`` library.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.tokenization.alignment import NO_END, Cuts, Span, TokenAlignment, align, token_ends
from kvlingo_mlx.tokenization.chat_messages import conversation, unreadable

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]  # a chat template with its switches set; may raise ValueError
Part = tuple[str, Span]  # a message's field, and characters of its text
TEXTS = ("reasoning_content", "content")  # the fields of a message that hold text
THINK_MARKS = re.compile("(</?think>)")
MARK = re.compile("\ufdd0([0-9]+)\ufdd1")  # a number between two Unicode noncharacters
MOST_TRIED = 64  # renderings that look for contents
UNFINISHED = "\ufffd"  # what an incomplete character's bytes are decoded to


@dataclass(frozen=True, eq=False)
class Rendering:
    """A text as one model reads it."""

    text: str
    ids: np.ndarray  # (T,) its tokens
    # (T,) the character at which each token ends, as ``alignment.token_ends`` returns it
    ends: np.ndarray
    # The characters of each part of the messages' contents, in the messages' order; None for a part
    # that the template has altered or dropped
    contents: tuple[Span | None, ...]


def with_joined_parts(messages: Messages) -> list[dict[str, Any]]:
    """Copies of the messages, those whose content has parts as ``chat_messages`` reads them.

    Earlier messages have a note in the place of a part that is not text.

    Raises:
        ValueError: A part of the last message, a user's, is not text.
    """
    given, joined = list(messages), list[dict[str, Any]]()
    for message in given:
        content: Any = message.get("content")
        new = message is given[-1] and message.get("role") == "user"
        if new and (number := unreadable(content)) is not None:
            part = content[number]
            kind = part.get("type") if isinstance(part, Mapping) else None
            found = f"of type {kind!r}" if isinstance(kind, str) else repr(part)
            raise ValueError(
                f"a message's content has a part {found:.80}; models read text alone here: give "
                '{"type": "text", "text": ...}, and leave other parts out'
            )
        joined += conversation([message]) if isinstance(content, list) else [dict(message)]
    return joined


def plain(tokenizer: Any, text: str) -> Rendering:
    """The rendering of a text alone, with the tokens that a tokenizer adds around it (``<s>``)."""
    return Rendering(text, *_tokens(tokenizer, text, add_special_tokens=True), ((0, len(text)),))


def bare(tokenizer: Any, text: str) -> Rendering:
    """The rendering of a text with no tokens added, for a text that continues a rendering."""
    return Rendering(text, *_tokens(tokenizer, text, add_special_tokens=False), ((0, len(text)),))


def text_of(tokenizer: Any, text: str) -> Rendering:
    """The rendering of a text prompt: ``<s>`` stands in front once, if the tokenizer has one."""
    return (bare if opened(tokenizer, text) else plain)(tokenizer, text)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of :func:`text_of`; this also works for tokenizers that are not fast."""
    return list(tokenizer.encode(text, add_special_tokens=not opened(tokenizer, text)))


def opened(tokenizer: Any, text: str) -> bool:
    """Whether a text already starts with the token that the tokenizer would put in front."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def front(tokenizer: Any) -> tuple[int, ...]:
    """The token ids that a tokenizer puts in front of a text: ``<s>``, or none."""
    whole, own = (tokenizer.encode("a", add_special_tokens=added) for added in (True, False))
    starts = (i for i in range(len(whole)) if whole[i : i + len(own)] == own)
    return tuple(whole[: next(starts, 0)])


def chat(tokenizer: Any, render: Render, messages: Messages) -> Rendering:
    """The rendering of a conversation by a model's chat template, ``render``."""
    text, contents = content_spans(render, messages)
    return Rendering(text, *_tokens(tokenizer, text, add_special_tokens=False), contents)


def alignments(source: Rendering, target: Rendering, stop: int) -> list[TokenAlignment]:
    """Which source tokens stand for which of the target's first ``stop`` tokens, in order.

    The target prefills those that no alignment has. If both renderings are equal token by token,
    all is aligned, boilerplate included; else the contents are. If the first or last token of a
    content reaches into the boilerplate, the target prefills it, and all up to the nearest offset
    at which both models end a token.

    Raises:
        ValueError: The renderings are of different messages.
    """
    _check_contents(source, target)
    pairs = (source.ids, target.ids), (source.ends, target.ends)
    if source.text == target.text and all(np.array_equal(*pair) for pair in pairs):
        each = np.arange(stop)  # token by token, even those that have no end of their own
        return [TokenAlignment(np.stack([each, each + 1, each, each + 1], axis=1))]
    ours, theirs = Cuts.of(source.ends), Cuts.of(target.ends[:stop])
    both = zip(source.contents, target.contents, strict=True)
    found = (align(ours.within(a), theirs.within(b)) for a, b in both if a and b)
    return sorted((each for each in found if len(each.groups)), key=lambda each: each.target)


def _check_contents(source: Rendering, target: Rendering) -> None:
    counts = len(source.contents), len(target.contents)
    alike = counts[0] == counts[1] and all(
        source.text[slice(*a)] == target.text[slice(*b)]
        for a, b in zip(source.contents, target.contents, strict=True)
        if a and b
    )
    if not alike:
        raise ValueError(
            f"the renderings are of different messages ({counts[0]} contents and {counts[1]}); "
            "render the same messages for both models"
        )


# ---- tokens -----------------------------------------------------------------------------


def _tokens(
    tokenizer: Any, text: str, *, add_special_tokens: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the ends of a text's tokens.

    Raises:
        ValueError: The tokenizer gives no character offsets.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "encode_batch"):
        raise ValueError(
            f"{type(backend).__name__} gives no character offsets, which a translation between "
            "two tokenizers needs; load the model with a fast tokenizer (tokenizer.json)"
        )
    if backend.truncation is not None:  # transformers also removes it before every text
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    return np.array(encoding.ids, np.int64), token_ends(encoding.offsets, text)


def written(tokenizer: Any, ids: Sequence[int]) -> tuple[str, np.ndarray]:
    """The text of tokens that a model generated, and the character at which each token ends.

    A model may spell a text in other tokens than its tokenizer would. So the tokens are decoded one
    after another, each together with the few tokens before it, which decide its leading space.
    """
    text, ends = "", np.full(len(ids), NO_END)
    context, done = 0, 0  # tokens context..done are already in the text and are decoded once more
    for token in range(len(ids)):
        before = tokenizer.decode(ids[context:done], skip_special_tokens=False)
        now = tokenizer.decode(ids[context : token + 1], skip_special_tokens=False)
        if now.endswith(UNFINISHED):
            continue
        text += now[len(before) :]
        ends[token] = len(text)
        context, done = done, token + 1
    rest = tokenizer.decode(ids[context:], skip_special_tokens=False)
    text += rest[len(tokenizer.decode(ids[context:done], skip_special_tokens=False)) :]
    ends[-1:] = len(text)
    return text, ends


# ---- contents ---------------------------------------------------------------------------


def content_spans(
    render: Render, messages: Messages, text: str | None = None
) -> tuple[str, tuple[Span | None, ...]]:
    """Render messages by a chat template, and locate their contents in the result.

    A reasoning is a part of its own. A content is split at its think marks, because a template may
    drop one of the parts, and white space around a part is ignored, because a template may trim it.
    The template is rendered once more with every part between two marks. If the result without the
    marks is the same text, the marks give the places, however often a content occurs or resembles
    boilerplate. If marks change what the template does, halves of the parts are marked, and so on,
    :data:`MOST_TRIED` times at most. ``text`` is the rendering, if it is known.

    Returns:
        The text, and the characters of each part; None for a part that is missing or altered.
    """
    text = render(messages) if text is None else text
    parts = [(i, *part) for i, message in enumerate(messages) for part in message_parts(message)]
    found, tried = dict[int, Span](), [range(len(parts))]
    for _ in range(MOST_TRIED):
        if not tried:
            break
        marked = tried.pop(0)
        located = _located(text, render, messages, parts, marked)
        found |= located or {}
        if located is None and len(marked) > 1:
            middle = len(marked) // 2
            tried += [marked[:middle], marked[middle:]]
    return text, tuple(found.get(part) for part in range(len(parts)))


def message_parts(message: Mapping[str, Any]) -> list[Part]:
    """The parts of a message's texts: those of its reasoning, then those of its content."""
    return [(key, span) for key in TEXTS for span in content_parts(message.get(key))]


def content_parts(content: Any) -> list[Span]:
    """The spans of a content's parts, in characters; empty if the content is not text."""
    spans, at = [], 0
    for piece in THINK_MARKS.split(content if isinstance(content, str) else ""):
        core = piece.strip()
        if core and not THINK_MARKS.fullmatch(piece):
            start = at + piece.index(core)
            spans.append((start, start + len(core)))
        at += len(piece)
    return spans


def _located(
    text: str,
    render: Render,
    messages: Messages,
    parts: Sequence[tuple[int, str, Span]],
    marked: Collection[int],
) -> dict[int, Span] | None:
    """Where the ``marked`` parts stand in ``text``; None if the marks change anything else."""
    try:
        pieces = MARK.split(render(_marked(messages, parts, marked)))
    except ValueError:  # a template may parse a content and refuse a marked one
        return None
    if "".join(pieces[::2]) != text:
        return None
    places: dict[int, list[int]] = defaultdict(list)
    at = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        at += len(piece)
        places[int(number)].append(at)
    found = {}
    for part in marked:
        index, key, span = parts[part]
        where = places[part]  # empty for a dropped part; an altered part may have one place
        if len(where) == 2 and text[slice(*where)] == messages[index][key][slice(*span)]:
            found[part] = (where[0], where[1])
    return found


def _marked(
    messages: Messages, parts: Sequence[tuple[int, str, Span]], marked: Collection[int]
) -> list[dict[str, Any]]:
    copies = [dict(message) for message in messages]
    for part in sorted(marked, reverse=True):  # last first, so that earlier spans stay valid
        index, key, (start, stop) = parts[part]
        content, mark = copies[index][key], f"\ufdd0{part}\ufdd1"
        copies[index][key] = content[:start] + mark + content[start:stop] + mark + content[stop:]
    return copies
