"""Latent attention made of grouped-query attention: the conversion and the family."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import load_file

import benchmarks.paper.converted_mla.on_mlx  # noqa: F401  (registers the family)
import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.embedded.dialogues import for_fitting, held_out
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families import family_of, register
from kvlingo_mlx.tokenization.samples import Sample, tokenise
from tests.support import ROOT, repository_tools, tiny
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, alike, held, logits, native

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL, LARGE = "tiny-qwen3-s", "tiny-qwen3-l"
LENGTH = 256
FULL = 10_000  # more than any rank: latents that hold all keys and values
Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return repository_tools.tool("convert_mla")


@pytest.fixture(scope="module")
def convert(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Converts a model, read once, with given settings; the same ones once."""
    root = tmp_path_factory.mktemp("converted")

    def make(name: str = SMALL, folder: Path | None = None, **settings: Any) -> Path:
        folder, work = folder or zoo(name), root / f"{name}.calibration"
        if not work.exists():
            calibrate(tool, folder, work)
        out = root / "-".join([name, *(f"{k}{v}" for k, v in sorted(settings.items()))])
        if not out.exists():
            tool.convert(folder, work, out, tool.Settings(**settings))
        return out

    make.root = root  # type: ignore[attr-defined]
    return make


def calibrate(tool: ModuleType, folder: Path, work: Path, sequences: int = 12) -> None:
    records = ({"messages": d.conversation()} for d in for_fitting(200))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tool.packed(records, tokenizer, sequences, LENGTH) % tokenizer.vocab_size
    config = transformers.AutoConfig.from_pretrained(folder)
    tool.calibrate(config, tool.Weights(folder), tokens, work)


def on_torch(folder: Path, **more: Any) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, **more).eval()


def torch_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].double().numpy()


def mlx_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    return np.array(
        kv.load(folder).model(mx.array([list(tokens)]))[0].astype(mx.float32), np.float64
    )


@pytest.fixture(scope="module")
def talks() -> list[Any]:
    """Held-out dialogues up to the first answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo(SMALL))
    talks = held_out(6, seed=5)
    records = [{"messages": d.conversation()[: len(d.messages) + 1]} for d in talks]
    return [tokenise(record, tokenizer) for record in records]


def slots_of(folder: Path) -> list[list[int]]:
    return json.loads((folder / "config.json").read_text())["rotary_slots"]


def rewritten(folder: Path, out: Path, **more: Any) -> Path:
    """A copy whose config differs."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text()) | more
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_at_full_rank_and_full_rotation_it_is_the_model(
    convert: Convert, talks: list[Any], tmp_path: Path
) -> None:
    """On both runtimes, against transformers' own Qwen3; with a wrong table it is not."""
    folder, tokens = convert(rank=FULL, rotary=128), [*talks[0].prefix, *talks[0].continuation]
    expected = torch_logits(on_torch(zoo(SMALL)), tokens)
    assert np.abs(expected).max() > 10  # of a size at which 1e-4 says something
    assert np.abs(torch_logits(on_torch(folder), tokens) - expected).max() < 1e-4
    assert np.abs(mlx_logits(folder, tokens) - expected).max() < 1e-4
    wrong = [[*layer[1:], layer[0]] for layer in slots_of(folder)]
    other = rewritten(folder, tmp_path / "wrong", rotary_slots=wrong)
    assert np.abs(mlx_logits(other, tokens) - expected).max() > 1
    assert np.abs(torch_logits(on_torch(other), tokens) - expected).max() > 1


def test_moments_are_those_of_the_model_as_it_is(tool: ModuleType, tmp_path: Path) -> None:
    """Read layer by layer, against transformers' own pass over all layers."""
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    config = transformers.AutoConfig.from_pretrained(zoo(SMALL))
    tool.calibrate(config, tool.Weights(zoo(SMALL)), tokens, tmp_path)
    model, seen = on_torch(zoo(SMALL)), {}
    layer = model.model.layers[2]
    for name, module in (
        ("covariance", layer.input_layernorm),
        ("queries", layer.self_attn.q_norm),
        ("keys", layer.self_attn.k_norm),
    ):
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        model(tokens)
    found = load_file(tmp_path / tool.moments_file(2))
    rows = seen.pop("covariance").flatten(0, 1).double().numpy()
    np.testing.assert_allclose(found["covariance"], rows.T @ rows / len(rows), atol=1e-4)
    for name, heads in seen.items():
        squares = heads.reshape(len(rows), -1, 32).double().square().mean(dim=0)
        np.testing.assert_allclose(found[name], squares.numpy(), rtol=1e-4)


