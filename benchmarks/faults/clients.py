"""Clients that hold conversations, leave, dawdle and send rubbish."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from faults.judging import ROUNDED, ROUTED, ROUTED_SHARE, TIE, Answer, Message, Replay, gap
from faults.server import MODELS

CHAT = "/v1/chat/completions"
WORDS = "Anna Oscar Maria Iris Rome Oslo Dallas code friend home lives works the a is of".split()
MOST = 12  # tokens of most answers
LONGEST = 400  # tokens of a prompt, then a conversation ends
# What a server that is asked too much may say beside answers: a refusal that says so.
TOLD = (400, 404, 408, 413, 429, 503)
PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
# What is no JSON, or no request; tests/serving/test_wire_fuzz.py has more of the latter.
RUBBISH = (
    b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5_000, b"0" * 150_000,
    b"\xef\xbb\xbf{}", b'{"model":"small"', b'{"model":"small"}x', b'{"model":NaN}',
    b'{"model":"none","messages":[{"role":"user","content":"Hi"}],"prompt":"Hi","input":"Hi"}',
    b'{"model":"small","messages":[{}],"prompt":{},"input":[[]]}', b'{"model":"\\ud800"}',
)  # fmt: skip
TYPES = ("application/json", "application/json", "", "text/plain", "a;b;c", "x" * 500)


@dataclass
class Findings:
    """What the clients found."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    exact: float = 0.0
    rounded: float = 0.0

    def fault(self, text: str) -> None:
        """Note what must not be."""
        self.wrong.append(text)
        print(text[:6000], flush=True)

    async def judge(self, answer: Answer, *, one_model: bool) -> None:
        """Compare an answer with its model's own first choices, where they are comparable."""
        if not (answer.alone or one_model) or not answer.tokens:
            return
        found = await asyncio.to_thread(gap, answer, answer.messages)
        if found is None:
            self.counts["other tokens"] += 1
            return
        self.counts["judged exact" if answer.alone else "judged rounded"] += 1
        if answer.alone:
            self.exact = max(self.exact, found)
        else:
            self.rounded = max(self.rounded, found)
        if not answer.alone and answer.model in ROUTED:
            self.counts["routed"] += 1
            self.counts["routed apart"] += found > ROUNDED
        elif found > (TIE if answer.alone else ROUNDED):
            self.fault(f"an answer is off by {found:.4f}: {answer}")

    def routes(self) -> None:
        """Judge how many answers of a mixture of experts rounding has sent elsewhere."""
        apart, all_of = self.counts["routed apart"], self.counts["routed"]
        if apart > max(1, ROUTED_SHARE * all_of):
            self.fault(f"{apart} of {all_of} rounded answers of {', '.join(ROUTED)} are apart")

    async def control(self, answer: Answer, other: list[Message]) -> None:
        """Judge an answer as one to another prompt, which must show."""
        self.counts["controls"] += 1
        found = await asyncio.to_thread(gap, answer, other)
        self.counts["controls caught"] += found is not None and found > ROUNDED


def user(chance: random.Random, name: str) -> Message:
    """A question that no other client asks."""
    words = " ".join(chance.choices(WORDS, k=chance.choice([3, 8, 20, 60])))
    return {"role": "user", "content": f"{name} {words}?"}


