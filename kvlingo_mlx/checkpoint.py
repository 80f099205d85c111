"""The translator folder, format version 1: validate, read, write. NumPy only.

A reader refuses what the format does not allow with one line that names the file, what
was found and what was expected; nothing is unpickled, ever.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from kvlingo_mlx.assignment import Assignment
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.geometry import LayerGeometry

FORMAT_VERSION = 1
CONFIG_FILE = "translator_config.json"
WEIGHTS_FILE = "translator.safetensors"
SELFTEST_FILE = "selftest.safetensors"
CARD_FILE = "README.md"
OUR_FILES = (CONFIG_FILE, WEIGHTS_FILE, SELFTEST_FILE, CARD_FILE)

SIDES = ("keys", "values")
KINDS = ("linear", "mlp", "linear_mlp")
CAPTURES = ("pre_norm", "post_norm", "post_rope", "latent")
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 100 * 2**20
MAX_LAYERS, MAX_HEADS, MAX_DIM, MAX_WINDOW = 1024, 1024, 65536, 2**31

DType = Literal["float32", "float16", "bfloat16"]
FILE_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORAGE: dict[DType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # NumPy has no bfloat16: its bits are carried as uint16
}
PROBE_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}


@dataclass(frozen=True)
class ModelSpec:
    """Who may sit on one side of a translator (format page, "Model spec")."""

    name: str
    revision: str | None
    model_type: str
    fingerprint: Mapping[str, str | None]
    layers: tuple[LayerGeometry, ...]


@dataclass(frozen=True)
class TranslatorConfig:
    """The facts of ``translator_config.json``."""

    source: ModelSpec
    target: ModelSpec
    assignment: Assignment
    kind: str = "linear"
    head_mixing: bool = True
    joint: bool = False
    capture: str = "pre_norm"
    alignment: str | None = None
    head_map: tuple[int, ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nu(self) -> int:
        """Source layers that a target layer reads for its keys (the largest, if they differ)."""
        return max(len(layers) for layers in self.assignment.keys)

    def to_json(self) -> dict[str, Any]:
        """The object that is written to ``translator_config.json``."""
        data = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.head_map is None:
            del data["head_map"]
        return data


@dataclass(frozen=True)
class Weights:
    """A translator's tensors, all of one dtype (bfloat16 as the bits, in uint16)."""

    dtype: DType
    arrays: Mapping[str, np.ndarray]

    def as_float32(self, name: str) -> np.ndarray:
        """One tensor as float32, exactly."""
        array = self.arrays[name]
        if self.dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(array, np.float32)

    def cast(self, dtype: DType) -> Weights:
        """The same tensors in another dtype, rounded to nearest even.

        Raises:
            ValueError: A weight is too large for ``dtype``.
        """
        if dtype == self.dtype:
            return self
        return Weights.from_float32({name: self.as_float32(name) for name in self.arrays}, dtype)

    @classmethod
    def from_float32(cls, arrays: Mapping[str, np.ndarray], dtype: DType) -> Weights:
        """Round float32 arrays to ``dtype``; ValueError where one does not fit."""
        for name, array in arrays.items():
            if not np.isfinite(array).all():  # before rounding, which can turn a NaN into 0
                raise ValueError(f"{name} holds NaN or Inf")
        rounded = {name: _round(np.asarray(a, np.float32), dtype) for name, a in arrays.items()}
        weights = cls(dtype, rounded)
        for name in rounded:
            if not np.isfinite(weights.as_float32(name)).all():
                raise ValueError(f"{name} does not fit {dtype}: use float32 or bfloat16")
        return weights


def _round(array: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, STORAGE[dtype])


# ---- what a config says about its tensors ---------------------------------------------


@dataclass(frozen=True)
class Map:
    """One map of a translator: its name in the file and the shape it computes.

    ``heads`` is the number of target heads of a head-wise map, else None; ``inputs``
    and ``outputs`` are the columns and rows of one matrix.
    """

    name: str
    layer: int
    heads: int | None
    inputs: int
    outputs: int


def maps_of(config: TranslatorConfig) -> list[Map]:
    """Every map that ``config`` promises, in layer order, keys before values."""
    if config.joint:
        return [_joint_map(config, t) for t in range(len(config.target.layers))]
    return [_map(config, side, t) for side in SIDES for t in range(len(config.target.layers))]


