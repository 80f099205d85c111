"""Turn a table's times into the timings from which `--strategy auto` chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.engine.timings import USUAL_STEP, WAYS, Timings, key_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.tables import Table, Timing
from kvlingo_mlx.translators.base import Translator


def serves(table: Table) -> bool:
    """Whether a table times every way that `--strategy auto` compares."""
    return set(WAYS) <= set(table.phases)


def timings_of(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    measured: Sequence[Timing],
    step_size: int = USUAL_STEP,
) -> Timings:
    """The timings of a pair from a table, by the translator with which its ways were timed."""
    native = native_part(translator.config)  # as the accelerator was timed
    key = key_of(source, target, translator, native, step_size)
    lengths = tuple(timing.prompt_tokens for timing in measured)
    seconds = {way: tuple(t.median(way) for t in measured) for way in WAYS}
    return Timings(key, lengths, seconds)
