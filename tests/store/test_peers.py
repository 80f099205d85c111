"""Mappers of VeloxQuant-MLX against that package itself: what it computes, and what it writes."""

import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store.importing import import_translator
from kvlingo_mlx.tokenization.samples import Sample
from tests.support.fixtures import Models, Pair, Temp
from tests.support.tiny import random_tokens, write_tiny_model

theirs = pytest.importorskip("veloxquant_mlx.transfer")
TOKENS = random_tokens(240, seed=5)
PROMPT = random_tokens(60, seed=9)
TOLERANCE = {"float32": 1e-5, "float16": 1e-3}


def read(model: LanguageModel, tokens: list[int]) -> dict[int, Any]:
    """The model's own cache as the peer takes it: layer to keys and values (heads, tokens, dim)."""
    cache = make_prompt_cache(model.model)
    model.model(mx.array([tokens]), cache=cache)
    return {i: tuple(a[0] for a in c.keys_and_values()) for i, c in enumerate(cache)}


def fitted(source: LanguageModel, target: LanguageModel, **settings: Any) -> Any:
    """The peer's own mapper, fitted by the peer."""
    specs = (theirs.ModelKVSpec.from_model(m.model) for m in (source, target))
    config = theirs.MapperConfig(**settings)
    kvs = read(source, TOKENS), read(target, TOKENS)
    return theirs.fit_mapper(*kvs, *specs, mx.arange(len(TOKENS)), config)


def furthest(ours: list[Any], peers: dict[int, Any]) -> float:
    """The largest difference of two caches, relative to the largest number."""
    found = 0.0
    for layer, cache in enumerate(ours):
        for mine, other in zip(cache.keys_and_values(), peers[layer], strict=True):
            one, two = (np.array(a.astype(mx.float32), np.float64) for a in (mine[0], other))
            assert one.shape == two.shape
            found = max(found, float(np.abs(one - two).max() / np.abs(two).max()))
    return found


@pytest.fixture(scope="module")
def pairs(models: Models, tmp_path_factory: Temp) -> dict[str, Pair]:
    """Qwen3 to its mixture of experts (k_norm), and Llama to Llama of other depth (none)."""
    root = tmp_path_factory.mktemp("llamas")
    deep, flat = (
        kv.load(write_tiny_model(root / str(n), "llama", seed=n, layers=n, kv_heads=2, head_dim=16))
        for n in (4, 3)
    )
    return {"qwen3": (models["dense"], models["moe"]), "llama": (deep, flat)}


@pytest.mark.parametrize(
    ("pair", "k", "back", "dtype"),
    [
        ("qwen3", 1, True, "float32"),
        ("qwen3", 8, False, "float32"),
        ("llama", 2, True, "float16"),
        ("llama", 2, False, "float32"),
    ],
)
def test_an_imported_mapper_fills_the_cache_that_the_peer_fills(
    pairs: Any, tmp_path: Path, pair: str, k: int, back: bool, dtype: str
) -> None:
    source, target = pairs[pair]
    mapper = fitted(source, target, k=k, content_space=back, dtype=dtype)
    folder = mapper.save(tmp_path / "mapper")
    ends = ["--source", str(source.path), "--target", str(target.path)]
    assert run(["import", str(folder), *ends, "--out", str(tmp_path / "ours")]) == 0
    translator = kv.load_translator(tmp_path / "ours")
    assert translator.config.nu == min(k, len(source.attentions))
    ours = kv.hand_over(source, target, PROMPT, translator=translator)
    peers = theirs.transfer_cache(read(source, PROMPT[:-1]), theirs.load_mapper(folder))
    assert furthest(ours, peers) < TOLERANCE[dtype]
    # Negative control: of a text with one other token, and of heads in another order.
    other = theirs.transfer_cache(read(source, [*PROMPT[:-2], 7]), theirs.load_mapper(folder))
    assert furthest(ours, other) > 0.05
    turned = {n: (k[::-1], v) for n, (k, v) in peers.items()}
    assert furthest(ours, turned) > 0.05


@pytest.mark.parametrize("capture", ["post_norm", "post_rope"])
@pytest.mark.parametrize("pair", ["qwen3", "llama"])
def test_the_peer_reads_what_is_exported(
    pairs: Any, tmp_path: Path, pair: str, capture: str
) -> None:
    source, target = pairs[pair]
    translator = kv.fit(source, target, [Sample(tuple(TOKENS), ())], capture=capture, nu=2)
    translator.save(tmp_path / "ours")
    ends = ["--source", str(source.path), "--target", str(target.path)]
    words = ["export", str(tmp_path / "ours"), "--to", "veloxquant", *ends]
    assert run([*words, "--out", str(tmp_path / "mapper")]) == 0
    mapper = theirs.load_mapper(tmp_path / "mapper")
    peers = theirs.transfer_cache(read(source, PROMPT[:-1]), mapper)
    ours = kv.hand_over(source, target, PROMPT, translator=translator)
    assert furthest(ours, peers) < TOLERANCE["float32"]
    again = import_translator(
        str(tmp_path / "mapper"), models=(source, target), out=tmp_path / "again"
    )
    assert again.dtype == "float32"
    weights = [translator_folder.read(tmp_path / name)[1] for name in ("ours", "again")]
    for name, array in weights[0].arrays.items():
        assert np.array_equal(array, weights[1].arrays[name])


@pytest.mark.parametrize("family", ["glm4", "gemma3_text"])
def test_keys_that_the_peer_rotates_back_wrongly_are_refused(
    families: Any, pairs: Any, tmp_path: Path, family: str
) -> None:
    """GLM-4 rotates half of each head, Gemma-3 its layers by two bases; the peer knows neither."""
    if family == "gemma3_text":
        shape = {"layers": 6, "kv_heads": 2, "head_dim": 16}
        source = kv.load(write_tiny_model(tmp_path / family, family, seed=1, **shape))
    else:
        source = families[family]
    first = source.geometry.layers[0]
    shape = {"n_kv_heads": first.kv_heads, "head_dim": first.key_dim}
    more = {"model_type": family, "n_layers": len(source.geometry.layers), "rope_theta": 1e4}
    mapper = fitted(*pairs["qwen3"], k=2).save(tmp_path / "mapper")
    said = json.loads((mapper / "manifest.json").read_text())
    said["source"] |= shape | more
    (mapper / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(kv.IncompatibleTranslatorError, match="were rotated back by base 10000"):
        import_translator(str(mapper), models=(source, pairs["qwen3"][1]))
