"""An agent's session: of each prompt hardly more is read than what is new in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from tests.support import agent  # noqa: E402
from tests.support.served import served  # noqa: E402


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("agent")
    options = agent.write_callers(root, context=4000)
    with served(root / "home", {name: root / name for name in "ab"}, *options) as server:
        yield anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_what_is_new_is_read_alone(client: Any) -> None:
    rows = agent.session(client, 400, order="aabbaab", cleared=5)
    # The first one shares no more than a header with what other tests said.
    assert rows[0]["translated"] == 0 and rows[0]["read"] > 400
    assert {row["strategy"] for row in rows[1:]} == {"kept", "translate"}
    for before, row in itertools.pairwise(rows):
        new = row["prompt"] - before["prompt"] - before["answer"]
        if row["request"] == 5:  # what stands before the change is kept
            assert row["cached"] >= rows[0]["prompt"] + rows[0]["answer"]
            assert new < row["read"] < row["prompt"] / 2
        else:
            # The text of a random model's answer may not say which tokens it was.
            assert 0 < row["read"] <= new + before["answer"] + 1
            assert row["cached"] + row["translated"] >= before["prompt"] - 1
            assert row["model"] == before["model"] or row["translated"] > 0


def test_another_line_that_changes_is_read_anew(client: Any) -> None:
    """The server's settings do not know it, so nothing behind it can be kept."""
    rows = agent.session(client, 400, order="aa", header="x-other-header")
    assert rows[1]["cached"] < 200 and rows[1]["read"] > 400
