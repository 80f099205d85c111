"""This machine's times beside a reference's, with what was measured otherwise at each number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.timing.phases import SPEEDS
from benchmarks.paper.timing.reference import Difference, Reference, Times, counterpart
from benchmarks.paper.timing.tables import Timing


@dataclass(frozen=True)
class Row:
    """One phase of a table beside a reference's.

    Attributes:
        phase: This run's name of it.
        other: The reference's.
        ours: Seconds by prompt length; of decoding, those for a token.
        theirs: The reference's seconds.
        differs: The settings that were others and on which this time depends.
    """

    phase: str
    other: str
    ours: Mapping[int, float]
    theirs: Mapping[int, float]
    differs: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "of_reference": self.other,
            "seconds": {str(n): self.theirs[n] for n in self.theirs},
            "times_as_long": {str(n): self.ours[n] / self.theirs[n] for n in self.theirs},
            "measured_otherwise": [str(difference) for difference in self.differs],
        }


def seconds_of(timings: Sequence[Timing]) -> Times:
    """Median seconds by prompt length and phase; of decoding, those for a token."""
    return {
        t.prompt_tokens: {
            phase: t.median(phase) / (t.decoded if phase in SPEEDS else 1) for phase in t.samples
        }
        for t in timings
    }


def rows(ours: Times, theirs: Times, found: Sequence[Difference]) -> list[Row]:
    """The phases and lengths that two runs have in common; ``found`` is how the runs differ."""
    lengths = [length for length in ours if length in theirs]
    common = []
    for phase in ours[lengths[0]] if lengths else ():
        other = counterpart(phase, theirs[lengths[0]])
        if all(phase in ours[n] and other in theirs[n] for n in lengths):
            common.append(
                Row(
                    phase,
                    other,
                    {n: ours[n][phase] for n in lengths},
                    {n: theirs[n][other] for n in lengths},
                    tuple(one for one in found if one.concerns(phase)),
                )
            )
    return common


def as_json(
    reference: Reference, common: Sequence[Row], config: Mapping[str, Any], phases: Iterable[str]
) -> dict[str, Any]:
    """A comparison as a record keeps it; differences that concern one of ``phases`` at least."""
    timed = list(phases)
    differs = [
        str(one)
        for one in reference.differences(config)
        if one.field == "machine" or any(map(one.concerns, timed))
    ]
    return {
        "name": reference.name,
        "label": reference.label,
        "differences": differs,
        "not_said": reference.unsaid(config),
        "rows": [row.as_json() for row in common],
    }
