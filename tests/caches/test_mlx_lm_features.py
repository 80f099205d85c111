"""A translated cache goes on working with mlx-lm's own features, for every kind of cache.

Maps are identities, so the reference is always mlx-lm itself on the cache that it prefilled:
the same steps must give the same numbers, on a CPU to the bit. What mlx-lm fails at, we say first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import _get_classes

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.families import family_of
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import plain_models, tiny
from tests.support.fixtures import Patch, Temp
from tests.support.identity import identity_of
from tests.support.native_caches import LENGTHS, TOKENS, WINDOW, alike, native
from tests.support.opened import quantised

STEP, NEW = 20, 8
MORE = [(11 * i * i + 5) % 280 for i in range(9)]  # what a next turn adds
DRAFTED = 10
WIDE = {"qk_rope_head_dim": 32}  # so that groups of 32 divide what latent attention caches
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": tiny.FAMILIES["qwen3"],
    "windows": ("gemma3_text", tiny.FAMILIES["gemma3"][1] | {"seed": 11}),
    "shared": tiny.FAMILIES["gemma4"],  # windows too, and wider global layers
    "absorbed": ("deepseek_v3", tiny.FAMILIES["deepseek_v3"][1] | WIDE),
    "expanded": ("deepseek_v2", tiny.FAMILIES["deepseek_v2"][1] | WIDE),
}
UNBOUNDED = [kind for kind in KINDS if kind not in ("windows", "shared")]
CACHES = [(k, n) for k in KINDS for n in (LENGTHS[-1:] if k in UNBOUNDED else LENGTHS)]
Opener = Callable[..., LanguageModel]
Decoded = tuple[list[int], np.ndarray]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: Temp) -> Opener:
    """A tiny model by kind of cache, or its copy in few bits, made when first asked for."""
    root, found = tmp_path_factory.mktemp("features"), {}

    def open_model(kind: str, bits: int | None = None) -> LanguageModel:
        if (kind, bits) not in found:
            folder = root / f"{kind}-{bits}"
            if bits is None:
                model_type, options = KINDS[kind]
                model = kv.load(tiny.write_tiny_model(folder, model_type, **options))
            else:
                model = quantised(open_model(kind), folder, bits)
            found[kind, bits] = model
        return found[kind, bits]

    return open_model


def translated(model: LanguageModel, tokens: list[int]) -> list[Any]:
    return kv.hand_over(model, model, tokens, translator=same(model), prefill_step_size=STEP)


def same(model: LanguageModel) -> Any:
    return identity_of(model, capture=model.family.points[0])


def decode(
    model: LanguageModel, cache: list[Any], prompt: list[int], count: int = NEW, **options: Any
) -> Decoded:
    """Greedy tokens of mlx-lm's own loop and all their log probabilities."""
    steps = generate_step(
        mx.array(prompt), model.model, max_tokens=count, prompt_cache=cache, **options
    )
    tokens, rows = zip(*((int(t), np.array(row)) for t, row in steps), strict=True)
    return list(tokens), np.stack(rows)


def assert_equal(found: Decoded, wanted: Decoded) -> None:
    assert found[0] == wanted[0]
    assert alike(found[1], wanted[1], 1e-4)


@pytest.mark.parametrize(("kind", "length"), CACHES)
def test_saved_and_trimmed(kind: str, length: int, opened: Opener, tmp_path: Path) -> None:
    """A loaded cache takes a next turn, which a window moves on by; a full one is not trimmed."""
    model, tokens = opened(kind), TOKENS[:length]
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, translated(model, tokens), {"made by": "a test"})
    cache, facts = load_prompt_cache(path, return_metadata=True)
    assert facts == {"made by": "a test"}
    mine, own, again = cache, *(native(model, tokens[:-1], STEP) for _ in range(2))
    turn = [tokens[-1], *MORE]
    wanted = decode(model, own, turn, prefill_step_size=4)
    assert_equal(decode(model, mine, turn, prefill_step_size=4), wanted)
    mine, possible = translated(model, tokens), kind in UNBOUNDED or length <= WINDOW
    assert can_trim_prompt_cache(mine) is can_trim_prompt_cache(again) is possible
    count = 5 if possible else 0
    assert trim_prompt_cache(mine, 5) == trim_prompt_cache(again, 5) == count
    rest = tokens[-1 - count :]
    assert_equal(decode(model, mine, rest), decode(model, again, rest))


