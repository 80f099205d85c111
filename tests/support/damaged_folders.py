"""Damaged translator folders, and what a reader must make of each."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
from hypothesis import strategies as st

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from tests.support import translator_folders as layouts
from tests.support.state_map_folders import config_json, put

Files = dict[str, bytes]
Json = dict[str, Any]
BASES = (
    ("mixing", "float32"),
    ("head-wise-r2", "bfloat16"),
    ("head-wise-map", "float32"),
    ("joint-bias", "float16"),
    ("mlp-gated", "float32"),
    ("linear-mlp-head-wise", "bfloat16"),
)


def sound_files() -> list[Files]:
    """The files of every base, by name."""
    with tempfile.TemporaryDirectory() as root:
        folders = [
            layouts.store(Path(root) / name, layouts.LAYOUTS[name], dtype) for name, dtype in BASES
        ]
        config, weights = translator_folder.read(put(Path(root) / "states", config_json()))
        folders.append(translator_folder.write(Path(root) / "mapped", config, weights))
        (folders[-1] / layouts.CARD).unlink()
        return [{path.name: path.read_bytes() for path in f.iterdir()} for f in folders]


SOUND = sound_files()


def try_folder(room: Path, files: Files) -> bool:
    """Whether the folder was read; fails on anything but a sound reading or a refusal."""
    folder = room / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    try:
        config, weights = translator_folder.read(folder)
    except MalformedTranslatorError as error:
        assert type(error) is MalformedTranslatorError
        assert str(error).startswith(str(folder))
        assert str(error).isprintable(), "more than one line, or control characters"
        return False
    check_sound(folder, config, weights)
    check_written_again(room / "again", config, weights)
    return True


def check_sound(folder: Path, config: Any, weights: Any) -> None:
    """What was read is what plain JSON and safetensors find, and what the format allows."""
    data = json.loads((folder / layouts.CONFIG).read_text(encoding="utf-8"))
    found = json.loads(json.dumps(asdict(config)))
    for layer in (*found["source"]["layers"], *found["target"]["layers"]):
        if layer["recurrence"] is None:
            del layer["recurrence"]  # attention has no such key
    assert found == {
        "head_map": None,
        "state_maps": False,
        **{key: value for key, value in data.items() if key != "format_version"},
    }
    check_assignment(data)
    entries = dict(safetensors.deserialize((folder / layouts.TENSORS).read_bytes()))
    assert set(entries) == set(weights.arrays)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    hidden = lambda side, t: shapes.get(f"{side}.{t}.b1", (0,))[-1]  # noqa: E731  (as it was found)
    optional = {name: any(f"{side}.0.{name}" in shapes for side in ("keys", "joint"))
                for name in ("gate", "bias")}  # fmt: skip
    assert shapes == layouts.page_shapes(data, hidden, **optional)
    assert len({entry["dtype"] for entry in entries.values()}) == 1
    for name, entry in entries.items():
        assert bytes(entry["data"]) == weights.arrays[name].tobytes()
        assert abs(layouts.exact(weights.arrays[name], weights.dtype)).max() < 3.5e38  # and no NaN


def check_assignment(data: Json) -> None:
    """Every target layer reads distinct layers that exist and are of its own group."""
    for side in layouts.SIDES:
        assert len(data["assignment"][side]) == len(data["target"]["layers"])
        for target, layers in zip(data["target"]["layers"], data["assignment"][side], strict=True):
            assert 1 <= len(set(layers)) == len(layers)
            assert all(0 <= s < len(data["source"]["layers"]) for s in layers)
            groups = {data["source"]["layers"][s]["attention"] for s in layers}
            assert groups == {target["attention"]}


def check_written_again(folder: Path, config: Any, weights: Any) -> None:
    """What is read can be written, and reads the same."""
    shutil.rmtree(folder, ignore_errors=True)
    translator_folder.write(folder, config, weights)
    again, copies = translator_folder.read(folder)
    assert again == config
    assert {n: a.tobytes() for n, a in copies.arrays.items()} == {
        n: a.tobytes() for n, a in weights.arrays.items()
    }


INTEGERS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 16, 64, -1, 2**31, 2**32 + 4, 2**63, 2**64 - 1])
HOSTILE = st.one_of(
    INTEGERS,
    st.sampled_from([True, False, None, 1.0, -0.0, 1e300, float("nan"), float("inf"), 10**400]),
    st.sampled_from(["", "linear", "mlp", "linear_mlp", "post_rope", "latent", "full", "sliding"]),
    st.sampled_from(["minimal_groups", "F32", "F64", "BF16", "\n", "\x1b[31m", "\ud800", "a" * 64]),
    st.text(max_size=5),
    st.lists(INTEGERS, max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["dtype", "shape", "layer", "x"]), INTEGERS, max_size=2),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    out = []
    for key, child in items:
        out.append((value, key))
        if isinstance(child, (dict, list)):
            out += places(child)
    return out


def change_tree(draw: Callable[..., Any], tree: Any) -> None:
    """Replace, remove, add, copy or exchange values somewhere in a JSON tree."""
    spots = places(tree)
    if not spots:
        return
    container, key = draw(st.sampled_from(range(len(spots))).map(spots.__getitem__))
    other, where = draw(st.sampled_from(range(len(spots))).map(spots.__getitem__))
    match draw(st.sampled_from(["replace", "near", "remove", "add", "copy", "exchange"])):
        case "replace":
            container[key] = draw(HOSTILE)
        case "near" if type(container[key]) is int:
            container[key] += draw(st.sampled_from([-4, -1, 1, 4]))
        case "remove":
            del container[key]
        case "add" if isinstance(container, dict):
            container[draw(st.text(max_size=4))] = draw(HOSTILE)
        case "copy":
            container[key] = json.loads(json.dumps(other[where]))
        case "exchange":
            values = json.loads(json.dumps([container[key], other[where]]))
            other[where], container[key] = values


def dumps(draw: Callable[..., Any], tree: Any) -> bytes:
    """JSON text, now and then with its first key said twice."""
    text = json.dumps(tree)
    if isinstance(tree, dict) and tree and draw(st.sampled_from(range(10))) == 9:
        key = next(iter(tree))
        text = f"{text[:-1]}, {json.dumps({key: tree[key]})[1:]}"
    return text.encode()


def change_bytes(draw: Callable[..., Any], blob: bytes) -> bytes:
    """Change, remove, zero, repeat or add a few bytes, cut the rest off, or give another length."""
    at, span = draw(st.integers(0, len(blob))), draw(st.sampled_from([1, 2, 4, 8, 64]))
    piece = blob[at : at + span]
    flipped = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in piece[:1]) + piece[1:]
    ways = [flipped, b"", bytes(len(piece)), 2 * piece, draw(st.binary(max_size=8)) + piece]
    changed = blob[:at] + draw(st.sampled_from(ways)) + blob[at + span :]
    length = draw(st.one_of(INTEGERS, st.integers(0, 4096))) % 2**64
    measured = length.to_bytes(8, "little") + blob[8:]
    return draw(st.sampled_from([changed] * 5 + [blob[:at], measured]))


def parsed(name: str, blob: bytes) -> tuple[Any, bytes] | None:
    """A config, or a safetensors file's header, and what follows; None if it is broken already."""
    begin, end = 0, len(blob)
    if name != layouts.CONFIG:
        begin, end = 8, 8 + int.from_bytes(blob[:8], "little")
    try:
        return json.loads(blob[begin:end]), blob[end:]
    except ValueError:
        return None


@st.composite
def damaged(draw: Callable[..., Any]) -> Files:
    """The files of a translator after one to three mutations."""
    files = dict(draw(st.sampled_from(range(len(SOUND))).map(SOUND.__getitem__)))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(
            st.sampled_from([layouts.CONFIG, layouts.CONFIG, layouts.TENSORS, layouts.SELFTEST])
        )
        # Most raw damage is caught early: changes within sound JSON reach further.
        match draw(st.sampled_from(["json"] * 12 + ["bytes"] * 5 + ["remove"])):
            case "json" if name in files:
                files[name] = change_json(draw, name, files[name])
            case "bytes" if name in files:
                files[name] = change_bytes(draw, files[name])
            case "remove":
                files.pop(name, None)
    return files


def change_json(draw: Callable[..., Any], name: str, blob: bytes) -> bytes:
    """Change the config, or a safetensors file's header, as JSON."""
    parts = parsed(name, blob)
    if parts is None or not isinstance(parts[0], (dict, list)):
        return blob
    tree, body = parts
    change_tree(draw, tree)
    text = dumps(draw, tree)
    return text if name == layouts.CONFIG else layouts.frame(text, body)
