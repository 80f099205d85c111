"""How many layers the target should read itself: quality and time for each number of them.

Where translation fails, the loss may sit in few layers: their keys and values carry what an
earlier attention step of the target itself computed. Native below, translated above, is to be
compared with DroidSpeak, which reuses the source's cache verbatim above the same layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation import compare, lineup
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import median
from kvlingo_mlx.timing.paths import switch_times
from kvlingo_mlx.translators.base import Translator

HYBRID, DROIDSPEAK = "hybrid", "DroidSpeak"
CONTROLS = ("hidden", "shuffled")


@dataclass(frozen=True)
class Point:
    """One way to take over a prefix, and what comes of it.

    Attributes:
        way: ``hybrid``, ``DroidSpeak``, or a reference's name.
        layers: Cache layers that the target reads itself; None for controls.
        kl: Of its predictions from those of the target's own cache, nats a token.
        recall: Share of marked answers that are its first choice; None without marks.
        seconds: To the first token of a prefix of median length, the source's states at hand.
    """

    way: str
    layers: int | None
    kl: Mean
    recall: Mean | None = None
    seconds: tuple[float, ...] = ()

    @property
    def time(self) -> float | None:
        """Median seconds, or None."""
        return median(self.seconds) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """All of it, raw seconds included."""
        recall = None if self.recall is None else self.recall.as_json()
        return {"way": self.way, "layers": self.layers, "kl": self.kl.as_json(),
                "recall": recall, "seconds": list(self.seconds)}  # fmt: skip


def line_up(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    layers: Sequence[int],
    *,
    droidspeak: bool = True,
    allow_mismatch: bool = False,
) -> dict[tuple[str, int | None], Condition]:
    """The ways to compare: hybrids, DroidSpeak where it applies, a re-prefill, two controls.

    Controls have no native layers, whatever the translator's own profile says.

    Args:
        source: Has read the prefix.
        target: Takes over.
        translator: Of this pair.
        layers: Numbers of native layers, each below the target's.
        droidspeak: Whether to ask how DroidSpeak does with the same numbers.
        allow_mismatch: Whether the translator may be another checkpoint's.
    """
    line: dict[tuple[str, int | None], Condition] = {}
    line["native", len(target.attentions)] = lineup.native(target)
    for j in layers:
        line[HYBRID, j] = lineup.translated(
            f"{HYBRID} {j}", source, target, [translator], j, allow_mismatch=allow_mismatch
        )
    try:
        for j in layers if droidspeak else ():
            line[DROIDSPEAK, j] = lineup.baseline(f"droidspeak:{j}", source, target, [])
    except IncompatibleTranslatorError:
        pass  # caches of another shape cannot be reused verbatim
    for name in CONTROLS:
        line[name, None] = lineup.baseline(
            name, source, target, [translator], allow_mismatch=allow_mismatch
        )
    return line


def measure(
    target: LanguageModel,
    task: Task,
    line: Mapping[tuple[str, int | None], Condition],
    journal: Journal,
    *,
    trials: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Score every way on every item, then time those that a user could choose, interleaved."""
    conditions = list(line.values())
    results = compare.evaluate(target, [task], conditions, journal, lambda name: progress())
    tables = compare.outcome(task, results[task.name]).tables
    prefix = sorted((item.prefix for item in task.items), key=len)[len(task.items) // 2]
    actions = {c.name: c.at_switch(prefix) for c in conditions if c.at_switch is not None}
    times = switch_times(target, actions, prefix[-1], trials=trials)
    points = []
    for (way, layers), condition in line.items():
        table = tables[condition.name]
        means = table.get(compare.ALL, next(iter(table.values())))
        seconds = tuple(times.get(condition.name, ()))
        points.append(Point(way, layers, means["kl"], means.get("recall"), seconds))
    return points


def check_bounds(task: Task, min_recall: float | None) -> None:
    """Refuse (ValueError) a bound on recall, before anything is measured, where none is scored."""
    if min_recall is not None and "recall" not in task.metrics:
        raise ValueError(
            '--min-recall needs data that mark answers: records with "answers": ["..."]'
        )


def smallest(
    points: Sequence[Point], *, max_kl: float | None = None, min_recall: float | None = None
) -> int:
    """The fewest native layers whose hybrid meets every bound; a re-prefill meets any.

    Points without recall meet no bound on it: :func:`check_bounds` refuses such data before.
    """
    hybrids = sorted(
        (p for p in points if p.way in (HYBRID, "native")), key=lambda point: point.layers or 0
    )
    for point in hybrids:
        near = max_kl is None or point.kl.value <= max_kl
        recalls = min_recall is None or (point.recall and point.recall.value >= min_recall)
        if near and recalls:
            break
    assert point.layers is not None
    return point.layers


def keep(folder: Path, layers: int, bounds: Mapping[str, Any], points: Sequence[Point]) -> None:
    """Write what was chosen, and by what, into a translator's provenance; at once, or not at all.

    Raises:
        MalformedTranslatorError: The folder breaks the format.
    """
    config, weights = translator_folder.read(folder)
    curve = [[p.layers, p.kl.value, p.time] for p in points if p.way in (HYBRID, "native")]
    facts = {"native_layers": layers, "profile": {**bounds, "layers_kl_seconds": curve}}
    provenance = {**config.provenance, **facts}
    profiled = dataclasses.replace(config, provenance=provenance)
    translator_folder.write(folder, profiled, weights, overwrite=True)
