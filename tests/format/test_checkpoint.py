"""Translator format version 1: what is read and written, and all that is refused."""

import io
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
import safetensors.numpy

import kvlingo_mlx as kv
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import atomic, tensor_file, translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.store.importing import import_translator
from tests.support.fixtures import Patch
from tests.support.translator_folders import (
    BROKEN_FILES,
    CARD,
    CODES,
    CONFIG,
    FIRST,
    GONE,
    HEAD_WISE,
    LAST,
    LAYOUTS,
    MIXING,
    MLP,
    SELFTEST,
    SIDES,
    SOURCE_DIMS,
    TENSORS,
    Arrays,
    Json,
    Layout,
    arrays_of,
    config_json,
    contents,
    frame,
    listing,
    pack,
    probe_input,
    probes_of,
    put_at,
    put_config,
    put_tensors,
    refuse,
    repack,
    shapes_of,
    store,
    stored,
    to_config,
    unpack,
    write,
)

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U16": 2, "U8": 1,
         "BOOL": 1, "F8_E4M3": 1}  # fmt: skip


each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_dtype = pytest.mark.parametrize("dtype", CODES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound head-mixing translator in float32."""
    return store(tmp_path / "sound")


@each_dtype
@each_layout
def test_what_the_page_describes_is_read_and_written(
    tmp_path: Path, layout: Layout, dtype: str
) -> None:
    """Files of the page alone are read; those written are plain JSON and safetensors."""
    data, arrays = config_json(layout), arrays_of(layout, dtype)
    config, weights = translator_folder.read(store(tmp_path / "theirs", layout, dtype))
    assert config == to_config(data) and weights.dtype == dtype
    assert_same(weights.arrays, arrays)
    folder = translator_folder.write(tmp_path / "ours", config, Weights(dtype, arrays))
    assert listing(folder) == sorted([CONFIG, TENSORS, SELFTEST, CARD])
    found = json.loads((folder / CONFIG).read_bytes().decode("utf-8"))
    assert found == data and type(found["format_version"]) is int
    tensors = dict(safetensors.deserialize((folder / TENSORS).read_bytes()))
    assert {n: tuple(e["shape"]) for n, e in tensors.items()} == shapes_of(layout)
    for name, array in arrays.items():
        assert tensors[name]["dtype"] == CODES[dtype]
        assert bytes(tensors[name]["data"]) == array.tobytes()
    probes = dict(safetensors.deserialize((folder / SELFTEST).read_bytes()))
    expected = probes_of(layout, arrays, dtype)
    assert set(probes) == set(expected)
    for name, entry in probes.items():
        assert (entry["dtype"], tuple(entry["shape"])) == ("F32", expected[name].shape)
        values = np.frombuffer(entry["data"], np.float32).reshape(entry["shape"])
        np.testing.assert_allclose(values, expected[name], rtol=1e-6, atol=1e-6)
    again, weights = translator_folder.read(folder)
    assert again == config and weights.dtype == dtype
    assert_same(weights.arrays, arrays)
    card = (folder / CARD).read_text(encoding="utf-8")
    assert "house/reader" in card and "house/writer" in card


def assert_same(found: Mapping[str, np.ndarray], expected: Arrays) -> None:
    """The same names, shapes, dtypes and bits."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("start", [b"\x80", b"PK"], ids=["0x80", "PK"])
def test_a_header_length_may_look_like_a_pickle(folder: Path, start: bytes) -> None:
    """Lengths 0x..80 and 0x4B50 are as good as others: a file may begin with these bytes."""
    blob = (folder / TENSORS).read_bytes()
    header, body = unpack(blob)
    text = json.dumps(header).encode()
    while not len(text).to_bytes(8, "little").startswith(start):
        text += b" "
    (folder / TENSORS).write_bytes(frame(text, body))
    assert_same(translator_folder.read(folder)[1].arrays, arrays_of(MIXING))


def test_a_hub_snapshot_of_links_is_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--me--t" / "blobs", tmp_path / "models--me--t/snapshots/4f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    translator_folder.read(snapshot)


@pytest.mark.parametrize("name", [CONFIG, TENSORS, SELFTEST])
def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    """A stranger's folder must not make us read, and quote, the user's own files."""
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    refuse(folder, "is a link out of its folder", "copy the file itself", names=name)
    (folder / name).unlink()
    (tmp_path / "secret").rename(folder / "beside")
    (folder / name).symlink_to("beside")
    translator_folder.read(folder)


def test_attention_groups_may_differ_in_nu(tmp_path: Path) -> None:
    data = config_json()
    data["source"]["layers"][0] |= {"attention": "sliding", "window": 512}
    data["target"]["layers"][0] |= {"attention": "sliding", "window": 1024}
    data["assignment"] = {"keys": [[0], [2, 1]], "values": [[0], [1, 2]]}
    arrays = arrays_of(MIXING)
    for side in SIDES:
        width = 2 * SOURCE_DIMS[side]
        arrays[f"{side}.0.weight"] = arrays[f"{side}.0.weight"][:, :width].copy()
    folder = translator_folder.write(tmp_path / "t", to_config(data), Weights("float32", arrays))
    config, weights = translator_folder.read(folder)
    assert config.assignment.keys == ((0,), (2, 1))
    assert_same(weights.arrays, arrays)


def test_bfloat16_rounds_to_nearest_even() -> None:
    """As MLX does: numbers of every size, and those that lie half-way between two."""
    bits = np.random.default_rng(0).integers(0, 0x7F7F7FFF, 9999, np.uint32)
    ties = bits & 0xFFFF0000 | 0x8000
    array = np.concatenate([bits, ties, -1 - bits.view(np.int32)]).view(np.uint32).view(np.float32)
    array = array[np.isfinite(array) & (np.abs(array) < 3.38e38)]
    rounded = Weights.from_float32({"w": array}, "bfloat16").arrays["w"]
    assert np.array_equal(rounded, mx.array(array).astype(mx.bfloat16).view(mx.uint16))


# Adding half a unit to the last two carries out of the exponent: they would become 0.
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (0x47C35000, "float16"),  # 1e5
        (0x7F7FC99E, "bfloat16"),  # 3.4e38
        (0x7FC00000, "float32"),
        (0x7FFFFFFF, "bfloat16"),
        (0x7F800001, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(bits: int, dtype: str) -> None:
    array = np.array([0, bits], np.uint32).view(np.float32)
    with pytest.raises(ValueError, match=r"^keys\.0\.weight "):
        Weights.from_float32({"keys.0.weight": array}, dtype)


@each_layout
def test_wrong_tensors(tmp_path: Path, layout: Layout) -> None:
    """Of each layout, each in turn: missing, or of another shape; and some that nobody has."""
    folder, sound = store(tmp_path / "t", layout), arrays_of(layout)

    def check(arrays: Arrays, *words: str) -> None:
        put_tensors(folder / TENSORS, arrays)
        refuse(folder, *words, names=TENSORS)

    for name, array in sound.items():
        start, _, last = name.rpartition(".")
        check({n: a for n, a in sound.items() if n != name}, "missing", name)
        for other in (array[:-1], array[..., :-1], array.ravel(), array.swapaxes(0, -1)):
            if other.shape == array.shape:  # of one axis
                continue
            shapes = [str(a.shape) for a in (other, array)]
            # The inner width of an MLP is what its tensors say, so another of them may be named.
            words = [start] if last in ("w1", "b1", "w2") else [name, *shapes]
            check(sound | {name: other}, *words)
        check(sound | {f"keys.2.{last}": array}, "unexpected", f"keys.2.{last}")
    if layout.kind == "linear":
        gates = {f"{name.rpartition('.')[0]}.gate": np.ones(4, "f4") for name in sound}
        check(sound | gates, "unexpected")
    check(sound | {"x" * 9999: np.ones(1, "f4")}, "unexpected")
    check({"a": np.ones(1, "f4")}, "missing tensor(s)", *([", ..."] if len(sound) > 10 else []))


def replace(arrays: Arrays, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays[name] = np.ascontiguousarray(change(arrays[name]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@each_dtype
def test_numbers_that_are_none(tmp_path: Path, dtype: str, value: float) -> None:
    folder = store(tmp_path / "t", MIXING, dtype)
    (folder / SELFTEST).unlink()  # it would notice too
    arrays = arrays_of(MIXING, dtype)
    arrays["values.1.weight"][-1, -1] = stored(np.array([value], np.float32), dtype)[0]
    put_tensors(folder / TENSORS, arrays, dtype)
    last = tuple(n - 1 for n in arrays["values.1.weight"].shape)
    refuse(folder, "values.1.weight", "NaN or Inf", f"first at {last}", names=TENSORS)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("code", ["F64", "I64", "I32", "U16", "U8", "BOOL", "F8_E4M3", "F16"])
def test_other_and_mixed_dtypes(folder: Path, code: str, alone: bool) -> None:
    entries = {n: ("F32", a.shape, a.tobytes()) for n, a in arrays_of(MIXING).items()}
    if not alone and code == "F16":
        return  # sound, but for the probes
    for name in ["keys.1.weight"] if alone else [*entries]:
        shape = shapes_of(MIXING)[name]
        entries[name] = (code, shape, bytes(SIZES[code] * math.prod(shape)))
    (folder / TENSORS).write_bytes(pack(entries))
    refuse(folder, code, "F32", names=TENSORS)


@pytest.mark.parametrize("name", [TENSORS, SELFTEST])
@pytest.mark.parametrize("damage", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_broken_safetensors(
    folder: Path, damage: Callable[[Json, bytes], bytes], name: str
) -> None:
    blob = damage(*unpack((folder / TENSORS).read_bytes()))
    (folder / name).write_bytes(blob)
    refuse(folder, names=name)


def test_the_damaged_file_was_sound(folder: Path) -> None:
    """What the table above starts from is read: it is the damage that is refused."""
    header, body = unpack((folder / TENSORS).read_bytes())
    assert list(header) == ["keys.0.weight", "keys.1.weight", "values.0.weight", "values.1.weight"]
    assert header[FIRST]["data_offsets"] == [0, 768]
    assert header[LAST]["data_offsets"][1] == len(body)
    (folder / TENSORS).write_bytes(repack(header, body))
    translator_folder.read(folder)


def test_a_header_beyond_100_megabytes(folder: Path) -> None:
    """It is refused by its length, unread: the file is sparse."""
    with open(folder / TENSORS, "wb") as file:
        file.write((100 * 2**20 + 1).to_bytes(8, "little") + b"{}")
        file.truncate(101 * 2**20)
    tracemalloc.start()
    refuse(folder, "is no safetensors file", names=TENSORS)  # not after reading the header
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**20


Place = tuple[str | int, ...]


def changed(place: Place, value: Any, layout: Layout = MIXING) -> Json:
    """A sound config with one value replaced, or removed (``GONE``)."""
    return put_at(config_json(layout), place, value)


# Where a config has objects, but for provenance, which is free.
OBJECTS: list[Place] = [(), ("assignment",)]
OBJECTS += [(end, *place) for end in ("source", "target")
            for place in ((), ("fingerprint",), ("layers", 1))]  # fmt: skip


@pytest.mark.parametrize("place", OBJECTS, ids=str)
def test_a_missing_key(folder: Path, place: Place) -> None:
    inner: Any = config_json()
    for step in place:
        inner = inner[step]
    for key in inner:
        put_config(folder, changed((*place, key), GONE))
        where = "".join(f"[{step}]" if step == 1 else f".{step}" for step in place).lstrip(".")
        refuse(folder, "version" if key == "format_version" else f"{where} lacks the key {key!r}")


@pytest.mark.parametrize("place", OBJECTS, ids=str)
def test_an_unknown_key(folder: Path, place: Place) -> None:
    for key in ("ext", "", "Kind", "new\nline\x1b[31m", "\u2028", "k" * 99_999):
        put_config(folder, changed((*place, key), None))
        refuse(folder, "unknown key")


INTEGERS = (True, False, 1.0, "1", None, [1], 2**70, -1, 10**4000)
LAYER_0: Place = ("target", "layers", 0)
WRONG_VALUES: list[tuple[Place, Sequence[Any]]] = [
    (("format_version",), (4, 0, -1, "1", True, 1.0, None, [1], {}, 10**4000, "1\n2")),
    (("kind",), ("affine", "Linear", "", None, 1, ["linear"], {}, "linear\n")),
    (("head_mixing",), (1, 0, "true", None, [])),
    (("joint",), (1, 0, "false", None)),
    (("capture",), ("pre-norm", "rope", "", None, 0, [])),
    (("alignment",), ("minimal", "", False, 0, [], {})),
    (("provenance",), (None, [], "none", 1)),
    (("source",), (None, [], "house/reader", 1)),
    (("target", "name"), (None, 1, True, [])),
    (("target", "revision"), (1, False, [], {})),
    (("target", "model_type"), (None, 1, [])),
    (("source", "fingerprint"), (None, [], "0" * 64)),
    *(
        (
            ("source", "fingerprint", tier),
            ("", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "０" * 64, " " * 64, 0, False, []),
        )
        for tier in ("geometry", "norms", "tokenizer")
    ),
    (("target", "layers"), (None, {}, [], "ab", [1, 2], [None, None], [[], []])),
    ((*LAYER_0, "layer"), (*INTEGERS[:5], -1, 2**70)),
    *(((*LAYER_0, key), (*INTEGERS, 0)) for key in ("kv_heads", "key_dim", "value_dim")),
    ((*LAYER_0, "window"), (0, True, "512", 512)),  # 512: not without sliding attention
    ((*LAYER_0, "attention"), ("global", "", None, 0, [], "sliding")),  # sliding lacks a window
    (("assignment",), (None, [], [[[0], [0]]] * 2, "keys")),
    *(
        (
            ("assignment", side),
            (
                None,
                [[0, 1]] * 3,
                [[0, 1], [0]],
                [{"0": 1}, {"0": 1}],
                [[0, 1], None],
                [[0, 0], [0, 1]],
                [[0, 3], [0, 1]],
                [[0, True], [0, 1]],
                [[0, "1"], [0, 1]],
            ),
        )
        for side in SIDES
    ),
    (("head_map",), ([0, 0, 1, 1], None, [])),  # not with head-mixing maps
]


@pytest.mark.parametrize(("place", "values"), WRONG_VALUES, ids=lambda v: str(v)[:40])
def test_a_wrong_value(folder: Path, place: Place, values: Sequence[Any]) -> None:
    word = {"format_version": "version", "attention": "attention"}.get(str(place[-1]), place[-1])
    for value in values:
        put_config(folder, changed(place, value))
        refuse(folder, str(word))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("end", ["source", "target"])
def test_crossing_attention_groups(folder: Path, side: str, end: str) -> None:
    data = config_json()
    data[end]["layers"][1] |= {"attention": "sliding", "window": 512}
    data["assignment"] = {name: [[0, 2], [0, 2]] for name in SIDES}
    if end == "source":
        data["assignment"][side] = [[0, 2], [0, 1]]
    put_config(folder, data)
    refuse(folder, "assignment", "crosses attention groups")


@pytest.mark.parametrize("heads", [(2, 3), (4, 2), (3, 4)])
def test_a_head_map_that_is_needed(tmp_path: Path, heads: tuple[int, int]) -> None:
    layout = Layout(head_mixing=False, heads=heads)
    told = f"need head_map, a list of {heads[1]} source heads (0 to {heads[0] - 1})"
    refuse(store(tmp_path / "t", layout), told)


@pytest.mark.parametrize(
    ("place", "value"),
    [(("kind",), "mlp"), (("head_mixing",), False), (("assignment", "values"), [[0, 2], [1, 2]])],
)
def test_joint_with_what_it_cannot_be(tmp_path: Path, place: Place, value: Any) -> None:
    layout = LAYOUTS["joint"]
    folder = store(tmp_path / "t", layout)
    put_config(folder, changed(place, value, layout))
    refuse(folder, "joint")


def text_of(**extra: Any) -> str:
    """A sound config's text with ``extra`` in its provenance."""
    data = config_json()
    data["provenance"] = extra
    return json.dumps(data)


BROKEN_TEXTS: dict[str, tuple[bytes, str]] = {
    "a list": (b"[]", "list"),
    "empty": (b"", "JSON"),
    "truncated": (text_of().encode()[:-2], "JSON"),
    "NaN": (text_of(kl=math.nan).encode(), "NaN"),
    "Infinity": (text_of(kl=math.inf).encode(), "Infinity"),
    "5000 digits": (text_of(kl=7).replace('"kl": 7', '"kl": ' + "7" * 5000).encode(), "JSON"),
    "duplicate key": (text_of()[:-1].encode() + b', "kind": "linear"}', "'kind'"),
    "duplicate key escaped": (
        text_of(a=1).replace('"a": 1', '"a": 1, "\\u0061": 2').encode(),
        "'a'",
    ),
    "bad UTF-8": (text_of(a="é").encode().replace(b"\\u00e9", b"\xe9"), "utf-8"),
    "BOM": (b"\xef\xbb\xbf" + text_of().encode(), "BOM"),
    "lone surrogate": (text_of(a="\ud800").encode(), "surrogate"),
    "too large": (text_of(a="x" * 2**20).encode(), str(2**20)),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "recursion"),
}


@pytest.mark.parametrize(("text", "word"), BROKEN_TEXTS.values(), ids=BROKEN_TEXTS)
def test_broken_config_text(folder: Path, text: bytes, word: str) -> None:
    (folder / CONFIG).write_bytes(text)
    refuse(folder, word)
    with pytest.raises(MalformedTranslatorError):
        translator_folder.read_config(folder)


def test_what_is_absent_or_something_else(folder: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "does not exist", names="")
    refuse(folder / TENSORS, "is a file", names="")
    for name in (TENSORS, CONFIG):
        (folder / name).unlink()
        refuse(folder, "missing", names=name)


class Canary:
    """Unpickling it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", [TENSORS, SELFTEST])
def test_a_pickle_under_our_name(folder: Path, tmp_path: Path, name: str) -> None:
    """Of every protocol, bare and in a zip archive."""
    trace, archive = tmp_path / "trace", io.BytesIO()
    blobs = [pickle.dumps(Canary(trace), protocol) for protocol in range(6)]
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", blobs[2])
    for number, blob in enumerate([*blobs, archive.getvalue(), pickle.dumps(None, 2)]):
        (folder / name).write_bytes(blob)
        refuse(folder, *(["is a pickle"] if number > 1 else []), names=name)  # two are text
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pkl", ".Bin"])
def test_a_pickles_path(folder: Path, tmp_path: Path, suffix: str) -> None:
    """There or not, and beside a config or alone in a folder."""
    path = tmp_path / f"translator{suffix}"
    refuse(path, "is a pickle", "safetensors", names="")
    path.write_bytes(pickle.dumps(Canary(tmp_path / "trace")))
    refuse(path, "is a pickle", "safetensors", names="")
    (folder / f"maps{suffix}").write_bytes(pickle.dumps({}))
    for name in (TENSORS, CONFIG):
        (folder / name).unlink()
        refuse(folder, "is a pickle", "safetensors", names=f"maps{suffix}")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(LAYOUTS, itertools.cycle(CODES), strict=False))
)
def test_right_shapes_in_the_wrong_order(tmp_path: Path, name: str, dtype: str) -> None:
    """Rows, columns or heads of any tensor, or two layers' tensors: only the self-test shows it."""
    folder, sound = store(tmp_path / "t", LAYOUTS[name], dtype), arrays_of(LAYOUTS[name], dtype)
    for tensor, array in sound.items():
        side, layer, last = tensor.split(".")
        if last == "bias" and LAYOUTS[name].kind == "linear":
            continue  # which its probes leave out
        wrong = [np.roll(array, 1, axis) for axis in range(array.ndim)]
        for other in (*wrong, sound[f"{side}.{1 - int(layer)}.{last}"]):
            put_tensors(folder / TENSORS, sound | {tensor: other}, dtype)
            refuse(folder, f"self-test failed for {side}.{layer}", names=SELFTEST)
    (folder / SELFTEST).unlink()
    translator_folder.read(folder)


@pytest.mark.parametrize(
    ("dtype", "error", "sound"),
    [
        ("float32", 5e-5, True),
        ("float32", 2e-4, False),
        ("bfloat16", 1e-2, True),
        ("bfloat16", 4e-2, False),
    ],
)
def test_the_tolerance_of_the_selftest(
    tmp_path: Path, dtype: str, error: float, sound: bool
) -> None:
    folder = store(tmp_path / "t", MIXING, dtype)
    probes = probes_of(MIXING, arrays_of(MIXING, dtype), dtype)
    replace(probes, "values.1.weight.probe_out", lambda p: p * np.float32(1 + error))
    put_tensors(folder / SELFTEST, probes)
    if sound:
        translator_folder.read(folder)
    else:
        refuse(folder, "self-test failed", "values.1.weight", names=SELFTEST)


Probes = Callable[[Arrays], Any]
WRONG_PROBES: dict[str, tuple[Probes, str]] = {
    "missing": (lambda p: p.pop("keys.0.weight.probe_out"), "missing"),
    "extra": (lambda p: p.update({"keys.2.weight.probe_out": np.ones(12, "f4")}), "unexpected"),
    "shape": (lambda p: replace(p, "keys.0.weight.probe_out", lambda a: a[:3]), "(3,)"),
    "NaN": (lambda p: replace(p, "keys.0.weight.probe_out", lambda a: a * np.nan), "NaN"),
    "huge": (
        lambda p: replace(p, "keys.0.weight.probe_out", lambda a: a * np.float32(1e37)),
        "self-test failed",
    ),
}


@pytest.mark.parametrize(("damage", "word"), WRONG_PROBES.values(), ids=WRONG_PROBES)
def test_wrong_probes(folder: Path, damage: Probes, word: str) -> None:
    probes = probes_of(MIXING, arrays_of(MIXING))
    damage(probes)
    put_tensors(folder / SELFTEST, probes)
    refuse(folder, word, names=SELFTEST)


@pytest.mark.parametrize(
    "names",
    [("notes.txt",), (CONFIG, "notes.txt"), (CONFIG, ".git/config"),
     ("config.json", "model.safetensors")],
    ids=str,
)  # fmt: skip
def test_a_destination_that_is_not_ours(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = tmp_path / "thesis"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(ValueError) as caught:
        write(folder)
    assert type(caught.value) is ValueError
    assert str(caught.value).isprintable()
    assert str(folder) in str(caught.value)
    assert contents(tmp_path) == before
    assert listing(tmp_path) == ["thesis"]


def test_an_older_translator_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write(folder, MLP)
    write(folder, HEAD_WISE, "bfloat16", seed=5)
    config, weights = translator_folder.read(folder)
    assert config == to_config(config_json(HEAD_WISE))
    assert_same(weights.arrays, arrays_of(HEAD_WISE, "bfloat16", seed=5))
    assert listing(tmp_path) == ["t"]
    assert listing(folder) == sorted([CONFIG, TENSORS, SELFTEST, CARD])


def big(arrays: Arrays) -> Arrays:
    """Finite weights whose probes are not, for no product cancels another."""
    row = np.float32(3e38) * np.sign(probe_input(16)).astype(np.float32)
    return arrays | {FIRST: np.tile(row, (12, 1))}


UNWRITABLE: dict[str, tuple[Callable[[], Json], Callable[[Arrays], Arrays], str]] = {
    "kind": (lambda: changed(("kind",), "affine"), dict, CONFIG),
    "NaN": (lambda: changed(("provenance", "kl"), math.nan), dict, CONFIG),
    "too large": (lambda: changed(("provenance", "log"), "x" * 2**20), dict, CONFIG),
    "missing": (config_json, lambda a: {n: a[n] for n in a if n != FIRST}, TENSORS),
    "shape": (config_json, lambda a: a | {FIRST: a[FIRST].T}, TENSORS),
    "NaN weight": (config_json, lambda a: a | {FIRST: a[FIRST] * np.nan}, TENSORS),
    "big-endian": (config_json, lambda a: a | {FIRST: a[FIRST].astype(">f4")}, TENSORS),
    "infinite probes": (config_json, big, SELFTEST),
}


@pytest.mark.parametrize("case", UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_would_not_be_read_is_not_written(
    tmp_path: Path, case: tuple[Callable[[], Json], Callable[[Arrays], Arrays], str]
) -> None:
    data, damage, name = case
    folder = tmp_path / "t"
    weights = Weights("float32", damage(arrays_of(MIXING)))
    with pytest.raises(MalformedTranslatorError) as caught:
        translator_folder.write(folder, to_config(data()), weights)
    assert str(folder / name) in str(caught.value)
    assert str(caught.value).isprintable()
    assert listing(tmp_path) == []


# What the format allows and no training makes: import and load refuse it.
UNSOUND: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "huge": ("mixing", "values.1.weight", lambda a: a * 1e6, "expected at most 10000"),
    "one huge": ("mixing", "keys.0.weight", lambda a: np.where(a == a.max(), -2e4, a), "2e+04"),
    "zero map": ("mixing", "keys.1.weight", np.zeros_like, "keys.1.weight is all zero"),
    "zero MLP": ("mlp-gated", "keys.1.w2", np.zeros_like, "keys.1.w2 is all zero"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "change", "text"), UNSOUND.values(), ids=UNSOUND)
def test_what_no_training_makes(
    tmp_path: Path, store: Path, name: str, tensor: str, change: Callable, text: str
) -> None:
    arrays = arrays_of(LAYOUTS[name])
    arrays[tensor] = np.ascontiguousarray(change(arrays[tensor]), np.float32)
    config = to_config(config_json(LAYOUTS[name]))
    folder = translator_folder.write(tmp_path / "t", config, Weights("float32", arrays))
    for use in (import_translator, kv.load_translator):
        with pytest.raises(kv.MalformedTranslatorError) as caught:
            use(str(folder))
        assert text in str(caught.value) and str(folder / TENSORS) in str(caught.value)
    assert not store.exists()


def test_what_a_training_does_make(tmp_path: Path) -> None:
    """A gate at its largest, an MLP beside a linear map that adds nothing yet."""
    layout = LAYOUTS["linear-mlp-head-wise"]
    arrays = arrays_of(layout)
    arrays |= {n: np.zeros_like(a) for n, a in arrays.items() if n.endswith((".w2", ".b2"))}
    config = to_config(config_json(layout))
    translator_folder.write(tmp_path / "t", config, Weights("float32", arrays))
    kv.load_translator(tmp_path / "t")


class Faulty:
    """Stands in for a function and raises at its ``at``-th call, before or after the work."""

    def __init__(self, function: Callable[..., Any], at: int, error: type, after: bool) -> None:
        self.function, self.at, self.error, self.after = function, at, error, after
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise self.error("injected")
        result = self.function(*args, **kwargs)
        if self.calls == self.at:
            raise self.error("injected")
        return result


STEPS = [
    *[("os.rename", 1)],
    *[("write_tensors", call) for call in (1, 2)],
    *[("os.fsync", call) for call in (1, 2, 3, 4)],
    ("model_card", 1),
]
errors = pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
timing = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def inject(monkeypatch: Patch, name: str, at: int, error: type, after: bool) -> Faulty:
    """Make the ``at``-th call of one of the writer's functions fail."""
    owner: Any = translator_folder
    if name == "os.rename":  # a file system that cannot exchange two folders at once
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    *path, last = name.split(".")
    for step in path:
        owner = getattr(owner, step)
    fault = Faulty(getattr(owner, last), at, error, after)
    monkeypatch.setattr(owner, last, fault)
    return fault


@errors
@timing
@pytest.mark.parametrize(("name", "call"), [*STEPS, ("os.rename", 2), ("atomic.exchange", 1)])
def test_a_failure_keeps_what_was_there(
    tmp_path: Path,
    monkeypatch: Patch,
    name: str,
    call: int,
    error: type[BaseException],
    after: bool,
) -> None:
    """The older translator, or nothing where nothing was."""
    old = contents(write(tmp_path / "t", seed=1))
    new = contents(write(tmp_path / "scratch" / "t", seed=2))
    fault = inject(monkeypatch, name, call, error, after)
    with pytest.raises(error, match="injected"):
        write(tmp_path / "t", seed=2)
    assert fault.calls >= call
    monkeypatch.undo()
    placed = (("os.rename", 2, True), ("atomic.exchange", 1, True))
    assert contents(tmp_path / "t") == (new if (name, call, after) in placed else old)
    assert listing(tmp_path) == ["scratch", "t"]
    translator_folder.read(tmp_path / "t")
    if (name, call) not in STEPS:
        return
    (tmp_path / "fresh").mkdir()
    inject(monkeypatch, name, call, error, after)
    with pytest.raises(error, match="injected"):
        write(tmp_path / "fresh" / "t")
    monkeypatch.undo()
    assert listing(tmp_path / "fresh") == (["t"] if (name, after) == ("os.rename", True) else [])


def test_the_only_copy_survives_when_it_cannot_be_moved_back(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    old = contents(write(tmp_path / "t", seed=1))
    monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    rename_once, calls = os.rename, []

    def stuck(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) > 1:
            raise OSError("injected")
        rename_once(source, target)

    monkeypatch.setattr(os, "rename", stuck)
    with pytest.raises(OSError, match="injected"):
        write(tmp_path / "t", seed=2)
    monkeypatch.undo()
    left = contents(tmp_path)
    assert sorted(left.values()) == sorted(old.values())
    refuse(tmp_path / "t", "its replacement was interrupted", "/old back to it", names="")
    monkeypatch.setattr(translator_folder, "write_tensors", Faulty(print, 1, OSError, False))
    with pytest.raises(OSError, match="injected"):
        write(tmp_path / "t", seed=2)  # the next one that writes puts it back first
    assert contents(tmp_path / "t") == old and listing(tmp_path) == ["t"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_os_error_that_names_the_file() -> None:
    weights = Weights("float32", {"a": np.zeros(2, np.float32)})
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as caught:
        tensor_file.write_tensors(Path("/dev/full"), weights)
    assert caught.value.errno == 28


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    write(tmp_path / "t", seed=1)
    for name in (".t.new-abcdefgh", ".t.old-abcdefgh/old", ".t.b.new-abcdefgh", ".t.mine"):
        (tmp_path / name).mkdir(parents=True)
    new = contents(write(tmp_path / "t", seed=2))
    assert listing(tmp_path) == [".t.b.new-abcdefgh", ".t.mine", "t"]
    assert contents(tmp_path / "t") == new


def test_one_writer_of_a_folder_at_a_time(tmp_path: Path) -> None:
    """Another process holds the folder: the second one waits, and then says who has it."""
    script = (
        "import sys, pathlib; from kvlingo_mlx.format import atomic\n"
        "with atomic.alone(pathlib.Path(sys.argv[1])):\n"
        "    sys.stdout.write('held\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "t")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout and holder.stdin and holder.stdout.readline() == "held\n"
        started = time.monotonic()
        with (
            pytest.raises(OSError, match=f"process {holder.pid} is writing t in .*; wait"),
            atomic.alone(tmp_path / "t", wait=0.2),
        ):
            raise AssertionError("two writers")
        assert time.monotonic() - started >= 0.2
        timer = threading.Timer(0.2, lambda: holder.communicate("\n"))
        timer.start()
        write(tmp_path / "t")  # waits
        timer.join()
    assert holder.returncode == 0 and listing(tmp_path) == ["t"]


def test_a_disk_that_is_too_small_is_found_first(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match=r"the disk is full: t needs 0\.0 MB and 0\.0 MB are free"):
        write(tmp_path / "new" / "t")
    assert listing(tmp_path) == []
