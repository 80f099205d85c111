"""Families other than Qwen3 in the PyTorch training path.

Windows, two rotations, no k_norm, shared caches, normed values, latents.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import plain_models, tiny
from tests.support.fixtures import Folders, Models, Patch

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file  # noqa: E402
from transformers import Gemma3Config, Gemma3ForConditionalGeneration  # noqa: E402

import benchmarks.paper.converted_mla.on_torch  # noqa: E402, F401  (registers the family)
import kvlingo_mlx as kv  # noqa: E402
from kvlingo_mlx.cuda import model as torch_model  # noqa: E402
from kvlingo_mlx.cuda.families import PLAIN  # noqa: E402
from kvlingo_mlx.cuda.gradients import conversation_loss, read  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.pair import attention_mass  # noqa: E402
from kvlingo_mlx.cuda.translator import TorchTranslator  # noqa: E402
from kvlingo_mlx.errors import UnsupportedModelError  # noqa: E402
from kvlingo_mlx.format.tensor_file import Weights  # noqa: E402
from kvlingo_mlx.models import capture  # noqa: E402
from kvlingo_mlx.tokenization.samples import Sample  # noqa: E402
from kvlingo_mlx.training.objectives import objective_named  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, make_config  # noqa: E402
from kvlingo_mlx.training.recipe import MATCHING  # noqa: E402
from kvlingo_mlx.training.runtime import pair_of  # noqa: E402
from kvlingo_mlx.translators import build  # noqa: E402
from tests.support import trainings  # noqa: E402

NAMES = ("gemma2x32", "gemma4x16", "gemma1x32", "llama2x16", "mistral4x24", "ministral2x24")
PAIRS = (
    ("gemma2x32", "gemma4x16"),
    ("gemma4x16", "gemma1x32"),
    ("llama2x16", "mistral4x24"),
    ("mistral4x24", "llama2x16"),
    ("llama2x16", "ministral2x24"),
    ("ministral2x24", "mistral4x24"),
)
OTHERS = tuple(name for name in PLAIN if name != "qwen3")
QWEN = ("qwen3", "qwen3_moe")
LOCAL, GLOBAL = "sliding_attention", "full_attention"
KINDS = [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL]
# Tiny models of families whose caches are unlike the common one.
UNLIKE = ("gemma4", "gemma4_moe", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "converted_mla")
UNLIKE_PAIRS = (
    ("gemma4", "gemma4_moe"),  # other depth, head widths, and ratio of local to global layers
    ("gemma4_moe", "gemma4"),
    ("deepseek_v3", "latent_wide"),
    ("latent_wide", "deepseek_v2"),
    ("deepseek_v2", "glm4_moe_lite"),
    ("deepseek_v2", "converted_mla"),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
KL = objective_named("kl")


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    """Model folders by name; a narrow source and the multimodal wrapper of one beside the rest."""
    found = {name: tiny.write_model(root, name) for name in NAMES}
    found["narrow"] = tiny.write_tiny_model(
        root / "narrow", "gemma3_text", seed=10, layers=7, kv_heads=2, head_dim=16
    )
    found["stray"] = trainings.altered(found["llama2x16"], root / "stray", sliding_window=8)
    found["wrapped"] = wrapped(root / "wrapped")
    found |= {n: plain_models.write_plain_model(root / n, n) for n in OTHERS}
    for name in (*UNLIKE, *QWEN):
        model_type, options = tiny.FAMILIES[name]
        found[name] = tiny.write_tiny_model(root / name, model_type, **options)
    found["gemma4_narrow"] = tiny.write_tiny_model(
        root / "gemma4_narrow", "gemma4_text", seed=13, layers=6, kv_heads=1, head_dim=32,
        global_head_dim=48, layer_types=KINDS[:6], num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
    )  # fmt: skip
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    found["latent_wide"] = tiny.write_tiny_model(
        root / "latent_wide", "deepseek_v3", seed=12, layers=4, kv_heads=4, head_dim=16,
        kv_lora_rank=96, q_lora_rank=None, first_k_dense_replace=4,
        rope_scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 0.8},
    )  # fmt: skip
    return found


def wrapped(folder: Path) -> Path:
    """A Gemma-3 with a vision tower; as released, its config leaves out most of the text model's.

    Its width has no whole square root, so that how embeddings are scaled matters.
    """
    tiny.write_tiny_model(
        folder, "gemma3_text", seed=11, layers=7, kv_heads=4, head_dim=16, hidden=48, heads=8
    )
    text = json.loads((folder / "config.json").read_text())
    kept = ("head_dim", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
            "query_pre_attn_scalar", "rope_scaling", "sliding_window", "model_type")  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8,
        "num_attention_heads": 2, "patch_size": 4, "vision_use_head": False,
        "model_type": "siglip_vision_model",
    }  # fmt: skip
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {name: text[name] for name in kept},
        "vision_config": vision,
        "mm_tokens_per_image": 4,
        "vocab_size": text["vocab_size"],
        "eos_token_id": text["eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole = Gemma3ForConditionalGeneration(Gemma3Config(**config)).state_dict()
    tensors |= {
        name.removeprefix("model."): tensor.numpy()
        for name, tensor in whole.items()
        if "vision_tower" in name or "multi_modal" in name
    }
    tiny.write_tensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def models(folders: Folders) -> Models:
    return {name: kv.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def torch_models(folders: Folders) -> dict[str, TorchModel]:
    return {n: torch_model.load(str(f), dtype=torch.float32) for n, f in folders.items()}


def sample_of(length: int, continuation: int = 20) -> Sample:
    tokens = tiny.random_tokens(length + continuation)
    return Sample(tuple(tokens[:length]), tuple(tokens[length:]))


# The layers that read each cache, where several do.
READERS = {"gemma4": ((0,), (1, 3, 4), (2, 5))}


@pytest.mark.parametrize(
    "name", [*NAMES, *OTHERS, *QWEN, "narrow", "stray", "wrapped", *UNLIKE, "latent_wide"]
)
def test_both_runtimes_describe_and_read_alike(
    models: Models, torch_models: dict[str, TorchModel], name: str
) -> None:
    device, ours = models[name], torch_models[name]
    mine, theirs = (dataclasses.replace(m.spec(), name="", revision=None) for m in (ours, device))
    assert mine == theirs
    if name != "wrapped":  # whose config leaves it to the library
        assert ours.context_length == device.context_length
    assert device.projections.difference(ours.projections.numbers) < 1e-5  # nor in what they keep
    tokens = tiny.random_tokens(60)
    (states,) = capture.prefill(device, tokens)
    point = ours.family.points[-1]
    moved, here = capture.move(states, device, point), ours.states(tokens, point)
    for side in ("keys", "values"):
        for mine, theirs in zip(here.side(side), moved.side(side), strict=True):
            theirs = np.array(theirs[0])
            assert np.linalg.norm(mine.numpy() - theirs) < 1e-5 * np.linalg.norm(theirs)


# A source as wide as its hidden state would be badly conditioned, as in test_training.
@pytest.mark.parametrize(
    "pair",
    [
        ("narrow", "gemma4x16"), ("llama2x16", "mistral4x24"), ("llama2x16", "ministral2x24"),
        ("gemma4_narrow", "gemma4_moe"), ("latent_wide", "deepseek_v2"),
    ],
    ids=str,
)  # fmt: skip
def test_closed_form_equals_the_devices(
    models: Models, torch_models: dict[str, TorchModel], pair: tuple[str, str]
) -> None:
    """Rows weighed by attention, which each runtime takes from its own model."""
    norm = "attention_mass"
    data = [trainings.Random(60, different=99).sample(i) for i in range(12)]
    device = kv.fit(*(models[n] for n in pair), data, norm=norm).to_weights()
    source, target = (torch_models[n] for n in pair)
    config = trainings.linear_config(source, target)
    arrays = trainings.closed_form(config, pair_of(source, target), data, norm).weights
    assert set(arrays) == set(device.arrays)
    for name, array in arrays.items():
        error = np.linalg.norm(array - device.as_float32(name)) / np.linalg.norm(array)
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("pair", [*PAIRS[::2], *UNLIKE_PAIRS[::2]], ids="-".join)
def test_kl_equals_the_devices(
    models: Models, torch_models: dict[str, TorchModel], pair: tuple[str, str]
) -> None:
    source, target = (torch_models[n] for n in pair)
    for point in source.family.points:
        config = trainings.linear_config(source, target, nu=2, capture=point)
        arrays = {n: a.astype(np.float32) for n, a in trainings.random_arrays(config, 3).items()}
        weights = Weights.from_float32(arrays, "float32")
        mine = TorchTranslator.from_arrays(config, weights.arrays, "cpu")
        for length in (6, 40):
            sample = sample_of(length, 10)
            reading = read(source, target, sample, point)
            ours = conversation_loss(target, mine, reading, KL).kl
            theirs = trainings.device_kl(*(models[n] for n in pair), build(config, weights), sample)
            assert theirs > 0.01  # a random translator is a bad one
            assert abs(ours - theirs) < 1e-4


def decoded(
    model: TorchModel, sample: Sample, starts: list[int], counted: int, shift: int = 0
) -> torch.Tensor:
    """Logits of a continuation from the model's own states, each layer's from its start on.

    Negative controls alone miscount the tokens, or shift the keys' positions.
    """
    point = model.family.points[0]
    states = model.states(sample.prefix, point)
    entries = [
        model.entry(t, states.keys[t][start:], states.values[t][start:], point, start + shift)
        for t, start in enumerate(starts)
    ]
    with torch.no_grad():
        return model.logits(model.hidden(sample.continuation, model.cache(entries, counted)))


@pytest.mark.parametrize(
    "name",
    ["gemma2x32", "gemma4x16", "gemma1x32", "stray", "wrapped", *OTHERS, *UNLIKE, "latent_wide"],
)
def test_a_written_cache_is_read_as_the_models_own(
    folders: Folders, monkeypatch: Patch, name: str
) -> None:
    """Whole, or from each window on alone; the continuation is longer than any window."""
    model = trainings.double(folders[name], monkeypatch)
    for length in (3, 8, 12, 13, 16, 17, 70):
        sample = sample_of(length)
        with torch.no_grad():
            native = model.logits(model.hidden((*sample.prefix, *sample.continuation))[length:])
        starts, none = model.geometry.first_kept(length), [0] * len(model.attentions)
        for kept in (starts, none):
            assert (decoded(model, sample, kept, length) - native).abs().max() < 1e-6
        assert (decoded(model, sample, none, length, shift=9) - native).abs().max() > 1e-4
        if starts != none:
            assert (decoded(model, sample, starts, length, shift=1) - native).abs().max() > 1e-3
            assert (decoded(model, sample, starts, length - 1) - native).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gemma4x16", "llama2x16", *UNLIKE, "latent_wide"])
def test_attention_mass_is_what_the_model_attends_with(folders: Folders, name: str) -> None:
    """Against transformers' own attention weights."""
    target, sample = torch_model.load(str(folders[name]), dtype=torch.float32), sample_of(50)
    found = attention_mass(target, sample)
    target.model.set_attn_implementation("eager")
    tokens = torch.tensor([[*sample.prefix, *sample.continuation]])
    attentions = target.model(tokens, output_attentions=True).attentions
    groups = READERS.get(name, tuple((i,) for i in range(len(attentions))))
    for layer, (mine, group) in enumerate(zip(found, groups, strict=True)):
        readers = torch.stack([attentions[i][0] for i in group]).double()
        expected = readers[:, :, 50:, :50].mean(dim=(0, 1, 2))
        assert (mine - expected).abs().max() < 1e-6
        window = target.geometry.layers[layer].window or 51
        assert bool((mine[: 51 - window] == 0).all()) and bool((mine[51 - window :] > 0).all())


