"""Analysis of two models' caches: planted relations, mlx-lm's own caches, and the verb."""

import json

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.paper.analysis import corpus as texts
from benchmarks.paper.analysis.corpus import Corpus
from benchmarks.paper.analysis.linearity import fit_layer
from benchmarks.paper.analysis.network import Recipe
from benchmarks.paper.analysis.random_init import randomly_initialised
from benchmarks.paper.analysis.report import Settings, closed_form_alignment, compare
from benchmarks.paper.analysis.states import States, collect
from benchmarks.paper.commands import run
from tests.support import tiny
from tests.support.fixtures import Models, Printed

SIDES = ("keys", "values")


def corpus_of(lengths: list[int], held_out: set[int]) -> Corpus:
    documents = tuple(tuple(tiny.random_tokens(n, seed=i)) for i, n in enumerate(lengths))
    return Corpus(documents, frozenset(held_out))


def r2_by_hand(predicted: np.ndarray, y: np.ndarray, fitted: np.ndarray) -> float:
    """One less residual over variance around the fitted tokens' mean."""
    residual, variance = ((y - around) ** 2 for around in (predicted, fitted.mean(axis=0)))
    return float(1 - residual.sum() / variance.sum())


def test_documents_are_cut_alike_and_split_whole() -> None:
    words = [list(range(n)) for n in (3, 10, 10, 7, 10, 10, 10, 10, 10, 10)]
    corpus = texts.split(words, seed=3)
    assert len(corpus.held_out) == 2
    assert corpus.positions.tolist() == [i for document in words for i in document]
    owners = np.repeat(np.arange(10), [len(d) for d in words])
    assert set(owners[corpus.scored]) == corpus.held_out
    assert set(owners[~corpus.scored]).isdisjoint(corpus.held_out)
    assert texts.split(words, seed=3) == corpus and texts.split(words, seed=4) != corpus
    assert texts.split(words[:2], seed=0).scored.any()
    with pytest.raises(ValueError, match=r"hold 1 usable document\(s\); at least 2"):
        texts.split(words[:1], seed=0)


def test_records_are_read_whole(models: Models) -> None:
    """Texts from end to end, conversations through their last reply, empty ones passed over."""
    tokenizer = models["dense"].tokenizer
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}]
    records = [{"text": "abc " * 50}, {"text": ""}, {"messages": talk}, {"text": "unread"}]
    found = texts.read(records, tokenizer, documents=2, tokens=200, context_length=512)
    assert found[0] == tuple(tokenizer.encode("abc " * 50))[:100]
    rendered = tokenizer.decode(list(found[1]))
    assert "Hi" in rendered and "Good day" in rendered
    short = texts.read(records, tokenizer, documents=2, tokens=200, context_length=20)
    assert [len(ids) for ids in short] == [20, 20]
    alone = texts.read(records[:1], tokenizer, documents=64, tokens=120, context_length=512)
    assert len(alone[0]) == 120  # the allowance of documents that are not there


def test_states_are_the_models_own_cache(models: Models) -> None:
    model, corpus = models["moe"], corpus_of([5, 9], {1})
    found = {point: collect(model, corpus, point) for point in ("pre_norm", "post_rope")}
    start = 0
    for document in corpus.documents:
        cache = make_prompt_cache(model.model)
        model.model(mx.array([document]), cache=cache)
        rows = slice(start, start := start + len(document))
        for layer, own in enumerate(cache):
            for side, stored in zip(SIDES, (own.keys, own.values), strict=True):
                heads = np.array(stored)[0, :, : len(document)]
                expected = heads.swapaxes(0, 1).reshape(len(document), -1)
                states = found["post_rope"].side(side)[layer][rows]
                assert states == pytest.approx(expected, abs=1e-5)
    middle, raw = collect(model, corpus, "post_norm"), found["pre_norm"]
    for layer, attention in enumerate(model.attentions):
        heads = raw.keys[layer].astype(np.float64).reshape(14, attention.n_kv_heads, -1)
        size = np.sqrt((heads**2).mean(axis=-1, keepdims=True) + model.config["rms_norm_eps"])
        normed = heads / size * np.array(attention.k_norm.weight)
        assert middle.keys[layer] == pytest.approx(normed.reshape(14, -1), abs=1e-4)
        assert np.array_equal(middle.values[layer], raw.values[layer])


