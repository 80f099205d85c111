"""What the paper says of how its tables of times were measured, by label, and how a run differs.

A field stands here where the paper states it. What it does not say cannot be compared, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper.timing.widths import released

LENGTHS = (64, 128, 256, 512, 1024)  # of app:tab:moespeed
BUDGET = ((8192, 1), (8192, 8), (32768, 1), (32768, 8))  # contexts and batches of app:tab:budget
# "machine" is a part of the name that a machine gives itself; "weights" is of both models;
# "translator" the form of the maps in whole ways (a switch, the accelerator); "decoded" the tokens
# over which decoding is measured; "layers" None where models are whole.
STATED: dict[str, Mapping[str, Any]] = {
    "app:tab:moespeed": {
        "machine": "Apple M3 Ultra",
        "source": "Qwen3-4B",
        "target": "Qwen3-30B-A3B",
        "layers": None,
        "weights": "bfloat16",
        "translator": "float32",
        "nu": 3,
        "head_mixing": True,
        "batch": 1,
        "decoded": 256,
    },
    "app:tab:budget": {
        "machine": "Apple M3 Ultra",
        "layers": 48,
        "weights": "4 bits",
        "head_mixing": False,
        "capture": "post_rope",
        "trials": 3,
        "decoded": 128,
    },
    "tab:cost": {
        "machine": "H100",
        "stack": "transformers",
        "layers": None,
        "weights": "bfloat16",
        "nu": 1,
        "head_mixing": True,
        "batch": 1,
    },
    "app:tab:vllm": {
        "machine": "H100",
        "stack": "vLLM",
        "client": "at the client of a server",
        "weights": "bfloat16",
        "batch": 1,
        "requests": 16,
        "decoded": 128,
    },
}


def differences(label: str, run: Mapping[str, Any]) -> list[str]:
    """What the paper states of a table and a run's settings have otherwise or do not say."""
    found = []
    for name, theirs in STATED[label].items():
        ours = run.get(name, "not said")
        same = _comparable(theirs) == _comparable(ours)
        if name == "machine":
            same = theirs.lower() in str(ours).lower()
        if not same:
            told = (_told(name, value) for value in (theirs, ours))
            found.append("{} {}, here {}".format(name.replace("_", " "), *told))
    return found


def _comparable(value: Any) -> Any:
    """Models by their names alone, random or released; two equal values as one."""
    if isinstance(value, str):
        return released(value).rsplit("/", 1)[-1].lower()
    if isinstance(value, Sequence) and len(both := {*map(_comparable, value)}) == 1:
        return both.pop()
    return value


def _told(name: str, value: Any) -> str:
    """A setting in words."""
    if value is None:
        return "whole" if name == "layers" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " and ".join(dict.fromkeys(map(str, value)))
    return str(value)
