"""Maps of any layout, described by a page: planted numbers, laid out by hand in many ways."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.maps import expected_shapes
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.store.exporting import export
from kvlingo_mlx.store.importing import import_translator
from tests.support import hybrid_models, tiny
from tests.support.command_line import fails

# Source "dense": 3 layers of 2 heads of 32; target "wide": 3 layers of 4 heads of 16.
HEADS, DIM, SOURCE_HEADS, SOURCE_DIM = 4, 16, 2, 32
SOURCES = [[0, 2], [1, 0], [2, 1]]
SIDES = ("keys", "values")


def planted() -> dict[str, np.ndarray]:
    """A number for each (layer, head, dim, place, source head, source dim), and biases."""
    rng = np.random.default_rng(3)
    shape = (3, HEADS, DIM, 2, SOURCE_HEADS, SOURCE_DIM)
    whole = {side: rng.normal(size=shape).astype(np.float32) for side in SIDES}
    return whole | {f"{s} bias": rng.normal(size=shape[:3]).astype(np.float32) for s in SIDES}


def by_loops(numbers: np.ndarray) -> np.ndarray:
    """One layer's matrix in our order, number by number."""
    found = np.zeros((HEADS * DIM, 2 * SOURCE_HEADS * SOURCE_DIM), np.float32)
    for h, d, p, g, c in np.ndindex(*numbers.shape):
        found[h * DIM + d, (p * SOURCE_HEADS + g) * SOURCE_DIM + c] = numbers[h, d, p, g, c]
    return found


