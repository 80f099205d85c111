"""A TOML page that describes linear maps in .safetensors or .npz files of any layout.

docs/guides/translators-of-others.md explains it by examples.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import malformed
from kvlingo_mlx.format.config_reading import MAX_DIM, MAX_HEADS, MAX_LAYERS
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import PICKLE_SUFFIXES
from kvlingo_mlx.format.translator_config import ModelSpec
from kvlingo_mlx.store.axes import OUTPUTS, Form
from kvlingo_mlx.store.foreign import READERS, Foreign, Side, opened, short

CAPTURES = ("pre_norm", "post_norm", "post_rope")
TOP = ("files", "capture", "head_mixing", "ignore", "sources", "source", "target", *SIDES)
OF_SIDE = ("weight", "axes", "bias", "bias_axes", "sources")
OF_MODEL = ("name", "model_type", "layers", "kv_heads", "head_dim")
MOST = (MAX_LAYERS, MAX_HEADS, MAX_DIM)  # of the last three
UNKNOWN = {"geometry": None, "norms": None, "tokenizer": None}


def plain_model(name: str, model_type: str, layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """A model of which no more is known than the shape of its cache, alike in all layers."""
    alike = (LayerGeometry(i, kv_heads, head_dim, head_dim) for i in range(layers))
    return ModelSpec(name, None, model_type, UNKNOWN, tuple(alike))


def read_description(page: Path, folder: Path, suffix: str | None = None) -> Foreign:
    """Read a page, and open the files of ``folder`` (or the one file) that it describes.

    ``suffix`` is that of the files which belong to it; None is any that can be read.

    Raises:
        MalformedTranslatorError: The page lacks something or says something unknown, or a file is
            missing or unsound.
    """
    try:
        said = tomllib.loads(page.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise malformed(page, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # neither TOML nor UTF-8
        raise malformed(page, f"is not valid TOML: {error}") from None
    _check_keys(page, "the page", said, TOP, ("capture", *SIDES))
    if said["capture"] not in CAPTURES:
        raise malformed(
            page, f"capture is {said['capture']!r}, expected one of {', '.join(CAPTURES)}"
        )
    mixing = _typed(page, said, "head_mixing", bool, True)
    sides = {side: _side(page, said, side, mixing) for side in SIDES}
    dtypes, tensors = opened(_files(page, said, folder, suffix))
    ignored: list[str] = []
    for pattern in _words(page, said, "ignore"):
        found = fnmatch.filter(tensors, pattern)
        if not found:
            raise malformed(page, f"ignore names {pattern!r}, which no tensor has; leave it out")
        ignored += found
    return Foreign(
        page,
        "described",
        dtypes,
        tensors,
        sides,
        said["capture"],
        mixing,
        (_model(page, said, "source"), _model(page, said, "target")),
        ignored=frozenset(ignored),
        unneeded="name them in `ignore` if they are not needed",
        provenance={"converted_from": f"maps described by {page.name}"},
    )


def _files(page: Path, said: Mapping[str, Any], folder: Path, suffix: str | None) -> list[Path]:
    names = _words(page, said, "files")
    wanted = tuple(READERS) if suffix is None else (suffix,)
    if folder.is_file():
        if names:
            raise malformed(
                page, f"names files, and {folder} is one; give its folder, or name none"
            )
        if folder.suffix.lower() not in wanted:
            raise malformed(folder, f"expected a file that ends with {' or '.join(wanted)}")
        return [folder]
    there = sorted(p for p in folder.iterdir() if p.suffix.lower() in wanted)
    known = {p.name: p for p in there}
    for name in names:
        if name not in known:
            raise malformed(
                page, f"names the file {name!r}, and {folder} has {', '.join(known) or 'none'}"
            )
    if not there:
        pickled = [p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES]
        more = f"; it has {pickled[0]}, a pickle: save it as safetensors" if pickled else ""
        raise malformed(folder, f"holds no file that ends with {' or '.join(wanted)}{more}")
    return [known[name] for name in names] or there


def _side(page: Path, said: Mapping[str, Any], side: str, mixing: bool) -> Side:
    table, other = said[side], said["keys"]
    if not isinstance(table, dict) or not isinstance(other, dict):
        raise malformed(page, f"{side} is no table; write [{side}]")
    _check_keys(page, f"[{side}]", table, OF_SIDE, ("weight",))
    inputs = ("sources", "source_heads", "source_dim") if mixing else ("sources", "source_dim")
    axes = _typed(page, table, "axes", str, other.get("axes"))
    if not isinstance(axes, str):
        raise malformed(page, f"[{side}] lacks axes, such as '(heads dim) ({' '.join(inputs)})'")
    try:
        weight = Form.of(_typed(page, table, "weight", str), axes, (*OUTPUTS, *inputs))
        bias = None
        if "bias_axes" in table and "bias" not in table:
            raise ValueError("bias_axes has no effect without bias")
        if "bias" in table:
            told = _typed(page, table, "bias_axes", str, other.get("bias_axes", "(heads dim)"))
            bias = Form.of(_typed(page, table, "bias", str), told, OUTPUTS)
    except ValueError as error:
        raise malformed(page, f"[{side}]: {error}") from None
    return Side(weight, bias, _sources(page, table.get("sources", said.get("sources")), side))


def _sources(page: Path, said: Any, side: str) -> tuple[tuple[int, ...], ...]:
    lists = said if isinstance(said, list) else []
    if not lists or not all(
        isinstance(read, list) and all(type(s) is int for s in read) for read in lists
    ):
        raise malformed(
            page,
            f"sources of {side} is {short(said)}, expected for each target layer the list of the "
            "source layers that it reads, such as [[0, 1], [1, 2]]",
        )
    return tuple(tuple(read) for read in lists)


def _model(page: Path, said: Mapping[str, Any], role: str) -> ModelSpec | None:
    if role not in said:
        return None
    table = said[role]
    if not isinstance(table, dict):
        raise malformed(page, f"{role} is no table; write [{role}]")
    _check_keys(page, f"[{role}]", table, OF_MODEL, OF_MODEL)
    texts = (_typed(page, table, name, str) for name in OF_MODEL[:2])
    counts = [_typed(page, table, name, int) for name in OF_MODEL[2:]]
    for name, count, most in zip(OF_MODEL[2:], counts, MOST, strict=True):
        if not 1 <= count <= most:
            raise malformed(page, f"[{role}]: {name} is {short(count)}, expected 1 to {most}")
    return plain_model(*texts, *counts)


def _check_keys(page: Path, where: str, table: Mapping, known: tuple, needed: tuple) -> None:
    for key in table:
        if key not in known:
            raise malformed(page, f"{where} has {key!r}, expected only {', '.join(known)}")
    for key in needed:
        if key not in table:
            raise malformed(page, f"{where} lacks {key!r}")


def _typed(page: Path, table: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = table.get(key, default)
    if key in table and type(value) is not kind:
        raise malformed(page, f"{key} is {short(value)}, expected {KINDS[kind]}")
    return value


KINDS = {str: "a text", int: "a whole number", bool: "true or false"}


def _words(page: Path, said: Mapping[str, Any], key: str) -> list[str]:
    found = said.get(key, [])
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise malformed(page, f"{key} is {short(found)}, expected a list of texts")
    return found
