"""What a switch costs through `kvlingo-mlx serve`, beside mlx_lm.server.

    python benchmarks/serving.py [--lengths 2048 4096 8192] [--rounds 5] [--json FILE]

Two random models of Qwen3-0.6B's widths, four layers each, and random translators both ways. One
conversation: model `a` answers a prompt of the given length; then `b` is asked a short question
about it (the switch), and `b` again (no switch). Our server holds both models. mlx_lm.server runs
once for each model, so that it need not load one at a switch; it reads the conversation anew.
Requests to both servers alternate in one run. Measured by the client: seconds to the first token of a
stream; then tokens a second of one answer, and of eight at once; the memory of the idle servers.

One JSON line a length, and one for the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import httpx
from mlx.utils import tree_flatten

from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.geometries import random_model, random_translators

LAYERS, CONTEXT, ANSWER = 4, 40960, 64
Messages = list[dict[str, str]]


def write_model(model: LanguageModel, folder: Path) -> None:
    """A model's folder as users have them, with the zoo's tokenizer."""
    folder.mkdir()
    for file in zoo("tiny-qwen3-s").iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(
        json.dumps({**model.config, "max_position_embeddings": CONTEXT})
    )
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.model.parameters())),
        metadata={"format": "mlx"},
    )


def write_all(room: Path) -> list[str]:
    """Both models and both translators; returns the options of our verb."""
    models = [random_model("qwen3-0.6b", LAYERS, "float32", seed) for seed in (0, 1)]
    options = []
    for name, model in zip("ab", models, strict=True):
        write_model(model, room / name)
        options += ["--model", f"{name}={room / name}"]
    for index, (source, target) in enumerate((models, models[::-1])):
        (made,) = random_translators(source, target, 1, {"float32": ("float32", None)}).values()
        made.save(room / f"t{index}")
        options += ["--translator", str(room / f"t{index}")]
    return options


# ---- servers ------------------------------------------------------------------------------------


class Server:
    """A server in a process of its own."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.client = httpx.Client(timeout=600)

    def ready(self) -> None:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get(f"{self.url}/health").json().get("status") == "ok":
                    return
            time.sleep(0.1)
        raise SystemExit(f"{self.url} did not become ready")

    def memory(self) -> int:
        """Bytes that the server's processes hold in memory."""
        pids = [self.process.pid, *map(int, subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split())]  # fmt: skip
        kilobytes = subprocess.run(
            ["ps", "-o", "rss=", "-p", ",".join(map(str, pids))], capture_output=True, text=True
        ).stdout.split()
        return 1024 * sum(map(int, kilobytes))

    def ask(self, model: str, messages: Messages, tokens: int) -> tuple[float, float, str, dict]:
        """Seconds to the first token and to the last, the answer, and its usage."""
        body = {
            "model": model, "messages": messages, "max_tokens": tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
            "logit_bias": dict.fromkeys(map(str, STOPS), -100),
            "chat_template_kwargs": {"enable_thinking": False},
        }  # fmt: skip
        started, first, text, usage = time.perf_counter(), 0.0, "", {}
        with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                first = first or time.perf_counter() - started
                for choice in data.get("choices", ()):
                    text += choice.get("delta", {}).get("content") or ""
                usage = data.get("usage") or usage
        return first, time.perf_counter() - started, text, usage


STOPS: list[int] = []


@contextlib.contextmanager
def servers(room: Path, options: Sequence[str]) -> Iterator[tuple[Server, dict[str, Server]]]:
    """Ours, and mlx-lm's for each model."""
    step = ["--prefill-step-size", "2048"]
    os.environ["KVLINGO_HOME"] = str(room / "home")
    ours = Server(
        [sys.executable, "-m", "kvlingo_mlx.cli", "serve", *options, "--port", "8190", *step], 8190
    )
    theirs = {
        name: Server([sys.executable, "-m", "mlx_lm.server", "--model", str(room / name),
                      "--port", str(8191 + index), *step], 8191 + index)
        for index, name in enumerate("ab")
    }  # fmt: skip
    try:
        for each in (ours, *theirs.values()):
            each.ready()
        yield ours, theirs
    finally:
        for each in (ours, *theirs.values()):
            each.process.terminate()


# ---- what is measured ---------------------------------------------------------------------------


