"""Two models or translators that compute other things are never taken for one another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_flatten

import kvlingo_mlx as kv
from kvlingo_mlx.evaluation import lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.format.fingerprints import Checked, weights_fingerprint
from kvlingo_mlx.format.tensor_file import read_tensors
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny

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


# ---- models ---------------------------------------------------------------------------------


def expected_sums(array: np.ndarray) -> bytes:
    """The rows' sums of an array's bits, modulo 2^32, by NumPy in 64 bits."""
    bits = array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])
    return (bits.astype(np.uint64).sum(axis=-1) % 2**32).astype(np.uint32).tobytes()


@pytest.mark.parametrize("bits", [None, 4])
def test_every_weight_is_read(
    bits: int | None, models: dict[str, LanguageModel], quantised_models: dict[str, LanguageModel]
) -> None:
    """Against the same hash written out in NumPy, quantised weights included."""
    model = models["moe"] if bits is None else quantised_models["moe"]
    found = []
    for name, array in tree_flatten(model.model.parameters()):
        plain = np.array(array)
        flat = plain.reshape(-1)
        sample = flat[:: max(1, flat.size // 256)].tobytes()
        kind = f"{array.dtype} {array.shape}"
        found.append(Checked(name, kind, expected_sums(plain), sample))
    assert model.weights_fingerprint == weights_fingerprint(found, model.config)
    assert len({c.name for c in found}) == len(found) > 20


def test_one_number_anywhere_is_another_model(folders: dict[str, Path], tmp_path: Path) -> None:
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
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = kv.load(folders["dense"])
    folder = Path(shutil.copytree(folders["dense"], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    for more, same in (({"transformers_version": "9"}, True), ({"rms_norm_eps": 0.01}, False)):
        (folder / "config.json").write_text(json.dumps(config | more))
        assert (kv.load(folder).weights_fingerprint == model.weights_fingerprint) == same


# ---- translators ------------------------------------------------------------------------


def test_eval_tells_apart_a_model_with_other_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
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
