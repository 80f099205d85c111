"""A server, its parent, or both, killed at random moments: what clients hear, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from faults.clients import Client, Findings, user
from faults.server import Server
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.serving.sessions import Key, Keys, shared

# So little memory that conversations go to disk all the time.
OPTIONS = ("--memory-limit", "34MB", "--prefill-step-size", "32", "--log-level", "warning",
           "-c", "stop_timeout=10", "-c", "queue_limit=100")  # fmt: skip
CLIENTS = 5
WITHIN_S = 3.0  # after all is well, a kill comes within so many seconds
SAYS = ("crashed", "is being started", "is started again", "is stopping")


class Struck(Client):
    """A client that goes on with its conversation when the server is back."""

    async def use(self, http: httpx.AsyncClient, until: asyncio.Event) -> None:
        """Ask until the server is gone."""
        self.http = http
        while not until.is_set() and await self.once():
            await asyncio.sleep(self.chance.random() * 0.2)

    async def once(self) -> bool:
        """Ask once; whether there was an answer. Else the history is as before."""
        before, model = list(self.history), self.model
        answers = self.told.counts["answers"]
        try:
            await self.ask()
        except httpx.HTTPError as error:
            self.told.counts[f"heard {type(error).__name__}"] += 1
            self.history, self.model = before, model
            return False
        if self.history:
            return True
        if self.told.counts["answers"] > answers:
            return True  # the conversation was long
        self.history, self.model = before, model
        return False

    def question(self) -> None:
        """Go on, mostly; a conversation that went on from an earlier place is a copy."""
        if len(self.history) > 8 or not self.history:
            self.begin()
        super().question()

    def refused(self, path: str, response: httpx.Response) -> bool:
        """As all clients', and the crash must be told."""
        if response.status_code == 503 and not any(say in response.text for say in SAYS):
            self.told.fault(f"what happened is not told: {response.text:.300}")
        return super().refused(path, response)

    def take(self, answer: Any, told: dict[str, Any]) -> None:
        """As all clients'; a stream may break off if it says why."""
        if told.get("error") and any(say in told["error"]["message"] for say in SAYS):
            self.told.counts["streams that told of a crash"] += 1
            told = {"error": {}}
        super().take(answer, told)

    def kept(self, saved: list[list[Key]]) -> bool:
        """Whether a saved conversation begins as this client's does, by its keys."""
        ask = GenerationRequest("", tuple(self.history), template={"enable_thinking": False})
        keys = Keys().of(ask)
        return any(shared(keys, each)[0] > 1 for each in saved)


def run(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """So many kills; what is wrong is printed and counted."""
    server, told, chance = Server(folder, *OPTIONS), Findings(), random.Random(seed)
    users = [Struck(number, seed, told) for number in range(CLIENTS)]
    killed: Counter[str] = Counter()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the figures until then are told
            while sum(killed.values()) < kills:
                what = chance.choice(["server", "server", "parent", "both"])
                asyncio.run(_round(server, users, what, chance, killed))
                saved = _saved(server)
                _tidy(server, told)
                asyncio.run(_after(server, users, saved, what, told))
        found = {"tracebacks": server.tracebacks(), "starts": server.starts}
    finally:
        server.stop()
    return {
        "killed": dict(killed), **found, "wrong": len(told.wrong), "folders": len(_saved(server)),
        "counts": dict(sorted(told.counts.items())),
    }  # fmt: skip


async def _round(
    server: Server, users: list[Struck], what: str, chance: random.Random, killed: Counter[str]
) -> None:
    """Ask, kill, and wait until the server is back; sometimes it is killed once more meanwhile."""
    until = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        running = [asyncio.create_task(each.use(http, until)) for each in users]
        await asyncio.sleep(chance.random() * WITHIN_S)
        killed[what] += server.kill(what)
        until.set()
        await asyncio.gather(*running)
    again = chance.random() < 0.2
    if what != "server":
        await asyncio.to_thread(server.start)
    elif again:
        await asyncio.sleep(chance.random() * 4)
        killed["server that starts"] += server.kill("server")
    await asyncio.to_thread(_ready, server)


def _ready(server: Server) -> None:
    time.sleep(0.3)  # what was killed is noticed by then
    server.ready()


def _saved(server: Server) -> list[list[Key]]:
    return [json.loads(path.read_text())["keys"] for path in server.kept.glob("*.json")]


def _tidy(server: Server, told: Findings) -> None:
    """Nothing lies in the folder but whole conversations."""
    names = {path.name for path in server.kept.iterdir()} - {"lock"}
    whole = {path.stem for path in server.kept.glob("*.json")}
    if rubbish := names - whole - {f"{name}.json" for name in whole}:
        told.fault(f"in the folder lies also {sorted(rubbish)[:5]}")
    if lost := whole - names:
        told.fault(f"there are keys without a conversation: {sorted(lost)[:5]}")
    if drafts := list(server.kept.glob("*/*.tmp")):
        told.fault(f"drafts are left: {drafts[:5]}")


async def _after(
    server: Server, users: list[Struck], saved: list[list[Key]], what: str, told: Findings
) -> None:
    """Each client goes on; whose conversation was saved finds it."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        for each in users:
            each.http = http
            kept = bool(each.history) and each.kept(saved)
            if each.history and what == "parent" and not kept:
                told.fault("the server lost its parent and did not save a conversation")
            each.history.append(user(each.chance, each.name()))
            answer = await each.answered(each.body(stream=False))
            if answer is None:
                told.fault("no answer though the server is ready")
                each.history.pop()
                continue
            if kept and answer.alone:
                told.fault(f"a saved conversation was read anew: {answer}")
            told.counts["went on with saved" if kept else "went on with others"] += 1
            await told.judge(answer, one_model=each.model != "any")
            each.history = [*answer.messages, {"role": "assistant", "content": answer.text}]
