"""Sessions of an agent that many models answer in turn, told by the clients of two providers.

A history holds what agents and routers really send: reminders as late system messages, results with
and without a user's words behind them, calls that were never answered, exchanges of another
provider with its own ids, two calls at once, arguments that were cut. Each thing that is said holds
a word of its own, so that a prompt can be searched for it.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.real_templates import TOOL, Family

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CHAT_TOOLS = [{"type": "function", "function": {
    "name": TOOL, "description": "Looks at a place.", "parameters": SCHEMA}}]  # fmt: skip
CLAUDE_TOOLS = [{"name": TOOL, "description": "Looks at a place.", "input_schema": SCHEMA}]


@dataclass(frozen=True)
class Call:
    """A call of the tool; its arguments are JSON text, perhaps broken."""

    id: str
    arguments: str

    @property
    def chat(self) -> Json:
        function = {"name": TOOL, "arguments": self.arguments}
        more = {"extra_content": {"google": {"thought_signature": "c2ln"}}, "call_id": self.id}
        return {"id": self.id, "type": "function", "function": function, **more}

    @property
    def block(self) -> Json:
        try:
            given = json.loads(self.arguments)
        except ValueError:
            given = self.arguments
        return {"type": "tool_use", "id": self.id, "name": TOOL, "input": given}


@dataclass(frozen=True)
class Said:
    """A message, in no provider's form."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""  # of a result, the call's id
    joined: bool = False  # whether a user's words are in the same turn as the results before them

    def chat(self) -> Json:
        """As OpenAI's clients send it."""
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": self.answers, "content": self.text}
        message: Json = {"role": self.role, "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.thought
            message["reasoning_details"] = [{"type": "reasoning.encrypted", "data": "c2ln"}]
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": [c.chat for c in self.calls]}
        return message

    def blocks(self) -> list[Json]:
        """As Anthropic's clients send its content."""
        if self.role == "tool":
            return [{"type": "tool_result", "tool_use_id": self.answers, "content": self.text}]
        thought = {"type": "thinking", "thinking": self.thought, "signature": "c2ln"}
        hidden = {"type": "redacted_thinking", "data": "c2ln"}
        text = {"type": "text", "text": self.text}
        return [*([thought, hidden] if self.thought else []), *([text] if self.text else []),
                *(call.block for call in self.calls)]  # fmt: skip


def of_claude(history: Sequence[Said]) -> Json:
    """A history as the messages API takes it: results and what follows them in one turn."""
    given: Json = {"messages": []}
    if history and history[0].role == "system":
        given["system"], history = history[0].text, history[1:]
    for before, said in zip([None, *history], history, strict=False):
        role = "user" if said.role == "tool" else said.role
        if before is not None and before.role == "tool" and (said.role == "tool" or said.joined):
            given["messages"][-1]["content"] += said.blocks()
        elif said.role == "system":
            given["messages"].append({"role": "system", "content": said.text})
        else:
            given["messages"].append({"role": role, "content": said.blocks()})
    return given


@dataclass
class AgentSession:
    """A growing history; ``kind`` numbers the way in which it began."""

    words: Iterator[str]  # each new
    kind: int = 0
    history: list[Said] = field(default_factory=list)
    wrote: Counter[str] = field(default_factory=Counter)  # the words of models

    def __post_init__(self) -> None:
        if self.kind % 3 != 1:
            self.say("system", "You are an agent")

    def say(self, role: str, text: str, **more: Any) -> None:
        self.history.append(Said(role, f"{text} {next(self.words)}.", **more))

    def question(self, joined: bool = False) -> None:
        self.say("user", "Tell me of", joined=joined)

    def results(self) -> bool:
        """The results of the last answer's calls; whether there are any."""
        calls = self.history[-1].calls if self.history else ()
        for call in calls:
            self.say("tool", "There is", answers=call.id)
        return bool(calls)

    def foreign(self, *arguments: str, id: str = "call_0123456789abcdef0123456789abcdef") -> None:
        """Another provider's answer with calls, and their results."""
        text, thought = f"I look, {next(self.words)}.", "Hm."
        calls = tuple(Call(f"{id}{n}", text) for n, text in enumerate(arguments))
        self.history.append(Said("assistant", text, thought, calls))
        self.results()

    def arguments(self) -> str:
        return json.dumps({"place": f"at {next(self.words)}"})

    def turn(self, number: int) -> str:
        """What the client adds before the next request; what kind of turn it is."""
        kind = TURNS[number % len(TURNS)]
        if kind == "interrupted":  # the calls get no result
            self.question()
            return kind
        told = self.results()
        if kind == "more" or not told:
            self.question(joined=kind == "more" and told)
        if kind == "two users":
            self.question()
        if kind == "reminder":
            self.say("system", "Remember")
            self.question()
        if kind in ("pair", "broken", "foreign"):
            if kind == "pair":
                self.foreign(self.arguments(), self.arguments())
            elif kind == "broken":
                self.foreign('{"place": "at ' + next(self.words), id="toolu_01A09q90qw90lq91")
            else:
                self.history.append(Said("assistant", f"So {next(self.words)}.", "Why?"))
            self.question(joined=kind == "pair")
        if kind == "ends with a reminder":
            self.say("system", "Plan mode is on")
        return kind

    def ask_openai(self, client: Any, model: str, stream: bool) -> Any:
        """One answer of the chat API, booked; its usage."""
        asked: Json = {"model": model, "messages": [said.chat() for said in self.history],
                       "tools": CHAT_TOOLS, "max_tokens": 40, "temperature": 0}  # fmt: skip
        if stream:
            usage = {"include_usage": True}
            with client.chat.completions.stream(**asked, stream_options=usage) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        calls = [Call(c.id, c.function.arguments) for c in message.tool_calls or ()]
        thought = getattr(message, "reasoning_content", None) or ""
        self.history.append(Said("assistant", message.content or "", thought, tuple(calls)))
        return answer.usage

    def ask_claude(self, client: Any, model: str, stream: bool) -> Any:
        """One answer of the messages API, booked; its usage."""
        asked: Json = {"model": model, "tools": CLAUDE_TOOLS, "max_tokens": 40,
                       "extra_body": {"temperature": 0}, **of_claude(self.history)}  # fmt: skip
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        kinds = {kind: [b for b in answer.content if b.type == kind] for kind in BLOCKS}
        text = "".join(block.text for block in kinds["text"])
        thought = "".join(block.thinking for block in kinds["thinking"])
        calls = tuple(Call(b.id, json.dumps(b.input)) for b in kinds["tool_use"])
        self.history.append(Said("assistant", text, thought, calls))
        return answer.usage

    def wrote_by(self, family: Family) -> None:
        """Note the words that a model of the family has written, thoughts apart."""
        self.wrote.update(word for part, word in family.parts.items() if part != "T")


BLOCKS = ("text", "thinking", "tool_use")
TURNS = (
    "results", "more", "reminder", "pair", "two users", "ends with a reminder", "interrupted",
    "broken", "foreign",
)  # fmt: skip


def missing(session: AgentSession, prompt: str) -> list[str]:
    """What is wrong with a prompt that was made of a session's history, told in lines.

    Each word that was said stands in it once, and each of a model's as often as it was written.
    What users, tools and late system messages said stands in the order in which they said it.
    """
    found = WORD.findall(prompt)
    counts, faults = Counter(found), []
    for said in session.history:
        for word in FACT.findall(" ".join([said.text, *(c.arguments for c in said.calls)])):
            if counts[word] != 1:
                faults.append(f"{word} of a {said.role} stands {counts[word]} times")
    for word, times in session.wrote.items():
        if counts[word] != times:
            faults.append(f"{word} was written {times} times and stands {counts[word]} times")
    ordered = [FACT.search(said.text) for said in session.history[session.kind % 3 != 1 :]
               if said.role != "assistant"]  # fmt: skip
    told = [match.group() for match in ordered if match]
    there = [word for word in found if word in set(told)]
    if not faults and there != told:
        late = next(a for a, b in zip(there, told, strict=False) if a != b)
        faults.append(f"{late} does not stand where it was said")
    return faults


WORD, FACT = re.compile(r"[a-z0-9]+"), re.compile(r"fact\d+x")


def new_words() -> Iterator[str]:
    """Words that are in no template."""
    return (f"fact{number:04d}x" for number in itertools.count())


def walk(names: Sequence[str]) -> list[str]:
    """A walk over all ordered pairs of names: a circle of Euler's in the complete graph."""
    left = {name: [other for other in names if other != name] for name in names}
    open_, done = [names[0]], list[str]()
    while open_:
        if left[open_[-1]]:
            open_.append(left[open_[-1]].pop())
        else:
            done.append(open_.pop())
    return done[::-1]
