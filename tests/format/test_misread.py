"""The table of configs that mlx-lm misreads, against transformers, both ways."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
import pytest
from mlx_lm.utils import _get_classes

import kvlingo_mlx as kv
from kvlingo_mlx.errors import KVLingoError, KVLingoWarning, UnsupportedModelError
from kvlingo_mlx.families import family_of, known_families
from kvlingo_mlx.format import misread
from kvlingo_mlx.loading import notes
from tests.support import hybrid_models, plain_models, tiny
from tests.support.fixtures import Patch

WINDOW, COUNT = 16, 48  # a window, and tokens that reach well beyond it
TOKENS = [5 + (i * i * 7 + 3 * i) % 240 for i in range(COUNT)]
ALIKE, OTHER = 1e-3, 5e-3  # relative errors of logits; nothing may lie between
DROP = object()
# By folder, the weights that it holds: transformers' own loading takes longer than all the rest.
STATES: dict[Path, dict[str, Any]] = {}
MIXED = plain_models.MIXED
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0, 2, 3, 4, 5, 6, 7, 8]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "rope_type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", **plain_models.YARN},
    "llama3": {"type": "llama3", **plain_models.LLAMA3},
    "longrope": {"type": "longrope", "rope_type": "longrope", "factor": 4.0, **LONG,
                 "original_max_position_embeddings": 32},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    **{name: {"rope_scaling": scaling} for name, scaling in SCALINGS.items()},
    "window": {"sliding_window": WINDOW},
    "window, not used": {"sliding_window": WINDOW, "use_sliding_window": False},
    "window, used": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "window, listed": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED},
    "half rotated": {"partial_rotary_factor": 0.5},
    "no share": {"partial_rotary_factor": DROP},
    "no base": {"rope_theta": DROP},
    "ReLU": {"hidden_act": "relu", "hidden_activation": "relu"},
    "normed experts": {"norm_topk_prob": True},
    "raw experts": {"norm_topk_prob": False},
    "capped": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "halves": {"rope_interleave": False},
    "both ways": {"use_bidirectional_attention": True},
}
# Where transformers passes over what the config says and mlx-lm does it: not mlx-lm's fault.
AHEAD = {("llama", "window, listed"), ("ministral3", "window, listed")}
# What transformers runs for none of ours, or under names of weights that mlx-lm does not read.
# The rotations of most are held below by what mlx-lm builds.
NOT_COMPARED = {
    "afmoe", "apertus", "deepseek", "ernie4_5_moe", "gemma3", "gemma4",
    "gemma4_unified", "glm4_moe_lite", "gpt_oss", "hunyuan_v1_dense", "joyai_llm_flash", "kimi_k2",
    "Klear", "llava", "mimo", "minicpm", "minicpm3", "minimax", "mistral3", "pixtral",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "solar_open", "telechat3", "xverse",
    *hybrid_models.CONFIGS,  # compared in test_misread_hybrids.py
}  # fmt: skip
COMPARED = sorted(set(known_families()) - NOT_COMPARED, key=str.lower)
# Of a family's config in plain_models.py or tiny.py, what is made neutral here.
PLAIN = {
    "attention_bias": False, "use_bias": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "cohere": {"tie_word_embeddings": True}, "cohere2": {"tie_word_embeddings": True},
    "deepseek_v3": {"num_key_value_heads": 4}, "deepseek_v2": {
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "gemma": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 16},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 4096},
    "gemma4_text": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                    "rope_scaling": DROP, "sliding_window": WINDOW},
    "llama": {"layer_types": DROP, "head_dim": 16},
    "ministral3": {"layer_types": DROP, "sliding_window": None},
    "mistral": {"rope_traditional": False},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "stablelm": {"use_qkv_bias": False}, "starcoder2": {"use_bias": True,
                                                        "tie_word_embeddings": True},
}  # fmt: skip


def neutral(name: str) -> dict[str, Any]:
    """A family's config without scaling and windows where it can do without."""
    if name in plain_models.CONFIGS:
        found = {**plain_models.COMMON, **plain_models.CONFIGS[name]}
    else:
        shapes = {name: plain_models.COMMON[name] for name in (
            "num_hidden_layers", "num_key_value_heads", "num_attention_heads", "head_dim",
            "hidden_size", "vocab_size", "rope_theta")}  # fmt: skip
        found = {**shapes, **tiny.COMMON[name](plain_models.HIDDEN)}
    found = {"model_type": name, **found, "rope_scaling": None, **PLAIN, **OWN.get(name, {})}
    if "rope_parameters" in found:
        del found["rope_scaling"]
    return {key: value for key, value in found.items() if value is not DROP}


