"""Numbers of other machines for comparison with this one's: the paper's, or a record's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.timing.paper import LENGTHS, MOE_SPEED, MOE_SPEED_NOTE, MOE_SPEEDS, STATED
from benchmarks.paper.timing.phases import HEAL, HYBRID, SPEEDS, WHOLE, Layers
from kvlingo_mlx.reporting.measure import median
from kvlingo_mlx.timing.shapes import released

PAPER, LABEL = "paper-m3-ultra", "app:tab:moespeed"
_TABLES = ("moe-switch", "switch", "quant")  # each is compared with the paper's one table
# All that makes a run comparable, but for the prompt's length, by which columns are paired.
COMPARED = (
    "machine", "source", "target", "layers", "batch", "weights", "prompt", "prefill_step_size",
    "translator", "nu", "head_mixing", "decoded",
)  # fmt: skip
# A stored translator's times are compared with this form's, if the reference has no stored ones.
STORED, STORED_AS = "translate stored", "translate bfloat16"
BEFORE = 8  # tokens that decoding speeds were measured over before records said how many

Times = Mapping[int, Mapping[str, float]]  # seconds by prompt length and phase


@dataclass(frozen=True)
class Difference:
    """A setting in which two runs differ.

    Attributes:
        field: One of ``COMPARED``, or of a table's stated settings.
        theirs: The reference's value, in words.
        ours: This run's.
    """

    field: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"{self.field.replace('_', ' ')} {self.theirs}, here {self.ours}"

    def concerns(self, phase: str) -> bool:
        """Whether a phase's time depends on this setting."""
        if self.field == "decoded":
            return phase in SPEEDS
        if self.field == "translator":
            return phase in WHOLE or phase.startswith((HYBRID, HEAL))
        if self.field in ("nu", "head_mixing"):
            return phase in WHOLE or phase.startswith(("translate ", HYBRID, HEAL))
        return self.field != "machine"  # which every reference has of its own


@dataclass(frozen=True)
class Reference:
    """The seconds that another run took; of decoding, the seconds for a token.

    Attributes:
        name: The name to print.
        config: What was timed: the known ones of the fields in ``COMPARED``.
        measured: For each table's name, median seconds.
        whole: The same at full depth, extrapolated where the models were not whole.
        layers: As in a bench's record; None for whole models.
        label: The label of the paper's table; None for a record.
        note: What a reader of its numbers should know.
    """

    name: str
    config: Mapping[str, Any]
    measured: Mapping[str, Times]
    whole: Mapping[str, Times]
    layers: Layers = None
    label: str | None = None
    note: str | None = None

    def differences(self, config: Mapping[str, Any]) -> list[Difference]:
        """The settings of a run of ``config`` that are not this reference's."""
        return differences(self.config, config, COMPARED)

    def unsaid(self, config: Mapping[str, Any]) -> list[str]:
        """The settings of a run that this reference does not say, so they cannot be compared."""
        return [name for name in COMPARED if name in config and name not in self.config]


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], fields: Sequence[str] | None = None
) -> list[Difference]:
    """The fields of ``theirs`` that ``ours`` has otherwise or does not say, in order."""
    found = []
    for name in theirs if fields is None else [f for f in fields if f in theirs]:
        one, other = theirs[name], ours.get(name, UNSAID)
        if not _alike(name, one, other):
            found.append(Difference(name, _told(name, one), _told(name, other)))
    return found


UNSAID = "not said"


def _alike(name: str, one: Any, other: Any) -> bool:
    if name == "machine":
        return str(one).lower() in str(other).lower()
    return _comparable(one) == _comparable(other)


def counterpart(phase: str, theirs: Mapping[str, float]) -> str:
    """The reference's name for a phase of this run."""
    return STORED_AS if phase == STORED and STORED not in theirs else phase


def _comparable(value: Any) -> Any:
    """Models by their names alone, random or released; two equal values as one."""
    if isinstance(value, str):
        return released(value).rsplit("/", 1)[-1].lower()
    if isinstance(value, Sequence) and value and all(isinstance(one, str) for one in value):
        same = {_comparable(one) for one in value}
        return same.pop() if len(same) == 1 else tuple(map(_comparable, value))
    return _layers(value) if isinstance(value, Sequence) else value


