"""Tasks of lm-eval on local files, one of each kind."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

WORDS = "the you and use is of an other hero on in it at re ion".split()


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(low, high)))


def write_task(folder: Path, name: str, records: Sequence[dict], **config: Any) -> None:
    """A task file of the user's, as lm-eval's documentation has it, and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(record) for record in records))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


QUAC = {
    "dialogue_id": "d1", "wikipedia_page_title": "Daffy Duck", "section_title": "Origin",
    "background": "A duck.", "context": "Daffy first appeared in 1937. CANNOTANSWER",
    "questions": ["When did he appear?", "Who drew him?"], "turn_ids": ["d1_q#0", "d1_q#1"],
    "answers": {"texts": [["in 1937", "Daffy first appeared in 1937"], ["CANNOTANSWER"]],
                "answer_starts": [[21], [0]]},
    "orig_answers": {"texts": ["first appeared in 1937", "CANNOTANSWER"],
                     "answer_starts": [6, 30]},
}  # fmt: skip
MT_BENCH = [
    {"task": "CM", "id": 7, "history": [{"user": f"u{i}", "bot": f"b{i}"} for i in range(4)]},
    {"task": "MR", "id": 8, "history": [{"user": "1+1?", "bot": "It is 2."}]},
]