def varied(config: dict[str, Any], variant: str) -> dict[str, Any]:
    return {k: v for k, v in {**config, **VARIANTS[variant]}.items() if v is not DROP}


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_random(folder: Path, config: dict[str, Any]) -> Path:
    """A random model of transformers' own, in its names of weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write(folder, config)
    made = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    seeded = torch.Generator().manual_seed(1)
    offset = 1.0 if config["model_type"].startswith("gemma") else 0.0
    for parameter, values in model.named_parameters():
        norm = "norm" in parameter and parameter.endswith("weight")
        low, high = (0.7 - offset, 1.3 - offset) if norm else (-0.26, 0.26)
        values.data.uniform_(low, high, generator=seeded)
    model.save_pretrained(folder)
    STATES[folder] = model.state_dict()
    write(folder, config)
    tiny._write_tokenizer(folder, tiny.byte_tokenizer())
    write(folder, config)
    return folder


def theirs(folder: Path) -> np.ndarray | None:
    """Logits of transformers, (tokens, vocabulary); None where it will not run the config."""
    import torch
    import transformers

    try:
        made = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(
            made, dtype=torch.float32, attn_implementation="eager"
        )
        model.load_state_dict(STATES[folder])
        model.eval()
        with torch.no_grad():
            return model(torch.tensor([TOKENS])).logits[0].double().numpy()
    except Exception:  # of many kinds: a config that its own library refuses says nothing here
        return None


def error_of(folder: Path) -> float | None:
    """The relative error of mlx-lm's logits; None where either will not run it, in words."""
    expected = theirs(folder)
    if expected is None:
        return None
    try:
        model = kv.load(folder)
    except KVLingoError:
        return None
    found = np.array(model.model(mx.array([TOKENS]))[0].astype(mx.float32)).astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def verdict(config: dict[str, Any]) -> str | None:
    """What the table says of a config for a text of ``COUNT`` tokens."""
    family = family_of(config["model_type"])
    try:
        settings = family.settings(config)
        misread.check(config["model_type"], {**config, **settings})
    except UnsupportedModelError as error:
        return str(error)
    window = misread.ignored_window(config["model_type"], config)
    return f"a window of {window}" if window is not None and window < COUNT else None


