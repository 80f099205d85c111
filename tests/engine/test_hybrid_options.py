"""What goes back over a cache, or looks into one: with hybrids it works, or is refused at once."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.folding import check_foldable
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import TESTS, hybrid_models
from tests.support.guards import with_receipt
from tests.support.identity import TOKENS, identity_of
from tests.support.native_caches import native

refused = kv.UnsupportedModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("m") / "delta"
    return kv.load(hybrid_models.write_hybrid_model(folder, "qwen3_5", num_hidden_layers=4))


@pytest.fixture
def reads(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the model is given at each call from now on."""
    model.cache_dtype  # noqa: B018  (found by a call, once)
    found: list[int] = []
    cls = type(model.model)
    call = cls.__call__

    def noted(self: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
        found.append(inputs.shape[1])
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(cls, "__call__", noted)
    return found


def test_a_translator_that_cannot_be_made_is_not_advised(model: LanguageModel) -> None:
    """Between two tokenizers, where ``fit`` would refuse the same pair."""
    other = kv.load(TESTS / "zoo/models/tiny-mistral")
    with pytest.raises(kv.MissingTranslatorError, match="none can be made: .*recurrent states"):
        kv.generate(other, model, "Hello", max_tokens=2)
    with pytest.raises(refused, match="recurrent states"):
        kv.fit(other, model, [{"text": "Hello there, all of you"}])
    with pytest.raises(kv.MissingTranslatorError, match="store; make one with"):
        kv.generate(model, other, "Hello", max_tokens=2)


def test_what_would_go_back_is_refused_before_anything_is_read(
    model: LanguageModel, reads: list[int]
) -> None:
    same = identity_of(model)
    given: dict[str, Any] = {"translator": same, "max_tokens": 4}
    for options, message in (
        ({"heal": "interleaved"}, "cannot be healed while it answers: 3 of its 4 .*recurrent"),
        ({"heal": "layers"}, "cannot be healed while it answers"),
        ({"draft_model": model}, "draft_model cannot be used: .*keeps recurrent states"),
    ):
        with pytest.raises(refused, match=message):
            kv.generate(model, model, TOKENS, **given, **options)
    own = native(model, TOKENS[:9], 9)
    reads.clear()
    for options, message in (
        ({"heal": "idle"}, "cannot be healed while it answers"),
        ({"prompt_cache": own}, "recurrent states, and what went into them is not read back"),
    ):
        with pytest.raises(refused, match=message):
            kv.hand_over(model, model, TOKENS, translator=same, **options)
    with pytest.raises(kv.IncompatibleTranslatorError, match="no keys for queries to meet"):
        check_foldable(model, model, identity_of(model, capture="post_rope"))
    with pytest.raises(refused, match="what went into them is not read back"):
        caches.read(own, model)
    assert not reads
    kv.generate(model, model, TOKENS, **given)
    assert reads  # the control


def test_a_guard_looks_on(model: LanguageModel) -> None:
    """The last tokens are read once, after the translation, so nothing has to go back."""
    same = with_receipt(identity_of(model))
    *_, last = kv.stream_generate(model, model, TOKENS, translator=same, guard=8, max_tokens=4)
    assert last.guarded is not None and last.guarded.divergence == pytest.approx(0, abs=1e-5)
    plain = kv.generate(model, model, TOKENS, translator=same, max_tokens=4)
    guarded = kv.generate(model, model, TOKENS, translator=same, guard=8, max_tokens=4)
    assert guarded == plain


def test_bits_are_those_of_keys_and_values(model: LanguageModel) -> None:
    same = identity_of(model)
    cache = kv.hand_over(model, model, TOKENS, translator=same)
    before = [dict(caches.held(each)) for each in cache]
    caches.quantise(cache, 8, 32)
    kinds = [type(each).__name__ for each in cache]
    assert kinds == [*["ArraysCache"] * 3, "QuantizedKVCache"]
    for index in range(3):
        for name, array in caches.held(cache[index]).items():
            assert mx.array_equal(array, before[index][name]).item()
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "max_tokens": 6}
    found = kv.generate(model, model, TOKENS, translator=same, **options)
    talk = kv.Conversation(dict.fromkeys("ab", model), [same])
    talk.reply("a", "hi there", **options)
    assert found and talk.reply("b", "is it on?", **options)
    for line in talk.lines.values():
        own = native(model, line.tokens, 7)
        for mine, theirs in zip(line.cache, own, strict=True):
            if caches.is_recurrent(mine):  # the line read the answer itself, with no bits
                for one, other in zip(mine.cache, theirs.cache, strict=True):
                    assert mx.allclose(one, other, atol=1e-4).item()
