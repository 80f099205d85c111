"""Drawn bodies to all endpoints: each is answered, or refused in one clear line."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from faults.bodies import PLAIN, drawn
from faults.server import Server

OPTIONS = ("--max-tokens", "4", "-c", "body_limit=100kB", "--memory-limit", "60MB",
           "--no-keep-conversations", "--log-level", "warning")  # fmt: skip
AT_ONCE = 8


def run(folder: Path, bodies: int, seed: int) -> dict[str, Any]:
    """Send them; what is wrong is printed and counted."""
    server = Server(folder, *OPTIONS)
    try:
        found = asyncio.run(_all(server, bodies, seed))
        found["tracebacks"] = server.tracebacks()
        found["restarts"] = server.status()["restarts"]
        found["alive"] = server.process.poll() is None
    finally:
        server.stop()
    return found


async def _all(server: Server, bodies: int, seed: int) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    requests = drawn(seed, bodies)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for path, body in PLAIN.items():  # else all below could be refusals
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text

        async def some() -> None:
            for path, body, kind in requests:
                headers = {"content-type": kind} if kind else {}
                try:
                    answer = await client.post(path, content=body, headers=headers)
                except httpx.HTTPError as error:
                    fault: str | None = f"no answer ({type(error).__name__})"
                    counts["none"] += 1
                else:
                    fault = judged(path, answer)
                    counts[str(answer.status_code)] += 1
                if fault:
                    wrong.append(fault)
                    print(f"{path} {kind!r:.20} {body!r:.600}: {fault}", flush=True)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return {"bodies": bodies, "statuses": dict(sorted(counts.items())), "wrong": len(wrong)}


def judged(path: str, answer: httpx.Response) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer.status_code == 200:
        if "event-stream" not in answer.headers["content-type"]:
            return None if isinstance(_json(answer.text), dict) else "200 without an object"
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        data = [_json(line) for line in lines if line != "[DONE]"]
        failed = [each for each in data if each is None or each.get("error")]
        return f"a stream with {failed[0]}" if failed else None if data else "an empty stream"
    if not 400 <= answer.status_code < 500:
        return f"status {answer.status_code}, {answer.text!r:.300}"
    return told_well(path, answer)


def told_well(path: str, answer: httpx.Response) -> str | None:
    """What is wrong with a refusal: it has its API's form, and one line that can be printed."""
    body = _json(answer.text)
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
