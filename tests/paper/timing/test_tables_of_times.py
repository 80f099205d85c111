"""The tables of the paper's times: their phases, what is derived from them, their command."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.timing import derived, memory_budget, pairs, paths, runs, tables
from benchmarks.paper.timing.batches import Batch
from benchmarks.paper.timing.experts import experts_touched
from benchmarks.paper.timing.reference import load_reference
from kvlingo_mlx.caches import memory
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import ceilings, geometries
from kvlingo_mlx.timing.switching import Stopwatch
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.command_line import run

PROMPT = tiny.random_tokens(41)
measured_rates = functools.cache(ceilings.measured_rates)


@pytest.fixture(autouse=True)
def rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every command: by MLX's own BLAS that takes seconds."""
    monkeypatch.setattr(runs, "measured_rates", measured_rates)


@pytest.fixture(scope="module")
def translator(models: dict[str, LanguageModel]) -> Translator:
    return kv.fit(models["dense"], models["moe"], [{"text": "one two three four five " * 9}])


@pytest.fixture(scope="module")
def made(models: dict[str, LanguageModel], translator: Translator) -> paths.Paths:
    return paths.Paths(models["dense"], models["moe"], {"stored": translator}, PROMPT, 16)


def next_token(model: LanguageModel, tokens: list[int], cache: Any = None) -> int:
    return int(next(generate_step(mx.array(tokens), model.model, prompt_cache=cache))[0])


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


def test_little_time_leaves_long_prompts_out(
    models: dict[str, LanguageModel], translator: Translator, unhurried: None
) -> None:
    arguments = (models["dense"], models["moe"], {"stored": translator})
    options: dict[str, Any] = {"text": False, "trials": 3, "clock": Stopwatch(0.0)}
    done, left_out = tables.run_table(
        *arguments, tables.TABLES["switch"], [40, 16, 80], tables.Effort(**options)
    )
    assert [timing.prompt_tokens for timing in done] == [16] and left_out == [40, 80]
    assert all(len(times) == 1 for times in done[0].samples.values())
    options["clock"] = Stopwatch(None)
    done, left_out = tables.run_table(
        *arguments, tables.TABLES["switch"], [40, 16], tables.Effort(**options)
    )
    assert [timing.prompt_tokens for timing in done] == [16, 40] and left_out == []


@pytest.mark.parametrize(
    "table",
    [
        "all",
        "memory-budget",
    ],
)
def test_a_limit_in_which_nothing_is_measured_is_refused(
    small_geometries: None, table: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """While models are made, and after it; a line says which of them takes longer."""
    monkeypatch.setattr(memory_budget, "FULL", "gemma-3-4b")
    papers = table == "memory-budget"
    pair = [] if papers else ["--geometry", "qwen3-4b:qwen3-30b-a3b"]
    command = ["paper bench", "--table", table, *pair, "-p", "12"]
    command += ["--layers", "2", "-n", "1"]
    assert run([*command, "--time-limit", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert "--time-limit is over before the models are ready" in error and error.count("\n") == 1
    cleared = contextlib.nullcontext(lambda done, total: None)
    for module in ("bench_running", "bench_budget"):
        monkeypatch.setattr(f"benchmarks.paper.commands.{module}.making", lambda *_: cleared)
    assert run([*command, "--time-limit", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert "1e-09, and the shortest measurement takes longer; give more, or fewer" in error


def test_experts_touched_are_those_that_the_router_chose(models: dict[str, LanguageModel]) -> None:
    model = models["moe"]
    experts, active = model.config["num_experts"], model.config["num_experts_per_tok"]
    with experts_touched(model) as shares:
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
        with experts_touched(model) as shares:
            model.model(mx.array([PROMPT[:7]]), cache=make_prompt_cache(model.model))
    finally:
        gate.__call__ = call
    assert shares == [len(used) / experts for used in chosen] and max(shares) > active / experts


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


def test_caches_of_many_rows_are_refused(
    models: dict[str, LanguageModel], translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is refused; a table's own lengths are left out."""
    pair = pairs.Pair(models["dense"], models["moe"], {"stored": translator})
    row = sum(memory.cache_bytes(model, 64) for model in (pair.source, pair.target))
    monkeypatch.setattr(runs.memory, "free", lambda: 3 * row)
    effort = tables.Effort(text=False, trials=1, clock=Stopwatch(None), batch=3)
    runs.check(pair, runs.Asked(("quant",), effort, [64]))
    with pytest.raises(
        kv.NotEnoughMemoryError, match=r"take --prompt-tokens or a batch \(-c batch\) of less"
    ):
        runs.check(pair, runs.Asked(("quant",), replace(effort, batch=4), [64]))
    nothing = contextlib.nullcontext(lambda: None)
    (ran,) = runs.run(pair, runs.Asked(("quant",), effort), lambda *_: nothing)
    assert [t.prompt_tokens for t in ran.timings] == [64] and list(ran.beyond) == [256, 1024]
