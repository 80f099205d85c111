"""The tables of a switch, of healing and of a memory budget: what is run, and the verb."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.timing import geometries, healing, memory_budget, paper, tables
from benchmarks.paper.timing.costs import Costs, translation_work
from benchmarks.paper.timing.paths import FEW, Paths
from kvlingo_mlx import caches as kv_caches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.bench import BenchPair
from kvlingo_mlx.timing.random_maps import random_translators
from kvlingo_mlx.timing.switching import Stopwatch
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.command_line import run
from tests.support.fixtures import Models, Patch, Printed
from tests.support.healings import Chunk, in_a_row, noted

PROMPT = tiny.random_tokens(81)
COUNT = len(PROMPT) - 1
HEALED = ("heal_idle", "heal_interleaved", "heal_layers 1", "heal_layers 3")


@pytest.fixture(scope="module")
def translator(models: Models) -> Translator:
    return kv.fit(models["dense"], models["moe"], [{"text": "one two three four five " * 9}])


@pytest.fixture(scope="module")
def made(models: Models, translator: Translator) -> Paths:
    return Paths(models["dense"], models["moe"], {"float32": translator}, PROMPT, 32)


def next_token(model: LanguageModel, tokens: list[int], cache: Any = None) -> int:
    return int(next(generate_step(mx.array(tokens), model.model, prompt_cache=cache))[0])


def bench(tmp_path: Path, *words: str) -> tuple[int, Sequence[dict[str, Any]]]:
    """Run the verb; return its status and its records."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    status = run(["paper bench", "--json", str(out), *words])
    lines = out.read_text().splitlines() if out.exists() else []
    return status, [json.loads(line) for line in lines]


def test_the_phases_do_what_they_are_called(
    models: Models, translator: Translator, made: Paths
) -> None:
    target = models["moe"]
    assert made.native_single() == next_token(target, PROMPT)
    whole = kv.hand_over(
        models["dense"], target, PROMPT, translator=translator, prefill_step_size=32
    )
    for ours, theirs in zip(made.translate(), whole, strict=True):
        assert ours.offset == theirs.offset == COUNT
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert np.array_equal(a, b)  # of the same chunks: the same products
    assert made.switch() == made.eager_switch() == next_token(target, PROMPT[-1:], whole)
    phases = ("target_step", "eager_switch", "source_step", "decode_source", "decode_translated")
    for phase in phases:
        made.phase(phase)()
        made.phase(phase)()  # a step leaves the cache as long as it was
    assert {cache.offset for cache in made._cache} == {COUNT}
    assert {cache.offset for cache in (*made._own, *made._eager)} == {COUNT}


@pytest.mark.parametrize("phase", HEALED)
def test_a_healed_phase_ends_with_the_targets_own_cache(
    made: Paths, phase: str, monkeypatch: Patch
) -> None:
    read = noted(monkeypatch)
    made.phase(phase)()
    assert in_a_row(read) == COUNT
    own = make_prompt_cache(made.target.model)
    made.target.model(mx.array(PROMPT[:-1])[None], cache=own)
    for cache, wanted in zip(read[-1].cache, own, strict=True):
        for side in ("keys", "values"):
            a, b = (np.array(getattr(c, side)[0, :, :COUNT]) for c in (cache, wanted))
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
    if phase != "heal_idle":
        found = made.meanwhile[phase][-1]
        assert found.left == 0 <= found.tokens and found.seconds > 0
        # The last token is run for the first answer's token, and each of these for the next.
        assert read[-1].cache[0].offset >= COUNT + 1 + found.tokens


def test_an_answer_that_fills_the_context_ends_and_the_rest_is_read(
    made: Paths, monkeypatch: Patch
) -> None:
    class Busy:
        """Decoding that never leaves time for a chunk."""

        def __init__(self, reader: Any) -> None: ...

        def began(self) -> None: ...

        def __call__(self) -> None: ...

    read: list[Chunk] = noted(monkeypatch)
    monkeypatch.setattr(healing, "Interleaved", Busy)
    monkeypatch.setattr(healing, "room_for", lambda model, tokens, most: 5)
    made.heal_interleaved()
    found = made.meanwhile["heal_interleaved"][-1]
    assert (found.tokens, found.left) == (4, COUNT) and in_a_row(read) == COUNT


