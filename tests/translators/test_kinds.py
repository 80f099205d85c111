"""Every translator kind on the device against plain loops, written from the format page alone.

The models are made up: two attention groups of other widths, where the maps' hidden widths
differ too, so that layers fall into several groups.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.kinds import KINDS
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.translators import base, build, products
from tests.support.kinds import (
    FORMS,
    TOLERANCE,
    WRONG,
    config_json,
    each_form,
    each_layout,
    errors,
    layers_of,
    random_arrays,
    random_states,
    reference,
    to_device,
)
from tests.support.translator_folders import SIDES, Arrays, Layout, to_config

SPANS = tuple(itertools.product((1, 2), (1, 7)))  # batch and tokens


def on_device(
    data: dict[str, Any], arrays: Arrays, states: dict[str, list[np.ndarray]], batched: bool
) -> dict[str, list[np.ndarray]]:
    translator = build(to_config(data), Weights("float32", arrays), batched=batched)
    return layers_of(translator(to_device(states)))


@each_layout
@pytest.mark.parametrize("nu", [1, 2])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@each_form
def test_every_kind_equals_plain_loops(form: Layout, bias: bool, nu: int, batched: bool) -> None:
    data = config_json(form, nu)
    arrays = random_arrays(form, data, bias)
    for batch, tokens in SPANS:
        states = random_states(data, batch, tokens)
        found = on_device(data, arrays, states, batched)
        assert max(errors(found, reference(data, arrays, states))) <= TOLERANCE


@each_form
def test_groups_of_many_hidden_units_are_cut(form: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    data = config_json(form)
    arrays, states = random_arrays(form, data, True), random_states(data, 2, 3)
    whole = on_device(data, arrays, states, batched=True)
    monkeypatch.setattr(products, "MAX_HIDDEN", 11)
    cut = build(to_config(data), Weights("float32", arrays), batched=True)
    assert max(errors(layers_of(cut(to_device(states))), whole)) <= TOLERANCE
    most = max(len(group.layers) for side in SIDES for group in cut.groups[side])
    assert most == (3 if form.kind == "linear" else 2 if form.head_mixing else 1)


@pytest.mark.parametrize("name", ["joint", "mlp gated", "linear_mlp head-wise"])
def test_the_reading_order_counts(name: str) -> None:
    """Source layers in the opposite order, where there are two of them, are another map."""
    data = config_json(FORMS[name])
    arrays, states = random_arrays(FORMS[name], data, False), random_states(data, 1, 7)
    found = on_device(data, arrays, states, batched=True)
    for side in SIDES:
        turned = [layers[::-1] for layers in data["assignment"][side]]
        data["assignment"] = data["assignment"] | {side: turned}
    wrong = errors(found, reference(data, arrays, states))
    read_two = [layer % 2 == 0 for _ in SIDES for layer in range(5)]
    assert all((error > WRONG) == two for error, two in zip(wrong, read_two, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_form
def test_sixteen_bits_as_on_a_gpu(
    form: Layout, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and products of 16 bits, vectors and results in float32."""
    for module in (products, base):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    data = config_json(form)
    weights = Weights.from_float32(random_arrays(form, data, True), dtype)
    translator = build(to_config(data), weights)
    states = to_device(random_states(data, 2, 7), getattr(mx, dtype))
    rounded = {side: [np.array(array.astype(mx.float32)) for array in states.side(side)]
               for side in SIDES}  # fmt: skip
    exact = {name: weights.as_float32(name) for name in weights.arrays}
    found = errors(layers_of(translator(states)), reference(data, exact, rounded))
    assert 1e-5 < max(found) < 2e-2
    vectors = sum(a.size for n, a in exact.items() if n.split(".")[2] not in ("weight", "w1", "w2"))
    assert translator.nbytes == 2 * (translator.num_parameters + vectors)
    # Inputs in float32 are not rounded, neither is what becomes of them.
    states = random_states(data, 2, 7)
    found = errors(layers_of(translator(to_device(states))), reference(data, exact, states))
    assert max(found) <= TOLERANCE