# Quantised from the first step on, and in mid-answer.
@pytest.mark.parametrize(
    ("kind", "bits", "start"),
    [("plain", 8, 0), ("plain", 4, 62), ("expanded", 8, 62), ("expanded", 4, 0)],
)
def test_kv_bits(kind: str, bits: int, start: int, opened: Opener) -> None:
    model = opened(kind)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    caches = [translated(model, TOKENS), native(model, TOKENS[:-1], STEP)]
    mine, own = (decode(model, cache, TOKENS[-1:], **options) for cache in caches)
    assert_equal(mine, own)
    assert {type(c) for cache in caches for c in cache} == {QuantizedKVCache}
    plain = decode(model, translated(model, TOKENS), TOKENS[-1:])
    changed = np.abs(mine[1] - plain[1]).max(axis=1) > 0
    # The step that quantises still reads what it had.
    first = max(1, start - len(TOKENS) + 1)
    assert changed.tolist() == [False] * first + [True] * (NEW - first)
    streamed = kv.stream_generate(
        model, model, TOKENS, translator=same(model), max_tokens=NEW, prefill_step_size=STEP,
        **options,
    )  # fmt: skip
    assert [r.token for r in streamed][:NEW] == own[0]


def test_kv_bits_let_go_of_what_they_replace(opened: Opener) -> None:
    model = opened("plain")
    held_in = {}
    quantised = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    for bits, options in ((None, {}), (4, quantised)):
        stream = kv.stream_generate(model, model, TOKENS * 8, translator=same(model), **options)
        for _ in range(3):
            next(stream)
        mx.clear_cache()
        held_in[bits] = mx.get_active_memory()
        stream.close()
    float_cache = 512 * caches.bytes_per_token(model)
    assert held_in[None] - held_in[4] > 0.7 * float_cache


def test_max_kv_size_leaves_a_filled_cache_alone(opened: Opener) -> None:
    """It says how mlx-lm makes a cache, and this one is made."""
    model = opened("plain")
    found = decode(model, translated(model, TOKENS), TOKENS[-1:], max_kv_size=8)
    assert_equal(found, decode(model, native(model, TOKENS[:-1], STEP), TOKENS[-1:]))


PROMPTS = [*(TOKENS[:n] for n in LENGTHS), TOKENS[7:8]]


def batched(model: LanguageModel, caches: list[list[Any]], lasts: list[list[int]]) -> list[Decoded]:
    """mlx-lm's batch, into which one more prompt, without a cache, comes at the third step."""
    generator = BatchGenerator(model.model, max_tokens=NEW)
    prefixes = [p[: -len(last)] for p, last in zip(PROMPTS, lasts, strict=True)]
    uids = generator.insert(lasts, caches=caches, all_tokens=prefixes)
    found: dict[int, list[Any]] = {uid: [] for uid in uids}
    for step in range(2 * NEW):
        for response in generator.next_generated():
            found[response.uid].append((response.token, np.array(response.logprobs)))
        if step == 2:
            (late,) = generator.insert([TOKENS[20:40]])
            found[late] = []
    generator.close()
    rows = [list(zip(*found[uid], strict=True)) for uid in (*uids, late)]
    return [(list(tokens), np.stack(logprobs)) for tokens, logprobs in rows]


# Each kind with its prompts' last tokens left to run, those with windows with more of them.
@pytest.mark.parametrize(("kind", "left"), [*((k, 1) for k in KINDS), ("windows", 4)])
def test_prompts_of_many_lengths_in_one_batch(kind: str, left: int, opened: Opener) -> None:
    model = opened(kind)
    lasts = [p[-min(left, len(p)) + i % 2 * (left > 1) :] for i, p in enumerate(PROMPTS)]
    prefixes = [p[: -len(last)] for p, last in zip(PROMPTS, lasts, strict=True)]
    mine = batched(model, [translated(model, [*p, 0]) for p in prefixes], lasts)
    own = batched(model, [native(model, p, STEP) for p in prefixes], lasts)
    for found, wanted in zip(mine, own, strict=True):
        assert_equal(found, wanted)
    if left == 1:  # nor does one prompt's cache leak into another's
        for found, prompt in zip(mine, [*PROMPTS, TOKENS[20:40]], strict=True):
            alone = decode(model, make_prompt_cache(model.model), prompt)
            assert found[0] == alone[0]
            np.testing.assert_allclose(found[1], alone[1], atol=1e-4)


