"""Records laid out as the paper's tables: planted with the paper's values, they give its rows."""

from typing import Any

import pytest

from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.timing.laid_out import LABELS, laid_out

PRINTED = tables()
H100 = {"cuda": "NVIDIA H100 80GB HBM3", "chip": "AMD EPYC"}
MAC = {"cuda": None, "chip": "Apple M3 Ultra"}
LENGTHS = (2048, 4096, 8192, 16384, 32768)
SHAPES = {"Qwen3-0.6B/1.7B": ("qwen3-0.6b", "qwen3-1.7b"), "Qwen3-4B/8B": ("qwen3-4b", "qwen3-8b")}
SERVED = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "gemma-3-4b", "gemma-3-12b",
          "gemma-3-12b-4kv")  # fmt: skip


def bench() -> dict[str, Any]:
    """A record of bench with the paper's times as its medians."""
    rows = [row[2:] for row in PRINTED["app:tab:moespeed"].rows]
    names = ("source_prefill", "native", "translate float32", "translate bfloat16")
    timings = []
    for i, length in enumerate((64, 128, 256, 512, 1024)):
        samples = {name: [rows[j][i] / 1e3] for j, name in enumerate(names)}
        samples |= {"decode_source": [256 / rows[4][i]], "decode_native": [256 / rows[5][i]]}
        samples |= {"switch": [rows[6][i] / 1e3], "accelerator": [rows[8][i] / 1e3]}
        timings.append({"prompt_tokens": length, "samples": samples, "decoded": 256})
    config = {
        "machine": "Apple M3 Ultra", "source": "random qwen3-4b", "target": "random qwen3-30b-a3b",
        "layers": None, "batch": 1, "weights": ["bfloat16"] * 2, "translator": "float32",
        "nu": 3, "head_mixing": True,
    }  # fmt: skip
    results = {"moe-switch": {"timings": timings}}
    return {"kind": "bench", "environment": MAC, "config": config, "results": results}


def switches() -> dict[str, Any]:
    pairs: dict[str, list[Any]] = {}
    for part, length, *cells in PRINTED["tab:cost"].rows:
        small, large = SHAPES[part]
        for pair, three in ((f"{large}:{small}", cells[:3]), (f"{small}:{large}", cells[3:])):
            names = ("translation: mixing, fused", "step", "re-prefill")
            rows = {name: {"median_s": ms / 1e3} for name, ms in zip(names, three, strict=True)}
            rows["translation: mixing, products"] = {"median_s": 1.0}
            found = {"tokens": int(length), "rows": rows, "fastest": {"mixing": names[0]}}
            pairs.setdefault(pair, []).append(found)
    config = {"stack": "transformers", "batch": 1, "layers": None, "dtype": "bfloat16"}
    results = {"plans": {pair: {"nu": 1} for pair in pairs}, "pairs": pairs}
    return {"kind": "cuda_switch", "environment": H100, "config": config, "results": results}


def served() -> dict[str, Any]:
    models: dict[str, list[Any]] = {}
    for name, (_, _, *cells) in zip(SERVED, PRINTED["app:tab:vllm"].rows, strict=True):
        for length, cell in zip(LENGTHS, cells, strict=True):
            first, each = (float(part) / 1e3 for part in cell.split(" / "))
            found = {"tokens": length, "first_token": [9.0, first, 0.0], "per_token": [each]}
            models.setdefault(name, []).append(found)
    config = {"stack": "vLLM", "client": "in process", "dtype": "bfloat16", "batch": 1,
              "requests": 16, "decoded": 128}  # fmt: skip
    return {"kind": "cuda_vllm", "environment": H100, "config": config,
            "results": {"version": "9", "models": models}}  # fmt: skip


def cells_of_budget(full: float, narrow: float, folded: float, most: tuple[float, float]) -> Any:
    peak = {"full": most[0] * 1e9, "narrowed": 1.0, "folded": most[1] * 1e9}
    return {"samples": {"full": [99.0, 128 / full]}, "decoded": 128, "peak": peak,
            "gain": {"narrowed": narrow, "folded": folded}}  # fmt: skip


def budget() -> dict[str, Any]:
    cells = [
        {"context": 8192, "batch": 1, **cells_of_budget(62.04, 0.094, -0.051, (9.9, 9.1))},
        {"context": 32768, "batch": 8, **cells_of_budget(110 / 8, 0.44, 0.36, (50.2, 29.4))},
    ]
    config = {"layers": 48, "weights": "4 bits", "head_mixing": False, "capture": "post_rope",
              "trials": 3, "decoded": 128}  # fmt: skip
    return {"kind": "memory_budget", "environment": MAC, "config": config, "results": cells}


RECORDS = {"app:tab:moespeed": bench, "tab:cost": switches, "app:tab:vllm": served}


