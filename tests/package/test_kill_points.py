"""Processes killed (SIGKILL) at random moments: the old one is there, or the new one, in full.

A thousand of them: ``KVLINGO_EXAMPLES=1000 pytest tests/package/test_kill_points.py``.
"""

import dataclasses
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.store.importing import import_translator
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Trainer
from tests.support.random_samples import Random

KILLS = int(os.environ.get("KVLINGO_EXAMPLES", "2"))  # of each job
PAIR = ("tiny-qwen3-s", "tiny-qwen3-l")
Job = Callable[[Path, Connection], None]
# MLX does not survive a fork once it has computed, so a process that only imports is forked.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [f"kvlingo_mlx.{name}" for name in ("engine.generation", "store.importing", "training.trainer")]
)


def killed(job: Job, folder: Path, delay: float | None) -> list[str]:
    """What a job told until it was killed, ``delay`` seconds after "begin" (None: never)."""
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=job, args=(folder, theirs))
    child.start()
    theirs.close()
    told: list[str] = []
    try:
        while "begin" not in told:
            told.append(ours.recv())
        child.join(delay)
        child.kill()
        while True:
            told.append(ours.recv())
    except EOFError:
        child.join()
    assert child.exitcode in (0, -9), f"{job.__name__} failed: {told}"
    return [*told, "ended"] if child.exitcode == 0 else told


def same(one: Path, other: Path) -> bool:
    """Whether two translator folders are read, and hold the same numbers."""
    maps = [translator_folder.read(folder)[1].arrays for folder in (one, other)]
    return all(np.array_equal(array, maps[1][name]) for name, array in maps[0].items())


def given(folder: Path) -> list[Path]:
    return [folder / "given" / name for name in "01"]


def prepare(folder: Path) -> None:
    """Two translators of the same models and form, and the first one imported."""
    config, weights = translator_folder.read(TRANSLATORS / "--".join(PAIR))
    ends = [dataclasses.replace(end, name=f"nobody/{end.name}")
            for end in (config.source, config.target)]  # fmt: skip
    config = dataclasses.replace(config, source=ends[0], target=ends[1])
    for sign, where in zip((1, -1), given(folder), strict=True):
        arrays = {n: sign * weights.as_float32(n) for n in weights.arrays}
        translator_folder.write(where, config, Weights.from_float32(arrays, "bfloat16"))
    import_translator(str(given(folder)[0]), out=folder / "imported")


def import_the_other(folder: Path, tell: Connection) -> None:
    out = folder / "imported"
    now = next(i for i, each in enumerate(given(folder)) if same(each, out))
    tell.send("begin")
    import_translator(str(given(folder)[1 - now]), out=out, force=True)
    tell.send(f"imported {1 - now}")


def check_import(folder: Path, told: list[str]) -> None:
    found = [i for i, each in enumerate(given(folder)) if same(each, folder / "imported")]
    assert len(found) == 1, "neither the old translator nor the new one"
    imported = [int(line[-1]) for line in told if line.startswith("imported")]
    assert not imported or found == imported, "an import that was told of is gone"
    # One folder may lie beside it; the next import clears that away.
    assert len([path for path in folder.glob(".imported.*") if path.is_dir()]) <= 1


def talk_on(folder: Path, tell: Connection) -> None:
    models, where = {name: kv.load(zoo(name)) for name in PAIR}, folder / "talk"
    kept = (where / "conversation.json").exists()
    talk = kv.Conversation.resume(where, models) if kept else kv.Conversation(models)
    begun = len(talk.messages)
    tell.send(f"found {begun}")
    talk.reply(PAIR[begun // 2 % 2], "The code of Anna is A1. What is it?", max_tokens=4)
    tell.send("begin")
    talk.save(where)
    tell.send(f"saved {begun + 2}")


def check_talk(folder: Path, told: list[str]) -> None:
    """The next process resumes what this one left; what it finds is compared."""
    last = folder / "last"
    for word, number in (line.split() for line in told if " " in line):
        before = int(last.read_text()) if last.exists() else 0
        assert word != "found" or int(number) >= before, "a saved turn is gone"
        last.write_text(number)
    if int(last.read_text()) > 12:
        shutil.rmtree(folder / "talk"), last.unlink()


def train(folder: Path, tell: Connection, out: str = "trained") -> None:
    recipe = Recipe(steps=6, batch=1, learning_rates=(1e-3,), validate_every=2)
    plan = TrainingPlan(fit_samples=3, held_out=2, recipe=recipe)
    models = [kv.load(zoo(name)) for name in PAIR]
    tell.send("begin")
    Trainer(*models, Random(), plan, folder / out, keep_every=0.0).run()


def train_whole(folder: Path, tell: Connection) -> None:
    train(folder, tell, "whole")


def check_training(folder: Path, told: list[str]) -> None:
    """It ends as one that nobody killed, bit by bit; until then the next one goes on."""
    if "ended" not in told:
        return
    if not (folder / "whole").exists():
        killed(train_whole, folder, None)
    out, whole = folder / "trained", folder / "whole"
    assert same(out, whole), "the resumed training ended elsewhere"
    logs = [path.with_name(f"{path.name}.log.jsonl").read_text() for path in (out, whole)]
    steps = [[line.split(",")[0] for line in log.splitlines()] for log in logs]
    assert steps[0] == steps[1], "the log lacks or repeats steps"
    shutil.rmtree(out)


JOBS: dict[str, tuple[Job, Callable[[Path, list[str]], None], float]] = {
    "import": (import_the_other, check_import, 0.15),  # and a first guess of its seconds
    "conversation": (talk_on, check_talk, 0.2),
    "training": (train, check_training, 1.0),
}


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    job, check, longest = JOBS[name]
    chance, kills = random.Random(0), 0
    if name == "import":
        prepare(tmp_path)
    while kills < KILLS:
        told = killed(job, tmp_path, chance.uniform(0, longest))
        kills += "ended" not in told
        longest *= 0.9 if "ended" in told else 1.05  # most are to be killed, wherever they are
        check(tmp_path, told)
    check(tmp_path, killed(job, tmp_path, None))


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    """The control: an import that wrote half of a file, and one that lost what it told of."""
    prepare(tmp_path)
    check_import(tmp_path, ["imported 0"])
    with pytest.raises(AssertionError, match="told of is gone"):
        check_import(tmp_path, ["imported 1"])
    (tmp_path / "imported" / translator_folder.WEIGHTS_FILE).write_bytes(b"")
    with pytest.raises(MalformedTranslatorError, match="truncated"):
        check_import(tmp_path, [])
