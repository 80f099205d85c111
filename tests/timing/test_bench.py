"""Timing tables: what is counted against counts by hand, and the command as a user runs it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn, on_gpu

import numpy as np
import pytest
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.timing import memory_budget
from benchmarks.paper.timing.reference import load_reference
from kvlingo_mlx import caches as kv_caches
from kvlingo_mlx.caches import memory
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import seconds
from kvlingo_mlx.timing import (
    ceilings,
    derived,
    geometries,
    pairs,
    paths,
    runs,
    tables,
)
from kvlingo_mlx.timing.batches import Batch
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.command_line import run

PROMPT = tiny.random_tokens(41)
measured_rates = functools.cache(ceilings.measured_rates)


@pytest.fixture(autouse=True)
def rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every command: by MLX's own BLAS that takes seconds."""
    monkeypatch.setattr(ceilings, "measured_rates", measured_rates)


@pytest.fixture(scope="module")
def translator(models: dict[str, LanguageModel]) -> Translator:
    return kv.fit(models["dense"], models["moe"], [{"text": "one two three four five " * 9}])


@pytest.fixture(scope="module")
def made(models: dict[str, LanguageModel], translator: Translator) -> paths.Paths:
    return paths.Paths(models["dense"], models["moe"], {"stored": translator}, PROMPT, 16)


def next_token(model: LanguageModel, tokens: list[int], cache: Any = None) -> int:
    return int(next(generate_step(mx.array(tokens), model.model, prompt_cache=cache))[0])


# ---- what is timed --------------------------------------------------------------------------


def test_every_phase_of_every_table(made: paths.Paths) -> None:
    for name, table in tables.TABLES.items():
        timing = tables.measure_length(made, table, trials=2)
        wanted = {"translate stored" if p == "translate" else p for p in table.phases}
        assert set(timing.samples) == wanted, name
        for phase, times in timing.samples.items():  # decoding is an average in itself
            once = phase in tables.SPEEDS and name != "healing"
            assert len(times) == (1 if once else 2) and min(times) > 0
        assert set(timing.peak) == set(table.peaks) and all(timing.peak.values())


def test_the_phases_do_what_they_are_called(
    models: dict[str, LanguageModel], translator: Translator, made: paths.Paths
) -> None:
    target = models["moe"]
    assert made.native_single() == next_token(target, PROMPT)
    whole = kv.hand_over(
        models["dense"], target, PROMPT, translator=translator, prefill_step_size=16
    )
    for ours, theirs in zip(made.translate(), whole, strict=True):
        assert ours.offset == theirs.offset == len(PROMPT) - 1
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert np.array_equal(a, b)  # of the same chunks: the same products
    assert made.switch() == made.eager_switch() == next_token(target, PROMPT[-1:], whole)
    phases = ("target_step", "eager_switch", "source_step", "decode_source", "decode_translated")
    for phase in phases:
        made.phase(phase)()
        made.phase(phase)()  # a step leaves the cache as long as it was
    assert {cache.offset for cache in made._cache} == {len(PROMPT) - 1}
    assert {cache.offset for cache in (*made._own, *made._eager)} == {len(PROMPT) - 1}


