"""Sessions that go from model to model, each with a template that behaves as a released one's."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvlingo_mlx.serving.scheduler import Scheduler
from tests.support import tiny
from tests.support.engines import SEEN, Seen
from tests.support.fixtures import Folders, Temp
from tests.support.real_templates import FAMILIES, NAMES, Family, reference, rendered, write_real
from tests.support.router_sessions import CHAT_TOOLS, FACT, AgentSession, missing, new_words, walk
from tests.support.serving import Running, running

CLIENTS = ("openai", "claude", "openai, streaming", "claude, streaming")
ANSWERS = 8  # of a session


@dataclass
class Served:
    """Models behind a server, the two clients, and the tokenizers as transformers reads them."""

    openai: Any
    claude: Any
    tokenizers: dict[str, Any]
    engine: Scheduler
    usage: Any = None  # of the last answer

    def prompt(self, model: str, tokens: int) -> str:
        """The text of what a model held before it wrote its last answer."""
        while self.engine.busy:  # it tells the end before it books it
            time.sleep(0.001)
        session = max(self.engine.store.sessions, key=lambda session: session.used)
        return self.tokenizers[model].decode(session.line(model).tokens[:tokens])

    def ask(self, session: AgentSession, model: str, client: int) -> str:
        """One answer, booked in the session; the prompt's text. Odd clients are Anthropic's."""
        if client % 2 == 0:
            self.usage = session.ask_openai(self.openai, model, client % 4 == 2)
            return self.prompt(model, self.usage.prompt_tokens)
        self.usage = session.ask_claude(self.claude, model, client % 4 == 3)
        return self.prompt(model, self.usage.input_tokens + self.usage.cache_read_input_tokens)


def clients(server: Running, folders: Folders) -> Served:
    own = {"api_key": "none", "max_retries": 0, "timeout": 60}
    return Served(
        openai.OpenAI(base_url=f"{server.url}/v1", **own),
        anthropic.Anthropic(base_url=server.url, **own),
        {name: reference(folder) for name, folder in folders.items()},
        Seen.now,  # the one that was made last
    )


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    folders = {family.name: write_real(root / family.name, family) for family in FAMILIES}
    models = {name: str(folder) for name, folder in folders.items()}
    with running(root, SEEN, models=models, keep_conversations=False) as server:
        yield clients(server, folders)


def test_any_model_takes_over_from_any_other(served: Served) -> None:
    """All ordered pairs: always an answer, and all that was said is in the prompt."""
    steps, faults = walk(NAMES), list[str]()
    assert len(set(itertools.pairwise(steps))) == len(NAMES) * (len(NAMES) - 1) == len(steps) - 1
    words = new_words()
    for start in range(0, len(steps) - 1, ANSWERS - 1):
        faults += answered(served, steps[start : start + ANSWERS], words, start)
    print("\n".join(faults))
    assert not faults, f"{len(faults)} faults, the first: {faults[0]}"


def answered(served: Served, models: Sequence[str], words: Iterator[str], start: int) -> list[str]:
    """The faults of a session that these models answer in turn."""
    session, faults = AgentSession(words, kind=start), list[str]()
    for number, (before, name) in enumerate(itertools.pairwise(["", *models]), start):
        kind = session.turn(number)
        where = f"{before} -> {name}, {kind}, {CLIENTS[number % 4]}"
        try:
            prompt = served.ask(session, name, number)
        except (openai.APIError, anthropic.APIError) as error:
            faults.append(f"{where}: {error}")
            session = AgentSession(words, kind=number)  # the other one cannot go on
            continue
        answer = session.history.pop()
        faults += [f"{where}: {fault}" for fault in missing(session, prompt)]
        session.history.append(answer)
        session.wrote_by(FAMILIES[NAMES.index(name)])
    return faults


@pytest.mark.parametrize("client", range(4), ids=CLIENTS)
@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_what_a_model_writes_is_divided(served: Served, family: Family, client: int) -> None:
    """Thought, text and call, after a question and after a result; no mark is left of any."""
    session = AgentSession(new_words())
    for _ in range(2):
        if not session.results():
            session.question()
        served.ask(session, family.name, client)
        answer, parts = session.history[-1], family.parts
        found = (
            answer.thought.strip(),
            answer.text,
            [json.loads(c.arguments) for c in answer.calls],
        )
        calls = [{"place": parts["C"]}] if "C" in parts else []
        assert found == (parts.get("T", ""), parts.get("S", ""), calls)


@pytest.mark.parametrize("name", NAMES)
def test_all_is_told_before_an_answer_that_is_begun(served: Served, name: str) -> None:
    """Also where a template shows instructions and tools with the last message alone."""
    first, second, third = itertools.islice(new_words(), 3)
    history = [("system", first), ("user", second), ("assistant", third)]
    messages: list[Any] = [{"role": role, "content": word} for role, word in history]
    messages[-1]["prefix"] = True
    usage = served.openai.chat.completions.create(
        model=name, messages=messages, tools=CHAT_TOOLS, max_tokens=1
    ).usage
    prompt = served.prompt(name, usage.prompt_tokens)
    assert FACT.findall(prompt) == [first, second, third] and prompt.endswith(third)
    alone = rendered(served.tokenizers[name], messages[1:2], tools=CHAT_TOOLS)
    assert ("Looks at a place." in prompt) is ("Looks at a place." in alone)


@pytest.mark.parametrize(
    "name, begun",
    [
        ("llama3", '{"name": "look", "parameters": {"place": '),
        ("gpt-oss", "<|channel|>commentary to="),
        ("granite4", '<tool_call>\n{"name": "look", "arguments": {"place"'),
    ],
)
def test_calls_are_demanded_and_forbidden(served: Served, name: str, begun: str) -> None:
    """Also where a call begins with no mark, or with one of several tokens."""
    asked: dict[str, Any] = {"model": name, "tools": CHAT_TOOLS, "max_tokens": 40, "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "Look."}]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}, "none", "auto"):
        told = served.openai.chat.completions.create(**asked, tool_choice=choice).choices[0].message
        if choice == "none" and name == "gpt-oss":  # which calls what it was not told of
            continue
        assert bool(told.tool_calls) == (choice == "auto")  # 40 tokens are too few for others
        assert choice in ("none", "auto") or told.content.startswith(begun)


def test_what_a_prompt_lacks_is_noticed() -> None:
    """The negative control: words are lost, told twice or moved."""
    session = AgentSession(new_words())
    session.question()
    session.foreign(session.arguments(), session.arguments())
    session.turn(0)
    texts = [" ".join([s.text, *(c.arguments for c in s.calls)]) for s in session.history]
    good, words = " ".join(texts), FACT.findall(" ".join(texts))
    assert not missing(session, good)
    assert all(missing(session, good.replace(word, "")) for word in words)
    assert all(missing(session, f"{good} {word}") for word in words)
    assert missing(session, " ".join([*texts[:-2], texts[-1], texts[-2]]))
    session.wrote["saidqwen3"] = 1
    assert missing(session, good) and not missing(session, f"{good} saidqwen3")


STRICT = FAMILIES[NAMES.index("qwen3.5")]
TWO = ("here", "there")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: Temp) -> Iterator[Served]:
    """Two models whose template takes a system message at the beginning alone, and translators."""
    root = tmp_path_factory.mktemp("strict")
    folders = {name: write_real(root / name, STRICT) for name in TWO}
    ways = tuple(
        str(tiny.write_random_translator(root / f"{a}-{b}", folders[a], folders[b], nu=1, seed=7))
        for a, b in itertools.permutations(TWO)
    )
    models = {name: str(folder) for name, folder in folders.items()}
    more = {"models": models, "translators": ways, "keep_conversations": False}
    with running(root, SEEN, **more) as server:
        yield clients(server, folders)


@pytest.mark.parametrize("stays", [True, False], ids=["reminders stay", "reminders go"])
def test_reminders_cost_no_cache(strict: Served, stays: bool) -> None:
    """Twenty turns, a switch and a late system message with each, as coding agents send them."""
    session, shares = AgentSession(new_words()), list[float]()
    session.say("system", "You are an agent. " + "Be kind to all places that you look at. " * 60)
    session.history = session.history[-1:]
    session.question()
    for turn in range(20):
        session.say("system", "Remember the list of things to do:")
        if turn % 2:  # else the history ends with the reminder
            session.question()
        prompt = strict.ask(session, TWO[turn % 2], client=1)
        answer = session.history.pop()
        assert not missing(session, prompt)
        usage = strict.usage
        kept = usage.cache_read_input_tokens + usage.kvlingo["translated_tokens"]
        shares.append(kept / (usage.input_tokens + usage.cache_read_input_tokens))
        if not stays:
            place = max(n for n, said in enumerate(session.history) if said.role == "system")
            del session.history[place]
        session.history.append(answer)
        session.wrote_by(STRICT)
        assert session.results()
    assert min(shares[1:]) >= 0.9, shares
