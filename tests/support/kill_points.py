"""Kill processes (SIGKILL) at random moments and look at what they leave; no test, a command.

    nice python -m tests.support.kill_points --points 1000 \\
        --json benchmarks/results/kill_points.jsonl

Jobs on the embedded models, each of which replaces its own earlier result: importing a translator,
fitting one, training one on either runtime with a checkpoint a step, saving a conversation. A job
tells through a pipe what it has finished. After each kill that, or what it was about to write, must
be there in full; a training must end as one that nobody killed, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.store.importing import import_translator
from tests.support.random_samples import Numbered

PAIR = ("tiny-qwen3-s", "tiny-qwen3-l")
SHARES = {"import": 0.4, "fit": 0.1, "train-torch": 0.2, "train-mlx": 0.1, "conversation": 0.2}
FIRST_GUESS = {  # seconds
    "import": 0.15, "fit": 1.0, "train-torch": 1.0, "train-mlx": 1.0, "conversation": 0.2,
}  # fmt: skip
Report = Callable[[str], None]
Job = Callable[[Report], None]


def killed(job: Job, delay: float | None) -> list[str]:
    """Run a job in a child, and kill it ``delay`` seconds after it said "begin" (None: never).

    Returns what it said; a job that fails says "failed: why", one that ends "done".
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _run(job, write_end)
    os.close(write_end)
    text = _listen(read_end, delay)
    os.kill(child, signal.SIGKILL)
    text += _listen(read_end, None)
    os.close(read_end)
    os.waitpid(child, 0)
    return text.splitlines()


def _listen(pipe: int, delay: float | None) -> str:
    """What is said until the other end is closed, or ``delay`` seconds after "begin"."""
    text, until = "", None
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            return text
        chunk = os.read(pipe, 2**16)
        if not chunk:
            return text
        text += chunk.decode()
        if until is None and delay is not None and "begin\n" in text:
            until = time.monotonic() + delay


def _run(job: Job, write_end: int) -> None:
    def report(text: str) -> None:
        os.write(write_end, f"{text}\n".encode())

    try:
        job(report)
    except BaseException:
        report("failed: " + traceback.format_exc().replace("\n", " | "))
    os._exit(0)


def same(one: Path, other: Path) -> bool:
    """Whether two translator folders are read, and hold the same numbers."""
    maps = [translator_folder.read(folder)[1].arrays for folder in (one, other)]
    return all(np.array_equal(array, maps[1][name]) for name, array in maps[0].items())