def test_switches_of_some_native_layers(
    made: paths.Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their caches are the hybrid's; they stand after the plain switch, where there is one."""
    table = tables.with_hybrids(tables.TABLES["switch"], [1, 2])
    at = table.phases.index("switch")
    assert table.phases[at : at + 3] == ("switch", "hybrid 1", "hybrid 2")
    assert tables.with_hybrids(tables.TABLES["quant"], [1]) == tables.TABLES["quant"]
    seen = []
    monkeypatch.setattr(paths, "first_token", lambda model, tokens, cache: seen.append(cache))
    translator = next(iter(made.translators.values()))
    for layers in (1, 2):
        made.phase(f"hybrid {layers}")()
        expected = kv.hand_over(
            made.source, made.target, PROMPT, translator=translator, prefill_step_size=16,
            native_layers=layers,
        )  # fmt: skip
        for ours, theirs in zip(seen.pop(), expected, strict=True):
            assert np.array_equal(ours.keys_and_values()[0], theirs.keys_and_values()[0])


def test_the_command_times_hybrids(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--table", "switch", "-p", "12", "-n", "1", "--native-layers", "2,6"]
    assert run(command) == 0
    text = capsys.readouterr().out
    assert "switch, 2 layers native" in text and "switch, 6 layers native" in text


def test_a_batch_is_as_its_prompts_are_one_by_one(
    models: dict[str, LanguageModel], translator: Translator
) -> None:
    arguments = (models["dense"], models["moe"], {"stored": translator})
    batch = Batch(*arguments, PROMPT, 16, 3)
    assert batch.ids.shape == (3, len(PROMPT)) and batch.ids[0].tolist() == PROMPT
    native, switched = batch.native().tolist(), batch.switch().tolist()
    assert switched == batch.target_step().tolist() == batch.target_step().tolist()
    whole = batch.translate()
    for row, prompt in enumerate(batch.ids.tolist()):
        assert native[row] == next_token(models["moe"], prompt)
        alone = kv.hand_over(*arguments[:2], prompt, translator=translator)
        assert switched[row] == next_token(models["moe"], prompt[-1:], alone)
        for ours, theirs in zip(whole, alone, strict=True):
            a, b = (np.array(c.keys[..., : len(prompt) - 1, :]) for c in (ours, theirs))
            assert np.linalg.norm(a[row] - b[0]) <= 1e-4 * np.linalg.norm(b[0])


def test_a_table_of_a_batch(models: dict[str, LanguageModel], translator: Translator) -> None:
    table = tables.batched(tables.TABLES["moe-switch"], 2)
    assert table.title.endswith("2 prompts at once") and table.peaks == ("native", "switch")
    arguments = (models["dense"], models["moe"], {"stored": translator}, table, [16])
    options: dict[str, Any] = {"text": False, "trials": 1, "clock": tables.Clock(None)}
    (timing,), _ = tables.run_table(*arguments, tables.Effort(batch=2, **options))
    wanted = {"source_prefill", "native", "translate stored", "target_step", "switch"}
    assert set(timing.samples) == wanted and timing.batch == 2
    assert tables.batched(table, 1) is table


def test_little_time_leaves_long_prompts_out(
    models: dict[str, LanguageModel], translator: Translator, unhurried: None
) -> None:
    arguments = (models["dense"], models["moe"], {"stored": translator})
    options: dict[str, Any] = {"text": False, "trials": 3, "clock": tables.Clock(0.0)}
    done, left_out = tables.run_table(
        *arguments, tables.TABLES["switch"], [40, 16, 80], tables.Effort(**options)
    )
    assert [timing.prompt_tokens for timing in done] == [16] and left_out == [40, 80]
    assert all(len(times) == 1 for times in done[0].samples.values())
    options["clock"] = tables.Clock(None)
    done, left_out = tables.run_table(
        *arguments, tables.TABLES["switch"], [40, 16], tables.Effort(**options)
    )
    assert [timing.prompt_tokens for timing in done] == [16, 40] and left_out == []


def test_no_step_outlasts_a_limit_by_more_than_itself(
    models: dict[str, LanguageModel], translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase that never ends by itself: what was measured before it stands, and nothing rings."""
    steps = []

    def endless(self: paths.Paths) -> None:
        while len(self.tokens) > 20:
            steps.append(time.sleep(0.01))

    monkeypatch.setattr(paths.Paths, "target_step", endless)
    arguments = (models["dense"], models["moe"], {"stored": translator})
    table = tables.Table("", (), ("target_step",), ())
    before = signal.getsignal(signal.SIGALRM)
    effort = tables.Effort(text=False, trials=1, clock=tables.Clock(2.0))
    done, left_out = tables.run_table(*arguments, table, [40, 12], effort)
    assert [t.prompt_tokens for t in done] == [12] and left_out == [40] and steps
    assert effort.clock.over() and signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(tables.OutOfTime), tables.Clock(0.0).limiting():
        time.sleep(10)


@pytest.mark.parametrize("table", ["all", "healing", "memory-budget"])
def test_a_limit_in_which_nothing_is_measured_is_refused(
    small_geometries: None, table: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """While models are made, and after it; a line says which of them takes longer."""
    monkeypatch.setattr(memory_budget, "FULL", "gemma-3-4b")
    papers = table == "memory-budget"
    pair = [] if papers else ["--geometry", "qwen3-4b:qwen3-30b-a3b"]
    command = ["paper bench" if papers else "bench", "--table", table, *pair, "-p", "12"]
    command += ["-c", "layers=2", "-n", "1"]
    assert run([*command, "--time-limit", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert "--time-limit is over before the models are ready" in error and error.count("\n") == 1
    cleared = contextlib.nullcontext(lambda done, total: None)
    for module in ("kvlingo_mlx.cli.bench", "benchmarks.paper.commands.bench_budget"):
        monkeypatch.setattr(f"{module}.making", lambda *_: cleared)
    assert run([*command, "--time-limit", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert "1e-09, and the shortest measurement takes longer; give more, or fewer" in error


def test_a_length_that_another_table_rules_out_is_not_begun(
    models: dict[str, LanguageModel], translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.time, "perf_counter", lambda: 0.0)  # no time passes meanwhile
    arguments = (models["dense"], models["moe"], {"stored": translator}, tables.TABLES["switch"])
    samples = {"native": [1.0], "switch": [0.5], "translate stored": [0.25], "decode_source": [9.0]}
    before = tables.Timing(16, samples)
    options: dict[str, Any] = {"text": False, "trials": 1, "before": before}
    # Three runs of 1.75 s, which at 40 tokens take 2.5 times as long: 13.1 s.
    done, left_out = tables.run_table(
        *arguments, [40], tables.Effort(clock=tables.Clock(13.0), **options)
    )
    assert done == [] and left_out == [40]
    done, left_out = tables.run_table(
        *arguments, [40], tables.Effort(clock=tables.Clock(13.3), **options)
    )
    assert [timing.prompt_tokens for timing in done] == [40] and left_out == []


def test_time_is_shared_among_what_is_yet_to_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables.time, "perf_counter", lambda: 7.0)
    clock = tables.Clock(60.0)
    assert clock.part(3).left() == pytest.approx(20.0)
    assert tables.Clock(None).part(3).left() == float("inf")


def test_a_long_run_is_not_warmed_up_for_its_own_sake(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    clock = iter([0.3, 0.5, 0.9] + [0.001] * 9)
    monkeypatch.setattr(paths, "seconds", lambda run: (run(), next(clock))[1])
    runs = {name: (lambda name=name: ran.append(name)) for name in ("rising", "known", "short")}
    found = paths.interleaved(runs, 2, spent={"known": paths.LONG + 0.1})
    assert ran[:5] == ["rising"] * 2 + ["rising", "short", "short"]
    assert ran[5:] == ["rising", "known", "short"] * 2
    assert all(len(times) == 2 for times in found.values())


def test_what_is_left_behind_does_not_count_as_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mlx-lm's loop ends with a step still queued on a stream of its own: it is waited for."""
    happened: list[Any] = []
    wait = mx.synchronize

    def waited(*streams: Any) -> None:
        happened.append(streams)
        wait(*streams)

    monkeypatch.setattr(mx, "synchronize", waited)
    monkeypatch.setattr(tables.time, "perf_counter", lambda: float(happened.append("look") or 0))
    assert seconds(lambda: happened.append("run")) == 0.0
    assert happened == [(generation_stream,), (), "look", "run", (), "look"]


def test_prompts(models: dict[str, LanguageModel]) -> None:
    small, large = (kv.load(zoo(f"tiny-qwen3-{size}")) for size in "sl")
    tokens = tables.prompt_of(small, large, 900, text=True)
    assert len(tokens) == 900 and " is " in large.tokenizer.decode(tokens)
    assert tables.prompt_of(small, large, 300, text=True) == tokens[:300]
    random = tables.prompt_of(small, large, 900, text=False)
    assert len(set(random)) > 2 * len(set(tokens))
    with pytest.raises(ValueError, match="a prompt of 1 tokens leaves nothing to hand over"):
        tables.prompt_of(small, large, 1, text=False)
    with pytest.raises(ValueError, match="context"):
        tables.prompt_of(models["dense"], models["moe"], 600, text=False)


# ---- ceilings -------------------------------------------------------------------------------


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
    costs = ceilings.Costs(lazy_model(name))
    per_token = sum(2 * int(np.prod(module.weight.shape)) for module in costs.dense)
    assert per_token / 1e9 == pytest.approx(gflop, rel=0.02)
    heads, layers = costs.model.facts["num_attention_heads"], len(costs.model.geometry.layers)
    config = costs.model.config
    attention = 4 * heads * 128 * layers * (1 + 2 + 3)  # scores and sums over 1, 2, 3 tokens
    head = 2 * config["vocab_size"] * config["hidden_size"]
    costs.model.__dict__["cache_dtype"] = mx.float32  # learning it would compute weights
    assert costs.tokens(3).flops == pytest.approx(3 * per_token + attention + head)


def test_maps_of_released_shapes_are_the_papers() -> None:
    """MFLOP a token: 302 from Qwen3-4B into Qwen3-30B-A3B at nu = 3, 117 from 0.6B into 1.7B."""
    pairs = {("qwen3-4b", "qwen3-30b-a3b", 3): 302e6, ("qwen3-0.6b", "qwen3-1.7b", 1): 117.4e6}
    for (source, target, nu), flops in pairs.items():
        ends = geometries.GEOMETRIES[source], geometries.GEOMETRIES[target]
        widths = [c["num_key_value_heads"] * c["head_dim"] for c in ends]
        maps = 2 * 2 * ends[1]["num_hidden_layers"] * nu * widths[0] * widths[1]
        assert maps == pytest.approx(flops, rel=0.01)


def test_work_by_hand(models: dict[str, LanguageModel], translator: Translator) -> None:
    model = models["moe"]
    costs, config = ceilings.Costs(model), model.config
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
    work = ceilings.translation_work(translator, models["dense"], model, 10)
    assert work.flops == 10 * translator.flops_per_token
    rates = ceilings.Rates(2.0, 4.0, "float32")
    assert rates.best(ceilings.Rates(1.0, 5.0, "float32")) == ceilings.Rates(2.0, 5.0, "float32")
    assert rates.floor(ceilings.Work(10, 4)) == 5 and rates.floor(ceilings.Work(1, 40)) == 10


def test_reading_a_prompt_ends_with_the_last_keys_and_values(
    models: dict[str, LanguageModel],
) -> None:
    """By hand: of the last layer all but two projections is left out, and the head."""
    for name in ("dense", "moe"):
        costs, config = ceilings.Costs(models[name]), models[name].config
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
        kept = sum(2 * m.weight.size for m in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        assert costs.last_share == pytest.approx(kept / (kept + flops))


def test_windows_take_no_work_beyond_them(tmp_path: Path) -> None:
    """By the caches themselves: a step reads what a ring holds, a translation writes no more."""
    options: dict[str, Any] = {"seed": 3, "layers": 5, "kv_heads": 2, "head_dim": 32}
    model = kv.load(tiny.write_tiny_model(tmp_path / "g", "gemma3_text", **options))
    costs, layers = ceilings.Costs(model), model.geometry.layers
    count, (window,) = 200, {g.window for g in layers if g.window}
    held = kv_caches.nbytes(kv_caches.allocate(model, 255))  # all of the room that it takes
    wide = sum(g.window is None for g in layers)
    entry = kv_caches.bytes_by_layer(model)[0]
    assert held == entry * (256 * wide + window * (len(layers) - wide))
    weights = costs.tokens(1).bytes - sum(kv_caches.bytes_by_layer(model))
    assert costs.tokens(1, 255).bytes - weights == held
    translator = geometries.random_translators(model, model, 1, {"float32": ("float32", None)})
    work = ceilings.translation_work(translator["float32"], model, model, count)
    share = (wide * count + (len(layers) - wide) * window) / (len(layers) * count)
    maps = translator["float32"]
    assert work.flops == pytest.approx(share * count * maps.flops_per_token)
    moved = 2 * entry * len(layers) * share * count
    assert work.bytes == pytest.approx(maps.nbytes + moved)


def test_quantised_weights_count_as_the_numbers_they_stand_for(tmp_path: Path) -> None:
    folder = tiny.write_tiny_model(
        tmp_path / "q", "qwen3", seed=1, layers=2, kv_heads=2, head_dim=32
    )
    whole, small = kv.load(folder), kv.load(folder)
    nn.quantize(small.model, 64, 4)
    a, b = (ceilings.Costs(model).tokens(3) for model in (whole, small))
    assert a.flops == b.flops and b.bytes < 0.4 * a.bytes


def test_experts_touched_are_those_that_the_router_chose(models: dict[str, LanguageModel]) -> None:
    model = models["moe"]
    experts, active = model.config["num_experts"], model.config["num_experts_per_tok"]
    with ceilings.experts_touched(model) as shares:
        model.model(mx.array([[5]]))
    assert shares == [active / experts] * len(model.model.layers)
    chosen: list[set[int]] = []
    blocks = [layer.mlp for layer in model.model.layers]
    classes = {type(block.gate) for block in blocks}
    (gate,) = classes
    call = gate.__call__

    def noted(self: Any, x: mx.array) -> mx.array:
        scores = call(self, x)
        if any(self is block.gate for block in blocks):
            best = np.argsort(-np.array(scores), axis=-1)[..., :active]
            chosen.append(set(best.reshape(-1).tolist()))
        return scores

    gate.__call__ = noted
    try:
        with ceilings.experts_touched(model) as shares:
            model.model(mx.array([PROMPT[:7]]), cache=make_prompt_cache(model.model))
    finally:
        gate.__call__ = call
    assert shares == [len(used) / experts for used in chosen] and max(shares) > active / experts


@pytest.mark.parametrize("step_size", [16, 2048])
def test_experts_of_a_prompt_are_those_of_its_own_passes(
    models: dict[str, LanguageModel], translator: Translator, step_size: int
) -> None:
    """Not of the steps after it, of which mlx-lm runs one more than it hands out tokens."""
    model, passes = models["moe"], []
    made = paths.Paths(models["dense"], model, {"stored": translator}, PROMPT, step_size)
    cache = make_prompt_cache(model.model)
    for start in range(0, len(PROMPT) - 1, step_size):
        with ceilings.experts_touched(model) as shares:
            chunk = PROMPT[start : min(start + step_size, len(PROMPT) - 1)]
            model.model(mx.array([chunk]), cache=cache)
        passes += shares
    timing = tables.measure_length(made, tables.TABLES["moe-switch"], trials=1)
    active = model.config["num_experts_per_tok"] / model.config["num_experts"]
    assert timing.experts == pytest.approx({"prompt": np.mean(passes), "step": active})


def test_every_phase_has_a_floor(made: paths.Paths) -> None:
    """Those of a machine of half the rates are twice as high, and a part's is below the whole's."""
    rates = ceilings.measured_rates()
    assert rates.flops > 0 and rates.bandwidth > 0
    timing = tables.measure_length(made, tables.TABLES["moe-switch"], trials=2)
    least, twice = (
        derived.floors(timing, each, made.source, made.target, made.translators)
        for each in (rates, ceilings.Rates(rates.flops / 2, rates.bandwidth / 2, rates.dtype))
    )
    assert set(least) == set(timing.samples) - set(tables.SPEEDS)
    assert all(least[phase] > 0 for phase in least)
    assert twice == pytest.approx({phase: 2 * least[phase] for phase in least})
    assert max(least["translate stored"], least["target_step"]) < least["switch"]
    assert set(timing.experts) == {"prompt", "step"}
    assert timing.experts["step"] <= timing.experts["prompt"] <= 1


def test_an_accelerator_of_native_layers_has_no_ceiling(made: paths.Paths) -> None:
    """It is timed with the native layers that are tuned, and that is less than all of both."""
    (maps,) = made.translators.values()
    provenance = {**maps.config.provenance, "native_layers": len(made.target.attentions)}
    tuned = replace(maps, config=replace(maps.config, provenance=provenance))
    timing = tables.Timing(len(PROMPT), {"switch": [1.0], "accelerator": [1.0]})
    rates = ceilings.Rates(1e9, 1e9, "float32")
    for one, ways in ((maps, {"switch", "accelerator"}), (tuned, {"switch"})):
        assert set(derived.floors(timing, rates, made.source, made.target, {"x": one})) == ways


def test_what_is_derived_from_times() -> None:
    timing = tables.Timing(8, {
        "native": [1.0, 9.0, 2.0], "switch": [0.5] * 3, "eager_switch": [0.25] * 3,
        "accelerator": [4.0] * 3, "source_step": [0.1] * 3, "decode_source": [0.5] * 3,
    })  # fmt: skip
    assert timing.median("native") == 2.0 and timing.spread("native") == (1.0, 4.0)
    assert derived.speedups(timing) == {
        "switch": 4.0, "eager switch": 8.0, "accelerator": 0.5, "source first token": 20.0
    }  # fmt: skip
    assert timing.summary()["native"] == {"median": 2.0, "min": 1.0, "iqr": 4.0}
    assert tables.as_json(timing)["summary"].keys() == timing.samples.keys()
    assert derived.tokens_per_second(timing) == {"decode_source": paths.FEW / 0.5}
    timing.decoded = 256
    assert derived.tokens_per_second(timing) == {"decode_source": 512.0}
    # Layers of a second each on the target's side, half a second on the source's, head of three.
    shallow = tables.Timing(8, {
        "source_prefill": [1.0], "translate x": [0.2], "native": [5.0], "target_step": [3.5],
        "switch": [3.7],
    })  # fmt: skip
    ends = derived.Depth(2, 36, 1.0), derived.Depth(2, 48, 1.0)
    assert derived.extrapolated(shallow, 3.0, *ends) == pytest.approx({
        "source_prefill": 18.0, "translate x": 4.8, "native": 51.0, "target_step": 15.0,
        "switch": 19.8, "accelerator": 37.8,
    })  # fmt: skip
    # Of two steps for a first token either has a head; layers took a fourth of a second of each.
    shallow.samples["target_step"] = [6.5]
    found = derived.extrapolated(shallow, 3.0, *ends, steps=2)
    assert found["target_step"] == pytest.approx(2 * 3.0 + 0.5 * 24)
    shallow.samples["target_step"] = [3.5]
    # A prefill that ends early in its last layer: 1.25 layers of it were run, of 35.25.
    early = derived.Depth(2, 36, 0.25), derived.Depth(2, 48, 0.25)
    found = derived.extrapolated(shallow, 3.0, *early)
    assert found["source_prefill"] == pytest.approx(35.25 / 1.25)
    assert found["native"] == pytest.approx(1.5 * 47.25 / 1.25 + 15.0)


def test_time_that_no_other_length_can_use_goes_to_more_rounds(
    models: dict[str, LanguageModel], translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds for two lengths, a second a round: what the longer one leaves, the other has."""
    now = [0.0]

    def tick(run: Callable[[], object]) -> float:
        now[0] += 1.0
        return 1.0

    monkeypatch.setattr(tables.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(paths, "seconds", tick)
    table = tables.Table("", (), ("target_step",), ())
    arguments = (models["dense"], models["moe"], {"stored": translator}, table)
    options: dict[str, Any] = {"text": False, "trials": 50}
    for beyond, rounds in ((1.0, 3), (1000.0, 8)):  # two are warming up
        monkeypatch.setattr(
            tables, "_least", lambda t, n, found, beyond=beyond: beyond if n == 20 else 1.0
        )
        now[0] = 0.0
        done, out = tables.run_table(
            *arguments, [12, 20], tables.Effort(clock=tables.Clock(10.0), **options)
        )
        assert len(done[0].samples["target_step"]) == rounds
        assert out == ([] if beyond == 1.0 else [20])


# ---- geometries -----------------------------------------------------------------------------

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 256,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture
def small_geometries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3-4b", "qwen3-30b-a3b", "gemma-3-4b"):
        more = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        more = more if "a3b" in name else {"sliding_window_pattern": 2}
        made = {**geometries.GEOMETRIES[name], **SMALL, **more}
        monkeypatch.setitem(geometries.GEOMETRIES, name, made)


@pytest.mark.parametrize("precision", geometries.PRECISIONS)
def test_random_models(small_geometries: None, precision: str) -> None:
    model = geometries.random_model("gemma-3-4b", 2, precision)
    assert len(model.geometry.layers) == 2
    kinds = {type(module).__name__ for _, module in model.model.named_modules()}
    assert ("QuantizedLinear" in kinds) == precision.endswith("bit")
    assert model.cache_dtype == (mx.float32 if precision == "float32" else mx.bfloat16)
    again = geometries.random_model("gemma-3-4b", 2, precision)
    for a, b in zip(*(m.model.layers[0].self_attn.q_proj.parameters().values()
                      for m in (model, again)), strict=True):  # fmt: skip
        assert mx.array_equal(a, b)
    with pytest.raises(ValueError, match="layers is 9; gemma-3-4b has 4"):
        geometries.random_model("gemma-3-4b", 9, precision)
    with pytest.raises(
        ValueError, match="layers is 1; of gemma-3-4b every 2th attends to all tokens"
    ):
        geometries.random_model("gemma-3-4b", 1, precision)
    with pytest.raises(ValueError, match="--geometry names 'gpt'; there are qwen3-0.6b, "):
        geometries.random_model("gpt", None, precision)


def test_a_memory_budget_is_of_the_precision_that_it_names(
    small_geometries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16-bit weights on a CPU as well, all models and their caches."""
    whole = geometries.GEOMETRIES["gemma-3-4b"]
    monkeypatch.setitem(geometries.GEOMETRIES, "gemma-3-12b", {**whole, "num_key_value_heads": 2})
    monkeypatch.setitem(geometries.GEOMETRIES, "gemma-3-4b", {**whole, "num_key_value_heads": 1})
    for precision, dtype in geometries.FLOATS.items():
        models = memory_budget.setup(2, precision)
        for model in (models.full, models.narrowed):
            assert model.cache_dtype == dtype and model.precision == precision
        cell = memory_budget.measure_cell(models, 8, 1, trials=1, decoded=1)
        assert cell.cache["full"] == 2 * cell.cache["narrowed"]


# ---- references -----------------------------------------------------------------------------


def test_references(tmp_path: Path) -> None:
    paper = load_reference("paper-m3-ultra")
    assert "Qwen3-4B" in paper.name
    assert paper.measured["moe-switch"][1024]["switch"] == pytest.approx(31.7e-3)
    with pytest.raises(ValueError, match="cannot be read"):
        load_reference(str(tmp_path / "nowhere"))
    path = tmp_path / "x.jsonl"
    older = {"kind": "bench", "schema": 1, "config": {}, "results": [{"prompt_tokens": 64}]}
    for text, told in (
        ('{"kind": "demo", "schema": 1}', "found kind 'demo' \\(schema 1\\)"),
        ("", "found no lines"),
        ("nonsense", "it is not lines of JSON"),
        ("[1]", "found a line without a kind"),
        (json.dumps(older), "kind 'bench' \\(schema 1\\) is of an older shape, results a list"),
        (json.dumps(older | {"results": {"quant": {}}}), "lacks or misspells .*'timings'"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(
            ValueError, match="holds no record of bench that can be read: .*" + told
        ):
            load_reference(str(path))


def bench_record(**changes: Any) -> dict[str, Any]:
    """What ``bench --table all --json`` writes of two lengths."""
    config = {"source": "s", "target": "t", "batch": 1, "layers": None, "precision": None}

    def timings(**samples: float) -> list[dict[str, Any]]:
        return [{"prompt_tokens": n, "samples": {k: [v] for k, v in samples.items()}}
                for n in (64, 256)]  # fmt: skip

    results = {
        "moe-switch": {"timings": timings(**{"switch": 2.0, "translate stored": 1.0})},
        "quant": {"timings": timings(**{"translate stored": 0.5, "translate 8 bits": 0.25})},
    }
    for found in results.values():
        found["extrapolated"] = [{"switch": 20.0, "translate stored": 10.0}] * 2
    return {
        "kind": "bench", "schema": 1, "date": "2026-01-02", "environment": {"chip": "chip"},
        "config": config | changes, "results": results,
    }  # fmt: skip


def test_a_reference_keeps_its_tables_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(bench_record()) + "\n")
    found = load_reference(str(path))
    assert found.measured["moe-switch"][64] == {"switch": 2.0, "translate stored": 1.0}
    assert found.config["machine"] == "chip" and found.label is None
    assert found.measured["quant"][64]["translate stored"] == 0.5
    assert found.whole == found.measured and found.layers is None
    path.write_text(json.dumps(bench_record(layers=[[2, 36], [2, 48]])) + "\n")
    found = load_reference(str(path))
    assert found.layers == ((2, 36), (2, 48)) and found.measured["moe-switch"][64]["switch"] == 2
    assert found.whole["moe-switch"][256]["switch"] == 20.0


# ---- the command ----------------------------------------------------------------------------


def test_bench_of_a_geometry(
    small_geometries: None, unhurried: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.jsonl", tmp_path / "x.png"
    arguments = ["paper bench", "--geometry", "qwen3-4b:qwen3-30b-a3b", "--layers", "2", "-n", "2",
                 "--table", "all", "-p", "12,20", "--json", str(out), "--nu", "2"]  # fmt: skip
    assert run([*arguments, "--reference", "paper-m3-ultra"]) == 0
    text = capsys.readouterr().out
    for line in ("random weights in float32, 2 layers of each model", "random token ids",
                 "Extrapolated to 4 and 4 layers, not measured", "nothing in common with this",
                 "experts touched, prompt", "translation, 4 bits",
                 "Fastest / interquartile range"):  # fmt: skip
        assert line in text, line
    assert ("Not measured on Apple hardware" in text) != kv_is_apple()
    record = json.loads(out.read_text())
    assert ("no row of bfloat16 maps: on a CPU" in text) != on_gpu()
    config = record["config"]
    assert (config["head_mixing"], config["translator"]) == (True, "float32")
    assert config["weights"] == [config["precision"]] * 2 and config["machine"]
    assert record["results"]["moe-switch"]["reference"]["label"] == "app:tab:moespeed"
    assert (config["nu"], config["prefill_step_size"], config["native_layers"]) == (2, 2048, [])
    assert config["precision"] == ("bfloat16" if on_gpu() else "float32")
    assert record["kind"] == "bench" and set(record["results"]) == {"moe-switch", "switch", "quant"}
    for table in record["results"].values():
        assert [t["prompt_tokens"] for t in table["timings"]] == [12, 20]
        assert all(len(s) == (1 if name in tables.SPEEDS else 2)
                   for t in table["timings"] for name, s in t["samples"].items())  # fmt: skip
        assert all(t["summary"].keys() == t["samples"].keys() for t in table["timings"])
    more = ["--reference", str(out), "--time-limit", "1e-9", "--table", "quant"]
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    assert run([*arguments, *more, *plot]) == 0
    text = capsys.readouterr().out
    assert (
        "left out, since --time-limit allows no more: 20 tokens" in text
        and "in brackets how many times as long" in text
        and "measured otherwise" not in text
    )
    assert not plot or picture.stat().st_size > 1000


def kv_is_apple() -> bool:
    from kvlingo_mlx.reporting import measure

    return measure.is_apple()


def test_a_table_for_which_there_is_no_time(
    small_geometries: None, unhurried: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["bench", "--geometry", "qwen3-4b:qwen3-30b-a3b", "-c", "layers=2", "-n", "1",
                 "--table", "all", "-p", "12", "--time-limit", "1e-9",
                 "--json", str(out)]  # fmt: skip
    assert run(arguments) == 0
    text = "left out, since --time-limit allows no more: 12 tokens"
    assert capsys.readouterr().out.count(text) == 2
    results = json.loads(out.read_text())["results"]
    assert [len(results[name]["timings"]) for name in ("moe-switch", "switch", "quant")] == [
        1,
        0,
        0,
    ]
    from kvlingo_mlx.timing import figures

    pytest.importorskip("matplotlib")
    (axes,) = figures.times(results).axes
    assert axes.get_title() == "Prefill, translation and first token"
    assert axes.get_ylabel() == "ms to the first token"
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "switch, translated eagerly" in named and not any("_" in name for name in named)


def test_what_does_not_fit_into_memory_is_not_made(
    small_geometries: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the message advises does fit."""
    command = ["bench", "--geometry", "qwen3-4b:qwen3-8b", "--quantize", "none", "-n", "1"]
    command += ["--table", "quant", "-p"]
    whole = geometries.GEOMETRIES["qwen3-4b"] | {"num_hidden_layers": 36}
    for name in ("qwen3-4b", "qwen3-8b"):
        monkeypatch.setitem(geometries.GEOMETRIES, name, whole)
    made = geometries.unmade_model("qwen3-4b", None, "float32")
    limit = int(1.2 * geometries.memory.weights_bytes(made))  # of one, not of two
    monkeypatch.setattr(geometries.memory, "free", lambda: limit)
    evaluated = geometries.mx.eval
    monkeypatch.setattr(geometries.mx, "eval", None)
    assert run([*command, "12"]) == 2
    error = capsys.readouterr().err
    assert "of memory are needed (weights of random qwen3-4b " in error and error.count("\n") == 1
    monkeypatch.setattr(geometries.mx, "eval", evaluated)
    layers = re.search(r"take -c layers=(\d+) or -c precision=4bit, end", error)[1]
    assert int(layers) > 2
    assert run([*command, "12", "-c", f"layers={layers}"]) == 0
    assert run([*command, "12", "-c", "precision=4bit"]) == 0
    capsys.readouterr()
    assert run([*command, "40000", "-c", f"layers={layers}"]) == 2  # the caches' fault
    assert "caches of 40000 tokens" in capsys.readouterr().err


def test_caches_of_many_rows_are_refused(
    models: dict[str, LanguageModel], translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is refused; a table's own lengths are left out."""
    pair = pairs.Pair(models["dense"], models["moe"], {"stored": translator})
    row = sum(memory.cache_bytes(model, 64) for model in (pair.source, pair.target))
    monkeypatch.setattr(runs.memory, "free", lambda: 3 * row)
    effort = tables.Effort(text=False, trials=1, clock=tables.Clock(None), batch=3)
    runs.check(pair, runs.Asked(("quant",), effort, [64]))
    with pytest.raises(
        kv.NotEnoughMemoryError, match=r"take --prompt-tokens or a batch \(-c batch\) of less"
    ):
        runs.check(pair, runs.Asked(("quant",), replace(effort, batch=4), [64]))
    nothing = contextlib.nullcontext(lambda: None)
    (ran,) = runs.run(pair, runs.Asked(("quant",), effort), lambda *_: nothing)
    assert [t.prompt_tokens for t in ran.timings] == [64] and list(ran.beyond) == [256, 1024]


def test_the_head_that_is_not_extrapolated_is_of_the_batch(
    small_geometries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    monkeypatch.setattr(paths, "run_head", lambda model, batch: rows.append(batch))
    arguments = ["bench", "--geometry", "qwen3-4b:qwen3-30b-a3b", "-c", "layers=2", "-n", "1",
                 "--table", "switch", "-p", "12", "--quantize", "none"]  # fmt: skip
    for batch in (1, 3):
        assert run([*arguments, "-c", f"batch={batch}"]) == 0
    assert set(rows[: len(rows) // 2]) == {1} and set(rows[len(rows) // 2 :]) == {3}


def test_large_random_weights_repeat_and_no_row_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometries, "BLOCK", 103)
    block = mx.random.normal((103,))
    small, large = (geometries._filled(mx.zeros(shape), block) for shape in ((5, 20), (3, 7, 20)))
    assert not small.any()
    rows = {tuple(row) for row in np.array(large).reshape(-1, 20).tolist()}
    assert len(rows) == 21 and set(np.array(large).reshape(-1).tolist()) == set(block.tolist())


def test_bench_without_a_translator_times_random_maps(
    folders: dict[str, Path], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["bench", "--source", str(folders["dense"]), "--target", str(folders["moe"])]
    assert run([*pair, "-n", "1", "-p", "12", "--quantize", "none"]) == 0
    done = capsys.readouterr()
    assert "random maps of the same shapes are timed" in done.err
    assert "random maps, nu = 1" in done.out and "bundled text" in done.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--table", "x"], "--table is 'x'; give moe-switch, switch, quant or all"),
        (["--geometry", "qwen3-4b"], "--geometry is 'qwen3-4b'; give SOURCE:TARGET"),
        (["--geometry", "a:b"], "--geometry names 'a'"),
        (["-p", "12,x"], "--prompt-tokens is '12,x'"),
        (["--geometry", "qwen3-4b:nope"], "--geometry names 'nope'; there are qwen3-0.6b, "),
        (["--geometry", "qwen3-4b:qwen3-8b", "-c", "layers=37"], "layers is 37; qwen3-4b has 36"),
        (["--geometry", "qwen3-4b:qwen3-8b", "-c", "precision=1bit"], "precision is '1bit'; give"),
        (
            ["--geometry", "qwen3-4b:qwen3-8b", "-c", "layers=2", "-c", "nu=3"],
            "error: nu is 3; qwen3-4b has 2 layers",
        ),
        (["-p", "1"], "--prompt-tokens holds 1; give at least 2"),
        (["-p", "64,-5"], "--prompt-tokens holds -5; give at least 2"),
        (["-p", "64,9999"], "holds 9999, but the context of tiny-qwen3-s is 2048: give at most"),
        (["--prefill-step-size", "0"], "--prefill-step-size is 0; give at least 1"),
        (["-c", "nu=0"], "error: nu is 0; give at least 1"),
        (["-c", "nu=2"], "error: nu is 2, but it is for random maps, and the stored"),
        (["--native-layers", "0"], "--native-layers holds 0; give at least 1"),
        (["--time-limit", "0"], "--time-limit is 0; give seconds above 0"),
        (["--time-limit", "-3"], "--time-limit is -3"),
        (["--table", "memory-budget", "--time-limit", "0"], "--time-limit is 0"),
        (["--table", "healing", "-p", "9999"], "holds 9999, but the context of tiny-qwen3-s is"),
        (["--table", "healing", "--native-layers", "7"], "--native-layers holds 7; give numbers f"),
        (
            ["--table", "healing", "--reference", "paper-m3-ultra"],
            "--reference is paper-m3-ultra, which has no table of healing; give a file of --json",
        ),
        (["--quantize", "7"], "7"),
        (["-c", "prompt=x"], "prompt is 'x'; give text or random"),
        (["-n", "0"], "--num-trials is 0"),
        (["-c", "decode_tokens=0"], "decode_tokens is 0; give at least 1"),
        (
            ["-c", "decode_tokens=9", "-c", "batch=2"],
            "decode_tokens has no effect with -c batch=2, of several prompts at once; give -c bat",
        ),
        (["-c", "decode_tokens=9", "--table", "quant"], "decode_tokens has no effect with --tab"),
        (["--table", "memory-budget", "--reference", "x.json"], "stands beside paper-m3-ultra alo"),
        (["--geometry", "qwen3-4b:qwen3-8b", "-c", "precision=4bit,x"], "precision is 'x'; give"),
        (
            ["--geometry", "qwen3-4b:qwen3-8b", "-c", "precision=4bit,8bit", "--plot", "x.png"],
            "--plot draws one run, and precision is '4bit,8bit'; give one of them",
        ),
        (["-c", "batch=0"], "error: batch is 0"),
        (["--native-layers", "x"], "--native-layers is 'x'; give numbers: 1,2"),
        (["--native-layers", "9"], "--native-layers holds 9; give numbers from 1 to 6"),
        (
            ["--native-layers", "1", "-c", "batch=2"],
            "--native-layers has no effect with -c batch=2",
        ),
        (["--reference", "nowhere"], "--reference nowhere cannot be read"),
    ],
)
def test_bench_refuses(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    papers = {"--reference", "memory-budget"} & set(more)
    assert run(["paper bench" if papers else "bench", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_nothing_is_made_before_all_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(geometries, "unmade_model", lambda name, *_, **__: made.append(name))
    for more in (["--geometry", "qwen3-4b:nope"], ["--geometry", "qwen3-4b:qwen3-8b", "-p", "0"]):
        assert run(["bench", *more]) == 2
    assert made == []


def test_lengths_are_timed_once_and_within_the_context(
    small_geometries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Doubles are dropped; of a table's own lengths those that a model cannot read."""
    for name in ("qwen3-4b", "qwen3-30b-a3b"):
        short = {**geometries.GEOMETRIES[name], "max_position_embeddings": 100}
        monkeypatch.setitem(geometries.GEOMETRIES, name, short)
    out = tmp_path / "out.jsonl"
    arguments = ["bench", "--geometry", "qwen3-4b:qwen3-30b-a3b", "--table", "quant", "-n", "1",
                 "--quantize", "8,8", "--json", str(out)]  # fmt: skip
    assert run(arguments) == 0
    assert (
        "beyond a model's context or this machine's memory: 256, 1024 tokens"
        in capsys.readouterr().out
    )
    assert run([*arguments, "-p", "12,12"]) == 0
    records = [json.loads(line)["results"]["quant"] for line in out.read_text().splitlines()]
    assert [t["prompt_tokens"] for r in records for t in r["timings"]] == [64, 12]
    assert [r["left_out"] for r in records] == [[256, 1024], []]


def test_the_help_says_what_all_is(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, others in (("bench", "healing"), ("paper bench", "healing or memory-budget")):
        assert run([verb, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split()).replace("│ ", "")
        assert f"or all of these; or {others}, which all leaves out" in text
