"""A conversation in the tokens of one tokenizer: what its models read, and what they wrote.

A reading is a list of pieces. A model may spell a text in other tokens than its tokenizer would, so
the tokens that it wrote are kept as they are. Models of another tokenizer take over the messages'
contents, whose places in the text a reading knows as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvlingo_mlx.engine.messages import meaning, same_answer
from kvlingo_mlx.models.prompts import Message
from kvlingo_mlx.tokenization.alignment import NO_END, Cuts, Span
from kvlingo_mlx.tokenization.renderings import (
    TEXTS,
    Rendering,
    bare,
    content_parts,
    message_parts,
    written,
)

READ = "read"  # rendered by the template, cut by the tokenizer
TOLD = "told"  # a part of an answer that a model of another tokenizer wrote
WROTE = "wrote"  # a part of an answer, in the tokens of the model that wrote it
MARK, SPACE = "\u2581", "\u0120"  # how SentencePiece's and byte-level tokens spell a space


@dataclass(eq=False)
class Segment:
    """Text that was read or written in one go, its tokens, and what it is.

    Attributes:
        held: The number of messages up to its end, if an answer ends there.
        ends: (T,) the character of the piece at which each token ends; None until it is needed.
    """

    text: str
    tokens: list[int]
    kind: str = READ
    held: int | None = None
    ends: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """A conversation as the models of one tokenizer read and wrote it.

    Attributes:
        asked: The characters of each part of the messages' texts, as ``renderings.message_parts``
            lists them; None for a part that the template altered or dropped. Empty where no other
            tokenizer needs them.
        messages: The messages that it holds.
        rendered: A prompt as the template renders it, where it is one; answers may be written
            otherwise.
        answer: The character at which the answer in progress begins, or None.
        said: The text of that answer so far.
    """

    tokenizer: Any
    pieces: tuple[Segment, ...] = ()
    asked: tuple[Span | None, ...] = ()
    messages: tuple[Message, ...] = ()
    rendered: str = ""
    answer: int | None = None
    said: str = ""

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return "".join(piece.text for piece in self.pieces)

    @cached_property
    def tokens(self) -> list[int]:
        """All T tokens."""
        return [token for piece in self.pieces for token in piece.tokens]

    @cached_property
    def ends(self) -> np.ndarray:
        """(T,) the character at which each token ends; ``NO_END`` for tokens without an end."""
        ends, at = [np.zeros(0, np.int64)], 0
        for number, piece in enumerate(self.pieces):
            if piece.ends is None:
                piece.ends = _ends(self.tokenizer, self.pieces[:number], piece)
            ends.append(np.where(piece.ends == NO_END, NO_END, piece.ends + at))
            at += len(piece.text)
        return np.concatenate(ends)

    @property
    def contents(self) -> tuple[Span | None, ...]:
        """The characters of each part of the contents, the answer's included."""
        if self.answer is None:
            return self.asked
        return (*self.asked, *moved(content_parts(self.said), self.answer))

    def rendering(self, length: int) -> Rendering:
        """The rendering of the first ``length`` tokens."""
        ids = np.array(self.tokens[:length], np.int64)
        return Rendering(self.text, ids, self.ends[:length], self.contents)

    def place(self, character: int) -> int | None:
        """The number of tokens up to a character of the last piece; None if none ends there."""
        last = self.pieces[-1]
        at = character - (len(self.text) - len(last.text))
        ended = [0] if at == 0 else []
        if last.ends is not None:
            ended += (np.flatnonzero(last.ends == at) + 1).tolist()
        return len(self.tokens) - len(last.tokens) + ended[-1] if ended else None

    # ---- growing --------------------------------------------------------------------------

    def read(self, text: str) -> Reading:
        """This reading with further text, as its tokenizer cuts it."""
        return self._with(text, READ) if text else self

    def wrote(self, ids: Sequence[int], stops: Collection[int] = ()) -> Reading:
        """This reading with tokens of an answer that a model has chosen, a stop token included."""
        stopped = bool(ids) and ids[-1] in stops
        pieces, said = self.pieces, self.said
        chosen = list(ids[:-1] if stopped else ids)
        if self.answer is not None and pieces[-1].kind == WROTE:  # it goes on in the same tokens
            said = said[: len(said) - min(len(said), len(pieces[-1].text))]
            chosen, pieces = [*pieces[-1].tokens, *chosen], pieces[:-1]
        context = pieces[-1].tokens[-1:] if pieces else []
        decode = self.tokenizer.decode
        text, before = decode([*context, *chosen]), decode(context) if context else ""
        text = text[len(before) :] if text.startswith(before) else decode(chosen)
        begin = sum(len(piece.text) for piece in pieces)
        answer = self.answer
        if answer is None or answer >= begin:
            # A decoder drops a leading space as a mark, so streamed text begins without it.
            mark = int(text.startswith(" ") and not decode(chosen).startswith(" "))
            answer, said = begin + mark, text[mark:]
        else:
            said += text
        pieces = (*pieces, Segment(text, chosen, WROTE))
        if stopped:
            pieces = (*pieces, Segment(decode(list(ids[-1:])), list(ids[-1:]), WROTE))
        return replace(self, pieces=pieces, answer=answer, said=said)

    def told(self, said: str, gap: str) -> Reading:
        """This reading with more of the answer, written by a model of another tokenizer.

        Args:
            said: The answer so far, which begins with :attr:`said`.
            gap: The white space that the template puts between an answer's header and the answer.
        """
        if said == self.said:
            return self
        first = self.answer is None
        answer = len(self.text) + len(gap) if self.answer is None else self.answer
        text = (gap if first else "") + said[len(self.said) :]
        return replace(self._with(text, TOLD), answer=answer, said=said)

    def _with(self, text: str, kind: str) -> Reading:
        tokens, ends = _spelled(self.tokenizer, self.text, text)
        return replace(self, pieces=(*self.pieces, Segment(text, tokens, kind, ends=ends)))

    def booked(self, message: Message, *, located: bool) -> Reading:
        """This reading with the answer as ``message``, whose parts are ``located`` if need be."""
        asked = self.asked
        if located:
            begin = len(self.text) if self.answer is None else self.answer
            asked = (*asked, *_found(message, self.text, begin))
        messages, pieces = (*self.messages, message), self.pieces
        if pieces and pieces[-1].kind != READ:
            pieces = (*pieces[:-1], replace(pieces[-1], held=len(messages)))
        return Reading(self.tokenizer, pieces, asked, messages)

    def holding(self, count: int) -> Reading:
        """As much of this reading as ends with an answer, of its first ``count`` messages."""
        for number in range(len(self.pieces), 0, -1):
            held = self.pieces[number - 1].held
            if held is not None and held <= count:
                parts = sum(len(message_parts(m)) for m in self.messages[:held])
                messages = self.messages[:held]
                return Reading(self.tokenizer, self.pieces[:number], self.asked[:parts], messages)
        return Reading(self.tokenizer)

    def agreeing(
        self, text: str, found: Sequence[Span | None], messages: Sequence[Message]
    ) -> tuple[Reading, str, tuple[Span | None, ...]]:
        """As much of this reading as the rendered text of ``messages`` agrees with.

        Returns also the text, and its ``found`` parts. An answer that the template writes otherwise
        than its model did, with the same meaning, stands there as the model wrote it.
        """
        at, count = 0, 0
        for number, piece in enumerate(self.pieces):
            after = self.pieces[number + 1 : number + 2]
            held = next((p.held for p in self.pieces[number:] if p.held), len(self.messages))
            same = self.messages[held - 1 : held], messages[held - 1 : held]
            if piece.kind != READ and list(map(meaning, same[0])) != list(map(meaning, same[1])):
                break  # its text may begin another answer
            if not text.startswith(piece.text, at):
                stopped = bool(after) and after[0].kind == WROTE
                end = after[0].text if stopped else self.tokenizer.eos_token
                stop = text.find(end, at) if end and piece.kind == WROTE else -1
                if stop < 0 or not same_answer(self.tokenizer, piece.text, text[at:stop]):
                    break
                found = _replaced(found, text, (at, stop), piece.text)
                text = text[:at] + piece.text + text[stop:]
            at, count = at + len(piece.text), count + 1
        return Reading(self.tokenizer, self.pieces[:count]), text, tuple(found)

    # ---- shrinking ------------------------------------------------------------------------

    def before_answer(self) -> Reading:
        """This reading up to the header of its last answer."""
        count = len(self.pieces)
        while count and self.pieces[count - 1].kind != READ:
            count -= 1
        parts = message_parts(self.messages[-1]) if self.asked else ()
        asked = self.asked[: len(self.asked) - len(parts)]
        return replace(self, pieces=self.pieces[:count], asked=asked, messages=self.messages[:-1])

    def shortened(self, content: str, left: str, message: Message, *, located: bool) -> Reading:
        """This reading with its last answer, written as ``content``, shortened to ``left``.

        The tokens that end before the cut are kept, and the rest is cut into tokens anew.
        ``message`` is the shorter answer.
        """
        prompt = self.before_answer()
        pieces = self.pieces[len(prompt.pieces) :]
        text = "".join(piece.text for piece in pieces)
        gap = text[:1] if text.startswith(" ") and not content.startswith(" ") else ""
        ids = [token for piece in pieces for token in piece.tokens]
        kept, done = _whole_tokens(self.tokenizer, ids, content, len(left))
        rest: list[int] = []
        if done < len(left):
            rest, _ = _spelled(self.tokenizer, prompt.text + gap + left[:done], left[done:])
        if tokens := [*kept, *rest]:
            piece = Segment(gap + left, tokens, pieces[0].kind)
            answer = len(prompt.text) + len(gap)
            prompt = replace(prompt, pieces=(*prompt.pieces, piece), answer=answer, said=left)
        return prompt.booked(message, located=located)

    def cut(self, character: int) -> Reading:
        """This reading without the tokens that reach beyond a character of its last piece."""
        cuts = Cuts.of(self.ends)
        kept = int(cuts.fewest[np.searchsorted(cuts.offsets, character, "right") - 1])
        last = self.pieces[-1]
        count = max(0, kept - (len(self.tokens) - len(last.tokens)))
        ends = None if last.ends is None else last.ends[:count]
        left = replace(last, tokens=last.tokens[:count], ends=ends)
        asked = tuple(c if c and c[1] <= character else None for c in self.asked)
        return replace(self, pieces=(*self.pieces[:-1], left), asked=asked)


