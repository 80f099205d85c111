"""Good and bad requests of two clients in any order: each is read as by a server that is new.

The reference is transformers' own rendering of the request. By design there may differ from it: an
answer without its reasoning may have that with which it was written behind the same messages, a
call may be spelled as it was written, and a volatile line of a system prompt may be of before. What
is kept verbatim may have a thought that was cut, its mark open, even before the first word of it.
"""

import copy
import itertools
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvlingo_mlx.serving.messages import GenerationRequest, Sampling
from kvlingo_mlx.serving.scheduler import Scheduler
from kvlingo_mlx.serving.sessions import Keys
from kvlingo_mlx.serving.settings import Settings
from tests.support.engines import Clients, Told
from tests.support.real_templates import CALL, IM, THINK, Writer, reference, rendered, write_real

Message = dict[str, Any]
SEQUENCES = 50 * int(os.environ.get("KVLINGO_EXAMPLES", "1"))  # more of them by hand
FIRST = int(os.environ.get("KVLINGO_FIRST", "0"))  # the first one's number
TOGETHER = 25  # sequences of one server
CUT = "cut"  # the thought of an answer that ended behind its first mark
FORBIDDEN = "FORBIDDEN"  # the template refuses a message with this word
WRITTEN = '{"id":"abcdefghi",  "name":"look","arguments":{"at":"home"}}'
SPELLED = '{"id": "abcdefghi", "name": "look", "arguments": {"at": "home"}}'
# It tells all that a message has: names, ids, reasoning, calls and their ids.
TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>tools ' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if 'FORBIDDEN' in (m.content or '') -%}{{- raise_exception('no such word') -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + m.role + (' ' + m.name if m.name else '') -}}"
    "{{- (' ' + m.tool_call_id if m.tool_call_id else '') + '\n' -}}"
    "{%- if m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}"
    "{%- endif -%}"
    "{{- m.content or '' -}}{%- for tool_call in m.tool_calls or [] -%}"
    "{%- set id = tool_call.id -%}{%- set tool_call = tool_call.function -%}"
    '{{- \'<tool_call>{"id": "\' + id + \'", "name": "\' + tool_call.name -}}'
    "{{- '\", \"arguments\": ' + tool_call.arguments | tojson + '}</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WORDS = ("home", "away", "Model: user's", "- Provider: user's", "home")
TOOLS = tuple(
    {"type": "function", "function": {"name": "look", "description": text, "parameters": {}}}
    for text in ("one " * 300, "one " * 300 + "two")
)


SHARED = (*IM, *CALL, *THINK, "deep", "hard", "well", WRITTEN)
WRITES = {
    "thinks": ("<think>", "deep", "</think>", "well"),
    "calls": ("<think>", "hard", "</think>", "well", "<tool_call>", WRITTEN, "</tool_call>"),
}


