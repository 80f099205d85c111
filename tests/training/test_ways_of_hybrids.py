"""How the zoo's hybrids learn to look back: by attention, by their states, and by each alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.embedded import dialogues
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
        assert ways.lose(batch, SimpleNamespace(shares=(0.3, 0.7))).item() == lost
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


@pytest.mark.parametrize("tokenizer", ["QWEN", "MISTRAL"])
def test_where_values_were_told(tokenizer: str) -> None:
    """What stands there is the value, told of the same name and attribute."""
    samples = tool("pretraining.samples")
    chat = getattr(tool("zoo_chats"), tokenizer)
    tokens = samples.train_tokenizer(chat)
    rng = random.Random(0)
    places = 0
    for _ in range(12):
        sample = samples.chat_sample(rng, tokens, 20, 6, 5, 1.0, chat)
        for asked, told in sample.told_at.items():
            assert sample.ids[asked] == sample.ids[told] and told < sample.asked <= asked
            assert sample.recalled[asked] and sample.weights[asked] == samples.VALUE_WEIGHT
            answer = tokens.decode(sample.ids[asked - 8 : asked + 2])
            around = tokens.decode(sample.ids[max(told - 12, 0) : told + 8])
            name = next(word for word in reversed(answer.split()) if word in dialogues.NAMES[:20])
            assert sample.recalled[asked] in around and name in around
            places += 1
    assert places > 12 * 6
    words = samples.content_words(tokens)
    sample = samples.pairs_sample(rng, words, 100, 1)
    assert len(sample.told_at) == sum(sample.weights) == sample.recalled.count("pair") > 5
    for asked, told in sample.told_at.items():
        first, second = (sample.ids[place - 2 : place + 1] for place in (asked, told))
        assert first == second and told < sample.asked <= asked
