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


def test_a_layer_passes_on_what_stood_before(curriculum: Any, model: Any) -> None:
    """The second layer with states says what its projection made of the three tokens before."""
    curriculum.Ways(model)
    layer = model.model.layers[1].linear_attn
    rows = torch.randn(1, 60, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    seen = []
    layer.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        layer(rows)
        projected = layer.in_proj_qkv(rows)[0, :, 2 * layer.key_dim :].numpy()
    values = projected / (1 + np.exp(-projected))
    found = seen[0].reshape(60, -1).numpy()
    for channel in range(found.shape[1]):
        near = [
            np.corrcoef(found[3:, channel], values[3 - late : 60 - late, channel])[0, 1]
            for late in range(4)
        ]
        assert near[1 + channel % 3] > 0.7, channel
        assert sum(abs(each) < 0.5 for each in near) == 3


def test_attention_is_pointed_at_the_told_value(curriculum: Any, model: Any) -> None:
    ways = curriculum.Ways(model)
    weights = torch.rand(3, 2, 9, 9, generator=torch.Generator().manual_seed(4))
    told_at = torch.full((3, 9), -1)
    told_at[0, 6], told_at[1, 7], told_at[2, 8], told_at[2, 5] = 2, 1, 3, 4
    ways.lost = torch.tensor([NOTHING, ATTENTION, STATES])
    found = ways.pointing([weights, None, 2 * weights], told_at).item()
    costs = []
    for scale in (1, 2):
        each = []
        for row, place, told in ((0, 6, 2), (2, 8, 3), (2, 5, 4)):  # not the one without attention
            heads = [scale * float(weights[row, head, place - 1, told]) for head in (0, 1)]
            each.append(-np.log(np.mean(heads) + 1e-4))
        costs.append(np.mean(each))
    assert found == pytest.approx(np.mean(costs), rel=1e-5)
    ways.lost[:] = ATTENTION
    assert ways.pointing([weights], told_at) == 0.0


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


def test_a_friend_may_have_ones_own_name() -> None:
    """What is told of Anna is the second Anna, who stands behind "is" or "has"."""
    samples = tool("pretraining.samples")
    for sentence in dialogues.STATEMENTS:
        fact = dialogues.Fact("Anna", "friend", "Anna")
        text = samples.Text()
        text.add("Hello! " + fact.say(sentence), 1.0)
        text.asked = len(text)
        text.find(fact)
        ((_, told, width),) = text.told_at
        assert told == 7 + fact.say(sentence).rindex("Anna") and width == 4


def test_only_pairs_count_where_copying_counts_less() -> None:
    samples = tool("pretraining.samples")
    tokens = samples.train_tokenizer()
    corpus = np.arange(5000) % 900
    for stage in samples.BY_EACH_WAY[:2]:
        batch = samples.draw_batch(random.Random(1), tokens, corpus, stage)
        copied, recalled = batch["weights"] == stage.copied, batch["recalled"]
        assert 0 < stage.copied < 1 and copied.any() and recalled.any()
        assert not (copied & recalled).any()
        assert (batch["told_at"] >= 0)[recalled | copied].all()
        if stage.facts is None:
            assert torch.equal(recalled, batch["weights"] == 1.0)


def test_what_counts_less_repeats_once() -> None:
    samples = tool("pretraining.samples")
    words = list(range(50))
    for weight, most in ((0.5, 2), (1.0, 100)):
        found = [samples.copy_sample(random.Random(i), words, 100, weight) for i in range(20)]
        times = [max(sample.ids.count(word) for word in words) for sample in found]
        assert max(times) <= most and (max(times) > 2) == (weight == 1.0)
        for sample in found:
            assert all(sample.ids[a] == sample.ids[b] for a, b in sample.told_at.items())
            assert set(sample.told_at.values()) <= set(range(len(sample.ids)))
            assert list(sample.told_at) == [i for i, w in enumerate(sample.weights) if w]


def test_gates_begin_open(curriculum: Any, model: Any) -> None:
    """For whatever token, before and after."""

    def gates(layer: Any) -> torch.Tensor:
        rows = torch.nn.functional.rms_norm(model.get_input_embeddings().weight, (128,))
        return layer.linear_attn.in_proj_z(rows)

    assert gates(model.model.layers[0]).gt(0).float().mean().item() < 0.7
    curriculum.Ways(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            assert gates(layer).gt(0).float().mean().item() > 0.95
