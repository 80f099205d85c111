"""What each rank of ``mlx.launch`` does in a test: ``python -m tests.support.ranks JOB.json``.

It hands over and decodes with its part of a target, and writes what it holds into the job's folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import TESTS

TOKENS, DRAWN = 40, 6  # of a greedy answer, and of one that is drawn
RANK = int(os.environ.get("MLX_RANK", 0))
SIDES = ("keys", "values")


def launched(count: int, *words: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    """A program on so many ranks of this machine, by MLX's own launcher."""
    launch = Path(sys.executable).parent / "mlx.launch"
    port = random.randrange(20000, 60000 - count)  # tests beside this one have ranks of their own
    return subprocess.run(
        [launch, "-n", str(count), "--starting-port", str(port), *words],
        capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, cwd=TESTS.parent,
    )  # fmt: skip


def no_end(model: LanguageModel) -> Any:
    """A logits processor that lets no answer end."""
    stops = mx.array(sorted(model.tokenizer.eos_token_ids))
    ends = (mx.arange(model.geometry.embedding_rows)[:, None] == stops).any(-1)
    return lambda tokens, logits: mx.where(ends, -mx.inf, logits)


def answer(source: Any, target: LanguageModel, case: dict[str, Any], **options: Any) -> list[int]:
    """The tokens of an answer of a fixed length."""
    given = {"translator": case["translator"], "max_tokens": TOKENS, "prefill_step_size": 7}
    processors = [no_end(target), *options.pop("then", ())]
    responses = kv.stream_generate(
        source, target, case["tokens"], logits_processors=processors, **{**given, **options}
    )
    return [response.token for response in responses]


def held(cache: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """A cache's arrays by layer and side, up to its end."""
    for layer, each in enumerate(cache):
        for side in SIDES:
            array = getattr(each, side)[0, :, : each.offset]
            yield f"{layer}.{side}", np.array(array.astype(mx.float32))


def dies_after(length: int) -> Any:
    """A logits processor that kills its process once so many tokens are there."""

    def die(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > length:
            os.kill(os.getpid(), signal.SIGKILL)
        return logits

    return die


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["cases"]:
        own = case.get("translators", {}).get(str(RANK))
        case["translator"] = own or case["translator"]
        target = kv.load(case["target"], shard=case["kind"])
        then = [dies_after(len(case["tokens"]) + 3)] if job.get("dies") == RANK else []
        cache = kv.hand_over(
            case["source"], target, case["tokens"], translator=case["translator"],
            prefill_step_size=7, native_layers=case.get("native_layers", 0),
        )  # fmt: skip
        arrays = dict(held(cache))
        arrays["answer"] = np.array(answer(case["source"], target, case, then=then))
        drawn = answer(case["source"], target, case, temperature=1.0, max_tokens=DRAWN)
        arrays["drawn"] = np.array(drawn)
        np.savez(Path(job["folder"]) / f"{case['name']}-{RANK}.npz", **arrays)


if __name__ == "__main__":
    main()
