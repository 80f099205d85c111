"""Mappers of VeloxQuant-MLX against that package itself: what it computes, and what it writes."""

from __future__ import annotations

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
from kvlingo_mlx.store.exporting import export
from kvlingo_mlx.store.importing import import_translator
from kvlingo_mlx.tokenization.samples import Sample
from tests.support.command_line import fails
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
def pairs(
    models: dict[str, LanguageModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[LanguageModel, LanguageModel]]:
    """Qwen3 to its mixture of experts (k_norm), and Llama to Llama of other depth (none)."""
    root = tmp_path_factory.mktemp("llamas")
    deep, flat = (
        kv.load(write_tiny_model(root / str(n), "llama", seed=n, layers=n, kv_heads=2, head_dim=16))
        for n in (4, 3)
    )
    return {"qwen3": (models["dense"], models["moe"]), "llama": (deep, flat)}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("back", [True, False], ids=["rotated back", "as cached"])
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("pair", ["qwen3", "llama"])
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
    with pytest.raises(ValueError, match="holds an export; replace it with --force"):
        export(str(tmp_path / "ours"), "veloxquant", tmp_path / "mapper", models=(
            str(source.path), str(target.path)))  # fmt: skip


# ---- what is refused --------------------------------------------------------------------------


@pytest.fixture
def mapper(pairs: Any, tmp_path: Path) -> Path:
    """A sound mapper's folder, of Qwen3 to its mixture of experts."""
    return fitted(*pairs["qwen3"], k=2).save(tmp_path / "mapper")


def said(folder: Path, change: Any) -> None:
    """Change the manifest."""
    path = folder / "manifest.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


CHANGES = {
    "version": (
        lambda m: m.update(format_version=2),
        "format_version is 2, this kvlingo-mlx reads 1",
    ),
    "no version": (lambda m: m.pop("format_version"), "format_version is None"),
    "huge version": (lambda m: m.update(format_version=10**99), f"{10**59}..., this kvlingo-mlx"),
    "huge depth": (
        lambda m: m["source"].update(n_layers=10**30),
        "expected 1 to 1024",
    ),
    "huge target": (lambda m: m["target"].update(n_layers=10**8), "target.n_layers is 100000000"),
    "negative": (lambda m: m["target"].update(n_layers=-1), "target.n_layers is -1, expected 1 to"),
    "no table": (lambda m: m.pop("source"), "source is missing, expected an object"),
    "a list": (lambda m: m.update(config=[]), "config is [], expected an object"),
    "layers": (lambda m: m.update(layers={}), "layers is {}, expected a list"),
    "null": (lambda m: m.update(layers=[None]), "layers has None, expected target_layer and"),
    "another layer": (
        lambda m: m["layers"].append({"target_layer": 9, "source_layers": [0]}),
        "layers has one for layer 9",
    ),
    "base": (
        lambda m: m["source"].update(rope_theta=5e5),
        "keys of the source were rotated back by base 500000",
    ),
    "interleaved": (lambda m: m["target"].update(rope_traditional=True), "target.rope_traditional"),
    "scaled": (lambda m: m["source"].update(rope_scaling={"factor": 8}), "source.rope_scaling"),
    "a layer": (lambda m: m["layers"].pop(1), "layers has none for target layer 1"),
    "twice": (lambda m: m["layers"].append(m["layers"][0]), "layers has target layer 0 twice"),
    "no source layer": (
        lambda m: m["layers"][0].update(source_layers=[0, 9]),
        "reads keys of source layers [0, 9], expected different ones from 0 to 2",
    ),
    "a name": (
        lambda m: m["layers"][0].update(source_layers=["0", "1"]),
        "reads keys of source layers",
    ),
    "space": (lambda m: m["config"].update(content_space="yes"), "config.content_space is 'yes'"),
    "heads": (lambda m: m["target"].update(n_kv_heads=4), "and", "says (4, 32, 32)"),
    "depth": (lambda m: m["source"].update(n_layers=5), "has cache layers 3, and"),
    "family": (lambda m: m["target"].update(model_type="llama"), "model type qwen3_moe, and"),
    "one fewer": (
        lambda m: m["layers"][0].update(source_layers=[0]),
        "config.k is 2, and target layer 0 reads 1 source layers of 3",
    ),
    "fewer": (
        lambda m: [
            layer.update(source_layers=[0]) for layer in (m["config"].update(k=1), *m["layers"])[1:]
        ],
        "0.w_k has shape (2, 128, 32)",
    ),
    "k": (lambda m: m["config"].update(k=3), "config.k is 3, and target layer 0 reads 2 source"),
    "k of no kind": (lambda m: m["config"].update(k="2"), "config.k is '2', expected a whole"),
    "dtype": (
        lambda m: m["config"].update(dtype="float32"),
        "config.dtype is 'float32', and mapper.safetensors holds float16",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(
    pairs: Any, mapper: Path, name: str, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    change, *messages = CHANGES[name]
    said(mapper, change)
    ends = [str(m.path) for m in pairs["qwen3"]]
    for message in messages:
        fails(["import", str(mapper), "--source", ends[0], "--target", ends[1]], message, capsys)
    assert not store.exists()


def test_models_must_be_named_and_may_be_elsewhere(
    pairs: Any, mapper: Path, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    fails(["import", str(mapper)], "does not name its source; give --source and --target", capsys)
    assert run(["import", str(mapper), "--source", "me/small", "--target", "me/large"]) == 0
    told = capsys.readouterr()
    assert "not checked against me/small" in told.err and "float16" in told.out
    (folder,) = store.iterdir()
    config = translator_folder.read_config(folder)
    assert config.source.name == "me/small" and config.capture == "post_norm"
    # It serves the pair whose shape it has, and no other.
    source, target = pairs["qwen3"]
    assert kv.generate(source, target, "Hello", max_tokens=2, translator=kv.load_translator(folder))
    with pytest.raises(kv.IncompatibleTranslatorError):
        kv.generate(target, source, "Hello", translator=kv.load_translator(folder))


def test_a_folder_says_what_it_is(
    mapper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ["--source", "me/a", "--target", "me/b"]
    (mapper / "translator_config.json").write_text("{}")
    fails(["import", str(mapper), *ends], "holds both a translator of ours and a mapper", capsys)
    assert run(["import", str(mapper), "--from", "veloxquant", *ends]) == 0
    (mapper / "translator_config.json").unlink()
    weights = (mapper / "mapper.safetensors").rename(tmp_path / "elsewhere")
    message = "mapper.safetensors: is missing; a mapper is a folder with manifest.json and"
    fails(["import", str(mapper), *ends], message, capsys)
    (tmp_path / "empty").mkdir()
    fails(["import", str(tmp_path / "empty")], "holds neither of them (translator_config", capsys)
    weights.rename(mapper / "mapper.safetensors")
    (mapper / "manifest.json").write_text("[]")
    fails(["import", str(mapper), *ends], "holds a list, expected an object", capsys)


def test_numbers_that_no_map_has_are_told_by_their_own_names(
    mapper: Path, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    path = mapper / "mapper.safetensors"
    arrays = {n: np.array(a) for n, a in mx.load(str(path)).items()}
    for number, message in ((np.nan, "0.w_v holds NaN or Inf"), (2e4, "0.w_v holds 2e+04; this")):
        arrays["0.w_v"][0, 0, 0] = number
        mx.save_safetensors(str(path), {n: mx.array(a) for n, a in arrays.items()})
        fails(["import", str(mapper), "--source", "me/a", "--target", "me/b"], message, capsys)
    assert not store.exists()


def test_a_dtype_that_cannot_hold_the_numbers(
    mapper: Path, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    """Weights of 1e-9 are all zero in float16; bfloat16 has them."""
    path = mapper / "mapper.safetensors"
    arrays = {n: mx.array(a).astype(mx.float32) for n, a in mx.load(str(path)).items()}
    arrays["1.w_v"] *= 1e-9
    mx.save_safetensors(str(path), arrays)
    said(mapper, lambda m: m["config"].update(dtype="float32"))
    words = ["import", str(mapper), "--source", "me/a", "--target", "me/b", "--dtype"]
    message = "values.1.weight would change by 100% in float16, whose least numbers are larger"
    fails([*words, "float16"], message, capsys)
    assert not list(store.glob("*"))
    assert run([*words, "bfloat16"]) == 0


def test_a_link_is_followed(mapper: Path, tmp_path: Path) -> None:
    """The folder goes where the link leads, and the link stays."""
    link, far = tmp_path / "link", tmp_path / "far"
    words = ["import", str(mapper), "--source", "me/a", "--target", "me/b", "--out", str(link)]
    link.symlink_to(far)
    for more in ([], ["--force"]):
        assert run([*words, *more]) == 0
        assert link.is_symlink() and (far / "translator_config.json").exists()
    assert run(["export", str(link), "--to", "npz", "--out", str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] == ".") == []


@pytest.mark.parametrize("family", ["glm4", "gemma3_text"])
def test_keys_that_the_peer_rotates_back_wrongly_are_refused(
    plain: Any, pairs: Any, mapper: Path, tmp_path: Path, family: str
) -> None:
    """GLM-4 rotates half of each head, Gemma-3 its layers by two bases; the peer knows neither."""
    if family == "gemma3_text":
        shape = {"layers": 6, "kv_heads": 2, "head_dim": 16}
        source = kv.load(write_tiny_model(tmp_path / family, family, seed=1, **shape))
    else:
        source = plain(family)
    first = source.geometry.layers[0]
    shape = {"n_kv_heads": first.kv_heads, "head_dim": first.key_dim}
    more = {"model_type": family, "n_layers": len(source.geometry.layers), "rope_theta": 1e4}
    said(mapper, lambda m: m["source"].update(shape, **more))
    with pytest.raises(kv.IncompatibleTranslatorError, match="were rotated back by base 10000"):
        import_translator(str(mapper), models=(source, pairs["qwen3"][1]))


def test_what_a_mapper_cannot_say_is_not_exported(
    pairs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = pairs["qwen3"]
    data = [{"text": "One two three four five. " * 30}]
    for settings, reason in (
        ({"capture": "pre_norm"}, "it reads keys before the norm (pre_norm)"),
        ({"capture": "post_norm", "head_mixing": False}, "it is linear, head-wise"),
    ):
        kv.fit(source, target, data, **settings).save(tmp_path / reason)
        words = [
            "export",
            str(tmp_path / reason),
            "--to",
            "veloxquant",
            "--out",
            str(tmp_path / "o"),
        ]
        fails(words, reason, capsys)
        assert not (tmp_path / "o").exists()
    fails([*words[:3], "gguf", *words[4:]], "--to is 'gguf'; it must be one of", capsys)
