"""Latent attention made of grouped-query attention: conversion, family, and recovery."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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
from kvlingo_mlx.tokenization.samples import tokenise
from tests import support
from tests.support.native_caches import TOKENS, held

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL, LARGE = "tiny-qwen3-s", "tiny-qwen3-l"
LENGTH = 256
FULL = 10_000  # more than any rank: latents that hold all keys and values
Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return support.tool("convert_mla")


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
    slots = json.loads((folder / "config.json").read_text())["rotary_slots"]
    wrong = [[*layer[1:], layer[0]] for layer in slots]
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


def test_the_package_alone_names_what_to_import(convert: Convert) -> None:
    code = (
        "import kvlingo_mlx as kv\nfrom kvlingo_mlx.cuda import model\n"
        "for load in (kv.load, model.load):\n"
        f"    try: load({str(convert(rank=64, rotary=64))!r})\n"
        "    except kv.UnsupportedModelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for side, said in zip(("on_mlx", "on_torch"), done.stdout.splitlines(), strict=True):
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
    gemma = support.ROOT / "tests" / "zoo" / "models" / "tiny-gemma3-s"
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


# ---- the fine-tune that brings a converted model back towards its original, and the baseline's


@pytest.fixture(scope="module")
def tune() -> Iterator[ModuleType]:
    """The tool, in a process group of this process alone."""
    facts = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in facts.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group("gloo")
        yield support.tool("recover_mla")
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    told = [{"messages": d.conversation()} for d in for_fitting(40, facts=(4, 8))]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in told))
    return path


@pytest.fixture(scope="module")
def converted(convert: Convert) -> Path:
    """The small model with latents that are too narrow to answer well."""
    return convert(rank=16, rotary=64)


def recipe_of(tune: ModuleType, **more: Any) -> Any:
    return tune.Recipe(**{
        "steps": 8, "rate": 2e-4, "tokens": 512, "held_out": 4, "validate_every": 100,
        "keep_every": 3, **more,
    })  # fmt: skip


def talks_of(tune: ModuleType, data: Path, recipe: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo(SMALL))
    return tune.Conversations([str(data)], tokenizer, recipe)


def test_the_rate_rises_for_two_percent_and_falls_in_a_line(tune: ModuleType) -> None:
    recipe = tune.Recipe()
    found = [recipe.factor(step) for step in (0, 1199, 2399, 2400, 61_200, 119_999)]
    assert found == pytest.approx([1 / 2400, 0.5, 1, 1, 0.5, 1 / 117_600])


def test_the_losses_are_the_papers(tune: ModuleType, data: Path, converted: Path) -> None:
    """Against NumPy, of whole logits: the last turn alone, and KL from the model's own side."""
    sample = talks_of(tune, data, recipe_of(tune)).sample(3)
    assert sample.continuation and "assistant" not in sample.continuation
    auto = transformers.AutoModelForCausalLM
    models = [auto.from_pretrained(f, dtype=torch.float32).eval() for f in (converted, zoo(SMALL))]
    with torch.no_grad():
        found = [float(loss) for loss in tune.losses(*models, sample)]
        ids = torch.tensor([sample.prefix + sample.continuation])
        rows = [m(ids).logits[0].double().numpy()[len(sample.prefix) - 1 : -1] for m in models]
    ours, theirs = (r - np.log(np.exp(r).sum(-1, keepdims=True)) for r in rows)
    ce = -ours[np.arange(len(ours)), list(sample.continuation)].mean()
    kl = (np.exp(ours) * (ours - theirs)).sum(axis=-1).mean()
    other = (np.exp(theirs) * (theirs - ours)).sum(axis=-1).mean()
    assert found == pytest.approx([ce, kl], rel=1e-4)
    assert abs(other - kl) > 0.01 * kl


def test_losses_on_several_exchanges(tune: ModuleType, data: Path) -> None:
    """From the first of their answers on, questions included; the text as a plain join of turns."""
    (talk,) = for_fitting(1, facts=(4, 8))
    turns = talk.conversation()
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo(SMALL))
    for exchanges in (1, 3, 99):
        talks = talks_of(tune, data, recipe_of(tune, exchanges=exchanges))
        sample = talks._sample((0, 0))
        first = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"][-exchanges:][0]
        header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        expected = "".join(
            f"{header}{turn['content']}<|im_end|>\n" if turn["role"] == "assistant"
            else f"<|im_start|>user\n{turn['content']}<|im_end|>\n"
            for turn in turns[first:]
        )  # fmt: skip
        found = tokenizer.decode(sample.continuation)
        assert found.strip() == expected.removeprefix(header).strip()
        assert tokenizer.decode(sample.prefix).endswith(header)


