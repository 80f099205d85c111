"""Recurrent layers (format version 2) and maps of their states (3), by the format page alone."""

import copy
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import config_reading, translator_folder
from kvlingo_mlx.format.geometry import CacheGeometry, LayerGeometry, Recurrence
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.tensor_file import Weights
from tests.support import state_map_folders as mapped
from tests.support.state_map_folders import FULL, TARGET
from tests.support.translator_folders import CONFIG, SELFTEST, TENSORS, put_at
from tests.support.translator_folders import refuse as refuse_

Json = dict[str, Any]
Place = tuple[str | int, ...]
SIDES = ("keys", "values")
# By rule: the recurrence, and the widths that it has by the page's formulas.
RULES: dict[str, tuple[dict[str, int], int, int]] = {
    "gated_delta": (dict(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4), 32, 8),
    "mamba2": (dict(key_heads=1, value_heads=3, key_dim=4, value_dim=2, kernel=2), 14, 3),
    "short_conv": (dict(key_heads=0, value_heads=1, key_dim=0, value_dim=6, kernel=3), 6, 6),
}


def recurrent(rule: str) -> Json:
    """A recurrent layer of the page."""
    recurrence, keys, values = RULES[rule]
    widths = {"kv_heads": 1, "key_dim": keys, "value_dim": values}
    return {**widths, "attention": rule, "window": None, "recurrence": recurrence}


def config_json(rule: str = "gated_delta") -> Json:
    """A config of a recurrent layer and one of attention on both sides, which differ in width."""
    data = mapped.config_json()
    del data["state_maps"]
    for end, layers in (("source", (recurrent(rule), FULL)), ("target", (FULL, recurrent(rule)))):
        data[end]["layers"] = [{"layer": i, **layer} for i, layer in enumerate(layers)]
    data |= {"format_version": 2, "assignment": {side: [[1], [0]] for side in SIDES}}
    return copy.deepcopy(data)


def put(folder: Path, data: Json, rule: str = "gated_delta") -> Path:
    """A folder of a config with random maps; those of the sound config's widths."""
    rng = np.random.default_rng(1)
    tensors = {}
    for (t, layer), side in itertools.product(enumerate((FULL, recurrent(rule))), SIDES):
        width = layer["kv_heads"] * layer["key_dim" if side == "keys" else "value_dim"]
        tensors[f"{side}.{t}.weight"] = rng.standard_normal((width, width)).astype(np.float32)
    return mapped.put(folder, data, tensors)


def changed(place: Place, value: Any, rule: str = "gated_delta") -> Json:
    """The config with another value at a place."""
    return put_at(config_json(rule), place, value)


refuse = partial(refuse_, names="")


@pytest.mark.parametrize("rule", RULES)
def test_what_the_page_describes_is_read_and_written(rule: str, tmp_path: Path) -> None:
    folders = {2: put(tmp_path / "2", config_json(rule), rule)}
    if rule != "short_conv":
        folders[3] = mapped.put(tmp_path / "3", mapped.config_json(rule))
    for version, folder in folders.items():
        data = json.loads((folder / CONFIG).read_text())
        config, weights = translator_folder.read(folder)
        assert json.loads(json.dumps(config.to_json())) == data
        assert config.format_version == version
        again = translator_folder.write(tmp_path / f"again-{version}", config, weights)
        assert json.loads((again / CONFIG).read_text()) == data
        assert translator_folder.read(again)[0] == config
        for name, array in load_file(folder / TENSORS).items():
            assert np.array_equal(load_file(again / TENSORS)[name], array)
    layer = translator_folder.read_config(folders[2]).target.layers[1]
    assert layer.recurrence is not None and asdict(layer.recurrence) == RULES[rule][0]


def test_a_folder_without_recurrent_layers_is_of_version_1(tmp_path: Path) -> None:
    data = config_json()
    for end in ("source", "target"):
        data[end]["layers"] = [{"layer": 0, **FULL}]
    data["assignment"] = {side: [[0]] for side in SIDES}
    weights = {f"{side}.0.weight": np.eye(8, dtype=np.float32) for side in SIDES}
    for version in (1, 2):  # a writer may say 2 where 1 would do
        mapped.put(tmp_path / "t", data | {"format_version": version}, weights)
        config, read = translator_folder.read(tmp_path / "t")
        assert json.loads(json.dumps(config.to_json())) == data | {"format_version": 1}
        written = translator_folder.write(tmp_path / f"again-{version}", config, read)
        assert "recurrence" not in (written / CONFIG).read_text()


