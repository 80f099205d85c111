"""Every translator kind as plain loops, written from the format page alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from kvlingo_mlx.format.config_reading import parse_config
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.states import KVStates, TranslatedStates
from tests.support.translator_folders import apply_map, gelu, page_shapes

Arrays = dict[str, np.ndarray]
SIDES = ("keys", "values")
TOLERANCE = 1e-6  # Frobenius norm, relative, of every layer and side
WRONG = 1e-2  # what a mistake must exceed


@dataclass(frozen=True)
class Form:
    """What a translator computes."""

    kind: str = "linear"
    head_mixing: bool = True
    joint: bool = False
    gate: bool = False
    head_map: tuple[int, ...] | None = None
    source_heads: int = 2  # half as many as the target's


FORMS = {
    "linear": Form(),
    "linear head-wise": Form(head_mixing=False),
    "linear own heads": Form(head_mixing=False, source_heads=4),
    "linear of some heads": Form(head_mixing=False, head_map=(0, 1, 2, 3), source_heads=6),
    "joint": Form(joint=True),
    "mlp": Form("mlp"),
    "mlp gated": Form("mlp", gate=True),
    "mlp head-wise": Form("mlp", head_mixing=False),
    "mlp head-wise gated": Form("mlp", head_mixing=False, gate=True),
    "mlp head map": Form("mlp", head_mixing=False, gate=True, head_map=(1, 0, 0, 1)),
    "linear_mlp": Form("linear_mlp"),
    "linear_mlp head-wise": Form("linear_mlp", head_mixing=False),
    "linear_mlp own heads": Form("linear_mlp", head_mixing=False, source_heads=4),
}


# For each target layer, in order; layers 1 and 3 are of the other attention group.
HIDDEN = {"keys": (5, 6, 5, 6, 9), "values": (4, 6, 4, 6, 4)}
ASSIGNMENTS = {
    1: {"keys": [[1], [3], [0], [2], [1]], "values": [[0], [2], [1], [3], [1]]},
    2: {"keys": [[1, 0], [3], [0, 1], [2], [1, 0]], "values": [[0, 1], [2], [1, 0], [3], [0, 1]]},
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_layout = pytest.mark.parametrize("batched", [True, False])


def config_json(form: Form, nu: int = 2) -> dict[str, Any]:
    """From four layers to five; a head-wise translator's models have one head count each."""
    heads = form.source_heads
    full, sliding = ((heads, 4, 3), (heads if not form.head_mixing else 3, 6, 5))
    source = [layer_json(i, *full) for i in (0, 1)]
    source += [layer_json(i, *sliding, window=8) for i in (2, 3)]
    full, sliding = ((4, 3, 5), (4 if not form.head_mixing else 2, 7, 2))
    target = [layer_json(i, *(sliding if i % 2 else full), window=8 if i % 2 else None)
              for i in range(5)]  # fmt: skip
    assignment = dict(ASSIGNMENTS[nu])
    if form.joint:
        assignment["values"] = assignment["keys"]
    unknown = dict.fromkeys(("geometry", "norms", "tokenizer"))
    ends = {"revision": None, "model_type": "made_up", "fingerprint": unknown}
    return {
        "format_version": 1,
        "kind": form.kind,
        "head_mixing": form.head_mixing,
        "joint": form.joint,
        "capture": "pre_norm",
        "source": {"name": "reader", "layers": source, **ends},
        "target": {"name": "writer", "layers": target, **ends},
        "assignment": assignment,
        "alignment": None,
        "provenance": {},
        **({} if form.head_map is None else {"head_map": list(form.head_map)}),
    }


def layer_json(
    layer: int, heads: int, key_dim: int, value_dim: int, window: int | None = None
) -> dict[str, Any]:
    return {
        "layer": layer,
        "kv_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "attention": "full" if window is None else "sliding",
        "window": window,
    }


def dim(layer: dict[str, Any], side: str) -> int:
    return layer["key_dim" if side == "keys" else "value_dim"]


