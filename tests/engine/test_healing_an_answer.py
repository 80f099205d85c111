"""A target that reads the prompt behind its translated cache while it answers."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny
from tests.support.healings import Chunk, in_a_row, noted

PROMPT = list(range(5, 205))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    return noted(monkeypatch)


@pytest.mark.parametrize("heal", ["interleaved", "layers"])
@pytest.mark.parametrize(("head", "tail", "layers"), [(0, 0, 0), (20, 0, 1), (0, 30, 2)])
@pytest.mark.parametrize("pair", [("dense", "wide"), ("dense", "moe"), ("wide", "dense")])
def test_the_prompt_is_read_once_behind_the_answer(
    models: dict[str, LanguageModel],
    read: list[Chunk],
    pair: tuple[str, str],
    head: int,
    tail: int,
    layers: int,
    heal: str,
) -> None:
    source, target = (models[name] for name in pair)
    translator = kv.fit(source, target, [Sample(tuple(PROMPT), ())])
    native = {"native_head": head, "native_tail": tail, "native_layers": layers}
    settings = {"translator": translator, "max_tokens": 250, **native}
    plain = list(kv.stream_generate(source, target, PROMPT, **settings))
    assert read == []
    again = list(kv.stream_generate(source, target, PROMPT, heal=heal, **settings))
    assert again[0].token == plain[0].token  # nothing is read before the first token
    assert in_a_row(read, head) == len(PROMPT) - 1 - head
    # What the prompt's places hold now is what the target alone makes of them.
    own = make_prompt_cache(target.model)
    target.model(mx.array(PROMPT)[None], cache=own)
    for cache, wanted in zip(read[-1].cache, own, strict=True):
        for side in ("keys", "values"):
            a, b = (np.array(getattr(c, side)[0, :, : len(PROMPT) - 1]) for c in (cache, wanted))
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
        assert cache.offset >= len(PROMPT)


def test_a_short_answer_is_read_behind_as_far_as_it_goes(
    models: dict[str, LanguageModel], read: list[Chunk]
) -> None:
    source, target = models["dense"], models["wide"]
    translator = kv.fit(source, target, [Sample(tuple(PROMPT), ())])
    answer = kv.generate(
        source, target, PROMPT, translator=translator, max_tokens=3, heal="interleaved",
        heal_share=0.9,
    )  # fmt: skip
    assert isinstance(answer, str) and 0 < in_a_row(read) < 150


def test_what_is_refused(models: dict[str, LanguageModel], tmp_path: Any) -> None:
    source, target = models["dense"], models["moe"]
    for options, message in (
        ({"heal": "idle"}, "heal is 'idle'; give interleaved or layers"),
        ({"heal": "interleaved", "heal_share": 0.0}, "heal_share is 0.0; give the share"),
        ({"heal_share": 0.3}, "heal_share has no effect without heal"),
        ({"heal": "interleaved", "strategy": "native"}, "heal has no effect with strategy"),
        (
            {"heal": "interleaved", "kv_bits": 8, "kv_group_size": 32},
            "and kv_bits does; leave one of them out",
        ),
        ({"heal": "interleaved", "draft_model": source}, "and draft_model does; leave one"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.generate(source, target, PROMPT, max_tokens=3, **options)
    name, facts = tiny.FAMILIES["gemma3"]
    gemmas = [kv.load(tiny.write_tiny_model(tmp_path / end, name, **facts)) for end in "st"]
    with pytest.raises(kv.UnsupportedModelError, match="cannot be healed while it answers"):
        kv.generate(*gemmas, PROMPT, max_tokens=3, heal="interleaved")