def test_work_by_hand(tmp_path: Path) -> None:
    """Two layers of width 64, 4 heads of 16, 2 of them cached, MLPs of 128; three tokens."""
    options: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16}
    model = kv.load(tiny.write_tiny_model(tmp_path / "m", "qwen3", seed=1, **options))
    maps = random_translators(model, model, 1, {"x": ("float32", None)})["x"]
    kept, queries, mlp = 3 * 2 * 2 * 64 * 32, 3 * 2 * 2 * 64 * 64, 3 * 2 * 3 * 64 * 128
    whole = kept + queries + mlp + 4 * 2 * 2 * 16 * (1 + 2 + 3)
    one = 3 * 2 * 2 * 32 * 32  # a layer's map
    healed = {"first_token": 2 * one, "until_native": 2 * one + whole + kept}
    assert healing.work(model, model, maps, [1, 2], 3) == {
        "switch": {"first_token": 2 * one},
        "native": {"first_token": whole + kept, "until_native": whole + kept},
        "heal_idle": healed,
        "heal_interleaved": healed,
        # The keys and values of one layer; then all of it, and those of the next.
        "heal_layers 1": {"first_token": one + kept, "until_native": one + 2 * kept + whole},
        "heal_layers 2": {"first_token": whole + kept, "until_native": whole + kept},
    }


def test_little_time_leaves_long_prompts_out(
    models: Models, translator: Translator, unhurried: None
) -> None:
    pair = BenchPair(models["dense"], models["moe"], {"float32": translator}, text=False)
    table = tables.TABLES["switch"]
    lengths = tables.lengths_of(pair, table, [40, 16, 80])
    done, left = tables.run_table(pair, table, lengths, tables.Effort(3, Stopwatch(0.0)))
    assert [timing.prompt_tokens for timing in done] == [16] and left == [40, 80]
    assert all(len(times) == 1 for times in done[0].samples.values())
    done, left = tables.run_table(pair, table, [16, 40], tables.Effort(1, Stopwatch(None)))
    assert [timing.prompt_tokens for timing in done] == [16, 40] and left == []


def test_caches_that_do_not_fit_are_refused(
    models: Models, translator: Translator, monkeypatch: Patch
) -> None:
    """What is asked for is refused; a table's own lengths are left out."""
    pair, table = (
        BenchPair(models["dense"], models["moe"], {"x": translator}),
        tables.TABLES["quant"],
    )
    monkeypatch.setattr("kvlingo_mlx.caches.memory.free", lambda: pair.caches_bytes(64))
    assert tables.lengths_of(pair, table, [64]) == [64] == tables.lengths_of(pair, table, None)
    with pytest.raises(kv.NotEnoughMemoryError, match="--prompt-tokens of less"):
        tables.lengths_of(pair, table, [64, 65])


def test_what_is_derived_from_times() -> None:
    timing = tables.Timing(8, {
        "native": [1.0, 9.0, 2.0], "switch": [0.5] * 3, "eager_switch": [0.25] * 3,
        "accelerator": [4.0] * 3, "source_step": [0.1] * 3, "decode_translated": [0.5] * 3,
    })  # fmt: skip
    assert timing.summary["native"] == {"median": 2.0, "min": 1.0, "iqr": 4.0}
    assert timing.speedups == {
        "switch": 4.0, "eager switch": 8.0, "accelerator": 0.5, "source first token": 20.0
    }  # fmt: skip
    assert timing.tokens_per_second == {"decode_translated": FEW / 0.5}
    few, enough = healing.Meanwhile(FEW - 1, 1.0, 0), healing.Meanwhile(FEW, 1.0, 0)
    timing.meanwhile = {"heal_interleaved": [enough, few], "heal_layers 1": [enough]}
    assert timing.while_healed == {"heal_layers 1": {"tokens_per_second": FEW, "share": 0.5}}
    assert timing.as_json()["summary"].keys() == timing.samples.keys()


