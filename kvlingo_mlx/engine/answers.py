"""Divide an answer's text into content, reasoning and tool calls, and end it at a stop text.

The marks are those that mlx-lm knows for a tokenizer, and its own parsers read the calls. Unlike in
its state machine, a call within the reasoning leads back to the reasoning, and what begins like a
call but is none is text: its mark is told, and what stands behind it is divided again.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from kvlingo_mlx.engine.calls import CallForm, ToolCall, bare_form, calls_in, form_of
from kvlingo_mlx.tokenization.probes import one_of

# States, with mlx-lm's names for them.
CONTENT, REASONING, CALL = "normal", "reasoning", "tool"
MARK = "mark"  # a piece that is told to nobody
MISSES = 32  # marks that began no call, after which they begin none: each costs a second look
Response = TypeVar("Response")


@dataclass(frozen=True)
class Parts:
    """The parts of a text.

    Attributes:
        content: The text for the user.
        reasoning: The text between the tokenizer's think marks.
        tool_calls: The calls in OpenAI's form: ``{"id", "type": "function", "function":
            {"name", "arguments"}}``. The arguments are the JSON text of an object.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Piece(NamedTuple):
    """A piece of an answer as it was written; all pieces together are the whole answer."""

    kind: str
    text: str
    apart: bool = False  # whether it belongs to the reasoning or a call, where no stop text counts
    calls: Sequence[ToolCall] = ()


def _edges(tokenizer: Any, form: CallForm) -> dict[str, dict[str, str | None]]:
    """By state, the marks that end it, and the state after each; None: nothing is told any more."""
    edges: dict[str, dict[str, str | None]] = {CONTENT: {}, REASONING: {}}
    if tokenizer.has_thinking:
        edges[CONTENT][tokenizer.think_start] = REASONING
        edges[REASONING][tokenizer.think_end] = CONTENT
    formats = tokenizer.response_transitions
    edges[REASONING] |= {**form.marks, **dict.fromkeys(form.starts, CALL)}
    if not any(state == CALL for marks in formats.values() for _, state in marks):
        edges[CONTENT] |= {**form.marks, **dict.fromkeys(form.starts, CALL)}
    edges[CONTENT] |= dict.fromkeys(tokenizer.structural_markers, CONTENT)
    for state, marks in formats.items():
        edges.setdefault(state, {}).update(marks)
    return edges


