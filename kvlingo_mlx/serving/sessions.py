"""Which conversation a request goes on with: found by its messages, since clients name none.

Clients send the whole history with every request. A session knows the keys of the messages that it
has read and written; the one that shares the longest beginning with a request is gone on with. A
long message that begins like another one (a document, and another question about it) counts by its
parts; so does a plain text, by its tokens. What really need not be read anew is decided token by
token, by its lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.serving.clock import now
from kvlingo_mlx.serving.messages import GenerationRequest, Message

PART, PART_TOKENS = 1000, 16  # characters of a message's parts, and tokens of a plain text's
# A request that leaves out no more than so many last messages, and parts of them, goes on with the
# same session.
REDONE, REDONE_PARTS = 2, 3
ids = itertools.count()
SAVED: Future[None] = Future()  # of what was found on disk
SAVED.set_result(None)
Key = tuple[str, ...]  # of a whole message, and of its beginnings, each one part longer


class Keys:
    """Makes the keys by which messages are compared, without their volatile lines.

    Args:
        patterns: Regular expressions; a line in which one is found is left out.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def of(self, ask: GenerationRequest) -> list[Key]:
        """The keys of what stands before the messages, and of each message."""
        tools = _json(ask.tools)
        head = _digest(_json([tools, sorted(ask.template.items())]))
        return [(head, *_beginnings("tools", tools)), *map(self.message, ask.messages or ())]

    def message(self, message: Message) -> Key:
        """A message's key: its role, content and tool calls, white space around them apart."""
        role, content = message.get("role"), str(message.get("content") or "")
        lines = content.split("\n")
        kept = [line for line in lines if not any(p.search(line) for p in self._patterns)]
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        whole = _digest(_json([role, "\n".join(kept).strip(), calls]))
        return (whole, *_beginnings(str(role), content))


def _call(call: Mapping[str, Any]) -> list[Any]:
    """A tool call's name and arguments; clients may write the arguments otherwise than we did."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [function.get("name"), arguments]


def _json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _beginnings(what: str, text: str) -> Iterator[str]:
    """The digests of a text's first part, of its first two parts, and so on."""
    made = hashlib.blake2b(what.encode(), digest_size=8)
    for start in range(0, len(text) - PART + 1, PART):
        made.update(text[start : start + PART].encode("utf-8", "surrogatepass"))
        yield made.hexdigest()


def keys_of_text(tokenizer: str, tokens: Sequence[int]) -> list[Key]:
    """The keys of a tokenizer's plain texts, and of this one."""
    ids = np.asarray(tokens, np.int64).tobytes()
    whole, parts = hashlib.blake2b(ids, digest_size=16).hexdigest(), list[str]()
    made, size = hashlib.blake2b(digest_size=8), PART_TOKENS * 8
    for start in range(0, len(ids) - size + 1, size):
        made.update(ids[start : start + size])
        parts.append(made.hexdigest())
    return [(f"text {tokenizer}",), (whole, *parts)]


def shared(one: Sequence[Key], other: Sequence[Key]) -> tuple[int, int]:
    """The number of leading messages that two lists share, and of parts of the next message."""
    pairs = list(zip(one, other, strict=False))
    whole = next((n for n, (a, b) in enumerate(pairs) if a[0] != b[0]), len(pairs))
    if whole == len(pairs):
        return whole, 0
    return whole, common_prefix(pairs[whole][0][1:], pairs[whole][1][1:])


@dataclass(eq=False)
class Session:
    """A conversation that is kept, in memory or on disk."""

    keys: list[Key]  # of all messages that it has read, or begun to read, and written
    messages: list[dict[str, Any]] = field(default_factory=list)  # as they were read
    conversation: Conversation | None = None  # None while on disk alone
    folder: Path | None = None  # where it was saved last
    busy: bool = False  # an answer is being written
    expected: int = 0  # bytes that its lines will take at least, meanwhile
    ending: bool = False  # that answer is complete, and other lines are following it
    pinned: bool = False  # it stays in memory
    used: float = field(default_factory=now)  # last, in seconds since the epoch
    saved: Future[None] | None = None  # the writing of it as it is now, once that has begun
    number: int = field(default_factory=ids.__next__)

    @property
    def nbytes(self) -> int:
        """Bytes of its caches in memory, or soon, and of what it keeps for lines that lack it."""
        lines = () if self.exchange is None else self.exchange.lines.values()
        return max(self.expected, sum(line.cache_bytes + line.native.nbytes for line in lines))

    def line(self, name: str) -> Line:
        """A model's line, while it is in memory."""
        assert self.exchange is not None
        return self.exchange.lines[name]

    @property
    def exchange(self) -> Exchange | None:
        """Its lines, if they are in memory."""
        return None if self.conversation is None else self.conversation.exchange

    @property
    def storable(self) -> bool:
        """Whether it is in memory and may go to disk; a plain text has no messages, and may not."""
        return self.conversation is not None and bool(self.messages)

    def taken_over(self, ask: GenerationRequest, common: int) -> list[dict[str, Any]]:
        """The request's messages; contents that it shares with this, as this session read them.

        ``common`` counts shared keys of whole messages, of which the first is no message's.
        """
        messages = list(map(dict, ask.messages or ()))
        for own, given in zip(self.messages[: max(0, common - 1)], messages, strict=False):
            given["content"] = own.get("content")  # its volatile lines are those of before
        return messages


@dataclass(frozen=True)
class Found:
    """The session to go on with, how many whole messages it shares, and whether a copy goes on."""

    session: Session
    common: int
    apart: bool


def find(sessions: Iterable[Session], keys: Sequence[Key]) -> Found | None:
    """The session that shares the longest beginning with a request; None: a new one.

    What shares nothing but a short head (tools) has nothing to give. Among equals one in memory
    is preferred, then an idle one, then the one used last. A copy goes on where it is busy, or
    where the request leaves more of it out than a last exchange of a usual length: then
    another client is likely to go on with that.
    """
    best: tuple[tuple[int, int, bool, bool, float], Session] | None = None
    for session in sessions:
        whole, parts = shared(session.keys, keys)
        gives = whole > 1 or parts or (whole and len(keys[0]) > 1)
        rank = whole, parts, session.exchange is not None, not session.busy, session.used
        if gives and (best is None or rank > best[0]):
            best = rank, session
    if best is None:
        return None
    (common, parts, _, idle, _), session = best
    out = session.keys[common:]
    lost = sum(len(key) - 1 for key in out) - parts
    apart = not idle or len(out) > REDONE or lost > REDONE_PARTS
    return Found(session, common, apart)
