"""Caches that a model must not go on from, and what else is checked before every hand-over."""

import math
from collections.abc import Callable
from typing import Any

from kvlingo_mlx.backend import mx

import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.caches.validation import room_for, validate_cache
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.fixtures import Models, Patch
from tests.support.identity import identity_of

TOKENS = [(7 * i * i + 3 * i + 5) % 280 for i in range(50)]
HELD = len(TOKENS) - 1


def made(model: LanguageModel) -> list[Any]:
    point = model.family.points[0]
    return kv.hand_over(model, model, TOKENS, translator=identity_of(model, capture=point))


def put(cache: list[Any], layer: int, side: str, change: Callable[[mx.array], Any]) -> None:
    setattr(cache[layer], side, change(getattr(cache[layer], side)))


DAMAGE: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "a layer too few": (lambda c: c.pop(), "has 2 layers, expected 3"),
    "a layer too many": (lambda c: c.append(c[0]), "has 4 layers, expected 3"),
    "offset": (lambda c: setattr(c[1], "offset", HELD - 1), "layer 1 .* 48, expected 49"),
    "empty layer": (lambda c: c.__setitem__(2, KVCache()), "layer 2 .* 0, expected 49"),
    "no keys": (lambda c: setattr(c[0], "keys", None), "layer 0 .* empty"),
    "another class": (
        lambda c: c.__setitem__(1, RotatingKVCache(16)),
        "layer 1 .* a RotatingKVCache, expected a KVCache",
    ),
    "dtype": (
        lambda c: put(c, 1, "values", lambda a: a.astype(mx.float16)),
        "layer 1 .* values are mlx.core.float16, expected mlx.core.float32",
    ),
    "batch of two": (
        lambda c: put(c, 0, "keys", lambda a: mx.concatenate([a, a])),
        r"layer 0 .* keys have shape \(2, 2, 256, 32\), expected \(1, 2, 49 or more, 32\)",
    ),
    "a head less": (lambda c: put(c, 2, "keys", lambda a: a[:, :1]), r"expected \(1, 2, "),
    "token-major": (lambda c: put(c, 2, "values", lambda a: a.swapaxes(1, 2)), "have shape"),
    "cut off": (lambda c: put(c, 1, "keys", lambda a: a[:, :, : HELD - 1]), "room for 48"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_refused(
    models: Models, damage: Callable[[list[Any]], Any], message: str
) -> None:
    model = models["dense"]
    cache = made(model)
    validate_cache(cache, model, HELD)
    damage(cache)
    before = [dict(vars(layer)) for layer in cache]
    with pytest.raises(kv.CacheError, match=message) as caught:
        validate_cache(cache, model, HELD)
    assert "make it anew" in str(caught.value) or "make the cache anew" in str(caught.value)
    assert [dict(vars(layer)) for layer in cache] == before


def test_a_cache_of_another_model_is_refused(models: Models) -> None:
    for name in ("wide", "moe", "narrow"):
        with pytest.raises(kv.CacheError):
            validate_cache(made(models[name]), models["dense"], HELD)


def test_rings(families: Models) -> None:
    """A ring holds its window alone; one of another size decodes something else."""
    rings = [i for i, layer in enumerate(families["gemma3"].geometry.layers) if layer.window]
    window = families["gemma3"].geometry.layers[rings[0]].window
    assert window < HELD
    cache = made(families["gemma3"])
    validate_cache(cache, families["gemma3"], HELD)
    put(cache, rings[0], "keys", lambda a: a[:, :, : window - 1])
    with pytest.raises(kv.CacheError, match=f"room for {window - 1} tokens, expected {window}"):
        validate_cache(cache, families["gemma3"], HELD)
    cache = made(families["gemma3"])
    cache[rings[0]].max_size += 1
    with pytest.raises(kv.CacheError, match="expected a RotatingKVCache of its window"):
        validate_cache(cache, families["gemma3"], HELD)


def test_what_models_fill_themselves_is_accepted(models: Models, families: Models) -> None:
    """Rings that mlx-lm wrote in chunks and token by token hold more, or in another order."""
    from mlx_lm.models.cache import make_prompt_cache

    for model in (models["dense"], models["moe"], families["gemma3"]):
        cache = make_prompt_cache(model.model)
        validate_cache(cache, model, 0)
        for start, stop in ((0, 30), (30, 48), (48, 49)):
            model.model(mx.array([TOKENS[start:stop]]), cache=cache)
            mx.eval([c.state for c in cache])
            validate_cache(cache, model, stop)


def test_every_hand_over_is_checked(models: Models, monkeypatch: Patch) -> None:
    """Also that of a generation and of a conversation's switch."""
    model, append = models["dense"], caches.append
    translator = identity_of(model)

    def short(cache: list[Any], *rest: Any) -> None:
        append(cache, *rest)
        cache[1].offset -= 1

    monkeypatch.setattr(caches, "append", short)
    with pytest.raises(kv.CacheError, match="layer 1"):
        kv.hand_over(model, model, TOKENS, translator=translator)
    with pytest.raises(kv.CacheError, match="layer 1"):
        kv.generate(model, model, TOKENS, translator=translator)
    monkeypatch.undo()
    talk = kv.Conversation({"a": model, "b": model}, [translator])
    talk.reply("a", "is it on?", max_tokens=2)
    talk.lines["b"].cache[2].offset -= 1
    with pytest.raises(kv.CacheError, match="layer 2 .* ends at position"):
        talk.reply("b", "is it on?", max_tokens=2)


def overflowing(model: LanguageModel) -> Translator:
    """Identity maps, but for values of layer 2, which become infinite."""
    translator = identity_of(model)
    weights = translator.to_weights()
    arrays = dict(weights.arrays) | {"values.2.weight": weights.arrays["values.2.weight"] * 3e38}
    return build(translator.config, type(weights)(weights.dtype, arrays))


def test_the_layer_of_a_number_that_is_none_is_named(models: Models, monkeypatch: Patch) -> None:
    model = models["dense"]
    translator = overflowing(model)
    with pytest.raises(kv.KVLingoError, match=r"is not a number.*first in layer 2's values"):
        kv.generate(model, model, TOKENS, translator=translator)
    kv.hand_over(model, model, TOKENS, translator=translator)  # nobody has read it yet
    monkeypatch.setenv("KVLINGO_DEBUG", "1")
    with pytest.raises(kv.CacheError, match="holds NaN or Inf, first in layer 2's values"):
        kv.hand_over(model, model, TOKENS, translator=translator)


def test_an_answer_ends_with_the_context(tmp_path: Any) -> None:
    """As many tokens as positions are left, and the one that no position is needed for."""
    folder = tiny.write_tiny_model(
        tmp_path / "m", "qwen3", seed=1, layers=2, kv_heads=2, head_dim=16,
        max_position_embeddings=len(TOKENS) + 3,
    )  # fmt: skip
    model = kv.load(folder)
    assert room_for(model, len(TOKENS), -1) == room_for(model, len(TOKENS), 99) == 4
    assert room_for(model, len(TOKENS), 2) == 2
    never = [
        lambda tokens, logits: logits.at[..., list(model.tokenizer.eos_token_ids)].add(-math.inf)
    ]
    for limit, expected in ((-1, 4), (300, 4), (3, 3)):
        responses = list(
            kv.stream_generate(
                model, model, TOKENS, translator=identity_of(model), max_tokens=limit,
                logits_processors=never,
            )
        )  # fmt: skip
        assert len(responses) == expected and responses[-1].finish_reason == "length"
    with pytest.raises(ValueError, match=r"54 tokens > 53 maximum, the context of .* is 53"):
        kv.generate(model, model, [*TOKENS, 1, 2, 3, 4], translator=identity_of(model))


@pytest.mark.parametrize("bad", [-1, 10**9, 2**31])
def test_ids_without_a_row(models: Models, bad: int) -> None:
    """MLX would read out of bounds, in the source or in the target."""
    model = models["dense"]
    rows = model.geometry.embedding_rows
    for token in (bad, rows):
        with pytest.raises(ValueError, match=f"token id {token} is outside the {rows} ids"):
            kv.hand_over(model, model, [5, token, 6], translator=identity_of(model))
    model.check_tokens([0, rows - 1])
    model.check_tokens([])