class Client:
    """One client, with one conversation at a time."""

    http: httpx.AsyncClient

    def __init__(self, number: int, seed: int, told: Findings) -> None:
        self.number, self.told = number, told
        self.chance = random.Random(f"{seed}-{number}")
        self.history: list[Message] = []
        self.begun, self.model, self.pause = 0, "large", 1.0
        self.last: Answer | None = None

    def name(self) -> str:
        """How its questions begin in this conversation."""
        return f"{WORDS[self.number % 8]} {self.number} {self.begun}"

    def begin(self) -> None:
        """Begin a conversation, with one model alone or with all."""
        self.begun += 1
        self.history = []
        self.model = self.chance.choice([*MODELS, *["any"] * 3])

    async def use(self, http: httpx.AsyncClient, until: asyncio.Event) -> None:
        """Do what chance says until the time is over."""
        self.http = http
        acts = [self.ask] * 8 + [self.leave] * 3 + [self.junk, self.hold, self.large, self.slow]
        while not until.is_set():
            act = self.chance.choice(acts)
            try:
                await act()
            except httpx.HTTPError as error:
                self.told.fault(f"{act.__name__}: {type(error).__name__} {error}")
            await asyncio.sleep(self.chance.random() * self.pause)

    def question(self) -> None:
        """Go on: a new question, the last one again or edited, or from an earlier place."""
        what = self.chance.random()
        if not self.history or what < 0.1:
            self.begin()
        elif what < 0.2 and len(self.history) > 1:
            del self.history[-2:]
        elif what < 0.25:
            del self.history[2 * self.chance.randrange(len(self.history) // 2 + 1) :]
        self.history.append(user(self.chance, self.name()))

    def body(self, **more: Any) -> dict[str, Any]:
        """A request for the history's next answer."""
        model = self.chance.choice(list(MODELS)) if self.model == "any" else self.model
        plain = {"enable_thinking": False}
        return {"model": model, "messages": self.history, "max_tokens": MOST, "logprobs": True,
                "top_logprobs": 4, "chat_template_kwargs": plain, **more}  # fmt: skip

    async def ask(self) -> None:
        """An answer, which is judged and joins the history."""
        self.question()
        body = self.body(stream=self.chance.random() < 0.5)
        if self.chance.random() < 0.15:
            body |= {"temperature": 1.0, "max_tokens": 30}
        answer = await self.answered(body, slowly=self.chance.random() < 0.2)
        if answer is None:
            self.history = []
            return
        if "temperature" not in body:
            await self.told.judge(answer, one_model=self.model != "any")
            if self.last is not None and self.chance.random() < 0.05 and answer.alone:
                await self.told.control(answer, self.last.messages)
            self.last = answer
        self.history = [*answer.messages, {"role": "assistant", "content": answer.text}]
        if answer.usage["prompt_tokens"] > LONGEST:
            self.history = []

    async def answered(self, body: dict[str, Any], *, slowly: bool = False) -> Answer | None:
        """A whole answer; None if it was refused."""
        answer = Answer(body["model"], body["messages"])
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
            async for event in self.events(body):
                self.take(answer, event)
                if slowly:
                    await asyncio.sleep(self.chance.random() * 0.3)
        else:
            response = await self.http.post(CHAT, json=body)
            if self.refused(CHAT, response):
                return None
            self.take(answer, response.json())
        if "error" in answer.usage:
            return None
        if answer.reason is None or answer.usage["completion_tokens"] != len(answer.tokens):
            self.told.fault(f"an answer is not whole: {answer}")
        self.told.counts["answers"] += 1
        return answer

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What a stream brings."""
        async with self.http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self.refused(CHAT, response)
                yield {"error": {}}
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    def take(self, answer: Answer, told: dict[str, Any]) -> None:
        """Add to an answer what a response or an event tells."""
        if told.get("error") is not None:
            if told["error"]:
                self.told.fault(f"a stream broke off: {told}")
            answer.usage["error"] = True
            return
        answer.usage |= told.get("usage") or {}
        for choice in told.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            answer.text += said.get("content") or ""
            answer.reason = choice.get("finish_reason") or answer.reason
            for each in (choice.get("logprobs") or {}).get("content") or ():
                answer.tokens.append(each["id"])
                tops = {top["id"]: top["logprob"] for top in each["top_logprobs"]}
                answer.tops.append({**tops, each["id"]: each["logprob"]})

    def refused(self, path: str, response: httpx.Response) -> bool:
        """Whether a request was refused; how must be clear."""
        self.told.counts[f"status {response.status_code}"] += 1
        self.pause = 5.0 if response.status_code == 429 else 1.0
        if response.status_code == 200:
            return False
        fault = told_well(path, response)
        if response.status_code not in TOLD:
            fault = f"status {response.status_code}, {response.text:.300}"
        if fault:
            self.told.fault(f"{path}: {fault}")
        return True

    async def leave(self) -> None:
        """Ask, and go before the first token or in mid-answer; what was heard may be kept."""
        self.question()
        heard = ""
        wanted = self.chance.choice([0, 0, 1, 3, 8])
        with_text = self.body(stream=True, max_tokens=100)
        with_text |= {"logprobs": False, "top_logprobs": None}

        async def listen() -> None:
            nonlocal heard
            count = 0
            async for event in self.events(with_text):
                for choice in event.get("choices", ()):
                    heard += choice["delta"].get("content") or ""
                count += 1
                if wanted and count > wanted:
                    return

        try:
            within = 60.0 if wanted else self.chance.random() * 0.1
            await asyncio.wait_for(listen(), within)
        except TimeoutError:
            self.told.counts["left early"] += 1
        self.told.counts["left"] += 1
        if heard and self.chance.random() < 0.5:
            self.history.append({"role": "assistant", "content": heard})
        else:
            self.history.pop()

    async def junk(self) -> None:
        """A body of which something is wrong, mostly."""
        path, body, kind = map(self.chance.choice, (PATHS, RUBBISH, TYPES))
        headers = {"content-type": kind} if kind else {}
        self.refused(path, await self.http.post(path, content=body, headers=headers))

    async def large(self) -> None:
        """A body that is too large, or a prompt that is too long."""
        long = "Anna lives in Rome. " * self.chance.choice([1500, 20_000])
        body = {"model": "small", "messages": [{"role": "user", "content": long}]}
        self.refused(CHAT, await self.http.post(CHAT, json=body))

    async def slow(self) -> None:
        """A body that comes too slowly."""

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"model": '
            await asyncio.sleep(self.chance.choice([0.5, 4.0]))
            yield b'"nobody", "messages": []}'

        try:
            self.refused(CHAT, await self.http.post(CHAT, content=parts()))
        except httpx.HTTPError:  # the server had answered and closed before it was asked
            self.told.counts["cut off"] += 1

    async def hold(self) -> None:
        """Load or unload a model, whoever uses it."""
        name, verb = self.chance.choice(list(MODELS)), self.chance.choice(["load", "unload"])
        path = f"/v1/models/{name}/{verb}"
        self.refused(path, await self.http.post(path))


class Pinned(Client):
    """A client whose conversation is pinned, so exact, and replayed by the library."""

    asked = 0

    def name(self) -> str:
        """No two questions near each other begin alike, not even with the same letter.

        The line of a model that is not loaded does not follow, so it may still hold a question that
        was replaced. What the next one shares with it, be it one token, is translated, which the
        library, whose lines all follow, would let the answering model read: another answer, and as
        right.
        """
        self.asked += 1
        first = string.ascii_lowercase[self.asked % 26]
        return (
            first + "".join(self.chance.choices(string.ascii_lowercase, k=2)) + " " + super().name()
        )

    async def use(self, http: httpx.AsyncClient, until: asyncio.Event) -> None:
        """Ask, again and again; nothing else, so that the library can do the same."""
        self.http = http
        self.begin()
        self.model, replay = "any", Replay()
        tie = False
        while not until.is_set():
            length = 0 if self.last is None else self.last.usage["prompt_tokens"]
            what = 0.0 if tie or length > LONGEST else self.chance.random()
            if what < 0.3 and len(self.history) > 2:
                del self.history[-2:]
            elif tie:  # the server would begin anew for another first question; so do both
                self.begin()
                self.model, replay = "any", Replay()
            self.history.append(user(self.chance, self.name()))
            body = self.body(stream=self.chance.random() < 0.5, kvlingo={"pin": True})
            while (answer := await self.answered(body)) is None:  # too many wait
                await asyncio.sleep(self.pause)
            differs = await asyncio.to_thread(replay.differs, answer, MOST)
            tie = differs == "tie"
            self.told.counts["ties" if tie else "replayed"] += 1
            if differs and not tie:
                off = await asyncio.to_thread(gap, answer, answer.messages)
                self.told.fault(f"not as the library: {differs}; off by {off}; {answer}")
                tie = True
            self.last = answer
            self.history = [*answer.messages, {"role": "assistant", "content": answer.text}]
            await asyncio.sleep(self.chance.random())


def told_well(path: str, answer: httpx.Response) -> str | None:
    """What is wrong with a refusal: it has its API's form, and one line that can be printed."""
    body = json_of(answer.text)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return f"status {answer.status_code} without an error, {answer.text!r:.300}"
    keys = {"type", "message"} if "messages" in path else {"type", "message", "param", "code"}
    if set(error) != keys or ("messages" in path and body.get("type") != "error"):
        return f"another API's error: {body}"
    message = error["message"]
    if not (10 < len(message) < 900 and message.isprintable() and message == message.strip()):
        return f"not one clear line: {message!r:.300}"
    return None


def json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