@pytest.fixture(scope="module", params=["one tokenizer", "two tokenizers"])
def folders(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, more = tmp_path_factory.mktemp("writers"), ()
    if request.param == "two tokenizers":
        more = ("another",)
    marks = {"thinks": SHARED, "calls": (*more, *SHARED)}
    models = {name: Writer(name, "<|im_end|>", marks[name], "", template=TEMPLATE, pieces=pieces)
              for name, pieces in WRITES.items()}  # fmt: skip
    return {name: write_real(root / name, family) for name, family in models.items()}


def masked(messages: Sequence[Message]) -> str:
    """What of a history decides which answers are its own: not reasoning, nor ids of calls."""
    kept = []
    for message in messages:
        made = {k: v for k, v in message.items() if k != "reasoning_content" and v}
        if message["role"] == "assistant":
            made["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
            made["content"] = message["content"].strip()
        kept.append(made)
    return plain(json.dumps(kept, sort_keys=True))


def plain(text: str) -> str:
    """A text without what differs by design; one that is kept verbatim has a cut thought open."""
    text = re.sub(r"(<think>(?:hard|deep))<\|im_end", r"\1</think><|im_end", text)
    return re.sub(r"(\n|\\n)[ -]*Model: v\d[^\n<\"]*", "", text.replace(WRITTEN, SPELLED))


def short(text: str) -> str:
    return text.replace("one " * 300, "...")


@dataclass
class World:
    """What a server has said, and to which histories."""

    tokenizers: Mapping[str, Any]
    thoughts: dict[str, set[str]] = field(default_factory=dict)

    def prompts(self, model: str, ask: GenerationRequest) -> set[str]:
        """The texts that a model may be given."""
        messages = [dict(m) for m in ask.messages or ()]
        choices = []
        for number, message in enumerate(messages):
            own: set[str | None] = {message.get("reasoning_content")}
            if message["role"] == "assistant" and not message.get("reasoning_content"):
                own |= self.thoughts.get(masked(messages[: number + 1]), set())
            choices.append(own)
        found, known = set(), self.tokenizers[model]
        for thoughts in itertools.product(*choices):
            made = [as_objects(m) | {"reasoning_content": t}
                    for m, t in zip(messages, thoughts, strict=True)]  # fmt: skip
            text = rendered(known, made, tools=list(ask.tools) or None)
            found.add(plain(text.replace(f"<think>{CUT}</think>", "<think>")))
        return found

    def learn(self, ask: GenerationRequest, answer: Message) -> None:
        if thought := answer.get("reasoning_content"):
            history = [*(ask.messages or ()), answer]
            self.thoughts.setdefault(masked(list(map(dict, history))), set()).add(thought)


def as_objects(message: Message) -> Message:
    made = copy.deepcopy(message)
    for call in made.get("tool_calls", ()):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return made


@dataclass
class Asked:
    """A request, how it may end, and where its answer goes on."""

    ask: GenerationRequest
    refused: str = ""  # a word of the refusal
    history: list[Message] | None = None


class Client:
    """A client with a few histories, which it goes on with, edits, copies and spoils."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self._rng, self._number, self.histories = rng, number, list[list[Message]]()

    def _id(self) -> str:
        return "".join(self._rng.choices("abcdefgh01", k=9))

    def _question(self) -> Message:
        name = {"name": self._rng.choice(["ann", "bob"])} if self._rng.random() < 0.3 else {}
        return {"role": "user", "content": self._rng.choice(WORDS), **name}

    def _fresh(self) -> list[Message]:
        text = self._rng.choice(["Be kind.", "Be kind. ", "Be short."])
        line = self._rng.choice(["", "\nModel: v1", "\nModel: v2", "\n - Model: v3"])
        system = [{"role": "system", "content": text + line}] if self._rng.random() < 0.7 else []
        return [*system, self._question()]

    def ask(self, others: list[list[Message]]) -> Asked:
        rng = self._rng
        known = [*self.histories, *others]
        if not known or rng.random() < 0.15:
            history = self._fresh()
        else:
            history = self._changed(copy.deepcopy(rng.choice(known)))
        return self._sent(self._ended(history))

    def _changed(self, history: list[Message]) -> list[Message]:
        """A history with perhaps one thing changed in it."""
        rng = self._rng
        at, what = rng.randrange(len(history)), rng.random()
        message = history[at]
        if what < 0.15:
            history = history[: at + 1]
        elif what < 0.3:
            message["content"] += (
                " so" if message["role"] == "assistant" else rng.choice([" ", " so"])
            )
        elif what < 0.5:
            self._renamed(history)
        elif what < 0.6 and message["role"] == "user":
            message["name"] = "eve"
        for answer in history:
            if "reasoning_content" in answer and rng.random() < 0.4:
                del answer["reasoning_content"]
            elif answer["role"] == "assistant" and rng.random() < 0.05:
                answer["reasoning_content"] = f"thought of {self._number}"
        return history

    def _renamed(self, history: list[Message]) -> None:
        """Other ids for all calls."""
        ids: dict[str, str] = {}
        for message in history:
            for call in message.get("tool_calls", ()):
                call["id"] = ids.setdefault(call["id"], self._id())
            if "tool_call_id" in message:
                message["tool_call_id"] = ids.setdefault(message["tool_call_id"], self._id())

    def _ended(self, history: list[Message]) -> list[Message]:
        """A history that can be answered."""
        last = history[-1]
        if last["role"] == "assistant" and last.get("tool_calls"):
            result = {"role": "tool", "name": "look", "content": self._rng.choice(WORDS)}
            return [*history, {**result, "tool_call_id": last["tool_calls"][0]["id"]}]
        return history if last["role"] in ("user", "tool") else [*history, self._question()]

    def _sent(self, history: list[Message]) -> Asked:
        rng = self._rng
        facts: dict[str, Any] = {"max_tokens": rng.choice([9, 9, 9, 2])}
        facts["tools"] = rng.choice([(), (), *((tool,) for tool in TOOLS)])
        model, refused, sent = rng.choice(["thinks", "calls"]), "", copy.deepcopy(history)
        what = rng.random()
        if what < 0.12:
            rng.choice([m for m in sent if m["role"] != "system"])["content"] += f" {FORBIDDEN}"
            refused = "no such word"
        elif what < 0.16:
            facts["sampling"], refused = Sampling(logit_bias={10**7: 1.0}), "logit_bias"
        elif what < 0.18:
            sent[-1]["content"] += "x" * 140_000
            refused = "context"
        elif what < 0.2:
            model, refused = "nobody", "there is no model"
        facts["strategy"] = rng.choice([None] * 6 + ["reread"])
        ask = GenerationRequest(model=model, messages=tuple(sent), **facts)
        return Asked(ask, refused, None if refused else history)


class Sequences:
    """Sequences of requests at one server, each answer of which is checked as it ends."""

    def __init__(self, folders: Mapping[str, Path], kept: Path, verbatim: bool) -> None:
        models = {name: str(folder) for name, folder in folders.items()}
        self._settings = Settings(
            models=models, conversations=str(kept), verbatim=verbatim, prefill_step_size=64
        )
        self._verbatim = verbatim
        self._world = World({name: reference(folder) for name, folder in folders.items()})
        self.start()
        self.answered = self.refused = self.cancelled = self.kept = 0

    def start(self) -> None:
        """A new server, which finds the conversations that the one before has kept."""
        self._engine = Scheduler(self._settings)
        self._clients = Clients(self._engine)

    def stop(self) -> None:
        self._engine.close()

    def run(self, rng: random.Random) -> None:
        clients = [Client(rng, number) for number in range(2)]
        for _ in range(rng.randint(3, 8)):
            if rng.random() < 0.05:
                self._put_away()
            number = rng.randrange(2)
            both = [number, 1 - number] if rng.random() < 0.3 else [number]
            sent = []
            for one in both:
                asked = clients[one].ask(clients[1 - one].histories)
                sent.append((asked, clients[one], *self._clients.send(asked.ask)))
            if rng.random() < 0.15:
                self._cancel(sent.pop(), rng.randint(0, 6))
            self._finish(sent)

    def _put_away(self) -> None:
        store = self._engine.store
        store.budget = 1
        store.make_room()
        store.budget = 10**12

    def _cancel(self, sent: tuple[Asked, Client, int, Told], rounds: int) -> None:
        for _ in range(rounds):
            self._engine.work()
        self._engine.cancel(sent[2])
        self.cancelled += 1
        if not sent[0].refused:  # what was written of it is an answer, told or not
            whole = WRITES[sent[0].ask.model][1]
            cut = [("", CUT)] * self._verbatim
            for content, thought in [("", whole), ("well", whole), *cut]:
                answer = {"role": "assistant", "content": content, "reasoning_content": thought}
                self._world.learn(sent[0].ask, answer)

    def _finish(self, sent: list[tuple[Asked, Client, int, Told]]) -> None:
        left = list(sent)
        while self._engine.busy:
            self._engine.work()
            done = [each for each in left if each[3].ended or each[0].refused]
            left = [each for each in left if each not in done]
            for asked, client, _, told in done:
                if not asked.refused:
                    self._check(asked, told, len(done))
                    self._book(asked, client, told)
        for asked, _, _, told in sent:
            if asked.refused:
                assert asked.refused in told.failed.message
                self.refused += 1
            assert told.events, asked

    def _check(self, asked: Asked, told: Told, ended: int) -> None:
        """What the model was given is what was asked."""
        model, count = asked.ask.model, told.usage.prompt_tokens
        latest = sorted(self._engine.store.sessions, key=lambda s: (s.ending, s.used), reverse=True)
        ending = [session for session in latest if session.ending]
        decode = self._world.tokenizers[model].decode
        given = [plain(decode(session.line(model).tokens[:count]))
                 for session in ending or latest[:ended]]  # fmt: skip
        expected = self._world.prompts(model, asked.ask)
        assert expected & set(given), f"given: {short(given[0])}\nexpected: {short(min(expected))}"
        self.answered += 1
        self.kept += told.usage.cached_tokens

    def _book(self, asked: Asked, client: Client, told: Told) -> None:
        answer = told.message
        self._world.learn(asked.ask, answer)
        if asked.history is not None:
            client.histories.append([*asked.history, answer])
            del client.histories[:-4]


def run_all(folders: Mapping[str, Path], root: Path, numbers: Sequence[int], verbatim: bool) -> Any:
    """All sequences of some numbers; the last server's counts added up."""
    counts = dict.fromkeys(("answered", "refused", "cancelled", "kept"), 0)
    for start in range(0, len(numbers), TOGETHER):
        server = Sequences(folders, root / f"kept{start}", verbatim)
        for number in numbers[start : start + TOGETHER]:
            if number % 6 == 5:
                server.stop()
                server.start()
            try:
                server.run(random.Random(number))
            except AssertionError as error:
                raise AssertionError(f"sequence {number}: {error}") from None
        server.stop()
        for name in counts:
            counts[name] += getattr(server, name)
    return counts


@pytest.mark.parametrize("verbatim", [False, True], ids=["", "verbatim"])
def test_each_request_is_read_as_by_a_fresh_server(
    folders: dict[str, Path], tmp_path: Path, verbatim: bool
) -> None:
    share = SEQUENCES // 4
    counts = run_all(folders, tmp_path, range(FIRST, FIRST + share), verbatim)
    print(share, counts)
    assert counts["answered"] > share and counts["refused"] > share // 2 and counts["cancelled"]
    assert counts["kept"] > 20 * counts["answered"]  # else nothing could have been mixed up


def contents_of_before(_: Keys, read: Sequence[Message], asked: Sequence[Message]) -> list[Message]:
    """What a session has at the same places, as it is taken over where keys leave out ids."""
    texts = [own["content"] for own in read]
    return [{**m, "content": text} for m, text in itertools.zip_longest(asked, texts[: len(asked)])]


@pytest.mark.parametrize("fault", ["contents", "ids", "answers", "thoughts"])
def test_faults_are_noticed(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from kvlingo_mlx.engine import transcript

    if fault == "contents":
        monkeypatch.setattr(Keys, "taken_over", contents_of_before)
    elif fault == "ids":
        monkeypatch.setattr(
            transcript.Transcript, "_of_same_ids", lambda _, __, before, ___: before
        )
    elif fault == "thoughts":  # an answer is gone on with, whatever it thought
        monkeypatch.setattr(transcript, "_whole", transcript.meaning)
    else:  # the same words anywhere are the same answer
        monkeypatch.setattr(transcript, "_places", lambda ms: list(map(transcript.meaning, ms)))
    with pytest.raises(AssertionError, match="sequence"):
        run_all(folders, tmp_path, range(200), fault == "thoughts")
