"""Times beside a reference's: what was measured otherwise is told beside the number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.commands import bench as verb
from benchmarks.paper.commands import run
from benchmarks.paper.timing import memory_budget, paper, paths, tables
from benchmarks.paper.timing.reference import COMPARED, Reference, load_reference
from kvlingo_mlx.timing import geometries
from kvlingo_mlx.timing.switching import Stopwatch
from kvlingo_mlx.training.paper_pairs import best_of
from tests.support import paper_tables

PAPER_TABLES = paper_tables.FILE
# A run that is the paper's in all but the machine.
THE_PAPERS = {
    "machine": "AMD EPYC", "source": "random qwen3-4b", "target": "random qwen3-30b-a3b",
    "layers": None, "batch": 1, "weights": ["bfloat16", "bfloat16"], "translator": "float32",
    "nu": 3, "head_mixing": True, "decoded": 256, "decode_tokens": None,
}  # fmt: skip
ONE_OTHER = {
    "source": ("random qwen3-1.7b", "source Qwen3-4B, here random qwen3-1.7b"),
    "target": ("Qwen/Qwen3-8B", "target Qwen3-30B-A3B, here Qwen/Qwen3-8B"),
    "layers": (((2, 36), (2, 48)), "layers whole, here 2 of 36 and 2 of 48"),
    "batch": (8, "batch 1, here 8"),
    "weights": (["4 bits", "4 bits"], "weights bfloat16, here 4 bits"),
    "translator": ("bfloat16", "translator float32, here bfloat16"),
    "nu": (1, "nu 3, here 1"),
    "head_mixing": (False, "head mixing yes, here no"),
    "decoded": (8, "decoded 256, here 8"),
}
PHASES = {"source_prefill": 0.1, "switch": 0.0316, "translate float32": 0.0036,
          "target_step": 0.014, "decode_source": 256 / 35.05}  # fmt: skip


def differing(config: dict[str, Any]) -> list[str]:
    found = load_reference("paper-m3-ultra").differences(config)
    return [str(one) for one in found if one.field != "machine"]


def test_the_papers_numbers_are_those_of_its_tables() -> None:
    printed = {t["label"]: t for t in map(json.loads, PAPER_TABLES.read_text().splitlines())}
    rows = [row[2:] for row in printed["app:tab:moespeed"]["rows"]]
    assert list(map(str, paper.LENGTHS)) == printed["app:tab:moespeed"]["columns"][1:]
    ours = [*paper.MOE_SPEED.values(), *paper.MOE_SPEEDS.values()]
    assert [list(row) for row in ours] == [*rows[:4], rows[6], rows[8], *rows[4:6]]
    budget = {}
    for _, context, batch, full, *gains, peak in printed["app:tab:budget"]["rows"]:
        told = str(int(full) if isinstance(full, float) else full)
        cells = (told, *gains, *peak.split(" → "))
        key = int(context.removesuffix("k")) * 1024, int(batch)
        budget[key] = tuple(cell.replace("–", "-") for cell in cells)
    assert budget == paper.BUDGET
    reference = load_reference("paper-m3-ultra")
    assert reference.label == "app:tab:moespeed" and set(reference.config) <= set(COMPARED)
    best = best_of("Qwen3-4B", "Qwen3-30B-A3B")
    assert best is not None and best.nu == reference.config["nu"] == 3


def test_a_run_like_the_papers_differs_in_nothing() -> None:
    assert differing(THE_PAPERS) == []
    machine = load_reference("paper-m3-ultra").differences(THE_PAPERS)
    assert list(map(str, machine)) == ["machine Apple M3 Ultra, here AMD EPYC"]
    assert not load_reference("paper-m3-ultra").differences(
        THE_PAPERS | {"machine": "Apple M3 Ultra", "source": "/models/Qwen3-4B"}
    )


@pytest.mark.parametrize("field", ONE_OTHER)
def test_a_run_that_differs_in_one_thing_is_told_it(field: str) -> None:
    value, told = ONE_OTHER[field]
    assert differing(THE_PAPERS | {field: value}) == [told]
    silent = {name: of for name, of in THE_PAPERS.items() if name != field}
    assert differing(silent) == [told.split(", here")[0] + ", here not said"]


def test_every_field_is_planted_once() -> None:
    assert set(ONE_OTHER) | {"machine", "prompt", "prefill_step_size"} == set(COMPARED)


def beside(
    capsys: pytest.CaptureFixture[str], found: Reference, table: str = "moe-switch",
    grown: float = 9.0, samples: dict[str, float] = PHASES, **config: Any,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """What is printed and recorded beside a run of 64 tokens; its settings but for ``config``."""
    settings = THE_PAPERS | config
    timing = tables.Timing(64, {name: [took] for name, took in samples.items()})
    timing.decoded = settings["decoded"]
    extrapolated = [dict.fromkeys(timing.samples, grown)]
    kept = verb.beside(table, [timing], extrapolated, found, settings)
    return " ".join(capsys.readouterr().out.split()), kept


def test_a_star_stands_at_each_number_that_was_measured_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And at no other; nu concerns the ways that translate, decoded tokens the speeds."""
    named = load_reference("paper-m3-ultra")
    text, kept = beside(capsys, named)
    assert "*" not in text and "│ switch │ 15.8 (2.0x)" in text
    assert "source, a token │ 14.3 (2.0x)" in text
    assert kept["differences"] == ["machine Apple M3 Ultra, here AMD EPYC"]
    assert "one over the decoding speed; here each way is measured whole" in text
    text, kept = beside(capsys, named, nu=1, prompt="random token ids")
    for number in ("switch │ 15.8* (2.0x)", "translation, float32 │ 1.8* (2.0x)",
                   "source prefill │ 67.9 (1.5x)", "source, a token │ 14.3 (2.0x)"):  # fmt: skip
        assert number in text, number
    assert "* measured otherwise: nu 3, here 1" in text
    assert "the reference does not say: prompt" in text and kept["not_said"] == ["prompt"]
    otherwise = {row["phase"]: row["measured_otherwise"] for row in kept["rows"]}
    assert otherwise["switch"] == ["nu 3, here 1"] and otherwise["source_prefill"] == []
    assert json.loads(json.dumps(kept)) == kept and kept["label"] == "app:tab:moespeed"
    text, _ = beside(capsys, named, translator="bfloat16")
    assert "switch │ 15.8* (2.0x)" in text and "translation, float32 │ 1.8 (2.0x)" in text
    slow = {**PHASES, "decode_source": 8 / 35.05}
    text, _ = beside(capsys, named, samples=slow, decoded=8)
    assert "source, a token │ 14.3* (2.0x)" in text and "switch │ 15.8 (2.0x)" in text
    text, _ = beside(capsys, named, weights=["4 bits", "4 bits"])
    assert "source prefill │ 67.9* (1.5x)" in text


