"""Translator format version 2: layers that keep a recurrent state, read, written and refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import config_reading, translator_folder
from kvlingo_mlx.format.geometry import CacheGeometry, LayerGeometry, Recurrence
from kvlingo_mlx.format.maps import maps_of
from tests.support.translator_folders import CONFIG, TENSORS

Json = dict[str, Any]
Place = tuple[str | int, ...]
SIDES = ("keys", "values")
# By rule: the recurrence, and the widths that it has by the page's formulas.
RULES: dict[str, tuple[dict[str, int], int, int]] = {
    "gated_delta": (dict(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4), 32, 8),
    "mamba2": (dict(key_heads=1, value_heads=3, key_dim=4, value_dim=2, kernel=2), 14, 3),
    "short_conv": (dict(key_heads=0, value_heads=1, key_dim=0, value_dim=6, kernel=3), 6, 6),
}
FULL: Json = {
    "kv_heads": 2, "key_dim": 4, "value_dim": 4, "attention": "full", "window": None,
}  # fmt: skip


def recurrent(rule: str, **more: int) -> Json:
    """A recurrent layer of the page."""
    recurrence, keys, values = RULES[rule]
    return {
        "kv_heads": 1, "key_dim": keys, "value_dim": values, "attention": rule, "window": None,
        "recurrence": recurrence | more,
    }  # fmt: skip


def config_json(rule: str = "gated_delta") -> Json:
    """A config of a recurrent layer and one of attention on both sides, which differ in width."""
    ends = {}
    for end, layers in (("source", (recurrent(rule), FULL)), ("target", (FULL, recurrent(rule)))):
        unknown = {"geometry": None, "norms": None, "tokenizer": None}
        ends[end] = {
            "name": end, "revision": None, "model_type": "hybrid", "fingerprint": unknown,
            "layers": [{"layer": i, **layer} for i, layer in enumerate(layers)],
        }  # fmt: skip
    return copy.deepcopy({
        "format_version": 2, "kind": "linear", "head_mixing": True, "joint": False,
        "capture": "pre_norm", **ends, "assignment": {side: [[1], [0]] for side in SIDES},
        "alignment": None, "provenance": {},
    })  # fmt: skip


def put(folder: Path, data: Json, rule: str = "gated_delta") -> Path:
    """A folder of a config with random maps; those of the sound config's widths."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(data))
    rng = np.random.default_rng(1)
    target = config_json(rule)["target"]["layers"]
    widths = {
        (side, t): layer["kv_heads"] * layer["key_dim" if side == "keys" else "value_dim"]
        for t, layer in enumerate(target)
        for side in SIDES
    }
    tensors = {
        f"{side}.{t}.weight": rng.standard_normal((width, width)).astype(np.float32)
        for (side, t), width in widths.items()
    }
    save_file(tensors, folder / TENSORS)
    return folder


def changed(place: Place, value: Any, rule: str = "gated_delta") -> Json:
    """The config with another value at a place."""
    data = config_json(rule)
    inner: Any = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


def refuse(folder: Path, data: Json, *words: str) -> None:
    """The config is refused in one line that names its file and holds the words."""
    with pytest.raises(MalformedTranslatorError) as caught:
        translator_folder.read(put(folder, data))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000 and str(folder / CONFIG) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("rule", RULES)
def test_what_the_page_describes_is_read_and_written(rule: str, tmp_path: Path) -> None:
    data = config_json(rule)
    config, weights = translator_folder.read(put(tmp_path / "t", data, rule))
    assert json.loads(json.dumps(config.to_json())) == data
    assert config.format_version == 2
    layer = config.target.layers[1]
    assert layer.recurrence is not None and asdict(layer.recurrence) == RULES[rule][0]
    again = translator_folder.write(tmp_path / "again", config, weights)
    assert json.loads((again / CONFIG).read_text()) == data
    assert translator_folder.read(again)[0] == config


