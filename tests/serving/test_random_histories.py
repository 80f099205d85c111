"""Histories that go by chance: the server's answers are those of the library's conversations."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

import kvlingo_mlx as kv  # noqa: E402
from kvlingo_mlx.embedded import zoo  # noqa: E402
from kvlingo_mlx.models.language_model import LanguageModel  # noqa: E402
from kvlingo_mlx.serving.scheduler import Scheduler  # noqa: E402
from kvlingo_mlx.serving.settings import Settings  # noqa: E402
from tests.support import histories  # noqa: E402
from tests.support.engines import Clients, asked  # noqa: E402
from tests.support.served import PLAIN, ZOO, Server  # noqa: E402

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "1"))  # more of them by hand
NAMES = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe", "small": "tiny-qwen3-s"}
Asks = Sequence[tuple[str, list[histories.Message]]]


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {name: kv.load(zoo(folder)) for name, folder in NAMES.items()}


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_the_engine_answers_as_a_conversation(
    models: dict[str, LanguageModel], tmp_path: Path, seed: int
) -> None:
    folders = {name: str(zoo(folder)) for name, folder in NAMES.items()}
    clients = Clients(Scheduler(Settings(models=folders, conversations=str(tmp_path / "kept"))))

    def answers(asks: Asks) -> list[str]:
        return [told.text for told in clients.together([asked(*ask) for ask in asks])]

    assert histories.compare(answers, models, seed, rounds=5) <= 1


def test_a_forgotten_message_is_noticed(models: dict[str, LanguageModel], tmp_path: Path) -> None:
    folders = {name: str(zoo(folder)) for name, folder in NAMES.items()}
    clients = Clients(Scheduler(Settings(models=folders, conversations=str(tmp_path / "kept"))))

    def answers(asks: Asks) -> list[str]:
        return [told.text for told in clients.together([asked(n, m[-1:]) for n, m in asks])]

    with pytest.raises(AssertionError, match="said .*, not "):
        histories.compare(answers, models, 0, rounds=5)


def test_the_server_answers_as_a_conversation(
    models: dict[str, LanguageModel], zoo_server: Server
) -> None:
    rng, two = random.Random(0), {name: models[name] for name in ZOO}
    with ThreadPoolExecutor(4) as pool:

        def answers(asks: Asks) -> list[str]:
            jobs = [pool.submit(answer, zoo_server, rng.randrange(3), *ask) for ask in asks]
            return [job.result() for job in jobs]

        assert histories.compare(answers, two, 100, rounds=2 * EXAMPLES) <= 1


def answer(server: Server, way: int, model: str, messages: list[histories.Message]) -> str:
    """One request: by one API or the other, streaming or not."""
    if way == 0:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        message = client.messages.create(
            model=model, messages=messages, max_tokens=histories.NEW, extra_body=PLAIN
        )
        return "".join(part.text for part in message.content)
    body = {"model": model, "messages": messages, "max_tokens": histories.NEW, "extra_body": PLAIN}
    create = server.openai.chat.completions.create
    if way == 1:
        return create(**body).choices[0].message.content or ""
    chunks = create(**body, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