def test_what_stands_beside_a_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own table; what is missing is told; stored maps stand beside 16-bit ones."""
    named = load_reference("paper-m3-ultra")
    text, _ = beside(capsys, named, samples={"translate stored": 0.0034})
    assert "translation, stored, beside translation, bfloat16 │ 1.7 (2.0x)" in text
    text, kept = beside(capsys, named, "switch", samples={"nothing": 1.0})
    assert "has nothing in common with this table: it holds 64, 128, 256, 512, 1024 tokens" in text
    assert "this table holds 64 tokens (nothing)" in text and "│" not in text
    assert kept["rows"] == []
    alone = Reference("file", {}, {"quant": {64: {"switch": 1.0}}}, {})
    text, _ = beside(capsys, alone, samples={"switch": 1.0})
    assert "it holds no such table; this table holds 64 tokens (switch)" in text


def test_shallow_models_stand_beside_whole_ones_at_full_depth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers, samples = ((2, 36), (2, 48)), {"switch": 0.003}
    named = load_reference("paper-m3-ultra")
    text, _ = beside(capsys, named, grown=0.0316, samples=samples, layers=layers)
    assert "switch │ 15.8* (2.0x)" in text
    assert "at full depth: this machine's extrapolated, not measured" in text
    sheets = {"moe-switch": {64: {"switch": 0.001}}}, {"moe-switch": {64: {"switch": 0.01}}}
    shallow = Reference("file", {"layers": layers}, *sheets, layers)
    text, _ = beside(capsys, shallow, samples=samples, layers=layers)
    assert "switch │ 1 (3.0x)" in text and "extrapolated" not in text
    text, _ = beside(capsys, shallow, samples={"switch": 0.03})
    assert "switch │ 10* (3.0x)" in text and "its own extrapolated, not measured" in text


# ---- what bench times by itself ---------------------------------------------------------------


class Decoding(paths.Paths):
    """Paths whose decoding takes a second for eight tokens; nothing is run."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, list[tuple[str, int]]()

    def phase(self, name: str) -> Any:
        def decode() -> None:
            self.asked.append((name, self.decoded))
            self.now += self.decoded / 8

        return decode


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        (None, 256),
        (960.0, 256),
        (950.0, 128),
        (1.0, 8),
    ],
)
def test_decoding_is_over_256_tokens_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, count: int
) -> None:
    """Three speeds of five lengths: 480 s over 256 tokens, which may take half of the time."""
    planted = Decoding()
    clock = Stopwatch(seconds)
    if seconds is not None:
        monkeypatch.setattr(clock, "left", lambda: seconds)

    def took(action: Any) -> float:
        before = planted.now
        action()
        return planted.now - before

    monkeypatch.setattr(tables, "seconds", took)
    assert tables.affordable(planted, tables.TABLES["moe-switch"], clock, 5) == count
    assert planted.decoded == paths.FEW  # left as it was
    assert all(asked <= tables.PROBED for _, asked in planted.asked)
    assert tables.affordable(planted, tables.TABLES["quant"], clock, 5) == tables.DECODED == 256
    # Two speeds in each of five rounds: 1,600 s over 256 tokens.
    in_turns = {None: 256, 10_000.0: 256, 960.0: 64, 950.0: 64, 60.0: 8, 1.0: 8}
    assert tables.affordable(planted, tables.TABLES["healing"], clock, 5, 5) == in_turns[seconds]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
              "vocab_size": 256, "num_key_value_heads": 2, "head_dim": 64,
              "intermediate_size": 64, "sliding_window": 64}  # fmt: skip
    more = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    for name in ("qwen3-4b", "qwen3-30b-a3b", "gemma-3-4b", "gemma-3-12b"):
        own = more if "a3b" in name else {}
        depth = {"num_hidden_layers": 6} if "gemma" in name else {}
        made = {**geometries.GEOMETRIES[name], **shrunk, **own, **depth}
        monkeypatch.setitem(geometries.GEOMETRIES, name, made)
    narrow = {**geometries.GEOMETRIES["gemma-3-4b"], "num_key_value_heads": 1}
    monkeypatch.setitem(geometries.GEOMETRIES, "gemma-3-4b", narrow)


