"""Clients that others have written around those of OpenAI and Anthropic: llm, and litellm.

litellm is large and needs an openai of its own, so its tests run where somebody has installed it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("openai")

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from tests.support.served import ZOO, Server

QUESTIONS = ("Anna lives in Rome. Where does Anna live?", "And where is the home of Oscar?", "Why?")


def expected(names: tuple[str, ...]) -> list[str]:
    """The library's answers to these questions, each by the model of this name."""
    talk = kv.Conversation({name: zoo(folder) for name, folder in ZOO.items()})
    asked = zip(names, QUESTIONS, strict=False)
    return [talk.reply(name, question, max_tokens=16).strip() for name, question in asked]


@pytest.fixture
def terminal(zoo_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs llm's command line, to which the server's models are known."""
    pytest.importorskip("llm")
    from click.testing import CliRunner
    from llm.cli import cli

    models = [
        {"model_id": f"kv-{name}", "model_name": name, "api_base": f"{zoo_server.url}/v1"}
        for name in (*ZOO, "none")
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return lambda *words: CliRunner().invoke(cli, words)


def test_llm_goes_on_with_another_model(terminal: Any) -> None:
    """Each answer is that of the library; streamed, whole, streamed."""
    names = ("large", "moe", "large")
    for turn, (name, answer) in enumerate(zip(names, expected(names), strict=True)):
        more = (*(["-c"] if turn else []), *(["--no-stream"] if turn == 1 else []))
        words = (QUESTIONS[turn], "-m", f"kv-{name}", "-o", "max_tokens", "16", *more)
        told = terminal(*words)
        assert told.exit_code == 0 and told.output.strip() == answer
    logged = json.loads(terminal("logs", "-n", "3", "--json").output)
    usages = [json.loads(each["token_details"])["kvlingo"] for each in logged]
    assert [usage["strategy"] for usage in usages] == ["read", "translate", "translate"]
    assert len({each["conversation_id"] for each in logged}) == 1


def test_llm_shows_an_error(terminal: Any) -> None:
    told = terminal("Hello", "-m", "kv-none")
    assert told.exit_code == 1 and "offered are large, moe" in told.output
