"""A conversation in the tokens of one tokenizer, with the places of these tokens in its text.

Models of another tokenizer take over the messages' contents. A model may spell a text in other
tokens than its tokenizer would, so the tokens that a model wrote are kept as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.tokenization.alignment import NO_END, Cuts, Span
from kvlingo_mlx.tokenization.renderings import Rendering, bare, content_parts, written


@dataclass(frozen=True, eq=False)
class Reading:
    """A conversation as the models of one tokenizer read and wrote it.

    Attributes:
        text: The whole text.
        tokens: Its T tokens, including those that a model chose.
        ends: (T,) the character at which each token ends; ``NO_END`` for tokens without an end.
        asked: The characters of each part of the messages' contents; None for a part that the
            template altered or dropped.
        messages: The number of messages in this reading.
        boundaries: Lengths of ``tokens`` at which a prompt or an answer ended.
        answer: The character at which the answer in progress begins, or None.
        said: The text of that answer so far.
        own: The number of tokens before those that the model now writing has chosen.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ends: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    asked: tuple[Span | None, ...] = ()
    messages: int = 0
    boundaries: list[int] = field(default_factory=list)
    answer: int | None = None
    said: str = ""
    own: int = 0

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

    def end(self, length: int) -> int:
        """The character at which the first ``length`` tokens end."""
        return int(self.ends[length - 1]) if length else 0

    # ---- growing --------------------------------------------------------------------------

    def prompt(
        self, tokenizer: Any, text: str, contents: Sequence[Span | None], messages: int, kept: int
    ) -> Reading:
        """The reading of a prompt whose text begins with the first ``kept`` tokens."""
        tokens, ends = _spelled(tokenizer, text, self.tokens[:kept], self.ends[:kept])
        # Where tokens were cut anew, a boundary might divide a character.
        boundaries = sorted({b for b in self.boundaries if b <= kept} | {len(tokens)})
        return Reading(text, tokens, ends, tuple(contents), messages, boundaries, own=len(tokens))

    def wrote(self, tokenizer: Any, ids: Sequence[int], stops: Collection[int]) -> Reading:
        """This reading with further tokens that a model has chosen, a stop token included."""
        stopped = bool(ids) and ids[-1] in stops
        chosen = [*self.tokens[self.own :], *(ids[:-1] if stopped else ids)]
        begin = self.end(self.own)
        context = self.tokens[self.own - 1 : self.own] if self.own else []
        text, ends = written(tokenizer, [*context, *chosen])
        if context and ends[0] == NO_END:  # it shares a character with the chosen tokens
            context, (text, ends) = [], written(tokenizer, chosen)
        before = int(ends[0]) if context else 0
        ends = np.where(ends == NO_END, NO_END, ends + begin - before)[len(context) :]
        text = text[before:]
        answer = self.answer
        if answer is not None and answer < begin:
            said = self.said[: begin - answer] + text
        else:
            # A decoder drops a leading space as a mark, so streamed text begins without it.
            mark = text.startswith(" ") and not tokenizer.decode(chosen).startswith(" ")
            answer, said = begin + mark, text[mark:]
        whole = self.text[:begin] + text
        if stopped:
            whole += tokenizer.decode(ids[-1:], skip_special_tokens=False)
            ends = np.append(ends, len(whole))
        return replace(
            self,
            text=whole,
            tokens=[*self.tokens, *ids],
            answer=answer,
            said=said,
            ends=np.concatenate([self.ends[: self.own], ends]),
        )

    def told(self, tokenizer: Any, said: str, gap: str) -> Reading:
        """This reading with more of the answer, written by a model of another tokenizer.

        Args:
            tokenizer: The tokenizer of this reading.
            said: The answer so far, which begins with :attr:`said`.
            gap: The white space that the template puts between an answer's header and the answer.
        """
        if said == self.said:
            return self
        answer = len(self.text) + len(gap) if self.answer is None else self.answer
        lead = gap if self.answer is None else ""
        text = self.text + lead + said[len(self.said) :]
        tokens, ends = _spelled(tokenizer, text, self.tokens, self.ends)
        return replace(
            self, text=text, tokens=tokens, ends=ends, answer=answer, said=said, own=len(tokens)
        )

    def booked(self, messages: int) -> Reading:
        """This reading with the answer as one of its ``messages``."""
        boundaries = sorted({*self.boundaries, len(self.tokens)})
        return replace(
            self,
            asked=self.contents,
            messages=messages,
            boundaries=boundaries,
            answer=None,
            said="",
            own=len(self.tokens),
        )

    def shortened(self, tokenizer: Any, ids: Sequence[int], content: str, left: str) -> Reading:
        """This reading with its last answer, whose text was ``content``, shortened to ``left``.

        ``ids`` are the answer's first tokens, which spell the beginning of ``left``.
        """
        begin = self.boundaries[-2]
        start, parts = self.end(begin), len(content_parts(content))
        prompt = replace(
            self,
            text=self.text[:start],
            tokens=self.tokens[:begin],
            ends=self.ends[:begin],
            asked=self.asked[: len(self.asked) - parts],
            boundaries=self.boundaries[:-1],
            own=begin,
        )
        grown = prompt.wrote(tokenizer, ids, ()) if ids else prompt
        if not left.startswith(grown.said):
            grown = prompt
        gap = self.text[start : start + 1] == " " and not content.startswith(" ")
        return grown.told(tokenizer, left, " " * gap).booked(self.messages)

    def cut(self, character: int) -> Reading:
        """This reading without the tokens that reach beyond a character."""
        cuts = Cuts.of(self.ends)
        kept = int(cuts.fewest[np.searchsorted(cuts.offsets, character, "right") - 1])
        contents = tuple(c if c and c[1] <= character else None for c in self.asked)
        return replace(self, tokens=self.tokens[:kept], ends=self.ends[:kept], asked=contents)

    # ---- as JSON --------------------------------------------------------------------------

    def to_json(self, before: Reading) -> dict[str, Any]:
        """The whole reading as a difference to ``before``; there is no answer in progress."""
        tokens = common_prefix(self.tokens, before.tokens)
        text = common_prefix(self.text, before.text)
        ends = common_prefix(self.ends.tolist(), before.ends.tolist())
        return {
            "messages": self.messages,
            "boundaries": self.boundaries,
            "contents": self.asked,
            "shared": [tokens, ends, text],
            "tokens": self.tokens[tokens:],
            "ends": self.ends[ends:].tolist(),
            "text": self.text[text:],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], before: Reading) -> Self:
        """The reading that :meth:`to_json` described.

        Raises:
            ValueError, KeyError, TypeError: The data are not a reading.
        """
        tokens, places, text = data["shared"]
        made = cls(
            before.text[:text] + data["text"],
            before.tokens[:tokens] + list(data["tokens"]),
            np.append(before.ends[:places], np.array(data["ends"], np.int64)),
            tuple(None if span is None else (span[0], span[1]) for span in data["contents"]),
            data["messages"],
            list(data["boundaries"]),
        )
        ends = made.ends[made.ends != NO_END]
        if len(made.tokens) != len(made.ends) or ends[-1:].tolist() != [len(made.text)]:
            raise ValueError(f"{len(made.tokens)} tokens do not end with their text")
        spans = [span for span in made.asked if span is not None]
        if (np.diff(ends) < 0).any() or not all(0 <= a <= b <= ends[-1] for a, b in spans):
            raise ValueError("tokens or contents stand where there is no text")
        return replace(made, own=len(made.tokens))


def moved(spans: Sequence[Span | None], by: int) -> tuple[Span | None, ...]:
    """The spans, moved by ``by`` characters."""
    return tuple(span and (span[0] + by, span[1] + by) for span in spans)


def _spelled(
    tokenizer: Any, text: str, tokens: Sequence[int], ends: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """Ids and ends of a text whose beginning is spelled by ``tokens``.

    The rest is cut as the tokenizer cuts the whole text, if that has a cut where ``tokens`` end.
    """
    start = int(ends[-1]) if len(ends) else 0
    if tokens and start == len(text):
        return list(tokens), ends
    rest = bare(tokenizer, text)
    ids, places = rest.ids, rest.ends
    if tokens:
        cuts = Cuts.of(places)
        found = int(np.searchsorted(cuts.offsets, start))
        if found < len(cuts.offsets) and cuts.offsets[found] == start:
            ids, places = ids[cuts.fewest[found] :], places[cuts.fewest[found] :]
        else:
            rest = bare(tokenizer, text[start:])
            ids, places = rest.ids, np.where(rest.ends == NO_END, NO_END, rest.ends + start)
    return [*tokens, *ids.tolist()], np.concatenate([ends, places])
