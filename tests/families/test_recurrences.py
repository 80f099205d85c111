"""Recurrences against float64 loops over tokens, which are written from the papers' formulas.

Gated delta rule (Yang et al. 2024): S <- g S; S <- S + beta (v - S k) k^T. Mamba-2 (Dao and Gu
2024): S <- exp(dt A) S + dt x B^T. LFM2's convolution keeps its last products. Nothing here is
of the package or of mlx-lm but the weights, and the inputs that its projections make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.format.geometry import Recurrence
from kvlingo_mlx.models.capture import tap_keys_and_values
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import hybrid_models, plain_models
from tests.support.hybrid_models import states_read

TOKENS = [(11 * i * i + 5 * i + 3) % 280 for i in range(70)]
SPAN = len(TOKENS) - 1
Array = np.ndarray
# Pairs of unlike widths, and one of two families.
WIDER = {"hidden_size": 96, "num_key_value_heads": 1}
DELTA = {"linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 16}
PAIRS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "gated_delta": (("qwen3_next", {}), ("qwen3_5", {**WIDER, **DELTA})),
    "mamba2": (("granitemoehybrid", {}), ("nemotron_h", {})),
    "short_conv": (("lfm2_moe", {}), ("lfm2", {**WIDER, "block_dim": 96})),
    "attention to gated_delta": (("smollm3", {}), ("qwen3_5", {**WIDER, **DELTA})),
    "attention to mamba2": (("llama", {"layer_types": None}), ("nemotron_h", {})),
    "mamba2 to short_conv": (("granitemoehybrid", {}), ("lfm2", {})),
    "gated_delta to mamba2": (("qwen3_next", {}), ("granitemoehybrid", {})),
}


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def exact(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def convolved(module: Any, inputs: Array, kernel: int) -> Array:
    """Each channel's weighted sum of its last ``kernel`` inputs, through SiLU."""
    weight = exact(module.conv1d.weight)[..., 0]  # (channels, kernel)
    bias = exact(module.conv1d.bias) if "bias" in module.conv1d else 0.0
    found = np.zeros_like(inputs)
    for t in range(len(inputs)):
        for j in range(kernel):
            if t - kernel + 1 + j >= 0:
                found[t] += weight[:, j] * inputs[t - kernel + 1 + j]
    return silu(found + bias)


def gated_delta(module: Any, shape: Recurrence, keys: Array, values: Array) -> list[Array]:
    """The tail (kernel - 1, channels) and the state (heads, value, key) after all tokens."""
    mixed = convolved(module, keys, shape.kernel)
    width, per = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    steep, bias = np.exp(exact(module.A_log)), exact(module.dt_bias)
    state = np.zeros((shape.value_heads, shape.value_dim, shape.key_dim))
    for t in range(len(keys)):
        k = mixed[t, width : 2 * width].reshape(shape.key_heads, shape.key_dim)
        k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + 1e-6)
        v = mixed[t, 2 * width :].reshape(shape.value_heads, shape.value_dim)
        strengths, decays = np.split(values[t], 2)
        for head in range(shape.value_heads):
            key = k[head // per]
            state[head] *= np.exp(-steep[head] * softplus(decays[head] + bias[head]))
            missing = v[head] - state[head] @ key
            state[head] += sigmoid(strengths[head]) * np.outer(missing, key)
    return [keys[1 - shape.kernel :], state]


def mamba2(module: Any, shape: Recurrence, keys: Array, values: Array) -> list[Array]:
    """The tail and the state (heads, head dim, state size) after all tokens."""
    mixed = convolved(module, keys, shape.kernel)
    inner, per = shape.value_heads * shape.value_dim, shape.value_heads // shape.key_heads
    decay, bias = -np.exp(exact(module.A_log)), exact(module.dt_bias)
    state = np.zeros((shape.value_heads, shape.value_dim, shape.key_dim))
    for t in range(len(keys)):
        x = mixed[t, :inner].reshape(shape.value_heads, shape.value_dim)
        b = mixed[t, inner:].reshape(2, shape.key_heads, shape.key_dim)[0]
        for head in range(shape.value_heads):
            step = softplus(values[t, head] + bias[head])
            state[head] *= np.exp(step * decay[head])
            state[head] += step * np.outer(x[head], b[head // per])
    return [keys[1 - shape.kernel :], state]


def short_conv(module: Any, shape: Recurrence, keys: Array, values: Array) -> list[Array]:
    """The tail of products (kernel - 1, channels) after all tokens."""
    return [(keys * values)[1 - shape.kernel :]]


RULES: Mapping[str, Callable[..., list[Array]]] = {
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "short_conv": short_conv,
}


def inputs_of(model: LanguageModel, step: int = SPAN) -> list[tuple[Array, Array]]:
    """Each layer's keys and values (T, width) or inputs, as its projections make them of TOKENS.

    ``step`` tokens are read at once. In float32 a hybrid's own layers differ by some 1e-5 between
    chunks of two sizes, and what is tested here is what becomes of its inputs.
    """
    cache, parts = make_prompt_cache(model.model), []
    with tap_keys_and_values(model) as take:
        for start in range(0, SPAN, step):
            model.model(mx.array([TOKENS[start : min(start + step, SPAN)]]), cache=cache)
            states = take(start)
            parts.append(
                [
                    (exact(k[0]), exact(v[0]))
                    for k, v in zip(states.keys, states.values, strict=True)
                ]
            )
    return [
        tuple(map(np.concatenate, zip(*layer, strict=True))) for layer in zip(*parts, strict=True)
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, ...]]:
    """Both models of each pair."""
    root = tmp_path_factory.mktemp("pairs")

    def made(folder: Path, name: str, seed: int, **more: Any) -> LanguageModel:
        if name in hybrid_models.CONFIGS:
            return kv.load(hybrid_models.write_hybrid_model(folder, name, seed=seed, **more))
        return kv.load(plain_models.write_plain_model(folder, name, seed=seed, **more))

    return {
        pair: tuple(made(root / f"{pair}-{i}", n, i, **more) for i, (n, more) in enumerate(both))
        for pair, both in PAIRS.items()
    }


@pytest.mark.parametrize("step", [7])
@pytest.mark.parametrize("pair", PAIRS)
def test_states_are_those_of_the_formulas(
    pair: str, step: int, pairs: dict[str, tuple[LanguageModel, ...]]
) -> None:
    source, target = pairs[pair]
    translator = hybrid_models.random_translator(source, target)
    made = kv.hand_over(source, target, TOKENS, translator=translator, prefill_step_size=step)
    inputs, weights = inputs_of(source, step), translator.to_weights().arrays
    layers = 0
    for t, layer in enumerate(target.geometry.layers):
        if layer.recurrence is None:
            assert made[t].offset == SPAN
            continue
        layers += 1
        keys, values = (
            np.concatenate(
                [inputs[s][i] for s, i in states_read(source, layer, reads[t], index)], axis=-1
            )
            @ weights[f"{side}.{t}.weight"].astype(np.float64).T
            for index, (side, reads) in enumerate(
                (("keys", translator.config.assignment.keys),
                 ("values", translator.config.assignment.values))
            )
        )  # fmt: skip
        expected = RULES[layer.attention](target.attentions[t], layer.recurrence, keys, values)
        found = [exact(array)[0] for array in caches.held(made[t]).values()]
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
        other = RULES[layer.attention](
            target.attentions[t], layer.recurrence, keys[::-1], values[::-1]
        )
        assert np.abs(found[-1] - other[-1]).max() > 1e-2 * np.abs(other[-1]).max()
    assert layers >= 3
