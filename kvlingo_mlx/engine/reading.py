"""A conversation in the tokens of one tokenizer: what its models read, and what they wrote.

A reading is a list of segments. A model may spell a text in other tokens than its tokenizer would,
so the tokens that it wrote are kept as they are. Models of another tokenizer take over the
messages' contents, whose places in the text a reading knows as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvlingo_mlx.engine.messages import meaning, same_answer
from kvlingo_mlx.models.prompts import Message
from kvlingo_mlx.tokenization import renderings
from kvlingo_mlx.tokenization.alignment import NO_END, Cuts, Span

READ = "read"  # rendered by the template, cut by the tokenizer
TOLD = "told"  # a part of an answer that a model of another tokenizer wrote
WROTE = "wrote"  # a part of an answer, in the tokens of the model that wrote it
SPELLED = 12  # the most characters in which JSON spells one
MARK, SPACE = "\u2581", "\u0120"  # how SentencePiece's and byte-level tokens spell a space


@dataclass(eq=False)
class Segment:
    """Text that was read or written in one go, its tokens, and what it is."""

    text: str
    tokens: list[int]
    kind: str = READ
    held: int | None = None  # the number of messages up to its end, if an answer ends there
    # (T,) the character of the segment at which each token ends; None until it is needed
    ends: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """A conversation as the models of one tokenizer read and wrote it."""

    tokenizer: Any
    segments: tuple[Segment, ...] = ()
    # the characters of each part of the messages' texts, as ``renderings.message_parts`` lists
    # them; None for a part that the template altered or dropped. Empty where no other tokenizer
    # needs them
    asked: tuple[Span | None, ...] = ()
    messages: tuple[Message, ...] = ()  # the messages that it holds
    # a prompt as the template renders it, where it is one; answers may be written otherwise
    rendered: str = ""
    answer: int | None = None  # the character at which the answer in progress begins, or None
    said: str = ""  # the text of that answer so far

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)

    @cached_property
    def tokens(self) -> list[int]:
        """All T tokens."""
        return [token for segment in self.segments for token in segment.tokens]

    @cached_property
    def ends(self) -> np.ndarray:
        """(T,) the character at which each token ends; ``NO_END`` for tokens without an end."""
        ends, at = [np.zeros(0, np.int64)], 0
        for number, segment in enumerate(self.segments):
            if segment.ends is None:
                segment.ends = _ends(self.tokenizer, self.segments[:number], segment)
            ends.append(np.where(segment.ends == NO_END, NO_END, segment.ends + at))
            at += len(segment.text)
        return np.concatenate(ends)

    @property
    def contents(self) -> tuple[Span | None, ...]:
        """The characters of each part of the contents, the answer's included."""
        if self.answer is None:
            return self.asked
        return (*self.asked, *moved(renderings.content_parts(self.said), self.answer))

    def rendering(self, length: int) -> renderings.Rendering:
        """The rendering of the first ``length`` tokens."""
        ids = np.array(self.tokens[:length], np.int64)
        return renderings.Rendering(self.text, ids, self.ends[:length], self.contents)

    def place(self, character: int) -> int | None:
        """The number of tokens up to a character of the last segment; None if none ends there."""
        last = self.segments[-1]
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
        segments, said = self.segments, self.said
        chosen = list(ids[:-1] if stopped else ids)
        if self.answer is not None and segments[-1].kind == WROTE:  # it goes on in the same tokens
            said = said[: len(said) - min(len(said), len(segments[-1].text))]
            chosen, segments = [*segments[-1].tokens, *chosen], segments[:-1]
        context = segments[-1].tokens[-1:] if segments else []
        decode = self.tokenizer.decode
        text, before = decode([*context, *chosen]), decode(context) if context else ""
        text = text[len(before) :] if text.startswith(before) else decode(chosen)
        begin = sum(len(segment.text) for segment in segments)
        answer = self.answer
        if answer is None or answer >= begin:
            # A decoder drops a leading space as a mark, so streamed text begins without it.
            mark = int(text.startswith(" ") and not decode(chosen).startswith(" "))
            answer, said = begin + mark, text[mark:]
        else:
            said += text
        segments = (*segments, Segment(text, chosen, WROTE))
        if stopped:
            segments = (*segments, Segment(decode(list(ids[-1:])), list(ids[-1:]), WROTE))
        return replace(self, segments=segments, answer=answer, said=said)

    def told(self, said: str, gap: str) -> Reading:
        """This reading with more of the answer, written by a model of another tokenizer.

        Args:
            said: The answer so far, which begins with :attr:`said` and is longer.
            gap: The white space that the template puts between an answer's header and the answer;
                none where the answer has begun.
        """
        answer = len(self.text) + len(gap) if self.answer is None else self.answer
        return replace(self._with(gap + said[len(self.said) :], TOLD), answer=answer, said=said)

    def _with(self, text: str, kind: str) -> Reading:
        tokens, ends = _spelled(self.tokenizer, self.text, text)
        return replace(self, segments=(*self.segments, Segment(text, tokens, kind, ends=ends)))

    def booked(self, message: Message, *, located: bool) -> Reading:
        """This reading with the answer as ``message``, whose parts are ``located`` if need be."""
        asked = self.asked
        if located:
            begin = len(self.text) if self.answer is None else self.answer
            asked = (*asked, *_found(message, self.text, begin))
        messages, segments = (*self.messages, message), self.segments
        if segments and segments[-1].kind != READ:
            segments = (*segments[:-1], replace(segments[-1], held=len(messages)))
        return Reading(self.tokenizer, segments, asked, messages)

    def holding(self, count: int) -> Reading:
        """As much of this reading as ends with an answer, of its first ``count`` messages."""
        for number in range(len(self.segments), 0, -1):
            held = self.segments[number - 1].held
            if held is not None and held <= count:
                parts = sum(len(renderings.message_parts(m)) for m in self.messages[:held])
                messages = self.messages[:held]
                return Reading(self.tokenizer, self.segments[:number], self.asked[:parts], messages)
        return Reading(self.tokenizer)

    def agreeing(
        self,
        text: str,
        found: Sequence[Span | None],
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
    ) -> tuple[Reading, str, tuple[Span | None, ...]]:
        """As much of this reading as the rendered text of ``messages`` agrees with.

        Returns also the text, and its ``found`` parts. An answer that the template writes otherwise
        than its model did, with the same meaning, stands there as the model wrote it.
        """
        at, count = 0, 0
        for number, segment in enumerate(self.segments):
            after = self.segments[number + 1 : number + 2]
            if segment.kind != READ and not self._same_answer(number, messages):
                break  # its text may begin another answer
            if not text.startswith(segment.text, at):
                stopped = bool(after) and after[0].kind == WROTE
                end = after[0].text if stopped else self.tokenizer.eos_token
                stop = text.find(end, at) if end and segment.kind == WROTE else -1
                if not 0 <= stop - at <= SPELLED * len(segment.text) + SPELLED:
                    break
                if not same_answer(self.tokenizer, segment.text, text[at:stop], tools):
                    break
                found = _replaced(found, text, (at, stop), segment.text)
                text = text[:at] + segment.text + text[stop:]
            at, count = at + len(segment.text), count + 1
        return Reading(self.tokenizer, self.segments[:count]), text, tuple(found)

    def _same_answer(self, number: int, messages: Sequence[Message]) -> bool:
        """Whether the answer that a segment belongs to is among other messages at its place."""
        later = itertools.islice(self.segments, number, None)
        held = next((each.held for each in later if each.held), len(self.messages))
        ours, theirs = self.messages[held - 1 : held], messages[held - 1 : held]
        return list(map(meaning, ours)) == list(map(meaning, theirs))

    # ---- shrinking ------------------------------------------------------------------------

    def before_answer(self) -> Reading:
        """This reading up to the header of its last answer."""
        count = len(self.segments)
        while count and self.segments[count - 1].kind != READ:
            count -= 1
        parts = renderings.message_parts(self.messages[-1]) if self.asked else ()
        kept, asked = self.segments[:count], self.asked[: len(self.asked) - len(parts)]
        return replace(self, segments=kept, asked=asked, messages=self.messages[:-1])

    def shortened(self, content: str, left: str, message: Message, *, located: bool) -> Reading:
        """This reading with its last answer, written as ``content``, shortened to ``left``.

        The tokens that end before the cut are kept, and the rest is cut into tokens anew.
        ``message`` is the shorter answer.
        """
        prompt = self.before_answer()
        segments = self.segments[len(prompt.segments) :]
        text = "".join(segment.text for segment in segments)
        gap = text[:1] if text.startswith(" ") and not content.startswith(" ") else ""
        ids = [token for segment in segments for token in segment.tokens]
        kept, done = _whole_tokens(self.tokenizer, ids, content, len(left))
        rest: list[int] = []
        if done < len(left):
            rest, _ = _spelled(self.tokenizer, prompt.text + gap + left[:done], left[done:])
        if tokens := [*kept, *rest]:
            segment = Segment(gap + left, tokens, segments[0].kind)
            answer = len(prompt.text) + len(gap)
            prompt = replace(prompt, segments=(*prompt.segments, segment), answer=answer, said=left)
        return prompt.booked(message, located=located)


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
    for key in renderings.TEXTS:
        for start, stop in renderings.content_parts(message.get(key)):
            part = message[key][start:stop]
            place = text.find(part, at)
            found.append((place, place + len(part)) if place >= 0 else None)
            at = place + len(part) if place >= 0 else at
    return found


