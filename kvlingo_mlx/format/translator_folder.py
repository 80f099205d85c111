"""Translator folders, format version 1: reading, writing and the self-test. NumPy only.

A reader refuses what the format does not allow, with one line that names the file, what was found
and what was expected. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np

from kvlingo_mlx.errors import MalformedTranslatorError, malformed
from kvlingo_mlx.format import atomic, maps
from kvlingo_mlx.format.config_reading import parse_config
from kvlingo_mlx.format.files import PICKLE, PICKLE_SUFFIXES, parse_json, read_json
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.tensor_file import (
    Shapes,
    Weights,
    check_numbers,
    read_tensors,
    write_tensors,
)
from kvlingo_mlx.format.translator_config import OF_MODELS, TranslatorConfig

CONFIG_FILE = "translator_config.json"
WEIGHTS_FILE = "translator.safetensors"
SELFTEST_FILE = "selftest.safetensors"
CARD_FILE = "README.md"
OUR_FILES = (CONFIG_FILE, WEIGHTS_FILE, SELFTEST_FILE, CARD_FILE)
LARGEST = 1e4  # the largest allowed magnitude of a weight
PROBE_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}


# ---- the self-test --------------------------------------------------------------------


def probe(width: int) -> np.ndarray:
    """The known input x_i = ((37 i + 11) mod 17 - 8) / 8, one value per column."""
    i = np.arange(width, dtype=np.int64)
    return (((37 * i + 11) % 17 - 8) / 8).astype(np.float64)


def selftest(config: TranslatorConfig, weights: Weights) -> dict[str, np.ndarray]:
    """Apply every map to its probe in float64; the results are float32."""
    out = {}
    for m in maps.maps_of(config):
        tensors = {
            name.removeprefix(f"{m.name}."): weights.as_float32(name).astype(np.float64)
            for name in weights.arrays
            if name.startswith(f"{m.name}.")
        }
        if config.spec.folds:
            tensors.pop("bias", None)
        with np.errstate(over="ignore", invalid="ignore"):  # a saturated gate may overflow
            found = config.spec.apply(tensors, probe(m.inputs)[None], _gelu, _sigmoid)[0]
        found = found if m.heads is None else found.reshape(m.heads, -1)
        out[f"{m.name}.{config.spec.probe}"] = found.astype(np.float32)
    for each in maps.state_maps_of(config):
        both = (weights.as_float32(f"{each.name}.{last}") for last in each.shapes)
        left, right = (array.astype(np.float64) for array in both)
        values, keys, query = state_probe(each)
        scales = (right @ query).reshape(len(right), *keys.shape) * keys
        rows = scales.sum(-1)[..., None] * values
        found = (left @ rows.reshape(len(left), -1, 1))[..., 0]
        out[f"{each.name}.probe_out"] = found.astype(np.float32)
    return out


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def state_probe(m: maps.StateMap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The probe of a map of states: the state of source layer j is the product of two vectors.

    Returns:
        The rows' vectors (layers, value dim), the columns' (layers, key dim), and the query
        (target key dim) by which the mapped state is multiplied.
    """
    values, (keys, queries) = m.shapes["left"][-1], m.shapes["right"][-2:]
    layers = len(m.reads)
    return probe(values).reshape(layers, -1), probe(keys).reshape(layers, -1), probe(queries)


def _check_selftest(path: Path, config: TranslatorConfig, weights: Weights) -> None:
    computed = selftest(config, weights)

    def check(shapes: Shapes) -> None:
        _check_names(path, set(shapes), set(computed))
        for name, mine in computed.items():
            if shapes[name] != mine.shape:
                raise malformed(path, f"{name} has shape {shapes[name]}, expected {mine.shape}")

    stored = read_tensors(path, check)
    if stored.dtype != "float32":
        raise malformed(path, f"probes are {stored.dtype}, expected float32")
    check_numbers(path, stored)
    for name, mine in computed.items():
        # Norms are taken in float64, because squares of float32 can overflow.
        mine, theirs = mine.astype(np.float64), stored.arrays[name].astype(np.float64)
        scale = max(float(np.linalg.norm(theirs)), float(np.linalg.norm(mine)), 1e-30)
        error = float(np.linalg.norm(theirs - mine)) / scale
        if not error <= PROBE_TOLERANCE[weights.dtype]:
            why = "transposed, permuted or mis-stacked weights?"
            if config.spec.has_hidden:
                why += " or another GELU? the exact one, with erf, is meant"
            raise malformed(
                path,
                f"self-test failed for {name.removesuffix('.probe_out')}: relative error "
                f"{error:.2g}, allowed {PROBE_TOLERANCE[weights.dtype]:g} ({why}); export the "
                "translator again",
            )


