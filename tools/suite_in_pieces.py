"""Run the tests in pieces within a time, and keep the names and errors of those that fail.

    python tools/suite_in_pieces.py MINUTES OUT [FILE_OR_FOLDER ...] [--jobs N] [--as-on-gpu]

A piece is a file in a process of its own. It is killed when no test began or ended for so many
seconds, or the time is up; the test that it was in is named. OUT/report.txt gets a line a piece,
names and errors, as they come; beside it are what pytest said and each test. What a GPU computes
otherwise is run first; with ``--as-on-gpu`` a CPU computes what is planned for one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT, KEPT, AS_ON_GPU = Path(__file__).parents[1], "PIECE_OF_SUITE", "PIECE_AS_ON_GPU"
FIRST = "translators engine caches models folding fitting families training paper/gpu".split()

if AS_ON_GPU in os.environ:  # within a piece, where this is a plugin of pytest
    from kvlingo_mlx import backend

    backend.mx.disable_compile()
    backend.on_gpu = lambda: True  # before any module takes it from there


def note(**event: Any) -> None:
    with open(os.environ[KEPT], "a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    note(began=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        note(test=report.nodeid, outcome=report.outcome, error=report.longreprtext)


pytest_collectreport = pytest_runtest_logreport


class Piece:
    """A file of tests in a process of its own."""

    def __init__(self, path: Path, out: Path, more: dict[str, str]) -> None:
        self.name, self.began, self.remark = os.path.relpath(path, ROOT), time.time(), ""
        stem = self.name.removesuffix(".py").replace("/", "-")
        self.kept, log = (out.absolute() / f"{stem}.{kind}" for kind in ("jsonl", "log"))
        self.kept.write_text("")
        where = os.pathsep.join([str(ROOT / "tools"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": where, KEPT: str(self.kept), **more}
        command = f"-m pytest -p suite_in_pieces -p no:cacheprovider --tb=short {self.name}".split()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env={**os.environ, **more},
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def stop(self, why: str) -> None:
        self.remark = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def told(self) -> list[str]:
        """A line about the piece, then the names and errors of what failed."""
        events = [json.loads(x) for x in self.kept.read_text().splitlines() if x.endswith("}")]
        tests = [event for event in events if "test" in event]
        counts = Counter(event["outcome"] for event in tests)
        if not self.remark and self.process.returncode not in (0, 1, 5):  # 5: no tests
            self.remark = f"FAILED: ended with code {self.process.returncode}"
        if self.remark and "began" in (last := events[-1] if events else {}):
            self.remark += f" in {last['began']}"
        numbers = "".join(f"{counts[each]:5d} {each}" for each in ("passed", "failed", "skipped"))
        line = f"{self.name:52s}{numbers} {time.time() - self.began:5.0f} s  {self.remark}"
        failed = [f"FAILED {e['test']}\n{e['error']}" for e in tests if e["outcome"] == "failed"]
        return [line.rstrip(), *failed]


def files_of(paths: list[str]) -> list[Path]:
    """The files of tests, those of ``FIRST`` first."""
    folders = [ROOT / path for path in paths or ["tests"]]
    found = [f for p in folders for f in ([p] if p.is_file() else sorted(p.rglob("test_*.py")))]
    order = [ROOT / "tests" / each for each in FIRST]
    places = {f: [i for i, p in enumerate(order) if f.is_relative_to(p)] for f in found}
    return sorted(places, key=lambda file: places[file] or [len(order)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--silence", type=float, default=120, metavar="SECONDS")
    parser.add_argument("--as-on-gpu", action="store_const", const={AS_ON_GPU: "1"}, default={})
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, waiting, running = time.time() + 60 * args.minutes, files_of(args.paths), list[Piece]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    said: list[str] = []

    def tell(*lines: str) -> None:
        said.extend(lines)
        print(*lines, sep="\n", flush=True)
        (args.out / "report.txt").write_text("\n".join(said) + "\n")

    try:
        while running or (waiting and time.time() < end):
            while waiting and len(running) < args.jobs and time.time() < end:
                running.append(Piece(waiting.pop(0), args.out, args.as_on_gpu))
            time.sleep(0.1)
            for piece in running[:]:
                if time.time() >= end:
                    piece.stop("the time was up")
                elif time.time() - piece.kept.stat().st_mtime > args.silence:
                    piece.stop(f"FAILED: silent for {args.silence:.0f} s")
                if piece.process.poll() is not None:
                    running.remove(piece)
                    tell(*piece.told())
    finally:
        for piece in running:
            piece.stop("stopped")
            tell(*piece.told())
        bad = sum("FAILED" in text for text in said)
        tell(f"{bad} failures, {len(waiting)} files not begun", *map(str, waiting))
    return int(bool(bad or waiting))


if __name__ == "__main__":
    sys.exit(main())
