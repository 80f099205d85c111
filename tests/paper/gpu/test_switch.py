"""A switch on a GPU as it is timed, run on a CPU: what is made, written and recorded."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.fixtures import Patch, Printed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.paper.gpu import switch  # noqa: E402
from benchmarks.paper.gpu.switch import FORMS, Scene, translators  # noqa: E402
from benchmarks.paper.gpu.translation import CacheMemory, PrefixTranslation  # noqa: E402
from benchmarks.paper.timing import gpu  # noqa: E402
from benchmarks.paper.timing.widths import shape_of  # noqa: E402
from kvlingo_mlx.cuda.families import check_agreement  # noqa: E402
from tests.support.gpu_scenes import made, read  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
TRIAL = {"device": "cpu", "dtype": "float32", "gemm": 16, "trials": 2}
TARGETS = ("tiny-l", "tiny-moe", "tiny-gemma-s", "tiny-gemma-l")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("qwen3-4b", 4.022), ("qwen3-8b", 8.191),
     ("qwen3-30b-a3b", 30.532), ("gemma-3-4b", 3.880), ("gemma-3-12b", 11.766)],
)  # fmt: skip
def test_widths_are_the_released_ones(name: str, billions: float) -> None:
    """All parameters of the text model, by transformers' own class; one number off would show."""
    with torch.device("meta"):
        config = switch.config_of(shape_of(name))
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_transformers_runs_a_shape_as_its_config_says(name: str) -> None:
    """Windows and rotations, by the check that a released model goes through."""
    target = made(name)
    check_agreement(target.family, target.model, target.config, name)
    assert read(name).layers == target.spec().layers


def test_what_is_not_written_is_found() -> None:
    target, source = made("tiny-gemma-l"), read("tiny-gemma-s")
    fast, exact = translators(source, target, 1, 21)["mixing"]
    scene, form = Scene.of(source, target, 21), FORMS["mixing"]
    assert scene.error(form, (fast, exact), "torch") < 1e-5
    other = dataclasses.replace(fast, maps=fast.maps[::-1])
    with pytest.raises(ValueError, match="do not fit this translator"):
        scene.error(form, (other, exact), "torch")
    planted = translators(source, target, 1, 21)["mixing"][0]
    assert scene.error(form, (planted, exact), "torch") > 0.5

    def lazy(states: Any, memory: CacheMemory, **options: Any) -> None:
        first = CacheMemory(memory.groups[:1], memory.arrays[:1])
        PrefixTranslation(fast.groups[:1], fast.maps[:1])(states, first, **options)

    with pytest.raises(RuntimeError, match="some keys of layer 2 were not written"):
        scene.error(form, (lazy, exact), "torch")  # type: ignore[arg-type]


def test_what_is_measured() -> None:
    settings = gpu.PairSettings(**TRIAL, tokens=(9, 21), prefill_chunk=10)
    pairs = ["tiny-s:tiny-l", "tiny-l:tiny-s", "tiny-gemma-s:tiny-gemma-l", "tiny-s:tiny-moe"]
    told: list[tuple[str, int]] = []
    results = gpu.time_pairs(pairs, settings, lambda pair, one: told.append((pair, one["tokens"])))
    assert told == [(pair, n) for pair in pairs for n in (9, 21)]
    assert json.loads(json.dumps(results)) == results and list(results["plans"]) == pairs
    widths = {"tiny-s:tiny-l": 3 * 32 * 32, "tiny-l:tiny-s": 2 * 32 * 32}
    for pair, found in results["pairs"].items():
        forms = results["plans"][pair]["forms"]
        assert forms == [f for f in FORMS if f != "head-wise" or pair in widths]
        for length in found:
            rows = length["rows"]
            named = {f"translation: {form}, torch" for form in forms}
            named |= {"step", "switch", "re-prefill"}
            assert set(rows) == named
            assert all(len(row["samples_s"]) == 2 for row in rows.values())
            assert all(row.get("error", 0) < 1e-5 for row in rows.values())
            if pair in widths:
                flops = length["tokens"] * 2 * 2 * widths[pair]
                assert rows["translation: mixing, torch"]["flops"] == flops
                assert rows["translation: head-wise, torch"]["flops"] == flops / 2
            assert length["peak_bytes"] == {} and length["prefill_chunk"] == 10
            (ratios,) = length["ratios"].values()
            both = (rows[name]["samples_s"] for name in ("re-prefill", "switch"))
            assert ratios == [slow / quick for slow, quick in zip(*both, strict=True)]
    # Windows: 5 of 7 layers translate 7 tokens alone; one source layer of 16 into 32 numbers.
    row = results["pairs"]["tiny-gemma-s:tiny-gemma-l"][1]["rows"]["translation: mixing, torch"]
    assert row["flops"] == 2 * 2 * 16 * 32 * (5 * 7 + 2 * 21)