# ---- reading --------------------------------------------------------------------------


def read_config(folder: str | os.PathLike[str]) -> TranslatorConfig:
    """Read and validate ``translator_config.json`` alone.

    Raises:
        MalformedTranslatorError: The config breaks the format page's rules.
    """
    path = _folder(folder) / CONFIG_FILE
    return parse_config(path, read_json(path))


def read(folder: str | os.PathLike[str], *, lazy: bool = False) -> tuple[TranslatorConfig, Weights]:
    """Read a translator folder and make every check of the format page.

    With ``lazy`` the weights are read again whenever they are looked at, one tensor at a time.

    Raises:
        MalformedTranslatorError: The folder breaks the format page's rules.
    """
    folder = _folder(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    weights = read_tensors(path, lambda shapes: _check_shapes(path, config, shapes), lazy=lazy)
    check_numbers(path, weights)
    if (folder / SELFTEST_FILE).exists():
        _check_selftest(folder / SELFTEST_FILE, config, weights)
    return config, weights


def _folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise malformed(path, PICKLE)
        what = "is a file" if path.exists() else "does not exist"
        kept = [p / "old" for p in atomic.leftovers(path) if (p / "old").is_dir()]
        if kept:
            what = f"is missing, since its replacement was interrupted; move {kept[0]} back to it"
        raise malformed(path, f"{what}; a translator is a folder with {CONFIG_FILE}")
    return path


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    for what, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            listed = ", ".join(sorted(names)[:10]) + (", ..." if len(names) > 10 else "")
            raise malformed(path, f"{len(names)} {what} tensor(s): {listed}")


def _check_shapes(path: Path, config: TranslatorConfig, shapes: Shapes) -> None:
    wanted = maps.expected_shapes(config, shapes)
    _check_names(path, set(shapes), set(wanted))
    for name, expected in wanted.items():
        hidden = _hidden_width(name, shapes) if -1 in expected else None
        expected = tuple(hidden if n == -1 else n for n in expected)
        if shapes[name] != expected:
            raise malformed(
                path,
                f"{name} has shape {shapes[name]}, expected {expected} "
                f"({maps.axes_in_words(name.rsplit('.', 1)[-1], config.head_mixing)})",
            )


def _hidden_width(name: str, shapes: Shapes) -> int:
    b1 = shapes[name.rsplit(".", 1)[0] + ".b1"]
    return max(b1[-1], 1) if b1 else 1


def check_sizes(folder: str | os.PathLike[str], config: TranslatorConfig, weights: Weights) -> None:
    """Refuse maps that the format allows but training never makes: all zero, or huge weights.

    Raises:
        MalformedTranslatorError: The message names the tensor and what was found in it.
    """
    path = Path(folder) / WEIGHTS_FILE
    last = (f".{config.spec.nonzero}", *(f".{name}" for name in maps.STATE_AXES))
    for name in weights.arrays:
        largest = float(np.abs(weights.as_float32(name)).max())
        if largest > LARGEST:
            raise malformed(
                path,
                f"{name} holds {largest:.3g}, expected at most {LARGEST:g}; was it exported in "
                "another dtype, or after the training had diverged?",
            )
        if name.endswith(last) and not largest:
            raise malformed(path, f"{name} is all zero; was it exported before the training?")


def digest(config: TranslatorConfig, weights: Weights, bits: int | None = None) -> str:
    """Sha256 of what a translator computes: its facts, and its tensors with dtypes and shapes.

    The provenance and the models' names and revisions are left out, so two folders of one digest
    do the same to the same models. ``bits`` are those to which the matrices are quantised, None
    for float; ``weights`` then hold the dequantised values.
    """
    facts = config.to_json()
    del facts["provenance"]
    for end in ("source", "target"):
        facts[end] = {k: v for k, v in facts[end].items() if k not in ("name", "revision")}
    found = hashlib.sha256(canonical_json([facts, weights.dtype, bits]).encode())
    for name, array in sorted(weights.arrays.items()):
        found.update(f"{name} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


# ---- writing --------------------------------------------------------------------------


def write(
    folder: str | os.PathLike[str],
    config: TranslatorConfig,
    weights: Weights,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a translator folder so that all of it appears at once, or nothing.

    If the folder holds exactly this translator, it is left as it is. Another translator there is
    replaced only with ``overwrite``.

    Raises:
        ValueError: ``folder`` exists and is not a translator folder, or it holds another
            translator and ``overwrite`` is off.
        MalformedTranslatorError: ``config`` and ``weights`` do not agree.
    """
    folder = atomic.followed(Path(folder))
    check_destination(folder)
    text = (json.dumps(config.to_json(), indent=2) + "\n").encode()
    # Refuse to write what reading would refuse.
    parse_config(folder / CONFIG_FILE, parse_json(folder / CONFIG_FILE, text))
    _check_shapes(folder / WEIGHTS_FILE, config, weights.shapes)
    check_numbers(folder / WEIGHTS_FILE, weights)
    probes = Weights("float32", selftest(config, weights))
    check_numbers(folder / SELFTEST_FILE, probes)
    card = model_card(config, weights).encode()

    def is_new() -> bool:
        if is_same(folder, config, weights):
            return False
        if not overwrite:
            check_free(folder)
        return True

    needed = weights.nbytes + probes.nbytes + len(text) + len(card)
    with atomic.new_folder(folder, needed, is_new) as place:
        if place is not None:
            atomic.write_file(place / CONFIG_FILE, [text])
            write_tensors(place / WEIGHTS_FILE, weights)
            write_tensors(place / SELFTEST_FILE, probes)
            atomic.write_file(place / CARD_FILE, [card])
    return folder


def is_same(folder: str | os.PathLike[str], config: TranslatorConfig, weights: Weights) -> bool:
    """Whether a folder holds exactly this translator: config, provenance and weights."""
    try:
        there, own = read(folder, lazy=True)
    except MalformedTranslatorError:
        return False
    facts, theirs = (json.dumps(c.to_json(), sort_keys=True) for c in (config, there))
    if facts != theirs or own.dtype != weights.dtype or set(own.arrays) != set(weights.arrays):
        return False
    return all(np.array_equal(array, own.arrays[n]) for n, array in weights.arrays.items())


def check_free(folder: str | os.PathLike[str]) -> None:
    """Refuse (ValueError) a folder that already holds a translator."""
    if (Path(folder) / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} holds another translator; give another folder, or replace that one with "
            "--force (overwrite=True)"
        )


def check_destination(folder: str | os.PathLike[str]) -> None:
    """Refuse (ValueError) a destination that is no translator folder or cannot be written."""
    folder = Path(folder)
    if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(
            f"{folder} is the folder you are in or one above; give a new folder's name"
        )
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: {parent} is read-only")
    if not folder.exists():
        return
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else None
    if names is None or (names and (CONFIG_FILE not in names or not names <= set(OUR_FILES))):
        raise ValueError(
            f"{folder} exists and is not a translator folder; choose another name, or remove it"
        )


def _card_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def model_card(config: TranslatorConfig, weights: Weights, grade: str | None = None) -> str:
    """The text of the README.md in a translator folder; a ``grade`` stands for its receipt."""
    told = dict(config.provenance) if grade is None else {**config.provenance, "receipt": grade}
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
        f"- kind: {config.form}, captured {config.capture.replace('_', '-')}",
        f"- source layers per target layer: {config.nu_told}",
        f"- parameters: {weights.size:,} in {weights.dtype}",
        *(f"- {key}: {_card_value(value)}" for key, value in told.items() if key not in OF_MODELS),
        "",
        "```",
        f"kvlingo-mlx generate --prefill-model {config.source.name} \\",
        f"    --decode-model {config.target.name} --translator . --prompt 'Hello'",
        "```",
        "",
    ]
    return "\n".join(lines)
