"""A conversation's messages, and the tokens in which the models of each tokenizer hold them.

Messages are structured: role, content, reasoning, tool calls with their ids and arguments. What a
model wrote is divided into such a message. Its exact tokens stay beside it, for its tokenizer.

The way from messages to a prompt is the same for any number of tokenizers:

1. ``tokenization.templates.fit_to_template`` gives the messages the form that a model's template
   takes, and the template renders them.
2. The text is compared with the tokenizer's last reading, segment by segment (a prompt, an answer,
   its stop token). Segments of equal text keep their tokens. So does an answer that the template
   writes with other white space, or a call whose JSON it writes in another way.
3. In the rest, an answer that a model of this tokenizer wrote keeps its tokens where the text is
   that of the answer (after an edit, or behind reasoning that a template drops from earlier turns).
4. What is left is cut by the tokenizer.

Lines compare tokens. So a segment that is not recognised costs a second reading of it, and never
changes what a model is given. ``verbatim`` takes another way: it continues from the reading as it
is, and the template renders only what follows.

Where one tokenizer is alone, the places of contents in a text are not needed. They cost a second
rendering, which is made only for step 3, where there is such an answer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvlingo_mlx.engine.messages import answer_message, content_of, meaning, recalled
from kvlingo_mlx.engine.reading import WROTE, Reading, Segment, moved
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, header_of, render_text
from kvlingo_mlx.tokenization.alignment import Span
from kvlingo_mlx.tokenization.probes import TemplateNeeds
from kvlingo_mlx.tokenization.renderings import content_spans, message_parts

MARK = "\u2039answer\u203a"  # a text that no conversation holds, in place of an answer


@dataclass(frozen=True)
class Written:
    """What models wrote of one message."""

    message: Message
    text: str  # the text as it was written, marks of reasoning and calls included
    opened: bool = False  # whether the prompt opened a reasoning trace
    begun: str = ""  # the beginning of the text, if it was given
    # by tokenizer, the answer in the tokens of its models, if they wrote it alone
    segments: Mapping[str, Segment] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Transcript:
    """Messages, and for each tokenizer the tokens in which its models read and wrote them."""

    messages: list[Message] = field(default_factory=list)  # every message so far
    verbatim: bool = False  # whether to continue from the tokens as they were written
    # the chat template's switches (``enable_thinking``, ``tools``)
    switches: dict[str, Any] = field(default_factory=dict)
    several: bool = False  # whether the conversation's models have several tokenizers
    # by tokenizer fingerprint, the conversation as its models last held it. It may hold other
    # messages: some that were changed since, or fewer
    readings: dict[str, Reading] = field(default_factory=dict)
    latest: str | None = None  # the tokenizer that wrote last
    # what models wrote, by what the answers and all before them mean; copies share it
    written: dict[str, Written] = field(default_factory=dict)
    begun: str = ""  # the beginning of the next answer, where it is given
    previous: Transcript | None = None  # the transcript before the last exchange or change, or None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the conversation as the last answer's model holds it."""
        return [] if self.latest is None else self.readings[self.latest].tokens

    def copy(self) -> Self:
        """An independent copy."""
        return replace(
            self,
            messages=list(self.messages),
            switches=dict(self.switches),
            readings=dict(self.readings),
        )

    def at(self, messages: Sequence[Message]) -> Self:
        """This transcript with other messages; answers among them are recalled as written.

        The same words after other messages are another answer.
        """
        made = self.copy()
        known = map(self.written.get, _places(messages))
        made.messages = [
            dict(given) if ours is None else recalled(given, ours.message)
            for given, ours in zip(messages, known, strict=True)
        ]
        return made

    # ---- prompts --------------------------------------------------------------------------

    def prompt(self, model: LanguageModel, new: Sequence[Message] = ()) -> list[int]:
        """The tokens up to the header of the answer to ``new``, by ``model``'s template.

        Raises:
            ValueError: The model has no template, or it does not take these messages.
        """
        return self.reading(model, new, fits=False).tokens

    def reading(
        self, model: LanguageModel, new: Sequence[Message] = (), *, fits: bool = True
    ) -> Reading:
        """:meth:`prompt`, with the places of its tokens and of the messages' contents.

        With ``fits`` a prompt far beyond the context is refused at once.

        Raises:
            ValueError: As for :meth:`prompt`.
        """
        messages = (*self.messages, *new)
        before = self.readings.get(model.tokenizer_fingerprint, Reading(model.tokenizer))
        if self.verbatim:
            both = (list(map(_whole, listed)) for listed in (before.messages, messages))
            kept = before.holding(common_prefix(*both))
            if kept.segments:
                return self._continued(model, kept, messages).read(self.begun)
        rendered, found = self._rendered(self._renderer(model), messages)
        if self.begun:
            rendered = self._answered(model, messages).split(MARK, 1)[0] + self.begun
        if fits:
            model.check_text(rendered)
        before = self._of_same_ids(model, before, messages)
        tools = self.switches.get("tools")
        kept, text, found = before.agreeing(rendered, found, messages, tools)
        for place, segment in self._own_answers(model, messages, kept, text, found):
            if place >= len(kept.text):
                kept = kept.read(text[len(kept.text) : place])
                kept = replace(kept, segments=(*kept.segments, segment))
        kept = kept.read(text[len(kept.text) :])
        own = model.tokenizer  # a reading of another template may have been gone on with
        return replace(kept, tokenizer=own, asked=found, messages=messages, rendered=rendered)

    def _of_same_ids(
        self, model: LanguageModel, before: Reading, messages: Sequence[Message]
    ) -> Reading:
        """An earlier reading up to calls that have other ids now, if the template tells ids."""
        pairs = enumerate(zip(before.messages, messages, strict=False))
        other = next((n for n, (one, now) in pairs if _ids(one) != _ids(now)), None)
        needs = TemplateNeeds(model.tokenizer, tools=bool(self.switches.get("tools")))
        return before if other is None or not needs.takes("ids") else before.holding(other)

    def _continued(
        self, model: LanguageModel, kept: Reading, messages: tuple[Message, ...]
    ) -> Reading:
        """A reading that goes on with what the template puts after an earlier one."""
        rest = messages[len(kept.messages) :]
        text, found = self._rendered(lambda m: self._after(model, kept.tokens[-1], m), rest)
        before = kept.asked or (None,) * sum(len(message_parts(m)) for m in kept.messages)
        asked = (*before, *moved(found, len(kept.text))) if self.several else ()
        return replace(kept.read(text), asked=asked, messages=messages)

    def _renderer(self, model: LanguageModel) -> Callable[[Sequence[Mapping[str, Any]]], str]:
        return lambda messages: render_text(model, [*map(dict, messages)], **self.switches)

    def _rendered(
        self, render: Callable[..., str], messages: Sequence[Message]
    ) -> tuple[str, tuple[Span | None, ...]]:
        """The text of messages, and the places of their parts if other tokenizers need them."""
        return content_spans(render, messages) if self.several else (render(messages), ())

    def _own_answers(
        self,
        model: LanguageModel,
        messages: Sequence[Message],
        kept: Reading,
        text: str,
        found: Sequence[Span | None],
    ) -> Iterator[tuple[int, Segment]]:
        """Places and segments of the answers after ``kept``, in the tokens of their models."""
        held = max((segment.held or 0 for segment in kept.segments), default=0)
        own, by_meaning = {}, {meaning(each.message): each for each in self.written.values()}
        for number, message in enumerate(messages):
            known = by_meaning.get(meaning(message)) if number >= held else None
            segment = known and known.segments.get(model.tokenizer_fingerprint)
            if segment and segment.text:
                own[number] = segment
        if not own:
            return
        if not self.several:
            _, found = content_spans(self._renderer(model), messages, text)
        spans = iter(found)
        for number, message in enumerate(messages):
            parts = [next(spans, None) for _ in message_parts(message)]
            if number in own and parts and (last := parts[-1]) is not None:
                place = last[0] - own[number].text.find(text[slice(*last)])
                if text.startswith(own[number].text, place):
                    yield place, replace(own[number], held=number + 1)

    def _after(self, model: LanguageModel, last: int, new: Sequence[Mapping[str, Any]]) -> str:
        """The text that the template puts after an answer whose last token is ``last``."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        text = self._renderer(model)([*before, *new]).split(MARK, 1)[1]
        return text[len(_written_stop(model, last, text)) :]

    def header(self, model: LanguageModel, new: Sequence[Message], reading: Reading) -> int | None:
        """The number of tokens of a prompt's ``reading`` before the answer's header, or None.

        The template renders the same before that place once the answer is an earlier one. It may
        drop what it puts at an answer's beginning (an empty think block).
        """
        messages = [*self.messages, *new]
        header = header_of(model, messages, reading.rendered, **self.switches)
        known = header and (reading.rendered or not self.begun)
        return reading.place(len(reading.text) - len(header)) if known else None

    def _answered(self, model: LanguageModel, messages: Sequence[Message]) -> str:
        """The text of messages and an answer to them, in whose place MARK stands."""
        both = [*map(dict, messages), {"role": "assistant", "content": MARK}]
        try:  # a question behind it could draw instructions to itself
            return render_text(model, both, **self.switches, add_generation_prompt=False)
        except ValueError:
            return self._renderer(model)(both)

    def gap(self, model: LanguageModel, messages: Sequence[Message], header: str) -> str:
        """The white space that the template puts between an answer's header and the answer.

        ``header`` is the end of the text up to there.
        """
        try:
            text = self._answered(model, [*self.messages, *messages]).split(MARK, 1)[0]
        except ValueError:
            return ""
        found = text[len(text.rstrip(" ")) :]
        return found if text.endswith(header + found) and not header.endswith(" ") else ""

    # ---- answers --------------------------------------------------------------------------

    def book(
        self, new: Sequence[Message], readings: Mapping[str, Reading], latest: str, written: Written
    ) -> None:
        """Book messages and the answer to them, with their ``readings`` by tokenizer.

        The readings hold the whole answer, which a model of tokenizer ``latest`` finished.
        """
        self.previous = self.copy()
        self.messages = [*self.messages, *new, written.message]
        for key, reading in readings.items():
            self.readings[key] = reading.booked(written.message, located=self.several)
        self.latest, self.begun = latest, ""
        self._remember(written)

    def _remember(self, written: Written) -> None:
        """Keep what was written, with the answer's tokens where one segment is all of it."""
        segments = {}
        for key, reading in self.readings.items():
            own = reading.segments[len(reading.before_answer().segments) :]
            whole = reading.messages and reading.messages[-1] is written.message
            alone = len(own) in (1, 2) and {segment.kind for segment in own} == {WROTE}
            if whole and alone and not written.begun:
                segments[key] = own[0]
        place = _places(self.messages)[-1]
        self.written.pop(place, None)  # what was written last stands last
        self.written[place] = replace(written, segments=segments)

    def cut_answer(self, characters: int) -> None:
        """Keep the first ``characters`` of the last answer's text, in the tokens as written.

        If the cut is inside a token, its remaining text is encoded anew.

        Raises:
            ValueError: The last message is not an answer of that many characters.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            raise ValueError("the last message is no answer, so there is nothing to truncate")
        known = self.written.get(_places(self.messages)[-1], Written(last, content_of(last)))
        if not 0 <= characters <= len(known.text):
            raise ValueError(
                f"characters is {characters}, but the answer has {len(known.text)}; give 0 to "
                f"{len(known.text)}"
            )
        if characters == len(known.text):
            return
        left = known.text[:characters]
        holding = {k: r for k, r in self.readings.items() if list(r.messages) == self.messages}
        message = {**last, "content": left}
        if self.latest in holding:
            tokenizer = holding[self.latest].tokenizer
            tools = self.switches.get("tools")
            message = answer_message(tokenizer, left, opened=known.opened, tools=tools)
        self.messages = [*self.messages[:-1], message]
        for key, reading in holding.items():
            cut = reading.shortened(known.text, left, message, located=self.several)
            self.readings[key] = reading.before_answer() if known.begun else cut
        self._remember(Written(message, left, known.opened))

    # ---- as JSON --------------------------------------------------------------------------

    def _history(self) -> Iterator[Transcript]:
        """This state, that before the last exchange, that before the one before it, and so on."""
        state: Transcript | None = self
        while state is not None:
            yield state
            state = state.previous

    def to_json(self) -> dict[str, Any]:
        """The whole transcript with its undo history; each state as a difference to the next."""
        segments: dict[int, tuple[int, Segment]] = {}

        def number(segment: Segment) -> int:
            return segments.setdefault(id(segment), (len(segments), segment))[0]

        states, later = [], Transcript()
        for state in self._history():
            readings = {}
            for key, reading in state.readings.items():
                after = later.readings.get(key, Reading(None))
                readings[key] = {
                    "segments": _less(
                        list(map(number, reading.segments)), [*map(number, after.segments)]
                    ),
                    "asked": _less(reading.asked, after.asked),
                    "messages": _less(list(reading.messages), state.messages),
                }
            messages = _less(state.messages, later.messages)
            states.append({"messages": messages, "latest": state.latest, "readings": readings})
            later = state
        written = [
            {
                **vars(each),
                "place": place,
                "segments": {key: number(segment) for key, segment in each.segments.items()},
            }
            for place, each in self.written.items()
        ]
        return {
            "verbatim": self.verbatim,
            "switches": self.switches,
            "states": states,
            "written": written,
            "segments": [[p.text, p.tokens, p.kind, p.held] for _, p in segments.values()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], models: Sequence[LanguageModel]) -> Self:
        """The transcript that :meth:`to_json` described, of a conversation of such models.

        Raises:
            ValueError, KeyError, TypeError, IndexError: The data are not a transcript.
        """
        tokenizers = {model.tokenizer_fingerprint: model.tokenizer for model in models}
        segments = [Segment(str(t), list(ids), kind, n) for t, ids, kind, n in data["segments"]]
        numbers = {id(segment): number for number, segment in enumerate(segments)}
        written = {}
        for each in data["written"]:
            own = {key: segments[n] for key, n in each["segments"].items()}
            written[str(each["place"])] = Written(
                each["message"], each["text"], each["opened"], each["begun"], own
            )
        states: list[Self] = []
        for fact in data["states"]:
            later = states[-1] if states else cls()
            messages = _more(fact["messages"], later.messages)
            readings = {}
            for key, known in fact["readings"].items():
                after = later.readings.get(key, Reading(None))
                numbered = [numbers[id(segment)] for segment in after.segments]
                readings[key] = made = Reading(
                    tokenizers[key],
                    tuple(segments[n] for n in _more(known["segments"], numbered)),
                    tuple(s and (s[0], s[1]) for s in _more(known["asked"], after.asked)),
                    tuple(_more(known["messages"], messages)),
                )
                if any(s and not 0 <= s[0] <= s[1] <= len(made.text) for s in made.asked):
                    raise ValueError("contents stand where there is no text")
            several = len(tokenizers) > 1
            own = dict(data["switches"])
            states.append(
                cls(messages, data["verbatim"], own, several, readings, fact["latest"], written)
            )
        for later, earlier in itertools.pairwise(states):
            later.previous = earlier
        return states[0]


def _places(messages: Sequence[Message]) -> list[str]:
    """For each message a digest of what it and all before it mean."""
    made, found = hashlib.blake2b(digest_size=16), list[str]()
    for message in messages:
        made.update(meaning(message).encode("utf-8", "surrogatepass") + b"\0")
        found.append(made.hexdigest())
    return found


def _ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or () if isinstance(call, dict)]


def _whole(message: Message) -> tuple[str, str, list[Any]]:
    """What a message means, with an answer's reasoning and the ids of its calls."""
    return meaning(message), str(message.get("reasoning_content") or "").strip(), _ids(message)


def _less(items: Sequence[Any], later: Sequence[Any]) -> dict[str, Any]:
    """A list as a difference to that of a later state, for JSON."""
    shared = common_prefix(items, later)
    return {"shared": shared, "own": list(items[shared:])}


def _more(fact: Mapping[str, Any], later: Sequence[Any]) -> list[Any]:
    """The list that :func:`_less` described."""
    return [*later[: fact["shared"]], *fact["own"]]


def _written_stop(model: LanguageModel, last: int, text: str) -> str:
    """The text of an answer's ``last`` token if that is a stop that begins ``text``, else "".

    The template puts ``text`` after the answer. Another model may have written the answer and stop
    at another token than ``model`` (a chat model and its base model), so any added token counts.
    """
    tokenizer = model.tokenizer
    stops = {*tokenizer.eos_token_ids, *tokenizer.get_added_vocab().values()}
    stop = tokenizer.decode([last])
    return stop if last in stops and text.startswith(stop) else ""