@each_layout
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@each_form
def test_saving_gives_the_bytes_that_were_loaded(
    form: Layout, dtype: str, batched: bool, tmp_path: Path
) -> None:
    data = config_json(form)
    arrays = random_arrays(form, data, True)
    for array in arrays.values():  # signed zeros, and numbers below the normal ones
        array.reshape(-1)[:2] = (-0.0, 1e-40 if dtype != "float16" else 1e-7)
    weights = Weights.from_float32(arrays, dtype)
    first = translator_folder.write(tmp_path / "first", to_config(data), weights)
    translator = build(*translator_folder.read(first), batched=batched)
    again = translator.to_weights()
    assert again.dtype == dtype and set(again.arrays) == set(weights.arrays)
    for name, array in weights.arrays.items():
        assert again.arrays[name].shape == array.shape
        assert again.arrays[name].tobytes() == array.tobytes()
    second = translator.save(tmp_path / "second")
    for file in ("translator.safetensors", "selftest.safetensors", "translator_config.json"):
        assert (second / file).read_bytes() == (first / file).read_bytes()


def test_there_is_a_translator_of_every_kind() -> None:
    kinds = {"joint" if form.joint else form.kind for form in FORMS.values()}
    assert kinds == {"joint" if spec.joint else spec.kind for spec in KINDS}


@each_form
def test_shuffled_maps_sit_at_other_layers(form: Layout) -> None:
    data = config_json(form)
    arrays, states = random_arrays(form, data, True), random_states(data, 1, 7)
    translator = build(to_config(data), Weights("float32", arrays))
    control = conditions.shuffled(translator)
    moved = control.to_weights().arrays
    assert set(moved) == set(arrays)
    places: dict[int, set[int]] = {}
    for name, array in moved.items():
        side, layer, last = name.split(".")
        (was,) = (t for t in range(5) if np.array_equal(arrays[f"{side}.{t}.{last}"], array))
        places.setdefault(int(layer), set()).add(was)
    # One order for all tensors of a layer, none at its own place, none in the other group.
    assert sorted(was for (was,) in places.values()) == [0, 1, 2, 3, 4]
    assert all(layer != was and (layer - was) % 2 == 0 for layer, (was,) in places.items())
    found = errors(layers_of(control(to_device(states))), reference(data, arrays, states))
    assert min(found) > WRONG


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_maps_like_no_others_are_shuffled_to_their_opposite(dtype: Any) -> None:
    """The only one of its shape stays where it is; two of one shape change places."""
    data = config_json(Layout())
    data["target"]["layers"][3]["key_dim"] = 8
    weights = Weights.from_float32(random_arrays(Layout(), data, False), dtype)
    arrays = {name: weights.as_float32(name) for name in weights.shapes}
    moved = conditions.shuffled(build(to_config(data), weights)).to_weights()
    unlike = {1, 3}  # read as many layers as each other, but are of two widths
    assert moved.dtype == dtype
    for name in moved.shapes:
        side, layer, last = name.split(".")
        array = moved.as_float32(name)
        if int(layer) in unlike:
            np.testing.assert_array_equal(array, -arrays[name])
        else:
            assert not np.array_equal(array, arrays[name])
            assert any(np.array_equal(array, arrays[f"{side}.{t}.{last}"]) for t in (0, 2, 4))


def test_a_form_is_told_in_words() -> None:
    words = {name: to_config(config_json(form)).form for name, form in FORMS.items()}
    assert words["joint"] == "linear, head-mixing, keys and values joint"
    assert words["mlp head-wise"] == "mlp, head-wise"
    config = to_config(config_json(FORMS["joint"]))
    weights = Weights("float32", random_arrays(FORMS["joint"], config_json(FORMS["joint"]), True))
    card = translator_folder.model_card(dataclasses.replace(config, capture="post_norm"), weights)
    assert "- kind: linear, head-mixing, keys and values joint, captured post-norm\n" in card
