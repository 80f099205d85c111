"""What a loaded model is called, can be run by, and is told from others by."""

import json
import shutil
from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.evaluation import lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.format.tensor_file import read_tensors
from kvlingo_mlx.models import language_model
from tests.support import tiny
from tests.support.command_line import fails
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.opened import quantised
from tests.support.tiny import write_tiny_model


def test_a_model_is_shown_in_a_line(
    models: Models, quantised_models: Models, tmp_path: Path
) -> None:
    """What one wants to know of it; the numbers are those with which it was written."""
    options = {"seed": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16"}
    folder = tiny.write_tiny_model(tmp_path / "m", "gemma3_text", **options)
    expected = "gemma3_text, 2 cache layers, KV heads 1 x 16, float16, context 512>"
    assert repr(kv.load(folder)) == f"<LanguageModel {folder}: {expected}"
    assert ", 4 bits, " in repr(quantised_models["dense"])
    assert all("\n" not in repr(m) and len(repr(m)) < 250 for m in models.values())


@pytest.mark.parametrize("name", ["tiny_qwen3_s", "tiny-qwen-s", "Tiny-qwen3-s"])
def test_an_embedded_models_name_misspelt(name: str) -> None:
    with pytest.raises(kv.MissingModelError, match=r"did you mean tiny-qwen3-s\?\); give a"):
        kv.load(name)


def test_a_folders_name_misspelt(folders: Folders, tmp_path: Path, monkeypatch: Patch) -> None:
    """A folder beside it that holds a model is named, and no other one."""
    right = tmp_path / "models" / "my-qwen-4b"
    right.parent.mkdir()
    right.symlink_to(folders["dense"])
    (right.parent / "my_qwen_4c").mkdir()  # empty
    with pytest.raises(kv.MissingModelError, match=rf"did you mean {right}\?\); give"):
        kv.load(right.parent / "my_qwen_4b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kv.MissingModelError, match=r"did you mean models/my-qwen-4b\?\), and"):
        kv.load("models/my-qwen-4")  # it could be a Hub id as well
    for far in ("models/entirely-else", "entirely-else"):
        with pytest.raises(kv.MissingModelError) as caught:
            kv.load(far)
        assert "did you mean" not in str(caught.value)


SHAPE = {"seed": 1, "layers": 2, "kv_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_in_16_bits_are_refused_on_a_cpu(
    dtype: str, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """By verbs before they compute, in Python also where no weight was read."""
    monkeypatch.setattr(language_model, "on_gpu", lambda: False)
    model = write_tiny_model(tmp_path / "moe", "qwen3_moe", dtype=dtype, **SHAPE)
    dense = write_tiny_model(tmp_path / "dense", "qwen3", dtype=dtype, **SHAPE)
    pair = ["--source", str(dense), "--target", str(model)]
    for verb in (["generate", "--strategy", "native", "--prompt", "x"], ["bench"]):
        fails([*verb, *pair], f"{model} has experts in {dtype}, and on a CPU", capsys)
        way = f"`mlx_lm.convert --hf-path {model} --mlx-path COPY -q`"
        fails([*verb, *pair], way, capsys)
    assert run(["show", str(model)]) == 0
    lazy = kv.load(model, lazy=True)
    with pytest.raises(kv.UnsupportedModelError, match=f"has experts in {dtype}"):
        kv.generate(lazy, lazy, [5, 6, 7], strategy="native", max_tokens=1)
    monkeypatch.setattr(language_model, "on_gpu", lambda: True)
    few = quantised(kv.load(model), tmp_path / "few")
    monkeypatch.setattr(language_model, "on_gpu", lambda: False)
    assert kv.generate(few, few, [5, 6, 7], strategy="native", max_tokens=1) is not None
    assert kv.load(dense).precision == dtype


RECORD = {"text": "One two three four five six seven eight nine ten. " * 3}
# One number of a matrix that is no projection of keys or values, and of one that is.
ELSEWHERE = ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.o_proj.weight")


def changed(folder: Path, copy: Path, name: str, add: float = 0.125) -> Path:
    """A copy of a model folder in which one number of one weight differs."""
    shutil.copytree(folder, copy)
    weights = read_tensors(copy / "model.safetensors")
    arrays = {n: a.copy() for n, a in weights.arrays.items()}
    arrays[name].reshape(-1)[7] += add
    tiny.write_tensors(copy / "model.safetensors", arrays)
    return copy


def test_one_number_anywhere_is_another_model(folders: Folders, tmp_path: Path) -> None:
    model = kv.load(folders["dense"])
    again = kv.load(shutil.copytree(folders["dense"], tmp_path / "copy"))
    assert again.weights_fingerprint == model.weights_fingerprint  # wherever it lies
    assert kv.load(folders["dense"], lazy=True).weights_fingerprint == model.weights_fingerprint
    for index, name in enumerate(ELSEWHERE):
        other = kv.load(changed(folders["dense"], tmp_path / f"{index}", name))
        assert other.norms_fingerprint == model.norms_fingerprint
        assert other.weights_fingerprint != model.weights_fingerprint
        if "self_attn" not in name:
            assert other.projections == model.projections  # which a translator goes by


def test_the_config_is_part_of_it_but_for_its_files_own_facts(
    folders: Folders, tmp_path: Path
) -> None:
    model = kv.load(folders["dense"])
    folder = Path(shutil.copytree(folders["dense"], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    for more, same in (({"transformers_version": "9"}, True), ({"rms_norm_eps": 0.01}, False)):
        (folder / "config.json").write_text(json.dumps(config | more))
        assert (kv.load(folder).weights_fingerprint == model.weights_fingerprint) == same


def test_eval_tells_apart_a_model_with_other_weights(folders: Folders, tmp_path: Path) -> None:
    """Of one name, as where a LoRA was fused into the folder: as the source and as the target."""
    place = tmp_path / "model"
    target = kv.load(folders["wide"])
    journal = tmp_path / "journal.jsonl"
    task = probes.continuation(target, [RECORD], 1, 512)
    found, alone = [], []
    for name in (None, ELSEWHERE[0]):
        shutil.rmtree(place, ignore_errors=True)
        if name is None:
            shutil.copytree(folders["dense"], place)
            translator = kv.fit(kv.load(place), target, [RECORD])
        else:
            changed(folders["dense"], place, name, add=4.0)
        source = kv.load(place)
        line = [lineup.native(target), lineup.translated("t", source, target, [translator])]
        for kept, scores in ((Journal(journal), found), (Journal(), alone)):
            results = evaluate(target, [task], line, kept)["continuation"]
            scores.append(results["t"][0].scores["kl"])
    assert found == alone and found[0] != found[1]
    assert lineup.identity_of(kv.load(place))["weights"] == source.weights_fingerprint
