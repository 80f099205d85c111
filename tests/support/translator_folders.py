"""Translator folders of every layout, written from the format's description alone."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig

CONFIG = "translator_config.json"
TENSORS = "translator.safetensors"
SELFTEST = "selftest.safetensors"
CARD = "README.md"
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIDES = ("keys", "values")
GONE = object()


# Key and value widths differ in both models, so that neither passes for another.
SOURCE_DIMS = {"keys": 4, "values": 3}
TARGET_DIMS = {"keys": 3, "values": 5}
HIDDEN = 7
Json = dict[str, Any]
Arrays = dict[str, np.ndarray]
Activation = Callable[[float], float]
Entries = Mapping[str, tuple[str, Sequence[int], bytes]]


@dataclass(frozen=True)
class Layout:
    """What a translator computes; ``heads`` are the source's and the target's."""

    kind: str = "linear"
    head_mixing: bool = True
    joint: bool = False
    heads: tuple[int, int] = (2, 4)
    head_map: tuple[int, ...] | None = None
    gate: bool = False
    bias: bool = False


MIXING, HEAD_WISE = Layout(), Layout(head_mixing=False)
MLP = Layout("mlp", gate=True)
LAYOUTS = {
    "mixing": MIXING,
    "mixing-bias": Layout(bias=True),
    "head-wise-r1": Layout(head_mixing=False, heads=(2, 2)),
    "head-wise-r2": HEAD_WISE,
    "head-wise-map": Layout(head_mixing=False, heads=(3, 2), head_map=(2, 0)),
    "head-wise-bias": Layout(head_mixing=False, bias=True),
    "joint": Layout(joint=True),
    "joint-bias": Layout(joint=True, bias=True),
    "mlp": Layout("mlp"),
    "mlp-gated": MLP,
    "mlp-bias": Layout("mlp", bias=True),
    "mlp-head-wise": Layout("mlp", head_mixing=False),
    "mlp-head-wise-gated": Layout("mlp", head_mixing=False, gate=True),
    "linear-mlp": Layout("linear_mlp"),
    "linear-mlp-bias": Layout("linear_mlp", bias=True),
    "linear-mlp-head-wise": Layout("linear_mlp", head_mixing=False),
}


def config_json(layout: Layout = MIXING) -> Json:
    """The config of a translator from three layers to two."""
    source = [layer_json(i, layout.heads[0], *SOURCE_DIMS.values()) for i in range(3)]
    target = [layer_json(i, layout.heads[1], *TARGET_DIMS.values()) for i in range(2)]
    keys, values = [[2, 0], [1, 2]], [[0, 1], [2, 1]]
    return config_of(layout, source, target, {"keys": keys, "values": values})


def config_of(layout: Layout, source: list[Json], target: list[Json], reads: Json) -> Json:
    """The config of a translator between any layers; a joint one reads what keys do."""
    data = {
        "format_version": 1,
        "kind": layout.kind,
        "head_mixing": layout.head_mixing,
        "joint": layout.joint,
        "capture": "pre_norm",
        "source": model_json("reader", source),
        "target": model_json("writer", target),
        "assignment": reads | ({"values": reads["keys"]} if layout.joint else {}),
        "alignment": None,
        "provenance": {"stage": 1, "held_out": {"kl": 0.25}, "note": "naïve ✓"},
    }
    if layout.head_map is not None:
        data["head_map"] = list(layout.head_map)
    return data


def model_json(name: str, layers: list[Json]) -> Json:
    return {
        "name": f"house/{name}",
        "revision": None,
        "model_type": "qwen3",
        "fingerprint": {"geometry": "0123456789abcdef" * 4, "norms": None, "tokenizer": None},
        "layers": layers,
    }


def layer_json(
    layer: int, heads: int, key_dim: int, value_dim: int, window: int | None = None
) -> Json:
    return {
        "layer": layer,
        "kv_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "attention": "full" if window is None else "sliding",
        "window": window,
    }


def to_config(data: Json) -> TranslatorConfig:
    """The object that a config's JSON stands for."""
    models = {}
    for end in ("source", "target"):
        layers = tuple(LayerGeometry(**layer) for layer in data[end]["layers"])
        models[end] = ModelSpec(**{**data[end], "layers": layers})
    sides = {side: tuple(map(tuple, data["assignment"][side])) for side in SIDES}
    rest = {k: data[k] for k in ("kind", "head_mixing", "joint", "capture", "alignment")}
    head_map = tuple(data["head_map"]) if "head_map" in data else None
    return TranslatorConfig(
        **models,
        **rest,
        assignment=Assignment(**sides),
        head_map=head_map,
        provenance=data["provenance"],
    )


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The tensors of ``config_json(layout)``."""
    config = config_json(layout)
    return page_shapes(config, lambda *_: HIDDEN, gate=layout.gate, bias=layout.bias)


def page_shapes(
    data: Json, hidden: Callable[[str, int], int], *, gate: bool = False, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """The format page's table of tensors, for any config; ``hidden`` is an MLP's inner width."""
    found: dict[str, tuple[int, ...]] = {}
    for side in ("joint",) if data["joint"] else SIDES:
        reads = data["assignment"]["keys" if side == "joint" else side]
        for t, target in enumerate(data["target"]["layers"]):
            sources = [data["source"]["layers"][s] for s in reads[t]]
            if data.get("state_maps") and "recurrence" in target:
                found |= state_shapes(t, target, sources)
                continue
            parts = ("key_dim", "value_dim") if side == "joint" else (f"{side[:-1]}_dim",)
            heads, rows = target["kv_heads"], sum(target[part] for part in parts)
            width, lead = heads * rows, (heads,)
            columns = sum(s[part] for s in sources for part in parts)
            if data["head_mixing"]:
                rows, lead = width, ()
                columns = sum(s["kv_heads"] * s[part] for s in sources for part in parts)
            layer: dict[str, tuple[int, ...]] = {}
            if data["kind"] != "mlp":
                layer["weight"] = (*lead, rows, columns)
            if data["kind"] != "linear":
                inner = hidden(side, t)
                layer |= {"w1": (*lead, inner, columns), "b1": (*lead, inner)}
                layer |= {"w2": (*lead, rows, inner), "b2": (*lead, rows)}
            layer |= {"gate": (heads,)} if gate else {}
            layer |= {"bias": (width,)} if bias else {}
            found |= {f"{side}.{t}.{suffix}": shape for suffix, shape in layer.items()}
    return found


def state_shapes(t: int, target: Json, sources: Sequence[Json]) -> dict[str, tuple[int, ...]]:
    """The same of a recurrent layer's two maps."""
    ours, theirs = target["recurrence"], [source["recurrence"] for source in sources]
    heads, rows, columns = ours["value_heads"], ours["value_dim"], ours["key_dim"]
    return {
        f"states.{t}.left": (heads, rows, sum(each["value_dim"] for each in theirs)),
        f"states.{t}.right": (heads, sum(each["key_dim"] for each in theirs), columns),
    }


