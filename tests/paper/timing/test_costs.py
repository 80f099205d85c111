"""What work costs, counted by hand, by the paper and by the arrays themselves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.timing.costs import Costs, translation_work
from kvlingo_mlx import caches as kv_caches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import ceilings, geometries
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny


@pytest.fixture(scope="module")
def translator(models: dict[str, LanguageModel]) -> Translator:
    return kv.fit(models["dense"], models["moe"], [{"text": "one two three four five " * 9}])


def lazy_model(name: str) -> LanguageModel:
    """A model of true widths whose weights are never computed."""
    config = geometries.GEOMETRIES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    return LanguageModel(model, None, config, name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gflop"),
    [("qwen3-0.6b", 0.88), ("qwen3-1.7b", 2.8), ("qwen3-4b", 7.3), ("qwen3-8b", 13.9)],
)
def test_flops_of_released_shapes_are_the_papers(name: str, gflop: float) -> None:
    """Appendix "Computational gains": weight matrices alone, by token."""
    costs = Costs(lazy_model(name))
    per_token = sum(2 * int(np.prod(module.weight.shape)) for module in costs.dense)
    assert per_token / 1e9 == pytest.approx(gflop, rel=0.02)
    heads, layers = costs.model.facts["num_attention_heads"], len(costs.model.geometry.layers)
    config = costs.model.config
    attention = 4 * heads * 128 * layers * (1 + 2 + 3)  # scores and sums over 1, 2, 3 tokens
    head = 2 * config["vocab_size"] * config["hidden_size"]
    costs.model.__dict__["cache_dtype"] = mx.float32  # learning it would compute weights
    assert costs.tokens(3).flops == pytest.approx(3 * per_token + attention + head)


def test_work_by_hand(models: dict[str, LanguageModel], translator: Translator) -> None:
    model = models["moe"]
    costs, config = Costs(model), model.config
    assert len(costs.experts) == 3 * len(model.model.layers)
    nothing, all_of_them = (costs.tokens(1, touched=share).bytes for share in (0.0, 1.0))
    experts = sum(m.weight.nbytes for m in costs.experts)
    assert all_of_them - nothing == experts
    active = config["num_experts_per_tok"]
    each = sum(2 * active * m.weight.shape[1] * m.weight.shape[2] for m in costs.experts)
    without = sum(2 * m.weight.size for m in costs.dense)
    long, short = costs.tokens(9, 20), costs.tokens(8, 20)
    seen = 4 * config["num_attention_heads"] * 32 * len(model.model.layers) * 29
    assert long.flops - short.flops == each + without + seen
    work = translation_work(translator, models["dense"], model, 10)
    assert work.flops == 10 * translator.flops_per_token
    rates = ceilings.Rates(2.0, 4.0, "float32")
    assert rates.best(ceilings.Rates(1.0, 5.0, "float32")) == ceilings.Rates(2.0, 5.0, "float32")
    assert rates.floor(ceilings.Work(10, 4)) == 5 and rates.floor(ceilings.Work(1, 40)) == 10


def test_reading_a_prompt_ends_with_the_last_keys_and_values(
    models: dict[str, LanguageModel],
) -> None:
    """By hand: of the last layer all but two projections is left out, and the head."""
    for name in ("dense", "moe"):
        costs, config = Costs(models[name]), models[name].config
        whole, read = costs.tokens(5, touched=0.5), costs.reading(5, touched=0.5)
        layer = models[name].model.layers[-1]
        unused = [layer.self_attn.q_proj, layer.self_attn.o_proj]
        if name == "dense":
            unused += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
            flops, weights = 0.0, 0.0
        else:
            active, experts = config["num_experts_per_tok"], config["num_experts"]
            switch = [getattr(layer.mlp.switch_mlp, f"{n}_proj") for n in ("gate", "up", "down")]
            flops = sum(2 * active * m.weight.size / experts for m in switch)
            weights = 0.5 * sum(m.weight.nbytes for m in switch)
            unused.append(layer.mlp.gate)
        flops += sum(2 * m.weight.size for m in unused)
        weights += sum(m.weight.nbytes for m in unused)
        head = config["vocab_size"] * config["hidden_size"]
        seen = 4 * config["num_attention_heads"] * 32 * (1 + 2 + 3 + 4 + 5)
        assert whole.flops - read.flops == pytest.approx(5 * flops + seen + 2 * head)
        assert whole.bytes - read.bytes == pytest.approx(weights + 4 * head)


def test_windows_take_no_work_beyond_them(tmp_path: Path) -> None:
    """By the caches themselves: a step reads what a ring holds, a translation writes no more."""
    options: dict[str, Any] = {"seed": 3, "layers": 5, "kv_heads": 2, "head_dim": 32}
    model = kv.load(tiny.write_tiny_model(tmp_path / "g", "gemma3_text", **options))
    costs, layers = Costs(model), model.geometry.layers
    count, (window,) = 200, {g.window for g in layers if g.window}
    held = kv_caches.nbytes(kv_caches.allocate(model, 255))  # all of the room that it takes
    wide = sum(g.window is None for g in layers)
    entry = kv_caches.bytes_by_layer(model)[0]
    assert held == entry * (256 * wide + window * (len(layers) - wide))
    weights = costs.tokens(1).bytes - sum(kv_caches.bytes_by_layer(model))
    assert costs.tokens(1, 255).bytes - weights == held
    translator = geometries.random_translators(model, model, 1, {"float32": ("float32", None)})
    work = translation_work(translator["float32"], model, model, count)
    share = (wide * count + (len(layers) - wide) * window) / (len(layers) * count)
    maps = translator["float32"]
    assert work.flops == pytest.approx(share * count * maps.flops_per_token)
    moved = 2 * entry * len(layers) * share * count
    assert work.bytes == pytest.approx(maps.nbytes + moved)
