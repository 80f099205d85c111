"""States read from caches that exist already, against those captured in a prefill."""

from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.errors import UnsupportedModelError
from tests.support.fixtures import Models
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, held, native

# A norm, a window, YaRN's gain, a part of each head with a gain, layers that do not rotate, sinks.
NAMES = (
    "qwen3", "gemma3", "llama", "ministral3", "mistral", "phi3", "cohere2", "gpt_oss", "olmo2",
    "olmo3", "hunyuan_v1_dense",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_handed_over_as_it_is(name: str, families: Models) -> None:
    """From every point that a cache can be taken back to, by the identity."""
    model, tokens = families[name], TOKENS[:-1]
    own = native(model, tokens, 25)
    points = [p for p in model.family.points
              if p != "pre_norm" or model.finishes[0].norm_weight is None]  # fmt: skip
    for point in points:
        made = kv.hand_over(
            model, model, TOKENS, translator=identity_of(model, capture=point),
            prompt_cache=native(model, tokens, 25),
        )  # fmt: skip
        for mine, theirs in zip(made, own, strict=True):
            for a, b in zip(held(mine), held(theirs), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
    assert "post_rope" in points


@pytest.mark.parametrize("name", ["gemma3", "ministral3"])
@pytest.mark.parametrize("point", ["post_norm", "post_rope"])
def test_a_saved_cache_is_handed_over(
    name: str, point: str, families: Models, tmp_path: Path
) -> None:
    model = families[name]
    translator = identity_of(model, capture=point)
    expected = kv.hand_over(model, model, TOKENS, translator=translator)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), native(model, TOKENS[:-1], 25))
    saved = str(tmp_path / "cache.safetensors")
    count = len(TOKENS) - 1
    for known in (count, 20):
        own = load_prompt_cache(saved) if known == count else native(model, TOKENS[:known], 25)
        found = kv.hand_over(
            model, model, TOKENS, translator=translator, prompt_cache=own, prefill_step_size=16
        )
        assert {cache.offset for cache in own} == {count}  # read on
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(held(mine), held(theirs), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
    own = load_prompt_cache(saved)
    found = kv.hand_over(
        model, model, TOKENS, translator=translator, prompt_cache=own, native_head=3
    )
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(held(mine), held(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(ValueError, match="holds nothing before position 43, and 36 is to be"):
        own = load_prompt_cache(saved)  # its windows end seven tokens too late
        kv.hand_over(model, model, TOKENS, translator=translator, prompt_cache=own, native_tail=7)
    with pytest.raises(ValueError, match=f"holds {count} tokens, but only 19 come before"):
        options = {"translator": translator, "prompt_cache": load_prompt_cache(saved)}
        kv.hand_over(model, model, TOKENS[:20], **options)
    empty = make_prompt_cache(model.model)
    kv.hand_over(model, model, TOKENS, translator=translator, prompt_cache=empty)
    assert {cache.offset for cache in empty} == {count}
    states = caches.read(load_prompt_cache(saved), model, point)
    with pytest.raises(ValueError, match="holds nothing before position 43, and 0 is to be"):
        translator(states)


def test_a_cache_that_has_forgotten_what_is_wanted(families: Models) -> None:
    """Rings where the model has no windows: what no layer holds is refused, not zeros."""
    model = families["qwen3"]
    translator = identity_of(model, capture="post_rope")
    own = [RotatingKVCache(max_size=16) for _ in model.attentions]
    model.model(mx.array([TOKENS[:40]]), cache=own)
    with pytest.raises(ValueError, match="holds nothing before position 24, and 0 is to be"):
        kv.hand_over(model, model, TOKENS, translator=translator, prompt_cache=own)
    model.model(mx.array([TOKENS[40:41]]), cache=own)
    kv.hand_over(model, model, TOKENS, translator=translator, prompt_cache=own, native_head=25)


def test_a_cache_of_other_tokens_shows(families: Models) -> None:
    """Negative control: it is the cache that is handed over, not what the tokens say."""
    model = families["qwen3"]
    translator = identity_of(model, capture="post_rope")
    other = native(model, TOKENS[::-1][:30], 25)
    wrong = kv.hand_over(model, model, TOKENS, translator=translator, prompt_cache=other)
    right = kv.hand_over(model, model, TOKENS, translator=translator)
    assert np.abs(held(wrong[0])[0] - held(right[0])[0]).max() > 0.1


def test_refusals(families: Models) -> None:
    model = families["qwen3"]
    own = native(model, TOKENS, 25)
    with pytest.raises(UnsupportedModelError, match="pre_norm keys cannot be read from a cache"):
        caches.read(own, model, "pre_norm")
    with pytest.raises(UnsupportedModelError, match="pre_norm keys cannot be read from a cache"):
        plain = identity_of(model, capture="pre_norm")
        kv.hand_over(model, model, [*TOKENS, 5], translator=plain, prompt_cache=own)
    with pytest.raises(ValueError, match="goal is 'latent'"):
        caches.read(own, model, "latent")
    with pytest.raises(ValueError, match="2 caches, expected 3"):
        caches.read(own[:2], model)
    with pytest.raises(ValueError, match="all filled"):
        caches.read(make_prompt_cache(model.model), model)
    with pytest.raises(ValueError, match=r"end at different positions: \[59, 60\]"):
        own[0].offset -= 1
        caches.read(own, model)
    quantised = [c.to_quantized(group_size=32, bits=8) for c in native(model, TOKENS, 25)]
    with pytest.raises(UnsupportedModelError, match="a QuantizedKVCache cannot be read"):
        caches.read(quantised, model)
    pinned = make_prompt_cache(model.model, max_kv_size=16)
    model.model(mx.array([TOKENS]), cache=pinned)
    assert [type(c) for c in pinned] == [RotatingKVCache] * 3 and type(own[0]) is KVCache
    with pytest.raises(UnsupportedModelError, match="RotatingKVCache that kept its first 4 tokens"):
        caches.read(pinned, model)
