"""A conversation's messages as the tokens that a model must hold to answer the next message."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvlingo_mlx.engine.answers import Parts, divided
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, render_text
from kvlingo_mlx.tokenization.alignment import NO_END
from kvlingo_mlx.tokenization.renderings import written

Same = Callable[[Message, Message], bool]  # whether our message and a given one are the same
MARK = "\u2039answer\u203a"  # a text that no conversation holds, in place of an answer


@dataclass(eq=False, repr=False)
class Transcript:
    """Messages, and the tokens in which they were read and written.

    Text can be cut into tokens in several ways, and a model that wrote an answer holds the tokens
    that it chose. So the rendered text is compared with the written text. They are shared up to
    the last boundary between turns at which they agree, and only the rest is encoded. A template
    that changes earlier turns (for example, strips their thinking) ends the shared part there.
    ``verbatim`` continues from the written tokens instead.

    Attributes:
        messages: Every message so far.
        verbatim: Whether to continue from the written tokens.
        switches: The chat template's switches (``enable_thinking``, ``tools``).
        tokens: The tokens of the conversation as it was last read and written.
        boundaries: Lengths of ``tokens`` at which a prompt or an answer ended.
        held: The number of messages that ``tokens`` cover; later messages were set, not read.
        spelled: Answers, and the tokens in which models wrote them; all copies share it.
        previous: The transcript before the last exchange, or None.
    """

    messages: list[Message] = field(default_factory=list)
    verbatim: bool = False
    switches: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    held: int = 0
    spelled: dict[str, list[int]] = field(default_factory=dict)
    previous: Transcript | None = None

    def copy(self) -> Self:
        """An independent copy."""
        return replace(
            self,
            messages=list(self.messages),
            switches=dict(self.switches),
            tokens=list(self.tokens),
            boundaries=list(self.boundaries),
        )

    def undo(self) -> Transcript:
        """The transcript before the last exchange.

        Raises:
            ValueError: There has been no exchange.
        """
        if self.previous is None:
            raise ValueError("there is nothing to undo: nobody has answered yet")
        return self.previous.copy()

    def at(self, messages: Sequence[Message], same: Same) -> tuple[Transcript, list[Message]]:
        """The longest state of this conversation that begins ``messages``, and the other messages.

        States are the present one, and those before each exchange or change. ``same`` compares
        messages.
        """
        found: Transcript = type(self)(verbatim=self.verbatim, spelled=self.spelled)
        for state in self._history():
            length = len(state.messages)
            if len(found.messages) < length <= len(messages) and all(
                map(same, state.messages, messages)
            ):
                found = state.copy()
        found.switches = dict(self.switches)
        return found, [dict(message) for message in messages[len(found.messages) :]]

    def prompt(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        """The tokens up to the header of the answer to ``new``, by ``model``'s template.

        Raises:
            ValueError: The model has no template, or it does not take these messages.
        """
        messages = [*self.messages, *new]
        if self.verbatim and self.tokens:
            rest = self._after(model, self.tokens[-1], messages[self.held :])
            return self.tokens + _encode(model, rest)
        text = render_text(model, messages, **self.switches)
        for boundary in (*sorted(self.boundaries, reverse=True), 0):
            written = model.tokenizer.decode(self.tokens[:boundary])
            if text.startswith(written):
                known = self.held if boundary == len(self.tokens) else 0
                kept = self.tokens[:boundary]
                return self._spell(model, text, len(written), kept, messages, known)
        raise AssertionError("every text begins with no token")

    def _spell(
        self,
        model: LanguageModel,
        text: str,
        begun: int,
        tokens: list[int],
        messages: Sequence[Message],
        known: int,
    ) -> list[int]:
        """All tokens of ``text``, whose first ``begun`` characters are ``tokens``.

        In the rest, answers that a model wrote keep the tokens in which it wrote them. Answers
        among the first ``known`` messages are in ``tokens`` already.
        """
        for place, content in reversed(self._written(model, messages, known, text, begun)):
            # A decoder takes a leading space for a mark and drops it.
            for at in (place, place - 1) if text[begun:place].endswith(" ") else (place,):
                made = [*tokens, *_encode(model, text[begun:at]), *self.spelled[content]]
                if model.tokenizer.decode(made) == text[: place + len(content)]:
                    tokens, begun = made, place + len(content)
                    break
        return tokens + (_encode(model, text[begun:]) if begun < len(text) else [])

    def _written(
        self, model: LanguageModel, messages: Sequence[Message], known: int, text: str, begun: int
    ) -> list[tuple[int, str]]:
        """Places and texts of the models' answers in ``text`` from ``begun`` on, last first."""
        found = []
        for index in range(len(messages) - 1, known - 1, -1):
            content = messages[index].get("content")
            told = isinstance(content, str) and content in self.spelled
            if not told or messages[index].get("role") != "assistant":
                continue
            place = self._place(model, messages, index)
            if place is not None and place < begun:
                break
            if place is not None and text.startswith(str(content), place):
                found.append((place, str(content)))
        return found

    def _place(self, model: LanguageModel, messages: Sequence[Message], index: int) -> int | None:
        """The place of a message's content in the rendering of all messages, or None."""
        marked = [*messages[:index], {**messages[index], "content": MARK}, *messages[index + 1 :]]
        before, found, _ = render_text(model, marked, **self.switches).partition(MARK)
        return len(before) if found else None

    def _after(self, model: LanguageModel, last: int, new: Sequence[Message]) -> str:
        """The text that the template puts after an answer whose last token is ``last``."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        text = render_text(model, [*before, *new], **self.switches).split(MARK, 1)[1]
        return text[len(_written_stop(model, last, text)) :]

    def end_of_messages(
        self, model: LanguageModel, new: Sequence[Message], prompt: Sequence[int]
    ) -> int | None:
        """The place in ``prompt``, made of ``new``, where the answer's header begins, or None.

        The template renders the same before that place once the answer is an earlier one. It may
        drop what it puts at an answer's beginning (an empty think block).
        """
        whole = render_text(model, [*self.messages, *new], **self.switches)
        bare = render_text(
            model, [*self.messages, *new], add_generation_prompt=False, **self.switches
        )
        header = _encode(model, whole[len(bare) :]) if whole.startswith(bare) else []
        found = header and list(prompt[-len(header) :]) == header
        return len(prompt) - len(header) if found else None

    def wrote(self, new: Sequence[Message], prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Book the new messages, the prompt with the answer's header, and the answer's tokens."""
        self.previous = self.copy()
        self.messages = [*self.messages, *new]
        # Where tokens were cut anew, a boundary might divide a character.
        shared = common_prefix(self.tokens, prompt)
        kept = {b for b in self.boundaries if b <= shared}
        self.tokens = [*prompt, *answer]
        self.boundaries = sorted({*kept, len(prompt), len(self.tokens)})
        self.held = len(self.messages)

    def remember(self, model: LanguageModel) -> None:
        """Keep the tokens that spell the last answer, without a stop token at its end."""
        if content := self.messages[-1]["content"]:
            ids = self.tokens[self.boundaries[-2] :]
            self.spelled[content] = ids[:-1] if ids[-1] in model.tokenizer.eos_token_ids else ids

    def cut_answer(self, models: Sequence[LanguageModel], characters: int) -> None:
        """Keep the first ``characters`` of the last answer, in the tokens as written.

        ``models`` are those of the conversation. If the cut is inside a token, its remaining text
        is encoded anew.

        Raises:
            ValueError: The last message is not an answer of that many characters.
        """
        last = self.messages[-1] if self.messages else {}
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise ValueError("the last message is no answer, so there is nothing to truncate")
        if isinstance(characters, bool) or not isinstance(characters, int):
            raise ValueError(f"characters is {characters!r:.40}; give a whole number")
        if not 0 <= characters <= len(content):
            raise ValueError(
                f"characters is {characters}, but the answer has {len(content)}; give 0 to "
                f"{len(content)}"
            )
        if characters == len(content):
            return
        self.messages = [*self.messages[:-1], {**last, "content": content[:characters]}]
        if self.held == len(self.messages):
            self._cut_tokens(models, content, content[:characters])

    def _cut_tokens(self, models: Sequence[LanguageModel], content: str, left: str) -> None:
        """Shorten the last answer's tokens to those of the text ``left``."""
        model = models[0]
        begin = self.boundaries[-2]
        ids, done = whole_tokens(model.tokenizer, self.tokens[begin:], content, len(left))
        rest = _encode(model, left[done:]) if done < len(left) else []
        self.tokens = [*self.tokens[:begin], *ids, *rest]
        self.boundaries = sorted({*self.boundaries[:-1], len(self.tokens)})
        self.remember(model)

    # ---- as JSON --------------------------------------------------------------------------

    def _history(self) -> Iterator[Transcript]:
        """This state, that before the last exchange, that before the one before it, and so on."""
        state: Transcript | None = self
        while state is not None:
            yield state
            state = state.previous

    def to_json(self) -> dict[str, Any]:
        """The whole transcript with its undo history; earlier states as differences."""
        earlier, later = [], self.tokens
        for state in itertools.islice(self._history(), 1, None):
            shared = common_prefix(state.tokens, later)
            earlier.append(
                {
                    **by_difference(state.messages, self.messages),
                    "held": state.held,
                    "shared": shared,
                    "tokens": state.tokens[shared:],
                    "boundaries": state.boundaries,
                }
            )
            later = state.tokens
        return {
            "messages": self.messages,
            "tokens": self.tokens,
            "boundaries": self.boundaries,
            "verbatim": self.verbatim,
            "switches": self.switches,
            "held": self.held,
            "spelled": self.spelled,
            "earlier": earlier,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transcript:
        """The transcript that :meth:`to_json` described, perhaps in an older version."""
        made = cls(
            list(data["messages"]),
            data["verbatim"],
            dict(data["switches"]),
            list(data["tokens"]),
            list(data["boundaries"]),
            spelled={text: list(map(int, ids)) for text, ids in data.get("spelled", {}).items()},
        )
        made.held = int(data.get("held", len(made.messages) if made.tokens else 0))
        state = made
        for fact in data["earlier"]:
            before = cls(
                from_difference(fact, made.messages),
                made.verbatim,
                dict(made.switches),
                state.tokens[: fact["shared"]] + fact["tokens"],
                list(fact["boundaries"]),
                spelled=made.spelled,
            )
            before.held = int(fact.get("held", len(before.messages) if before.tokens else 0))
            state.previous, state = before, before
        return made


def by_difference(messages: Sequence[Message], later: Sequence[Message]) -> dict[str, Any]:
    """The messages as a difference to those of a later state, for JSON."""
    shared = common_prefix(messages, later)
    found: dict[str, Any] = {"messages": shared}
    return found | ({"own": list(messages[shared:])} if shared < len(messages) else {})


def from_difference(facts: Mapping[str, Any], later: Sequence[Message]) -> list[Message]:
    """The messages that :func:`by_difference` described."""
    return [*later[: facts["messages"]], *facts.get("own", [])]


def without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """The messages without the first turn: a user's message and all up to the next one.

    System messages before it stay. Returns None if there is only one turn.
    """
    turns = [index for index, m in enumerate(messages) if m.get("role") == "user"]
    if len(turns) < 2:
        return None
    system = [m for m in messages[: turns[0]] if m.get("role") in ("system", "developer")]
    return [*system, *messages[turns[1] :]]


def same_message(tokenizers: Iterable[Any]) -> Same:
    """A function that says whether a given message is ours, as clients send messages back.

    Clients may send an answer without its reasoning and with parsed tool calls. ``tokenizers`` are
    those of the models that may have written it.
    """
    listed = list(tokenizers)

    def same(ours: Message, given: Message) -> bool:
        one, other = ({k: v for k, v in m.items() if v is not None} for m in (ours, given))
        if one == other:
            return True
        answers = one.get("role") == "assistant" == other.get("role")
        if not answers or not isinstance(text := one.get("content"), str):
            return False
        return any(_sent_back(divided(tokenizer, text), other) for tokenizer in listed)

    return same


def _sent_back(parts: Parts, given: Message) -> bool:
    """Whether a message has an answer's content and calls, apart from white space around them."""
    extra = {"role", "content", "tool_calls", "reasoning", "reasoning_content"}
    content = given.get("content", "")
    if set(given) - extra or not isinstance(content, str):
        return False
    ours, theirs = [
        list(map(_called, listed)) for listed in (parts.tool_calls, given.get("tool_calls", ()))
    ]
    return content.strip() == parts.content.strip() and ours == theirs


def _called(call: Any) -> Any:
    """A tool call's name and arguments, in whichever form the arguments are written."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    except (TypeError, KeyError, ValueError):
        return call


def whole_tokens(
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


def _written_stop(model: LanguageModel, last: int, text: str) -> str:
    """The text of an answer's ``last`` token if that is a stop that begins ``text``, else "".

    The template puts ``text`` after the answer. Another model may have written the answer and stop
    at another token than ``model`` (a chat model and its base model), so any added token counts.
    """
    tokenizer = model.tokenizer
    stops = {*tokenizer.eos_token_ids, *tokenizer.get_added_vocab().values()}
    stop = tokenizer.decode([last])
    return stop if last in stops and text.startswith(stop) else ""


def _encode(model: LanguageModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))