def _begun(text: str, marks: Sequence[str]) -> int:
    """The number of characters at a text's end that can be the beginning of a mark."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next(
        (n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


class Division:
    """Divides a text that comes in pieces of any length.

    Args:
        tokenizer: Its marks count; those of another one from :meth:`written_by` on.
        state: The state in which the text begins.
        tools: The tools that the prompt announces; some parsers read argument types from them.
    """

    def __init__(
        self, tokenizer: Any, state: str | None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._state, self._tools, self._held, self._misses = state, tools, "", 0
        self._outer, self._start, self._from = state, "", 0  # of a call: around, mark, place
        self._said = False  # whether there has been any content
        self.written_by(tokenizer)

    def written_by(self, tokenizer: Any) -> None:
        """Go on with the marks of another model's tokenizer."""
        self._marked, self._bare = form_of(tokenizer), bare_form(tokenizer, self._tools)
        self._edges = _edges(tokenizer, self._marked)

    @property
    def _form(self) -> CallForm:
        """The form of the call that is being written."""
        return self._marked if self._start or self._bare is None else self._bare

    @property
    def apart(self) -> bool:
        """Whether the text stands in the reasoning now."""
        return (self._outer if self._state == CALL else self._state) == REASONING

    def take(self, text: str, *, ended: bool) -> Iterator[Piece]:
        """What is known of the text now; all of it if it has ``ended``."""
        self._held += text
        while (found := self._next(ended)) is not None:
            if found.text:
                yield found

    def _marks(self) -> dict[str, str | None]:
        state = self._outer if self._state == CALL else self._state
        marks = self._edges.get(state or "", {})
        if self._misses >= MISSES:
            return {mark: state for mark, state in marks.items() if state != CALL}
        return marks

    def _next(self, ended: bool) -> Piece | None:
        """The next piece, perhaps an empty one; None if more must come first."""
        if self._state == CALL:
            return self._called(ended)
        begun = self._held.strip() if self._state == CONTENT and not self._said else ""
        if begun and self._bare is not None and not self._bare.hopeless(begun):
            return self._begin_call("")
        marks = self._marks()
        if (found := one_of(marks).search(self._held)) is None:
            stop = len(self._held) - (0 if ended else _begun(self._held, [*marks]))
            return self._text(stop) if stop else None
        if found.start():
            return self._text(found.start())
        mark, apart = found.group(), self.apart
        self._held = self._held[len(mark) :]
        if marks[mark] == CALL:
            return self._begin_call(mark)
        self._state = marks[mark]
        return Piece(MARK, mark, apart)

    def _begin_call(self, mark: str) -> Piece:
        self._outer, self._start, self._from, self._state = self._state, mark, 0, CALL
        return Piece(MARK, "")

    def _text(self, stop: int) -> Piece:
        """The first ``stop`` characters that are held, as text of this state."""
        told, self._held = self._held[:stop], self._held[stop:]
        self._said |= self._state == CONTENT and bool(told.strip())
        kind = self._state if self._state in (CONTENT, REASONING) else MARK
        return Piece(kind, told, self.apart)

    def _called(self, ended: bool) -> Piece | None:
        """The call that is being written, once its end is there; its mark as text if it is none."""
        end, marks = self._form.end, [*self._marks()]
        while True:
            found = one_of([end, *marks]).search(self._held, self._from)
            if found is None:
                break
            if not self._form.outside(self._held[: found.start()])[1]:
                stop = found.end() if found.group() == end else found.start()
                return self._whole(found.start(), stop)
            self._from = found.end()  # it is part of an argument
        if ended:
            return self._whole(len(self._held), len(self._held))
        if self._form.hopeless(self._held):
            return self._missed()
        waits = _begun(self._held, [end, *marks])
        self._from = max(self._from, len(self._held) - waits)
        return None

    def _whole(self, until: int, stop: int) -> Piece:
        """The call whose text goes ``until`` there, and whose mark ends at ``stop``."""
        cut = until == stop and self._form.closed
        calls = [] if cut else calls_in(self._form, self._held[:until], self._tools)
        if not calls:
            return self._missed()
        text, self._held = self._start + self._held[:stop], self._held[stop:]
        self._state = REASONING if self._outer == REASONING else CONTENT
        return Piece(CALL, text, True, calls)

    def _missed(self) -> Piece:
        """The mark that began no call, as text; what stands behind it is looked at again."""
        self._misses, self._state = self._misses + 1, self._outer
        # What may yet be the mark of a reasoning is not content.
        self._said |= bool(self._start) or not self._form.hopeless(self._held)
        return Piece(REASONING if self.apart else CONTENT, self._start, self.apart)


