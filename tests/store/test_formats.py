"""Translators in the formats of others: numbers laid out by hand, and all that is refused."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.store.formats import export
from tests.support import hybrid_models
from tests.support.command_line import fails
from tests.support.fixtures import Folders, Printed
from tests.support.processes import WITHOUT_TORCH

HEADS, DIM, READS = 2, 32, [[2, 0], [1, 0], [0, 2]]  # of the tiny model "dense", three layers
Arrays = dict[str, np.ndarray]


def planted() -> Arrays:
    """A number for each (head, input, dim) of a map, and biases."""
    rng = np.random.default_rng(3)
    shapes = {"w": (HEADS, 2 * HEADS * DIM, DIM), "b": (HEADS, DIM)}
    return {
        f"{t}.{what}_{side}": rng.normal(size=shape).astype(np.float32)
        for t, side, (what, shape) in itertools.product(range(3), "kv", shapes.items())
    }


def end(**changes: Any) -> dict[str, Any]:
    sizes = {"n_layers": 3, "n_kv_heads": HEADS, "head_dim": DIM, "rope_theta": 1e4}
    return {**sizes, "model_type": "qwen3", **changes}


def manifest() -> dict[str, Any]:
    layers = [{"target_layer": t, "source_layers": READS[t]} for t in (2, 0, 1)]  # in any order
    config = {"k": 2, "content_space": False, "dtype": "float32", "ridge_lambda": 0.5}
    return {
        "format_version": 1,
        "source": end(),
        "target": end(),
        "config": config,
        "layers": layers,
    }


def put(folder: Path, said: Any, arrays: Arrays) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(said))
    safetensors.numpy.save_file(arrays, folder / "mapper.safetensors")
    return folder


@pytest.fixture
def mapper(tmp_path: Path) -> Path:
    return put(tmp_path / "mapper", manifest(), planted())


@pytest.fixture
def ends(folders: Folders) -> list[str]:
    return ["--source", str(folders["dense"]), "--target", str(folders["dense"])]


def test_the_planted_maps_are_read_and_written(
    mapper: Path, ends: list[str], tmp_path: Path
) -> None:
    """Number by number by plain loops; what is exported again is the same file."""
    assert run(["import", str(mapper), *ends, "--out", str(tmp_path / "ours")]) == 0
    config, weights = translator_folder.read(tmp_path / "ours")
    assert (config.capture, weights.dtype, config.provenance["ridge"]) == (
        "post_rope",
        "float32",
        0.5,
    )
    assert [list(read) for read in config.assignment.keys] == READS
    numbers = planted()
    for t, (letter, side) in itertools.product(range(3), (("k", "keys"), ("v", "values"))):
        whole, matrix = numbers[f"{t}.w_{letter}"], weights.arrays[f"{side}.{t}.weight"]
        for h, i, d in np.ndindex(*whole.shape):
            assert matrix[h * DIM + d, i] == whole[h, i, d]
        bias = weights.arrays[f"{side}.{t}.bias"]
        assert all(
            bias[h * DIM + d] == numbers[f"{t}.b_{letter}"][h, d] for h, d in np.ndindex(2, 32)
        )
    words = ["export", str(tmp_path / "ours"), "--to", "veloxquant", *ends]
    assert run([*words, "--out", str(tmp_path / "again")]) == 0
    again = safetensors.numpy.load_file(tmp_path / "again" / "mapper.safetensors")
    assert {*again} == {*numbers} and all(np.array_equal(again[n], numbers[n]) for n in numbers)
    with pytest.raises(ValueError, match="holds an export; replace it with --force"):
        export(str(tmp_path / "ours"), "veloxquant", tmp_path / "again", models=(ends[1], ends[3]))


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "version": (lambda m: m.update(format_version=2), "format_version is 2, this kvlingo-mlx"),
    "huge": (
        lambda m: m["source"].update(n_layers=10**8),
        "source.n_layers is 100000000, expected",
    ),
    "no table": (lambda m: m.pop("source"), "lacks the key 'source'"),
    "layers": (lambda m: m.update(layers={}), "layers is {}, expected a list"),
    "a layer": (lambda m: m["layers"].pop(1), "for target layers [2, 1], expected 0 to 2"),
    "no source layer": (
        lambda m: m["layers"][0].update(source_layers=[0, 9]),
        "assignment.keys[2] is [0, 9], expected distinct layers, 0 to 2",
    ),
    "fewer": (
        lambda m: m["layers"][0].update(source_layers=[0]),
        "assignment.keys[2] has 1 layers, others 2",
    ),
    "space": (lambda m: m["config"].update(content_space="yes"), "config.content_space is 'yes'"),
    "interleaved": (lambda m: m["target"].update(rope_traditional=True), "target.rope_traditional"),
    "scaled": (lambda m: m["source"].update(rope_scaling={"factor": 8}), "source.rope_scaling"),
    "base": (
        lambda m: (m["source"].update(rope_theta=5e5), m["config"].update(content_space=True)),
        "keys of the source were rotated back by base 500000",
    ),
    "heads": (lambda m: m["target"].update(n_kv_heads=4), "says (4, 32, 32)"),
    "depth": (lambda m: m["source"].update(n_layers=5), "has cache layers 3, and"),
    "family": (lambda m: m["target"].update(model_type="llama"), "model type qwen3, and"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(
    mapper: Path, ends: list[str], name: str, capsys: Printed, store: Path
) -> None:
    change, message = CHANGES[name]
    said = manifest()
    change(said)
    put(mapper, said, planted())
    fails(["import", str(mapper), *ends], message, capsys)
    assert not store.exists()


def test_tensors_that_do_not_fit_are_refused(
    mapper: Path, ends: list[str], capsys: Printed, store: Path
) -> None:
    """By the names that they have there; a map of 1e-9 is all zero in float16."""
    arrays = planted()
    for change, message in (
        ({"1.w_v": np.where(arrays["1.w_v"] == arrays["1.w_v"][0, 0, 0], np.nan, arrays["1.w_v"])},
         "1.w_v holds NaN or Inf"),
        ({"1.w_v": arrays["1.w_v"] * np.float32(1e6)}, "this package refuses weights beyond"),
        ({"1.scale": arrays["1.b_v"]}, "has 1.scale; the maps of manifest.json are 12 tensors"),
        ({"1.w_v": arrays["1.w_v"].astype(np.float64)}, "1.w_v is F64, expected one of F32, F16"),
    ):  # fmt: skip
        put(mapper, manifest(), arrays | change)
        fails(["import", str(mapper), *ends], message, capsys)
    put(mapper, manifest(), {n: a for n, a in arrays.items() if n != "0.b_k"})
    fails(["import", str(mapper), *ends], "lacks 0.b_k; the maps of manifest.json", capsys)
    put(mapper, manifest(), arrays | {"1.w_v": arrays["1.w_v"] * np.float32(1e-9)})
    message = "values.1.weight would change by 100% in float16, whose least numbers are larger"
    fails(["import", str(mapper), *ends, "--dtype", "float16"], message, capsys)
    assert not list(store.glob("*"))
    assert run(["import", str(mapper), *ends, "--dtype", "bfloat16"]) == 0


def test_a_folder_says_what_it_is(mapper: Path, tmp_path: Path, capsys: Printed) -> None:
    ends = ["--source", "me/a", "--target", "me/b"]
    (mapper / "translator_config.json").write_text("{}")
    fails(["import", str(mapper), *ends], "found files of kvlingo and of veloxquant; say", capsys)
    assert run(["import", str(mapper), "--from", "veloxquant", *ends]) == 0
    (mapper / "translator_config.json").unlink()
    weights = (mapper / "mapper.safetensors").rename(tmp_path / "elsewhere")
    message = "mapper.safetensors: is missing; veloxquant is a folder with manifest.json and"
    fails(["import", str(mapper), "--from", "veloxquant", *ends], message, capsys)
    fails(["import", str(mapper), *ends], "of veloxquant and of semantic-router; say which", capsys)
    (tmp_path / "empty").mkdir()
    fails(["import", str(tmp_path / "empty")], "found none of them", capsys)
    fails(["import", str(tmp_path), "--from", "gguf"], "--from (format=) is 'gguf'", capsys)
    weights.rename(mapper / "mapper.safetensors")
    (mapper / "manifest.json").write_text("[]")
    fails(["import", str(mapper), *ends], "it is [], expected an object", capsys)


def test_models_must_be_named_and_may_be_elsewhere(
    mapper: Path, capsys: Printed, store: Path, folders: Folders
) -> None:
    fails(["import", str(mapper)], "does not name its source; give --source and --target", capsys)
    assert run(["import", str(mapper), "--source", "me/small", "--target", "me/large"]) == 0
    told = capsys.readouterr()
    assert "not checked against me/small" in told.err and "float32" in told.out
    (folder,) = store.iterdir()
    dense, wide = kv.load(folders["dense"]), kv.load(folders["wide"])
    translator = kv.load_translator(folder)  # it serves the pair whose shape it has, and no other
    assert kv.generate(dense, dense, "Hello", max_tokens=2, translator=translator)
    with pytest.raises(kv.IncompatibleTranslatorError):
        kv.generate(dense, wide, "Hello", translator=translator)


def test_a_link_is_followed(mapper: Path, tmp_path: Path) -> None:
    """The folder goes where the link leads, and the link stays."""
    link, far = tmp_path / "link", tmp_path / "far"
    words = ["import", str(mapper), "--source", "me/a", "--target", "me/b", "--out", str(link)]
    link.symlink_to(far)
    for more in ([], ["--force"]):
        assert run([*words, *more]) == 0
        assert link.is_symlink() and (far / "translator_config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] == ".") == []


def test_what_the_format_cannot_say_is_not_exported(
    folders: Folders, tmp_path: Path, capsys: Printed
) -> None:
    data = [{"text": "One two three four five. " * 30}]
    dense, out = kv.load(folders["dense"]), tmp_path / "o"
    for settings, reason in (
        ({"capture": "pre_norm"}, "it reads pre_norm keys, and the format takes post_norm and"),
        ({"capture": "post_norm", "head_mixing": False}, "it is linear, head-wise"),
    ):
        folder = kv.fit(dense, dense, data, **settings).save(tmp_path / reason)
        words = ["export", str(folder), "--out", str(out), "--to"]
        fails([*words, "veloxquant"], reason, capsys)
    fails([*words, "gguf"], "--to is 'gguf'; it must be one of veloxquant", capsys)
    hybrid = kv.load(hybrid_models.write_hybrid_model(tmp_path / "hybrid", "qwen3_5"))
    hybrid_models.random_translator(hybrid, hybrid).save(tmp_path / "states")
    words[1] = str(tmp_path / "states")
    fails([*words, "veloxquant"], "it has recurrent layers", capsys)
    assert not out.exists()


PEAK = """
import pathlib, resource, sys
from kvlingo_mlx.store.importing import import_translator
def peak():  # ru_maxrss of a new process begins with what its parent had on Linux
    status = pathlib.Path('/proc/self/status')
    if status.exists():
        return int(status.read_text().split('VmHWM:')[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
*folders, out = sys.argv[1:]
for number, folder in enumerate(folders):  # the first one loads what it needs
    import_translator(folder, models=('me/a', 'me/b'), out=f'{out}-{number}')
    print(peak())
from safetensors.numpy import load_file
held = load_file(folders[-1] + '/mapper.safetensors')
print(peak())
"""


def test_an_import_holds_no_second_copy(tmp_path: Path) -> None:
    """150 MB more of layers raise the peak by less than a fifth of that; a plain read, by all."""
    heads, dim = 8, 128
    one = np.random.default_rng(0).normal(size=(heads, 2 * heads * dim, dim)).astype(np.float16)
    folders = [put(tmp_path / "small", manifest(), planted())]
    for layers in (6, 24):
        arrays = {f"{t}.w_{s}": one for t in range(layers) for s in "kv"}
        arrays |= {f"{t}.b_{s}": one[:, 0].copy() for t in range(layers) for s in "kv"}
        said = manifest()
        for role in ("source", "target"):
            said[role] |= {"n_layers": layers, "n_kv_heads": heads, "head_dim": dim}
        said["layers"] = [{"target_layer": t, "source_layers": [0, 1]} for t in range(layers)]
        folders.append(put(tmp_path / f"mapper-{layers}", said, arrays))
    words = [sys.executable, "-c", WITHOUT_TORCH + PEAK, *folders, tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    few, many, copied = list(map(int, done.stdout.split()))[1:]
    sizes = [(folder / "mapper.safetensors").stat().st_size for folder in folders[1:]]
    assert many - few < (sizes[1] - sizes[0]) / 5 and copied - many > 0.6 * sizes[1]
