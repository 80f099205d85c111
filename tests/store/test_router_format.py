"""Mappers of vLLM's semantic router against a reader made from its documented layout."""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kvlingo_mlx as kv
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.store.formats import export
from kvlingo_mlx.store.importing import import_translator
from tests.support.command_line import fails
from tests.support.fixtures import Printed

HEADS, DIM, READS = 2, 32, [[2, 0], [1, 0], [0, 2]]  # of the tiny model "dense", three layers
WIDTH, COMMITS = HEADS * DIM, ("a" * 40, "b" * 40)
Arrays = dict[str, np.ndarray]


def planted() -> Arrays:
    rng = np.random.default_rng(5)
    shapes = {"W": (2 * WIDTH, WIDTH), "b": (WIDTH,)}
    return {
        f"target.{t}.{side}.{what}": rng.normal(size=shape).astype(np.float32)
        for t, side, (what, shape) in itertools.product(range(3), "kv", shapes.items())
    }


def manifest() -> dict[str, Any]:
    pair = {"source_model": "me/a", "source_revision": COMMITS[0], "target_model": "me/b",
            "target_revision": COMMITS[1], "variant": "full_head", "precision": "fp32",
            "source_tp": 1, "target_tp": 1, "head_order": "contiguous", "num_kv_heads": HEADS,
            "head_dim": DIM}  # fmt: skip
    reads = {str(t): layers for t, layers in enumerate(READS)}
    return {"mapper_id": "a-b", "compatibility": pair, "topk": 2, "ridge_alpha": 0.01,
            "centered_inputs": True, "rope_stripped_on_keys": True, "calibration": {"seed": 0},
            "source_layers_per_target": {"k": reads, "v": dict(reads)},
            "evaluation_report": None, "schema_version": 1}  # fmt: skip


def put(folder: Path, said: Any, arrays: Arrays) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(said))
    safetensors.numpy.save_file(arrays, folder / "weights.safetensors")
    names = "weights.safetensors", "manifest.json"  # in either order
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


class Router:
    """A router's connector: what it checks of a folder, and what it computes of source states."""

    def __init__(self, folder: Path) -> None:
        assert {p.name for p in folder.iterdir()} == {
            "manifest.json", "weights.safetensors", "SHA256SUMS"
        }  # fmt: skip
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split()
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        self.said = json.loads((folder / "manifest.json").read_text())
        pair, reads = self.said["compatibility"], self.said["source_layers_per_target"]
        assert {*pair} == {*manifest()["compatibility"]}
        fixed = ("variant", "source_tp", "target_tp", "head_order")
        assert [pair[name] for name in fixed] == ["full_head", 1, 1, "contiguous"]
        assert self.said["schema_version"] == 1 and self.said["rope_stripped_on_keys"] is True
        layers, topk = sorted(map(int, reads["k"])), self.said["topk"]
        assert reads["k"] == reads["v"] and layers == [*range(len(layers))]
        assert all(len({*found}) == topk == len(found) for found in reads["k"].values())
        self.tensors = safetensors.numpy.load_file(folder / "weights.safetensors")
        width = pair["num_kv_heads"] * pair["head_dim"]
        expected = {}
        for t, side in itertools.product(layers, "kv"):
            expected[f"target.{t}.{side}.W"] = (topk * width, width), np.dtype("float32")
            expected[f"target.{t}.{side}.b"] = (width,), np.dtype("float32")
        assert {n: (a.shape, a.dtype) for n, a in self.tensors.items()} == expected

    def map(self, layer: int, side: str, states: np.ndarray) -> np.ndarray:
        """States (source layers, tokens, width) before RoPE as a target layer's."""
        reads = self.said["source_layers_per_target"][side][str(layer)]
        weight, bias = (self.tensors[f"target.{layer}.{side}.{part}"] for part in "Wb")
        return np.concatenate([states[s] for s in reads], -1) @ weight + bias


@pytest.fixture
def ends(models: dict[str, Any]) -> tuple[Any, Any]:
    """The dense model as two of the Hub's."""
    named = zip(("me/A", "me/b"), COMMITS, strict=True)
    source, target = (replace(models["dense"], name=n, revision=c) for n, c in named)
    return source, target


def test_planted_maps_are_read_and_written_to_the_bit(ends: Any, tmp_path: Path) -> None:
    folder, numbers = put(tmp_path / "mapper", manifest(), planted()), planted()
    done = import_translator(str(folder), models=ends, out=tmp_path / "ours")
    config, weights = translator_folder.read(done.folder)
    assert (config.capture, weights.dtype) == ("post_norm", "float32")
    assert config.provenance["mapper"] == "a-b"
    assert [list(read) for read in config.assignment.keys] == READS
    for t, (letter, side) in itertools.product(range(3), (("k", "keys"), ("v", "values"))):
        whole, matrix = numbers[f"target.{t}.{letter}.W"], weights.arrays[f"{side}.{t}.weight"]
        assert all(matrix[o, i] == whole[i, o] for i, o in np.ndindex(*whole.shape))
    export(str(done.folder), "semantic-router", tmp_path / "again", models=ends)
    again = Router(tmp_path / "again")
    assert {*again.tensors} == {*numbers}
    assert all(np.array_equal(again.tensors[name], numbers[name]) for name in numbers)
    changed = {"source_model": "me/A"}, f"a-b-full_head-fp32-tp1-h2-s{COMMITS[0]}-t{COMMITS[1]}-b1"
    assert again.said["compatibility"] == manifest()["compatibility"] | changed[0]
    assert again.said["mapper_id"] == changed[1]
    assert again.said["source_layers_per_target"] == manifest()["source_layers_per_target"]


