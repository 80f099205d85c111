"""A guard over a prompt's last tokens: what it measures, when it doubts, and what follows."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.grading import receipt_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.guards import logs, with_receipt
from tests.support.healings import in_a_row, noted
from tests.support.ranks import no_end
from tests.support.tiny import Case

NAMES = ("tiny-qwen3-s", "tiny-qwen3-l")
CASES = (
    Case("dense4x16", "moe2x32", nu=2),
    Case("gemma2x32", "gemma4x16"),
    Case("same2x32", "shared2x32", nu=2),
    Case("mla48", "mla64"),
)
load = functools.cache(kv.load)


@pytest.mark.parametrize("step", [16, 2048])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_two_plain_readings(case: Case, step: int, tmp_path: Path) -> None:
    """KL and both losses, by plain calls of the models on caches that nobody watched."""
    source, target, folder = tiny.write_case(tmp_path, case)
    small, large = load(source), load(target)
    translator = with_receipt(build(*translator_folder.read(folder)))
    tokens, number = tiny.random_tokens(70), 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.KVLingoWarning)
        (response,) = kv.stream_generate(
            small, large, tokens, translator=translator, guard=number, max_tokens=1,
            prefill_step_size=step,
        )  # fmt: skip
    found, last = response.guarded, len(tokens) - 1 - number
    p = logs(small, make_prompt_cache(small.model), tokens[:-1])[last:]
    cache = kv.hand_over(
        small, large, tokens[: last + 1], translator=translator, prefill_step_size=step
    )
    q = logs(large, cache, tokens[last:-1])
    true = np.array(tokens[last + 1 :])
    assert found is not None and found.tokens == number
    assert found.divergence == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4)
    assert found.source_loss == pytest.approx(-p[np.arange(number), true].mean(), rel=1e-4)
    assert found.target_loss == pytest.approx(-q[np.arange(number), true].mean(), rel=1e-4)
    limit = 0.5 + 4 * 0.1 * (32 / number) ** 0.5  # fewer tokens than the receipt's tell less
    assert found.limit == pytest.approx(limit)
    assert bool(found.doubts) == (found.divergence > limit)
    assert response.read_tokens == number + 1


def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    """As in one family's released sizes: the same tokens, and rows that no token has."""
    facts: dict[str, Any] = dict(seed=1, layers=3, kv_heads=2, head_dim=32)
    small = kv.load(tiny.write_tiny_model(tmp_path / "a", "qwen3", **facts))
    large = kv.load(tiny.write_tiny_model(tmp_path / "b", "qwen3", **facts, vocab=tiny.VOCAB + 24))
    fitted = kv.fit(small, large, samples())
    tokens = tiny.random_tokens(70)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.KVLingoWarning)
        (response,) = kv.stream_generate(
            small, large, tokens, translator=with_receipt(fitted), guard=20, max_tokens=1
        )
    last = len(tokens) - 21
    p = logs(small, make_prompt_cache(small.model), tokens[:-1])[last:]
    cache = kv.hand_over(small, large, tokens[: last + 1], translator=fitted)
    q = logs(large, cache, tokens[last:-1])[:, : tiny.VOCAB]
    q -= np.log(np.exp(q).sum(-1, keepdims=True))
    assert response.guarded is not None
    expected = (np.exp(p) * (p - q)).sum(-1).mean()
    assert response.guarded.divergence == pytest.approx(expected, rel=1e-4)


def samples() -> list[dict[str, Any]]:
    return [{"messages": talk.conversation()} for talk in dialogues.for_fitting(2, facts=(4, 6))]


# ---- trained models ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[LanguageModel, LanguageModel, Translator]:
    source, target = (kv.load(zoo(name)) for name in NAMES)
    return source, target, kv.load_translator(TRANSLATORS / "--".join(NAMES))


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [list(t.messages) for t in dialogues.held_out(count, seed=11, facts=(12, 28))]


def answered(
    pair: tuple[LanguageModel, LanguageModel, Translator], prompt: Any, **options: Any
) -> tuple[list[int], kv.GenerationResponse]:
    source, target, translator = pair
    options = {"translator": translator, "max_tokens": 12, **options}
    found = list(kv.stream_generate(source, target, prompt, enable_thinking=False, **options))
    return [response.token for response in found], found[-1]