@dataclasses.dataclass
class Jobs:
    """The jobs in a folder of their own, and what must hold after each kill."""

    room: Path
    rng: random.Random
    longest: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: Counter = dataclasses.field(default_factory=Counter)
    told: int = 0

    def survive(self, name: str) -> bool:
        """Run a job to be killed; False if it ended before. AssertionError: something is lost."""
        verb, _, runtime = name.partition("-")
        own = (runtime,) if runtime else ()
        job = functools.partial(getattr(self, f"_{verb}"), *own)
        longest = self.longest.setdefault(name, FIRST_GUESS[name])
        said = killed(job, self.rng.uniform(0, longest))
        failures = [line for line in said if line.startswith("failed")]
        assert not failures, failures
        ended = "done" in said
        self.longest[name] = longest * (0.9 if ended else 1.05)  # most are to be killed, any where
        self.counts[f"{name}, {'ended before' if ended else 'killed'}"] += 1
        getattr(self, f"_check_{verb}")(*own, said)
        return not ended

    # ---- importing: two translators in turns into one folder -----------------------------

    def prepare(self) -> None:
        """Two translators of the same models and form, and the first one imported."""
        config, weights = translator_folder.read(TRANSLATORS / "--".join(PAIR))
        ends = (config.source, config.target)
        named = [dataclasses.replace(e, name=f"nobody/{e.name}") for e in ends]
        config = dataclasses.replace(config, source=named[0], target=named[1])
        for sign, folder in zip((1, -1), self._versions(), strict=True):
            arrays = {n: sign * weights.as_float32(n) for n in weights.arrays}
            translator_folder.write(folder, config, Weights.from_float32(arrays, "bfloat16"))
        import_translator(str(self._versions()[0]), out=self.room / "imported")

    def _versions(self) -> list[Path]:
        return [self.room / "given" / name for name in ("0", "1")]

    def _import(self, report: Report) -> None:
        folders, out = self._versions(), self.room / "imported"
        now = next(i for i, folder in enumerate(folders) if same(folder, out))
        report("begin")
        import_translator(str(folders[1 - now]), out=out, force=True)
        report(f"imported {1 - now}")
        report("done")

    def _check_import(self, said: list[str]) -> None:
        folders, out = self._versions(), self.room / "imported"
        found = [i for i, folder in enumerate(folders) if same(folder, out)]
        assert len(found) == 1, "neither the old translator nor the new one"
        told = [int(line[-1]) for line in said if line.startswith("imported")]
        assert not told or found == told, "an import that was told of is gone"
        # One folder may lie beside it; the next import clears that away.
        left = [p for p in self.room.glob(".imported.*") if p.is_dir()]
        assert len(left) <= 1, left

    # ---- fitting ---------------------------------------------------------------------------

    def _fit(self, report: Report) -> None:
        from kvlingo_mlx.embedded.dialogues import for_fitting

        models = [kv.load(zoo(name)) for name in PAIR]
        talks = [{"messages": talk.conversation()} for talk in for_fitting(2, facts=(4, 6))]
        report("begin")
        kv.fit(*models, talks).save(self.room / "fitted")
        report("fitted")
        report("done")

    def _check_fit(self, said: list[str]) -> None:
        folder, first = self.room / "fitted", self.room / "first-fit"
        if folder.exists() and not first.exists():
            shutil.copytree(folder, first)
        assert not folder.exists() or same(first, folder), "half a translator"
        shutil.rmtree(folder, ignore_errors=True)  # the same one would not be written again

    # ---- training --------------------------------------------------------------------------

    def _train(self, runtime: str, report: Report, out: str = "trained") -> None:
        from kvlingo_mlx.training.plan import TrainingPlan
        from kvlingo_mlx.training.recipe import Recipe
        from kvlingo_mlx.training.trainer import Trainer

        pair = _for_training(runtime)
        recipe = Recipe(steps=6, batch=1, learning_rates=(1e-3,), validate_every=2)
        report("begin")
        Trainer(
            *pair, Numbered(), TrainingPlan(fit_samples=3, held_out=2, recipe=recipe),
            self.room / f"{out}-{runtime}",
            keep_every=0.0,
        ).run()  # fmt: skip
        report("done")

    def _check_train(self, runtime: str, said: list[str]) -> None:
        out, whole = self.room / f"trained-{runtime}", self.room / f"unbroken-{runtime}"
        if not out.exists():
            return  # the next one goes on
        if not whole.exists():
            said = killed(lambda report: self._train(runtime, report, "unbroken"), None)
            assert "done" in said, said
        assert same(out, whole), "the resumed training ended elsewhere"
        logs = [p.with_name(f"{p.name}.log.jsonl").read_text() for p in (out, whole)]
        steps = [[line.split(",")[0] for line in log.splitlines()] for log in logs]
        assert steps[0] == steps[1], "the log lacks or repeats steps"
        shutil.rmtree(out)
        self.counts[f"train-{runtime}, complete and equal"] += 1

    # ---- conversations -----------------------------------------------------------------------

    def _conversation(self, report: Report) -> None:
        models, folder = {name: kv.load(zoo(name)) for name in PAIR}, self.room / "talk"
        kept = (folder / "conversation.json").exists()
        talk = kv.Conversation.resume(folder, models) if kept else None
        if talk is None or len(talk.messages) > 12:
            shutil.rmtree(folder, ignore_errors=True)
            report("restarted")
            talk = kv.Conversation(models)
        begun = len(talk.messages)
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * (begun // 2)
        report(f"found {begun}")
        talk.reply(PAIR[begun // 2 % 2], "The code of Anna is A1. What is it?", max_tokens=4)
        report("begin")
        talk.save(folder)
        report(f"saved {begun + 2}")
        report("done")

    def _check_conversation(self, said: list[str]) -> None:
        """The next child resumes what this one left; here, what it found is compared."""
        for line in said:
            word, _, number = line.partition(" ")
            if word == "found":
                assert int(number) >= self.told, "a saved turn is gone"
            self.told = 0 if word == "restarted" else int(number) if word == "saved" else self.told


def _for_training(runtime: str) -> list[Any]:
    """The pair's models, as a runtime loads them."""
    if runtime == "mlx":
        return [kv.load(zoo(name)) for name in PAIR]
    import torch

    from kvlingo_mlx.cuda import model as torch_model

    return [torch_model.load(str(zoo(name)), dtype=torch.float32) for name in PAIR]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100, help="kills in all")
    parser.add_argument("--jobs", nargs="+", default=list(SHARES), choices=SHARES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    for module in (
        "fitting",
        "engine.generation",
        *(["training.trainer"] * any(job.startswith("train") for job in args.jobs)),
    ):
        importlib.import_module(f"kvlingo_mlx.{module}")  # once, not in every child

    room, started = Path(tempfile.mkdtemp(prefix="kill-points-")), time.perf_counter()
    jobs = Jobs(room, random.Random(args.seed))
    jobs.prepare()
    for name in args.jobs:
        kills = 0
        while kills < max(1, round(SHARES[name] * args.points)):
            kills += jobs.survive(name)
            sys.stderr.write(f"\r{dict(jobs.counts)} ")
    shutil.rmtree(room)
    results = {**jobs.counts, "seconds": time.perf_counter() - started}
    print(json.dumps(results))
    if args.json:
        from kvlingo_mlx.reporting import measure

        config = {"points": args.points, "jobs": args.jobs, "seed": args.seed}
        measure.append_json(args.json, measure.record("kill_points", config, results))


if __name__ == "__main__":
    main()