def moved(spans: Sequence[Span | None], by: int) -> tuple[Span | None, ...]:
    """The spans, moved by ``by`` characters."""
    return tuple(span and (span[0] + by, span[1] + by) for span in spans)


def _replaced(
    found: Sequence[Span | None], text: str, block: Span, other: str
) -> list[Span | None]:
    """Where parts of a text stand once ``other`` stands in the place of a block of it."""
    start, stop = block
    moved_by = len(other) - (stop - start)
    made: list[Span | None] = []
    for span in found:
        if span is None or span[1] <= start:
            made.append(span)
        elif span[0] >= stop:
            made.append((span[0] + moved_by, span[1] + moved_by))
        else:
            place = other.find(text[slice(*span)])
            inside = (start + place, start + place + span[1] - span[0])
            made.append(inside if place >= 0 else None)
    return made


def _found(message: Message, text: str, at: int) -> list[Span | None]:
    """Where the parts of an answer stand in the text in which a model wrote it."""
    found: list[Span | None] = []
    for key in TEXTS:
        for start, stop in content_parts(message.get(key)):
            part = message[key][start:stop]
            place = text.find(part, at)
            found.append((place, place + len(part)) if place >= 0 else None)
            at = place + len(part) if place >= 0 else at
    return found


def _spelled(tokenizer: Any, before: str, text: str) -> tuple[list[int], np.ndarray | None]:
    """Ids and ends of a text, as the tokenizer cuts it after the text ``before`` it."""
    try:
        alone = bare(tokenizer, text)
    except ValueError:  # this tokenizer gives no offsets
        return list(tokenizer.encode(text, add_special_tokens=False)), None
    first = tokenizer.convert_ids_to_tokens(int(alone.ids[0])) if len(alone.ids) else ""
    spaced = str(first).startswith(MARK) or (str(first)[:1] == SPACE and text[:1] != " ")
    if not before or not spaced:
        return alone.ids.tolist(), alone.ends
    # Alone, the text may get a space in front that it does not get in its place.
    whole = bare(tokenizer, before + text)
    cuts = Cuts.of(whole.ends)
    found = int(np.searchsorted(cuts.offsets, len(before)))
    if found == len(cuts.offsets) or cuts.offsets[found] != len(before):
        return alone.ids.tolist(), alone.ends
    count = int(cuts.fewest[found])
    ends = np.where(whole.ends == NO_END, NO_END, whole.ends - len(before))[count:]
    return whole.ids[count:].tolist(), ends