def _spelled(tokenizer: Any, before: str, text: str) -> tuple[list[int], np.ndarray | None]:
    """Ids and ends of a text, as the tokenizer cuts it after the text ``before`` it."""
    try:
        alone = renderings.bare(tokenizer, text)
    except ValueError:  # this tokenizer gives no offsets
        return list(tokenizer.encode(text, add_special_tokens=False)), None
    first = tokenizer.convert_ids_to_tokens(int(alone.ids[0])) if len(alone.ids) else ""
    spaced = str(first).startswith(MARK) or (str(first)[:1] == SPACE and text[:1] != " ")
    if not before or not spaced:
        return alone.ids.tolist(), alone.ends
    # Alone, the text may get a space in front that it does not get in its place.
    whole = renderings.bare(tokenizer, before + text)
    cuts = Cuts.of(whole.ends)
    found = int(np.searchsorted(cuts.offsets, len(before)))
    if found == len(cuts.offsets) or cuts.offsets[found] != len(before):
        return alone.ids.tolist(), alone.ends
    count = int(cuts.fewest[found])
    ends = np.where(whole.ends == NO_END, NO_END, whole.ends - len(before))[count:]
    return whole.ids[count:].tolist(), ends


def _ends(tokenizer: Any, before: Sequence[Segment], segment: Segment) -> np.ndarray:
    """The characters of a segment at which its tokens end, as they are decoded one by one."""
    if (
        segment.kind != WROTE
        and (alone := renderings.bare(tokenizer, segment.text)).ids.tolist() == segment.tokens
    ):
        return alone.ends
    context = before[-1].tokens[-1:] if before else []
    _, ends = renderings.written(tokenizer, [*context, *segment.tokens])
    if context and ends[0] == NO_END:  # it shares a character with the segment
        return renderings.written(tokenizer, segment.tokens)[1]
    begin = int(ends[0]) if context else 0
    return np.where(ends == NO_END, NO_END, ends - begin)[len(context) :]


def _whole_tokens(
    tokenizer: Any, ids: Sequence[int], content: str, characters: int
) -> tuple[list[int], int]:
    """The tokens of an answer that end within its first ``characters``, and their length.

    The length is in characters. There are no such tokens if the tokens do not spell ``content``.
    """
    text, ends = renderings.written(tokenizer, ids)
    # A decoder drops a leading space as a mark, so streamed text begins without it.
    mark = int(text.startswith(" ") and not content.startswith(" "))
    if not text.startswith(content, mark):
        return [], 0
    ended = [i for i, end in enumerate(ends) if end != NO_END and mark <= end <= characters + mark]
    if not ended:
        return [], 0
    return list(ids[: ended[-1] + 1]), int(ends[ended[-1]]) - mark
