"""generate and its parts: prompts, clock, memory, synchronisations, processors."""

import gc
import time
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate as mlx_generate
from mlx_lm.generate import generate_step

import kvlingo_mlx as kv
from benchmarks.paper.timing.memory import grown_bytes
from kvlingo_mlx import caches
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from tests.support.fixtures import Models, Patch
from tests.support.identity import TOKENS, identity_of

MESSAGES = [{"role": "user", "content": "Where does Anna live?"}]


def test_prompt_as_text_ids_and_messages(model: LanguageModel) -> None:
    translator = identity_of(model)
    text = "Some words, and some more."
    ids = model.tokenizer.encode(text)
    plain = mlx_generate(model.model, model.tokenizer, text, max_tokens=20)
    for prompt in (text, ids):
        options = {"translator": translator, "max_tokens": 20}
        assert kv.generate(model, model, prompt, **options) == plain
    rendered = model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert encode(model, MESSAGES) == list(rendered)


def test_one_token_prompt_needs_no_translator(models: Models) -> None:
    model = models["dense"]
    native = mlx_generate(model.model, model.tokenizer, TOKENS[:1], max_tokens=8)
    assert kv.generate(model, model, TOKENS[:1], max_tokens=8) == native
    assert all(cache.empty() for cache in kv.hand_over(model, model, TOKENS[:1]))
    identity = identity_of(model)
    assert kv.generate(model, model, TOKENS[:1], translator=identity, max_tokens=8) == native
    foreign = identity_of(models["wide"])
    for call in (kv.generate, kv.hand_over):  # what would be refused with two tokens is with one
        for tokens in (TOKENS[:2], TOKENS[:1]):
            with pytest.raises(kv.IncompatibleTranslatorError):
                call(model, model, tokens, translator=foreign)


@pytest.fixture
def clock(monkeypatch: Patch) -> list[float]:
    """A clock that moves by a millisecond when it is looked at, and as it is told to."""
    now = [0.0]

    def look() -> float:
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(time, "perf_counter", look)
    return now


def test_clock_books_each_phase_where_it_belongs(
    model: LanguageModel, monkeypatch: Patch, clock: list[float]
) -> None:
    """A translation made slow must show as translation, not as prefill."""
    slow, append = 200.0, caches.append

    def slow_append(*arguments: object) -> None:
        clock[0] += slow
        append(*arguments)

    translator = identity_of(model)
    quick = next(kv.stream_generate(model, model, TOKENS, translator=translator))
    monkeypatch.setattr(caches, "append", slow_append)
    late = next(kv.stream_generate(model, model, TOKENS, translator=translator))
    assert late.translate_s - quick.translate_s == pytest.approx(slow)
    assert late.ttft_s - quick.ttft_s == pytest.approx(slow)
    assert late.prefill_s == pytest.approx(quick.prefill_s) and 0 < late.prefill_s < 1


def test_first_token_time_counts_the_translators_reading(
    models: Models, tmp_path: Path, monkeypatch: Patch, clock: list[float]
) -> None:
    model, read = models["dense"], translator_folder.read
    folder = identity_of(model).save(tmp_path / "identity")

    def slow_read(path: Path) -> object:
        clock[0] += 100.0
        return read(path)

    monkeypatch.setattr(translator_folder, "read", slow_read)
    first = next(kv.stream_generate(model, model, TOKENS, translator=folder, max_tokens=1))
    assert 100 < first.ttft_s < 101 and first.prefill_s + first.translate_s < 1


def prefill_bytes(model: LanguageModel, tokens: list[int], step: int) -> int:
    """What a plain prefill needs; it varies by a fifth with the allocator's luck: the most."""

    def prefill() -> None:
        steps = generate_step(mx.array(tokens), model.model, prefill_step_size=step)
        next(steps)
        steps.close()

    return max(grown_bytes(prefill) for _ in range(5))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_peak_memory_is_two_caches_and_a_chunk(models: Models, layers: int) -> None:
    """Beside what mlx-lm's own prefill of the source needs: the target's cache, one chunk.

    With native layers the target's own run over one chunk, instead of its cache alone.
    """
    source, target = models["dense"], models["wide"]
    tokens, step = [i % 280 for i in range(480)], 40
    translator = kv.fit(source, target, [{"text": "a b c d e f g h " * 12}])

    def hand_over(step: int) -> int:
        options = {"translator": translator, "native_layers": layers}
        return grown_bytes(
            lambda: kv.hand_over(source, target, tokens, prefill_step_size=step, **options)
        )

    own = caches.bytes_per_token(target)
    chunk = step * (caches.bytes_per_token(source) + 2 * own)
    filled = 512 * own if not layers else prefill_bytes(target, tokens, step)
    bound = prefill_bytes(source, tokens, step) + filled + chunk
    assert hand_over(step) <= bound
    assert hand_over(480) > bound  # the bound has power: a large chunk breaks it


@pytest.mark.parametrize("drafts", [False, True])
def test_the_sources_cache_is_gone_while_the_target_decodes(
    model: LanguageModel, drafts: bool
) -> None:
    """But where the source is the draft model too, which goes on with it: the control."""
    options = {"draft_model": model, "max_tokens": 8} if drafts else {"max_tokens": -1}
    answer = kv.stream_generate(model, model, TOKENS, translator=identity_of(model), **options)
    next(answer)
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, Line) and each.name == "source"]
    answer.close()
    assert bool(held) == drafts


def test_cache_takes_the_targets_dtype(models: Models) -> None:
    """Float32 entries would turn a 16-bit model's decoding into float32 for good."""
    source = models["dense"]
    half = kv.load(source.path)
    half.model.set_dtype(mx.bfloat16)
    translator = identity_of(source)  # rounding the norms made another checkpoint of it
    cache = kv.hand_over(source, half, TOKENS, translator=translator, allow_mismatch=True)
    assert half.cache_dtype == mx.bfloat16
    assert {(c.keys.dtype, c.values.dtype) for c in cache} == {(mx.bfloat16, mx.bfloat16)}


def test_tokens_may_be_arrays(models: Models) -> None:
    """One ``tokens`` serves hand_over and mlx-lm's own generate_step."""
    model = models["dense"]
    identity = identity_of(model)
    expected = [np.array(c.keys) for c in kv.hand_over(model, model, TOKENS, translator=identity)]
    for tokens in (mx.array(TOKENS), np.array(TOKENS), tuple(TOKENS)):
        cache = kv.hand_over(model, model, tokens, translator=identity)
        assert all(np.array_equal(c.keys, e) for c, e in zip(cache, expected, strict=True))
    steps = generate_step(mx.array(TOKENS[-1:]), model.model, max_tokens=1, prompt_cache=cache)
    assert next(steps)[0] == next(generate_step(mx.array(TOKENS), model.model, max_tokens=1))[0]
    with pytest.raises(ValueError, match="token ids of one prompt"):
        kv.hand_over(model, model, [1.5, 2.5], translator=identity)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5, 6], {"max_tokens": 0}, "max_tokens is 0"),
        ([5, 6], {"prefill_step_size": 0}, "prefill_step_size is 0"),
        ([5, 6], {"max_kv_size": 8}, "max_kv_size is no argument of "),
        ([5, 6], {"prompt_cache": []}, "prompt_cache is no argument of "),
        ("half \ud83d", {}, "not valid Unicode"),
        ([{"role": "user"}], {}, "does not take these messages|needs a"),
    ],
)
def test_bad_arguments(model: LanguageModel, prompt, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv.generate(model, model, prompt, **{"translator": identity_of(model), **options})
