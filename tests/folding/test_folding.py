"""Folded decoding: what the materialised translated cache decodes, without that cache."""

import copy
import functools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import baselines
from benchmarks.paper.timing.memory import peak_bytes
from benchmarks.paper.timing.memory_budget import allocated
from kvlingo_mlx import caches, translators
from kvlingo_mlx.errors import IncompatibleTranslatorError, UnsupportedModelError
from kvlingo_mlx.evaluation import lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.folding import FoldedCache, decoding, fold_caches
from kvlingo_mlx.folding import cache as wiring
from kvlingo_mlx.format import assignment, translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.translators import find_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, flat
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.command_line import run
from tests.support.random_samples import random_translator
from tests.support.tiny import Case

TOLERANCE = 1e-4  # of a logit, absolute
WRONG = 1e-2  # what a mistake must exceed
NEW = 64
MIXED = [7, 1, 1, 1, 5, 1, 12]  # tokens read at once
POINT = ("capture", "post_rope")
BIAS = (POINT, ("bias", True))
CASES = (
    Case("dense4x16", "dense2x32", 2, True, BIAS),
    Case("dense2x32", "dense4x16", 2, False, BIAS),
    Case("dense4x16", "moe2x32", 1, True, BIAS),
    Case("dense2x32", "moe2x32", 2, False, BIAS),
    Case("gemma4x16", "gemma1x32", 1, True, BIAS),
    Case("gemma2x32", "gemma4x16", 2, False, BIAS),
    # Source heads that serve none, one or three target heads; more source heads than target's.
    Case("dense2x32", "dense4x16", 1, False, (*BIAS, ("head_map", (1, 0, 1, 1)))),
    Case("dense4x16", "dense2x32", 2, False, (*BIAS, ("head_map", (3, 1)))),
    Case("llama2x16", "mistral4x24", 2, False, (POINT,)),
    Case("dense4x16", "mistral4x24", 2, True, (POINT,)),
    Case("shared2x32", "dense4x16", 1, True, (POINT,)),  # a source whose values have a norm
)
MIXING, BIASED, EXPERTS, _, WINDOWED, WINDOWED_HEADS, MAPPED = CASES[:7]
load = functools.cache(kv.load)


def write(root: Path, case: Case) -> tuple[LanguageModel, LanguageModel, Translator]:
    """A case's source, target and translator, loaded."""
    source, target, folder = tiny.write_case(root, case)
    return load(source), load(target), kv.load_translator(folder)


def logits(model: LanguageModel, cache: list[Any], pieces: Sequence[Any]) -> np.ndarray:
    """What a model says of tokens (B, L) read piece by piece: (B, tokens, V)."""
    return np.concatenate([np.array(model.model(mx.array(p), cache=cache)) for p in pieces], axis=1)


