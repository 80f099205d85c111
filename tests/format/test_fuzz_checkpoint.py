"""Damaged translator folders: a reader finds them sound, or refuses them with one line.

No other exception is allowed, and no hang. What is read must be what the format allows,
checked here with plain JSON and the safetensors library, and must survive being written.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from tests.support import translator_folders as layouts
from tests.support.processes import WITHOUT_TORCH
from tests.support.state_map_folders import config_json, put
from tests.support.translator_folders import CARD, CONFIG, SELFTEST, TENSORS, frame, store

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
        folders = [store(Path(root) / name, layouts.LAYOUTS[name], dtype) for name, dtype in BASES]
        config, weights = translator_folder.read(put(Path(root) / "states", config_json()))
        folders.append(translator_folder.write(Path(root) / "mapped", config, weights))
        (folders[-1] / CARD).unlink()
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
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
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
    entries = dict(safetensors.deserialize((folder / TENSORS).read_bytes()))
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
    if name != CONFIG:
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
        name = draw(st.sampled_from([CONFIG, CONFIG, TENSORS, SELFTEST]))
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
    return text if name == CONFIG else frame(text, body)


EXAMPLES = os.environ.get("KVLINGO_EXAMPLES")  # more of them by hand, and others each time
FUZZ = settings(
    max_examples=int(EXAMPLES or 250),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder in which every example may write."""
    with tempfile.TemporaryDirectory() as root:
        yield Path(root)


def test_the_bases_are_sound(room: Path) -> None:
    assert all(try_folder(room, files) for files in SOUND)
    assert all(set(files) == {CONFIG, TENSORS, SELFTEST} for files in SOUND)
    assert try_folder(room, {**SOUND[0], CARD: b"\xff\xfe"})


@FUZZ
@given(files=damaged())
def test_mutations_are_read_or_refused(room: Path, files: Files) -> None:
    """And loaded, or refused, in seconds."""
    begun = time.process_time()
    if try_folder(room, files):
        with contextlib.suppress(kv.MalformedTranslatorError, kv.IncompatibleTranslatorError):
            kv.load_translator(room / "fuzzed")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("name", [CONFIG, TENSORS, SELFTEST])
def test_no_truncation_is_read(room: Path, name: str) -> None:
    files = SOUND[1]
    cuts = {*range(64), *range(64, len(files[name]), 7), len(files[name]) - 1}
    for cut in sorted(cuts):
        assert not try_folder(room, files | {name: files[name][:cut]}), cut


SCRIPT = """
import sys, time
import kvlingo_mlx as kv
from kvlingo_mlx.backend import mx
kv.load_translator(sys.argv[-1])
begun = time.process_time()
kv.load_translator(sys.argv[-1])
usual = time.process_time() - begun
for folder in sys.argv[1:]:
    begun = time.process_time()
    try:
        kv.load_translator(folder)
        verdict = "read"
    except kv.MalformedTranslatorError as error:
        verdict = "refused" if str(error).isprintable() else "unprintable"
    if time.process_time() - begun > 300 * usual:  # of the same processor, at the same task
        verdict = "slow"
    print(verdict, folder, flush=True)
"""


def sparse(folder: Path, name: str, size: int) -> None:
    """A sound header over a body of many zeros that take no room on the disk."""
    entry = {"dtype": "F32", "shape": [size // 4000, 1000], "data_offsets": [0, size]}
    header = {"keys.0.weight": entry}
    blob = frame(json.dumps(header).encode(), b"")
    with open(folder / name, "wb") as file:
        file.write(blob)
        file.truncate(len(blob) + size)


def as_link(folder: Path, name: str, goal: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(goal)


def as_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "60 GB in its header": lambda f: sparse(f, TENSORS, 60 * 10**9),
    "12 GB that the config does not have": lambda f: sparse(f, TENSORS, 12 * 10**9),
    "12 GB of probes": lambda f: sparse(f, SELFTEST, 12 * 10**9),
    "a link to /dev/zero": lambda f: as_link(f, TENSORS, "/dev/zero"),
    "a config that never ends": lambda f: as_link(f, CONFIG, "/dev/zero"),
    "a link to itself": lambda f: as_link(f, TENSORS, TENSORS),
    "a pipe": lambda f: as_pipe(f, TENSORS),
    "a config of brackets": lambda f: (f / CONFIG).write_bytes(b"[" * 10**6),
    "a config of digits": lambda f: (f / CONFIG).write_bytes(b'{"format_version": ' + b"9" * 10**6),
    "a config of one string": lambda f: (f / CONFIG).write_bytes(b'"' + b"\x1b" * 900_000 + b'"'),
    "a config in UTF-16": lambda f: (f / CONFIG).write_bytes("{}".encode("utf-16")),
}  # fmt: skip


@pytest.fixture
def crafted(tmp_path: Path) -> list[Path]:
    """A folder for every crafted file, and one that is sound; test_checkpoint has broken ones."""
    sound = store(tmp_path / "sound")
    folders = []
    for number, change in enumerate(FOLDERS.values()):
        folders.append(Path(shutil.copytree(sound, tmp_path / f"folder-{number}")))
        change(folders[-1])
    return [*folders, sound]


def test_a_process_survives_them_all(crafted: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + SCRIPT, *map(str, crafted)],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    verdicts = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [Path(path) for _, path in verdicts] == crafted
    assert {path: verdict for verdict, path in verdicts[:-1] if verdict != "refused"} == {}
    assert verdicts[-1][0] == "read"