@pytest.mark.parametrize("label", RECORDS)
def test_the_papers_values_give_the_papers_rows(label: str) -> None:
    found = laid_out(label, [RECORDS[label]()])
    assert found.columns == list(PRINTED[label].columns)
    wanted = [list(row) for row in PRINTED[label].rows]
    if label == "app:tab:moespeed":  # its speed-ups are of times that it does not print
        for row, printed in zip(
            (found.rows[7], found.rows[9]), (wanted[7], wanted[9]), strict=True
        ):
            pairs = zip(row[2:], printed[2:], strict=True)
            assert all(abs(float(a[:-1]) - float(b[:-1])) < 0.1 for a, b in pairs)
        del found.rows[9], found.rows[7], wanted[9], wanted[7]
    assert found.rows == wanted
    client = "client at the client of a server, here in process"
    assert found.differs == ([client] if label == "app:tab:vllm" else [])


def test_a_memory_budget_has_the_papers_cells() -> None:
    found = laid_out("app:tab:budget", [budget()])
    assert [row[:3] for row in found.rows] == [
        list(row[:3]) for row in PRINTED["app:tab:budget"].rows
    ]
    assert found.rows[0][3:] == [62.0, "+9%", "-5%", "9.9 → 9.1"]
    assert found.rows[3][3:] == [110.0, "+44%", "+36%", "50.2 → 29.4"]
    assert found.rows[1][3:] == [None] * 4 and found.differs == []


def test_the_figure_has_the_papers_speedups() -> None:
    """Section "Time to first token": 4.8 to 5.6 at 2k; 12.0, 14.8, 23.2 and 28.9 at 32k."""
    found = laid_out("fig:cost", [switches(), served(), bench()])
    panel = {(curve, n): value for p, curve, n, value in found.rows if p == "a"}
    at = {n: [panel[f"into Qwen3-{size}", n] for size in ("0.6B", "1.7B", "4B", "8B")]
          for n in LENGTHS}  # fmt: skip
    assert at[32768] == pytest.approx([12.0, 14.8, 23.2, 28.9], abs=0.06)
    assert min(at[2048]) == pytest.approx(4.8, abs=0.06)
    # The paper divides times of more digits than it prints: 30 ms to a first token is 29.5 to 30.5.
    assert max(at[2048]) == pytest.approx(5.6, abs=0.1)
    terms = {(curve, n): value for p, curve, n, value in found.rows if p == "b"}
    assert terms["re-prefill", 32768] == 506 and terms["translation", 32768] == 30.7
    assert terms["decoding step", 2048] == 2.6 and len(terms) == 3 * len(LENGTHS)
    mac = {(curve, n): value for p, curve, n, value in found.rows if p == "c"}
    assert mac["decoding step", 64] == 14.0 and mac["decoding step", 1024] == 14.5
    assert mac["Qwen3-30B-A3B prefill", 64] == 151.8 and len(mac) == 4 * 5
    assert [one.split(":")[0] for one in found.differs] == ["app"]
    half = laid_out("fig:cost", [bench()])
    assert {row[0] for row in half.rows} == {"c"}


def test_what_was_not_measured_is_none_and_the_later_record_counts() -> None:
    first, second = switches(), switches()
    del first["results"]["pairs"]["qwen3-1.7b:qwen3-0.6b"]
    found = laid_out("tab:cost", [first])
    assert found.rows[0] == ["Qwen3-0.6B/1.7B", 2048.0, None, None, None, 3.5, 29.0, 30.0]
    (later,) = (second["results"]["pairs"]["qwen3-1.7b:qwen3-0.6b"][0],)
    later["rows"]["step"]["median_s"] = 0.0017
    second["results"]["pairs"] = {"qwen3-1.7b:qwen3-0.6b": [later],
                                  "tiny-s:tiny-l": first["results"]["pairs"]}  # fmt: skip
    second["results"]["plans"]["qwen3-1.7b:qwen3-0.6b"] = {"nu": 4}
    found = laid_out("tab:cost", [first, second])
    assert found.rows[0][2:] == [3.5, 1.7, 29.9, 3.5, 29.0, 30.0]
    assert found.differs == ["nu 1, here 4"]


@pytest.mark.parametrize("label", LABELS)
def test_without_a_number_it_is_refused(label: str) -> None:
    other = budget() if label != "app:tab:budget" else bench()
    for records, told in (([], "found no records"), ([other], f"found {other['kind']}")):
        with pytest.raises(ValueError, match=f"no record holds a number of {label}: {told}, expec"):
            laid_out(label, records)
    with pytest.raises(ValueError, match="the label is 'tab:lrs'; tables of times are app:tab:moe"):
        laid_out("tab:lrs", [])