def pieces_of(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[np.ndarray]:
    """Tokens (B, T) cut into pieces of ``sizes``, the last one repeated."""
    tokens, found = np.array(rows), []
    while tokens.shape[1]:
        size = sizes[min(len(found), len(sizes) - 1)]
        found.append(tokens[:, :size])
        tokens = tokens[:, size:]
    return found


def prompts(batch: int, prefix: int) -> list[list[int]]:
    """Rows of a prefix, its last token and ``NEW`` more."""
    return [tiny.random_tokens(prefix + NEW, seed) for seed in range(batch)]


def materialised(
    source: LanguageModel, target: LanguageModel, translator: Any, rows: Any, prefix: int
) -> np.ndarray:
    """The same tokens read from translated caches, a row at a time, each as one piece."""
    caches = (kv.hand_over(source, target, row[: prefix + 1], translator=translator)
              for row in rows)  # fmt: skip
    each = zip(caches, rows, strict=True)
    return np.concatenate([logits(target, cache, [[row[prefix:]]]) for cache, row in each])


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest of a logit; NaN counts as infinite."""
    assert found.shape == expected.shape
    return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())


def apart(
    source: LanguageModel, target: LanguageModel, translator: Translator, rows: Any,
    prefix: int = 20, sizes: Sequence[int] = MIXED, spoil: Any = None, **options: Any,
) -> float:  # fmt: skip
    """How far folded decoding of rows is from decoding of translated caches."""
    heads = [row[: prefix + 1] for row in rows]
    cache = kv.folded_hand_over(
        source, target, heads if len(rows) > 1 else heads[0], translator=translator, **options
    )
    for layer in cache if spoil else ():
        spoil(layer)
    found = logits(target, cache, pieces_of([row[prefix:] for row in rows], sizes))
    return difference(found, materialised(source, target, translator, rows, prefix))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_materialised_cache(root: Path, case: Case) -> None:
    """Over 64 tokens, while windows of 8 to 16 turn; one by one, and several at once."""
    pair = write(root, case)
    assert apart(*pair, prompts(3, 21), 21, [1], prefill_step_size=9) <= TOLERANCE
    assert apart(*pair, prompts(1, 5), 5) <= TOLERANCE


@pytest.mark.parametrize(
    ("side", "head_mixing"),
    [("keys", True), ("keys", False), ("values", True), ("values", False), ("joint", True)],
)
def test_keys_and_values_of_other_layers(root: Path, side: str, head_mixing: bool) -> None:
    """The one side reads the deepest source layer alone, the other its own; or each reads both."""
    source, target, _ = write(root, BIASED)
    joint, depth, deepest = side == "joint", len(target.attentions), len(source.attentions) - 1
    own = tuple((min(layer, deepest),) for layer in range(depth))
    read = {"keys": own, "values": own} | ({} if joint else {side: ((deepest,),) * depth})
    config = TranslatorConfig(
        source.spec(), target.spec(), assignment.Assignment(**read), head_mixing=head_mixing,
        capture="post_rope", joint=joint,
    )  # fmt: skip
    translator = random_translator(config)
    assert apart(source, target, translator, prompts(1, 20)) <= TOLERANCE


@pytest.mark.parametrize(("batched", "quantize"), [(True, 8), (False, None)])
def test_however_products_are_cut(root: Path, batched: bool, quantize: int | None) -> None:
    """As on a GPU and a CPU; maps of 8 bits, where their rows allow."""
    source, target, _ = write(root, MIXING)
    files = translator_folder.read(tiny.write_case(root, MIXING)[2])
    translator = translators.build(*files, batched=batched, quantize=quantize)
    assert apart(source, target, translator, prompts(1, 12), 12) <= TOLERANCE


@pytest.mark.parametrize("case", [MIXING, MAPPED, WINDOWED], ids=lambda c: c.name)
def test_one_prefix_serves_several_rows(root: Path, case: Case) -> None:
    """A source's cache of one row, and three continuations of it."""
    source, target, translator = write(root, case)
    rows = [tiny.random_tokens(21)[:20] + row for row in prompts(3, 0)]
    cache = kv.folded_hand_over(source, target, rows[0][:21], translator=translator)
    found = logits(target, cache, pieces_of([row[20:] for row in rows], MIXED))
    assert difference(found, materialised(source, target, translator, rows, 20)) <= TOLERANCE


def without(side: str) -> Callable[[FoldedCache], None]:
    """Drop the bias of a side."""

    def spoil(cache: FoldedCache) -> None:
        part = replace(getattr(cache.fold, side), bias=None)
        cache.fold = replace(cache.fold, **{side: part})

    return spoil


def shifted(cache: FoldedCache) -> None:
    """New tokens one position later."""
    cache._prefix_tokens += 1


def swapped(cache: FoldedCache) -> None:
    """Every source layer's oldest token forgotten."""
    cache.fold = cache.fold.last(cache.fold.tokens - 1)


@pytest.mark.parametrize("spoil", [without("keys"), without("values"), shifted, swapped])
def test_a_mistake_shows(root: Path, spoil: Callable[[FoldedCache], None]) -> None:
    """Negative controls of the tests above."""
    assert apart(*write(root, BIASED), prompts(1, 20), spoil=spoil) > WRONG


def test_a_window_that_does_not_move_shows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: prefix entries that have left the window are still seen."""
    monkeypatch.setattr(FoldedCache, "_visible", lambda self, count: self.fold.tokens)
    monkeypatch.setattr(FoldedCache, "make_mask", lambda self, N, **_: None)
    assert apart(*write(root, WINDOWED), prompts(1, 20), sizes=[1]) > WRONG


def unpacked(cache: Any) -> list[mx.array]:
    """A stock cache's keys and values (B, T, H * D) in floats."""
    *sides, packing = caches.viewed(cache)
    if packing is None:
        return [flat(arrays[0]) for arrays in sides]
    return [flat(mx.dequantize(*arrays, *packing)) for arrays in sides]


@pytest.mark.parametrize(
    ("case", "bits"), [(CASES[3], 8), (BIASED, 4), (WINDOWED_HEADS, 8)], ids=str
)
def test_a_quantised_prefix(root: Path, case: Case, bits: int) -> None:
    """Equals the translation of what the quantised cache stands for; rings stay floats."""
    source, target, translator = write(root, case)
    (row,) = prompts(1, 40)
    own = make_prompt_cache(source.model)
    source.model(mx.array([row[:40]]), cache=own)
    caches.quantise(own, bits, 32)
    assert any(isinstance(cache, QuantizedKVCache) for cache in own)
    found = logits(target, fold_caches(own, source, target, translator),
                   pieces_of([row[40:]], MIXED))  # fmt: skip
    keys, values = zip(*(unpacked(cache) for cache in own), strict=True)
    stock = caches.empty(target)
    states = KVStates(keys, values, "post_rope", 0)
    caches.append(stock, translator(states, target.geometry.first_kept(40)), target)
    assert difference(found, logits(target, stock, [[row[40:]]])) <= TOLERANCE
    whole = materialised(source, target, translator, [row], 40)
    assert difference(found, whole) > (1e-3 if bits == 4 else 1e-4)  # it was quantised


def random_cache(model: LanguageModel, tokens: int) -> list[Any]:
    """A model's cache of ``tokens``, filled with random numbers."""
    cache = allocated(model, tokens)
    for layer in cache:
        layer.keys, layer.values = map(mx.random.normal, (layer.keys.shape, layer.values.shape))
    mx.eval(caches.arrays(cache))
    return cache


@pytest.mark.parametrize("case", [MIXING, WINDOWED_HEADS], ids=lambda case: case.name)
def test_memory(root: Path, case: Case) -> None:
    """The prefix is held once; decoding takes little more, and far less than a second copy."""
    source, target, translator = write(root, case)
    tokens = 16384
    for model in (source, target):
        mx.eval(model.model.parameters())
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    own = random_cache(source, tokens)
    held = sum(layer.nbytes for layer in own)
    cache = fold_caches(own, source, target, translator)
    mx.eval([layer.state for layer in cache])
    del own
    assert mx.get_active_memory() - before <= 1.01 * held

    def decode() -> None:
        for _ in range(8):
            mx.eval(target.model(mx.array([[5]]), cache=cache))

    assert peak_bytes(decode) - before <= 1.1 * held
    assert sum(layer.nbytes for layer in cache) < 0.1 * held


def test_a_copy_would_show(root: Path) -> None:
    """Negative control: the materialised cache beside the source's is more than is allowed."""
    source, target, translator = write(root, BIASED)
    mx.clear_cache()
    before = mx.get_active_memory()
    own = random_cache(source, 4096)
    cache = caches.empty(target)
    states = caches.read(own, source)
    caches.append(cache, translator(states), target)
    mx.eval(caches.arrays(cache))
    assert mx.get_active_memory() - before > 1.1 * sum(layer.nbytes for layer in own)


def test_the_prefix_is_the_sources_own(root: Path) -> None:
    """Not even copies of a cache copy it; and the source may go on without changing it."""
    source, target, translator = write(root, BIASED)
    (row,) = prompts(1, 20)
    own = decoding.prefill(source, [row[:20]], 2048)
    cache = fold_caches(own, source, target, translator)
    twin = copy.deepcopy(cache)
    assert all(a.fold is b.fold for a, b in zip(cache, twin, strict=True))
    expected = logits(target, cache, pieces_of([row[20:]], [1]))
    source.model(mx.array([row[30:40]]), cache=own)
    mx.eval([layer.state for layer in own])
    assert np.array_equal(logits(target, twin, pieces_of([row[20:]], [1])), expected)


def test_new_tokens_can_be_taken_back(root: Path) -> None:
    """As from stock caches; never more than there are."""
    source, target, translator = write(root, BIASED)
    (row,) = prompts(1, 20)
    cache = kv.folded_hand_over(source, target, row[:21], translator=translator)
    expected = logits(target, cache, pieces_of([row[20:]], [1]))
    assert all(layer.is_trimmable() and layer.trim(NEW - 10) == NEW - 10 for layer in cache)
    assert np.array_equal(logits(target, cache, pieces_of([row[30:]], [1])), expected[:, 10:])
    assert [layer.trim(1000) for layer in cache] == [NEW] * len(cache)
    assert not cache[0].empty() and cache[0].offset == 20


def test_mlx_lm_will_not_save_them(root: Path, tmp_path: Path) -> None:
    """What it wrote could not be read again; what it evaluates is whole all the same."""
    source, target, translator = write(root, BIASED)
    (row,) = prompts(1, 20)
    cache = kv.folded_hand_over(source, target, row[:21], translator=translator)
    list(generate_step(mx.array(row[20:40]), target.model, prompt_cache=cache, max_tokens=2))
    with pytest.raises(ValueError, match="not serializable: a folded cache, whose prefix is its"):
        save_prompt_cache(str(tmp_path / "x.safetensors"), cache)
    assert not list(tmp_path.glob("*.safetensors"))


def test_quantised_caches_of_mlx_lm_are_as_they_were(models: dict[str, LanguageModel]) -> None:
    """The one function of mlx-lm that is replaced leaves everything else alone."""
    wiring.install()
    model = models["dense"]
    prompt = mx.array(tiny.random_tokens(30))
    options = {"max_tokens": 12, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    steps = [logs for _, logs in generate_step(prompt, model.model, **options)]
    assert base.quantized_scaled_dot_product_attention is wiring._attention
    base.quantized_scaled_dot_product_attention = wiring._stock
    try:
        again = [logs for _, logs in generate_step(prompt, model.model, **options)]
    finally:
        wiring.install()
    assert all(mx.array_equal(a, b) for a, b in zip(steps, again, strict=True))


def test_generates_what_generate_does(root: Path) -> None:
    """Greedy, the same tokens and the same fields of a response."""
    source, target, translator = write(root, WINDOWED)
    options: dict[str, Any] = {"translator": translator, "max_tokens": 24}
    prompt = tiny.random_tokens(40)
    expected = list(kv.stream_generate(source, target, prompt, **options))
    found = list(kv.folded_stream_generate(source, target, prompt, **options))
    assert [r.token for r in found] == [r.token for r in expected]
    assert found[-1].prompt_tokens == 40 and found[-1].ttft_s > found[-1].prefill_s > 0
    text = kv.folded_generate(source, target, mx.array(prompt), **options)
    assert text == "".join(r.text for r in found)


TOKENS = [1, 2, 3]
PLAIN = Case("dense4x16", "dense2x32")
PAIR = Case("dense4x16", "dense2x32", 1, True, (POINT,))
MESSAGES = [{"role": "user", "content": "x"}]
REMEDY = "keys, and a cache holds post_rope ones; make one that reads those with `kvlingo-mlx fit"
OTHER_CACHES = "expected 3, filled to one position"
Use = Callable[[LanguageModel, LanguageModel, Translator], Any]


def handed(prompt: Any, **options: Any) -> Use:
    """A hand-over of a prompt."""
    return lambda *pair: kv.folded_hand_over(*pair[:2], prompt, translator=pair[2], **options)


def answered(prompt: Any, **options: Any) -> Use:
    """An answer to a prompt."""
    return lambda *pair: kv.folded_generate(
        *pair[:2], prompt, **{"translator": pair[2], "max_tokens": 2} | options
    )


def filled(model: LanguageModel) -> list[Any]:
    return decoding.prefill(model, [TOKENS], 2048)


def forgotten(source: LanguageModel, target: LanguageModel, translator: Translator) -> None:
    """Rings where the source has no windows: the target would see their tokens alone."""
    own = [RotatingKVCache(max_size=4) for _ in source.attentions]
    source.model(mx.array([[1, 2, 3, 4]]), cache=own)
    assert fold_caches(own, source, target, translator)[0].offset == 4
    source.model(mx.array([[5]]), cache=own)
    fold_caches(own, source, target, translator)


# What a translator, a target, a prompt, an option or a cache must be, and what is said otherwise.
UNFIT: list[tuple[Case, Use, str]] = [
    (PLAIN, handed(TOKENS), f"it reads pre_norm {REMEDY} -c capture=post_rope`"),
    (replace(PLAIN, options=(("capture", "post_norm"),)), handed(TOKENS), f"post_norm {REMEDY}"),
    (Case("mla64", "mla48"), handed(TOKENS), "it reads latent keys"),
    # Two models of one geometry, whose caches would otherwise do; and another checkpoint.
    (PAIR, lambda s, t, m: fold_caches(filled(t), t, s, m), "goes the other way round"),
    (PAIR, lambda s, t, m: fold_caches(filled(s), s, s, m), "does not fit the target model"),
]
REFUSED: list[tuple[Case, Use, str]] = [
    (BIASED, handed(TOKENS, kv_bits=7), "kv_bits is 7; give 2, 3, 4, 5, 6 or 8"),
    (BIASED, handed(TOKENS, kv_bits=8), "size is 64, but .* 32 numbers wide; make it 32"),
    (BIASED, handed(TOKENS, prefill_step_size=0), "prefill_step_size is 0"),
    (BIASED, handed([TOKENS, [1, 2]]), "2 to 3 tokens; folded decoding takes several at once"),
    (BIASED, handed([]), "the prompt is empty"),
    (BIASED, answered([1, 2], max_tokens=0), "max_tokens is 0"),
    *((BIASED, answered([first, first]), "several prompts: hand each over")
      for first in ([1, 2], "text", MESSAGES)),
    (BIASED, lambda *pair: answered(mx.array([TOKENS, TOKENS]))(*pair), "several prompts: hand"),
    *((BIASED, handed(prompt), "the prompt is not token ids; folded_hand_over")
      for prompt in ("text", MESSAGES)),
    (BIASED, lambda s, t, m: fold_caches(filled(s)[:-1], s, t, m), OTHER_CACHES),
    (BIASED, lambda s, t, m: fold_caches(make_prompt_cache(s.model), s, t, m), OTHER_CACHES),
    (BIASED, forgotten, "holds 4 tokens, and the last 5 are to be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "rows"),
    [
        (IncompatibleTranslatorError, UNFIT),
        (ValueError, REFUSED),
        (UnsupportedModelError, [(Case("same2x32", "shared2x32", 1, True, (POINT,)), handed(TOKENS),
                                  "other layers read the cache of layer 1: use gene")]),
    ],
)  # fmt: skip
def test_what_cannot_be_folded_is_refused(
    root: Path, error: type[Exception], rows: list[tuple[Case, Use, str]]
) -> None:
    for case, use, text in rows:
        with pytest.raises(error, match=text):
            use(*write(root, case))


def test_another_checkpoint_where_it_is_allowed(root: Path, tmp_path: Path) -> None:
    """All the way through, the last check included."""
    source, target, _ = write(root, BIASED)
    same = assignment.by_depth(source.geometry.layers, target.geometry.layers)
    translator = random_translator(
        TranslatorConfig(source.spec(), target.spec(), same, head_mixing=False, capture="post_rope")
    )
    shape = dict(tiny.MODELS["dense4x16"][1], seed=77)
    other = load(tiny.write_tiny_model(tmp_path / "other", "qwen3", **shape))
    with pytest.raises(IncompatibleTranslatorError, match="another checkpoint"):
        kv.folded_hand_over(source, other, [1, 2, 3], translator=translator)
    options: dict[str, Any] = {"translator": translator, "allow_mismatch": True}
    assert len(kv.folded_hand_over(source, other, [1, 2, 3], **options)) == len(other.attentions)
    assert kv.folded_generate(source, other, [1, 2, 3], max_tokens=2, **options) is not None


BUDGET = ("-c", "memory_budget=true")


def arguments(root: Path, case: Case, *more: str) -> list[str]:
    """``kvlingo-mlx generate`` for a case."""
    source, target, folder = tiny.write_case(root, case)
    pair = ["--prefill-model", str(source), "--decode-model", str(target)]
    return ["generate", *pair, "--translator", str(folder), "-m", "6", "-p", "Hello there", *more]


def test_the_command_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same answer with and without a budget, and with a prefix of 8 bits another or none."""
    answers = []
    for more in ((), BUDGET, (*BUDGET, "-c", "quantize=8")):
        assert run(arguments(root, MIXING, "-c", "verbose=false", *more)) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    bits = ["--kv-bits", "8", "-c", "kv_group_size=32"]
    assert run(arguments(root, BIASED, *BUDGET, *bits)) == 0
    assert "first token after" in capsys.readouterr().out


def test_tuned_native_layers_are_heeded_or_refused(
    root: Path, tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``generate`` heeds it, folded decoding must not fold over it without a word."""
    source, target, plain = tiny.write_case(root, BIASED)
    folder = tmp_path / "tuned"
    shutil.copytree(plain, folder)
    path = folder / "translator_config.json"
    facts = json.loads(path.read_text())
    facts["provenance"] = {**facts.get("provenance", {}), "native_layers": 1}
    path.write_text(json.dumps(facts))
    models, tokens = (load(source), load(target)), tiny.random_tokens(12)
    options: dict[str, Any] = {"translator": folder, "max_tokens": 3}
    for ask in (
        lambda: kv.folded_generate(*models, tokens, **options),
        lambda: kv.folded_hand_over(*models, tokens, translator=folder),
        lambda: baselines.baseline("folded", *models, kv.load_translator(folder), None),
        lambda: baselines.baseline("folded", *models, kv.load_translator(plain), 1),
    ):
        with pytest.raises(IncompatibleTranslatorError) as error:
            ask()
        text = str(error.value)
        assert "1 native layers" in text and "use generate" in text and "native_layers=0" in text
    # Both ways out; a stored translator that can be folded whole goes before one that cannot.
    expected = kv.folded_generate(*models, tokens, translator=plain, max_tokens=3)
    assert kv.folded_generate(*models, tokens, native_layers=0, **options) == expected
    found = baselines.baseline("folded", *models, kv.load_translator(folder), 0)
    assert found.name == "folded"
    for age, kept in enumerate((plain, folder)):
        copy = shutil.copytree(kept, store / kept.name) / "translator_config.json"
        os.utime(copy, (age, age))
    assert find_translator(*models).name == "tuned"
    assert kv.folded_generate(*models, tokens, max_tokens=3) == expected
    words = arguments(root, BIASED, *BUDGET, "--translator", str(folder))
    assert run(words) == 2
    error_line = capsys.readouterr().err
    assert error_line.count("\n") == 1 and "leave out memory_budget" in error_line
    assert run([*words, "-c", "native_layers=0"]) == 0
    assert run([*words, "-c", "native_layers=1"]) == 2


def test_show_says_whether_and_why_not(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For each reason there is."""
    folded = tiny.write_case(root, BIASED)[2]
    plain = tiny.write_case(root, PLAIN)[2]
    mlp = tiny.write_mlp_translator(tmp_path / "mlp", tiny.write_case(root, MIXING)[2])
    for folder, text in ((folded, "yes"), (plain, "no: it reads pre_norm"), (mlp, "no: it is of")):
        assert run(["show", str(folder)]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("can be folded"))
        assert line.removeprefix("can be folded").strip().startswith(text)


def test_the_folded_condition(root: Path) -> None:
    """Scores what the translated one scores, and says that it is another."""
    source, target, translator = write(root, BIASED)
    record = {"text": "One two three four five six seven eight nine ten. " * 3}
    task = probes.continuation(target, [record], 1, 512)
    line = [
        lineup.native(target),
        lineup.translated("translated", source, target, [translator]),
        baselines.baseline("folded", source, target, translator),
        lineup.baseline("hidden", source, target, [translator]),
    ]
    found = evaluate(target, [task], line, Journal())["continuation"]
    scores = {name: results[0].scores["kl"] for name, results in found.items()}
    assert scores["folded"] == pytest.approx(scores["translated"], abs=1e-5)
    assert abs(scores["folded"] - scores["prefix hidden"]) > 1e-3
    assert line[1].identity != line[2].identity
    assert line[2].at_switch is not None and len(line[2].at_switch([1, 2, 3])()) == 4


def test_sixteen_bits(tmp_path: Path) -> None:
    """Nothing is widened; rounding is of the order of the materialised cache's."""
    folders = [
        tiny.write_tiny_model(tmp_path / f"{name}-{dtype}", "qwen3", dtype=dtype, seed=seed,
                              layers=3, kv_heads=heads, head_dim=32)
        for dtype in ("float32", "bfloat16")
        for name, seed, heads in (("s", 1, 2), ("l", 2, 4))
    ]  # fmt: skip
    models = [load(folder) for folder in folders]
    folder = tiny.write_random_translator(
        tmp_path / "t", *folders[:2], head_mixing=False, bias=True, capture="post_rope"
    )
    translator = kv.load_translator(folder)
    rows = prompts(1, 20)
    exact = materialised(models[0], models[1], translator, rows, 20)
    rest = pieces_of([rows[0][20:]], MIXED)
    errors = {}
    for name, hand_over in (("stock", kv.hand_over), ("folded", kv.folded_hand_over)):
        cache = hand_over(models[2], models[3], rows[0][:21], translator=translator)
        found = [models[3].model(mx.array(piece), cache=cache) for piece in rest]
        assert all(array.dtype == mx.bfloat16 for array in found)
        assert all(c.state[0].dtype == mx.bfloat16 for c in cache)
        wide = [np.array(array.astype(mx.float32)) for array in found]
        errors[name] = float(np.square(np.concatenate(wide, axis=1) - exact).mean() ** 0.5)
    assert errors["folded"] <= 1.5 * errors["stock"]