@pytest.mark.parametrize("rule", RULES)
def test_layers_of_two_kinds(rule: str, tmp_path: Path) -> None:
    """A map reads both sides of a layer of another kind, keys first; of its own kind one."""
    data, folder = config_json(rule), tmp_path / "t"
    data["assignment"] = {"keys": [[0, 1], [1, 0]], "values": [[0], [0]]}
    keys, values = RULES[rule][1:]
    shapes = {
        "keys.0": (8, keys + values + 8), "keys.1": (keys, 16 + keys),
        "values.0": (8, keys + values), "values.1": (values, values),
    }  # fmt: skip
    tensors = {f"{n}.weight": np.ones(shape, np.float32) for n, shape in shapes.items()}
    config, weights = translator_folder.read(mapped.put(folder, data, tensors))
    assert [m.reads for m in maps_of(config)] == [
        (("keys", 0), ("values", 0), ("keys", 1)), (("keys", 1), ("values", 1), ("keys", 0)),
        (("keys", 0), ("values", 0)), (("values", 0),),
    ]  # fmt: skip
    again = translator_folder.write(tmp_path / "again", config, weights)
    assert json.loads((again / CONFIG).read_text()) == data
    for name, shape in shapes.items():  # one side alone, as between layers of one kind
        narrow = np.ones((shape[0], shape[1] - 1), np.float32)
        save_file(tensors | {f"{name}.weight": narrow}, folder / TENSORS)
        refuse(folder, f"{name}.weight has shape")


def test_windows_and_latents_are_not_read_by_recurrent_layers(tmp_path: Path) -> None:
    data = config_json()
    data["target"]["layers"] = data["target"]["layers"][1:]
    data["assignment"] = {side: [[1]] for side in SIDES}
    for kind, window in (("sliding", 4), ("latent", None)):
        data["source"]["layers"][1] |= {"attention": kind, "window": window}
        told = "keys[0] crosses attention groups: source layer 1 is not gated_delta"
        refuse(put(tmp_path / kind, data), told)


INTEGERS = (True, False, 1.0, "1", None, [1], {}, -1, 2**70, 10**4000)
AT: Place = ("target", "layers", 1, "recurrence")
WRONG: list[tuple[Place, Sequence[Any]]] = [
    (AT, (None, [], 1, "gated_delta", {})),
    *(((*AT, key), (*INTEGERS, 0)) for key in ("key_heads", "value_heads", "key_dim", "value_dim")),
    ((*AT, "kernel"), (*INTEGERS, 0, 1)),
    ((*AT, "unknown"), (1,)),
    ((*AT[:-1], "window"), (4,)),
    ((*AT[:-1], "attention"), ("full", "latent", "sliding", "rwkv", None)),
    (("target", "layers", 0, "recurrence"), (RULES["gated_delta"][0], None)),
    (("target", "layers", 0, "attention"), ("gated_delta",)),
]


@pytest.mark.parametrize("place", range(len(WRONG)))
def test_a_wrong_value(place: int, tmp_path: Path) -> None:
    for value in WRONG[place][1]:
        refuse(put(tmp_path / "t", changed(WRONG[place][0], value)), CONFIG)


def test_a_key_that_lacks(tmp_path: Path) -> None:
    for key in Recurrence.__dataclass_fields__:
        data = config_json()
        del data["target"]["layers"][1]["recurrence"][key]
        refuse(put(tmp_path / "t", data), "recurrence", key)


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_recurrent_layer_says_what_it_keeps(end: str, tmp_path: Path) -> None:
    data = config_json()
    layer = next(g for g in data[end]["layers"] if "recurrence" in g)
    told = layer.pop("recurrence")
    refuse(put(tmp_path / "t", data), "attention 'gated_delta' with recurrence None")
    data = config_json()
    next(g for g in data[end]["layers"] if "recurrence" not in g)["recurrence"] = told
    refuse(put(tmp_path / "t", data), "attention 'full' with recurrence Recurrence(")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key", ["kv_heads", "key_dim", "value_dim"])
def test_widths_that_are_not_the_recurrences(rule: str, key: str, tmp_path: Path) -> None:
    sound = recurrent(rule)
    data = changed((*AT[:-1], key), sound[key] + 1, rule)
    wanted = f"reads one of {sound['key_dim']} and {sound['value_dim']}"
    refuse(put(tmp_path / "t", data), "its recurrence", wanted)


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one lacks what a newer one has, and its readers refuse a newer one by its number."""
    folder = put(tmp_path / "t", config_json() | {"format_version": 1})
    refuse(folder, "recurrent layers", "version 1")
    for version, data in ((2, config_json()), (3, mapped.config_json())):
        monkeypatch.setattr(config_reading, "FORMAT_VERSION", version - 1)
        refuse(put(tmp_path / "t", data), f"format version {version}", "upgrade")


def test_facts_of_attention_are_those_of_version_1() -> None:
    """So no fingerprint of a model without recurrent layers has changed."""
    plain = LayerGeometry(0, 2, 4, 4)
    geometry = CacheGeometry("qwen3", (plain,), (None,), 1e-6, 320)
    assert geometry.facts["layers"] == [{"layer": 0, **FULL}]
    found = set()
    for kernel in (2, 3):  # a recurrence counts, wherever widths do not show it
        recurrence = Recurrence(**RULES["mamba2"][0] | {"kernel": kernel})
        layer = LayerGeometry(0, 1, 14, 3, "mamba2", recurrence=recurrence)
        assert layer.facts["recurrence"] == asdict(recurrence)
        found.add(CacheGeometry("x", (layer,), (None,), 1e-6, 320).fingerprint)
    assert len(found) == 2


def probed(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The self-test of the page, as sums over single numbers."""
    x = lambda n: [((37 * i + 11) % 17 - 8) / 8 for i in range(n)]  # noqa: E731
    values, keys, query = x(2 * 5), x(2 * 3), x(7)
    left, right = arrays["states.1.left"].astype(float), arrays["states.1.right"].astype(float)
    out = np.zeros((6, 4))
    for head, row, j, a, b, c in np.ndindex(6, 4, 2, 5, 3, 7):
        one, other = 5 * j + a, 3 * j + b
        state = left[head, row, one] * values[one] * keys[other] * right[head, other, c]
        out[head, row] += state * query[c]
    return out


