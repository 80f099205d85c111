"""Layers that read source layers of another kind: planted maps, every verb, and what is refused.

A planted pair: in both models nothing is added to what the embedding says of a token, so that what
enters each layer is the same in both, and each projection of the target is a known linear map of
those of one source layer. Only the target's last layer adds to it, so its answer needs the cache. A
fit has to find these maps, and the cache has to be the target's own.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import hybrid_models, tiny
from tests.support.fixtures import Models
from tests.support.native_caches import TOKENS, logits, native
from tests.support.talks import apart

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.errors.KVLingoWarning")
Arrays = dict[str, np.ndarray]
SILENT = ("o_proj", "out_proj", "down_proj", "w2")  # what a block adds ends in one of these
NORMS = ("input_layernorm.weight", "operator_norm.weight", "norm.weight")
# Narrow, so that a layer's rows say less than the whole of what enters it: maps are then unique,
# and no layer will do in another's place.
NARROW: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
    "hybrid_override_pattern": ["M", "M", "*", "M"], "num_hidden_layers": 4,
}  # fmt: skip


def blocks(arrays: Arrays, layer: int) -> dict[str, str]:
    """The names of a layer's tensors, by what follows its number."""
    begin = f"layers.{layer}."
    return {n.partition(begin)[2]: n for n in arrays if begin in n}


def rows(arrays: Arrays, layer: int, config: dict[str, Any]) -> list[np.ndarray]:
    """The matrices that make a layer's keys and values of what enters it, by the format page."""
    own = {last.partition(".")[2]: arrays[n] for last, n in blocks(arrays, layer).items()}
    if "k_proj.weight" in own:
        return [own["k_proj.weight"], own["v_proj.weight"]]
    if "in_proj_qkv.weight" in own:
        return [
            own["in_proj_qkv.weight"],
            np.concatenate([own[f"in_proj_{n}.weight"] for n in "ba"]),
        ]
    if "mamba_num_heads" in config:  # z, then x B C, then dt
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        convolved = inner + 2 * config["n_groups"] * config["ssm_state_size"]
        return np.split(own["in_proj.weight"], [inner, inner + convolved])[1:]
    b, _, x = np.split(own["in_proj.weight"], 3)  # B, C, x
    return [b, x]


def put_rows(arrays: Arrays, layer: int, made: list[np.ndarray]) -> None:
    """Give a target's layer the matrices that :func:`rows` finds."""
    names = {last.partition(".")[2]: n for last, n in blocks(arrays, layer).items()}
    if "k_proj.weight" in names:
        put = {"k_proj": made[0], "v_proj": made[1]}
    elif "in_proj_qkv.weight" in names:
        b, a = np.split(made[1], 2)
        put = {"in_proj_qkv": made[0], "in_proj_b": b, "in_proj_a": a}
    else:
        c = np.split(arrays[names["in_proj.weight"]], 3)[1]
        put = {"in_proj": np.concatenate([made[0], c, made[1]])}
    for name, array in put.items():
        arrays[names[f"{name}.weight"]] = np.ascontiguousarray(array.astype(np.float32))


def silence(arrays: Arrays, layers: int, embedding: np.ndarray) -> None:
    """Give a model an embedding and equal norms, and let its first layers add nothing to it."""
    own = next(n for n in arrays if n.endswith(("embed_tokens.weight", "embeddings.weight")))
    arrays[own] = embedding
    for layer in range(len(layers_of(arrays))):
        for last, name in blocks(arrays, layer).items():
            if last in NORMS:
                arrays[name] = np.ones_like(arrays[name])
            if layer < layers and last.split(".")[-2] in SILENT:
                arrays[name] = np.zeros_like(arrays[name])


def layers_of(arrays: Arrays) -> set[str]:
    """The numbers of a model's layers."""
    return {n.split("layers.")[1].split(".")[0] for n in arrays if "layers." in n}


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], list[int]]] = {
    # Source, target, and the source layer that each target layer reads.
    "plain to gated delta": (
        "qwen3", {"layers": 4, "kv_heads": 2, "head_dim": 8},
        "qwen3_5", {"num_hidden_layers": 5, "full_attention_interval": 2}, [0, 1, 2, 2, 3],
    ),
    "gated delta to plain": (
        "qwen3_5", {"num_hidden_layers": 4, "full_attention_interval": 4, **NARROW, **DELTA},
        "qwen3", {"layers": 3, "kv_heads": 2, "head_dim": 32}, [0, 2, 1],
    ),
    "mamba2 to short convolutions": (
        "nemotron_h", {**NARROW, **MAMBA}, "lfm2", {}, [0, 1, 2, 3, 2],
    ),
}  # fmt: skip


def write(folder: Path, name: str, seed: int, **more: Any) -> Path:
    if name in hybrid_models.CONFIGS:
        return hybrid_models.write_hybrid_model(folder, name, seed=seed, **more)
    return tiny.write_tiny_model(folder, name, seed=seed, **more)


