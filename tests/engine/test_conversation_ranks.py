"""Conversations whose large model two ranks of ``mlx.launch`` hold, beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from tests.support.ranks import QUESTIONS, shared, talks

SMALL, LARGE, MOE = (str(zoo(f"tiny-qwen3-{name}")) for name in ("s", "l", "moe"))
HEALED = {"heal": "interleaved", "guard": 16, "on_doubt": "heal"}
CASES: list[dict[str, Any]] = [
    {"name": "spread", "target": LARGE, "rules": HEALED},
    {"name": "both", "target": LARGE, "sharded": True},
    {"name": "moe", "target": MOE, "rules": {"offload": "disk"}},
]


@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_ranks_talk_as_one_process_does(tmp_path: Path) -> None:
    """Answers, then caches after healing, saving and resuming, of each rank's heads."""
    cases = [{**case, "source": SMALL} for case in CASES]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path), "talks": cases}))
    done = shared(2, "-m", "tests.support.ranks", str(job))
    assert done.returncode == 0, done.stdout[-3000:]
    for case in cases:
        models = {"small": kv.load(SMALL), "large": kv.load(case["target"])}
        whole = talks(models, tmp_path / case["name"], **case.get("rules", {}))
        assert len(whole["said"]) == len(QUESTIONS) and len(set(whole["said"])) > 1
        for rank in range(2):
            own = dict(np.load(tmp_path / f"{case['name']}-{rank}.npz"))
            assert own["said"].tolist() == whole["said"].tolist(), (case["name"], rank)
            assert own.keys() == whole.keys()
            for key in (key for key in own if key.endswith((".keys", ".values"))):
                got, expected = own[key], whole[key]
                if len(got) < len(expected):
                    expected = np.split(expected, 2)[rank]
                apart = np.linalg.norm(got - expected) / np.linalg.norm(expected)
                assert got.shape == expected.shape and apart < 1e-5, (case["name"], key, apart)
    _refused(tmp_path)


def _refused(folder: Path) -> None:
    """Whole models for what ranks have saved."""
    models = {"small": kv.load(SMALL), "large": kv.load(LARGE)}
    with pytest.raises(kv.MalformedConversationError, match="was saved by 2 ranks of mlx.launch"):
        kv.Conversation.resume(folder / "spread-saved", models)
    with pytest.raises(kv.MalformedConversationError, match="was saved by 2 ranks of mlx.launch"):
        talk = kv.Conversation(models)
        talk.reply("small", "Hello", max_tokens=1)
        talk.save(folder / "spread-saved")
