"""The worker's life as its link sees it: events, cancels, crashes, hangs, restarts, the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from kvlingo_mlx.serving import link as links
from kvlingo_mlx.serving.link import Asked, ClientGone, Link
from kvlingo_mlx.serving.messages import (
    Ask,
    Begun,
    Count,
    Counted,
    Ended,
    Failed,
    Piece,
    Waiting,
)
from kvlingo_mlx.serving.settings import Settings
from tests.support.scripted_worker import TOLD, WORKER

Use = Callable[[Link], Awaitable[None]]


def run(use: Use, folder: Path, *, wait: bool = True, entry: str = WORKER, **more: Any) -> Link:
    """Use a link whose worker runs scripts; it is stopped in the end."""
    given = {"models": {"small": "a", "large": "b"}, "conversations": str(folder)}
    settings = Settings(**{**given, "worker_timeout": 60.0, "stop_timeout": 5.0, **more})

    async def whole() -> Link:
        link = Link(settings, entry, 0.05)
        await link.start()
        try:
            if wait:
                await until(lambda: link.ready)
            await use(link)
        finally:
            await link.stop()
        return link

    return asyncio.run(whole())


async def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.02)


def ask(link: Link, script: str) -> Asked:
    return link.ask(Ask("small", prompt=script))


async def events(asked: Asked) -> list[Any]:
    found: list[Any] = []
    while not found or not isinstance(found[-1], Ended | Failed | Counted | ClientGone):
        found.append(await asked.next(60.0))
    return found


def told(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / TOLD).read_text().splitlines()]


def test_events_come_in_order(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        first, second = ask(link, "waiting;begin;say a;say b"), ask(link, "begin;say c")
        assert [type(e) for e in await events(first)] == [Waiting, Begun, Piece, Piece, Ended]
        assert [e.content for e in await events(second) if isinstance(e, Piece)] == ["c"]
        counted = await link.ask(Count(Ask("small", prompt="four"))).last()
        assert counted == Counted(4)
        assert link.status is not None and [m.name for m in link.status.models] == [
            "small",
            "large",
        ]

    run(use, tmp_path)
    assert told(tmp_path)[-1] == ["stop"]


def test_waiting_is_until_the_first_token(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        asked = [ask(link, "waiting;wait 0.5;begin;wait 60"), ask(link, "wait 60")]
        assert link.waiting == 2
        await until(lambda: link.waiting == 1)
        asked[1].close()
        assert link.waiting == 0
        asked[0].close()
        await until(lambda: told(tmp_path).count(["cancel"]) == 2)

    run(use, tmp_path)


def test_a_timer_gives_none_and_loses_nothing(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        asked = ask(link, "wait 0.6;begin")
        assert await asked.next(0.1) is None
        assert [type(e) for e in await events(asked)] == [Begun, Ended]

    run(use, tmp_path)


def test_closing_what_is_over_cancels_nothing(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        asked = ask(link, "begin")
        await events(asked)
        asked.close()
        await ask(link, "begin").last()

    run(use, tmp_path)
    assert ["cancel"] not in told(tmp_path)


def test_loads(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        def loaded() -> list[bool]:
            return [] if link.status is None else [m.loaded for m in link.status.models]

        assert isinstance(await link.unload("large").last(), Counted)
        await until(lambda: loaded() == [True, False])
        assert isinstance(await link.load("large").last(), Counted)
        await until(lambda: loaded() == [True, True])
        assert link.waiting == 0

    run(use, tmp_path)


@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("signal SIGKILL", "SIGKILL"),
        ("signal SIGABRT", "SIGABRT"),
        ("signal SIGSEGV", "SIGSEGV"),
        ("exit 3", "exit status 3"),
    ],
)
def test_a_crash_ends_requests_and_starts_anew(death: str, how: str, tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        others = [ask(link, "wait 60"), ask(link, "begin;wait 60")]
        found = await events(ask(link, f"begin;say a;{death}"))
        assert [type(e) for e in found] == [Begun, Piece, Failed]
        for failed in (found[-1], *[await other.last() for other in others]):
            assert failed.kind == "crashed" and how in failed.message
            assert "send the request again" in failed.message
        assert not link.ready and link.waiting == 0
        refused = await ask(link, "begin").last()
        assert isinstance(refused, Failed) and "is started again" in refused.message
        await until(lambda: link.ready)
        assert isinstance(await ask(link, "begin").last(), Ended)

    assert run(use, tmp_path).restarts == 1


def test_a_pipe_that_is_closed_is_a_crash(tmp_path: Path, monkeypatch: Any) -> None:
    """Though the process lives on."""
    monkeypatch.setattr("kvlingo_mlx.serving.link.ENDING_S", 0.1)

    async def use(link: Link) -> None:
        failed = await ask(link, "begin;close;wait 60").last()
        assert isinstance(failed, Failed) and failed.kind == "crashed"
        await until(lambda: link.ready)

    assert run(use, tmp_path).restarts == 1


@pytest.mark.parametrize("script", ["wait 1000", "deaf"])
def test_a_worker_that_hangs_is_killed(script: str, tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        failed = await ask(link, script).last()
        assert isinstance(failed, Failed) and "it hung" in failed.message
        await until(lambda: link.ready)

    assert run(use, tmp_path, worker_timeout=1.0).restarts == 1


def test_a_pipe_that_nobody_reads_is_a_hang(tmp_path: Path) -> None:
    """It is told from silence: the request that fills the pipe has been cancelled."""

    async def use(link: Link) -> None:
        await events(ask(link, "begin"))
        deaf, large = ask(link, "deaf"), ask(link, "wait 0;" + "x" * 10_000_000)
        large.close()
        deaf.close()
        await until(lambda: link.restarts == 1)

    run(use, tmp_path, worker_timeout=1.0)


def test_one_that_has_nothing_to_do_may_be_silent(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        await asyncio.sleep(1.5)
        assert isinstance(await ask(link, "waiting;wait 0.3;waiting;wait 0.3").last(), Ended)

    assert run(use, tmp_path, worker_timeout=0.5).restarts == 0


def test_it_gives_up_after_crashes_in_a_row(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "CRASHES", 3)
    (tmp_path / "first").write_text("signal SIGABRT")

    async def use(link: Link) -> None:
        told = await asyncio.wait_for(asyncio.shield(link.given_up), 60)
        assert "crashed 3 times in a row" in told and "SIGABRT" in told and "\n" not in told
        failed = await ask(link, "begin").last()
        assert failed == Failed("crashed", told)

    assert run(use, tmp_path, wait=False).restarts == 2


def test_an_answer_between_crashes_begins_the_count_anew(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "CRASHES", 2)

    async def use(link: Link) -> None:
        for _ in range(3):
            assert isinstance(await ask(link, "begin").last(), Ended)
            await ask(link, "exit 1").last()
            await until(lambda: link.ready)
        assert not link.given_up.done()

    assert run(use, tmp_path).restarts == 3


def test_pauses_grow(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "CRASHES", 5)
    (tmp_path / "first").write_text("exit 1")
    pauses: list[float] = []
    again = Link._again

    async def noted(self: Link, pause: float) -> None:
        pauses.append(pause)
        await again(self, pause)

    monkeypatch.setattr(Link, "_again", noted)

    async def use(link: Link) -> None:
        await asyncio.wait_for(asyncio.shield(link.given_up), 60)

    run(use, tmp_path, wait=False)
    assert pauses == [0.05, 0.1, 0.2, 0.4]


def test_a_fatal_error_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("fatal there is no model /models/a, so give another")

    async def use(link: Link) -> None:
        told = await asyncio.wait_for(asyncio.shield(link.given_up), 60)
        assert told == "there is no model /models/a, so give another"

    assert run(use, tmp_path, wait=False).restarts == 0


def test_an_entry_that_does_not_exist_is_a_crash(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "CRASHES", 1)

    async def use(link: Link) -> None:
        assert "exit status 1" in await asyncio.wait_for(asyncio.shield(link.given_up), 60)

    run(use, tmp_path, wait=False, entry="tests.support.scripted_worker:nothing")


def test_a_stop_ends_requests_and_lets_the_worker_save(tmp_path: Path) -> None:
    asked: list[Asked] = []

    async def use(link: Link) -> None:
        asked.append(ask(link, "begin;wait 60"))
        await until(lambda: link.waiting == 0)
        await link.stop()
        *_, failed = await events(asked[0])
        assert isinstance(failed, Failed) and "is stopping" in failed.message
        refused = await ask(link, "begin").last()
        assert isinstance(refused, Failed) and "is stopping" in refused.message

    run(use, tmp_path)
    assert told(tmp_path)[-2:] == [["cancel"], ["stop"]]


def test_a_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def use(link: Link) -> None:
        ask(link, "deaf")
        await until(lambda: (tmp_path / TOLD).exists())

    run(use, tmp_path, stop_timeout=0.5)
    assert ["stop"] not in told(tmp_path)


def test_the_worker_ends_with_the_front(tmp_path: Path) -> None:
    """The front is killed outright; its worker sees the end of the pipe."""
    code = (
        "import asyncio, os\n"
        "from kvlingo_mlx.serving.link import Link\n"
        "from kvlingo_mlx.serving.settings import Settings\n"
        "async def main():\n"
        f"    settings = Settings(models={{'a': 'a'}}, conversations={str(tmp_path)!r})\n"
        f"    link = Link(settings, {WORKER!r})\n"
        "    await link.start()\n"
        "    while not link.ready: await asyncio.sleep(0.02)\n"
        "    os._exit(9)\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    script = tmp_path / "front.py"
    script.write_text(code)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(script)], cwd=root, env={"PYTHONPATH": str(root)})
    assert done.returncode == 9

    async def ended() -> None:
        await until(lambda: (tmp_path / TOLD).exists() and told(tmp_path) == [["end of pipe"]])

    asyncio.run(ended())