def speculated(
    model: LanguageModel, draft: LanguageModel, tokens: list[int], count: int = DRAFTED, **more: Any
) -> tuple[Decoded, list[bool]]:
    """mlx-lm's own, from caches that mlx-lm prefilled; and which tokens were drafted."""
    cache = native(model, tokens[:-1], STEP) + native(draft, tokens[:-1], STEP)
    steps = speculative_generate_step(
        mx.array(tokens[-1:]), model.model, draft.model, prompt_cache=cache, max_tokens=count,
        **{"num_draft_tokens": 3, **more},
    )  # fmt: skip
    found, rows, drafted = zip(*((int(t), np.array(r), d) for t, r, d in steps), strict=True)
    return (list(found), np.stack(rows)), list(drafted)


def ours(
    model: LanguageModel, draft: Any, tokens: list[int], count: int = DRAFTED, **more: Any
) -> tuple[Decoded, list[bool]]:
    responses = kv.stream_generate(
        model, model, tokens, translator=same(model), prefill_step_size=STEP, max_tokens=count,
        draft_model=draft, **{"num_draft_tokens": 3, **more},
    )  # fmt: skip
    steps = ((r.token, np.array(r.logprobs), r.from_draft) for r in responses)
    found, rows, drafted = zip(*steps, strict=True)
    return (list(found), np.stack(rows)), list(drafted)


def assert_same_drafts(
    model: LanguageModel, draft: LanguageModel, *arguments: Any, **more: Any
) -> tuple[Decoded, list[bool]]:
    """Returns what both are."""
    found, wanted = (f(model, draft, *arguments, **more) for f in (ours, speculated))
    assert_equal(found[0], wanted[0])
    assert found[1] == wanted[1]
    return wanted


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_draft_models(kind: str, opened: Opener) -> None:
    """A draft that is right now and then, and the prefill model, which is right here always."""
    model, rough = opened(kind), opened(kind, 4)
    (found, _), drafted = assert_same_drafts(model, rough, TOKENS)
    assert found == decode(model, make_prompt_cache(model.model), TOKENS, DRAFTED)[0]
    assert 0 < sum(drafted) < DRAFTED * 3 / 4
    assert ours(model, model, TOKENS)[1] == ([True] * 3 + [False]) * 2 + [True] * 2


def test_draft_models_with_kv_bits_and_processors(opened: Opener) -> None:
    model, rough = opened("plain"), opened("plain", 4)
    bits = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    assert_same_drafts(model, rough, TOKENS, **bits)
    assert_same_drafts(model, rough, TOKENS[:1])
    penalty = make_logits_processors(repetition_penalty=1.4, repetition_context_size=40)
    (found, _), _ = ours(model, rough, TOKENS, logits_processors=penalty)
    cache, options = make_prompt_cache(model.model), {"logits_processors": penalty}
    assert found == decode(model, cache, TOKENS, DRAFTED, **options)[0]


def test_windows_take_drafts_until_they_are_full(opened: Opener) -> None:
    """With one token more mlx-lm's own numbers are wrong, and it says nothing."""
    model, rough, prompt = opened("windows"), opened("plain"), TOKENS[:6]
    count = WINDOW - len(prompt) - 1
    _, right = decode(model, make_prompt_cache(model.model), prompt, count + 1)
    (_, found), drafted = assert_same_drafts(model, rough, prompt, count)
    assert not all(drafted[:3])  # there are tokens to take back
    np.testing.assert_allclose(found, right[:-1], atol=1e-4)
    (_, found), _ = speculated(model, rough, prompt, count + 1)
    assert np.abs(found - right).max() > 0.1
    with pytest.raises(kv.UnsupportedModelError, match=r"windows of 16 tokens .* max_tokens=10 "):
        ours(model, rough, prompt, count + 1)
    with pytest.raises(kv.UnsupportedModelError, match="keeps windows of 16 tokens"):
        ours(opened("plain"), model, TOKENS)  # the draft's own windows


BITS = {"kv_bits": 8, "kv_group_size": 32}
LEAVE_OUT = r"; leave out kv_bits \(--kv-bits\)$"