def _ends(tokenizer: Any, before: Sequence[Segment], piece: Segment) -> np.ndarray:
    """The characters of a piece at which its tokens end, as they are decoded one by one."""
    if piece.kind != WROTE and (alone := bare(tokenizer, piece.text)).ids.tolist() == piece.tokens:
        return alone.ends
    context = before[-1].tokens[-1:] if before else []
    _, ends = written(tokenizer, [*context, *piece.tokens])
    if context and ends[0] == NO_END:  # it shares a character with the piece
        return written(tokenizer, piece.tokens)[1]
    begin = int(ends[0]) if context else 0
    return np.where(ends == NO_END, NO_END, ends - begin)[len(context) :]


def _whole_tokens(
    tokenizer: Any, ids: Sequence[int], content: str, characters: int
) -> tuple[list[int], int]:
    """The tokens of an answer that end within its first ``characters``, and their length.

    The length is in characters. There are no such tokens if the tokens do not spell ``content``.
    """
    text, ends = written(tokenizer, ids)
    # A decoder drops a leading space as a mark, so streamed text begins without it.
    mark = int(text.startswith(" ") and not content.startswith(" "))
    if not text.startswith(content, mark):
        return [], 0
    ended = [i for i, end in enumerate(ends) if end != NO_END and mark <= end <= characters + mark]
    if not ended:
        return [], 0
    return list(ids[: ended[-1] + 1]), int(ends[ended[-1]]) - mark
