"""Where a prompt's tokens came from: counts are disjoint, whole, and the same ahead of a switch."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel

SEEDS = int(os.environ.get("KVLINGO_EXAMPLES", "3"))  # more of them by hand
NAMES = ("tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe")
MESSAGES = ("Anna lives in Rome.", "Where does Anna live?", "Oscar has two cats.", "So?")


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {name: kv.load(zoo(name)) for name in NAMES}


def counts(talk: Conversation, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What one answer says of its prompt, in all of its responses and of its switch."""
    responses = list(talk.stream_reply(name, max_tokens=5, **asked))
    first, switch = responses[0], talk.last_switch
    assert switch is not None
    found = {
        field: getattr(first, field)
        for field in ("cached_tokens", "translated_tokens", "read_tokens", "translator")
    }
    for each in responses:
        assert {field: getattr(each, field) for field in found} == found
        assert sum(value for value in found.values() if isinstance(value, int)) == (
            each.prompt_tokens
        )
    assert (switch.kept, switch.translated, switch.read + 1, switch.ahead) == (
        first.cached_tokens, first.translated_tokens, first.read_tokens, first.ahead_tokens,
    )  # fmt: skip
    used = {str(TRANSLATORS / f"{source}--{name}") for source in switch.sources}
    assert set((first.translator or "").split(", ")) - {""} == used
    assert first.ahead_tokens <= first.translated_tokens
    return {**found, "texts": "".join(response.text for response in responses)}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_counts_are_disjoint_and_whole(
    models: dict[str, LanguageModel], seed: int, tmp_path: Path
) -> None:
    """A switch that was prepared says the same as one that was not, but for what was ``ahead``.

    Until something is taken back: a line that has followed is shorter then than one that has not.
    """
    rng = random.Random(seed)
    chosen = {name: models[name] for name in NAMES[: 2 + seed % 2]}
    switches = {"enable_thinking": rng.choice([None, False]), "verbatim": rng.random() < 0.5}
    both = {eager: Conversation(chosen, eager=eager, **switches) for eager in (True, False)}
    total: Counter[str] = Counter()
    forward = True
    for step in range(14):
        action = rng.choice(["say"] * 6 + ["undo", "edit", "branch", "resume", "prefill"])
        name, other, message = rng.choice(list(chosen)), rng.choice(list(chosen)), step % 4
        told, forward = [], forward and action not in ("undo", "edit")
        for eager, talk in both.items():
            asked: dict[str, Any] = {"message": f"{step}. {MESSAGES[message]}"}
            if action == "undo" and talk.messages:
                talk.undo()
            elif action == "edit" and talk.messages:
                asked = {"messages": [*talk.messages[:-2], {"role": "user", "content": "Who?"}]}
            elif action == "branch":
                both[eager] = talk = talk.branch()
            elif action == "resume" and talk.messages:
                folder = talk.save(tmp_path / f"{eager}{step}")
                both[eager] = talk = Conversation.resume(folder, chosen, eager=eager)
            elif action == "prefill":
                asked["prefill"] = other
            told.append(counts(talk, name, asked))
        assert told[0] == told[1] or not forward
        total += Counter({key: n for key, n in told[0].items() if isinstance(n, int)})
    assert total["translated_tokens"] and total["cached_tokens"], "or nothing was shown"
