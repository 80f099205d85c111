"""The same model on both sides and identity maps: exactly what plain mlx-lm does."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx

import pytest
from mlx_lm.generate import generate_step

import kvlingo_mlx as kv
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.identity import TOKENS, identity_of

NEW = 40


@pytest.fixture(params=["dense", "moe", "dense 4-bit", "moe 4-bit"])
def model(request, models, quantised_models) -> LanguageModel:
    name, *four_bit = request.param.split()
    return (quantised_models if four_bit else models)[name]


def decode(model: LanguageModel, cache: list | None, **options: Any) -> list[int]:
    prompt = TOKENS if cache is None else TOKENS[-1:]
    steps = generate_step(
        mx.array(prompt), model.model, max_tokens=NEW, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("step", [7, 20, 2048])
@pytest.mark.parametrize("head_mixing", [True, False])
def test_decodes_token_for_token(model: LanguageModel, step: int, head_mixing: bool) -> None:
    translator = identity_of(model, head_mixing=head_mixing)
    cache = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=step)
    assert decode(model, cache) == decode(model, None)


@pytest.mark.parametrize("point", ["post_norm", "post_rope"])
def test_other_capture_points(model: LanguageModel, point: str) -> None:
    translator = identity_of(model, capture=point)
    cache = kv.hand_over(model, model, TOKENS, translator=translator, prefill_step_size=20)
    assert decode(model, cache) == decode(model, None)


def test_positions_shifted_by_one_decode_something_else(models) -> None:
    """The negative control: were positions ignored, the tests above would still pass."""
    model = models["dense"]
    cache = kv.hand_over(model, model, TOKENS, translator=identity_of(model))
    for layer, finish in zip(cache, model.finishes, strict=True):
        layer.keys = finish.rope(layer.keys * 1.0, offset=0)  # rotates every key once more
    assert decode(model, cache) != decode(model, None)


def test_taps_leave_no_trace(models) -> None:
    model = models["dense"]
    before = [type(a.k_proj) for a in model.attentions]
    spans = capture.prefill(model, TOKENS, 7)
    next(spans)
    assert [type(a.k_proj) for a in model.attentions] == before  # between two chunks, too
    spans.close()
    with (
        pytest.raises(RuntimeError, match="captured already"),
        capture.tap_keys_and_values(model),
    ):
        next(capture.prefill(model, TOKENS, 7))
    assert [type(a.k_proj) for a in model.attentions] == before
