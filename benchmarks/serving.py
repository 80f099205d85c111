"""What a switch costs through `kvlingo-mlx serve`, beside mlx_lm.server.

    python benchmarks/serving.py [--lengths 2048 4096 8192 16384] [--rounds 5] [--json FILE]

Two random models of a released geometry and random translators both ways; a token is a word, so
that texts are read as they were written. Our server holds both models. mlx_lm.server runs once for
each of them, so that it need not load one at a switch. Requests to both servers alternate in one
run, and every one streams. The client measures:

- a chat: seconds to the first token of model `a` reading a long prompt, of `b` asked a short
  question after a's answer (the switch), of `b` asked another one (no switch);
- a plain text that `a` has written and `b` goes on with: nothing but one decoding step is left to
  do; beside it b's seconds a token;
- tokens a second while one answer is written, and while eight are;
- the memory of the idle servers.

Before a switch the client waits until our server is idle, as a person would who reads the answer:
by then b's cache has followed (the server translates ahead of time).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import served_models
from http_servers import Answer, Server

from kvlingo_mlx.reporting import measure

# With the BLAS that ours has: on Linux, MLX alone multiplies many times slower.
MLX_LM = ("-c", "import kvlingo_mlx.backend; from mlx_lm.server import main; main()")
PORT, QUESTION, SHORT, LONG = 8190, 8, 8, 64


@contextlib.contextmanager
def servers(room: Path, options: Sequence[str]) -> Iterator[tuple[Server, dict[str, Server]]]:
    """Ours, and mlx-lm's for each model."""
    os.environ["KVLINGO_HOME"] = str(room / "home")
    ours = Server(["-m", "kvlingo_mlx.cli", "serve", *options], PORT, room / "ours.log")
    theirs = {
        name: Server([*MLX_LM, "--model", str(room / name)], port, room / f"{name}.log")
        for port, name in enumerate("ab", PORT + 1)
    }
    try:
        for each in (ours, *theirs.values()):
            each.ready()
        yield ours, theirs
    finally:
        for each in (ours, *theirs.values()):
            each.process.terminate()


# ---- what is measured ---------------------------------------------------------------------------


@dataclass
class Samples:
    """Times by name, one a round."""

    found: dict[str, list[float]]

    def add(self, name: str, value: float) -> None:
        self.found.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: measure.median(values) for name, values in self.found.items()}

    def ratio(self, above: str, below: str, less: float = 0.0) -> float:
        """The median over rounds of one time, ``less`` seconds off, over the other."""
        pairs = zip(self.found[above], self.found[below], strict=True)
        return measure.median([(x - less) / y for x, y in pairs])


def switches(ours: Server, theirs: dict[str, Server], length: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a long prompt, of a switch, and of the turn after it."""
    samples, told = Samples({}), {}
    for number in range(rounds + 1):
        for who in ("ours", "theirs"):
            talk = [{"role": "user", "content": served_models.words(length, 100 * number)}]
            for what, model in (("prompt", "a"), ("switch", "b"), ("same", "b")):
                server = ours if who == "ours" else theirs[model]
                answer = server.ask(model if who == "ours" else "default_model", talk, SHORT)
                if who == "ours":
                    ours.idle()
                    told[what] = answer.facts["kvlingo"]
                if number:  # the first round warms up
                    samples.add(f"{who} {what}", answer.first)
                    samples.add(f"{who} {what} step", answer.step)
                question = served_models.words(QUESTION, 100 * number + 1)
                talk = [*talk, {"role": "assistant", "content": answer.text},
                        {"role": "user", "content": question}]  # fmt: skip
    kept = {k: told["switch"][k] for k in ("translated_tokens", "read_tokens", "strategy")}
    ratios = {
        "switch, ours / same, ours": samples.ratio("ours switch", "ours same"),
        "switch, theirs / ours": samples.ratio("theirs switch", "ours switch"),
        "same, ours / theirs": samples.ratio("ours same", "theirs same"),
        "prompt, ours / theirs": samples.ratio("ours prompt", "theirs prompt"),
    }
    return {"seconds": samples.medians(), "ratios": ratios, "switch": kept}


def steps(ours: Server, theirs: dict[str, Server], length: int, rounds: int) -> dict[str, Any]:
    """A text that `b` goes on with where `a` has written it: one decoding step to its first."""
    samples = Samples({})
    for number in range(rounds + 1):
        text = served_models.words(length, 100 * number + 50)
        text += ours.ask("a", text, SHORT).text
        ours.idle()
        for who, server, name in (("ours", ours, "b"), ("theirs", theirs["b"], "default_model")):
            answer = server.ask(name, text, LONG)
            if number:
                samples.add(f"{who} first", answer.first)
                samples.add(f"{who} step", answer.step)
    ratios = {
        "first, ours less 20 ms / step": samples.ratio("ours first", "ours step", less=0.02),
        "first, theirs / ours": samples.ratio("theirs first", "ours first"),
    }
    return {"seconds": samples.medians(), "ratios": ratios}


def rates(ours: Server, theirs: dict[str, Server], rounds: int) -> dict[str, Any]:
    """Tokens a second while one answer is written, and while eight are."""
    samples = Samples({})
    for number in range(rounds + 1):
        for clients in (1, 8):
            for who, server, name in (
                ("ours", ours, "a"), ("theirs", theirs["a"], "default_model")
            ):  # fmt: skip
                rate = together(server, name, clients, number)
                if number:
                    samples.add(f"{who} {clients}", rate)
                ours.idle()
    ratios = {
        f"{n} clients, ours / theirs": samples.ratio(f"ours {n}", f"theirs {n}") for n in (1, 8)
    }
    return {"tokens_per_s": samples.medians(), "ratios": ratios}


def together(server: Server, model: str, clients: int, seed: int) -> float:
    """Tokens a second from the moment when all answers have begun to that when one has ended."""
    found: list[Answer] = []

    def one(index: int) -> None:
        own = Server.__new__(Server)  # a connection of its own to the same server
        own.url, own.client = server.url, httpx.Client(timeout=3600)
        prompt = served_models.words(64, 1000 * seed + index)
        found.append(own.ask(model, prompt, LONG))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begun, ended = max(a.began + a.first for a in found), min(a.began + a.last for a in found)
    return sum((ended - begun) / a.step for a in found) / (ended - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--json", help="append the results to FILE")
    args = parser.parse_args()
    room = Path(tempfile.mkdtemp())
    try:
        options = served_models.write_pair(room, args.geometry, args.layers, args.precision)
        with servers(room, options) as (ours, theirs):
            for name in "ab":
                ours.ask(name, "w0 w1", 1)
                theirs[name].ask("default_model", "w0 w1", 1)
            idle = {"ours": ours.memory(), "theirs": sum(s.memory() for s in theirs.values())}
            results: dict[str, Any] = {"idle_bytes": idle}
            results["rates"] = rates(ours, theirs, args.rounds)
            print(json.dumps(results), flush=True)
            for length in args.lengths:
                found = {
                    "switches": switches(ours, theirs, length, args.rounds),
                    "steps": steps(ours, theirs, length, args.rounds),
                }
                results[str(length)] = found
                print(length, json.dumps(found), flush=True)
        if args.json:
            measure.append_json(args.json, measure.record("serving", vars(args), results))
    finally:
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