def test_a_folder_without_recurrent_layers_is_of_version_1(tmp_path: Path) -> None:
    data = config_json()
    for end in ("source", "target"):
        data[end]["layers"] = [{"layer": 0, **FULL}]
    data["assignment"] = {side: [[0]] for side in SIDES}
    weights = {f"{side}.0.weight": np.eye(8, dtype=np.float32) for side in SIDES}
    put(tmp_path / "t", config_json())
    for version in (1, 2):  # a writer may say 2 where 1 would do
        (tmp_path / "t" / CONFIG).write_text(json.dumps(data | {"format_version": version}))
        save_file(weights, tmp_path / "t" / TENSORS)
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
    put(folder, data, rule)
    tensors = {f"{n}.weight": np.ones(shape, np.float32) for n, shape in shapes.items()}
    save_file(tensors, folder / TENSORS)
    config, weights = translator_folder.read(folder)
    assert [m.reads for m in maps_of(config)] == [
        (("keys", 0), ("values", 0), ("keys", 1)), (("keys", 1), ("values", 1), ("keys", 0)),
        (("keys", 0), ("values", 0)), (("values", 0),),
    ]  # fmt: skip
    again = translator_folder.write(tmp_path / "again", config, weights)
    assert json.loads((again / CONFIG).read_text()) == data
    for name, shape in shapes.items():  # one side alone, as between layers of one kind
        narrow = np.ones((shape[0], shape[1] - 1), np.float32)
        save_file(tensors | {f"{name}.weight": narrow}, folder / TENSORS)
        with pytest.raises(MalformedTranslatorError, match=f"{name}.weight has shape"):
            translator_folder.read(folder)


def test_windows_and_latents_are_not_read_by_recurrent_layers(tmp_path: Path) -> None:
    data = config_json()
    data["source"]["layers"][1] |= {"attention": "sliding", "window": 4}
    data["target"]["layers"] = data["target"]["layers"][1:]
    data["assignment"] = {side: [[1]] for side in SIDES}
    refuse(tmp_path / "t", data, "keys[0] crosses attention groups", "layer 1 is not gated_delta")
    data["source"]["layers"][1] |= {"attention": "latent", "window": None}
    refuse(tmp_path / "t", data, "keys[0] crosses attention groups", "layer 1 is not gated_delta")


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


@pytest.mark.parametrize(
    ("place", "value"),
    [pytest.param(p, v, id=f"{p[-1]}={v!r:.24}") for p, values in WRONG for v in values],
)
def test_a_wrong_value(place: Place, value: Any, tmp_path: Path) -> None:
    refuse(tmp_path / "t", changed(place, value))


@pytest.mark.parametrize("key", Recurrence.__dataclass_fields__)
def test_a_key_that_lacks(key: str, tmp_path: Path) -> None:
    data = config_json()
    del data["target"]["layers"][1]["recurrence"][key]
    refuse(tmp_path / "t", data, "recurrence", key)


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_recurrent_layer_says_what_it_keeps(end: str, tmp_path: Path) -> None:
    data = config_json()
    layer = next(g for g in data[end]["layers"] if "recurrence" in g)
    told = layer.pop("recurrence")
    refuse(tmp_path / "t", data, "attention 'gated_delta' with recurrence None")
    data = config_json()
    next(g for g in data[end]["layers"] if "recurrence" not in g)["recurrence"] = told
    refuse(tmp_path / "t", data, "attention 'full' with recurrence Recurrence(")


def test_version_1_has_no_recurrent_layers(tmp_path: Path) -> None:
    refuse(tmp_path / "t", config_json() | {"format_version": 1}, "recurrent layers", "version 1")


def test_readers_of_version_1_refuse_version_2_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a release does that knows version 1 alone."""
    monkeypatch.setattr(config_reading, "FORMAT_VERSION", 1)
    refuse(tmp_path / "t", config_json(), "format version 2", "upgrade")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key", ["kv_heads", "key_dim", "value_dim"])
def test_widths_that_are_not_the_recurrences(rule: str, key: str, tmp_path: Path) -> None:
    sound = recurrent(rule)
    data = changed((*AT[:-1], key), sound[key] + 1, rule)
    wanted = f"reads one of {sound['key_dim']} and {sound['value_dim']}"
    refuse(tmp_path / "t", data, "its recurrence", wanted)


# ---- fingerprints -----------------------------------------------------------------------


def test_facts_of_attention_are_those_of_version_1() -> None:
    """So no fingerprint of a model without recurrent layers has changed."""
    plain = LayerGeometry(0, 2, 4, 4)
    geometry = CacheGeometry("qwen3", (plain,), (None,), 1e-6, 320)
    assert geometry.facts["layers"] == [{"layer": 0, **FULL}]
    recurrence = Recurrence(**RULES["mamba2"][0])
    hybrid = LayerGeometry(0, 1, 14, 3, "mamba2", recurrence=recurrence)
    other = LayerGeometry(
        0, 1, 14, 3, "mamba2", recurrence=Recurrence(**RULES["mamba2"][0] | {"kernel": 3})
    )
    assert hybrid.facts["recurrence"] == RULES["mamba2"][0]
    found = {
        CacheGeometry("x", (layer,), (None,), 1e-6, 320).fingerprint for layer in (hybrid, other)
    }
    assert len(found) == 2  # a recurrence counts, wherever widths do not show it