@pytest.fixture
def unchecked(monkeypatch: Patch) -> Iterator[None]:
    """Models are run whatever the table says."""
    monkeypatch.setattr(misread, "check", lambda model_type, text: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_family_is_compared_or_named_here() -> None:
    assert set(known_families()) >= NOT_COMPARED
    rows = {name for families, *_ in misread.TABLE for name in families} - {"*"}
    assert rows | set(misread.WINDOWS) | set(misread.ACTIVATIONS) <= set(known_families())
    assert not set(misread.WINDOWS) & NOT_COMPARED


@pytest.mark.parametrize("name", COMPARED)
def test_what_disagrees_is_in_the_table_and_what_agrees_is_not(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = neutral(name)
    said = {variant: verdict(varied(config, variant)) for variant in VARIANTS}
    request.getfixturevalue("unchecked")
    folder = write_random(tmp_path, config)
    errors = {}
    for variant in VARIANTS:
        write(folder, varied(config, variant))
        error = error_of(folder)
        if error is not None:
            errors[variant] = error
    assert errors["as it is"] < ALIKE and said["as it is"] is None
    assert len(errors) >= 8  # most variants are run by both
    for variant, error in errors.items():
        found = f"{name}, {variant}: relative error {error:.2g}, the table says {said[variant]}"
        assert error < ALIKE or error > OTHER, found
        assert (error > OTHER) == (said[variant] is not None) or (name, variant) in AHEAD, found
    for variant in (v for n, v in AHEAD if n == name):
        assert errors[variant] > OTHER and said[variant] is None


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
@pytest.mark.parametrize("name", sorted(set(plain_models.CONFIGS) & NOT_COMPARED))
def test_scalings_that_mlx_lm_builds_nothing_of_are_refused(name: str, kind: str) -> None:
    """Off the module itself, for families that transformers does not run too."""
    config = {"model_type": name, **plain_models.COMMON, **plain_models.CONFIGS[name]}
    text = config.get("text_config", config)
    plainly = {**text, "rope_scaling": SCALINGS[kind]}
    plainly.pop("rope_parameters", None)
    wrapped = {**config, "text_config": plainly} if "text_config" in config else plainly
    try:
        model_class, args_class = _get_classes(wrapped)
        model = model_class(args_class.from_dict(wrapped))
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError):
        return  # mlx-lm says so itself
    modules = [a.get("rope") for a in family_of(name).attentions(model)]
    rotary = [module for module in modules if isinstance(module, nn.Module)]
    passed_over = all(type(module) is nn.RoPE and module.scale == 1.0 for module in rotary)
    assert rotary
    own = name in ("hunyuan_v1_dense",)  # it scales by alpha alone, and reads nothing else
    if own:
        return
    try:
        misread.check(text.get("model_type", name), {**plainly, **{"partial_rotary_factor": 1.0}})
    except UnsupportedModelError as error:
        assert passed_over and "rope_scaling of type" in str(error)
    else:
        assert not passed_over


def test_load_refuses_in_one_line(tmp_path: Path) -> None:
    folder = plain_models.write_plain_model(tmp_path, "mixtral")
    config = json.loads((folder / "config.json").read_text())
    write(folder, config | {"rope_scaling": SCALINGS["yarn"]})
    with pytest.raises(UnsupportedModelError) as error:
        kv.load(folder)
    text = str(error.value)
    assert "mixtral has rope_scaling of type 'yarn'" in text and "without that scaling" in text
    assert "\n" not in text
    # As transformers 5 spells it, and inside a wrapper.
    modern = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    write(folder, modern | {"rope_parameters": SCALINGS["linear"] | {"rope_theta": 1e4}})
    with pytest.raises(UnsupportedModelError, match="rope_scaling of type 'linear'"):
        kv.load(folder)
    inner = {"model_type": "starcoder2", "hidden_act": "silu", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="this starcoder2 has the activation 'silu'"):
        family_of("llava").overrides({"model_type": "llava", "text_config": inner})


def test_layer_types_that_contradict_the_period_are_refused(tmp_path: Path) -> None:
    """transformers goes by the list and mlx-lm by the period."""
    folder = tiny.write_tiny_model(
        tmp_path, "gemma3_text", seed=1, layers=6, kv_heads=2, head_dim=16,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
    )  # fmt: skip
    assert len(kv.load(folder).attentions) == 6
    config = json.loads((folder / "config.json").read_text())
    write(folder, config | {"sliding_window_pattern": 2})
    with pytest.raises(UnsupportedModelError, match="every 3, and sliding_window_pattern 2"):
        kv.load(folder)


def test_a_window_that_is_left_out_ends_the_context(tmp_path: Path) -> None:
    """Shorter texts are as they should be; longer ones would be another model's."""
    folder = tiny.write_tiny_model(
        tmp_path / "m", "mistral", seed=1, layers=2, kv_heads=2, head_dim=16, sliding_window=24
    )
    with pytest.warns(KVLingoWarning, match="last 24 tokens .* beyond 24 tokens are refused"):
        model = kv.load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.load(folder)  # told once
    assert model.context_length == 24
    assert kv.generate(model, model, TOKENS[:20], strategy="native", max_tokens=30) is not None
    count = len(list(kv.stream_generate(
        model, model, TOKENS[:20], strategy="native", max_tokens=30)))  # fmt: skip
    assert count <= 5  # the window is full
    with pytest.raises(ValueError, match="is 24, its sliding window, which mlx-lm leaves out"):
        kv.generate(model, model, TOKENS[:25], strategy="native")
    tiny.amend(folder / "config.json", sliding_window=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv.load(folder).context_length == tiny.CONTEXT  # never reached: nothing to tell


def test_short_texts_of_longrope_are_told_of(tmp_path: Path, monkeypatch: Patch) -> None:
    """transformers rotates them by other factors; beyond the first length both agree."""
    config = neutral("phi3")
    folder = write_random(tmp_path, config)
    write(folder, config | {"rope_scaling": SCALINGS["longrope"]})
    with pytest.warns(KVLingoWarning, match="at most 32 tokens by short_factor"):
        kv.load(folder)
    assert error_of(folder) < ALIKE
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", TOKENS[:32])
    assert error_of(folder) > OTHER
    alike = SCALINGS["longrope"] | {"short_factor": LONG["long_factor"]}
    write(folder, config | {"rope_scaling": alike})
    monkeypatch.setattr(notes, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVLingoWarning)
        assert error_of(folder) < ALIKE


# The numbers of released config.json files that bear on this, and the context that is left.
RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-8B, YaRN as its card says": (dict(
        model_type="qwen3", num_hidden_layers=36, max_position_embeddings=131072, rope_theta=1e6,
        hidden_act="silu", sliding_window=None, use_sliding_window=False, max_window_layers=36,
        rope_scaling={"rope_type": "yarn", "factor": 4.0,
                      "original_max_position_embeddings": 32768}), 131072),
    "Qwen2-VL-7B-Instruct": (dict(
        model_type="qwen2_vl", num_hidden_layers=28, max_position_embeddings=32768,
        rope_theta=1e6, hidden_act="silu", sliding_window=32768, use_sliding_window=False,
        max_window_layers=28, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        32768),
    "Mistral-7B-v0.1": (dict(
        model_type="mistral", num_hidden_layers=32, max_position_embeddings=32768,
        rope_theta=1e4, hidden_act="silu", sliding_window=4096), 4096),
    "gemma-2-9b": (dict(
        model_type="gemma2", num_hidden_layers=42, max_position_embeddings=8192, rope_theta=1e4,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0), 4096),
    "Phi-4-mini-instruct": (dict(
        model_type="phi3", num_hidden_layers=32, max_position_embeddings=131072, rope_theta=1e4,
        hidden_act="silu", partial_rotary_factor=0.75, sliding_window=262144,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48,
                      "long_factor": [1.0] * 48}), 131072),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_taken(name: str) -> None:
    config, context = RELEASED[name]
    family_of(config["model_type"]).overrides(config)
    window = misread.ignored_window(config["model_type"], config)
    longest = config.get("max_position_embeddings", 0)
    assert min(longest, window or longest) == context
