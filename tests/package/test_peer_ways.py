"""benchmarks/peer_ways.py: rivals that do less than is said would make a comparison of nothing."""

from __future__ import annotations

import sys

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.conditions import native, prefill_layers
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from tests.support import ROOT
from tests.support.native_caches import logits

sys.path.insert(0, str(ROOT / "benchmarks"))
ways = pytest.importorskip("peer_ways")


@pytest.fixture(scope="module")
def pair() -> tuple[LanguageModel, LanguageModel]:
    return kv.load("tiny-qwen3-s"), kv.load("tiny-qwen3-l")


@pytest.fixture(scope="module")
def tokens(pair: tuple[LanguageModel, LanguageModel]) -> list[int]:
    """A dialogue with facts and a question."""
    (talk,) = dialogues.held_out(1, seed=3, facts=(12, 12))
    return list(encode(pair[1], talk.messages, enable_thinking=False))


def test_what_reads_all_is_native(
    pair: tuple[LanguageModel, LanguageModel], tokens: list[int]
) -> None:
    """Speculative prefill that keeps every token, and the last 100 % of a prompt."""
    source, target = pair
    own = logits(target, native(target)(tokens), tokens[-1])
    for way in (ways.speculative(source, target, 1.0), ways.truncated(target, 1.0)):
        run = way(tokens)
        for _ in range(2):  # the source's cache is as it was
            assert np.allclose(logits(target, run(), tokens[-1]), own, atol=1e-3)
    half = ways.speculative(source, target, 0.5)(tokens)()
    kept = half[0].offset
    assert 0.4 * len(tokens) < kept < 0.65 * len(tokens)
    assert np.abs(logits(target, half, tokens[-1]) - own).max() > 0.1  # negative control


def test_attention_is_that_of_transformers(
    pair: tuple[LanguageModel, LanguageModel], tokens: list[int]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = pair[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source.path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = reference(torch.tensor([tokens]), output_attentions=True).attentions
    start = len(tokens) - ways.LOOK
    most = torch.stack(found)[:, 0].amax(dim=(0, 1))[start:, :start].mean(dim=0).numpy()
    cache = prefill_layers(source, tokens[:start], 2048, len(source.attentions))
    mine = ways.attention(source, cache, tokens[start:], start, ways.LOOK)
    assert mine.shape == most.shape and np.abs(mine - most).max() < 1e-4


def test_a_mapper_is_applied_by_the_peer(
    pair: tuple[LanguageModel, LanguageModel], tokens: list[int]
) -> None:
    """An identity mapper within one model gives that model's own cache."""
    theirs = pytest.importorskip("veloxquant_mlx.transfer")
    source = pair[0]
    spec = theirs.ModelKVSpec.from_model(source.model)
    layer = source.geometry.layers[0]
    heads, width = layer.kv_heads, layer.key_dim
    one = mx.eye(heads * width).reshape(heads * width, heads, width).transpose(1, 0, 2)
    none = mx.zeros((heads, width))
    maps = [theirs.LayerMap(t, [t], one, none, one, none) for t in range(len(source.attentions))]
    mapper = theirs.CrossModelMapper(spec, spec, theirs.MapperConfig(k=1), maps)
    cache = ways.mapped(source, source, mapper)(tokens)()
    own = logits(source, native(source)(tokens), tokens[-1])
    assert np.allclose(logits(source, cache, tokens[-1]), own, atol=1e-3)
