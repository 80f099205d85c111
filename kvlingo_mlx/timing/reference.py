"""Numbers of other machines for comparison with this one's: the paper's, or a record's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.reporting.measure import median

# Milliseconds in the paper's table app:tab:moespeed: Qwen3-4B to Qwen3-30B-A3B, bfloat16.
_LENGTHS = (64, 128, 256, 512, 1024)
_PAPER = {
    "source_prefill": (67.9, 94.9, 140.4, 248.7, 393.7),
    "native": (151.8, 188.6, 215.8, 287.9, 421.4),
    "translate float32": (1.8, 3.1, 5.7, 11.0, 17.2),
    "translate bfloat16": (1.7, 2.7, 4.7, 7.3, 13.1),
    "switch": (15.8, 17.1, 19.8, 25.3, 31.7),
    "accelerator": (83.6, 112.0, 160.2, 274.0, 425.4),
}
_TABLES = ("moe-switch", "switch", "quant")  # each is compared with the paper's one table
COMPARED = ("source", "target", "layers", "batch", "precision", "nu", "prompt", "prefill_step_size")
# A stored translator's times are compared with this form's, if the reference has no stored ones.
STORED, STORED_AS = "translate stored", "translate bfloat16"

Layers = tuple[tuple[int, int], tuple[int, int]] | None  # (measured, full) for both models
Times = Mapping[int, Mapping[str, float]]  # seconds by prompt length and phase


@dataclass(frozen=True)
class Reference:
    """The seconds that another run took.

    Attributes:
        name: The name to print.
        config: What was timed: the known ones of the fields in ``COMPARED``.
        measured: For each table's name, median seconds.
        whole: The same at full depth, extrapolated where the models were not whole.
        layers: As in a bench's record; None for whole models.
    """

    name: str
    config: Mapping[str, Any]
    measured: Mapping[str, Times]
    whole: Mapping[str, Times]
    layers: Layers = None

    def differences(self, config: Mapping[str, Any]) -> str | None:
        """In one line, how this reference's config differs from ``config``; None if it is equal."""
        found = []
        for field in COMPARED:
            if field not in self.config or field not in config:
                continue
            theirs, ours = self.config[field], config[field]
            if field == "precision" and None in (theirs, ours):
                continue  # models from a folder have a precision of their own
            if _comparable(theirs) != _comparable(ours):
                found.append(f"{field} {_told(theirs)}, here {_told(ours)}")
        return "; ".join(found) or None


def counterpart(phase: str, theirs: Mapping[str, float]) -> str:
    """The reference's name for a phase of this run."""
    return STORED_AS if phase == STORED and STORED not in theirs else phase


def _comparable(value: Any) -> Any:
    if isinstance(value, str):
        return value.lower().removeprefix("random ")
    return _layers(value) if isinstance(value, Sequence) else value


def _told(value: Any) -> str:
    if value is None:
        return "whole"  # layers is None
    if isinstance(value, str) or not isinstance(value, Sequence):
        return str(value)
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
    if name == "paper-m3-ultra":
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
        length: {phase: values[i] / 1e3 for phase, values in _PAPER.items()}
        for i, length in enumerate(_LENGTHS)
    }
    config = {
        "source": "Qwen3-4B",
        "target": "Qwen3-30B-A3B",
        "layers": None,
        "batch": 1,
        "precision": "bfloat16",
    }
    sheets = dict.fromkeys(_TABLES, times)
    name = "paper, M3 Ultra, Qwen3-4B to Qwen3-30B-A3B in bfloat16"
    return Reference(name, config, sheets, sheets)


def _of_record(record: Mapping[str, Any], results: Mapping[str, Any]) -> Reference:
    config = record.get("config", {})
    layers = _layers(config.get("layers"))
    measured, whole = {}, {}
    for table, found in results.items():
        lengths = [timing["prompt_tokens"] for timing in found["timings"]]
        medians = [
            {phase: median(samples) for phase, samples in timing["samples"].items()}
            for timing in found["timings"]
        ]
        measured[table] = dict(zip(lengths, medians, strict=True))
        grown = medians if layers is None else found["extrapolated"]
        whole[table] = dict(zip(lengths, grown, strict=True))
    name = f"{record['environment']['chip']}, {record['date']}"
    return Reference(name, config, measured, whole, layers)