def prompt_of(length: int, seed: int) -> str:
    """A text of about so many tokens, which no other round has."""
    rng, lines = random.Random(seed), []
    tokenizer = TOKENIZER[0]
    while True:
        names = rng.choices(dialogues.NAMES, k=400)
        lines += [f"{name} is here." for name in names]
        ids = tokenizer.encode(" ".join(lines))
        if len(ids) >= length:
            return tokenizer.decode(ids[:length])


TOKENIZER: list[Any] = []


def switches(ours: Server, theirs: dict[str, Server], length: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a switch and of the turn after it, by server."""
    found: dict[str, list[float]] = {name: [] for name in (
        "ours prompt", "ours switch", "ours same", "theirs prompt", "theirs switch", "theirs same"
    )}  # fmt: skip
    told: dict[str, Any] = {}
    for number in range(rounds + 1):
        for who in ("ours", "theirs"):
            talk: Messages = [{"role": "user", "content": prompt_of(length, 7 * number)}]
            for what, model in (("prompt", "a"), ("switch", "b"), ("same", "b")):
                server = ours if who == "ours" else theirs[model]
                name = model if who == "ours" else "default_model"
                first, _, text, usage = server.ask(name, talk, 8)
                if number:  # the first round warms up
                    found[f"{who} {what}"].append(first)
                if (who, what) == ("ours", "switch"):
                    told = usage.get("kvlingo", {})
                talk = [*talk, {"role": "assistant", "content": text},
                        {"role": "user", "content": "Who?"}]  # fmt: skip
    pairs = {
        "ours: switch / same": ("ours switch", "ours same"),
        "switch: theirs / ours": ("theirs switch", "ours switch"),
        "same: ours / theirs": ("ours same", "theirs same"),
        "prompt: ours / theirs": ("ours prompt", "theirs prompt"),
    }
    ratios = {
        name: measure.median([x / y for x, y in zip(found[a], found[b], strict=True)])
        for name, (a, b) in pairs.items()
    }
    medians = {name: measure.median(values) for name, values in found.items()}
    kept = {k: told.get(k) for k in ("translated_tokens", "read_tokens", "strategy")}
    return {"length": length, "seconds": medians, "ratios": ratios, "switch": kept}


def rates(ours: Server, theirs: dict[str, Server], rounds: int) -> dict[str, Any]:
    """Tokens a second of one answer and of eight at once, by server, and the ratios."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for clients in (1, 8):
            for who, server, model in (
                ("ours", ours, "a"), ("theirs", theirs["a"], "default_model")
            ):  # fmt: skip
                rate = together(server, model, clients, number)
                if number:
                    found.setdefault(f"{who} {clients}", []).append(rate)
    ratios = {
        f"{n} clients: ours / theirs": statistics.median(
            x / y for x, y in zip(found[f"ours {n}"], found[f"theirs {n}"], strict=True)
        )
        for n in (1, 8)
    }
    return {"tokens_per_s": {k: measure.median(v) for k, v in found.items()}, "ratios": ratios}


def together(server: Server, model: str, clients: int, seed: int) -> float:
    """Tokens a second over all answers, from the first request to the last token."""
    counts: list[int] = []

    def one(index: int) -> None:
        own = Server.__new__(Server)
        own.url, own.client = server.url, httpx.Client(timeout=600)
        talk = [{"role": "user", "content": prompt_of(64, 1000 * seed + index)}]
        counts.append(own.ask(model, talk, ANSWER)[3]["completion_tokens"])

    started = time.perf_counter()
    threads = [threading.Thread(target=one, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    room = Path(tempfile.mkdtemp())
    try:
        options = write_all(room)
        model = random_model("qwen3-0.6b", 1, "float32")
        TOKENIZER.append(model.tokenizer)
        STOPS.extend(model.tokenizer.eos_token_ids)
        with servers(room, options) as (ours, theirs):
            ours.ask("b", [{"role": "user", "content": "x"}], 1)
            idle = {"ours": ours.memory(), "theirs": sum(s.memory() for s in theirs.values())}
            results = [{"idle_bytes": idle, **rates(ours, theirs, args.rounds)}]
            results += [switches(ours, theirs, n, args.rounds) for n in args.lengths]
        for result in results:
            print(json.dumps(result))
        if args.json:
            args.json.write_text(
                "".join(
                    json.dumps({**r, "environment": measure.environment()}) + "\n" for r in results
                )
            )
    finally:
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