def test_a_good_translation_is_not_doubted_and_answers_as_without_a_guard(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", kv.KVLingoWarning)
        for prompt in prompts(8):
            tokens, last = answered(pair, prompt, guard=32)
            assert last.guarded is not None and not last.guarded.doubts
            assert tokens == answered(pair, prompt, native_tail=32)[0]


def test_wrong_maps_are_doubted(
    pair: tuple[LanguageModel, LanguageModel, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warned of, read behind, or read anew; each of eight prompts."""
    wrong = conditions.shuffled(pair[2])
    chunks = noted(monkeypatch)
    for prompt in prompts(8):
        with pytest.warns(kv.KVLingoWarning, match="is in doubt: the models are .* nats apart"):
            answered(pair, prompt, translator=wrong, guard=32)
        assert not chunks
        tokens, last = answered(pair, prompt, translator=wrong, guard=32, on_doubt="reread")
        own, alone = answered(pair, prompt, translator=None, strategy="native")
        assert tokens == own and last.strategy == "native" and last.translated_tokens == 0
        assert last.translator is None and last.read_tokens == alone.read_tokens
        assert last.guarded is not None and len(last.guarded.doubts) == 1
        _, last = answered(pair, prompt, translator=wrong, guard=32, on_doubt="heal")
        assert last.strategy == "accelerator" and chunks and chunks[0].start == 0
        chunks.clear()
        answered(pair, prompt, guard=32, on_doubt="heal")  # nothing to doubt: nothing is read
        assert not chunks


@pytest.mark.parametrize("layers", [0, 2])
def test_what_was_read_for_the_guard_alone_is_read_again(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
) -> None:
    """Its tokens attended to translated ones, which are wrong here."""
    target, wrong = pair[1], conditions.shuffled(pair[2])
    chunks = noted(monkeypatch)
    tokens = target.tokenizer.apply_chat_template(
        prompts(1)[0], add_generation_prompt=True, enable_thinking=False
    )
    for _ in kv.stream_generate(
        *pair[:2], tokens, translator=wrong, guard=32, on_doubt="heal", native_layers=layers,
        max_tokens=300, logits_processors=[no_end(target)],
    ):  # fmt: skip
        pass
    assert in_a_row(chunks) == len(tokens) - 1
    own = make_prompt_cache(target.model)
    target.model(mx.array([tokens[:-1]]), cache=own)
    for a, b in zip(chunks[-1].cache, own, strict=True):
        for side in ("keys", "values"):
            found, wanted = (np.array(getattr(c, side)[0, :, : len(tokens) - 1]) for c in (a, b))
            assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_prompt_beyond_the_longest_is_doubted(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    translator = pair[2]
    facts = {**translator.config.provenance, "longest_prefix": 100}
    short = build(dataclasses.replace(translator.config, provenance=facts), translator.to_weights())
    with pytest.warns(kv.KVLingoWarning, match="made and tested on prefixes of at most 100"):
        _, last = answered(pair, prompts(1)[0], translator=short, guard=32)
    assert last.guarded is not None and len(last.guarded.doubts) == 1


def test_a_handed_over_cache_is_read_anew(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    source, target, translator = pair
    tokens = target.tokenizer.apply_chat_template(
        prompts(1)[0], add_generation_prompt=True, enable_thinking=False
    )
    own = make_prompt_cache(target.model)
    target.model(mx.array([tokens[:-1]]), cache=own)
    wrong = conditions.shuffled(translator)
    for found, near, heal in (
        (wrong, True, None),
        (translator, False, None),
        (wrong, True, "idle"),
    ):
        cache = kv.hand_over(
            source, target, tokens, translator=found, guard=32, on_doubt="reread", heal=heal
        )
        errors = [
            np.abs(
                np.array(a.keys[..., : a.offset, :]) - np.array(b.keys[..., : b.offset, :])
            ).max()
            for a, b in zip(cache, own, strict=True)
        ]
        assert (max(errors) < 1e-3) == near
        assert heal is None or cache.left == 0


def test_the_receipt_says_what_is_usual(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    """Mean and spread over the bundled prefixes at each quarter, against the guard itself."""
    from kvlingo_mlx.embedded.bundled import bundled

    source, target, translator = pair
    receipt = receipt_of(translator.config)
    assert receipt is not None and receipt.guard is not None
    found = []
    for sample, _ in bundled(target.tokenizer, 2048):
        for quarter in (1, 2, 3, 4):
            stop = quarter * (len(sample.prefix) - 1) // 4
            tokens = list(sample.prefix[: stop + 1])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", kv.KVLingoWarning)
                (response,) = kv.stream_generate(
                    source, target, tokens, translator=translator, guard=32, max_tokens=1
                )
            assert response.guarded is not None
            found.append(response.guarded.divergence)
    assert receipt.guard.mean == pytest.approx(np.mean(found), rel=1e-3)
    assert receipt.guard.spread == pytest.approx(np.std(found, ddof=1), rel=1e-3)
    assert receipt.guard.limit(32) == pytest.approx(
        np.mean(found) + 4 * np.std(found, ddof=1), rel=1e-3
    )


# ---- the verb, and bad input ------------------------------------------------------------------


def test_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--source", str(zoo(NAMES[0])), "--target", str(zoo(NAMES[1]))]
    words += ["--no-thinking", "--max-tokens", "5"]
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(prompts(1)[0]))
    assert run([*words, "-c", "guard=32", "--messages", str(chat)]) == 0
    assert "Both models compared: nothing unusual: the models are " in capsys.readouterr().out
    assert run([*words, "-c", "guard=32", "--messages", str(chat), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["results"]["guarded"]
    assert told["tokens"] == 32 and 0 < told["divergence"] < told["limit"] and not told["doubts"]
    code = "def f(x):\n    return x + 1\n" * 20
    assert run([*words, "-c", "guard=32", "-c", "on_doubt=reread", "--prompt", code]) == 0
    out = capsys.readouterr().out
    assert "compared: the models are " in out and "read by the target" in out


def test_what_is_refused(pair: tuple[LanguageModel, LanguageModel, Translator]) -> None:
    source, target, translator = pair
    receipt = {k: v for k, v in translator.config.provenance["receipt"].items() if k != "guard"}
    for provenance in ({}, {"receipt": receipt}, {"receipt": {**receipt, "guard": {"tokens": 32}}}):
        config = dataclasses.replace(translator.config, provenance=provenance)
        old = build(config, translator.to_weights())
        with pytest.raises(kv.IncompatibleTranslatorError, match="`kvlingo-mlx verify TRANSLATOR"):
            kv.generate(source, target, "Hello, you!", translator=old, guard=32)
    for options, message in (
        ({"guard": 8, "on_doubt": "cry"}, "on_doubt is 'cry'; give warn, heal or reread"),
        ({"guard": -1}, "guard is -1; give a number of tokens, 0 or more"),
        ({"on_doubt": "heal"}, "on_doubt has no effect with guard=0; give guard=32"),
        ({"guard": 8, "strategy": "native"}, "guard have no effect with strategy"),
        (
            {"guard": 8, "on_doubt": "heal", "kv_bits": 8, "kv_group_size": 32},
            "on_doubt is 'heal', which needs a cache",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            kv.generate(source, target, "Hello, you!", translator=translator, **options)
    tokens = tiny.random_tokens(40)
    with pytest.raises(ValueError, match="on_doubt is 'heal'; give warn or reread"):
        kv.hand_over(source, target, tokens, translator=translator, guard=8, on_doubt="heal")
    with pytest.raises(
        ValueError, match="guard has no effect with prompt_cache, .*; leave"
    ) as told:
        held = make_prompt_cache(source.model)
        kv.hand_over(source, target, tokens, translator=translator, guard=8, prompt_cache=held)
    assert " at 0x" not in str(told.value)
    with pytest.raises(ValueError, match="max_tokens is of type object; give"):
        kv.generate(source, target, tokens, translator=translator, max_tokens=object())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 40])
def test_short_prompts(pair: tuple[LanguageModel, LanguageModel, Translator], length: int) -> None:
    """At least half of a prompt is translated; one too short for that is not compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.KVLingoWarning)
        source, target, translator = pair
        tokens = tiny.random_tokens(length)
        asked = {"translator": translator, "guard": 32, "max_tokens": 2}
        *_, last = kv.stream_generate(source, target, tokens, **asked)
    assert (last.guarded is None) == (length < 3)
    if last.guarded is not None:
        assert last.guarded.tokens == (length - 1) // 2