def _map(config: TranslatorConfig, side: str, t: int) -> Map:
    target = config.target.layers[t]
    sources = [config.source.layers[s] for s in config.assignment.side(side)[t]]
    name = f"{side}.{t}"
    if config.head_mixing:
        return Map(name, t, None, sum(s.width(side) for s in sources), target.width(side))
    inputs = sum(s.head_dim(side) for s in sources)
    return Map(name, t, target.kv_heads, inputs, target.head_dim(side))


def _joint_map(config: TranslatorConfig, t: int) -> Map:
    target = config.target.layers[t]
    sources = [config.source.layers[s] for s in config.assignment.keys[t]]
    inputs = sum(s.key_width + s.value_width for s in sources)
    return Map(f"joint.{t}", t, None, inputs, target.key_width + target.value_width)


def head_map_of(config: TranslatorConfig) -> tuple[int, ...]:
    """The source head that each target head reads, of a head-wise translator."""
    heads, sources = config.target.layers[0].kv_heads, config.source.layers[0].kv_heads
    if config.head_map is not None:
        return config.head_map
    return tuple(head // (heads // sources) for head in range(heads))


def expected_shapes(config: TranslatorConfig, names: Iterable[str]) -> dict[str, tuple]:
    """Name and shape of every tensor a file of this config holds.

    ``names`` are those found in the file: they decide about biases and gates, which
    every layer has or none, and the first one about a hidden width (-1 stands for it).
    """
    found = set(names)
    shapes: dict[str, tuple] = {}
    for m in maps_of(config):
        lead = () if m.heads is None else (m.heads,)
        full = m.outputs * (m.heads or 1)
        if config.kind != "mlp":
            shapes[f"{m.name}.weight"] = (*lead, m.outputs, m.inputs)
        if config.kind != "linear":
            shapes[f"{m.name}.w1"] = (*lead, -1, m.inputs)
            shapes[f"{m.name}.b1"] = (*lead, -1)
            shapes[f"{m.name}.w2"] = (*lead, m.outputs, -1)
            shapes[f"{m.name}.b2"] = (*lead, m.outputs)
        if config.kind == "mlp" and any(name.endswith(".gate") for name in found):
            shapes[f"{m.name}.gate"] = (config.target.layers[m.layer].kv_heads,)
        if any(name.endswith(".bias") for name in found):
            shapes[f"{m.name}.bias"] = (full,)
    return shapes


# ---- the self-test --------------------------------------------------------------------


def probe(width: int) -> np.ndarray:
    """The known input x_i = ((37 i + 11) mod 17 - 8) / 8, one value per column."""
    i = np.arange(width, dtype=np.int64)
    return (((37 * i + 11) % 17 - 8) / 8).astype(np.float64)


def selftest(config: TranslatorConfig, weights: Weights) -> dict[str, np.ndarray]:
    """Every map applied to its probe in float64, stored as float32."""
    out = {}
    for m in maps_of(config):
        tensors = {
            name.removeprefix(f"{m.name}."): weights.as_float32(name).astype(np.float64)
            for name in weights.arrays
            if name.startswith(f"{m.name}.")
        }
        suffix = ".weight.probe_out" if config.kind == "linear" else ".probe_out"
        with np.errstate(over="ignore", invalid="ignore"):  # a saturated gate is no fault
            out[m.name + suffix] = _apply_map(tensors, probe(m.inputs), m).astype(np.float32)
    return out


def _apply_map(tensors: Mapping[str, np.ndarray], x: np.ndarray, m: Map) -> np.ndarray:
    """One map on one vector; a linear map's bias is left out, as the format says."""
    y = np.zeros((m.heads or 1, m.outputs) if m.heads else m.outputs)
    if "weight" in tensors:
        y = y + tensors["weight"] @ x
    if "w1" in tensors:
        hidden = tensors["w1"] @ x + tensors["b1"]
        hidden = 0.5 * hidden * (1.0 + np.vectorize(math.erf)(hidden / math.sqrt(2.0)))
        y = y + (tensors["w2"] @ hidden[..., None])[..., 0] + tensors["b2"]
    if "gate" in tensors:
        gate = 1.0 / (1.0 + np.exp(-tensors["gate"]))
        y = (y.reshape(len(gate), -1) * gate[:, None]).reshape(y.shape)
    if "w1" in tensors and "bias" in tensors:
        y = y + tensors["bias"].reshape(y.shape)
    return y


def _check_selftest(path: Path, config: TranslatorConfig, weights: Weights) -> None:
    stored = _read_tensors(path)
    if stored.dtype != "float32":
        raise _malformed(path, f"probes are {stored.dtype}, expected float32")
    _check_numbers(path, stored)
    computed = selftest(config, weights)
    _check_names(path, set(stored.arrays), set(computed))
    for name, mine in computed.items():
        # In float64: squares of float32 can overflow.
        mine, theirs = mine.astype(np.float64), stored.arrays[name].astype(np.float64)
        if theirs.shape != mine.shape:
            raise _malformed(path, f"{name} has shape {theirs.shape}, expected {mine.shape}")
        scale = max(float(np.linalg.norm(theirs)), float(np.linalg.norm(mine)), 1e-30)
        error = float(np.linalg.norm(theirs - mine)) / scale
        if not error <= PROBE_TOLERANCE[weights.dtype]:
            raise _malformed(
                path,
                f"self-test failed for {name.removesuffix('.probe_out')}: relative error "
                f"{error:.2g}, allowed {PROBE_TOLERANCE[weights.dtype]:g} (transposed, "
                "permuted or mis-stacked weights?); export the translator again",
            )


# ---- reading --------------------------------------------------------------------------


def read_config(folder: str | os.PathLike[str]) -> TranslatorConfig:
    """Read and validate ``translator_config.json`` alone.

    Raises:
        MalformedTranslatorError: What the format page refuses.
    """
    path = _folder(folder) / CONFIG_FILE
    _regular_file(path)
    with open(path, "rb") as file:
        return _parse_config(path, _parse_json(path, file.read(MAX_CONFIG_BYTES + 1)))


def read(folder: str | os.PathLike[str]) -> tuple[TranslatorConfig, Weights]:
    """Read a translator folder; every check of the format page is made.

    Raises:
        MalformedTranslatorError: What the format page refuses.
    """
    folder = _folder(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    weights = _read_tensors(path)
    _check_tensors(path, config, weights)
    if (folder / SELFTEST_FILE).exists():
        _check_selftest(folder / SELFTEST_FILE, config, weights)
    return config, weights


def _malformed(path: Path, text: str) -> MalformedTranslatorError:
    """The refusal, on one printable line whatever the file's names and values hold."""
    line = f"{path}: {text:.400}"
    return MalformedTranslatorError("".join(c if c.isprintable() else "?" for c in line))


def _folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise _malformed(path, _PICKLE)
        what = "is a file" if path.exists() else "does not exist"
        raise _malformed(path, f"{what}; a translator is a folder with {CONFIG_FILE}")
    return path


_PICKLE = "is a pickle, which can run code; only safetensors are read: export it again as such"


def _regular_file(path: Path) -> int:
    """The size of a regular file; refuses what is absent or something else."""
    if not path.exists():
        for other in sorted(path.parent.iterdir()):
            if other.suffix.lower() in PICKLE_SUFFIXES:
                raise _malformed(other, _PICKLE)
        raise _malformed(path, "is missing; a translator folder needs it (incomplete download?)")
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise _malformed(path, "is not a regular file")
    return info.st_size


def _parse_json(path: Path, blob: bytes) -> Any:
    """The value of strict JSON: no repeated keys, no NaN or Inf, no lone surrogates."""
    if len(blob) > MAX_CONFIG_BYTES:
        raise _malformed(path, f"is too large; a config has at most {MAX_CONFIG_BYTES} bytes")
    try:
        data = json.loads(
            blob.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_finite,
            parse_float=_finite,
        )
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"is not valid JSON: {error}") from None
    return data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"key {key!r} appears twice")
        data[key] = value
    return data