def test_a_pair_that_the_paper_timed_is_timed_as_there(
    small: None, unhurried: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nu = 3 of the mixture of experts, and 1 of others; a run of fewer layers says why not."""
    out = tmp_path / "x.jsonl"
    base = ["bench", "-n", "1", "-p", "12", "--quantize", "none", "--json", str(out)]
    base.append("--geometry")
    moe = [*base, "qwen3-4b:qwen3-30b-a3b", "--reference", "paper-m3-ultra"]
    assert run([*moe, "--decode-tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert "random maps, nu = 3" in text and "source, 5 tokens" in text
    assert "--time-limit allows no more" not in text  # they were asked for
    assert run([*moe, "--layers", "2", "--time-limit", "1e-6"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nu is 2, in the paper 3 for this pair: 2 layers leave no more to read; give -c" in text
    assert "decoding speeds are over 8 tokens, in the paper over 256: --time-limit allows" in text
    assert run([*base, "gemma-3-4b:gemma-3-12b", "--table", "quant"]) == 0
    assert run([*moe, "--nu", "1", "--table", "quant"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["config"]["nu"] for r in records] == [3, 2, 1, 1]
    timing = records[0]["results"]["moe-switch"]["timings"][0]
    assert timing["decoded"] == 5 and records[0]["config"]["decode_tokens"] == 5
    told = records[0]["results"]["moe-switch"]["reference"]["differences"]
    assert "decoded 256, here 5" in told and not any("nu" in one for one in told)
    told = records[3]["results"]["quant"]["reference"]["differences"]
    assert "nu 3, here 1" in told and not any("decoded" in one for one in told)


def test_one_command_times_several_precisions(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.jsonl"
    command = ["bench", "--geometry", "qwen3-4b:gemma-3-4b", "--json", str(out), "-n", "1",
               "--geometry", "gemma-3-4b:gemma-3-12b", "--table", "quant", "-p", "12",
               "--quantize", "none", "--precision", "bfloat16,4bit,4bit"]  # fmt: skip
    assert run(command) == 0
    kept = [json.loads(line)["config"] for line in out.read_text().splitlines()]
    assert [config["precision"] for config in kept] == ["bfloat16", "4bit"]
    assert [config["weights"] for config in kept] == [["bfloat16"] * 2, ["4 bits"] * 2]
    text = capsys.readouterr().out
    assert "random weights in bfloat16" in text and "random weights in 4bit" in text


def test_the_memory_budget_stands_beside_the_papers(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.jsonl"
    command = ["bench", "--table", "memory-budget", "-n", "1", "--batch-sizes", "1",
               "--reference", "paper-m3-ultra", "--json", str(out)]  # fmt: skip
    assert run([*command, "-p", "8192", "--decode-tokens", "3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The same in the paper (app:tab:budget)" in text
    assert "8192 │ 1 │ 62-65* │ +9-10%* │ -5%* │ 9.9* │ 9.1*" in text
    config = json.loads(out.read_text())["config"]
    told = config["reference"]["differences"]
    assert [one.split(" ")[0] for one in told] == ["machine", "layers", "trials", "decoded"]
    assert "decoded 128, here 3" in text and "layers 48, here 6" in text
    assert run([*command, "-p", "64", "--decode-tokens", "1"]) == 0
    assert "the paper has none of these contexts and batches" in capsys.readouterr().out
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    assert memory_budget.default_decoded() == paper.STATED["app:tab:budget"]["decoded"] == 128
