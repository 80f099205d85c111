"""Families whose cache is unlike the common one: Gemma-4 and multi-head latent attention."""

import dataclasses
import json
import shutil
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import reuse
from kvlingo_mlx.format import translator_folder
from tests.support import tiny
from tests.support.fixtures import Models
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, alike, held, logits, native

RECORDS = [{"text": "the you and use is of an other in on at it here and there " * 3}] * 2


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_moe", *tiny.LATENT])
def test_transformers_computes_the_same_logits(name: str, families: Models) -> None:
    """The tiny models are what PyTorch takes them for, so mlx-lm's reading is no accident."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("benchmarks.paper.converted_mla.on_torch")  # registered
    auto, model = transformers.AutoModelForCausalLM, families[name]
    reference = auto.from_pretrained(model.path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    found = np.array(model.model(mx.array([TOKENS]))[0])
    assert np.abs(expected).max() > 1  # of a size at which 1e-4 says something
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified"])
def test_a_multimodal_models_text_part_is_the_text_model(name: str, tmp_path: Path) -> None:
    """One translator serves both: their facts and norms are the same, and so is the cache."""
    model_type, options = tiny.FAMILIES[name.removesuffix("_unified")]
    text = tiny.write_tiny_model(tmp_path / "text", model_type, **options)
    inner = json.loads((text / "config.json").read_text())
    outer = {"model_type": name, "text_config": inner, "vocab_size": inner["vocab_size"]}
    shutil.copytree(text, tmp_path / "whole")
    (tmp_path / "whole" / "config.json").write_text(json.dumps(outer))
    tensors = load_file(text / "model.safetensors")
    prefix = "language_model.model." if name == "gemma3" else "model.language_model."
    renamed = {prefix + n.removeprefix("model."): tensor for n, tensor in tensors.items()}
    tower = "vision_tower.weight" if name == "gemma3" else "model.vision_tower.weight"
    renamed[tower] = np.zeros((2, 2), np.float32)
    tiny.write_tensors(tmp_path / "whole" / "model.safetensors", renamed)
    whole, plain = kv.load(tmp_path / "whole"), kv.load(text)
    assert dataclasses.replace(whole.spec(), name="") == dataclasses.replace(plain.spec(), name="")
    cache = kv.hand_over(plain, whole, TOKENS, translator=identity_of(whole), prefill_step_size=7)
    own = native(plain, TOKENS[:-1], 7)
    for mine, theirs in zip(cache, own, strict=True):
        assert all(alike(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    assert alike(logits(whole, cache, TOKENS[-1]), logits(plain, own, TOKENS[-1]), 1e-4)


def test_gemma_4_pairs_are_fitted_within_kinds(families: Models) -> None:
    """Depth, KV heads of global layers and the ratio of local to global ones all differ."""
    source, target = families["gemma4"], families["gemma4_moe"]
    translator = kv.fit(source, target, RECORDS * 2, norm="attention")
    assert translator.config.capture == "pre_norm"
    assert translator.config.assignment.keys == ((0,), (2,), (1,), (2,))
    assert translator.to_weights().arrays["keys.1.weight"].shape == (64, 128)
    cache = kv.hand_over(source, target, TOKENS, translator=translator, prefill_step_size=7)
    for found, wanted in zip(cache, native(target, TOKENS[:-1], 7), strict=True):
        assert [a.shape for a in held(found)] == [a.shape for a in held(wanted)]
    # Values are normed on their way into the cache: one head has the length of its width's root.
    values = held(cache[1])[1]
    np.testing.assert_allclose((values**2).mean(axis=-1), 1, atol=1e-4)
    with pytest.raises(ValueError, match="one KV-head count per model, .* layers of 1 and 2;"):
        kv.fit(source, target, RECORDS, head_mixing=False)


@pytest.mark.parametrize("name", tiny.LATENT)
def test_latents_are_fitted_saved_and_handed_over(
    families: Models, tmp_path: Path, name: str
) -> None:
    """From absorbed latents to every way to store them."""
    source, target = families["deepseek_v3"], families[name]
    fitted = kv.fit(source, target, RECORDS, norm="attention")
    assert fitted.config.capture == "latent" and fitted.config.assignment.keys[1] == (1,)
    loaded = kv.load_translator(fitted.save(tmp_path / "translator"))
    shapes = {n: a.shape for n, a in loaded.to_weights().arrays.items()}
    assert shapes["keys.0.weight"] == (16, 16) and shapes["values.0.weight"] == (64, 64)
    cache = kv.hand_over(source, target, TOKENS, translator=loaded, prefill_step_size=7)
    own = native(target, TOKENS[:-1], 7)
    assert [a.shape for a in held(cache[0])] == [a.shape for a in held(own[0])]


def test_mixed_pairs_and_points_are_refused(families: Models, tmp_path: Path) -> None:
    latent, common = families["deepseek_v3"], families["qwen3"]
    for pair in ((latent, common), (common, latent)):
        with pytest.raises(kv.IncompatibleTranslatorError, match="latents .* into latents only"):
            kv.fit(*pair, RECORDS)
    with pytest.raises(ValueError, match="capture is 'pre_norm'; for .* must be one of latent"):
        kv.fit(latent, latent, RECORDS, capture="pre_norm")
    with pytest.raises(ValueError, match="capture is 'latent'; .* one of pre_norm, post_norm"):
        kv.fit(common, common, RECORDS, capture="latent")
    with pytest.raises(kv.IncompatibleTranslatorError, match=r"layer 0 stores \(heads, width\)"):
        reuse.reused(families["deepseek_v2"], latent)
    folder = identity_of(latent, capture="latent").save(tmp_path / "translator")
    path = folder / translator_folder.CONFIG_FILE
    path.write_text(path.read_text().replace('"capture": "latent"', '"capture": "pre_norm"'))
    with pytest.raises(kv.MalformedTranslatorError, match="capture is 'pre_norm', but layer 0 of"):
        kv.load_translator(folder)
