"""What each rank of ``mlx.launch`` does in a test: ``python -m tests.support.ranks JOB.json``.

It hands over and decodes with its part of a target, and writes what it holds into the job's folder.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # transformers would load PyTorch, which takes each rank seconds
    sys.modules["torch"] = None  # type: ignore[assignment]

from kvlingo_mlx.backend import mx

import numpy as np

import kvlingo_mlx as kv
from kvlingo_mlx.caches.memory import weights_bytes
from kvlingo_mlx.loading.opening import let_go
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import TESTS
from tests.support.processes import free_ports

TOKENS, DRAWN = 16, 6  # of a greedy answer, and of one that is drawn
RANK = int(os.environ.get("MLX_RANK", 0))
SIDES = ("keys", "values")
ESTABLISHED, SIOCOUTQNSD = 1, 0x894B  # Linux's names


def launching(count: int, *words: str) -> list[str]:
    """The command that starts a program on so many ranks of this machine, by MLX's launcher."""
    launch = Path(sys.executable).parent / "mlx.launch"
    return [str(launch), "-n", str(count), "--starting-port", str(free_ports(count)), *words]


def launched(
    count: int, *words: str, seconds: int = 900, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """What a program on so many ranks has printed at its end; ``typed`` is its standard input."""
    return subprocess.run(
        launching(count, *words), capture_output=True, text=True, timeout=seconds, input=typed,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, cwd=TESTS.parent,
    )  # fmt: skip


def shared(count: int, *words: str, seconds: int = 900) -> subprocess.CompletedProcess[str]:
    """What a program of Python on so many ranks has printed, when each has ended by itself.

    MLX's launcher would keep a processor busy meanwhile, and end the others if one fails.
    """
    first = free_ports(count)
    with tempfile.TemporaryFile("w+") as said, tempfile.NamedTemporaryFile("w") as hosts:
        json.dump([[f"127.0.0.1:{first + rank}"] for rank in range(count)], hosts)
        hosts.flush()
        told = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MLX_HOSTFILE": hosts.name}
        ranks = [
            subprocess.Popen(
                [sys.executable, *words], env={**told, "MLX_RANK": str(rank)}, cwd=TESTS.parent,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            end = time.monotonic() + seconds
            statuses = [rank.wait(max(0.0, end - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said.seek(0)
        return subprocess.CompletedProcess(words, max(statuses, key=abs), said.read())


def no_end(model: LanguageModel) -> Any:
    """A logits processor that lets no answer end."""
    stops = mx.array(sorted(model.tokenizer.eos_token_ids))
    ends = (mx.arange(model.geometry.embedding_rows)[:, None] == stops).any(-1)
    return lambda tokens, logits: mx.where(ends, -mx.inf, logits)


def answer(source: Any, target: LanguageModel, case: dict[str, Any], **options: Any) -> list[int]:
    """The tokens of an answer of a fixed length."""
    given = {
        "translator": case["translator"],
        "max_tokens": TOKENS,
        "prefill_step_size": case.get("step", 7),
    }
    responses = kv.stream_generate(
        source, target, case["tokens"], logits_processors=[no_end(target)], **{**given, **options}
    )
    return [response.token for response in responses]


def held(cache: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """A cache's arrays by layer and side, up to its end."""
    for layer, each in enumerate(cache):
        for side in SIDES:
            array = getattr(each, side)[0, :, : each.offset]
            yield f"{layer}.{side}", np.array(array.astype(mx.float32))


def sent() -> int:
    """The bytes that this process has sent over its connections."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        if not (link.exists() or link.is_symlink()) or "socket:" not in os.readlink(link):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as each:
            if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                found += sent_over(each)
    return found


def sent_over(link: socket.socket) -> int:
    """The bytes that a connection has sent, without those that a busy machine has sent again."""
    while True:
        waits = any(fcntl.ioctl(link, SIOCOUTQNSD, bytes(4)))  # to be sent
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)  # Linux's tcp_info
        if info[0] != ESTABLISHED:  # MLX tries until the others listen
            return 0
        if not waits:
            sent, again = np.frombuffer(info, np.uint64, 2, 200).tolist()
            return int(sent - again)
        time.sleep(0.01)


QUESTIONS = (
    ("small", "The home of Paul is Oslo. What is the home of Paul?"),
    ("large", "The pet of Anna is a cat. What is the home of Paul?"),
    ("small", "What is the pet of Anna?"),
    ("large", "And what is the home of Paul?"),
)


def talks(models: dict[str, LanguageModel], folder: Path, **rules: Any) -> dict[str, np.ndarray]:
    """A conversation with both models, healed, saved and resumed: the tokens and the caches."""
    talk = kv.Conversation(models, enable_thinking=False, **rules)
    said = [talk.reply(*question, max_tokens=12) for question in QUESTIONS[:3]]
    if not rules.get("native_layers"):
        talk.heal("large", answers=True)
    talk.save(folder)
    let_go(models["large"])  # its weights are read again, each rank its own
    talk = kv.Conversation.resume(folder, models, **rules)
    said.append(talk.reply(*QUESTIONS[3], max_tokens=12))
    found = {f"{name}.tokens": np.array(line.tokens) for name, line in talk.lines.items()}
    for name, line in talk.lines.items():
        found |= {f"{name}.{key}": array for key, array in held(line.cache)}
    return found | {"said": np.array(said)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job.get("talks", ()):
        models = {
            "small": kv.load(case["source"], shard="tensor" if case.get("sharded") else None),
            "large": kv.load(case["target"], shard="tensor"),
        }
        folder = Path(job["folder"])
        found = talks(models, folder / f"{case['name']}-saved", **case.get("rules", {}))
        np.savez(folder / f"{case['name']}-{RANK}.npz", **found)
    for case in job.get("cases", ()):
        own = case.get("translators", {}).get(str(RANK))
        case["translator"] = own or case["translator"]
        target = kv.load(case["target"], shard="tensor")
        source = kv.load(case["source"], shard="tensor" if case["sharded"] else None)
        before = sent()
        cache = kv.hand_over(
            source, target, case["tokens"], translator=case["translator"],
            prefill_step_size=case.get("step", 7), native_layers=case.get("native_layers", 0),
        )  # fmt: skip
        arrays = dict(held(cache))
        arrays["sent"] = np.array(sent() - before)
        arrays["loaded"] = np.array(weights_bytes(target))
        arrays["answer"] = np.array(answer(source, target, case))
        drawn = answer(source, target, case, temperature=1.0, max_tokens=DRAWN)
        arrays["drawn"] = np.array(drawn)
        np.savez(Path(job["folder"]) / f"{case['name']}-{RANK}.npz", **arrays)


if __name__ == "__main__":
    main()
