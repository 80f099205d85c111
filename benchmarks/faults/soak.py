"""Many clients at once for a while, under pressure of memory; afterwards nothing may be left."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx

from faults.clients import Client, Findings, Pinned, user
from faults.server import Server

# Beside the pinned conversations all three models do not fit, and few conversations beside two.
OPTIONS = ("--memory-limit", "40MB", "-c", "body_limit=100kB", "--max-concurrent", "8",
           "-c", "queue_limit=24", "--prefill-step-size", "64", "--max-tokens", "16",
           "-c", "body_timeout=3", "-c", "write_timeout=3", "-c", "keep_alive=1",
           "--log-level", "warning")  # fmt: skip
PINNED = 2
EVERY_S = 2.0  # between two looks at the memory


def run(folder: Path, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    """The soak; what is wrong is printed and counted."""
    server, told = Server(folder, *OPTIONS), Findings()
    kinds = [Pinned if n < PINNED else Client for n in range(clients)]
    users = [kind(n, seed, told) for n, kind in enumerate(kinds)]
    try:
        before = _handles(server)
        looks = asyncio.run(_soak(server, users, minutes))
        left = _left(server, before, told)
        told.routes()
        server.stop()
        server.start()
        asyncio.run(_survived(server, [each for each in users if len(each.history) > 1], told))
        restarts, tracebacks = server.status()["restarts"], server.tracebacks()
    finally:
        server.stop()
    return {
        "minutes": minutes, "clients": clients, **_memory(looks), **left, "restarts": restarts,
        "tracebacks": tracebacks, "wrong": len(told.wrong), "largest_gap_exact": told.exact,
        "largest_gap_rounded": told.rounded, "counts": dict(sorted(told.counts.items())),
    }  # fmt: skip


async def _soak(server: Server, users: list[Client], minutes: float) -> list[dict[str, int]]:
    looks: list[dict[str, int]] = []
    until = asyncio.Event()
    async with _http(server) as http:
        running = [asyncio.create_task(each.use(http, until)) for each in users]
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not any(task.done() for task in running):
            await asyncio.sleep(EVERY_S)
            looks.append(await asyncio.to_thread(_look, server))
            if len(looks) % 30 == 1:
                print(
                    {name: f"{size / 1e6:.0f} MB" for name, size in looks[-1].items()}, flush=True
                )
        until.set()
        await asyncio.gather(*running)
    return looks


def _look(server: Server) -> dict[str, int]:
    """The bytes of both processes, and of the lines that the engine tells of."""
    worker = server.status()["worker"] or {}
    return {**server.memory(), "lines": worker.get("lines_bytes", 0)}


def _http(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)


async def _survived(server: Server, users: list[Client], told: Findings) -> None:
    """Go on with each client's conversation after the restart."""
    async with _http(server) as http:
        for each in users:
            each.http = http
            each.history.append(user(each.chance, each.name()))
            answer = await each.answered(each.body(stream=False))
            told.counts["saved"] += 1
            if answer is not None and answer.alone:
                told.fault(f"a saved conversation was read anew: {answer}")


def _memory(looks: list[dict[str, int]]) -> dict[str, float]:
    """Both processes' mean memory in the second and the last quarter, and what it grew by."""
    quarter, found = max(1, len(looks) // 4), {}
    for name in ("parent", "server", "lines"):
        sizes = [look[name] / 1e6 for look in looks if name in look]
        early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
        found[f"{name}_mb_second_quarter"] = sum(early) / max(1, len(early))
        found[f"{name}_mb_last_quarter"] = sum(late) / max(1, len(late))
        found[f"{name}_mb_most"] = max(sizes)
        if name != "lines":
            found[f"{name}_grew"] = sum(late) / len(late) / (sum(early) / len(early)) - 1
    return found


def _handles(server: Server) -> int:
    """Open files and threads of both processes."""
    pids = [pid for pid in (server.process.pid, server.child()) if pid is not None]
    return sum(len(os.listdir(f"/proc/{pid}/{what}")) for pid in pids for what in ("fd", "task"))


def _left(server: Server, before: int, told: Findings) -> dict[str, Any]:
    """What is left when all clients have gone."""
    until = time.monotonic() + 60
    while (status := server.status())["waiting"] or status["worker"]["running"]:
        if time.monotonic() > until:
            told.fault(f"requests are left: {status}")
            break
        time.sleep(1)
    here, away = status["worker"]["conversations"]
    folders = sum(path.is_dir() for path in server.kept.iterdir())
    files = sum(path.suffix == ".json" for path in server.kept.iterdir())
    if folders != files:
        told.fault(f"{folders} folders of {files} conversations")
    return {"conversations_here": here, "conversations_away": away, "folders": folders,
            "handles_before": before, "handles_after": _handles(server)}  # fmt: skip