def test_the_self_test_is_that_of_the_page(tmp_path: Path) -> None:
    """And it finds what is out of order."""
    config, weights = translator_folder.read(mapped.put(tmp_path / "t", mapped.config_json()))
    folder = translator_folder.write(tmp_path / "w", config, weights)
    found, arrays = load_file(folder / SELFTEST), mapped.tensors()
    assert set(found) == {
        "keys.0.weight.probe_out", "values.0.weight.probe_out", "states.1.probe_out"
    }  # fmt: skip
    assert found["states.1.probe_out"] == pytest.approx(probed(arrays), rel=1e-5)
    left, right = arrays["states.1.left"], arrays["states.1.right"]
    for wrong in (
        {"states.1.left": left[::-1]},
        {"states.1.left": np.roll(left, 5, axis=2)},  # layers swapped
        {"states.1.right": np.roll(right, 3, axis=1)},
        {"states.1.right": right[:, :, ::-1]},
        {"states.1.left": left[:, ::-1]},
    ):
        made = {name: np.ascontiguousarray(array) for name, array in (arrays | wrong).items()}
        save_file(made, folder / TENSORS)
        refuse(folder, "self-test failed for states.1")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("states.1.left", (6, 4, 5), "(6, 4, 10)"),
        ("states.1.right", (6, 7, 6), "(6, 6, 7)"),
        ("states.1.right", (2, 6, 7), "(6, 6, 7)"),
    ],
)
def test_a_wrong_shape(name: str, shape: tuple[int, ...], told: str, tmp_path: Path) -> None:
    arrays = mapped.tensors() | {name: np.ones(shape, np.float32)}
    folder = mapped.put(tmp_path / "t", mapped.config_json(), arrays)
    refuse(folder, name, f"expected {told}", "first the target layer's heads")


def test_the_key_is_true_or_missing_and_its_kind_solved(tmp_path: Path) -> None:
    for value in (False, None, 1, "true", []):
        data = mapped.config_json() | {"state_maps": value}
        refuse(mapped.put(tmp_path / "t", data), "state_maps", "expected true")
    data = mapped.config_json() | {"kind": "mlp"}
    refuse(mapped.put(tmp_path / "t", data), "kind is 'mlp', which has no maps of states")


ENDS = ("source", "layers", 0), ("source", "layers", 2), ("target", "layers", 1)
FIRST_LAYER = mapped.config_json()["target"]["layers"][:1]
UNFIT: list[tuple[dict[Place, Any], tuple[str, ...]]] = [
    ({ENDS[2]: mapped.recurrent("mamba2", TARGET)},
     ("of one rule", "house/reader has those of gated_delta", "of mamba2")),
    ({("target", "layers"): FIRST_LAYER, ("assignment",): {side: [[1]] for side in SIDES}},
     ("of one rule", "house/writer has none")),
    (dict.fromkeys(ENDS, recurrent("short_conv")), ("short convolutions", "no state")),
    ({ENDS[1]: mapped.recurrent("gated_delta", TARGET)}, ("several shapes",)),
    ({("assignment", side, 1): [0, 1] for side in SIDES},
     ("target layer 1 reads source layer 1", "gated_delta")),
    ({("assignment", "values", 1): [2, 0]}, ("[0, 2]", "[2, 0]", "one list")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), UNFIT)
def test_models_and_assignments_that_do_not_go_together(
    changes: dict[Place, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    data = mapped.config_json()
    for (*place, last), value in changes.items():
        old = functools.reduce(lambda inner, key: inner[key], (*place, last), data)
        put_at(data, (*place, last), old | value if isinstance(value, dict) else value)
    refuse(mapped.put(tmp_path / "t", data), *words)


def test_an_import_refuses_factors_of_zero(tmp_path: Path) -> None:
    config, weights = translator_folder.read(mapped.put(tmp_path / "t", mapped.config_json()))
    for name in ("states.1.left", "states.1.right"):
        zero = Weights("float32", {**weights.arrays, name: 0 * weights.arrays[name]})
        with pytest.raises(MalformedTranslatorError, match=f"{name} is all zero"):
            translator_folder.check_sizes(tmp_path / "t", config, zero)
