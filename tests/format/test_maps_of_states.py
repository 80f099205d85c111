"""Translator format version 3: maps of recurrent states, by the page alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import config_reading, translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from tests.support.state_map_folders import TARGET, config_json, put, recurrent, tensors
from tests.support.translator_folders import CONFIG, SELFTEST, TENSORS

Json = dict[str, Any]


def refuse(folder: Path, data: Json, *words: str, **more: Any) -> None:
    with pytest.raises(MalformedTranslatorError) as caught:
        translator_folder.read(put(folder, data, **more))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000 and str(folder) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("rule", ["gated_delta", "mamba2"])
def test_what_the_page_describes_is_read_and_written(rule: str, tmp_path: Path) -> None:
    data = config_json(rule)
    config, weights = translator_folder.read(put(tmp_path / "t", data))
    assert json.loads(json.dumps(config.to_json())) == data
    assert config.format_version == 3
    again = translator_folder.write(tmp_path / "again", config, weights)
    assert json.loads((again / CONFIG).read_text()) == data
    assert translator_folder.read(again)[0] == config
    for name, array in tensors().items():
        assert np.array_equal(load_file(again / TENSORS)[name], array)


def probed(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The self-test of the page, as sums over single numbers."""
    x = lambda n: [((37 * i + 11) % 17 - 8) / 8 for i in range(n)]  # noqa: E731
    values, keys, query = x(2 * 5), x(2 * 3), x(7)
    left, right = arrays["states.1.left"].astype(float), arrays["states.1.right"].astype(float)
    out = np.zeros((6, 4))
    for head in range(6):
        for row in range(4):
            for j in range(2):
                for a in range(5):
                    for b in range(3):
                        for c in range(7):
                            out[head, row] += (
                                left[head, row, 5 * j + a] * values[5 * j + a] * keys[3 * j + b]
                                * right[head, 3 * j + b, c] * query[c]
                            )  # fmt: skip
    return out


def test_the_self_test_is_that_of_the_page(tmp_path: Path) -> None:
    config, weights = translator_folder.read(put(tmp_path / "t", config_json()))
    folder = translator_folder.write(tmp_path / "w", config, weights)
    found = load_file(folder / SELFTEST)
    assert set(found) == {
        "keys.0.weight.probe_out", "values.0.weight.probe_out", "states.1.probe_out"
    }  # fmt: skip
    assert found["states.1.probe_out"] == pytest.approx(probed(tensors()), rel=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: a | {"states.1.left": a["states.1.left"][::-1]},
        lambda a: a | {"states.1.left": np.roll(a["states.1.left"], 5, axis=2)},  # layers swapped
        lambda a: a | {"states.1.right": np.roll(a["states.1.right"], 3, axis=1)},
        lambda a: a | {"states.1.right": a["states.1.right"][:, :, ::-1]},
        lambda a: a | {"states.1.left": a["states.1.left"][:, ::-1]},
    ],
)
def test_a_self_test_finds_what_is_out_of_order(wrong: Any, tmp_path: Path) -> None:
    config, weights = translator_folder.read(put(tmp_path / "t", config_json()))
    folder = translator_folder.write(tmp_path / "w", config, weights)
    save_file({n: np.ascontiguousarray(a) for n, a in wrong(tensors()).items()}, folder / TENSORS)
    with pytest.raises(MalformedTranslatorError, match="self-test failed for states.1"):
        translator_folder.read(folder)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("states.1.left", (6, 4, 5), "(6, 4, 10)"),
        ("states.1.right", (6, 7, 6), "(6, 6, 7)"),
        ("states.1.right", (2, 6, 7), "(6, 6, 7)"),
    ],
)
def test_a_wrong_shape(name: str, shape: tuple[int, ...], told: str, tmp_path: Path) -> None:
    arrays = tensors() | {name: np.ones(shape, np.float32)}
    words = name, f"expected {told}", "first the target layer's heads"
    refuse(tmp_path / "t", config_json(), *words, arrays=arrays)


@pytest.mark.parametrize("value", [False, None, 1, "true", []])
def test_the_key_is_true_or_missing(value: Any, tmp_path: Path) -> None:
    refuse(tmp_path / "t", config_json() | {"state_maps": value}, "state_maps", "expected true")


def test_a_kind_without_them(tmp_path: Path) -> None:
    words = "kind is 'mlp', which has no maps of states"
    refuse(tmp_path / "t", config_json() | {"kind": "mlp"}, words)


def test_readers_of_version_2_refuse_version_3_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_reading, "FORMAT_VERSION", 2)
    refuse(tmp_path / "t", config_json(), "format version 3", "upgrade")


def _of_two_rules(data: Json) -> None:
    data["target"]["layers"][1] |= recurrent("mamba2", TARGET)


def _plain(data: Json) -> None:
    data["target"]["layers"] = data["target"]["layers"][:1]
    data["assignment"] = {side: [[1]] for side in ("keys", "values")}


def _convolutions(data: Json) -> None:
    short = dict(key_heads=0, value_heads=1, key_dim=0, value_dim=6, kernel=3)
    layer = {
        "kv_heads": 1, "key_dim": 6, "value_dim": 6, "attention": "short_conv", "recurrence": short,
    }  # fmt: skip
    for end, index in (("source", 0), ("source", 2), ("target", 1)):
        data[end]["layers"][index] |= layer


def _unlike_layers(data: Json) -> None:
    data["source"]["layers"][2] |= recurrent("gated_delta", TARGET)


def _other_kinds(data: Json) -> None:
    data["assignment"]["keys"][1] = data["assignment"]["values"][1] = [0, 1]


def _two_lists(data: Json) -> None:
    data["assignment"]["values"][1] = [2, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_of_two_rules, ("of one rule", "source has those of gated_delta", "of mamba2")),
        (_plain, ("of one rule", "target has none")),
        (_convolutions, ("short convolutions", "no state")),
        (_unlike_layers, ("several shapes",)),
        (_other_kinds, ("target layer 1 reads source layer 1", "gated_delta")),
        (_two_lists, ("[0, 2]", "[2, 0]", "one list")),
    ],
)
def test_models_and_assignments_that_do_not_go_together(
    change: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    data = config_json()
    change(data)
    refuse(tmp_path / "t", data, *words)


def test_an_import_refuses_factors_of_zero(tmp_path: Path) -> None:
    config, weights = translator_folder.read(put(tmp_path / "t", config_json()))
    for name in ("states.1.left", "states.1.right"):
        zero = Weights("float32", {**weights.arrays, name: 0 * weights.arrays[name]})
        with pytest.raises(MalformedTranslatorError, match=f"{name} is all zero"):
            translator_folder.check_sizes(tmp_path / "t", config, zero)