class AnswerReader:
    """Reads an answer as it comes, and holds back text that may belong to a stop text or a mark.

    Attributes:
        calls: The tool calls that have been given out.

    Args:
        tokenizer: The tokenizer of the model that writes the answer.
        opened: Whether the prompt opened a reasoning trace, in which the answer begins.
        stop: Texts before which the answer ends. In the reasoning and in a call, which are not part
            of it, they count for nothing.
        tools: The tools that the prompt announces; some parsers read argument types from them.
        divides: Whether the text has parts; if not, it is content, marks and all.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        opened: bool = False,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        divides: bool = True,
    ) -> None:
        self._again = functools.partial(
            AnswerReader, opened=opened, stop=stop, tools=tools, divides=divides
        )
        self._stop, self._divides, self._tokenizer = tuple(stop), divides, tokenizer
        state = tokenizer.response_initial_state or (REASONING if opened else CONTENT)
        self._division = Division(tokenizer, state, tools)
        self._held = list[Piece]()
        self._reasoned, self._answered = False, False
        self.calls: list[ToolCall] = []

    def written_by(self, tokenizer: Any) -> None:
        """Go on with the marks of another model's tokenizer."""
        self._tokenizer = tokenizer
        self._division.written_by(tokenizer)

    def take(self, response: Response) -> Response:
        """The next response, cut at a stop text, with its text divided into parts."""
        last: Any = response
        pieces, stopped = self._read(last.text, ended=last.finish_reason is not None)
        text = "".join(piece.text for piece in pieces) if self._stop else last.text
        reason = "stop" if stopped is not None else last.finish_reason
        parts = self._parts(pieces)
        return replace(last, text=text, finish_reason=reason, stop_text=stopped, **vars(parts))

    def whole(self, text: str) -> Parts:
        """The parts of a whole answer."""
        return self._parts(self._read(text, ended=True)[0])

    def stopped_at(self, text: str) -> int | None:
        """The number of characters of a whole answer before the stop text that ends it."""
        pieces, stopped = self._again(self._tokenizer)._read(text, ended=True)
        return None if stopped is None else sum(len(piece.text) for piece in pieces)

    def _read(self, text: str, *, ended: bool) -> tuple[list[Piece], str | None]:
        """The pieces that can be given out now, and the stop text that has come, or None."""
        whole = [Piece(CONTENT, text)]
        more = self._division.take(text, ended=ended) if self._divides else whole
        pieces, self._held = [*self._held, *more], []
        if not self._stop:
            return pieces, None
        text = "".join(piece.text for piece in pieces)
        apart = [piece.apart for piece in pieces for _ in piece.text]
        apart.append(self._divides and self._division.apart)
        if (found := _first_stop(text, self._stop, apart)) is not None:
            return _up_to(pieces, found), max(s for s in self._stop if text.startswith(s, found))
        told = len(text) - (0 if ended else _begun(text, self._stop))
        while pieces and sum(len(piece.text) for piece in pieces) > told:
            self._held.insert(0, pieces.pop())
        return pieces, None

    def _parts(self, pieces: Sequence[Piece]) -> Parts:
        """What the pieces are for the user."""
        self._reasoned |= any(piece.kind == REASONING for piece in pieces)
        content, reasoning = (
            "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in (CONTENT, REASONING)
        )
        calls = [call for piece in pieces for call in piece.calls]
        if self._reasoned and not self._answered:
            content = content.lstrip()  # the empty lines that end the reasoning
        self._answered |= bool(content)
        self.calls += calls
        return Parts(content, reasoning, tuple(calls))


def _first_stop(text: str, stop: Sequence[str], apart: Sequence[bool]) -> int | None:
    """The start of the stop text that is complete first; the longest if several end there.

    ``apart`` says of each character, and of what follows, whether it is not part of the answer.
    """
    found = [
        (place + len(s), place)
        for s in stop
        for place in range(len(text) - len(s) + 1)
        if text.startswith(s, place) and not (apart[place] and apart[place + len(s)])
    ]
    return min(found)[1] if found else None


def _up_to(pieces: Sequence[Piece], characters: int) -> list[Piece]:
    """The pieces of the first characters; a call is not cut."""
    kept = list[Piece]()
    for piece in pieces:
        if characters <= 0:
            break
        cut = len(piece.text) if piece.calls else characters
        kept.append(piece._replace(text=piece.text[:cut]))
        characters -= len(piece.text)
    return kept


def divided(
    tokenizer: Any,
    text: str,
    *,
    opened: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Parts:
    """The parts of a whole answer; ``opened`` says whether its prompt opened a reasoning trace."""
    return AnswerReader(tokenizer, opened=opened, tools=tools).whole(text)