@pytest.fixture
def no_prefill(monkeypatch: Patch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("something was prefilled before the options were refused")

    monkeypatch.setattr(Line, "read", refuse)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("windows", "4 of its 5 .* layer 0.*, which keep a window in a RotatingKVCache"),
        ("shared", "2 of its 3 .* layer 0.*, which keep a window in a RotatingKVCache"),
        ("absorbed", "3 of its 3 .* layer 0.*, whose attention handles the cached arrays itself"),
    ],
)
def test_kv_bits_are_refused_where_mlx_lm_fails(
    kind: str, reason: str, opened: Opener, no_prefill: None
) -> None:
    model = opened(kind)
    with pytest.raises((NotImplementedError, AttributeError)):  # mlx-lm's own, while it lasts
        decode(model, native(model, TOKENS[:-1], STEP), [7], quantized_kv_start=0, **BITS)
    for start in ({}, {"quantized_kv_start": 0}):  # long before mlx-lm would notice, too
        with pytest.raises(kv.UnsupportedModelError, match=reason + LEAVE_OUT):
            kv.generate(model, model, TOKENS, translator=same(model), **BITS, **start)
    with pytest.raises(kv.UnsupportedModelError, match=reason + LEAVE_OUT):
        options = {"translator": same(opened("plain")), "draft_model": model, "max_tokens": 2}
        kv.generate(opened("plain"), opened("plain"), TOKENS[:6], **BITS, **options)


def test_kv_bits_are_refused_for_caches_that_layers_share(tmp_path: Path, no_prefill: None) -> None:
    model_type, options = tiny.FAMILIES["gemma4"]
    for shared in (0, 3):
        whole = {"layer_types": [tiny.GLOBAL] * 6, "num_kv_shared_layers": shared}
        folder = tiny.write_tiny_model(tmp_path / f"{shared}", model_type, **options | whole)
        model = kv.load(folder)
        cache = native(model, TOKENS[:-1], STEP)
        steps = {"quantized_kv_start": 0, **BITS}
        translator = same(model)
        if not shared:
            decode(model, cache, [7], **steps)
            with pytest.raises(AssertionError, match="something was prefilled"):
                kv.generate(model, model, TOKENS, translator=translator, **BITS)
            continue
        with pytest.raises(TypeError):
            decode(model, cache, [7], **steps)
        reason = "1 of its 3 .* layer 2.*, which later layers read too" + LEAVE_OUT
        with pytest.raises(kv.UnsupportedModelError, match=reason):
            kv.generate(model, model, TOKENS, translator=translator, **BITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 7}, "kv_bits is 7; give 2, 3, 4, 5, 6 or 8$"),
        ({"kv_bits": 8}, "kv_group_size is 64, but .* are 32 numbers wide; make it 32$"),
        ({"kv_bits": 8, "kv_group_size": 16}, "kv_group_size is 16, .*; make it 32$"),
        ({"draft_model": True, "max_tokens": -1}, "max_tokens is -1; with a draft model give a"),
        ({"draft_model": True, "num_draft_tokens": 0}, "num_draft_tokens is 0; give 1 or more"),
    ],
)
def test_numbers_that_mlx_lm_stumbles_over(
    options: dict[str, Any], message: str, opened: Opener, no_prefill: None
) -> None:
    model = opened("plain")
    if "draft_model" in options:
        options = options | {"draft_model": model}
    with pytest.raises(ValueError, match=message):
        kv.generate(model, model, TOKENS, translator=same(model), **options)


def test_drafts_are_refused_where_mlx_lm_goes_wrong(opened: Opener, no_prefill: None) -> None:
    windows, rough = opened("windows"), opened("windows", 4)
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        speculated(windows, rough, TOKENS)
    shared = opened("shared")
    with pytest.raises((ValueError, IndexError)):
        speculated(shared, rough, TOKENS[:3], 2)
    with pytest.raises(kv.UnsupportedModelError, match="windows of 16.*; leave out draft_model"):
        ours(windows, rough, TOKENS)
    few = "has 6 layers but caches for only 3.*; leave out draft_model"
    with pytest.raises(kv.UnsupportedModelError, match=few):
        ours(shared, rough, TOKENS[:3], 2)


@pytest.mark.parametrize("name", sorted(plain_models.CONFIGS))
def test_which_families_take_kv_bits(name: str) -> None:
    """By running each one's attention, in mlx-lm alone, on a cache that mlx-lm quantised."""
    config = {"model_type": name, **plain_models.COMMON, **plain_models.CONFIGS[name]}
    more = {"head_dim": 32, "hidden_size": 128, "rope_scaling": None}  # fit for groups of 32
    config |= {"text_config": config["text_config"] | more} if "text_config" in config else more
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    cache = make_prompt_cache(model)
    if any(isinstance(c, RotatingKVCache) for c in cache):
        return  # refused for its windows
    model(mx.array([[5, 6, 7]]), cache=cache)
    quantised_cache = [c.to_quantized(group_size=32, bits=8) for c in cache]
    works = True
    try:
        mx.eval(model(mx.array([[8]]), cache=quantised_cache))
    except (AttributeError, TypeError, ValueError):
        works = False
    assert family_of(name).quantised_cache is works
