"""Which conversation a request goes on with: found by its messages, since clients name none.

Clients send the whole history with every request. A session knows the keys of the messages that it
has read and written; the one that shares the longest beginning with a request is gone on with. A
long message that begins like another one (a document, and another question about it) counts by its
parts; so does a plain text, by its tokens. What really need not be read anew is decided token by
token, by its lines.
"""

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.messages import meaning
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.serving.clock import now
from kvlingo_mlx.serving.messages import GenerationRequest, Message

PART, PART_TOKENS = 1000, 16  # characters of a message's parts, and tokens of a plain text's
# A request that leaves out no more than so many last messages, and parts of them, goes on with the
# same session.
REDONE, REDONE_PARTS = 2, 3
SAVED: Future[None] = Future()  # of what was found on disk
SAVED.set_result(None)
# How lines of system prompts begin that agents change with every request or model. They do not
# count when histories are compared.
VOLATILE = (
    "x-anthropic-billing-header:",
    "You are powered by the model",
    *("Model:", "Provider:", "Platform:"),  # Hermes's
)
BEFORE_LINES = " \t-*"  # white space and marks of lists, before a volatile line
# Of a whole message, of its reasoning ("" for none), and of its beginnings, each one part longer.
Key = tuple[str, ...]


class Keys:
    """Makes the keys by which messages are compared: of all that a template may render of them.

    Args:
        volatile: How the lines of system prompts begin that do not count; None: ``VOLATILE``.
        verbatim: Whether conversations go on from their tokens, whatever their tools are now.
    """

    def __init__(self, volatile: Sequence[str] | None = None, verbatim: bool = False) -> None:
        self._volatile = VOLATILE if volatile is None else tuple(volatile)
        self._verbatim = verbatim

    def of(self, ask: GenerationRequest) -> list[Key]:
        """The keys of what stands before the messages, and of each message."""
        tools = _json(ask.tools)  # switches of the template mostly change a prompt's end
        head = _digest(_json([tools, sorted(ask.template.items()) if self._verbatim else ""]))
        parts = () if self._verbatim else _beginnings("tools", tools)
        return [(head, "", *parts), *map(self.message, ask.messages or ())]

    def message(self, message: Message) -> Key:
        """A message's key; of an answer counts what it means."""
        whole = _digest(meaning({**message, "content": self._lasting(message)}))
        thought = str(message.get("reasoning_content") or "").strip()
        parts = _beginnings(str(message.get("role")), str(message.get("content") or ""))
        return (whole, _digest(thought) if thought else "", *parts)

    def _lasting(self, message: Message) -> str:
        """A message's content without its volatile lines, which only system prompts have."""
        content = str(message.get("content") or "")
        if message.get("role") != "system":
            return content
        lines = content.split("\n")
        return "\n".join(
            line for line in lines if not line.lstrip(BEFORE_LINES).startswith(self._volatile)
        )

    def taken_over(self, read: Sequence[Message], asked: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages that are asked, with the volatile lines with which they were ``read``."""
        messages = list(map(dict, asked))
        for own, given in zip(read, messages, strict=False):
            if self.message(own)[0] != self.message(given)[0]:
                break
            if given.get("role") == "system":
                given["content"] = own["content"]
        return messages


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
    return [(f"text {tokenizer}", ""), (whole, "", *parts)]


def shared(one: Sequence[Key], other: Sequence[Key]) -> tuple[int, int]:
    """The number of leading messages that two lists share, and of parts of the next message.

    Clients may leave out an answer's reasoning; another one makes it another answer.
    """
    whole = 0
    for a, b in zip(one, other, strict=False):
        if a[0] != b[0]:
            return whole, common_prefix(a[2:], b[2:])
        if a[1] != b[1] and a[1] and b[1]:
            break
        whole += 1
    return whole, 0


@dataclass(eq=False)
class Session:
    """A conversation that is kept, in memory or on disk."""

    # Of all messages that it has read, or begun to read, and written; none: nobody finds it
    keys: list[Key] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)  # as they were read
    conversation: Conversation | None = None  # None while on disk alone
    folder: Path | None = None  # where it was saved last
    busy: bool = False  # an answer is being written
    expected: int = 0  # bytes that its lines will take at least, meanwhile
    ending: bool = False  # that answer is complete, and other lines are following it
    pinned: bool = False  # it stays in memory
    used: float = field(default_factory=now)  # last, in seconds since the epoch
    saved: Future[None] | None = None  # the writing of it as it is now, once that has begun

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

    def held(self, names: Collection[str], count: int) -> int:
        """About how many of its first ``count`` keys are of what one of some models holds.

        What is on disk is not looked at, and counts.
        """
        if self.exchange is None:
            return count
        lines = (self.exchange.lines[name] for name in names if name in self.exchange.lines)
        return min(count, max(map(self._held, lines), default=0))

    def _held(self, line: Line) -> int:
        """The keys up to the last answer that a line has reached, by how its model last read."""
        assert self.conversation is not None
        known = self.conversation.transcript.readings.get(line.model.tokenizer_fingerprint)
        if known is None:  # a plain text, or its first prompt is being read
            return len(self.keys) if len(line) else 0
        begins = itertools.accumulate((len(s.tokens) for s in known.segments), initial=0)
        reached = (
            s.held
            for s, begin in zip(known.segments, begins, strict=False)
            if s.held and begin <= len(line)
        )
        return max(reached, default=0) + 1 if len(line) else 0


@dataclass(frozen=True)
class Found:
    """The session to go on with, how many whole messages it shares, and whether a copy goes on."""

    session: Session
    common: int
    apart: bool


def find(
    sessions: Iterable[Session], keys: Sequence[Key], name: str, sources: Collection[str]
) -> Found | None:
    """The session with which a request has most in common for the model ``name``; None: a new one.

    What neither that model nor one of ``sources``, from which it can take over, holds is of no
    use to it. What shares nothing but a short head (tools) has nothing to give. Among equals the
    one of which the model itself holds most is preferred, then one in memory, then an idle one,
    then the one used last. A copy goes on where it is busy, or where the request leaves more of it
    out than a last exchange of a usual length: then another client is likely to go on with that.
    """
    best: tuple[tuple[Any, ...], Session] | None = None
    each = ((*shared(session.keys, keys), session) for session in sessions)
    for whole, parts, session in sorted(each, key=lambda found: found[:2], reverse=True):
        if best is not None and whole < best[0][0]:
            break  # nor do those that follow share as much as is held of the best one
        if whole > 1 or parts or (whole and len(keys[0]) > 2):
            own, held = session.held([name], whole), session.held([name, *sources], whole)
            there = own, session.exchange is not None, not session.busy, session.used
            rank = held, whole, parts, *there
            if best is None or rank > best[0]:
                best = rank, session
    if best is None:
        return None
    (_, common, parts, *_), session = best
    out = session.keys[common:]
    lost = sum(len(key) - 2 for key in out) - parts
    apart = session.busy or len(out) > REDONE or lost > REDONE_PARTS
    return Found(session, common, apart)
