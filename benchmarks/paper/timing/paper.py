"""What the paper says of how its tables of times were measured, by label; and one table's numbers.

A field stands here where the paper states it. What it does not say cannot be compared, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

# The table app:tab:moespeed: milliseconds by prompt length, and tokens per second.
LENGTHS = (64, 128, 256, 512, 1024)
MOE_SPEED = {
    "source_prefill": (67.9, 94.9, 140.4, 248.7, 393.7),
    "native": (151.8, 188.6, 215.8, 287.9, 421.4),
    "translate float32": (1.8, 3.1, 5.7, 11.0, 17.2),
    "translate bfloat16": (1.7, 2.7, 4.7, 7.3, 13.1),
    "switch": (15.8, 17.1, 19.8, 25.3, 31.7),
    "accelerator": (83.6, 112.0, 160.2, 274.0, 425.4),
}
MOE_SPEEDS = {
    "decode_source": (70.1, 70.0, 69.6, 68.6, 67.9),
    "decode_native": (71.5, 71.3, 70.7, 69.6, 68.9),
}
MOE_SPEED_NOTE = (
    "its first tokens of a switch and of the accelerator are sums: a step is one over the decoding "
    "speed; here each way is measured whole"
)
# app:tab:budget by context and batch: tokens per second, gains and peaks in GB, as the paper
# prints them; ranges span two machines.
BUDGET = {
    (8192, 1): ("62-65", "+9-10%", "-5%", "9.9", "9.1"),
    (8192, 8): ("160-171", "+33-37%", "+22-25%", "21.6", "14.9"),
    (32768, 1): ("53", "+16-20%", "+1-5%", "13.9", "11.0"),
    (32768, 8): ("110-115", "+44-49%", "+36-40%", "50.2", "29.4"),
}
