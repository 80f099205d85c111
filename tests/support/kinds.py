"""Every translator kind as plain loops, written from the format page alone."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from kvlingo_mlx.models.states import KVStates, TranslatedStates
from tests.support import translator_folders as layouts

TOLERANCE = 1e-6  # Frobenius norm, relative, of every layer and side
WRONG = 1e-2  # what a mistake must exceed


FORMS = {
    "linear": layouts.Layout(),
    "linear head-wise": layouts.Layout(head_mixing=False),
    "linear own heads": layouts.Layout(head_mixing=False, heads=(4, 4)),
    "linear of some heads": layouts.Layout(head_mixing=False, head_map=(0, 1, 2, 3), heads=(6, 4)),
    "joint": layouts.Layout(joint=True),
    "mlp": layouts.Layout("mlp"),
    "mlp gated": layouts.Layout("mlp", gate=True),
    "mlp head-wise": layouts.Layout("mlp", head_mixing=False),
    "mlp head-wise gated": layouts.Layout("mlp", head_mixing=False, gate=True),
    "mlp head map": layouts.Layout("mlp", head_mixing=False, gate=True, head_map=(1, 0, 0, 1)),
    "linear_mlp": layouts.Layout("linear_mlp"),
    "linear_mlp head-wise": layouts.Layout("linear_mlp", head_mixing=False),
    "linear_mlp own heads": layouts.Layout("linear_mlp", head_mixing=False, heads=(4, 4)),
}
# For each target layer, in order; layers 1 and 3 are of the other attention group.
HIDDEN = {"keys": (5, 6, 5, 6, 9), "values": (4, 6, 4, 6, 4)}
ASSIGNMENTS = {
    1: {"keys": [[1], [3], [0], [2], [1]], "values": [[0], [2], [1], [3], [1]]},
    2: {"keys": [[1, 0], [3], [0, 1], [2], [1, 0]], "values": [[0, 1], [2], [1, 0], [3], [0, 1]]},
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_layout = pytest.mark.parametrize("batched", [True, False])


def config_json(form: layouts.Layout, nu: int = 2) -> dict[str, Any]:
    """From four layers to five; a head-wise translator's models have one head count each."""
    heads = form.heads[0]
    full, sliding = ((heads, 4, 3), (heads if not form.head_mixing else 3, 6, 5))
    source = [layouts.layer_json(i, *full) for i in (0, 1)]
    source += [layouts.layer_json(i, *sliding, window=8) for i in (2, 3)]
    full, sliding = ((4, 3, 5), (4 if not form.head_mixing else 2, 7, 2))
    target = [layouts.layer_json(i, *(sliding if i % 2 else full), window=8 if i % 2 else None)
              for i in range(5)]  # fmt: skip
    return layouts.config_of(form, source, target, ASSIGNMENTS[nu])


def dim(layer: dict[str, Any], side: str) -> int:
    return layer["key_dim" if side == "keys" else "value_dim"]


def random_arrays(form: layouts.Layout, data: dict[str, Any], bias: bool) -> layouts.Arrays:
    """Entries that keep the scale of their input; vectors of about that scale."""
    rng = np.random.default_rng(3)
    vectors = ("b1", "b2", "gate", "bias")
    shapes = layouts.page_shapes(data, lambda side, t: HIDDEN[side][t], gate=form.gate, bias=bias)
    return {
        name: (rng.normal(size=shape) / (1 if name.endswith(vectors) else math.sqrt(shape[-1])))
        .astype(np.float32)
        for name, shape in shapes.items()
    }  # fmt: skip


def random_states(data: dict[str, Any], batch: int, tokens: int) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(batch * tokens)
    return {
        side: [rng.normal(size=(batch, tokens, layer["kv_heads"] * dim(layer, side)))
               .astype(np.float32) for layer in data["source"]["layers"]]
        for side in layouts.SIDES
    }  # fmt: skip