@pytest.fixture(scope="module")
def planted(tool: ModuleType) -> tuple[Any, np.ndarray, np.ndarray]:
    """A shape, outputs (2 * keys, hidden), and a covariance of inputs far from round."""
    rng = np.random.default_rng(0)
    shape = tool.Shape(24, 4, 2, 4, True, (1.0, 0.1))
    inputs = (
        rng.normal(size=(500, 24)) @ np.diag(np.logspace(0, -2, 24)) @ rng.normal(size=(24, 24))
    )
    return shape, rng.normal(size=(16, 24)), inputs.T @ inputs / 500


@pytest.mark.parametrize("rank", [5, 16])
def test_the_factors_are_the_svd_in_the_metric_of_the_inputs(
    tool: ModuleType, planted: tuple[Any, np.ndarray, np.ndarray], rank: int
) -> None:
    """CARE's equation 3 as it stands, with the inverted root, in NumPy; and what it leaves out."""
    shape, outputs, moment = planted
    settings = tool.Settings(shrinkage=0.05)
    found = tool.basis(torch.tensor(outputs), torch.tensor(moment), shape, settings)
    scales = found.scales.numpy()
    values, vectors = np.linalg.eigh(moment)
    root = vectors @ np.diag(0.95 * np.sqrt(values) + 0.05 * np.sqrt(values).mean()) @ vectors.T
    weights = (outputs * scales[:, None]).T
    left, sizes, right = np.linalg.svd(root @ weights, full_matrices=False)
    expected = np.linalg.inv(root) @ (left[:, :rank] * sizes[:rank]) @ right[:rank]
    directions = found.directions.numpy()[:, :rank]
    np.testing.assert_allclose(weights @ directions @ directions.T, expected, atol=1e-10)
    np.testing.assert_allclose(found.energies.numpy(), sizes**2, atol=1e-10)
    lost = np.linalg.norm(root @ (weights - expected)) ** 2
    np.testing.assert_allclose(lost, (sizes[rank:] ** 2).sum(), atol=1e-10)
    # Each head of keys weighs as much as the other, and values as much as all keys.
    energy = ((root @ weights) ** 2).sum(axis=0)
    np.testing.assert_allclose([*energy[:8].reshape(2, 4).sum(1), energy[8:].sum()], [1, 1, 2])
    plain = tool.basis(
        torch.tensor(outputs), torch.tensor(moment), shape, replace(settings, metric="weights")
    ).directions.numpy()[:, :rank]
    other = np.linalg.norm(root @ (weights - weights @ plain @ plain.T)) ** 2
    assert rank == 16 or other > 1.05 * lost


@pytest.fixture(scope="module")
def mixed(convert: Convert) -> Path:
    """A model whose layers differ in rank."""
    folder = convert(rank=48, rotary=64, ranks="total", multiple=8)
    assert len(set(json.loads((folder / "config.json").read_text())["kv_lora_ranks"])) > 1
    return folder


def test_both_runtimes_agree_and_cache_the_same_latents(mixed: Path, talks: list[Any]) -> None:
    """Read in chunks, then decoded token by token."""
    tokens, steps = list(talks[1].prefix[:90]), list(talks[1].continuation[:5])
    model, here = on_torch(mixed), kv.load(mixed)
    there, cache = transformers.DynamicCache(), make_prompt_cache(here.model)
    for part in (tokens[:40], tokens[40:], *([step] for step in steps)):
        with torch.no_grad():
            expected = model(torch.tensor([part]), past_key_values=there).logits[0].numpy()
        found = np.array(here.model(mx.array([part]), cache=cache)[0])
        assert np.abs(found - expected).max() < 1e-4
    ranks = json.loads((mixed / "config.json").read_text())["kv_lora_ranks"]
    for mine, theirs, rank in zip(cache, there.layers, ranks, strict=True):
        latents, rotary = held(mine)
        assert latents.shape == (1, 1, 95, rank) and rotary.shape == (1, 1, 95, 64 + 8)
        assert np.abs(latents - theirs.keys.numpy()).max() < 1e-4
        assert np.abs(rotary[..., :64] - theirs.values.numpy()).max() < 1e-4


