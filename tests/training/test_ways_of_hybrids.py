"""How the zoo's hybrids learn to look back: by attention, by their states, and by each alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.repository_tools import tool

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLD, ASKED = 30, 10
NOTHING, ATTENTION, STATES = 0, 1, 2


@pytest.fixture
def curriculum() -> Any:
    return tool("pretraining.curriculum")


@pytest.fixture(autouse=True)
def as_it_was(curriculum: Any) -> Iterator[None]:
    """What ``Ways`` puts around transformers' function is taken off again."""
    inner = curriculum.modeling_qwen3_5.torch_chunk_gated_delta_rule
    yield
    curriculum.modeling_qwen3_5.torch_chunk_gated_delta_rule = inner


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    recipe = tool("pretraining.models").MODELS["tiny-qwen3.5-s"]
    config = transformers.AutoConfig.for_model(
        recipe.model_type, **tool("pretraining.models").SHARED | recipe.shape
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def changes(model: Any, ways: Any, lost: int) -> np.ndarray:
    """By how much each layer's output (layers, tokens) changes where one told token is another."""
    ids = torch.randint(10, 1000, (1, TOLD + ASKED), generator=torch.Generator().manual_seed(1))
    drawn = {NOTHING: 0.99, ATTENTION: 0.0, STATES: 0.5}[lost]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda count: torch.full((count,), drawn))
        batch = {"ids": ids, "asked": torch.tensor([TOLD])}
        assert ways.lose(batch, SimpleNamespace(facts=(2, 4))).item() == lost
    outputs = []
    for token in (5, 999):
        ids[0, 2] = token
        with torch.no_grad():
            found = model(
                ids, use_cache=False, attention_mask=ways.masks, output_hidden_states=True
            )
        outputs.append(torch.stack(found.hidden_states[1:])[:, 0])
    return (outputs[0] - outputs[1]).abs().amax(-1).numpy()


@pytest.mark.parametrize("lost", [NOTHING, ATTENTION, STATES])
def test_what_is_left_still_tells(curriculum: Any, model: Any, lost: int) -> None:
    assert changes(model, curriculum.Ways(model), lost)[-1, -1] > 1e-3


def test_a_state_begins_anew(curriculum: Any, model: Any) -> None:
    # Later layers' convolutions still see what the layers below made of the last three told tokens.
    ways = curriculum.Ways(model)
    lost, kept = (changes(model, ways, way)[0] for way in (STATES, NOTHING))
    assert lost[TOLD:].max() < 1e-5 < 1e-2 < lost[TOLD - 5 : TOLD].min()
    assert kept[TOLD:].min() > 1e-3


def test_attention_sees_nothing_told(curriculum: Any, model: Any) -> None:
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):  # nothing but attention looks back
            layer.linear_attn.out_proj.weight.data.zero_()
    ways = curriculum.Ways(model)
    lost, kept = (changes(model, ways, way)[-1] for way in (ATTENTION, STATES))
    assert lost[TOLD:].max() == 0 < 1e-3 < lost[3:TOLD].min()
    assert kept[TOLD:].min() > 1e-4


@pytest.mark.parametrize(("head", "lag"), [(0, 2), (1, 3)])
def test_a_state_begins_by_binding_a_name_to_what_follows(
    curriculum: Any, model: Any, head: int, lag: int
) -> None:
    """A plain loop over the first layer: what is asked for is what stood ``lag`` tokens on."""
    curriculum.Ways(model)
    layer = model.model.layers[0].linear_attn
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, model.config.hidden_size))
    name, marks, value = rows[0], rows[1:lag], rows[lag]
    text = np.array([*rows[10:15], name, *marks, value, *rows[20:23], name, *marks])
    projected = text @ layer.in_proj_qkv.weight.detach().double().numpy().T
    kernel = layer.conv1d.weight.detach().double().numpy()[:, 0]
    padded = np.concatenate([np.zeros((3, projected.shape[1])), projected])
    mixed = np.array([(padded[t : t + 4] * kernel.T).sum(0) for t in range(len(text))])
    mixed = mixed / (1 + np.exp(-mixed))
    width, keys, wide = layer.head_k_dim, layer.key_dim, layer.head_v_dim
    query = mixed[:, head * width : (head + 1) * width]
    key = mixed[:, keys + head * width : keys + (head + 1) * width]
    # Each head of queries and keys has two of values.
    values = mixed[:, 2 * keys + 2 * head * wide : 2 * keys + (2 * head + 1) * wide]
    query, key = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (query, key))
    state = np.zeros((width, wide))
    for k, v in zip(key, values, strict=True):
        state += np.outer(k, v - k @ state)
    told = query[-1] @ state
    nearness = [told @ v / np.linalg.norm(told) / np.linalg.norm(v) for v in values]
    assert int(np.argmax(nearness)) == 5 + lag
