"""What training takes in memory: the sum by hand, the measured peak, the refusal, by the verbs."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.making import Callbacks, pace
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.on_mlx import memory
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import pair_of
from tests.support import hybrid_models, tiny
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.trainings import random_arrays


def shaped(layers: int, hidden: int, inner: int, heads: int, weights: int) -> Any:
    """A model of a released shape, without its weights: 8 heads of 128, a vocabulary of 151,936."""
    geometry = SimpleNamespace(
        layers=[SimpleNamespace(width=lambda side: 1024, recurrence=None)] * layers,
        embedding_rows=151_936,
    )
    facts = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return SimpleNamespace(
        facts=facts, geometry=geometry, cache_dtype=mx.bfloat16, weights=weights, address=None
    )


def test_the_sum_of_released_shapes(monkeypatch: Patch) -> None:
    """Qwen3 0.6B to 4B in bfloat16, added up by hand, on a GPU and on a CPU."""
    small, large = shaped(28, 1024, 3072, 16, 1_192), shaped(36, 2560, 9728, 32, 8_045)
    monkeypatch.setattr(memory, "weights_bytes", lambda model: model.weights * 10**6)
    a_token = {28: 114_688, 36: 147_456}  # 2 * 1024 numbers of two bytes in each layer
    monkeypatch.setattr(
        memory, "cache_bytes", lambda model, n: n * a_token[len(model.geometry.layers)]
    )
    monkeypatch.setattr(memory, "_numbers", lambda config, hidden: 36 * 2 * 1024 * 1024)
    config: Any = SimpleNamespace(state_maps=False)

    def said(n: int, m: int, *, gpu: bool) -> list[int]:
        monkeypatch.setattr(memory, "on_gpu", lambda: gpu)
        return list(memory.needs(small, large, config, n, m, 3).values())

    weights, translators, most = said(16_384, 2_048, gpu=True)
    assert weights == 9_237_000_000
    assert translators == 3 * 16 * 75_497_472
    states = 16_384 * (114_688 + 147_456)
    layer = 2 * (2.15 * 2_048 * (6 * 9_728 + 2_560) + 4.5 * 32 * 2_048 * 18_432)
    assert most == int(states + 40 * 2_048 * 2_560 * 2 + layer)
    assert said(1_024, 64, gpu=True)[2] == int(
        1_024 * (114_688 + 147_456) + 40 * 64 * 2_560 * 2 + 9.9 * 4 * 64 * 151_936
    )
    # A CPU's scores of a chunk make reading the larger part; the source's states are kept, too.
    reading = 2 * 16_384 * 114_688 + 2 * (2_048 * (6 * 3_072 + 1_024) + 16 * 2_048 * 16_384)
    assert said(16_384, 64, gpu=False)[2] == reading


@pytest.mark.parametrize("matches", [False, True])
@pytest.mark.parametrize(("prefix", "answer"), [(1900, 40), (600, 700)])
def test_the_measured_peak(tmp_path: Path, prefix: int, answer: int, matches: bool) -> None:
    """A model whose arrays are larger than what else there is: reading, then learning counts."""
    facts = dict(seed=1, layers=3, kv_heads=4, head_dim=64, hidden=512, heads=8)
    context = {"max_position_embeddings": 4096}
    model = kv.load(tiny.write_tiny_model(tmp_path / "m", "qwen3", **facts, **context))
    measured = peak(model, prefix, answer, matches=matches)
    assert said(model, prefix, answer, matches=matches) == pytest.approx(measured, rel=0.25)
    once, kept = (
        memory.needs(model, model, make_config(model, model, PLAN), prefix, answer, plan=plan)
        for plan in (PLAN, TrainingPlan(recipe=Recipe(reads=7)))
    )
    one = 2 * 3 * 4 * 64 * 4 * (prefix + answer)  # keys and values, layers, heads, numbers, bytes
    assert sum(kept.values()) - sum(once.values()) == 7 * one


PLAN = TrainingPlan()
DELTA = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_num_value_heads": 16,
    "linear_num_key_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
MIXER = {"shared_intermediate_size": 1024, "mamba_n_heads": 16, "mamba_d_head": 64,
         "mamba_d_state": 64, "mamba_n_groups": 1}  # fmt: skip


@pytest.mark.parametrize("state_maps", [False, True], ids=["inputs", "states"])
@pytest.mark.parametrize(
    ("name", "facts"), [("qwen3_5", DELTA), ("granitemoehybrid", MIXER)], ids=["delta", "mamba"]
)
def test_the_measured_peak_of_hybrids(
    tmp_path: Path, name: str, facts: dict[str, int], state_maps: bool
) -> None:
    """Reading is the larger part; what learns is bounded by a segment, whatever the prefix.

    Where states are mapped, no inputs are kept.
    """
    facts |= {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    facts |= {"max_position_embeddings": 4096}
    model = kv.load(hybrid_models.write_hybrid_model(tmp_path / "m", name, **facts))
    plan = TrainingPlan(state_maps=state_maps)
    told, measured = (of(model, 1024, 32, plan) for of in (said, peak))
    assert told == pytest.approx(measured, rel=0.15)


def said(
    model: LanguageModel, prefix: int, answer: int, plan: TrainingPlan = PLAN, matches: bool = False
) -> float:
    """What a conversation takes by the formula."""
    config = make_config(model, model, plan)
    plan = replace(plan, matching=0.5 if matches else 0.0)
    return list(memory.needs(model, model, config, prefix, answer, plan=plan).values())[-1]


def peak(
    model: LanguageModel, prefix: int, answer: int, plan: TrainingPlan = PLAN, matches: bool = False
) -> float:
    """What it takes by MLX's own count, beside weights and translator."""
    pair, config = pair_of(model, model), make_config(model, model, plan)
    tokens = np.random.default_rng(0).integers(0, 300, prefix + answer).tolist()
    sample = Sample(tuple(tokens[:prefix]), tuple(tokens[prefix:]))
    made = pair.trainable(config, random_arrays(config, 3))
    before = mx.get_active_memory() - sum(a.nbytes for a in made.arrays().values())
    _, translators, _ = memory.needs(model, model, config, prefix, answer).values()
    # There is no optimizer yet: of its four parts the translator has tensors, then gradients too.
    mx.clear_cache()
    mx.reset_peak_memory()
    reading = pair.read(sample, config, matches)
    read = mx.get_peak_memory() - before - translators / 4
    mx.clear_cache()
    mx.reset_peak_memory()
    pair.loss(made, reading, objective_named("kl"), 1.0)
    return max(read, mx.get_peak_memory() - before - translators / 2)


