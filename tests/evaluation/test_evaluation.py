"""Recall and KL against independent values, and controls that must differ."""

from __future__ import annotations

import random

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.dialogues import ANSWER
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample


@pytest.fixture
def sample(models: dict[str, LanguageModel]) -> quality.RecallSample:
    talk = dialogues.dialogue(random.Random(3), 2, 2)
    return quality.recall_sample(models["dense"], talk)


def test_recalled_tokens_are_exactly_the_values(models: dict[str, LanguageModel]) -> None:
    tokenizer = models["dense"].tokenizer
    for seed in range(10):
        talk = dialogues.dialogue(random.Random(seed), 3, 3)
        sample = quality.recall_sample(models["dense"], talk)
        for fact, indices in zip(talk.asked, sample.recalled, strict=True):
            assert tokenizer.decode([sample.continuation[i] for i in indices]).strip() == fact.value
        text = tokenizer.decode(list(sample.continuation))
        assert text.startswith(talk.asked[0].say(ANSWER) + "<|im_end|>\n<|im_start|>user\n")
        assert tokenizer.decode(list(sample.prefix)).endswith("<think>\n\n</think>\n\n")


def test_kl_and_hits_against_float64(
    models: dict[str, LanguageModel], sample: quality.RecallSample
) -> None:
    """One forward pass over everything for native, one over the continuation for hidden."""
    model = models["dense"]
    score = quality.score(model, [sample], {"hidden": conditions.hidden(model)})

    def logs(tokens: list[int]) -> np.ndarray:
        cache = make_prompt_cache(model.model)
        out = np.array(model.model(mx.array(tokens)[None], cache=cache)[0], np.float64)
        out = out[-len(sample.continuation) - 1 : -1]
        return (
            out
            - np.log(np.exp(out - out.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - (out.max(-1, keepdims=True))
        )

    native = logs([*sample.prefix, *sample.continuation])
    alone = logs([sample.prefix[-1], *sample.continuation])
    kl = (np.exp(native) * (native - alone)).sum(-1)
    assert score["hidden"].kl[0] == pytest.approx(kl.mean(), rel=1e-4)
    values = [i for indices in sample.recalled for i in indices]
    assert score["hidden"].value_kl[0] == pytest.approx(kl[values].mean(), rel=1e-4)
    best = native.argmax(-1)
    hits = tuple(all(best[i] == sample.continuation[i] for i in row) for row in sample.recalled)
    assert score["native"].hits == hits


def test_shuffled_translator_is_another_one(
    models: dict[str, LanguageModel], sample: quality.RecallSample
) -> None:
    model = models["dense"]
    translator = kv.fit(model, model, [Sample(sample.prefix, ())])
    control = conditions.shuffled(translator)
    ours, theirs = translator.to_weights().arrays, control.to_weights().arrays
    assert all(not np.array_equal(ours[name], theirs[name]) for name in ours)
    assert {a.tobytes() for a in ours.values()} == {a.tobytes() for a in theirs.values()}
    makers = {"fitted": conditions.translated(model, model, translator),
                  "shuffled": conditions.translated(model, model, control)}  # fmt: skip
    scores = quality.score(model, [sample], makers)
    assert scores["shuffled"].kl[0] > 10 * scores["fitted"].kl[0]
