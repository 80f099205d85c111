"""Numbers of other machines to stand beside this one's: the paper's, or a record's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvlingo_mlx.measure import median

# Milliseconds of the paper's table app:tab:moespeed: Qwen3-4B to Qwen3-30B-A3B, bfloat16.
_LENGTHS = (64, 128, 256, 512, 1024)
_PAPER = {
    "source_prefill": (67.9, 94.9, 140.4, 248.7, 393.7),
    "native": (151.8, 188.6, 215.8, 287.9, 421.4),
    "translate float32": (1.8, 3.1, 5.7, 11.0, 17.2),
    "translate bfloat16": (1.7, 2.7, 4.7, 7.3, 13.1),
    "switch": (15.8, 17.1, 19.8, 25.3, 31.7),
    "accelerator": (83.6, 112.0, 160.2, 274.0, 425.4),
}
Reference = Mapping[int, Mapping[str, float]]  # seconds by prompt length and phase


def load_reference(name: str) -> tuple[str, Reference]:
    """A reference and what to call it: ``paper-m3-ultra``, or a file that ``bench --json`` wrote.

    Raises:
        ValueError: No such file, or one without such a record.
    """
    if name == "paper-m3-ultra":
        return "paper, M3 Ultra, Qwen3-4B to Qwen3-30B-A3B in bfloat16", {
            length: {phase: values[i] / 1e3 for phase, values in _PAPER.items()}
            for i, length in enumerate(_LENGTHS)
        }
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        last = [record for record in records if record["kind"] == "bench"][-1]
        return f"{last['environment']['chip']}, {last['date']}", {
            timing["prompt_tokens"]: {p: median(s) for p, s in timing["samples"].items()}
            for table in last["results"].values()
            for timing in table["timings"]
        }
    except OSError as error:
        raise ValueError(f"--reference {name} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(
            f"--reference {name} holds no record of bench; give paper-m3-ultra, or a file that "
            "`kvlingo-mlx bench --json` wrote"
        ) from None