def _finite(text: str) -> float:
    value = float(text)  # "NaN" and "Infinity" too
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Each tensor's entry in a safetensors header, and where the data start.

    The Rust reader checks sizes and offsets; it lets repeated names, unknown fields and
    shapes beyond NumPy pass.
    """
    size = _regular_file(path)
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            # Only now: a sound file starts with 0x80 too, where its header has 128 bytes.
            pickled = head.startswith((b"PK", b"\x80"))
            text = _PICKLE if pickled else f"is no safetensors file or truncated ({size} bytes)"
            raise _malformed(path, text)
        header_bytes = file.read(length)
    try:
        with safe_open(path, framework="np"):
            pass
        header = json.loads(header_bytes.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (SafetensorError, ValueError, OSError) as error:
        raise _malformed(path, f"is no sound safetensors file or truncated: {error}") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _malformed(path, f"{name}: expected dtype, shape and data_offsets alone")
        shape = entry["shape"]
        if not 1 <= len(shape) <= 3 or 0 in shape:
            raise _malformed(path, f"{name} has shape {shape}, expected 1 to 3 axes, none empty")
    return header, 8 + length


def _read_tensors(path: Path) -> Weights:
    """Read a safetensors file into NumPy."""
    header, begin = _read_header(path)
    if not header:
        raise _malformed(path, "holds no tensors")
    dtypes = {entry["dtype"] for entry in header.values()}
    if len(dtypes) != 1 or not dtypes <= set(FILE_DTYPES):
        raise _malformed(
            path, f"dtypes {sorted(dtypes)}; expected one of {sorted(FILE_DTYPES)} throughout"
        )
    dtype = FILE_DTYPES[dtypes.pop()]
    data = np.memmap(path, np.uint8, "r", offset=begin)
    arrays = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        array = np.array(data[start:stop]).view(STORAGE[dtype])
        arrays[name] = array.reshape(entry["shape"])
    return Weights(dtype, arrays)


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    for what, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise _malformed(path, f"{len(names)} {what} tensor(s): {listed}")


def _check_tensors(path: Path, config: TranslatorConfig, weights: Weights) -> None:
    shapes = expected_shapes(config, weights.arrays)
    _check_names(path, set(weights.arrays), set(shapes))
    for name, expected in shapes.items():
        found = weights.arrays[name].shape
        hidden = _hidden_width(name, weights) if -1 in expected else None
        expected = tuple(hidden if n == -1 else n for n in expected)
        if found != expected:
            raise _malformed(path, f"{name} has shape {found}, expected {expected}")
    _check_numbers(path, weights)


def _check_numbers(path: Path, weights: Weights) -> None:
    for name, array in weights.arrays.items():
        if array.dtype != STORAGE[weights.dtype]:  # a caller's, when writing
            raise _malformed(path, f"{name} is {array.dtype}, not {weights.dtype}")
        if not np.isfinite(weights.as_float32(name)).all():
            raise _malformed(path, f"{name} holds NaN or Inf")


def _hidden_width(name: str, weights: Weights) -> int:
    b1 = weights.arrays[name.rsplit(".", 1)[0] + ".b1"]
    return max(b1.shape[-1], 1) if b1.ndim else 1


# ---- the config, strictly --------------------------------------------------------------


def _parse_config(path: Path, data: Any) -> TranslatorConfig:
    if not isinstance(data, dict):
        raise _malformed(path, f"holds a {type(data).__name__}, expected an object")
    version = data.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise _malformed(
            path,
            f"format version {version!r:.60}, this kvlingo-mlx reads {FORMAT_VERSION}; upgrade",
        )
    known = {f.name for f in fields(TranslatorConfig)} | {"format_version"}
    _check_keys(path, data, known, optional={"head_map"})
    source = _parse_model(path, "source", data["source"])
    target = _parse_model(path, "target", data["target"])
    config = TranslatorConfig(
        source=source,
        target=target,
        assignment=_parse_assignment(path, data["assignment"], source, target),
        kind=_one_of(path, "kind", data["kind"], KINDS),
        head_mixing=_typed(path, "head_mixing", data["head_mixing"], bool),
        joint=_typed(path, "joint", data["joint"], bool),
        capture=_one_of(path, "capture", data["capture"], CAPTURES),
        alignment=_one_of(path, "alignment", data["alignment"], (None, "minimal_groups")),
        provenance=_typed(path, "provenance", data["provenance"], dict),
    )
    _check_joint(path, config)
    if config.head_mixing and "head_map" in data:
        raise _malformed(path, "head_map belongs to head-wise translators only")
    if not config.head_mixing:
        config = replace(config, head_map=_parse_head_map(path, data.get("head_map"), config))
    return config


def _check_keys(path: Path, data: dict, known: set[str], optional: set[str] = frozenset()) -> None:
    for key in sorted(known - optional - set(data)):
        raise _malformed(path, f"lacks the key {key!r}")
    for key in sorted(set(data) - known):
        raise _malformed(path, f"has the unknown key {key!r}")


def _typed(path: Path, key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _malformed(path, f"{key} is {value!r:.60}, expected a {kind.__name__}")
    return value


def _one_of(path: Path, key: str, value: Any, allowed: tuple) -> Any:
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        raise _malformed(path, f"{key} is {value!r:.60}, expected one of {list(allowed)}")
    return value


def _integer(path: Path, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _malformed(path, f"{key} is {value!r:.60}, expected an integer {low} to {high}")
    return value


def _parse_model(path: Path, side: str, data: Any) -> ModelSpec:
    _typed(path, side, data, dict)
    _check_keys(path, data, {f.name for f in fields(ModelSpec)})
    fingerprint = _typed(path, f"{side}.fingerprint", data["fingerprint"], dict)
    _check_keys(path, fingerprint, {"geometry", "norms", "tokenizer"})
    for tier, digest in fingerprint.items():
        if digest is not None and not _is_sha256(digest):
            raise _malformed(path, f"{side}.fingerprint.{tier} is no sha256 in hex")
    revision = data["revision"]
    if revision is not None:
        _typed(path, f"{side}.revision", revision, str)
    layers = _typed(path, f"{side}.layers", data["layers"], list)
    _integer(path, f"number of {side} layers", len(layers), 1, MAX_LAYERS)
    return ModelSpec(
        name=_typed(path, f"{side}.name", data["name"], str),
        revision=revision,
        model_type=_typed(path, f"{side}.model_type", data["model_type"], str),
        fingerprint=dict(fingerprint),
        layers=tuple(_parse_layer(path, f"{side}.layers", layer) for layer in layers),
    )


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _parse_layer(path: Path, key: str, data: Any) -> LayerGeometry:
    _typed(path, key, data, dict)
    _check_keys(path, data, {f.name for f in fields(LayerGeometry)})
    window = data["window"]
    if window is not None:
        _integer(path, f"{key}.window", window, 1, MAX_WINDOW)
    attention = _one_of(path, f"{key}.attention", data["attention"], ("full", "sliding", "latent"))
    if (attention == "sliding") != (window is not None):
        raise _malformed(path, f"{key}: attention {attention!r} with window {window}")
    return LayerGeometry(
        layer=_integer(path, f"{key}.layer", data["layer"], 0, MAX_LAYERS),
        kv_heads=_integer(path, f"{key}.kv_heads", data["kv_heads"], 1, MAX_HEADS),
        key_dim=_integer(path, f"{key}.key_dim", data["key_dim"], 1, MAX_DIM),
        value_dim=_integer(path, f"{key}.value_dim", data["value_dim"], 1, MAX_DIM),
        attention=attention,
        window=window,
    )


def _parse_assignment(path: Path, data: Any, source: ModelSpec, target: ModelSpec) -> Assignment:
    _typed(path, "assignment", data, dict)
    _check_keys(path, data, set(SIDES))
    sides = {side: _parse_side(path, side, data[side], source, target) for side in SIDES}
    return Assignment(**sides)


def _parse_side(
    path: Path, side: str, data: Any, source: ModelSpec, target: ModelSpec
) -> tuple[tuple[int, ...], ...]:
    _typed(path, f"assignment.{side}", data, list)
    if len(data) != len(target.layers):
        raise _malformed(
            path, f"assignment.{side} has {len(data)} lists for {len(target.layers)} target layers"
        )
    lengths: dict[str, int] = {}
    for t, layers in enumerate(data):
        key = f"assignment.{side}[{t}]"
        _typed(path, key, layers, list)
        for s in layers:
            _integer(path, key, s, 0, len(source.layers) - 1)
        if not layers or len(set(layers)) != len(layers):
            raise _malformed(path, f"{key} is {layers}, expected distinct source layers")
        group = target.layers[t].attention
        crossing = [s for s in layers if source.layers[s].attention != group]
        if crossing:
            raise _malformed(
                path, f"{key} crosses attention groups: source layer {crossing[0]} is not {group}"
            )
        if lengths.setdefault(group, len(layers)) != len(layers):
            raise _malformed(path, f"{key} has {len(layers)} layers, others {lengths[group]}")
    return tuple(tuple(layers) for layers in data)


def _check_joint(path: Path, config: TranslatorConfig) -> None:
    if not config.joint:
        return
    if config.kind != "linear" or not config.head_mixing:
        raise _malformed(path, "joint is true, expected kind linear with head_mixing true")
    if config.assignment.keys != config.assignment.values:
        raise _malformed(path, "joint is true, but keys and values have different assignments")


def _parse_head_map(path: Path, data: Any, config: TranslatorConfig) -> tuple[int, ...] | None:
    targets = {layer.kv_heads for layer in config.target.layers}
    sources = {layer.kv_heads for layer in config.source.layers}
    if len(targets) > 1 or len(sources) > 1:
        raise _malformed(path, "head-wise maps need one KV-head count per model")
    heads, source_heads = targets.pop(), sources.pop()
    if data is None:
        if heads % source_heads:
            raise _malformed(
                path, f"{heads} target heads from {source_heads} source heads need head_map"
            )
        return None
    _typed(path, "head_map", data, list)
    if len(data) != heads:
        raise _malformed(path, f"head_map has {len(data)} entries for {heads} target heads")
    return tuple(_integer(path, "head_map", h, 0, source_heads - 1) for h in data)


# ---- writing --------------------------------------------------------------------------


def write(folder: str | os.PathLike[str], config: TranslatorConfig, weights: Weights) -> Path:
    """Write a translator folder at once: all of it appears, or nothing.

    An older translator of ours at ``folder`` is replaced.

    Raises:
        ValueError: ``folder`` exists and is not a translator of ours.
        MalformedTranslatorError: ``config`` and ``weights`` do not agree.
    """
    folder = Path(folder)
    check_destination(folder)
    text = json.dumps(config.to_json(), indent=2) + "\n"
    # What we would refuse to read, we refuse to write.
    _parse_config(folder / CONFIG_FILE, _parse_json(folder / CONFIG_FILE, text.encode()))
    _check_tensors(folder / WEIGHTS_FILE, config, weights)
    probes = Weights("float32", selftest(config, weights))
    _check_numbers(folder / SELFTEST_FILE, probes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        _write_text(temporary / CONFIG_FILE, text)
        _write_tensors(temporary / WEIGHTS_FILE, weights)
        _write_tensors(temporary / SELFTEST_FILE, probes)
        _write_text(temporary / CARD_FILE, model_card(config, weights))
        _replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def check_destination(folder: str | os.PathLike[str]) -> None:
    """Refuse (ValueError) a destination that exists and is not a translator of ours."""
    folder = Path(folder)
    if not folder.exists():
        return
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else None
    if names is None or (names and (CONFIG_FILE not in names or not names <= set(OUR_FILES))):
        raise ValueError(
            f"{folder} exists and is not a translator folder; choose another name, or remove it"
        )


def _replace_folder(temporary: Path, folder: Path) -> None:
    """Move ``temporary`` to ``folder``; an older one steps aside first, and back if we fail."""
    if not folder.exists():
        os.rename(temporary, folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.rename(folder, aside / "old")
        os.rename(temporary, folder)
    except BaseException:
        if not folder.exists():
            os.rename(aside / "old", folder)
        raise
    finally:
        if folder.exists():  # otherwise ``aside`` holds the only copy
            shutil.rmtree(aside, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_tensors(path: Path, weights: Weights) -> None:
    # The specs hold bare addresses: the arrays must live until the call returns.
    arrays = {name: np.ascontiguousarray(array) for name, array in weights.arrays.items()}
    specs = {
        name: TensorSpec(
            dtype=weights.dtype,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    serialize_file(specs, path, {"format": "kvlingo"})
    path.chmod(0o644)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def model_card(config: TranslatorConfig, weights: Weights) -> str:
    """The README.md that travels with a translator."""
    parameters = sum(array.size for array in weights.arrays.values())
    lines = [
        "---",
        "library_name: kvlingo-mlx",
        "tags: [mlx, kv-cache, kv-lingo]",
        f"base_model: {json.dumps([config.source.name, config.target.name])}",
        "---",
        f"# {config.source.name} to {config.target.name}",
        "",
        "A KV-Lingo translator: it turns the key-value cache of the first model into one",
        "that the second can decode from.",
        "",
        f"- kind: {config.kind}, {'head-mixing' if config.head_mixing else 'head-wise'},"
        f" captured {config.capture.replace('_', '-')}",
        f"- source layers per target layer: {config.nu}",
        f"- parameters: {parameters:,} in {weights.dtype}",
        *(f"- {key}: {value}" for key, value in config.provenance.items()),
        "",
        "```",
        f"kvlingo-mlx generate --prefill-model {config.source.name} \\",
        f"    --decode-model {config.target.name} --translator . --prompt 'Hello'",
        "```",
        "",
    ]
    return "\n".join(lines)