def run(tune: ModuleType, model: Path, talks: Any, folder: Path, steps: int | None = None) -> Any:
    """A run to its end, or as it stands after ``steps`` lines of its log."""
    recovery = tune.Recovery(model, zoo(SMALL), talks.recipe, "cpu")
    settings = {**vars(talks.recipe), "model": str(model)}
    lines = []
    for line in tune.recover(recovery, talks, folder, settings):
        lines.append(line)
        if steps is not None and line["step"] == steps and "norm" in line:
            os.kill(os.getpid(), signal.SIGINT)
    return recovery, lines


def weights(recovery: Any) -> dict[str, np.ndarray]:
    found = recovery.model.state_dict().items()
    return {n: getattr(t, "full_tensor", lambda t=t: t)().numpy().copy() for n, t in found}


def test_a_run_recovers_and_a_stopped_one_goes_on(
    tune: ModuleType, data: Path, converted: Path, tmp_path: Path
) -> None:
    """KL and cross-entropy on held-out conversations fall; stopped at step 4 it ends the same."""
    talks = talks_of(tune, data, recipe_of(tune))
    whole, lines = run(tune, converted, talks, tmp_path / "whole")
    assert lines[-1]["held_out_kl"] < 0.9 * lines[0]["held_out_kl"]
    assert lines[-1]["held_out_ce"] < lines[0]["held_out_ce"]
    with pytest.raises(KeyboardInterrupt):
        run(tune, converted, talks, tmp_path / "stopped", 4)
    again, rest = run(tune, converted, talks, tmp_path / "stopped")
    assert [line["step"] for line in rest] == [5, 6, 7, 8, 8] and rest[-1] == lines[-1]
    first, second = weights(whole), weights(again)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    whole.write(converted, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(np.array_equal(first[name], loaded[name].numpy()) for name in first)
    config = (tmp_path / "out" / "config.json").read_text()
    assert config == (converted / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    other = talks_of(tune, data, recipe_of(tune, rate=1e-4))
    with pytest.raises(ValueError, match=r"other settings \(rate was 0.0002, is 0.0001\)"):
        run(tune, converted, other, tmp_path / "whole")


def test_the_original_begins_at_no_divergence(tune: ModuleType, data: Path, tmp_path: Path) -> None:
    """The baseline is the same run of another model."""
    talks = talks_of(tune, data, recipe_of(tune, steps=2))
    _, lines = run(tune, zoo(SMALL), talks, tmp_path / "baseline")
    assert abs(lines[0]["held_out_kl"]) < 1e-6 < lines[-1]["held_out_kl"]


def test_the_command_writes_no_diverged_model(
    tune: ModuleType, data: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By its end; the same command with a usable one writes it, and lets go of the run's state."""
    monkeypatch.setattr(tune, "start", lambda device: None)  # the tests' own group
    monkeypatch.setattr(tune.dist, "destroy_process_group", lambda: None)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    words = f"recover {converted} {zoo(SMALL)} {out} --data {data} --steps 1 --tokens 512"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--held-out", "2"])
    validate = tune.Recovery.validate

    def lost(self: Any, held_out: Any) -> dict[str, float]:
        return {**validate(self, held_out), "held_out_ce": float("nan")}

    with monkeypatch.context() as patch:
        patch.setattr(tune.Recovery, "validate", lost)
        with pytest.raises(SystemExit, match="so no model is written; remove"):
            tune.main()
    assert not out.exists() and (partial / "state").exists()
    tune.main()
    assert out.exists() and [path.name for path in partial.iterdir()] == ["log.jsonl"]
    assert "the loss on what is held out was nan" not in capsys.readouterr().out
    with tune.alone(tmp_path / "other", wait=0):
        sys.argv[3] = str(tmp_path / "other")
        with pytest.raises(SystemExit, match=r"process \d+ is writing other in"):
            tune.main()