@pytest.mark.filterwarnings("ignore:only")
def test_a_router_computes_what_the_translator_does(ends: Any, tmp_path: Path) -> None:
    """Of random states; the maps are stored in 16 bits, which float32 holds exactly."""
    text = [{"text": "One two three four five. " * 30}]
    made = kv.fit(*ends, text, capture="post_norm", nu=2)
    fitted = tmp_path / "own"
    translator_folder.write(fitted, made.config, made.to_weights().cast("bfloat16"))
    export(str(fitted), "semantic-router", tmp_path / "out", models=ends)
    router, states = Router(tmp_path / "out"), np.random.default_rng(1).normal(size=(3, 4, WIDTH))
    config, weights = translator_folder.read(fitted)
    assert weights.dtype == "bfloat16" and router.said["centered_inputs"] is False
    for t, side in itertools.product(range(3), ("keys", "values")):
        x = np.concatenate([states[s] for s in config.assignment.side(side)[t]], axis=-1)
        own = x @ weights.as_float32(f"{side}.{t}.weight").T  # this fit has no biases
        assert np.array_equal(router.map(t, side[0], states), own)


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "version": (lambda m: m.update(schema_version=2), "schema_version is 2, expected"),
    "by head": (lambda m: m["compatibility"].update(variant="per_head"), "variant is 'per_head'"),
    "ranks": (lambda m: m["compatibility"].update(target_tp=2), "target_tp is 2, expected"),
    "a key": (lambda m: m["compatibility"].update(salt=1), "has the unknown key 'salt'"),
    "a branch": (lambda m: m["compatibility"].update(source_revision="main"), "is 'main'"),
    "rotated": (lambda m: m.update(rope_stripped_on_keys=False), "expected maps of keys before"),
    "apart": (lambda m: m["source_layers_per_target"]["v"].update({"1": [2, 1]}), "alike for k"),
    "a gap": (lambda m: [s.pop("1") for s in m["source_layers_per_target"].values()], "0, 1 and"),
    "twice": (lambda m: [s.update({"1": [2, 2]}) for s in m["source_layers_per_target"].values()],
              "assignment.keys[1] is [2, 2], expected distinct layers, 0 to 2"),
    "beyond": (lambda m: [s.update({"1": [2, 7]}) for s in m["source_layers_per_target"].values()],
               "assignment.keys[1] is [2, 7], expected distinct layers, 0 to 2"),
    "depth": (lambda m: [s.update({"3": [0, 1]}) for s in m["source_layers_per_target"].values()],
              "has 4 lists for 3 target layers"),
    "heads": (lambda m: m["compatibility"].update(num_kv_heads=4), "says (4, 32, 32)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(ends: Any, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    said = manifest()
    change(said)
    folder = str(put(tmp_path / "m", said, planted()))
    with pytest.raises(kv.KVLingoError) as error:
        import_translator(folder, models=ends, out=tmp_path / "o")
    assert message in str(error.value) and not (tmp_path / "o").exists()


def test_damaged_files_are_refused(ends: Any, tmp_path: Path) -> None:
    arrays = planted()
    name, weight = "target.1.v.W", arrays["target.1.v.W"]
    for change, message in (
        ({name: weight.astype(np.float16)}, "is float16 (128, 64), expected float32 (128, 64)"),
        ({name: weight.T.copy()}, "is float32 (64, 128), expected float32 (128, 64)"),
        ({name: weight * np.float32("nan")}, "holds NaN or Inf"),
        ({"target.9.v.W": weight}, "has target.9.v.W"),
    ):
        put(tmp_path / "m", manifest(), arrays | change)
        with pytest.raises(kv.MalformedTranslatorError) as error:
            import_translator(str(tmp_path / "m"), models=ends)
        assert message in str(error.value)
    sums = put(tmp_path / "m", manifest(), arrays) / "SHA256SUMS"
    good = sums.read_text()
    for text in (good.replace("  w", "  v"), good + good, good[::-1], good.splitlines()[0], ""):
        sums.write_text(text)
        with pytest.raises(kv.MalformedTranslatorError, match="SHA256SUMS: is .*; copy the"):
            import_translator(str(tmp_path / "m"), models=ends)


def test_models_and_what_cannot_be_said(ends: Any, tmp_path: Path, capsys: Printed) -> None:
    folder = put(tmp_path / "m", manifest(), planted())
    fails(["import", str(folder)], "me/a is not on this machine, and", capsys)
    fails(["import", str(folder), "--source", "me/x", "--target", "me/y"], "me/x is not on", capsys)
    ours = import_translator(str(folder), models=ends, out=tmp_path / "ours").folder
    config, weights = translator_folder.read(ours)
    bare = replace(config, source=replace(config.source, revision=None))
    translator_folder.write(tmp_path / "bare", bare, weights)
    for pair in ([replace(ends[0], revision=None), ends[1]],
                 [ends[0], replace(ends[1], revision="main")]):  # fmt: skip
        with pytest.raises(kv.IncompatibleTranslatorError, match="wants a commit of the Hub"):
            export(str(tmp_path / "bare"), "semantic-router", tmp_path / "x", models=tuple(pair))
    assert not (tmp_path / "x").exists()
