"""Time to first token against the speed of the network, with the source in another process.

    python benchmarks/remote_prefill.py --json FILE

`serve-prefill` runs in a process of its own, and everything it sends passes a proxy that lets so
many bytes a second through (``--rates``). The models are random ones (``--hidden``, ``--layers``).
Two ways, in turns: *streamed*, in ``--chunks`` chunks; and *sent after the prefill*, which is the
same prompt in one chunk. Beside each stands what the formula says, from the times of a local
hand-over in the same chunks.

With n chunks, each of which takes r seconds to read, s to send and t to translate, the first token
comes after r + s + t + (n - 1) max(r, s, t) where both machines work at the same time. Where both
processes share one core, they read and translate in turns: (n - 1) max(r + t, s).

``--pace R T`` lets tiny models read and translate a chunk in so many seconds, by sleeping. So two
machines that do not wait for one another's processor are played on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import kvlingo_mlx as kv
from kvlingo_mlx import caches, cli
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.responses import GenerationResponse
from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.models import capture
from kvlingo_mlx.reporting import measure
from tests.support import tiny
from tests.support.network import Network

READY = re.compile(r"http://127\.0\.0\.1:(\d+)")


def made(root: Path, args: argparse.Namespace) -> tuple[Path, Path, Path]:
    """A source, a target that is a half deeper, and a random translator."""
    shape = {"hidden": args.hidden, "heads": args.hidden // 64, "kv_heads": args.hidden // 64,
             "head_dim": 64, "max_position_embeddings": 2 * args.tokens}  # fmt: skip
    depths = {"source": args.layers, "target": args.layers * 3 // 2}
    ends = [
        tiny.write_tiny_model(root / name, "qwen3", seed=seed, layers=layers, **shape)
        for seed, (name, layers) in enumerate(depths.items())
    ]
    tiny.write_random_translator(root / "translator", *ends, nu=1)
    return ends[0], ends[1], root / "translator"


def paced(args: argparse.Namespace) -> None:
    """Let reading and translating take the time that they would take on other machines."""
    read, translated = (each * args.chunks / args.tokens for each in args.pace)
    prefill, reading, append = capture.prefill, Line.read, caches.append

    def slow_prefill(*given: Any, **options: Any) -> Iterator[Any]:
        for states in prefill(*given, **options):
            time.sleep(read * states.num_tokens)
            yield states

    def slow_read(line: Line, tokens: Sequence[int], *rest: Any) -> Iterator[None]:
        yield from reading(line, tokens, *rest)
        time.sleep(read * len(tokens) if line.records else 0.0)

    def slow_append(cache: Any, states: Any, *rest: Any) -> None:
        append(cache, states, *rest)
        time.sleep(translated * max(group.states.shape[-2] for group in states.keys))

    capture.prefill, Line.read, caches.append = slow_prefill, slow_read, slow_append


@contextlib.contextmanager
def served(source: Path, args: argparse.Namespace) -> Iterator[int]:
    """The verb in another process; its port."""
    words = ["serve-prefill", "--source", str(source), "--port", "0"]
    options = [f"--{name}={getattr(args, name)}" for name in ("tokens", "chunks")]
    pace = ["--pace", *map(str, args.pace)] if args.pace else []
    process = subprocess.Popen(
        [sys.executable, __file__, *options, *pace, "--verb", *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = READY.search(process.stdout.readline())
        assert found is not None, "the server did not start"
        yield int(found[1])
    finally:
        process.kill()
        process.communicate()


def answered(source: Any, ends: Sequence[Any], args: argparse.Namespace, chunks: int) -> Any:
    """The first token after a prompt that is read in so many chunks."""
    step = -(-args.tokens // chunks)
    prompt = [5 + i % 250 for i in range(args.tokens + 1)]
    responses = kv.stream_generate(
        source, ends[1], prompt, translator=ends[2], prefill_step_size=step, max_tokens=1
    )
    return [*responses][-1]


def times(found: Sequence[GenerationResponse], chunks: int) -> dict[str, float]:
    """The medians of local hand-overs: what a chunk takes, and what is left."""
    read = statistics.median(each.prefill_s for each in found)
    written = statistics.median(each.translate_s for each in found)
    rest = statistics.median(each.ttft_s - each.prefill_s - each.translate_s for each in found)
    return {"read_s": read / chunks, "translate_s": written / chunks, "rest_s": rest}


def formula(each: dict[str, float], send: float, chunks: int, *, one_core: bool) -> float:
    """Seconds to the first token."""
    r, t = each["read_s"], each["translate_s"]
    longest = max(r + t, send) if one_core else max(r, send, t)
    return r + send + t + (chunks - 1) * longest + each["rest_s"]


def measured(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folders = made(Path(name), args)
        ends = [kv.load(folders[0]), kv.load(folders[1]), kv.load_translator(folders[2])]
        with served(folders[0], args) as port:
            network = Network(port)
            source = kv.connect(network.address, patience=60.0)
            ways = {"streamed": args.chunks, "after": 1}
            here: dict[str, list[Any]] = {way: [] for way in ways}
            far: dict[tuple[str, float], list[Any]] = {}
            for run in range(args.runs + 1):  # the first warms up
                for way, chunks in ways.items():
                    found = {None: answered(ends[0], ends, args, chunks)}
                    for rate in args.rates:
                        network.rate = rate * 1e6
                        found[rate] = answered(source, ends, args, chunks)
                    if run:
                        here[way].append(found.pop(None))
                        for rate, response in found.items():
                            far.setdefault((way, rate), []).append(response)
            network.close()
    return laid_out(here, far, ways, args)


def laid_out(
    here: dict[str, list[Any]],
    far: dict[tuple[str, float], list[Any]],
    ways: dict[str, int],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What was measured beside what the formula says, by way and rate."""
    each = {way: times(found, ways[way]) for way, found in here.items()}
    first = far["streamed", args.rates[0]][0].received
    rows = []
    for rate in args.rates:
        row: dict[str, Any] = {"rate": rate}
        for way, chunks in ways.items():
            send = first.bytes / chunks / (rate * 1e6)
            row[way] = {
                "ttft_s": statistics.median(found.ttft_s for found in far[way, rate]),
                "formula_s": formula(each[way], send, chunks, one_core=args.pace is None),
                "send_s": send,
            }
        row["gain"] = row["after"]["ttft_s"] - row["streamed"]["ttft_s"]
        row["formula_gain"] = row["after"]["formula_s"] - row["streamed"]["formula_s"]
        rows.append(row)
    received = {"bytes": first.bytes, "tokens": first.tokens}
    return {"local": each, "received": received, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 20, 40, 80, 160],
                        help="MB a second")  # fmt: skip
    parser.add_argument("--pace", type=float, nargs=2, help="seconds of reading and translating")
    parser.add_argument("--verb", nargs=argparse.REMAINDER, help="run the verb so, and no more")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    if args.pace:
        paced(args)
    if args.verb:
        sys.exit(cli.run(args.verb))
    warnings.simplefilter("ignore", KVLingoWarning)  # the translator is random
    results = measured(args)
    received = results["received"]
    print(f"{received['bytes'] / received['tokens']:,.0f} bytes a token")
    for row in results["rows"]:
        told = "  ".join(
            f"{way} {row[way]['ttft_s']:.2f} s (formula {row[way]['formula_s']:.2f})"
            for way in ("streamed", "after")
        )
        share = row["gain"] / row["formula_gain"]
        print(f"{row['rate']:6g} MB/s  {told}  sooner by {row['gain']:.2f} s, {share:.0%} of the "
              "formula's", flush=True)  # fmt: skip
    if args.json:
        config = {name: value for name, value in vars(args).items() if name not in ("json", "verb")}
        measure.append_json(args.json, measure.record("remote_prefill", config, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