@pytest.mark.parametrize("step", [7])
def test_handed_to_itself_it_answers_as_it_does_alone(mixed: Path, step: int) -> None:
    model = kv.load(mixed)
    layers = model.geometry.layers
    assert {(g.attention, g.kv_heads, g.key_dim) for g in layers} == {("latent", 1, 64)}
    translator = identity_of(model, capture="latent")
    cache = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=step)
    own = native(model, TOKENS[:-1], step)
    for mine, theirs in zip(cache, own, strict=True):
        assert all(alike(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    assert alike(logits(model, cache, TOKENS[-1]), logits(model, own, TOKENS[-1]), 1e-4)


def test_translators_between_two_converted_models(convert: Convert, tmp_path: Path) -> None:
    """Latents of another width and other pairs in the rotary key; refused for the original."""
    options = {
        "small": dict(seed=3, layers=2, kv_heads=2, head_dim=16),
        "large": dict(seed=4, layers=3, kv_heads=4, head_dim=16, hidden=96, heads=8),
    }
    plain = {n: tiny.write_tiny_model(tmp_path / n, "qwen3", **o) for n, o in options.items()}
    source = kv.load(
        convert("small", plain["small"], rank=48, rotary=16, ranks="total", multiple=8)
    )
    target = kv.load(convert("large", plain["large"], rank=64, rotary=32))
    samples = [Sample(tuple(tiny.random_tokens(200, seed)), ()) for seed in range(3)]
    fitted = kv.fit(source, target, samples)
    assert fitted.config.capture == "latent"
    loaded = kv.load_translator(fitted.save(tmp_path / "translator"))
    cache = kv.hand_over(source, target, TOKENS, translator=loaded, prefill_step_size=7)
    count = len(TOKENS) - 1
    assert {tuple(a.shape for a in held(layer)) for layer in cache} == {
        ((1, 1, count, 64), (1, 1, count, 32 + 8))
    }
    itself = kv.fit(source, source, samples)
    cache = kv.hand_over(source, source, TOKENS, translator=itself, prefill_step_size=7)
    for found, wanted in zip(cache, native(source, TOKENS[:-1], 7), strict=True):
        for a, b in zip(held(found), held(wanted), strict=True):
            assert np.linalg.norm(a - b) / np.linalg.norm(b) < 1e-3
    with pytest.raises(kv.IncompatibleTranslatorError, match="latents .* into latents only"):
        kv.fit(source, plain["large"], samples)


def test_the_package_alone_names_what_to_import(convert: Convert) -> None:
    folder = convert(rank=64, rotary=64)
    for side, code in (
        ("on_mlx", f"import kvlingo_mlx as kv; kv.load({str(folder)!r})"),
        ("on_torch", f"from kvlingo_mlx.cuda import model; model.load({str(folder)!r})"),
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        said = done.stderr.splitlines()[-1]
        assert f"import benchmarks.paper.converted_mla.{side} first" in said, said
        with pytest.raises(ValueError, match="'qwen3' is supported already"):
            register(replace(family_of("qwen3")))


def test_what_cannot_be_converted(tool: ModuleType, convert: Convert, tmp_path: Path) -> None:
    for more, said in (
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1,
          "layer_types": ["full_attention"] + ["sliding_attention"] * 3}, "windows"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE 'dynamic'"),
    ):  # fmt: skip
        folder = rewritten(zoo(SMALL), tmp_path / said, **more)
        with pytest.raises(UnsupportedModelError, match=f"this model has {said}, which cannot"):
            tool.shape_of(transformers.AutoConfig.from_pretrained(folder))
    gemma = ROOT / "tests" / "zoo" / "models" / "tiny-gemma3-s"
    for folder, kind in ((gemma, "gemma3_text"), (convert(rank=64, rotary=64), "converted_mla")):
        with pytest.raises(UnsupportedModelError, match=f"this model has model_type '{kind}'"):
            tool.shape_of(transformers.AutoConfig.from_pretrained(folder))


def test_a_conversion_that_is_cut_off_leaves_no_model(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, out = tmp_path / "work", tmp_path / "models" / "out"
    calibrate(tool, zoo(SMALL), work, sequences=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(tool.Writer, "rest", stop)
        tool.convert(zoo(SMALL), work, out, tool.Settings(rank=64))
    assert not out.exists() and [path.name for path in out.parent.iterdir()] == ["out.writing"]
    tool.convert(zoo(SMALL), work, out, tool.Settings(rank=32))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert kv.load(out).geometry.layers[0].value_dim == 32


def test_the_tool_runs_from_a_file_of_conversations(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = tmp_path / "talks.jsonl"
    lines = [json.dumps({"messages": d.conversation()}) for d in for_fitting(12)]
    data.write_text("\n".join(lines) + "\n")
    out = tmp_path / "out"
    words = f"convert {zoo(SMALL)} {out} --data {data} --sequences 8 --length 128 --rank 64".split()
    monkeypatch.setattr(sys, "argv", words)
    tool.main()
    assert kv.load(out).geometry.layers[0].value_dim == 64
    assert len(list((tmp_path / "out.calibration").iterdir())) == 4 + 1
    assert "more than the full rank" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="out exists; name another folder"):
        tool.main()