def _told(name: str, value: Any) -> str:
    if value is None:
        return "whole" if name == "layers" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or not isinstance(value, Sequence):
        return str(value)
    if all(isinstance(one, str) for one in value):
        return " and ".join(dict.fromkeys(value))
    return " and ".join(f"{some} of {whole}" for some, whole in value)


def _layers(value: Any) -> Layers:
    if value is None:
        return None
    first, second = ((int(some), int(whole)) for some, whole in value)
    return first, second


def load_reference(name: str) -> Reference:
    """The paper's numbers (``paper-m3-ultra``), or the last record of a file of ``bench --json``.

    Raises:
        ValueError: There is no such file, or it has no such record; the message says what it has.
    """
    if name == PAPER:
        return _paper()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--reference {name} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _refused(name, "it is not text") from None
    try:
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        raise _refused(name, "it is not lines of JSON") from None
    benches = [r for r in records if isinstance(r, dict) and r.get("kind") == "bench"]
    if not benches:
        kinds = sorted({_kind(record) for record in records})
        raise _refused(name, f"found {', '.join(kinds) or 'no lines'}")
    last = benches[-1]
    results = last.get("results")
    if not isinstance(results, dict):
        shape = type(results).__name__
        raise _refused(
            name, f"its {_kind(last)} is of an older shape, results a {shape}, not tables by name"
        )
    try:
        return _of_record(last, results)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        wrong = f"its {_kind(last)} lacks or misspells something ({type(error).__name__}: {error})"
        raise _refused(name, wrong) from None


def _kind(record: Any) -> str:
    if not isinstance(record, dict):
        return "a line without a kind"
    return f"kind {record.get('kind')!r} (schema {record.get('schema')!r})"


def _refused(name: str, wrong: str) -> ValueError:
    return ValueError(
        f"--reference {name} holds no record of bench that can be read: {wrong}; give "
        "paper-m3-ultra, or a file that this version's `kvlingo-mlx bench --json` wrote"
    )


def _paper() -> Reference:
    times = {
        length: {phase: values[i] / 1e3 for phase, values in MOE_SPEED.items()}
        | {phase: 1 / values[i] for phase, values in MOE_SPEEDS.items()}
        for i, length in enumerate(LENGTHS)
    }
    sheets = dict.fromkeys(_TABLES, times)
    name = f"paper, {LABEL}, M3 Ultra, Qwen3-4B to Qwen3-30B-A3B in bfloat16"
    return Reference(name, STATED[LABEL], sheets, sheets, None, LABEL, MOE_SPEED_NOTE)


def _of_record(record: Mapping[str, Any], results: Mapping[str, Any]) -> Reference:
    config = dict(record.get("config", {}))
    layers = _layers(config.get("layers"))
    counts = {found["timings"][0].get("decoded", BEFORE) for found in results.values()
              if found["timings"] and {*SPEEDS} & {*found["timings"][0]["samples"]}}  # fmt: skip
    config |= {"decoded": counts.pop()} if counts else {}
    measured, whole = {}, {}
    for table, found in results.items():
        lengths = [timing["prompt_tokens"] for timing in found["timings"]]
        medians = [
            {phase: each(timing, phase) for phase in timing["samples"]}
            for timing in found["timings"]
        ]
        measured[table] = dict(zip(lengths, medians, strict=True))
        grown = medians if layers is None else found["extrapolated"]
        whole[table] = dict(zip(lengths, grown, strict=True))
    config["machine"] = record["environment"]["chip"]
    name = f"{config['machine']}, {record['date']}"
    return Reference(name, config, measured, whole, layers)


def each(timing: Mapping[str, Any], phase: str) -> float:
    """A phase's median seconds in a record's timing; of decoding, those for one token."""
    took = median(timing["samples"][phase])
    return took / timing.get("decoded", BEFORE) if phase in SPEEDS else took
