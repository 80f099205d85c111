"""A translator folder with maps of recurrent states, as the format page describes it."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support import translator_folders as layouts

Json = dict[str, Any]
FULL: Json = {"kv_heads": 2, "key_dim": 4, "value_dim": 4, "attention": "full", "window": None}
# No two numbers alike, on either side.
SOURCE = dict(key_heads=1, value_heads=2, key_dim=3, value_dim=5, kernel=4)
TARGET = dict(key_heads=2, value_heads=6, key_dim=7, value_dim=4, kernel=3)


def recurrent(rule: str, found: dict[str, int]) -> Json:
    channels = 2 * found["key_heads"] * found["key_dim"] + found["value_heads"] * found["value_dim"]
    gates = found["value_heads"] * (2 if rule == "gated_delta" else 1)
    return {
        "kv_heads": 1, "key_dim": channels, "value_dim": gates, "attention": rule, "window": None,
        "recurrence": found,
    }  # fmt: skip


def config_json(rule: str = "gated_delta") -> Json:
    """Two source layers of a recurrence and one of attention, to one of each."""
    one, other = recurrent(rule, SOURCE), recurrent(rule, TARGET)
    source, target = (
        [{"layer": i, **layer} for i, layer in enumerate(layers)]
        for layers in ((one, FULL, one), (FULL, other))
    )
    reads = {side: [[1], [0, 2]] for side in layouts.SIDES}
    more = {"format_version": 3, "state_maps": True, "provenance": {}}
    return copy.deepcopy(layouts.config_of(layouts.MIXING, source, target, reads) | more)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = layouts.page_shapes(config_json(), lambda *_: 0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def put(folder: Path, data: Json, arrays: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    layouts.put_config(folder, data)
    save_file(tensors() if arrays is None else arrays, folder / layouts.TENSORS)
    return folder