def to_device(states: dict[str, list[np.ndarray]], dtype: mx.Dtype = mx.float32) -> KVStates:
    sides = (
        tuple(mx.array(array).astype(dtype) for array in states[side]) for side in layouts.SIDES
    )
    return KVStates(*sides, "pre_norm", 0)


def layers_of(states: TranslatedStates) -> dict[str, list[np.ndarray]]:
    """What a translator returns, (B, H, T, D) a target layer."""
    out: dict[str, list[np.ndarray]] = {}
    for side, groups in zip(layouts.SIDES, (states.keys, states.values), strict=True):
        assert all(group.states.dtype == mx.float32 for group in groups)
        found = {t: np.array(g.states[i]) for g in groups for i, t in enumerate(g.layers)}
        out[side] = [found[t] for t in range(len(found))]
    return out


def reference(
    data: dict[str, Any],
    arrays: layouts.Arrays,
    states: dict[str, list[np.ndarray]],
    activation: layouts.Activation = layouts.gelu,
) -> dict[str, list[np.ndarray]]:
    """Target keys and values, (B, H, T, D) a layer."""
    batch, tokens = states["keys"][0].shape[:2]
    out: dict[str, list[np.ndarray]] = {side: [] for side in layouts.SIDES}
    for t, layer in enumerate(data["target"]["layers"]):
        heads = layer["kv_heads"]
        for side in layouts.SIDES:
            out[side].append(np.zeros((batch, heads, tokens, dim(layer, side))))
        for b, i in itertools.product(range(batch), range(tokens)):
            row = {side: [array[b, i].astype(np.float64) for array in states[side]]
                   for side in layouts.SIDES}  # fmt: skip
            for side, y in translate_token(data, arrays, row, t, activation):
                out[side][t][b, :, i] = y.reshape(heads, -1)
    return out


def translate_token(
    data: dict[str, Any],
    arrays: layouts.Arrays,
    row: dict[str, list[np.ndarray]],
    t: int,
    activation: layouts.Activation,
) -> Iterator[tuple[str, np.ndarray]]:
    """One token's keys and values in target layer ``t``, heads stacked."""
    target, assignment = data["target"]["layers"][t], data["assignment"]
    if data["joint"]:
        read = [row[side][s] for side in layouts.SIDES for s in assignment["keys"][t]]
        y = layouts.layer_output(tensors_of(arrays, f"joint.{t}"), inputs(data, read), activation)
        width = target["kv_heads"] * target["key_dim"]
        yield from (("keys", y[:width]), ("values", y[width:]))
        return
    for side in layouts.SIDES:
        read = [row[side][s] for s in assignment[side][t]]
        yield (
            side,
            layouts.layer_output(tensors_of(arrays, f"{side}.{t}"), inputs(data, read), activation),
        )


def inputs(data: dict[str, Any], read: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a map of all heads reads, or each target head's."""
    if data["head_mixing"]:
        return [np.concatenate(read)]
    sources = data["source"]["layers"][0]["kv_heads"]
    heads = data["target"]["layers"][0]["kv_heads"]
    head_map = data.get("head_map") or [h // (heads // sources) for h in range(heads)]
    return [np.concatenate([array.reshape(sources, -1)[s] for array in read]) for s in head_map]


def tensors_of(arrays: layouts.Arrays, name: str) -> layouts.Arrays:
    return {n.removeprefix(f"{name}."): a.astype(np.float64) for n, a in arrays.items()
            if n.startswith(f"{name}.")}  # fmt: skip


def rotated(rows: np.ndarray, places: np.ndarray, base: float) -> np.ndarray:
    """Keys or queries at their places, by halves of their last axis."""
    half = rows.shape[-1] // 2
    angles = places * base ** (-np.arange(half) / half)
    cos, sin, a, b = np.cos(angles), np.sin(angles), rows[..., :half], rows[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def errors(
    found: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]
) -> list[float]:
    """The relative error of each layer, keys before values."""
    out = []
    for a, b in zip(found["keys"] + found["values"], expected["keys"] + expected["values"],
                    strict=True):  # fmt: skip
        assert a.shape == b.shape
        out.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return out
