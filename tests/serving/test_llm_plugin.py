"""The plug-in of llm, tools/llm-kvlingo: ten turns with a switch and a new process at each."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from llm.cli import cli
from llm.plugins import pm

import kvlingo_mlx as kv
from tests.support import ROOT

ASKED = (
    "I want you to remember a few things about my friends. The hotel of Emma is Lima. "
    "The code of Rosa is A4. The home of Paul is Oslo. What is the hotel of Emma?",
    "What is the code of Rosa?",
    "What is the home of Paul?",
)
MODELS = {"small": "tiny-qwen3-s", "large": "tiny-qwen3-l"}


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs llm's command line with the plug-in, which remembers nothing between two calls."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "llm-kvlingo"))
    import llm_kvlingo

    pm.register(llm_kvlingo)
    llm_kvlingo.register_commands(cli)

    def run(*words: str) -> Any:
        llm_kvlingo._talks.clear()
        return CliRunner().invoke(cli, words)

    yield run
    pm.unregister(llm_kvlingo)


@pytest.mark.filterwarnings("ignore")
def test_ten_turns_with_a_switch_at_each(terminal: Any, tmp_path: Path) -> None:
    assert terminal("kvlingo", *(f"{n}={m}" for n, m in MODELS.items())).exit_code == 0
    turns = [(("small", "large")[n % 2], ASKED[1 + n % 2 if n else 0]) for n in range(10)]
    talk = kv.Conversation({n: kv.load(m) for n, m in MODELS.items()}, enable_thinking=False)
    for number, (name, question) in enumerate(turns):
        told = terminal(question, "-m", name, *(["-c"] if number else []))
        assert told.exit_code == 0, told.output
        wanted = talk.reply(name, question, max_tokens=1024)
        assert told.stdout.strip() == wanted.strip()
    logged = json.loads(terminal("logs", "-n", "10", "--json").output)
    assert len({each["conversation_id"] for each in logged}) == 1
    counts = [json.loads(each["token_details"])["kvlingo"] for each in logged]
    assert not counts[0]["translated_tokens"] and not counts[0]["cached_tokens"]
    assert all(each["translated_tokens"] > 0 for each in counts[1:])
    most = max(each["read_tokens"] for each in counts[1:])  # the question and its marks
    assert most < 40 < counts[0]["read_tokens"]
    # Without the folder the same words are read again: the control.
    for folder in (tmp_path / "kvlingo").iterdir():
        for file in folder.iterdir():
            file.unlink()
    told = terminal(ASKED[1], "-c", "-m", "small")
    assert told.exit_code == 0 and "read again" in told.stderr
    last = json.loads(terminal("logs", "-n", "1", "--json").output)[0]
    counts = json.loads(last["token_details"])["kvlingo"]
    assert counts["translated_tokens"] == counts["cached_tokens"] == 0