def needed(models: Models, prefix: int, rates: int = 1, nu: int = 1, **recipe: bool) -> float:
    """Gigabytes, with half a percent to spare."""
    ends, plan = (models["dense"], models["wide"]), TrainingPlan(nu=nu, recipe=Recipe(**recipe))
    found = memory.needs(*ends, make_config(*ends, plan), prefix, 16, rates, plan)
    return 1.005 * sum(found.values()) / 1e9


def test_train_refuses_what_cannot_fit(
    folders: Folders,
    models: Models,
    generated: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Printed,
) -> None:
    """By the verb, in one line with a prefix that fits; with that one it trains."""
    line = ["train", "--source", str(folders["dense"]), "--target", str(folders["wide"])]
    line += ["--data", generated, "--out", str(tmp_path / "t"), "--steps", "1", "--batch-size", "1"]
    line += "-c fit_samples=8 -c held_out=2 --device mlx --max-continuation 16".split()
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 0)  # as in a process of its own
    monkeypatch.setenv("KVLINGO_MEMORY_LIMIT", f"{needed(models, 200):.6f}")
    assert run(line) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "of memory are needed (weights of both models" in told and "1 translator in" in told
    (fitting,) = re.findall(r"--max-prefix (\d+)", told)
    assert 64 <= int(fitting) <= 200
    assert not list(tmp_path.glob("t*"))
    assert run([*line, "--max-prefix", fitting]) == 0
    assert "training takes at most about" in capsys.readouterr().out


def test_pair_leaves_out_lengths_that_do_not_fit(
    models: Models, generated: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    ends, said = (models["dense"], models["wide"]), list[str]()
    monkeypatch.chdir(tmp_path)
    small = {"SHORTEST": 64, "ANSWERS": 16, "FEWEST_STEPS": 0, "MANY_STEPS": 0, "ENOUGH": 4}
    for name, value in small.items():
        monkeypatch.setattr(pace, name, value)
    monkeypatch.setattr(pace, "FITTING", 1e9)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 0)
    monkeypatch.setenv("KVLINGO_MEMORY_LIMIT", f"{needed(models, 300, 1, nu=3, whitened=True):.6f}")
    kv.pair(*ends, generated, minutes=0.3, out="t", callbacks=Callbacks(say=said.append))
    (longest,) = re.findall(r"prefixes of up to (\d+) tokens, which", " ".join(said))
    assert int(longest) == 256
    monkeypatch.setenv("KVLINGO_MEMORY_LIMIT", "0.0001")
    with pytest.raises(kv.KVLingoError, match="of memory are needed"):
        kv.pair(*ends, generated, minutes=0.3, out="u")
