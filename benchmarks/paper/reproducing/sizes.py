"""What an entry takes: bytes of models, hours of training, data, accounts; and whether it fits."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import CORPORA, Entry
from benchmarks.paper.reproducing.models import PLAIN, Models, released
from benchmarks.paper.reproducing.tables import Pair
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.training.checkpoints import log_of, read_log
from kvlingo_mlx.training.recipe import Recipe

# Gigabytes in bfloat16, as the Hub has the files; then billions of weights that a token meets.
SIZES = {
    "Qwen3-0.6B": (1.5, 0.6),
    "Qwen3-1.7B": (4.1, 1.7),
    "Qwen3-4B": (8.1, 4.0),
    "Qwen3-8B": (16.4, 8.2),
    "Qwen3-30B-A3B": (61.1, 3.3),
    "gemma-3-4b-it": (8.6, 4.3),
    "gemma-3-12b-it": (24.4, 12.2),
    "gemma-4-E2B-it": (10.2, 2.3),
    "gemma-4-E4B-it": (16.0, 4.5),
    "Mistral-7B-Instruct-v0.3": (14.5, 7.2),
}
GATED = ("gemma-3-4b-it", "gemma-3-12b-it", "gemma-4-E2B-it", "gemma-4-E4B-it",
         "Mistral-7B-Instruct-v0.3")  # fmt: skip
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)B\b", re.IGNORECASE)
LEAVE = 2**30  # bytes that a device keeps for what is computed


def gigabytes(model: str, models: Models | None = None) -> float:
    """A model's weights: those of its folder, or what the Hub has; 0 if it is unknown."""
    files = list(Path(models.place(model)).glob("*.safetensors")) if models else []
    if files:
        return sum(file.stat().st_size for file in files) / 1e9
    return _known(model)[0]


def work_of(pair: Pair) -> float:
    """What a step costs beside other pairs': the source reads; the target twice, and backwards."""
    small, large = (_known(model)[1] for model in pair)
    return (small + large) * 5 / 2  # the mean of both ways


def seconds_per_work(room: Path) -> float | None:
    """The seconds of a step by its work, the median of what was trained in a room; None if nothing.

    Logs of whole runs count: a step's data are the paper's, whatever the number of steps.
    """
    found = []
    for told in sorted((room / "translators").glob("*.json")):
        options = json.loads(told.read_text(encoding="utf-8"))["options"]
        pair = options["source"], options["target"]
        log = log_of(told.with_suffix(""))
        last = read_log(log)[-1] if log.exists() and work_of(pair) else {}
        if last.get("step"):
            found.append(last["seconds"] / last["step"] / work_of(pair))
    return statistics.median(found) if found else None


def hours(pairs: Iterable[Pair], trainings: int, second: float | None) -> float | None:
    """The hours of an entry's trainings of the paper's steps; None where no step was measured."""
    works = [work_of(pair) for pair in pairs]
    if second is None or not works or not all(works):
        return None
    return trainings * Recipe().steps * second * sum(works) / len(works) / 3600


def check_memory(work: Work, pair: Pair, judge: str | None = None) -> None:
    """Refuse, before anything is read, models that the device has no memory for.

    A ``judge`` is loaded beside the pair. Where neither its files nor its size are known, its name
    tells: two bytes for each weight.

    Raises:
        NotEnoughMemoryError: The message says what is needed and what there is.
    """
    names = dict.fromkeys([*pair, *filter(None, [judge])])
    need = sum(gigabytes(name, work.models) for name in names) * 1e9
    if judge and not gigabytes(judge, work.models) and (told := BILLIONS.search(judge)):
        need += 2e9 * float(told[1])
    there = _free(work.trains)
    if there is None or need + LEAVE <= there:
        return
    raise NotEnoughMemoryError(
        f"{' and '.join(names)} take {need / 1e9:.0f} GB, and {work.trains} has "
        f"{there / 1e9:.0f} GB free: they cannot be trained or asked together here"
    )


def data_of(entry: Entry, cells: Iterable[Cell], trainings: int) -> list[str]:
    """What an entry reads that no model is: training data, texts, corpora."""
    models = [model for pair in entry.pairs for model in pair]
    plain = bool(entry.suffix) or (models != [] and all(m.endswith(PLAIN) for m in models))
    found = []
    if trainings or entry.maker in ("statistics", "lengths"):
        found.append("--text FILE (Nemotron-CC)" if plain else "Nemotron chat v2 (Hub)")
    if entry.maker == "perplexity":
        found += [f"--task-data {what}=FILE" for what in entry.what if what in CORPORA]
    scored = [cell.what for cell in cells] if entry.maker != "perplexity" else entry.what
    if any(what not in ("compute", *CORPORA) for what in scored):
        found.append("benchmarks (Hub)")
    return found


def _known(model: str) -> tuple[float, float]:
    return SIZES.get(released(model), (0.0, 0.0))


def _free(place: str) -> int | None:
    """The bytes that may still be taken on a device; None if that is unknown."""
    if place.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(place)[0]
    from kvlingo_mlx.caches import memory

    return memory.free()