def test_the_script_is_a_thin_caller(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cuda_switch

    record = tmp_path / "record.jsonl"
    trial = ["--device", "cpu", "--dtype", "float32", "--gemm", "16", "--trials", "1"]
    pair = ["--pairs", "tiny-s:tiny-l", "--json", str(record)]
    cuda_switch.main([*trial, *pair, "--tokens", "9", "21"])
    printed = capsys.readouterr().out
    assert "tiny-s to tiny-l, 21 tokens" in printed and "GB/s" in printed
    assert "memory" not in printed and "graph" not in printed  # not measured
    found = json.loads(record.read_text())
    assert found["kind"] == "cuda_switch" and found["config"]["pairs"] == ["tiny-s:tiny-l"]
    assert (found["config"]["batch"], found["config"]["stack"]) == (1, "transformers")
    assert cuda_switch.parse(["--device", "cpu", "--label", "tab:gemma3"]).pairs == [
        "gemma-3-12b:gemma-3-4b", "gemma-3-4b:gemma-3-12b"
    ]  # fmt: skip
    for wrong, told in (
        (["--pairs", "qwen3-0.6b"], "the pair is 'qwen3-0.6b'; give SOURCE:TARGET of"),
        (["--pairs", "tiny-s:tiny-l", "--nu", "9"], "nu is 9; tiny-s has 2 layers here"),
        (["--pairs", "tiny-s:tiny-l", "--tokens", "50000"], "tokens hold 50000; the context"),
        (["--pairs", "gemma-3-4b:gemma-3-12b", "--layers", "3"], "layers is 3; of gemma-3-4b:"),
        (["--trials", "0"], "trials holds 0"),
        (["--tokens", "0"], "tokens holds 0"),
        (["--vllm", "--pairs", "tiny-s:tiny-l", "--tokens", "9"], "vLLM cannot be imported here"),
    ):
        with pytest.raises(SystemExit):
            cuda_switch.main([*trial, *wrong])
        assert told in capsys.readouterr().err


def test_a_run_that_fails_keeps_what_it_had(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cuda_switch

    run, record = switch.time_length, tmp_path / "record.jsonl"

    def fails(scene: Any, *more: Any) -> Any:
        if scene.num_tokens == 7:
            raise torch.OutOfMemoryError("planted")
        return run(scene, *more)

    monkeypatch.setattr(switch, "time_length", fails)
    options = ["--device", "cpu", "--dtype", "float32", "--pairs", "tiny-s:tiny-l", "--gemm", "16",
               "--trials", "1", "--json", str(record), "--tokens"]  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        cuda_switch.main([*options, "5", "7"])
    kept = json.loads(record.read_text())
    (found,) = kept["results"]["pairs"]["tiny-s:tiny-l"]
    assert found["tokens"] == 5 and kept["config"]["failed"]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        cuda_switch.main([*options, "7"])
    assert len(record.read_text().splitlines()) == 1
