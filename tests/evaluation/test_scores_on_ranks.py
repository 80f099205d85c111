"""Scores that several ranks of ``mlx.launch`` share, beside one process that makes all of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from tests.support import rank_jobs
from tests.support.command_line import run
from tests.support.ranks import launched, shared

ALL = "KVLINGO_EXAMPLES" in os.environ
MODULE = ("-m", "tests.support.rank_jobs")
ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
BY_HAND = pytest.mark.skipif(not ALL, reason="by hand: every process takes seconds to start")


def case(folder: Path, **more: Any) -> dict[str, Any]:
    source, target = (str(zoo(name)) for name in ENDS)
    translator = str(TRANSLATORS / "--".join(ENDS))
    return {
        "name": "scores", "work": "scores", "source": source, "target": target, "items": 2,
        "translator": translator, "journal": str(folder / "journal.jsonl"), **more,
    }  # fmt: skip


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=BY_HAND)])
def test_scores_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    """To the last bit, on every rank: items, receipts, the demo's; two in the journal before."""
    asked = case(tmp_path)
    alone = rank_jobs.scores({**asked, "journal": str(tmp_path / "alone.jsonl")})["told"]
    lines = (tmp_path / "alone.jsonl").read_text().splitlines()
    some = [line for line in lines if "settings" in line][:3] + lines[3:5]
    (tmp_path / "journal.jsonl").write_text("\n".join(some) + '\n{"run": "half a li')
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path), "cases": [asked]}))
    done = shared(count, *MODULE, str(job))
    assert done.returncode == 0, done.stdout[-2000:]
    for rank in range(count):
        found = np.load(tmp_path / f"scores-{rank}.npz")["told"]
        assert str(found) == str(alone)
    kept = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert sorted(kept) == sorted(lines) and kept[: len(some)] == some
    assert len(lines) == 3 + 3 * asked["items"]


@BY_HAND
def test_ranks_with_other_translators_or_items_are_told(tmp_path: Path) -> None:
    asked, other = case(tmp_path), str(tmp_path / "other")
    config, weights = translator_folder.read(TRANSLATORS / "--".join(ENDS))
    halved = {name: np.float32(0.5) * weights.as_float32(name) for name in weights.arrays}
    translator_folder.write(other, config, Weights.from_float32(halved, "float32"))
    job = tmp_path / "job.json"
    for on, what in (({"items": 4}, "data"), ({"translator": other}, "way, model or translator")):
        job.write_text(json.dumps({"folder": str(tmp_path), "cases": [{**asked, "on": {"1": on}}]}))
        done = shared(2, *MODULE, str(job))
        assert done.stdout.count(f"rank 1 has another {what} than rank 0") == 2
        assert not list(tmp_path.glob("*.npz"))


TALKS = [{"messages": t.conversation()} for t in dialogues.held_out(5, facts=(2, 3), questions=2)]


@BY_HAND
@pytest.mark.parametrize("verb", ["eval", "verify", "tune", "lm-eval"])
def test_verbs(
    tmp_path: Path, task_folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank prints and writes what one process does."""
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, TALKS)))
    ends = ["--source", ENDS[0], "--target", ENDS[1]]
    data = ["--data", str(tmp_path / "talks.jsonl")]
    words = {
        "eval": ["eval", *ends, *data, "--tasks", "recall,continuation,needles", "--needles",
                 "single", "--lengths", "256", "--limit", "3"],
        "verify": ["verify", str(TRANSLATORS / "--".join(ENDS)), *ends],
        "tune": ["tune", *ends, "--limit", "3", "--native-layers", "0,2", "-c", "trials=1"],
        "lm-eval": ["eval", *ends, "--tasks", "tiny_choice,tiny_words,tiny_answers",
                    "--include-path", str(task_folder), "--batch-size", "1"],
    }[verb]  # fmt: skip
    out = lambda name: ["--out", str(tmp_path / name)] if verb != "verify" else []  # noqa: E731
    record = lambda name: ["--json", str(tmp_path / f"{name}-record")]  # noqa: E731
    assert run([*words, *out("alone"), *record("alone")]) == 0
    said = capsys.readouterr().out
    tool = [sys.executable, "-m", "kvlingo_mlx.cli"]
    done = launched(2, *tool, *words, *out("ranks"), *record("ranks"))
    assert "exited with code" not in done.stdout + done.stderr, done.stderr[-2000:]
    one, other = (
        json.loads((tmp_path / f"{name}-record").read_text())["results"]
        for name in ("alone", "ranks")
    )
    if verb == "tune":
        for point, same in zip(one["points"], other["points"], strict=True):
            assert all(point[name] == same[name] for name in ("way", "layers", "kl", "recall"))
    else:
        assert one == other
        # The launcher may break a character of a table's frame in two.
        lines = [line for line in said.splitlines() if line.isascii() and str(tmp_path) not in line]
        assert lines and all(done.stdout.splitlines().count(line) == 1 for line in lines)
    if verb == "eval":
        alone, ranks = ((tmp_path / n).read_text().splitlines() for n in ("alone", "ranks"))
        assert sorted(alone) == sorted(ranks)
