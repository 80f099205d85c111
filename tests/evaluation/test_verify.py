"""kvlingo-mlx verify: the self-test through MLX, and a training's receipt."""

import importlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.embedded import bundled as bundled_module
from kvlingo_mlx.embedded.bundled import NAME, bundled
from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.evaluation.verification import map_error, verdict
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.grading import Receipt, receipt_of
from tests.support import TESTS, translator_folders
from tests.support.command_line import fails
from tests.support.fixtures import Patch, Printed
from tests.support.translator_folders import LAYOUTS

PAIR = ("tiny-qwen3-s", "tiny-qwen3-l")
BETWEEN = ("--source", PAIR[0], "--target", PAIR[1])
CPU = mx.Device(mx.cpu)


@pytest.fixture
def embedded(tmp_path: Path) -> Path:
    """A copy of an embedded translator."""
    return Path(shutil.copytree(TRANSLATORS / "--".join(PAIR), tmp_path / "t"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_its_probes(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    """Head-mixing and head-wise, joint, with biases and gates, of one and two layers; and were MLX
    to compute with one tensor changed, each in turn, that is noticed."""
    config, weights = translator_folder.read(
        translator_folders.store(tmp_path / "t", LAYOUTS[name], "float32")
    )
    assert map_error(config, weights, CPU) < 1e-5
    build, allowed = verification.build, translator_folder.PROBE_TOLERANCE["float32"]
    rng = np.random.default_rng(0)  # a constant would not do: some probes sum to zero
    for changed in weights.arrays:
        noise = rng.normal(size=weights.arrays[changed].shape).astype(np.float32)
        other = Weights("float32", weights.arrays | {changed: weights.arrays[changed] + noise})
        monkeypatch.setattr(verification, "build", lambda c, w, other=other: build(c, other))
        assert map_error(config, weights, CPU) > allowed, changed


def test_verify(embedded: Path, capsys: Printed) -> None:
    assert run(["verify", str(embedded)]) == 0
    out = capsys.readouterr().out
    assert "its own probes   agree" in out
    assert out.endswith("verdict: sound: the maps are computed as they are stored\n")
    (embedded / "selftest.safetensors").unlink()
    assert run(["verify", str(embedded), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "none: it has no selftest.safetensors" in captured.err
    assert json.loads(captured.out)["results"]["sound"] is True


def test_verify_with_models(embedded: Path, capsys: Printed) -> None:
    """What MLX measures here is what PyTorch measured when the receipt was written."""
    config, weights = translator_folder.read(embedded)
    receipt = config.provenance["receipt"]
    assert run(["verify", str(embedded), *BETWEEN, "--json", "-"]) == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)["results"]
    assert results["KL, nats per token"] == pytest.approx(receipt["kl"], abs=1e-4)
    assert results["same first choice"] == pytest.approx(receipt["top1"])
    assert "verdict: sound: as its receipt says; works: keeps 8 of 8 facts" in captured.err
    assert results["measured"]["grade"] == "works" and results["grade"] == "works"
    assert results["measured"]["hidden_kl"] == pytest.approx(receipt["hidden_kl"], rel=1e-4)
    assert results["measured"]["recall"] == receipt["recall"]
    assert receipt["recall"] == {"translated": 1.0, "native": 1.0, "hidden": 0.0, "facts": 8}
    # The same facts, and maps that are worse.
    rng = np.random.default_rng(0)
    arrays = {n: weights.as_float32(n) for n in weights.arrays}
    arrays = {n: a + 0.3 * a.std() * rng.normal(size=a.shape) for n, a in arrays.items()}
    worse = Weights.from_float32(arrays, "bfloat16")
    translator_folder.write(embedded, config, worse, overwrite=True)
    assert run(["verify", str(embedded), *BETWEEN]) == 1
    assert "verdict: NOT SOUND: " in capsys.readouterr().out


def test_a_stored_translator_without_a_receipt_keeps_the_measured_one(
    embedded: Path, store: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    """Not one that lies elsewhere, and not where there is one already."""
    monkeypatch.setattr(bundled_module, "COUNT", 2)
    config, weights = translator_folder.read(embedded)
    bare = replace(config, provenance={"made_by": "me"})
    for folder in (embedded, store / "mine"):
        translator_folder.write(folder, bare, weights, overwrite=True)
        assert run(["verify", str(folder), *BETWEEN]) == 0
        assert "it had no receipt" in capsys.readouterr().out
    assert translator_folder.read_config(embedded).provenance == {"made_by": "me"}
    kept, after = translator_folder.read(store / "mine")
    left = receipt_of(kept)
    assert left is not None and left.grade == "works" and kept.provenance["made_by"] == "me"
    assert kept.fitted_on("target") is None  # by what it was fitted, nobody said
    assert all(np.array_equal(after.arrays[n], array) for n, array in weights.arrays.items())
    assert run(["list"]) == 0
    assert "works" in capsys.readouterr().out
    before = (store / "mine" / "translator_config.json").read_bytes()
    assert run(["verify", str(store / "mine"), *BETWEEN]) == 0

    assert (store / "mine" / "translator_config.json").read_bytes() == before


def test_a_stored_receipt_of_an_older_version_gets_what_a_guard_compares(
    embedded: Path, store: Path, capsys: Printed
) -> None:
    """And keeps all else that its maker measured; not if the translator is not sound."""
    config, weights = translator_folder.read(embedded)
    receipt = dict(config.provenance["receipt"])
    usual = receipt.pop("guard")
    for kl, sound in ((receipt["kl"], True), (9.0, False)):
        told = {**receipt, "kl": kl}
        older = replace(config, provenance={"receipt": told})
        translator_folder.write(store / "mine", older, weights, overwrite=True)
        assert run(["verify", str(store / "mine"), *BETWEEN]) == (0 if sound else 1)
        assert ("its receipt is kept in" in capsys.readouterr().out) == sound
        kept = dict(translator_folder.read_config(store / "mine").provenance["receipt"])
        added = kept.pop("guard", None)
        assert kept == told
        assert added is None or added == pytest.approx(usual, rel=1e-3)
        assert (added is None) != sound


def test_sound_and_useless(embedded: Path, capsys: Printed) -> None:
    """The files are what they claim to be, and the maps are worth nothing."""
    config, weights = translator_folder.read(embedded)
    rng = np.random.default_rng(0)
    noise = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in weights.arrays.items()}
    bare = replace(config, provenance={})
    translator_folder.write(embedded, bare, Weights("float32", noise), overwrite=True)
    assert run(["verify", str(embedded), *BETWEEN]) == 1
    out = capsys.readouterr().out
    assert re.search(r"verdict: sound, but useless: keeps [01] of 8 facts", out)
    assert "maps on the CPU" in out and "Device(" not in out


def test_tuning_does_not_change_the_verdict(embedded: Path, capsys: Printed) -> None:
    """A receipt is compared at its own number of native layers, not the one that tuning chose."""
    config, weights = translator_folder.read(embedded)
    layers = len(config.target.layers)
    tuned = replace(config, provenance={**config.provenance, "native_layers": layers})
    translator_folder.write(embedded, tuned, weights, overwrite=True)
    assert run(["verify", str(embedded), *BETWEEN]) == 0
    out = capsys.readouterr().out
    assert "verdict: sound: as its receipt says; works" in out and "native layers" not in out


def test_a_translator_of_upper_layers_leaves_a_receipt_of_them(capsys: Printed) -> None:
    """The one in the test zoo was distilled above two native layers; both runtimes measure that."""
    pytest.importorskip("torch")
    torch_model = importlib.import_module("kvlingo_mlx.cuda.model")
    runtime = importlib.import_module("kvlingo_mlx.cuda.pair")
    folder = TESTS / "zoo" / "native" / "tiny-qwen3-s--tiny-qwen3-moe"
    config, weights = translator_folder.read(folder)
    models = [
        torch_model.load(str(zoo(spec.name)), dtype=torch_model.torch.float32)
        for spec in (config.source, config.target)
    ]
    arrays = {name: weights.as_float32(name) for name in weights.arrays}
    left = runtime.TorchPair(*models).receipt(config, arrays)
    assert left["native_layers"] == config.native_layers == 2
    kept = dict(config.provenance["receipt"])
    for name in ("kl", "top1", "hidden_kl"):
        assert left[name] == pytest.approx(kept.pop(name), rel=1e-3)
    assert kept == {name: left[name] for name in kept}
    arguments = ["--source", str(zoo(config.source.name)), "--target", str(zoo(config.target.name))]
    assert run(["verify", str(folder), *arguments]) == 0
    out = capsys.readouterr().out
    assert f"{left['kl']:.4f}, receipt {left['kl']:.4f}" in out
    assert "native layers" in out and "2, the number in its receipt" in out


def test_what_verify_refuses(embedded: Path, capsys: Printed) -> None:
    verb = ["verify", str(embedded)]
    alone = "--source has no effect without --target; add --target MODEL"
    fails([*verb, "--source", PAIR[0]], alone, capsys)
    fails(["verify", str(embedded.parent / "no")], "does not exist", capsys)
    swapped = ["--source", PAIR[1], "--target", PAIR[0]]
    fails([*verb, *swapped], "goes the other way round", capsys)
    blob = bytearray((embedded / "translator.safetensors").read_bytes())
    blob[-1000:] = bytes(1000)
    (embedded / "translator.safetensors").write_bytes(blob)
    fails(verb, "self-test failed for", capsys)


GOOD = Receipt(0.03, 0.95, 0, 0.5)
VERDICTS: list[tuple[Receipt, Receipt | None, bool, str]] = [
    (GOOD, Receipt(0.03, 0.95), True,
     "as its receipt says; works: KL 0.0300 in the bundled dialogues (0.5000 without"),
    (GOOD, Receipt(0.0195, 0.95), False, "KL 0.0300, expected 0.0195 within 0.0100"),
    (GOOD, Receipt(0.05, 0.95), False, "expected 0.0500 within 0.0100"),
    (replace(GOOD, kl=0.2), Receipt(0.17, 0.9), True, "says; better than nothing: KL 0.2000"),
    (GOOD, None, True, "it had no receipt"),
    (replace(GOOD, kl=float("nan")), None, True, "useless"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "receipt", "sound", "text"), VERDICTS)
def test_verdicts(found: Receipt, receipt: Receipt | None, sound: bool, text: str) -> None:
    assert verdict(found, receipt)[0] is sound and text in verdict(found, receipt)[1]


def test_a_receipt_that_is_none(embedded: Path) -> None:
    """A stranger's provenance may hold anything."""
    config = translator_folder.read_config(embedded)
    numbers = {"prompts": NAME, "kl": 1.0, "top1": 1.0}
    own = {"data": "mine.jsonl", "conversations": 8, "hidden_kl": 1.0, "kl": 1.0}
    whole = config.provenance["receipt"]
    assert receipt_of(replace(config, provenance={"receipt": {**whole, "own": own}})) is not None
    for left in (
        None, {}, {**numbers, "prompts": "dialogues-0"}, {**numbers, "kl": "low"},
        {**numbers, "native_layers": -1}, {**whole, "own": 3},
        {**whole, "own": {**own, "kl": "low"}}, {**whole, "own": {**own, "data": 3}},
    ):  # fmt: skip
        assert receipt_of(replace(config, provenance={"receipt": left})) is None
    assert receipt_of(replace(config, provenance={"receipt": numbers})) is not None


def test_the_bundled_conversations_are_alike_in_both_runtimes() -> None:
    transformers = pytest.importorskip("transformers")
    model = kv.load(PAIR[1], lazy=True)
    own = bundled(model.tokenizer, 2048)
    theirs = bundled(transformers.AutoTokenizer.from_pretrained(model.path), 2048)
    assert own == theirs and len(own) == 8 and all(s.continuation for s, _ in own)
    assert bundled(model.tokenizer, 100) == []
