"""Quality and time for each number of native layers, to choose that number.

Where translation fails, the loss may come from few layers: their keys and values carry the result
of an earlier attention step of the target itself: a hybrid has native layers below, translated ones
above.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.evaluation import compare, lineup, probes
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading import notes
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.loading.translators import by_name, find_translator, resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import median
from kvlingo_mlx.tokenization.samples import read_jsonl
from kvlingo_mlx.translators.base import Translator

HYBRID, NATIVE = "hybrid", "native"
CONTROLS = ("hidden", "shuffled")


@dataclass(frozen=True)
class Point:
    """One way to take over a prefix, with its measured quality and time."""

    way: str  # ``hybrid``, or a reference's name
    layers: int | None  # the number of cache layers that the target reads itself; None for controls
    kl: Mean  # the KL of its predictions from those with the target's own cache, in nats a token
    # The share of marked answers that are its first choice; None without marks.
    recall: Mean | None = None
    # The times to the first token of a prefix of median length, after the source has read it.
    seconds: tuple[float, ...] = ()

    @property
    def time(self) -> float | None:
        """The median of ``seconds``, or None if there are none."""
        return median(self.seconds) if self.seconds else None

    def meets(self, max_kl: float | None, min_recall: float | None) -> bool:
        """Whether it meets every bound; without recall it meets no bound on that."""
        near = max_kl is None or self.kl.value <= max_kl
        recalls = self.recall.value if self.recall else -1.0
        return near and (min_recall is None or recalls >= min_recall)


# ---- what to tune ------------------------------------------------------------------------------


def translator_of(
    given: str | None, source: LanguageModel, target: LanguageModel, allow_mismatch: bool
) -> tuple[str, Translator]:
    """The translator to tune, and its place; with None, the local store's translator.

    Raises:
        MissingTranslatorError, IncompatibleTranslatorError: There is none for this pair, or it is
            between two tokenizers.
    """
    match: dict[str, Any] = {"allow_mismatch": allow_mismatch}
    place = str(find_translator(source, target, **match)) if given is None else by_name(given)
    found = resolve_translator(place, source, target, **match)
    check_one_tokenizer(found.config, "tune", notes.to_improve(found.config, place, False))
    return place, found


def own_folder(place: str) -> Path:
    """The translator's folder, which must be the user's, and hold nothing else (else ValueError).

    It is checked before measuring: the result is written to it.
    """
    path = Path(place)
    if not path.is_dir() or path.parent == TRANSLATORS or not os.access(path, os.W_OK):
        raise ValueError(
            f"{place} is no folder of yours, so nothing can be kept in it; "
            f"{notes.command('import', place, '--out', 'DIR')} and give --translator DIR"
        )
    others = sorted({file.name for file in path.iterdir()} - set(translator_folder.OUR_FILES))
    if others:  # the folder is replaced as a whole
        raise ValueError(
            f"{place} holds {others[0]}, which is no file of a translator and would be lost when "
            "what is chosen is kept; move it elsewhere"
        )
    translator_folder.check_destination(path)
    return path


def numbers(text: str | None, most: int) -> list[int]:
    """The numbers of native layers to try, each below ``most``; None stands for all of them.

    Raises:
        ValueError: A part of ``text`` is not such a number; all ``most`` would be a re-prefill.
    """
    if text is None:
        return list(range(most))
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 0 or found[-1] >= most:
        raise ValueError(
            f"--native-layers is {text!r}; give numbers from 0 to {most - 1}: 0,1,2 (all {most} "
            "are a re-prefill, which is always measured)"
        )
    return found


def task_of(
    source: LanguageModel, target: LanguageModel, data: str | None, limit: int, seed: int
) -> Task:
    """The conversations to score, from a JSONL file or generated."""
    if data is None:
        return probes.recall(target, limit, seed)
    records = read_jsonl(data)
    marks = any("answers" in record for record in records)
    make = probes.marked if marks else probes.continuation
    return make(target, records, limit, min(source.context_length, target.context_length))


# ---- measuring and choosing --------------------------------------------------------------------


def line_up(
    source: LanguageModel, target: LanguageModel, translator: Translator, layers: Sequence[int]
) -> dict[tuple[str, int | None], Condition]:
    """The ways to compare, by name and native ``layers``: hybrids, a re-prefill, two controls.

    Controls have no native layers, whatever the translator was tuned to.
    """
    found = source, target, [translator]
    return {
        (NATIVE, len(target.attentions)): lineup.native(target),
        **{(HYBRID, j): lineup.translated(f"{HYBRID} {j}", *found, j) for j in layers},
        **{(name, None): lineup.baseline(name, *found) for name in CONTROLS},
    }


def measure(
    target: LanguageModel,
    task: Task,
    line: Mapping[tuple[str, int | None], Condition],
    journal: Journal,
    *,
    trials: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Score every way on every item, then time, interleaved, those that a user could choose."""
    conditions = list(line.values())
    results = compare.evaluate(target, [task], conditions, journal, lambda name: progress())
    tables = compare.outcome(task, results[task.name]).tables
    times = compare.first_tokens(target, conditions, task, trials)
    points = []
    for (way, layers), condition in line.items():
        table = tables[condition.name]
        means = table.get(compare.ALL, next(iter(table.values())))
        took = tuple(times.get(condition.name, ()))
        points.append(Point(way, layers, means["kl"], means.get("recall"), took))
    return points


def smallest(
    points: Sequence[Point], *, max_kl: float | None = None, min_recall: float | None = None
) -> int:
    """The fewest native layers whose hybrid meets every bound; a re-prefill meets any bound."""
    chosen = {p.layers: p.meets(max_kl, min_recall) for p in points if p.layers is not None}
    return min((layers for layers, meets in chosen.items() if meets), default=max(chosen))


def keep(folder: Path, layers: int, bounds: Mapping[str, Any], points: Sequence[Point]) -> None:
    """Write the choice, its bounds and the measured curve into a translator's provenance,
    atomically.
    """
    config, weights = translator_folder.read(folder)
    measured = [point for point in points if point.layers is not None]
    best = next(point for point in measured if point.layers == layers)
    curve = [[p.layers, p.kl.value, p.time] for p in measured]
    tuning = {**bounds, "layers_kl_seconds": curve, "measured_kl": best.kl.value}
    if best.recall is not None:
        tuning["measured_recall"] = best.recall.value
    facts = {**config.provenance, "native_layers": layers, "tuning": tuning}
    tuned = dataclasses.replace(config, provenance=facts)
    translator_folder.write(folder, tuned, weights, overwrite=True)
