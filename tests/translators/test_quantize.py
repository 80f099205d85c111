"""Translators of 8 and 4 bits against plain loops over what their numbers stand for.

Two references: weights made so that 8 or 4 bits hold them exactly, for which a quantised
translator must equal the float one; and random ones, unpacked here word by word.
"""

import gc
import itertools
import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.tokenization.samples import read_jsonl
from kvlingo_mlx.translators import base, build, products
from kvlingo_mlx.translators import quantised as packing
from kvlingo_mlx.translators.base import Translator
from tests.support import kinds, tiny
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.kinds import (
    FORMS,
    TOLERANCE,
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
from tests.support.native_caches import alike
from tests.support.translator_folders import SIDES, Arrays, Layout, layer_json, to_config

GROUP = 64
MATRICES = ("weight", "w1", "w2")
each_width = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(autouse=True)
def hidden_widths(monkeypatch: Patch) -> None:
    """Some of whole groups, some not."""
    widths = {"keys": (64, 128, 64, 70, 128), "values": (64, 6, 64, 6, 64)}
    monkeypatch.setattr(kinds, "HIDDEN", widths)


def wide_config(form: Layout, nu: int = 2) -> dict[str, Any]:
    """Inputs of whole groups and others; whole ones whose source layers end within a group."""
    data = config_json(form, nu)
    for layer in data["source"]["layers"]:
        sizes = (32, 48) if layer["attention"] == "full" else (64, 20)
        layer["key_dim"], layer["value_dim"] = sizes
    return data


def is_quantised(name: str, array: np.ndarray) -> bool:
    """The rule: matrices whose stored rows are whole groups of 64."""
    return name.rsplit(".", 1)[1] in MATRICES and array.shape[-1] % GROUP == 0


def by_hand(arrays: Arrays, bits: int, dtype: mx.Dtype = mx.float32) -> Arrays:
    """What the stored tensors become: words taken apart, times the scale, plus the bias."""
    out = {}
    for name, array in arrays.items():
        out[name] = np.array(mx.array(array).astype(dtype).astype(mx.float32))
        if is_quantised(name, array):
            words, *rest = mx.quantize(mx.array(array).astype(dtype), group_size=64, bits=bits)
            lanes = np.arange(32 // bits, dtype=np.uint32) * bits
            numbers = (np.array(words)[..., None] >> lanes) & np.uint32(2**bits - 1)
            scales, biases = (np.array(r.astype(mx.float32), np.float64)[..., None] for r in rest)
            groups = numbers.reshape(*scales.shape[:-1], GROUP) * scales + biases
            out[name] = groups.reshape(array.shape)
    return out


def quantised(
    data: dict[str, Any], arrays: Arrays, bits: int | None, batched: bool = False
) -> Translator:
    weights = Weights("float32", arrays)
    return build(to_config(data), weights, batched=batched, quantize=bits)


def affected(data: dict[str, Any], arrays: Arrays) -> list[bool]:
    """Whether a layer's map has a quantised matrix, keys before values."""
    joint = data["joint"]
    return [
        any(is_quantised(n, a) for n, a in arrays.items()
            if n.startswith(f"joint.{t}." if joint else f"{side}.{t}."))
        for side in SIDES for t in range(5)
    ]  # fmt: skip


@each_layout
@each_width
@each_form
def test_random_weights_are_their_words(form: Layout, bits: int, batched: bool) -> None:
    data = wide_config(form)
    arrays, states = random_arrays(form, data, True), random_states(data, 1, 3)
    found = layers_of(quantised(data, arrays, bits, batched)(to_device(states)))
    assert max(errors(found, reference(data, by_hand(arrays, bits), states))) <= TOLERANCE
    # Float weights give something else, as far away as bits are few.
    least, most = (3e-4, 3e-2) if bits == 8 else (1e-2, 3e-1)
    far = errors(found, reference(data, arrays, states))
    for error, changed in zip(far, affected(data, arrays), strict=True):
        assert least < error < most if changed else error <= TOLERANCE


@each_layout
@pytest.mark.parametrize("bits", [None, 8])
@each_form
def test_a_window_takes_its_tokens_alone(
    form: Layout, bits: int | None, batched: bool, monkeypatch: Patch
) -> None:
    """And loses nothing by it: on a CPU what a layer with a window keeps is the same to the bit."""
    monkeypatch.setattr(products, "BLOCK", 16)
    data = wide_config(form)
    translator = quantised(data, random_arrays(form, data, True), bits, batched)
    states, firsts = to_device(random_states(data, 1, 68)), [0, 60, 0, 60, 0]
    whole, found = layers_of(translator(states)), layers_of(translator(states, firsts))
    for side, layer in itertools.product(SIDES, range(5)):
        kept, first = found[side][layer], firsts[layer]
        assert kept.shape[2] == 68 - first and alike(kept, whole[side][layer][:, :, first:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_width
@pytest.mark.parametrize("name", ["linear", "linear head-wise", "joint", "linear_mlp"])
def test_weights_of_sixteen_bits(name: str, bits: int, dtype: str, monkeypatch: Patch) -> None:
    """Scales are the file's, on a CPU in float32; as on a GPU, products have 16 bits."""
    data = wide_config(FORMS[name])
    weights = Weights.from_float32(random_arrays(FORMS[name], data, True), dtype)
    arrays = {n: weights.as_float32(n) for n in weights.arrays}
    low = getattr(mx, dtype)
    states, expected = random_states(data, 1, 3), by_hand(arrays, bits, low)
    monkeypatch.setattr(products, "on_gpu", lambda: False)
    on_cpu = build(to_config(data), weights, quantize=bits)
    found = layers_of(on_cpu(to_device(states)))
    assert max(errors(found, reference(data, expected, states))) <= TOLERANCE
    for module in (products, base):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    on_gpu = build(to_config(data), weights, quantize=bits)
    rounded = {side: [np.array(mx.array(a).astype(low).astype(mx.float32)) for a in states[side]]
               for side in SIDES}  # fmt: skip
    found = layers_of(on_gpu(to_device(states, low)))
    # MLX's CPU kernel also sums in 16 bits, as a GPU's does not.
    assert 1e-5 < max(errors(found, reference(data, expected, rounded))) < 5e-2
    # So do products by matrices that are unpacked first, as CUDA wants them for long spans.
    monkeypatch.setattr(packing, "on_gpu", lambda: True)
    monkeypatch.setattr(packing, "UNPACKED", 3)
    monkeypatch.setattr(packing.Quantised, "product", None)
    found = layers_of(on_gpu(to_device(states, low)))
    assert 1e-5 < max(errors(found, reference(data, expected, rounded))) < 2e-2
    assert on_gpu.nbytes < on_cpu.nbytes
    assert on_gpu.digest == on_cpu.digest


def built_of_eight(bits: int | None, batched: bool) -> Translator:
    """A translator of 16 matrices of 256 by 256."""
    data = config_json(Layout(), 1)
    layers = [layer_json(i, 4, 64, 64) for i in range(8)]
    for end in ("source", "target"):
        data[end] = data[end] | {"layers": layers}
    data["assignment"] = {side: [[i] for i in range(8)] for side in SIDES}
    rng = np.random.default_rng(0)
    names = [f"{side}.{t}.weight" for side in SIDES for t in range(8)]
    arrays = {name: rng.normal(size=(256, 256)).astype(np.float32) for name in names}
    return build(to_config(data), Weights("float32", arrays), batched=batched, quantize=bits)


@each_layout
def test_no_float_copy_is_kept(batched: bool) -> None:
    """By MLX's own account: what stays is the packed size."""
    matrix, grown = 256 * 256 * 4, {}
    for bits in (None, 8, 4):
        gc.collect()  # of what the tests before have left
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        translator = built_of_eight(bits, batched)
        size = translator.nbytes
        grown[bits] = mx.get_active_memory() - before
        assert size <= grown[bits] <= size * 1.1  # buffers are rounded up
        if bits is not None:  # no more than a group at a time
            assert mx.get_peak_memory() - before < size + (8 if batched else 1) * matrix * 2
        del translator
    assert grown[None] == pytest.approx(16 * matrix, rel=0.1)
    assert grown[8] == pytest.approx(16 * matrix * 9 / 32, rel=0.1)
    assert grown[4] == pytest.approx(16 * matrix * 5 / 32, rel=0.1)


@pytest.mark.parametrize("bits", [3, 0, 16, True, 8.0, "8"])
def test_other_widths_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=f"quantize is {bits!r}; give 8 or 4"):
        kv.load_translator("absent", quantize=bits)


def test_a_translator_without_whole_groups_is_refused() -> None:
    data = config_json(Layout())
    with pytest.raises(ValueError, match=r"change nothing.*64 numbers \(keys.0.weight has 16\)"):
        quantised(data, random_arrays(Layout(), data, False), 8)


@each_form
def test_a_quantised_translator_is_not_saved(form: Layout, tmp_path: Path) -> None:
    data = wide_config(form)
    translator = quantised(data, random_arrays(form, data, False), 4)
    with pytest.raises(ValueError, match="quantised to 4 bits.*float weights only; load it"):
        translator.save(tmp_path / "out")
    with pytest.raises(ValueError, match="quantised to 4 bits"):
        conditions.shuffled(translator)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [2048, 5])
@pytest.mark.parametrize("hidden", [None, 64])
def test_a_hand_over(
    folders: Folders, models: Models, tmp_path: Path, hidden: int | None, step: int
) -> None:
    """Captured after RoPE: the source's own cache, mapped, is the target's."""
    folder = tiny.write_random_translator(
        tmp_path / "linear", folders["dense"], folders["moe"], nu=2, capture="post_rope"
    )
    if hidden:
        folder = tiny.write_mlp_translator(tmp_path / "mlp", folder, hidden)
    source, target, tokens = models["dense"], models["moe"], tiny.random_tokens(18)
    native = conditions.native(source)(tokens)
    states = {
        side: [np.array(array[:, :, :17]).swapaxes(1, 2).reshape(1, 17, -1) for array in arrays]
        for side, arrays in (
            ("keys", [c.keys for c in native]), ("values", [c.values for c in native])
        )
    }  # fmt: skip
    data = json.loads((folder / "translator_config.json").read_text())
    arrays = dict(translator_folder.read(folder)[1].arrays)
    far = {}
    for bits in (None, 8, 4):
        translator = kv.load_translator(folder, quantize=bits)
        cache = kv.hand_over(source, target, tokens, translator=translator, prefill_step_size=step)
        found = {"keys": [np.array(c.keys[:, :, :17]) for c in cache],
                 "values": [np.array(c.values[:, :, :17]) for c in cache]}  # fmt: skip
        own = by_hand(arrays, bits) if bits else arrays
        assert max(errors(found, reference(data, own, states))) < 1e-5
        far[bits] = errors(found, reference(data, arrays, states))
    assert all(1e-4 < a < 0.02 < b < 0.3 for a, b in zip(far[8], far[4], strict=True))


def test_verbs_take_it(folders: Folders, tmp_path: Path, capsys: Printed) -> None:
    folder = tiny.write_random_translator(tmp_path / "t", folders["dense"], folders["moe"])
    pair = (str(folders["dense"]), str(folders["moe"]))
    translator, record = ["--translator", str(folder)], tmp_path / "record.jsonl"
    text = {
        bits: kv.generate(*pair, "One two three", max_tokens=12,
                          translator=kv.load_translator(folder, quantize=bits))
        for bits in (None, 4)
    }  # fmt: skip
    assert text[None] != text[4]  # otherwise this shows nothing
    more = ["-c", "quantize=4", "--json", str(record)]
    generate = ["generate", "--prefill-model", pair[0], "--decode-model", pair[1], *translator]
    generate += ["--prompt", "One two three", "-c", "ignore_chat_template=true", "-m", "12", *more]
    assert run(generate) == 0
    pair_options = ["--source", pair[0], "--target", pair[1]]
    assert run(["bench", *pair_options, *translator, "-p", "8", "-n", "1", *more]) == 0
    assert "translation, 4 bits" in capsys.readouterr().out
    records = [json.loads(line) for line in record.read_text().splitlines()]
    assert records[0]["results"]["text"] == text[4]
    assert records[0]["config"]["quantize"] == 4
    assert records[1]["config"]["forms"] == ["float32", "4 bits"]
    assert run(["show", str(folder), "--quantize", "4"]) == 0
    rows = capsys.readouterr().out
    numbers = 2 * 4 * 64 * 64
    assert f"in memory, as it is             {numbers * 4 / 1e6:.3g} MB" in rows
    assert f"in memory, 4 bits               {numbers * 5 / 8 / 1e6:.3g} MB" in rows
    assert "not quantised" not in rows
    mixed = tiny.write_mlp_translator(tmp_path / "mlp", folder)  # 8 hidden units
    assert run(["show", str(mixed), "--quantize", "8"]) == 0
    rows = capsys.readouterr().out
    assert "not quantised                   8 matrices" in rows and "keys.0.w2, keys.1.w2" in rows


def test_eval_shows_each_form_beside_the_float_one(folders: Folders, tmp_path: Path) -> None:
    folder = tiny.write_random_translator(tmp_path / "t", folders["dense"], folders["moe"])
    record, journal, data = (tmp_path / name for name in ("record", "scores.jsonl", "data.jsonl"))
    talks = dialogues.held_out(2, facts=(2, 3), questions=2)
    data.write_text("".join(json.dumps({"messages": t.conversation()}) + "\n" for t in talks))
    command = ["eval", str(folder), "--source", str(folders["dense"]), "--target",
               str(folders["moe"]), "--tasks", "continuation", "--data", str(data), "--limit", "2",
               "--out", str(journal), "--json", str(record)]  # fmt: skip
    assert run([*command, "--baselines", "shuffled", "--quantize", "8,4"]) == 0
    means = json.loads(record.read_text())["results"]["means"]["continuation"]
    forms = ["translated", "translated, 8 bits", "translated, 4 bits"]
    assert list(means) == ["native", *forms, "shuffled"]
    kl = [means[form]["no reasoning"]["kl"]["value"] for form in forms]
    assert 0.0 < abs(kl[1] - kl[0]) < abs(kl[2] - kl[0])
    # Each number is what the loaded translator gives.
    task = probes.continuation(kv.load(folders["moe"]), read_jsonl(data), 2, 512)
    pair = (kv.load(folders["dense"]), kv.load(folders["moe"]))
    own = lineup.translated("own", *pair, [kv.load_translator(folder, quantize=4)])
    scored = evaluate(pair[1], [task], [own], Journal())["continuation"]["own"]
    assert kl[2] == pytest.approx(np.mean([item.scores["kl"] for item in scored]))
    written = journal.read_text()
    runs = [json.loads(line) for line in written.splitlines() if "settings" in line]
    assert [r["response"]["settings"].get("bits") for r in runs] == [None, None, [8], [4], None]
    assert run([*command, "--baselines", "none", "--quantize", "4"]) == 0
    assert run([*command, "--baselines", "none"]) == 0
    assert journal.read_text() == written