def test_a_memory_budget_is_of_the_precision_that_it_names(
    small_geometries: None, monkeypatch: Patch
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
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    assert memory_budget.default_decoded() == paper.STATED["app:tab:budget"]["decoded"] == 128


def test_bench_of_a_geometry(small_geometries: None, tmp_path: Path, capsys: Printed) -> None:
    """The paper's nu where nobody asks for another one."""
    words = ["--geometry", "qwen3-4b:qwen3-30b-a3b", "-n", "2", "--table", "all", "-p", "12,20"]
    status, (record,) = bench(tmp_path, *words, "--decode-tokens", "5")
    text = capsys.readouterr().out
    assert status == 0
    for line in ("random weights in", "random maps, nu = 3", "random token ids", "target step",
                 "translation, 4 bits", "Fastest / interquartile range", "source, 5 tokens",
                 "target, own cache (tokens/s)", "switch, times sooner"):  # fmt: skip
        assert line in text, line
    config = record["config"]
    assert (config["head_mixing"], config["translator"], config["nu"]) == (True, "float32", 3)
    assert len(config["weights"]) == 2 and config["machine"] and config["layers"] is None
    assert set(record["results"]) == {"moe-switch", "switch", "quant"}
    for table in record["results"].values():
        assert [t["prompt_tokens"] for t in table["timings"]] == [12, 20]
        assert {t["decoded"] for t in table["timings"]} == {5}
        assert all(t["summary"].keys() == t["samples"].keys() for t in table["timings"])
    bfloat = {"translate bfloat16"} & {*record["results"]["quant"]["timings"][0]["samples"]}
    assert bool(bfloat) == on_gpu()
    words += ["--nu", "1", "--layers", "2", "--quantize", "none", "--table", "quant"]
    assert [r["config"]["nu"] for r in bench(tmp_path, *words)[1]] == [1]
    assert bench(tmp_path, *words, "--nu", "3")[0] == 2
    assert "nu is 3; qwen3-4b has 2 layers here" in capsys.readouterr().err
    assert bench(tmp_path, *words, "--time-limit", "1e-9")[0] == 2
    assert "1e-09, and the shortest measurement takes longer" in capsys.readouterr().err


def test_bench_of_healing(tmp_path: Path, capsys: Printed) -> None:
    words = ["--table", "healing", "-n", "2", "-p", "2,40", "--decode-tokens", "8"]
    status, (record,) = bench(tmp_path, *words)
    assert status == 0
    text = " ".join(capsys.readouterr().out.split())
    for told in (
        "From a switch to the target's own cache", "switch, 2 layers native",
        "until native, healed idle", "until native, healed between tokens",
        "until native, 2 layers at once", "target, healed meanwhile (tokens/s)",
        "Work before the first token / until the cache is native (GFLOP)",
        "decoding steps are left out",
    ):  # fmt: skip
        assert told in text, told
    found = record["results"]["healing"]
    assert [t["prompt_tokens"] for t in found["timings"]] == [2, 40]
    rows = zip(found["timings"], found["work"], found["while_healed"], strict=True)
    for timing, work, speeds in rows:
        phases = {"heal_interleaved", "heal_layers 2"}
        assert set(timing["meanwhile"]) == phases >= set(speeds)
        assert all(len(rounds) == 2 for rounds in timing["meanwhile"].values())
        assert set(work) == phases | {"switch", "native", "heal_idle"}
    # One token is read after the first of the answer, so none is decoded meanwhile.
    assert found["while_healed"][0] == {}
    assert all(r["tokens"] == 0 for r in found["timings"][0]["meanwhile"]["heal_interleaved"])


def test_costs_by_hand(models: Models, translator: Translator) -> None:
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
    seen = 4 * config["num_attention_heads"] * 32 * len(model.model.layers)
    assert long.flops - short.flops == each + without + 29 * seen
    head = 2 * config["vocab_size"] * config["hidden_size"]  # of the last token alone
    assert short.flops == 8 * (each + without) + sum(range(21, 29)) * seen + head
    work = translation_work(translator, models["dense"], model, 10)
    assert work.flops == 10 * sum(2 * part.size for _, part in translator.tensors())


def test_windows_take_no_work_beyond_them(tmp_path: Path) -> None:
    """By the caches themselves: a step reads what a ring holds, a translation writes no more."""
    options: dict[str, Any] = {"seed": 3, "layers": 5, "kv_heads": 2, "head_dim": 32}
    model = kv.load(tiny.write_tiny_model(tmp_path / "g", "gemma3_text", **options))
    costs, layers = Costs(model), model.geometry.layers
    count, (window,) = 200, {g.window for g in layers if g.window}
    # all of the room that it takes
    held = sum(layer.nbytes for layer in memory_budget.allocated(model, 255))
    wide = sum(g.window is None for g in layers)
    entry = kv_caches.bytes_by_layer(model)[0]
    assert held == entry * (256 * wide + window * (len(layers) - wide))
    weights = costs.tokens(1).bytes - sum(kv_caches.bytes_by_layer(model))
    assert costs.tokens(1, 255).bytes - weights == held
    translator = random_translators(model, model, 1, {"float32": ("float32", None)})
    work = translation_work(translator["float32"], model, model, count)
    share = (wide * count + (len(layers) - wide) * window) / (len(layers) * count)
    maps = translator["float32"]
    flops = sum(2 * part.size for _, part in maps.tensors())
    assert work.flops == pytest.approx(share * count * flops)
    moved = 2 * entry * len(layers) * share * count
    assert work.bytes == pytest.approx(maps.nbytes + moved)