def test_random_weights(models: Models, quantised_models: Models) -> None:
    trained = dict(tree_flatten(models["moe"].model.parameters()))
    before = {name: np.array(array) for name, array in trained.items()}
    one, again, other = (randomly_initialised(models["moe"], seed) for seed in (1, 1, 2))
    weights = [dict(tree_flatten(m.model.parameters())) for m in (one, again, other)]
    for name, array in weights[0].items():
        drawn = np.array(array)
        assert np.array_equal(drawn, np.array(weights[1][name]))
        if drawn.ndim == 1:
            assert (drawn == 1).all()
            continue
        assert not np.array_equal(drawn, np.array(weights[2][name]))
        assert drawn.std() == pytest.approx(0.02, rel=0.2) and abs(drawn.mean()) < 2e-3
    assert all(np.array_equal(before[name], np.array(a)) for name, a in trained.items())
    plain = randomly_initialised(quantised_models["dense"], 1)
    assert plain.geometry == models["dense"].geometry
    assert collect(plain, corpus_of([6, 6], {0}), "post_norm").keys[0].shape == (12, 64)


def test_linear_r2_is_held_out() -> None:
    """Against normal equations solved here; scored tokens leave no trace in the fit."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(90, 5)), rng.normal(size=(90, 4)) + 2
    y[:, :3] += x[:, :3]
    scored = rng.random(90) < 0.3
    a, b = x[~scored], y[~scored]
    ridge = 1e-3 * np.mean(np.diag(a.T @ a)) * np.eye(5)
    weight = np.linalg.inv(a.T @ a + ridge) @ a.T @ b
    found = fit_layer(x, y, scored, None)
    assert found.linear == pytest.approx(r2_by_hand(x[scored] @ weight, y[scored], b))
    assert found.affine > found.linear + 0.3 and found.mlp is None
    y[scored] = 100 * x[scored, :4]
    assert fit_layer(x, y, scored, None).linear < 0.1


def test_planted_relations_of_a_pair() -> None:
    """Linear keys, values beyond a linear map: R2 says which is which, layer by layer."""
    rng = np.random.default_rng(2)
    corpus = corpus_of([100] * 20, {3, 8, 15, 17})
    source = [rng.normal(size=(2000, 12)) for _ in range(3)]
    maps = [rng.normal(size=(12, 12)) for _ in range(3)]
    keys = [x @ m for x, m in zip(source, maps, strict=True)]
    values = [np.maximum(x @ m, 0) + 0.3 * x for x, m in zip(source, maps, strict=True)]
    settings = Settings(epochs=6, hidden=64)
    pair = States(source, source), States(keys, values)
    report = compare(*pair, corpus, settings, ({3}, {3}))
    assert report.source_layers == [0, 1, 2]
    assert report.fitted == 1600 and report.scored == 400
    for fit in report.linearity["keys"]:
        assert fit.linear > 1 - 1e-5 and fit.affine > 1 - 1e-5 and fit.mlp >= fit.linear
    for fit in report.linearity["values"]:
        assert 0.2 < fit.linear < 0.9 and fit.mlp > fit.linear + 0.1
        assert fit.mlp == fit.network and fit.epochs > 0
    again = compare(*pair, corpus, settings, ({3}, {3}))
    assert json.dumps(again.to_json()) == json.dumps(report.to_json())
    # Layers in reverse: nothing left to predict, and CKA says where it went.
    turned = compare(
        States(source, source),
        States(keys[::-1], values[::-1]),
        corpus,
        Settings(mlp=False, heads=False),
        ({3}, {3}),
    )
    assert abs(turned.linearity["keys"][0].linear) < 0.1
    assert turned.linearity["keys"][1].linear > 1 - 1e-5
    assert turned.cka["keys"].cka.argmax(axis=1).tolist() == [2, 1, 0]
    assert turned.cka["keys"].summary.offset == pytest.approx(4 / 3)
    assert turned.heads == {} and turned.linearity["keys"][0].mlp is None


@pytest.mark.parametrize("noise", range(3))
def test_an_mlp_never_counts_for_less_than_its_linear_map(noise: int) -> None:
    """Few tokens and nothing but noise to learn: the network can only overfit."""
    rng = np.random.default_rng(noise)
    x = rng.normal(size=(120, 10))
    y = x @ rng.normal(size=(10, 6)) + 3 * rng.normal(size=(120, 6))
    fit = fit_layer(x, y, np.arange(120) >= 80, Recipe(hidden=128, epochs=20, seed=noise))
    assert fit.network is not None and fit.mlp == max(fit.linear, fit.network)
    if fit.epochs == 0:
        assert fit.network == pytest.approx(fit.linear)


def test_a_permutation_of_heads_is_found() -> None:
    """Target head j reads source head order[j]; keys also hold values, in another order."""
    rng = np.random.default_rng(4)
    heads, width = 4, 3
    order, crossed = [2, 0, 3, 1], [1, 2, 3, 0]
    keys, values = rng.normal(size=(2, 800, heads, width))
    mixed = keys[:, order] @ np.linalg.qr(rng.normal(size=(width, width)))[0]
    target = mixed + 5 * values[:, crossed]
    flat = [a.reshape(800, -1) for a in (keys, values, target, values)]
    source, wanted = States([flat[0]], [flat[1]]), States([flat[2]], [flat[3]])
    found = closed_form_alignment(source, wanted, [0], (heads, heads), seed=0)
    expected = np.zeros((heads, heads))
    expected[order, range(heads)] = 1
    assert found["keys"].grid == pytest.approx(expected, abs=1e-6)
    assert found["keys"].diagonal == pytest.approx(0, abs=1e-6) and found["keys"].p > 0.9
    assert found["values"].grid == pytest.approx(np.eye(heads), abs=1e-6)
    assert found["values"].p == pytest.approx(1 / 24, abs=0.01)


ZOO = ["analyze", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-moe"]
SMALL = ["--documents", "16", "--tokens", "2048", "--epochs", "1", "--hidden", "16"]


def test_verb_on_the_zoo(capsys: Printed) -> None:
    assert run([*ZOO, *SMALL, "--json", "-"]) == 0
    captured = capsys.readouterr()
    entry = json.loads(captured.out)
    assert "bundled dialogues" in captured.err and "an MLP explains" in captured.err
    assert "best after their last epoch (1)" in captured.err
    assert "4 source heads have no counterparts of their own among 2" in captured.err
    assert entry["kind"] == "analyze" and entry["config"]["data"].startswith("bundled dialogues")
    results = entry["results"]
    assert results["source_layers"] == [0, 1, 1, 2, 2, 3]  # 4 layers for 6, halves deeper
    assert results["fitted"] + results["scored"] == 2048
    for side in SIDES:
        assert np.shape(results["cka"][side]["cka"]) == (6, 4)
        for fit in results["linearity"][side]:
            assert 0 < fit["linear"] <= fit["mlp"] <= 1
        mean, fits = results["summary"][side], results["linearity"][side]
        assert mean["mlp"] == pytest.approx(sum(fit["mlp"] for fit in fits) / 6)
        assert mean["linear"] + mean["extra"] + mean["irreducible"] == pytest.approx(1)
        assert np.shape(results["heads"][side]["grid"]) == (4, 2)
        assert len(results["rank"]["source"][side]) == 4
        assert 1 < results["rank"]["target"][side][5]["effective"] < 128