def test_both_spellings_of_a_rotation_are_one(
    folders: Folders, torch_models: dict[str, TorchModel], tmp_path: Path
) -> None:
    """As transformers 5 writes what tiny.py writes in the older way, for each kind of layer."""
    newer = {
        LOCAL: {"rope_type": "default", "rope_theta": 5000.0},
        GLOBAL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    }
    older = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"), ...)
    folder = trainings.altered(
        folders["gemma2x32"], tmp_path / "newer", **older, layer_types=KINDS, rope_parameters=newer
    )
    found, own = torch_model.load(str(folder), dtype=torch.float32), torch_models["gemma2x32"]
    assert found.geometry == own.geometry
    tokens = tiny.random_tokens(40)
    pairs = zip(found.states(tokens).keys, own.states(tokens).keys, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mistral4x24",
            {"sliding_window": 8},
            "attends to 8 tokens in transformers and to all in mlx-lm",
        ),
        (
            "llama2x16",
            {"sliding_window": 8, "layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL]},
            "has layers with a window in mlx-lm and none in transformers",
        ),
        ("gemma2x32", {"final_logit_softcapping": 30.0}, "has final_logit_softcapping"),
        ("llama2x16", {"hidden_act": "relu"}, "has the activation 'relu' .* computes another"),
        ("qwen3_moe", {"rope_scaling": YARN}, "'yarn' .* rotates keys without that scaling"),
        ("mistral4x24", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "compute differently;"),
    ],
    ids=str,
)
def test_what_mlx_lm_runs_otherwise_is_not_trained(
    folders: Folders, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    folder = trainings.altered(folders[name], tmp_path / "other", **change)
    with pytest.raises(UnsupportedModelError, match=message):
        torch_model.load(str(folder), dtype=torch.float32)


def test_a_window_as_long_as_the_context_is_none(folders: Folders, tmp_path: Path) -> None:
    """Mistral's is 4096 in transformers where a config says nothing; these models read 512."""
    folder = trainings.altered(folders["mistral4x24"], tmp_path / "silent", sliding_window=...)
    model = torch_model.load(str(folder), dtype=torch.float32)
    assert {layer.window for layer in model.geometry.layers} == {None}


@pytest.mark.parametrize(
    ("pair", "capture_point"),
    [*((pair, "pre_norm") for pair in (*PAIRS, *UNLIKE_PAIRS)), (UNLIKE_PAIRS[0], "post_rope")],
)
def test_gradients_on_mlx_equal_pytorchs(
    models: Models,
    torch_models: dict[str, TorchModel],
    folders: Folders,
    monkeypatch: Patch,
    pair: tuple[str, str],
    capture_point: str,
) -> None:
    """Windows that the prefix fills and passes, latents, shared caches, experts."""
    latents = "latent" in pair[0] or "deepseek" in pair[0]
    exact = pair_of(*(trainings.double(folders[name], monkeypatch) for name in pair))
    ours, theirs = (pair_of(*(found[n] for n in pair)) for found in (models, torch_models))
    plan = TrainingPlan(nu=1, capture=None if latents else capture_point)
    config = make_config(ours.source, ours.target, plan)
    for length, objective in itertools.product((5, 60), ("kl", MATCHING)):
        sample = sample_of(length)
        if latents and objective == MATCHING:
            # mlx-lm's DeepSeek-V2 keeps whole heads in its cache, which can be matched.
            for ends in (theirs,) if pair[1] == "deepseek_v2" else (ours, theirs):
                with pytest.raises(UnsupportedModelError, match="leave matching out"):
                    trainings.learnt(ends, config, sample, objective)
            continue
        loss, found = trainings.learnt(ours, config, sample, objective)
        expected, wanted = trainings.learnt(exact, config, sample, objective)
        assert loss == pytest.approx(expected, rel=1e-4)
        error = trainings.distance(found, wanted)
        if error >= 1e-5:  # a model that multiplies its own rounding does so in PyTorch's, too
            rounded = trainings.learnt(theirs, config, sample, objective)[1]
            assert error < 3 * trainings.distance(rounded, wanted), error


@pytest.mark.parametrize("name", [*NAMES, "wrapped", *UNLIKE])
def test_norms_are_those_of_the_files(folders: Folders, name: str) -> None:
    """Every family's, though 16 bits round them: what MLX reads, which rounds nothing."""
    here = kv.load(folders[name], lazy=True)
    for dtype in (torch.bfloat16, torch.float16):
        there = torch_model.load(str(folders[name]), dtype=dtype)
        assert there.norms_fingerprint == here.norms_fingerprint