class Planted:
    """A pair of models, and the maps between them."""

    def __init__(self, root: Path, case: str) -> None:
        name, more, target, theirs, self.reads = CASES[case]
        self.root = root
        folders = [write(root / "s", name, 1, **more), write(root / "t", target, 2, **theirs)]
        arrays = [load_file(folder / "model.safetensors") for folder in folders]
        configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
        embedding = np.random.default_rng(6).standard_normal((tiny.VOCAB, 64)).astype(np.float32)
        for own, live in zip(arrays, (0, 1), strict=True):
            silence(own, len(layers_of(own)) - live, embedding)
        rng = np.random.default_rng(7)
        self.maps: Arrays = {}
        for t, s in enumerate(self.reads):
            given = rows(arrays[0], s, configs[0])
            wanted = rows(arrays[1], t, configs[1])
            alike = all(
                "k_proj.weight" in str(blocks(a, n)) for a, n in zip(arrays, (s, t), strict=True)
            )
            made = []
            for side, own, goal in zip(("keys", "values"), given, wanted, strict=True):
                read = own if alike else np.concatenate(given)
                m = rng.standard_normal((len(goal), len(read))) / np.sqrt(len(read))
                self.maps[f"{side}.{t}.weight"] = m
                made.append(m @ read.astype(np.float64))
            put_rows(arrays[1], t, made)
        for folder, own in zip(folders, arrays, strict=True):
            tiny.write_tensors(folder / "model.safetensors", own)
        self.source, self.target = map(kv.load, folders)
        lists = tuple((s,) for s in self.reads)
        self.assignment = Assignment(lists, lists)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Planted]:
    return {case: Planted(tmp_path_factory.mktemp("planted"), case) for case in CASES}


def samples(count: int = 12, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(5, 280, (count, 60)).tolist()
    return [Sample(tuple(tokens[:50]), tuple(tokens[50:])) for tokens in drawn]


def largest_error(made: Sequence[Any], own: Sequence[Any]) -> float:
    """The largest relative error of a cache's arrays for all but the last of ``TOKENS``."""
    errors, tokens = [], len(TOKENS) - 1
    for mine, theirs in zip(made, own, strict=True):
        for a, b in zip(caches.held(mine).values(), caches.held(theirs).values(), strict=True):
            a, b = (np.array(x)[..., :tokens, :] for x in (a, b))
            errors.append(float(np.abs(a - b).max() / np.abs(b).max()))
    return max(errors)


@pytest.mark.parametrize("case", CASES)
def test_a_fit_finds_planted_maps(case: str, planted: dict[str, Planted]) -> None:
    pair = planted[case]
    found = kv.fit(pair.source, pair.target, samples(), assignment=pair.assignment, ridge=0.0)
    arrays = found.to_weights().arrays
    assert sorted(arrays) == sorted(pair.maps)
    for name, expected in pair.maps.items():
        assert arrays[name].shape == expected.shape, name
        np.testing.assert_allclose(arrays[name], expected, rtol=0, atol=2e-4, err_msg=name)
    expected = logits(pair.target, native(pair.target, TOKENS[:-1], 7), TOKENS[-1], 4)
    ways: list[dict[str, int]] = [{}, {"native_layers": 1}, {"native_tail": 3}]
    for step, way in zip((1, 7, 64), ways, strict=True):
        made = kv.hand_over(
            pair.source, pair.target, TOKENS, translator=found, prefill_step_size=step, **way
        )
        assert largest_error(made, native(pair.target, TOKENS[:-1], 7)) < 1e-3
        answer = logits(pair.target, made, TOKENS[-1], 4)
        np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("case", "method"), zip(CASES, ("r2", "greedy", "r2"), strict=True))
def test_a_choice_from_data_finds_the_layers(
    case: str, method: str, planted: dict[str, Planted]
) -> None:
    """Each state explains something, so those of one layer count together."""
    pair = planted[case]
    found = kv.fit(pair.source, pair.target, samples(), assignment=method, ridge=0.0)
    arrays, chosen = found.to_weights().arrays, found.config.assignment
    assert chosen == pair.assignment
    for name, expected in pair.maps.items():
        np.testing.assert_allclose(arrays[name], expected, rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("case", ["plain to gated delta", "gated delta to plain"])
def test_a_conversation_of_two_kinds(case: str, planted: dict[str, Planted]) -> None:
    """What the target's line holds is what it reads by itself; with shuffled maps it is not."""
    pair = planted[case]
    found = kv.fit(pair.source, pair.target, samples(), assignment=pair.assignment, ridge=0.0)
    models, errors = {"one": pair.source, "other": pair.target}, []
    for given in (found, conditions.shuffled(found)):
        talk = kv.Conversation(models, [given], on_missing="reprefill")
        for number, name in enumerate(("one", "other", "one", "other")):
            talk.reply(name, f"{name} {number} is", max_tokens=9)
        line = talk.lines["other"]
        assert any(span.passes == 1 for span in line.spans)
        errors.append(apart(line))
    assert errors[0] < 1e-3 < 0.1 < errors[1]


def test_an_assignment_of_windows(families: Models) -> None:
    """Layers with windows beside others: the others are read, and windows refused."""
    source, target = families["gemma3"], families["qwen3_5"]
    whole = [i for i, g in enumerate(source.geometry.layers) if g.window is None]
    found = kv.fit(source, target, samples(30)).config.assignment
    assert {s for read in found.keys for s in read} == set(whole)
    local = next(i for i, g in enumerate(source.geometry.layers) if g.window is not None)
    lists = ((local,), *found.keys[1:])
    told = rf"keys\[0\] crosses attention groups: source layer {local} is not gated_delta"
    with pytest.raises(MalformedTranslatorError, match=told):
        kv.fit(source, target, samples(30), assignment=Assignment(lists, found.values))
