"""Layers with a window take its tokens alone, and lose nothing by it: on a CPU, to the bit."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches, translators
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import products
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.products import BLOCK
from tests.support import tiny
from tests.support.native_caches import alike, held
from tests.support.tiny import Case

CASES = (
    Case("gemma4x16", "gemma1x32", nu=1),
    Case("gemma4x16", "gemma1x32", 2, True, (("bias", True),)),
    Case("gemma2x32", "gemma4x16", 2, False, (("capture", "post_rope"),)),
    Case("same2x32", "shared4x16", nu=2),
)
# Tokens a chunk, tokens a block that products are made in, whether they are cut as on a GPU.
SETTINGS = ((7, BLOCK, False), (2048, BLOCK, True), (2048, 16, False), (50, 16, True))
NEXT = ([5], [7, 11, 13], *([token] for token in range(20, 30)))  # more than any window
load = functools.cache(kv.load)


def windowless(root: Path, name: str) -> LanguageModel:
    """One of ``tiny.MODELS`` whose layers see all."""
    folder = root / f"{name}-whole"
    model_type, options = tiny.MODELS[name]
    if not folder.exists():
        tiny.write_tiny_model(folder, model_type, **{**options, "sliding_window": tiny.CONTEXT})
    return load(folder)


def every_token(
    source: LanguageModel,
    target: LanguageModel,
    whole: LanguageModel,
    translator: Translator,
    prefix: Sequence[int],
    step: int,
) -> list[Any]:
    """The target's cache, written by mlx-lm itself, of a translation that leaves nothing out."""
    kept = caches.empty(whole)
    for states in capture.prefill(source, prefix, step):
        moved = capture.move(states, source, translator.config.capture)
        caches.append(kept, translator(moved), whole)
    own = make_prompt_cache(target.model)
    for cache, layer in zip(own, kept, strict=True):
        assert layer.offset == len(prefix)
        cache.update_and_fetch(*(a[..., : len(prefix), :] for a in (layer.keys, layer.values)))
    return own


def logits(model: LanguageModel, cache: list[Any]) -> np.ndarray:
    """Those of ``NEXT``, run piece by piece."""
    return np.concatenate([np.array(model.model(mx.array([p]), cache=cache)[0]) for p in NEXT])


def assert_nothing_is_lost(root: Path, case: Case, step: int, translator: Translator) -> None:
    """At eight times the window and a little more, so that it begins within a chunk."""
    source, target = map(load, tiny.write_case(root, case)[:2])
    whole, layers = windowless(root, case.target), target.geometry.layers
    window = next(layer.window for layer in layers if layer.window)
    tokens = tiny.random_tokens(8 * window + 4)
    expected = every_token(source, target, whole, translator, tokens[:-1], step)
    found = kv.hand_over(source, target, tokens, translator=translator, prefill_step_size=step)
    for mine, theirs, layer in zip(found, expected, layers, strict=True):
        assert layer.window is None or mine.keys.shape[2] == window  # no more is kept
        pairs = zip(held(mine), held(theirs), strict=True)
        assert all(alike(a, b) for a, b in pairs)
    assert alike(logits(target, found), logits(target, expected), 1e-4)


@pytest.mark.parametrize(
    ("case", "step", "block", "batched"),
    [(CASES[0], *way) for way in SETTINGS] + [(case, *SETTINGS[-1]) for case in CASES[1:]],
)
def test_decoding_reads_what_every_token_would_give(
    root: Path, monkeypatch: pytest.MonkeyPatch, case: Case, step: int, block: int, batched: bool
) -> None:
    """Rings and logits, while they turn."""
    monkeypatch.setattr(products, "BLOCK", block)
    folder = tiny.write_case(root, case)[2]
    translator = translators.build(*translator_folder.read(folder), batched=batched)
    assert_nothing_is_lost(root, case, step, translator)


@pytest.mark.parametrize("bits", [None, 8])
def test_so_it_is_with_hidden_units_and_packed_weights(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    """Products of products, and of matrices of which some are packed."""
    monkeypatch.setattr(products, "BLOCK", 16)
    folder = tiny.write_mlp_translator(tmp_path / "mlp", tiny.write_case(root, CASES[0])[2])
    translator = translators.build(*translator_folder.read(folder), quantize=bits)
    assert_nothing_is_lost(root, CASES[0], 2048, translator)


def test_what_a_ring_holds_counts(root: Path) -> None:
    """Negative control: one token of the rings changes what is decoded next."""
    *ends, folder = tiny.write_case(root, CASES[0])
    source, target = map(load, ends)
    tokens = tiny.random_tokens(65)
    found, spoiled = (kv.hand_over(source, target, tokens, translator=folder) for _ in range(2))
    for cache, layer in zip(spoiled, target.geometry.layers, strict=True):
        if layer.window:
            cache.values[..., 1, :] = 0  # the oldest but one: the oldest gives way to the next
    assert np.abs(logits(target, found)[0] - logits(target, spoiled)[0]).max() > 1e-2
