"""Recall and KL against independent values, and controls that must differ."""

from __future__ import annotations

import random

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import reuse
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.dialogues import ANSWER
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny


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


# ---- DroidSpeak --------------------------------------------------------------------------


def entries(cache: list) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(c.keys[..., : c.offset, :]), np.array(c.values[..., : c.offset, :]))
            for c in cache]  # fmt: skip


@pytest.fixture
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[LanguageModel]:
    """Two models of one shape and different weights."""
    root = tmp_path_factory.mktemp("twins")
    return [
        kv.load(tiny.write_tiny_model(root / str(seed), kind, seed=seed, layers=4, kv_heads=2,
                                      head_dim=32))
        for seed, kind in ((1, "qwen3"), (2, "qwen3_moe"))
    ]  # fmt: skip


@pytest.mark.parametrize("step_size", [2048, 5])
def test_reuse_is_between_verbatim_and_native(twins: list[LanguageModel], step_size: int) -> None:
    source, target = twins
    tokens = tiny.random_tokens(17)
    own, theirs = (entries(conditions.native(m, step_size)(tokens)) for m in (target, source))
    for recomputed in range(5):
        found = entries(reuse.reused(source, target, recomputed, step_size)(tokens))
        expected = own[:recomputed] + theirs[recomputed:]
        for pair, wanted in zip(found, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(pair, wanted, strict=True))
    assert not np.array_equal(own[0][0], theirs[0][0])


def test_reuse_needs_one_shape(models: dict[str, LanguageModel], twins: list) -> None:
    with pytest.raises(kv.IncompatibleTranslatorError, match="cache layers: 4, expected 3"):
        reuse.reused(models["dense"], twins[1])
    with pytest.raises(ValueError, match="recomputed is 5"):
        reuse.reused(*twins, 5)
