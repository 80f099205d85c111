"""Answers written together beside the same answers alone, and what their model wrote for each."""

from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from kvlingo_mlx import caches
from kvlingo_mlx.engine.batches import Batch, Row
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from tests.support.fixtures import Models, Patch
from tests.support.native_caches import native
from tests.support.tiny import random_tokens

GREEDY = Choice(None, None, None, ())
FAMILIES = ("qwen3", "gemma3", "deepseek_v3", "qwen3_moe", "converted_mla")
HYBRIDS = ("qwen3_5", "granitemoehybrid", "nemotron_h", "lfm2")
TIE = 2e-3


def check_greedy(model: LanguageModel, tokens: list[int], answer: list[int]) -> None:
    """Each token is a first choice of the model, which reads everything before it anew."""
    logits = model.model(mx.array([tokens + answer]))[0, len(tokens) - 1 : -1]
    chosen = logits[mx.arange(len(answer)), mx.array(answer)]
    assert (logits.max(axis=-1) - chosen).max().item() < TIE


def staggered(
    model: LanguageModel, prompts: list[list[int]], lengths: list[int], *, records: bool = True
) -> list[tuple[Row, list[int], list[Any], list[KVStates]]]:
    """Answers that begin three steps after one another and end at different lengths."""
    batch, step = Batch(model, records=records), 0
    rows: dict[int, Row] = {}
    given: dict[int, list[int]] = {}
    done: dict[int, tuple[Row, list[int], list[Any], list[KVStates]]] = {}
    while len(done) < len(prompts):
        index, on_time = divmod(step, 3)
        if not on_time and index < len(prompts):
            cache = native(model, prompts[index][:-1], 99)
            rows[index] = batch.join(cache, prompts[index], GREEDY, 100)
            given[index] = []
        batch.step()
        step += 1
        for each, row in list(rows.items()):
            response = row.take()
            assert response is not None and row.take() is None
            given[each].append(int(response.token))
            if row.over or len(given[each]) == lengths[each]:
                left = batch.leave(rows.pop(each))
                assert left is not None
                done[each] = (row, given[each], *left)
    assert not len(batch)
    return [done[index] for index in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES + HYBRIDS)
def test_each_answer_is_the_models_own(families: Models, family: str) -> None:
    model = families[family]
    prompts = [random_tokens(length, length) for length in (30, 7, 61, 18)]
    for tokens, (row, answer, cache, parts) in zip(
        prompts, staggered(model, prompts, [20, 9, 14, 3]), strict=True
    ):
        check_greedy(model, tokens, answer)
        assert row.run == [tokens[-1], *answer]
        counting = [each for each in cache if not caches.is_recurrent(each)]
        assert {each.offset for each in counting} == {len(tokens) + len(answer)}
        check_cache(model, [*tokens, *answer], cache)
        check_states(model, [*tokens, *answer], len(tokens) - 1, parts)


def check_cache(model: LanguageModel, tokens: list[int], cache: list[Any]) -> None:
    """The caches go on as those of a model that has read all of it at once."""
    fresh = native(model, tokens, 99)
    one, other = (model.model(mx.array([[7, 9]]), cache=each) for each in (cache, fresh))
    np.testing.assert_allclose(np.array(one), np.array(other), atol=TIE)


def check_states(
    model: LanguageModel, tokens: list[int], start: int, parts: list[KVStates]
) -> None:
    """What was recorded is what the projections write when everything is read at once."""
    (whole,) = capture.prefill(model, tokens, len(tokens))
    for side in ("keys", "values"):
        for layer, expected in enumerate(whole.side(side)):
            found = mx.concatenate([part.side(side)[layer] for part in parts], axis=1)
            np.testing.assert_allclose(np.array(found), np.array(expected[:, start:]), atol=TIE)


def test_a_failing_processor_ends_its_own_answer(families: Models) -> None:
    model, calls = families["qwen3"], []

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.tolist())
        if len(calls) == 4:
            raise ZeroDivisionError("mine")
        return logits

    batch, tokens = Batch(model, records=True), [random_tokens(9, 1), random_tokens(12, 2)]
    choices = [Choice(None, [broken], None, ()), GREEDY]
    rows = [
        batch.join(native(model, each[:-1], 99), each, choice, 100)
        for each, choice in zip(tokens, choices, strict=True)
    ]
    answers: list[list[int]] = [[], []]
    for _ in range(8):
        batch.step()
        for index, row in enumerate(rows):
            if index or len(answers[0]) < 2:
                response = row.take()
                assert response is not None
                answers[index].append(int(response.token))
    with pytest.raises(ZeroDivisionError, match="mine"):
        while rows[0].take() is not None:
            pass
    batch.leave(rows[0])
    check_greedy(model, tokens[1], answers[1])
    assert calls[0] == tokens[0] and calls[2] == [*tokens[0], *answers[0]]


def test_caches_that_cannot_be_merged_stay_alone(families: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr("kvlingo_mlx.engine.batches.can_merge", lambda _: False)
    prompts = [random_tokens(9, 1), random_tokens(12, 2), random_tokens(5, 3)]
    for tokens, (_, answer, _, _) in zip(
        prompts, staggered(families["qwen3"], prompts, [6, 9, 4]), strict=True
    ):
        check_greedy(families["qwen3"], tokens, answer)


def test_an_error_of_the_model_ends_all_its_answers(families: Models, monkeypatch: Patch) -> None:
    model, tokens = families["qwen3"], random_tokens(9, 1)
    batch = Batch(model, records=True, size=2)
    rows = [batch.join(native(model, tokens[:-1], 99), tokens, GREEDY, 100) for _ in range(2)]
    assert batch.full
    monkeypatch.setattr(
        "kvlingo_mlx.engine.batches.GenerationBatch.next",
        lambda _: (_ for _ in ()).throw(RuntimeError("out of memory")),
    )
    batch.step()
    for row in rows:
        assert row.take() is not None  # the first token was there before
        with pytest.raises(KVLingoError, match="cannot go on: out of memory"):
            row.take()
        assert batch.leave(row) is None
    assert not len(batch) and not batch.full