def shapes_of(form: Form, data: dict[str, Any], bias: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a form."""
    return page_shapes(data, lambda side, t: HIDDEN[side][t], gate=form.gate, bias=bias)


def random_arrays(form: Form, data: dict[str, Any], bias: bool) -> Arrays:
    """Entries that keep the scale of their input; vectors of about that scale."""
    rng = np.random.default_rng(3)
    vectors = ("b1", "b2", "gate", "bias")
    return {
        name: (rng.normal(size=shape) / (1 if name.endswith(vectors) else math.sqrt(shape[-1])))
        .astype(np.float32)
        for name, shape in shapes_of(form, data, bias).items()
    }  # fmt: skip


def random_states(data: dict[str, Any], batch: int, tokens: int) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(batch * tokens)
    return {
        side: [rng.normal(size=(batch, tokens, layer["kv_heads"] * dim(layer, side)))
               .astype(np.float32) for layer in data["source"]["layers"]]
        for side in SIDES
    }  # fmt: skip


def to_config(data: dict[str, Any]) -> TranslatorConfig:
    return parse_config(Path("made_up"), data)


def to_device(states: dict[str, list[np.ndarray]], dtype: mx.Dtype = mx.float32) -> KVStates:
    sides = (tuple(mx.array(array).astype(dtype) for array in states[side]) for side in SIDES)
    return KVStates(*sides, "pre_norm", 0)


def layers_of(states: TranslatedStates) -> dict[str, list[np.ndarray]]:
    """What a translator returns, (B, H, T, D) a target layer."""
    out: dict[str, list[np.ndarray]] = {}
    for side, groups in zip(SIDES, (states.keys, states.values), strict=True):
        assert all(group.states.dtype == mx.float32 for group in groups)
        found = {t: np.array(g.states[i]) for g in groups for i, t in enumerate(g.layers)}
        out[side] = [found[t] for t in range(len(found))]
    return out


def reference(
    data: dict[str, Any],
    arrays: Arrays,
    states: dict[str, list[np.ndarray]],
    activation: Callable[[float], float] = gelu,
) -> dict[str, list[np.ndarray]]:
    """Target keys and values, (B, H, T, D) a layer."""
    batch, tokens = states["keys"][0].shape[:2]
    out: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    for t, layer in enumerate(data["target"]["layers"]):
        heads = layer["kv_heads"]
        for side in SIDES:
            out[side].append(np.zeros((batch, heads, tokens, dim(layer, side))))
        for b, i in itertools.product(range(batch), range(tokens)):
            row = {side: [array[b, i].astype(np.float64) for array in states[side]]
                   for side in SIDES}  # fmt: skip
            for side, y in translate_token(data, arrays, row, t, activation):
                out[side][t][b, :, i] = y.reshape(heads, -1)
    return out


def translate_token(
    data: dict[str, Any],
    arrays: Arrays,
    row: dict[str, list[np.ndarray]],
    t: int,
    activation: Callable[[float], float],
) -> Iterator[tuple[str, np.ndarray]]:
    """One token's keys and values in target layer ``t``, heads stacked."""
    target, assignment = data["target"]["layers"][t], data["assignment"]
    if data["joint"]:
        read = [row[side][s] for side in SIDES for s in assignment["keys"][t]]
        y = apply_map(tensors_of(arrays, f"joint.{t}"), np.concatenate(read), activation)
        y = y + tensors_of(arrays, f"joint.{t}").get("bias", 0.0)
        width = target["kv_heads"] * target["key_dim"]
        yield from (("keys", y[:width]), ("values", y[width:]))
        return
    for side in SIDES:
        own = tensors_of(arrays, f"{side}.{t}")
        read = [row[side][s] for s in assignment[side][t]]
        if data["head_mixing"]:
            y = apply_map(own, np.concatenate(read), activation)
        else:
            y = head_by_head(data, own, read, activation)
        if "gate" in own:
            factor = [1 / (1 + math.exp(-g)) for g in own["gate"]]
            y = (y.reshape(len(factor), -1) * np.array(factor)[:, None]).reshape(-1)
        yield side, y + own.get("bias", 0.0)


def head_by_head(
    data: dict[str, Any],
    own: Arrays,
    read: Sequence[np.ndarray],
    activation: Callable[[float], float],
) -> np.ndarray:
    sources = data["source"]["layers"][0]["kv_heads"]
    heads = data["target"]["layers"][0]["kv_heads"]
    head_map = data.get("head_map") or [h // (heads // sources) for h in range(heads)]
    rows = []
    for h in range(heads):
        x = np.concatenate([array.reshape(sources, -1)[head_map[h]] for array in read])
        parts = {name: a[h] for name, a in own.items() if name not in ("gate", "bias")}
        rows.append(apply_map(parts, x, activation))
    return np.concatenate(rows)


def tensors_of(arrays: Arrays, name: str) -> Arrays:
    return {n.removeprefix(f"{name}."): a.astype(np.float64) for n, a in arrays.items()
            if n.startswith(f"{name}.")}  # fmt: skip


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
