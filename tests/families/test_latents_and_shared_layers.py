"""Families whose cache is unlike the common one: Gemma-4 and multi-head latent attention."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import load_file

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, held, logits, native

RECORDS = [{"text": "the you and use is of an other in on at it here and there " * 3}] * 2
# The layers that read each cache; the others' read their own alone.
READERS = {"gemma4": ((0,), (1, 3, 4), (2, 5))}
CACHED = {  # (heads, width) of what one layer's cache stores as keys and as values
    "converted_mla": [(1, 64), (1, 16 + 2 * 2)],
    "deepseek_v3": [(1, 64), (1, 16)],
    "glm4_moe_lite": [(1, 64), (1, 16)],
    "deepseek_v2": [(4, 48), (4, 32)],
    "minicpm3": [(4, 48), (4, 16)],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """The tiny models of these families, and Qwen3's, by name."""
    root = tmp_path_factory.mktemp("unlike")
    names = ("qwen3", "gemma4", "gemma4_moe", *tiny.LATENT)
    rows = {name: tiny.FAMILIES[name] for name in names}
    return {n: kv.load(tiny.write_tiny_model(root / n, t, **o)) for n, (t, o) in rows.items()}


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_moe", *tiny.LATENT])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """The tiny models are what PyTorch takes them for, so mlx-lm's reading is no accident."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("kvlingo_mlx.cuda.converted_mla")  # registered
    model_type, options = tiny.FAMILIES[name]
    folder = tiny.write_tiny_model(tmp_path / name, model_type, **options)
    auto = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0].numpy()
    found = np.array(kv.load(folder).model(mx.array([TOKENS]))[0])
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
        assert all(np.array_equal(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    assert np.array_equal(logits(whole, cache, TOKENS[-1]), logits(plain, own, TOKENS[-1]))


@pytest.mark.parametrize("name", ["kimi_k2", "joyai_llm_flash"])
@pytest.mark.parametrize("step", [7, 2048])
def test_what_mlx_lm_runs_as_deepseek_v3(
    name: str, step: int, models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    """Such a model keeps its own name, and its latents are captured, written and decoded from."""
    folder = Path(shutil.copytree(models["deepseek_v3"].path, tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
    model = kv.load(folder)
    assert type(model.model) is type(models["deepseek_v3"].model)
    assert model.geometry == dataclasses.replace(models["deepseek_v3"].geometry, model_type=name)
    translator = identity_of(model, capture="latent")
    cache = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=step)
    own = native(model, TOKENS[:-1], step)
    for mine, theirs in zip(cache, own, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    assert np.array_equal(logits(model, cache, TOKENS[-1]), logits(model, own, TOKENS[-1]))


def test_the_geometry_of_gemma_4(models: dict[str, LanguageModel]) -> None:
    geometry = models["gemma4"].geometry
    shapes = [(g.layer, g.kv_heads, g.key_dim, g.value_dim, g.window) for g in geometry.layers]
    # The last three layers own no cache.
    assert shapes == [(0, 2, 32, 32, 16), (1, 2, 32, 32, 16), (2, 2, 64, 64, None)]
    local, whole = geometry.rope[0], geometry.rope[2]
    assert local is not None and (local.type, local.base, local.dims) == ("default", 5000.0, 32)
    assert whole is not None and (whole.type, whole.base, whole.dims) == ("proportional", 1e6, 64)
    assert whole.scaling == (("partial_rotary_factor", 0.5),)
    large = models["gemma4_moe"].geometry.layers
    assert [(g.kv_heads, g.key_dim, g.value_dim) for g in large] == [(2, 32, 32), (1, 64, 64)] * 2


@pytest.mark.parametrize("name", tiny.LATENT)
def test_the_geometry_of_latents(models: dict[str, LanguageModel], name: str) -> None:
    model = models[name]
    for layer in model.geometry.layers:
        facts = (layer.attention, layer.kv_heads, layer.key_dim, layer.value_dim, layer.window)
        assert facts == ("latent", 1, 16, 64, None)
    (cache, *_) = native(model, TOKENS, 2048)
    stored = [(a.shape[1], a.shape[3]) for a in cache.keys_and_values()]
    assert stored == caches.stored_shape(model, 0) == CACHED[name]
    assert caches.bytes_per_token(model) == 3 * 4 * sum(h * d for h, d in CACHED[name])


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe", *tiny.LATENT])
def test_attention_mass_is_the_models_own(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Against the weights of mlx-lm's own attention, in the one pass that it takes."""
    model, prefix = models[name], 30
    sample = Sample(tuple(TOKENS[:prefix]), tuple(TOKENS[prefix : prefix + 9]))
    module = sys.modules[type(model.attentions[0]).__module__]
    seen: list[np.ndarray] = []

    def attend(queries: Any, keys: Any, values: Any, *, cache: Any, scale: float, mask: Any) -> Any:
        q, k = (np.array(a[0], np.float64) for a in (queries, keys))
        scores = q @ np.repeat(k, len(q) // len(k), axis=0).swapaxes(-1, -2) * scale
        visible = np.tril(np.ones(scores.shape[-2:], bool))
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_:
            visible = np.array(mask)
        elif isinstance(mask, mx.array):  # of latents: the rotary part of the scores
            scores = scores + np.array(mask[0], np.float64)
        weights = np.exp(np.where(visible, scores, -np.inf))
        weights = weights / weights.sum(-1, keepdims=True)
        seen.append(weights[:, prefix:, :prefix].mean(axis=(0, 1)))
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask)

    original = module.scaled_dot_product_attention
    monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    tokens = mx.array([*sample.prefix, *sample.continuation])
    mx.eval(model.model(tokens[None], cache=make_prompt_cache(model.model)))
    monkeypatch.undo()
    readers = READERS.get(name, tuple((i,) for i in range(len(seen))))
    expected = [np.mean([seen[i] for i in group], axis=0) for group in readers]
    np.testing.assert_allclose(attention_mass(model, sample, step_size=7), expected, atol=1e-6)


@pytest.mark.parametrize("step_size", [7, 2048])
@pytest.mark.parametrize("name", ["gemma4", "deepseek_v2"])
def test_a_truncated_prefill_fills_the_first_caches(
    models: dict[str, LanguageModel], name: str, step_size: int
) -> None:
    """Those of later layers, and layers that own none, are let be."""
    model = models[name]
    own = [held(cache) for cache in native(model, TOKENS, step_size)]
    for layers in range(1, len(own) + 1):
        found = conditions.prefill_layers(model, TOKENS, step_size, layers)
        assert [c.empty() for c in found] == [False] * layers + [True] * (len(own) - layers)
        for mine, theirs in zip(found, own[:layers], strict=False):
            assert all(np.array_equal(a, b) for a, b in zip(held(mine), theirs, strict=True))


def test_gemma_4_pairs_are_fitted_within_kinds(models: dict[str, LanguageModel]) -> None:
    """Depth, KV heads of global layers and the ratio of local to global ones all differ."""
    source, target = models["gemma4"], models["gemma4_moe"]
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
    models: dict[str, LanguageModel], tmp_path: Path, name: str
) -> None:
    """From absorbed latents to every way to store them."""
    source, target = models["deepseek_v3"], models[name]
    fitted = kv.fit(source, target, RECORDS, norm="attention")
    assert fitted.config.capture == "latent" and fitted.config.assignment.keys[1] == (1,)
    loaded = kv.load_translator(fitted.save(tmp_path / "translator"))
    shapes = {n: a.shape for n, a in loaded.to_weights().arrays.items()}
    assert shapes["keys.0.weight"] == (16, 16) and shapes["values.0.weight"] == (64, 64)
    cache = kv.hand_over(source, target, TOKENS, translator=loaded, prefill_step_size=7)
    assert [(a.shape[1], a.shape[3]) for a in held(cache[0])] == CACHED[name]


def test_latents_fitted_to_themselves_stay_what_they_are(models: dict[str, LanguageModel]) -> None:
    model = models["deepseek_v2"]
    # The first layer's latents depend on the token alone: they need many different ones.
    samples = [Sample(tuple(tiny.random_tokens(200, seed)), ()) for seed in range(3)]
    translator = kv.fit(model, model, samples)
    cache = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=7)
    for found, wanted in zip(cache, native(model, TOKENS[:-1], 7), strict=True):
        for a, b in zip(held(found), held(wanted), strict=True):
            assert np.linalg.norm(a - b) / np.linalg.norm(b) < 1e-3


def test_mixed_pairs_and_points_are_refused(
    models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    latent, common = models["deepseek_v3"], models["qwen3"]
    for pair in ((latent, common), (common, latent)):
        with pytest.raises(kv.IncompatibleTranslatorError, match="latents .* into latents only"):
            kv.fit(*pair, RECORDS)
    with pytest.raises(ValueError, match="capture is 'pre_norm'; for .* must be one of latent"):
        kv.fit(latent, latent, RECORDS, capture="pre_norm")
    with pytest.raises(ValueError, match="capture is 'latent'; .* one of pre_norm, post_norm"):
        kv.fit(common, common, RECORDS, capture="latent")
    with pytest.raises(kv.IncompatibleTranslatorError, match=r"layer 0 stores \(heads, width\)"):
        conditions.reused(models["deepseek_v2"], latent)
    folder = identity_of(latent, capture="latent").save(tmp_path / "translator")
    path = folder / translator_folder.CONFIG_FILE
    path.write_text(path.read_text().replace('"capture": "latent"', '"capture": "pre_norm"'))
    with pytest.raises(kv.MalformedTranslatorError, match="capture is 'pre_norm', but layer 0 of"):
        kv.load_translator(folder)