def arrays_of(layout: Layout, dtype: str = "float32", seed: int = 0) -> Arrays:
    """Random tensors of a layout as they are stored (bfloat16 as its bits)."""
    rng = np.random.default_rng(seed)
    shapes = shapes_of(layout).items()
    arrays = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes}
    return {name: stored(array, dtype) for name, array in arrays.items()}


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """A float32 array in another dtype; bfloat16 is cut off, not rounded."""
    if dtype == "bfloat16":
        return (array.view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(dtype)


def exact(array: np.ndarray, dtype: str) -> np.ndarray:
    """What a stored array stands for, in float64."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def gelu(z: float) -> float:
    return 0.5 * z * (1 + math.erf(z / math.sqrt(2)))


def probes_of(layout: Layout, arrays: Arrays, dtype: str = "float32") -> Arrays:
    """The self-test's probes, from the format's description, one head at a time."""
    out = {}
    names = sorted({name.rsplit(".", 1)[0] for name in arrays})
    for name in names:
        parts = {
            key.rsplit(".", 1)[1]: exact(array, dtype)
            for key, array in arrays.items()
            if key.startswith(name + ".")
        }
        if layout.kind == "linear":
            x = probe_input(parts["weight"].shape[-1])
            out[f"{name}.weight.probe_out"] = parts["weight"] @ x
        else:
            read = [probe_input(parts["w1"].shape[-1])] * layout.heads[1]
            out[f"{name}.probe_out"] = layer_output(parts, read).reshape(parts["b2"].shape)
    return {name: array.astype(np.float32) for name, array in out.items()}


def layer_output(
    parts: Arrays, read: Sequence[np.ndarray], activation: Activation = gelu
) -> np.ndarray:
    """A token's output of a layer's map, heads stacked: of what all read, or of each head's own."""
    matrices = {name: a for name, a in parts.items() if name not in ("gate", "bias")}
    by_head = [matrices]
    if matrices.get("weight", matrices.get("w1")).ndim == 3:
        by_head = [{name: a[h] for name, a in matrices.items()} for h in range(len(read))]
    y = np.concatenate(
        [apply_map(own, x, activation) for own, x in zip(by_head, read, strict=False)]
    )
    if "gate" in parts:
        factor = np.array([1 / (1 + math.exp(-g)) for g in parts["gate"]])
        y = (y.reshape(len(factor), -1) * factor[:, None]).reshape(-1)
    return y + parts.get("bias", 0.0)


def apply_map(parts: Arrays, x: np.ndarray, activation: Activation) -> np.ndarray:
    """W x, plus W2 gelu(W1 x + b1) + b2; of these what there is."""
    y = parts["weight"] @ x if "weight" in parts else np.zeros(1)
    if "w1" in parts:
        hidden = np.array([activation(z) for z in parts["w1"] @ x + parts["b1"]])
        y = y + parts["w2"] @ hidden + parts["b2"]
    return y


def probe_input(width: int) -> np.ndarray:
    """x_i = ((37 i + 11) mod 17 - 8) / 8."""
    return np.array([((37 * i + 11) % 17 - 8) / 8 for i in range(width)])


def store(folder: Path, layout: Layout = MIXING, dtype: str = "float32") -> Path:
    """Write a sound translator folder with nothing of the package's."""
    folder.mkdir(parents=True)
    arrays = arrays_of(layout, dtype)
    put_config(folder, config_json(layout))
    put_tensors(folder / TENSORS, arrays, dtype)
    put_tensors(folder / SELFTEST, probes_of(layout, arrays, dtype))
    return folder


def put_at(data: Json, place: Sequence[str | int], value: Any) -> Json:
    """A config in which a place has another value, or is no more (``GONE``)."""
    parent: Any = data
    for step in place[:-1]:
        parent = parent[step]
    if value is GONE:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return data


def refuse(folder: Path, *words: str, names: Path | str = CONFIG) -> None:
    """The folder must be refused in one line that names the file and holds ``words``."""
    with pytest.raises(MalformedTranslatorError) as caught:
        translator_folder.read(folder)
    assert type(caught.value) is MalformedTranslatorError
    message = str(caught.value)
    assert message.isprintable(), "more than one line, or control characters"
    assert len(message) < 1000
    assert str(folder / names) in message
    for word in words:
        assert word in message


def put_config(folder: Path, data: Any) -> None:
    (folder / CONFIG).write_text(json.dumps(data), encoding="utf-8")


def put_tensors(path: Path, arrays: Arrays, dtype: str = "float32") -> None:
    entries = {n: (CODES[dtype], a.shape, np.ascontiguousarray(a).tobytes())
               for n, a in arrays.items()}  # fmt: skip
    path.write_bytes(pack(entries))


def pack(entries: Entries) -> bytes:
    """A safetensors file: the header's length, the header, the data."""
    header: Json = {}
    body = b""
    for name, (code, shape, data) in entries.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        body += data
    return frame(json.dumps(header).encode(), body)


def frame(header: bytes, body: bytes) -> bytes:
    """Length, header, data; the header goes as it is."""
    return len(header).to_bytes(8, "little") + header + body


def unpack(blob: bytes) -> tuple[Json, bytes]:
    """The header of a sound safetensors file, and its data."""
    start = 8 + int.from_bytes(blob[:8], "little")
    return json.loads(blob[8:start]), blob[start:]


def write(folder: Path, layout: Layout = MIXING, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a translator with the package's writer."""
    weights = Weights(dtype, arrays_of(layout, dtype, seed))
    return translator_folder.write(folder, to_config(config_json(layout)), weights, overwrite=True)


def with_entry(name: str, **changes: Any) -> Callable[[Json, bytes], bytes]:
    return lambda header, body: repack(header | {name: header[name] | changes}, body)


def repack(header: Any, body: bytes) -> bytes:
    """A file with any header that JSON can say."""
    return frame(json.dumps(header).encode(), body)


def moved(header: Json, first: str, by: int) -> Json:
    """The header with the tensors from ``first`` on ``by`` bytes further on."""
    begin = header[first]["data_offsets"][0]
    out = copy.deepcopy(header)
    for entry in out.values():
        if entry["data_offsets"][0] >= begin:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    return out


def doubled(header: Json, body: bytes, name: str, **changes: Any) -> bytes:
    """A header in which one name appears twice."""
    again = json.dumps({name: header[name] | changes}).encode()
    return frame(json.dumps(header).encode()[:-1] + b", " + again[1:], body)


FIRST, SECOND, LAST = "keys.0.weight", "keys.1.weight", "values.1.weight"
BROKEN_FILES: dict[str, Callable[[Json, bytes], bytes]] = {
    "empty": lambda h, b: b"",
    "zeros": lambda h, b: bytes(64),
    "header not JSON": lambda h, b: frame(b"{keys.0.weight}", b),
    "header bad UTF-8": lambda h, b: frame(json.dumps(h).encode().replace(b"keys", b"\xff\xfe"), b),
    "header with BOM": lambda h, b: frame(b"\xef\xbb\xbf" + json.dumps(h).encode(), b),
    "header a list": lambda h, b: repack([h], b),
    "no tensors": lambda h, b: repack({}, b""),
    "metadata not strings": lambda h, b: repack({"__metadata__": {"format": 1}, **h}, b),
    "deep nesting": lambda h, b: frame(b'{"a":' * 200_000 + b"1" + b"}" * 200_000, b),
    "deep nesting ignored": lambda h, b: frame(
        json.dumps(h).encode()[:-2] + b', "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}}", b
    ),
    "header longer than file": lambda h, b: (10**6).to_bytes(8, "little") + b"{}" + b,
    "header 2^63": lambda h, b: (2**63).to_bytes(8, "little") + b"{}" + b,
    "overlap": with_entry(SECOND, data_offsets=[0, 12 * 16 * 4]),
    "gap": lambda h, b: repack(moved(h, SECOND, 4), b[:768] + bytes(4) + b[768:]),
    "trailing byte": lambda h, b: repack(h, b + b"\0"),
    "truncated by a byte": lambda h, b: repack(h, b[:-1]),
    "no body": lambda h, b: repack(h, b""),
    "duplicate key": lambda h, b: doubled(h, b, SECOND),
    "duplicate key, other offsets": lambda h, b: doubled(h, b, SECOND, data_offsets=[0, 768]),
    "offsets negative": with_entry(FIRST, data_offsets=[-768, 0]),
    "offsets past the end": with_entry(LAST, data_offsets=[10**9, 10**9 + 960]),
    "offsets past 2^64": with_entry(LAST, data_offsets=[2**64 - 4, 2**64 + 956]),
    "offsets wrapping": with_entry(LAST, data_offsets=[2**64 - 960, 0]),
    "offsets strings": with_entry(FIRST, data_offsets=["0", "768"]),
    "one offset": with_entry(FIRST, data_offsets=[0]),
    "shape negative": with_entry(FIRST, shape=[-12, -16]),
    "shape null": with_entry(FIRST, shape=None),
    "shape true": with_entry(FIRST, shape=[True, 192]),
    "shape overflow": with_entry(FIRST, shape=[65536] * 4, data_offsets=[0, 0]),
    "shape smaller than data": with_entry(FIRST, shape=[12, 15]),
    "shape of 4 axes": with_entry(FIRST, shape=[1, 1, 12, 16]),
    "shape empty": lambda h, b: pack({"a": ("F32", [], bytes(4))}),
    "zero by 2^63": lambda h, b: pack({"a": ("F32", [0, 2**63], b"")}),
    "zero by 2^64-1": lambda h, b: pack(
        {"a": ("F32", [0, 2**64 - 1], b""), "b": ("F32", [1], bytes(4))}
    ),
    "zero rows": lambda h, b: pack({"a": ("F32", [0, 3], b"")}),
    "unknown dtype": with_entry(FIRST, dtype="F33"),
    "unknown field": with_entry(FIRST, strides=[16, 1]),
    "entry a list": lambda h, b: repack(h | {FIRST: ["F32", [12, 16], [0, 768]]}, b),
    **{
        f"entry without {field}": lambda h, b, f=field: repack(
            h | {FIRST: {k: v for k, v in h[FIRST].items() if k != f}}, b
        )
        for field in ("dtype", "shape", "data_offsets")
    },
}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, hidden ones too, with its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def listing(folder: Path) -> list[str]:
    """What lies directly in ``folder``, hidden or not."""
    return sorted(path.name for path in folder.iterdir())