def per_layer(side: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """As a row times a matrix: (inputs, outputs)."""
    return {f"{side}.{t}.w": np.moveaxis(x[t], (0, 1), (3, 4)).reshape(128, 64) for t in range(3)}


def of_heads(side: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor for each target head, the two source layers' inputs interleaved."""
    return {
        f"layer{t}/{side}/head{h}": x[t, h].transpose(0, 2, 3, 1).reshape(16, -1)
        for t, h in itertools.product(range(3), range(HEADS))
    }


def of_sources(side: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor for each source layer, by its index in the model."""
    return {
        f"{side}_{t}_{s}": x[t, :, :, p].reshape(64, 64)
        for t in range(3)
        for p, s in enumerate(SOURCES[t])
    }


def stacked(side: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """All target layers in one tensor of six axes, source heads first."""
    return {side: np.ascontiguousarray(x.transpose(4, 0, 3, 5, 1, 2))}


LAYOUTS = {
    "rows": (per_layer, "{side}.{layer}.w", "(sources source_heads source_dim) (heads dim)"),
    "heads": (of_heads, "layer{layer}/{side}/head{head}", "dim (source_heads source_dim sources)"),
    "sources": (
        of_sources,
        "{side}_{layer}_{source}",
        "(heads dim) (source_heads source_dim)",
    ),
    "stacked": (stacked, "{side}", "source_heads layers sources source_dim heads dim"),
}


def page(name: str, axes: str, bias: str = "", *, more: str = "") -> str:
    """A page of both sides."""
    text = f'capture = "post_norm"\nsources = {SOURCES}\n{more}\n'
    for side in SIDES:
        text += f'[{side}]\nweight = "{name.replace("{side}", side)}"\naxes = "{axes}"\n'
        if bias:
            text += f'bias = "{side}.bias"\nbias_axes = "{bias}"\n'
    return text


def put(folder: Path, arrays: dict[str, np.ndarray], suffix: str) -> Path:
    folder.mkdir()
    if suffix == "npz":
        np.savez(folder / "maps.npz", **{n.replace("/", "-"): a for n, a in arrays.items()})
    else:
        safetensors.numpy.save_file(arrays, folder / "maps.safetensors")
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_planted_maps(
    folders: dict[str, Path], tmp_path: Path, layout: str, suffix: str
) -> None:
    numbers, (lay, name, axes) = planted(), LAYOUTS[layout]
    arrays: dict[str, np.ndarray] = {}
    for side in SIDES:
        arrays |= {n: np.ascontiguousarray(a) for n, a in lay(side, numbers[side]).items()}
        arrays[f"{side}.bias"] = np.ascontiguousarray(numbers[f"{side} bias"].transpose(1, 0, 2))
    folder = put(tmp_path / "maps", arrays, suffix)
    if suffix == "npz":
        name = name.replace("/", "-")
    spec = tmp_path / "spec.toml"
    spec.write_text(page(name, axes, "heads layers dim"))
    words = ["import", str(folder), "--spec", str(spec), "--out", str(tmp_path / "ours")]
    ends = ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    assert run([*words, *ends, "--from", suffix]) == 0
    config, weights = translator_folder.read(tmp_path / "ours")
    assert (config.capture, config.nu, weights.dtype) == ("post_norm", 2, "float32")
    assert [list(read) for read in config.assignment.values] == SOURCES
    for side, t in itertools.product(SIDES, range(3)):
        assert np.array_equal(weights.arrays[f"{side}.{t}.weight"], by_loops(numbers[side][t]))
        bias = numbers[f"{side} bias"][t].reshape(-1)
        assert np.array_equal(weights.arrays[f"{side}.{t}.bias"], bias)


def test_head_wise_maps_read_one_source_head_each(folders: dict[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = {s: rng.normal(size=(3, SOURCE_DIM, HEADS, DIM)).astype(np.float16) for s in SIDES}
    folder = put(tmp_path / "maps", x, "npz")
    text = 'capture = "pre_norm"\nhead_mixing = false\nsources = [[0], [1], [2]]\n'
    for side in SIDES:
        text += f'[{side}]\nweight = "{side}"\naxes = "layers (sources source_dim) heads dim"\n'
    (tmp_path / "s.toml").write_text(text)
    models = (str(folders["dense"]), str(folders["wide"]))
    done = import_translator(
        str(folder / "maps.npz"), spec=tmp_path / "s.toml", models=models, out=tmp_path / "t"
    )
    config, weights = translator_folder.read(tmp_path / "t")
    assert done.dtype == weights.dtype == "float16" and not config.head_mixing
    for t, h in itertools.product(range(3), range(HEADS)):
        assert np.array_equal(weights.arrays[f"keys.{t}.weight"][h], x["keys"][t, :, h].T)


def test_an_exported_translator_comes_back(folders: dict[str, Path], tmp_path: Path) -> None:
    """Head-wise and mixing, with biases and without, bfloat16 included; by the page's own words."""
    for number, (mixing, dtype, bias) in enumerate(
        itertools.product((True, False), ("float32", "bfloat16", "float16"), (True, False))
    ):
        place = tmp_path / str(number)
        pair = folders["dense"], folders["wide"]
        ours = _random(place, pair, mixing, dtype, bias)
        assert run(["export", str(ours), "--to", "npz", "--out", str(place / "npz")]) == 0
        words = ["import", str(place / "npz"), "--spec", str(place / "npz" / "spec.toml")]
        ends = ["--source", str(pair[0]), "--target", str(pair[1])]
        kept = ["--dtype", dtype]
        assert run([*words, *ends, *kept, "--out", str(place / "again")]) == 0
        first, second = (translator_folder.read(place / n) for n in ("ours", "again"))
        assert first[1].dtype == second[1].dtype == dtype
        assert set(first[1].arrays) == set(second[1].arrays)
        for name, array in first[1].arrays.items():
            assert np.array_equal(array, second[1].arrays[name]), (number, name)
        assert first[0].assignment == second[0].assignment
        assert first[0].head_mixing == second[0].head_mixing
    # A page names its models, so that its maps can be imported where they are not.
    done = import_translator(str(place / "npz"), spec=place / "npz" / "spec.toml")
    assert done.config.target.name == first[0].target.name


@pytest.mark.parametrize("turned", [False, True])
def test_maps_between_two_kinds_of_layers_are_not_exported(
    turned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They read both sides, for which a page has no word; nothing is written."""
    kind, sizes = tiny.FAMILIES["qwen3"]
    models = [
        kv.load(tiny.write_tiny_model(tmp_path / "plain", kind, **sizes)),
        kv.load(hybrid_models.write_hybrid_model(tmp_path / "hybrid", "qwen3_5")),
    ]
    source, target = models[::-1] if turned else models
    hybrid_models.random_translator(source, target).save(tmp_path / "t")
    words = ["export", str(tmp_path / "t"), "--to", "npz", "--out", str(tmp_path / "out")]
    fails(words, "maps read both sides of a source layer", capsys)
    assert not (tmp_path / "out").exists()


def _random(place: Path, pair: Any, mixing: bool, dtype: Any, bias: bool) -> Path:
    """A random translator between two models, written by the package."""
    specs = (ModelSpec.of(kv.load(folder, lazy=True)) for folder in pair)
    lists = tuple((t, (t + 1) % 3) for t in range(3))
    config = TranslatorConfig(
        *specs, Assignment(lists, lists[::-1]), head_mixing=mixing, capture="post_rope"
    )
    rng = np.random.default_rng(7)
    names = ["keys.0.weight", *(["keys.0.bias"] if bias else [])]
    arrays = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in expected_shapes(config, names).items()
    }
    return translator_folder.write(place / "ours", config, Weights.from_float32(arrays, dtype))


# ---- what is refused --------------------------------------------------------------------------

GOOD = ("{side}.{layer}.w", "(sources source_heads source_dim) (heads dim)")
PAGES = {
    "no toml": ("capture = ", "is not valid TOML"),
    "nothing": ("", "the page lacks 'capture'"),
    "unknown": (page(*GOOD, more="rope = 1"), "the page has 'rope', expected only files, capture"),
    "capture": (page(*GOOD).replace("post_norm", "cache"), "capture is 'cache', expected one of"),
    "axes": (page(GOOD[0], "(heads dim)"), "[keys]: '{side}.{layer}.w'".replace("{side}", "keys")),
    "twice": (page(GOOD[0], GOOD[1] + " heads"), "'heads' is there twice"),
    "field": (page("{side}.{row}.w", GOOD[1]), "has a field that is none of {layer}"),
    "no layer": (page("{side}.w", GOOD[1]), "says nothing of target layers"),
    "word": (page(GOOD[0], GOOD[1] + " [x]"), "are not words and (words in brackets)"),
    "sources": (page(*GOOD).replace(str(SOURCES), "2"), "sources of keys is 2, expected for each"),
    "depth": (page(*GOOD).replace(str(SOURCES), "[[0, 1]]"), "maps of keys for 1 target layers"),
    "range": (page(*GOOD).replace("[0, 2]", "[0, 3]"), "expected different ones from 0 to 2"),
    "shape": (page(GOOD[0], "(heads dim) (sources source_heads source_dim)"),
              "keys.0.w has shape (128, 64), expected (64, 128): (heads dim) (sources"),
    "missing": (page("{side}.{layer}.x", GOOD[1]), "keys.0.x is missing; there are 6: keys.0.w, "),
    "one bias": (page(*GOOD) + 'bias = "values.{layer}.w"\n', "values.0.w has shape"),
    "file": (page(*GOOD, more='files = ["other.npz"]'),
             "names the file 'other.npz', and"),
    "elsewhere": (page(*GOOD, more='files = ["../maps.safetensors"]'), "names the file '../maps"),
    "nothing ignored": (page(*GOOD, more='ignore = ["x*"]'), "ignore names 'x*', which no tensor"),
    "nested": (f"a = {'[' * 3000}", "is not valid TOML"),
    "axes alone": (page(*GOOD) + 'bias_axes = "heads dim"\n', "bias_axes has no effect without"),
    "depth of a model": (
        page(*GOOD) + '[source]\nname = "a"\nmodel_type = "qwen3"\nlayers = 100000000\n'
        "kv_heads = 2\nhead_dim = 4\n", "[source]: layers is 100000000, expected 1 to 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_does_not_fit_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = PAGES[name]
    arrays = {n: a for side in SIDES for n, a in per_layer(side, planted()[side]).items()}
    folder = put(tmp_path / "maps", arrays, "safetensors")
    (tmp_path / "s.toml").write_text(text)
    words = [
        "import",
        str(folder),
        "--spec",
        str(tmp_path / "s.toml"),
        "--out",
        str(tmp_path / "t"),
    ]
    ends = ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    fails([*words, *ends], message, capsys)
    assert not (tmp_path / "t").exists()


def test_tensors_that_nothing_describes_are_not_dropped_silently(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = {n: a for side in SIDES for n, a in per_layer(side, planted()[side]).items()}
    folder = put(tmp_path / "maps", arrays | {"keys.0.scale": np.ones(4, np.float32)}, "npz")
    spec = tmp_path / "s.toml"
    words = ["import", str(folder), "--spec", str(spec), "--out", str(tmp_path / "t")]
    words += ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    spec.write_text(page(*GOOD))
    fails(words, "1 tensor(s) are no part of the maps that it describes: keys.0.scale", capsys)
    spec.write_text(page(*GOOD, more='ignore = ["*.scale"]'))
    assert run(words) == 0


def test_numbers_of_other_dtypes_are_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "s.toml"
    spec.write_text(page(*GOOD))
    ends = ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    for number, (array, message) in enumerate((
        (np.ones(3), "float64, expected float32 or float16; save it as one of them"),
        (np.array([{}], object), "no numbers, expected"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        np.savez(folder / "m.npz", a=array)
        fails(["import", str(folder), "--spec", str(spec), *ends], message, capsys)
    broken = tmp_path / "2"
    broken.mkdir()
    (broken / "m.npz").write_bytes(b"PK\3\4 no archive")
    fails(
        ["import", str(broken), "--spec", str(spec), *ends],
        "is no .npz file, or a damaged one",
        capsys,
    )
    with zipfile.ZipFile(broken / "m.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': 1}     ")
    fails(
        ["import", str(broken), "--spec", str(spec), *ends],
        "is no .npz file, or a damaged one",
        capsys,
    )


def test_a_damaged_archive_is_told_whatever_its_damage(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped byte, a name twice, headers of impossible shapes and of nonsense."""
    spec = tmp_path / "s.toml"
    spec.write_text(page(*GOOD))
    arrays = {n: a for side in SIDES for n, a in per_layer(side, planted()[side]).items()}
    path = put(tmp_path / "maps", arrays, "npz") / "maps.npz"
    words = ["import", str(path), "--spec", str(spec), "--out", str(tmp_path / "t")]
    words += ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    sound = path.read_bytes()
    path.write_bytes(sound[:50_000] + bytes([sound[50_000] ^ 1]) + sound[50_001:])
    fails(words, "is no .npz file, or a damaged one (Bad CRC-32", capsys)
    path.write_bytes(sound)
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("keys.0.w.npy", archive.read("keys.0.w.npy"))
    fails(words, "(keys.0.w is there twice); copy it again", capsys)
    for header in (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (128, 128000000), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999999999), }",
        "(" * 99,
    ):
        blob = header.ljust(117).encode() + b"\n"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(blob).to_bytes(2, "little") + blob)
        fails(words, "is no .npz file, or a damaged one", capsys)
    path.write_bytes(sound)
    fails([*words, "--from", "safetensors"], "expected a file that ends with .safetensors", capsys)
    fails(["import", str(path)], "is a file of arrays; say with --spec PAGE.toml", capsys)
    assert run([*words, "--from", "npz"]) == 0


def test_what_is_ignored_may_still_be_used(folders: dict[str, Path], tmp_path: Path) -> None:
    arrays = {n: a for side in SIDES for n, a in per_layer(side, planted()[side]).items()}
    folder = put(tmp_path / "maps", arrays, "npz")
    (tmp_path / "s.toml").write_text(page(*GOOD, more='ignore = ["*"]'))
    words = ["import", str(folder), "--spec", str(tmp_path / "s.toml")]
    ends = ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    assert run([*words, *ends, "--out", str(tmp_path / "t")]) == 0


def test_what_a_format_needs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails(["import", str(tmp_path), "--from", "gguf"], "--from (format=) is 'gguf'", capsys)
    fails(["import", str(tmp_path), "--from", "npz"], "--from npz needs --spec FILE.toml", capsys)
    fails(
        ["import", str(tmp_path), "--from", "veloxquant", "--spec", "x.toml"],
        "--spec (spec=) is for files of any layout, and --from is veloxquant", capsys,
    )  # fmt: skip
    fails(
        ["import", str(tmp_path), "--spec", "nowhere.toml"], "nowhere.toml: cannot be read", capsys
    )
    fails(["import", str(tmp_path), "--from", "veloxquant"], "manifest.json: is missing", capsys)


# ---- memory -----------------------------------------------------------------------------------

SIZE = 192 * 2**20


def test_an_import_holds_no_second_copy(tmp_path: Path) -> None:
    """Of 340 MB in float16, the peak grows by less than a third; a plain read takes all of it."""
    layers, heads, dim = 40, 8, 128
    reads = 2
    width = reads * heads * dim
    folder = tmp_path / "mapper"
    folder.mkdir()
    one = np.random.default_rng(0).normal(size=(heads, width, dim)).astype(np.float16)
    arrays = {f"{t}.w_{s}": one for t in range(layers) for s in "kv"}
    arrays |= {f"{t}.b_{s}": one[:, 0] for t in range(layers) for s in "kv"}
    safetensors.numpy.save_file(arrays, folder / "mapper.safetensors")
    end = {"n_layers": layers, "n_kv_heads": heads, "head_dim": dim, "rope_theta": 1e6,
           "model_type": "qwen3"}  # fmt: skip
    manifest = {
        "format_version": 1, "source": end, "target": end, "config": {"content_space": True},
        "layers": [{"target_layer": t, "source_layers": list(range(reads))} for t in range(layers)],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert size > SIZE
    code = (
        "import pathlib, resource, sys\n"
        "from kvlingo_mlx.store.importing import import_translator\n"
        "def peak():\n"  # ru_maxrss of a new process begins with what its parent had on Linux
        "    status = pathlib.Path('/proc/self/status')\n"
        "    if status.exists():\n"
        "        return int(status.read_text().split('VmHWM:')[1].split()[0])\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "folder, out, copied = sys.argv[1:]\n"
        "if copied == 'True':\n"
        "    from safetensors.numpy import load_file\n"
        "    held = load_file(folder + '/mapper.safetensors')\n"
        "else:\n"
        "    import_translator(folder, models=('me/a', 'me/b'), out=out)\n"
        "print(peak() - before)\n"
    )
    grown = []
    for copied in (False, True):
        words = [sys.executable, "-c", code, str(folder), str(tmp_path / "out"), str(copied)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        unit = 1 if sys.platform == "darwin" else 1024
        grown.append(int(done.stdout) * unit / size)
    assert grown[0] < 1 / 3 and grown[1] > 0.9


def test_a_broken_import_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    arrays = {n: a.copy() for side in SIDES for n, a in per_layer(side, planted()[side]).items()}
    arrays["values.2.w"][5, 5] = np.nan
    folder = put(tmp_path / "maps", arrays, "safetensors")
    (tmp_path / "s.toml").write_text(page(*GOOD))
    models = (str(folders["dense"]), str(folders["wide"]))
    with pytest.raises(MalformedTranslatorError, match=r"values.2.w holds NaN or Inf"):
        import_translator(str(folder), spec=tmp_path / "s.toml", models=models, out=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    with pytest.raises(ValueError, match="have no effect with --to npz"):
        export("tiny-qwen3-s--tiny-qwen3-l", "npz", tmp_path / "o", models=models)
