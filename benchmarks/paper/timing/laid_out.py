"""Records of times laid out as the paper's tables are, to stand beside the paper's values.

A function for each label of the paper: from records, as ``--json`` appends them, to rows in the
order of the paper's rows and columns. What was not measured is None. Of two records that hold the
same cell the later one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.timing.paper import BUDGET, LENGTHS, differences
from benchmarks.paper.timing.phases import SPEEDS
from benchmarks.paper.timing.vllm_serving import SERVED_ROWS
from benchmarks.paper.timing.widths import PAIRS, TOKENS
from kvlingo_mlx.reporting.measure import median

Record = Mapping[str, Any]
# tab:cost: a part of the table, and its pairs into the smaller and into the larger model.
COST_PAIRS = {
    "Qwen3-0.6B/1.7B": PAIRS["tab:cost"][:2],
    "Qwen3-4B/8B": PAIRS["tab:cost"][2:],
}


@dataclass(frozen=True)
class Laid:
    """A table of this project's numbers, laid out as the paper's.

    Attributes:
        label: The label of the paper's table or figure.
        columns: The names of the cells, without the part's.
        rows: Each the part of the table it is in, or None, and its cells; None is not measured.
        differs: In words, how the runs differ from what the paper states of its own.
    """

    label: str
    columns: list[str]
    rows: list[list[Any]]
    differs: list[str]


def laid_out(label: str, records: Sequence[Record]) -> Laid:
    """The table or figure of a label, from records of any kind.

    Raises:
        ValueError: No table of times has this label, or no record holds any of its numbers.
    """
    if label not in LABELS:
        raise ValueError(f"the label is {label!r}; tables of times are {', '.join(LABELS)}")
    found = LABELS[label](records)
    fixed = 3 if label == "app:tab:budget" else 2
    if all(cell is None for row in found.rows for cell in row[fixed:]):
        kinds = sorted({str(record.get("kind")) for record in records})
        raise ValueError(
            f"no record holds a number of {label}: found {', '.join(kinds) or 'no records'}, "
            f"expected {NEEDED[label]}"
        )
    return found


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _otherwise(label: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """How runs differ from what the paper states of a table; each difference once."""
    return list(dict.fromkeys(one for run in runs for one in differences(label, run)))


def _machine(record: Record) -> str:
    environment = record["environment"]
    return environment.get("cuda") or environment["chip"]


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k"


# ---- Apple silicon ------------------------------------------------------------------------------


def moe_speed(records: Sequence[Record], lengths: Sequence[int] = LENGTHS) -> Laid:
    """app:tab:moespeed, from the moe-switch table of records of ``bench`` of whole models."""
    times, runs = _bench_times(records)

    def cell(length: int, make: Callable[[Mapping[str, float]], float]) -> Any:
        try:
            return make(times[length])
        except KeyError:
            return None

    rows = [[None, name, *(cell(n, make) for n in lengths)] for name, make in _MOE_ROWS]
    columns = ["Prompt tokens", *map(str, lengths)]
    return Laid("app:tab:moespeed", columns, rows, _otherwise("app:tab:moespeed", runs))


Make = Callable[[Mapping[str, float]], Any]


def _ms(phase: str) -> Make:
    return lambda t: round(1e3 * t[phase], 1)


def _rate(phase: str) -> Make:
    return lambda t: round(1 / t[phase], 1)


def _sooner(phase: str) -> Make:
    return lambda t: f"{t['native'] / t[phase]:.2f}×"


_MOE_ROWS: list[tuple[str, Make]] = [
    ("Qwen3-4B prefill (ms)", _ms("source_prefill")),
    ("Qwen3-30B-A3B prefill (ms)", _ms("native")),
    ("translation, fp32 (ms)", _ms("translate float32")),
    ("translation, bf16 (ms)", _ms("translate bfloat16")),
    ("Qwen3-4B decoding (tokens/s)", _rate("decode_source")),
    ("Qwen3-30B-A3B decoding (tokens/s)", _rate("decode_native")),
    ("switch, first token (ms)", _ms("switch")),
    ("speedup", _sooner("switch")),
    ("prefill accelerator, first token (ms)", _ms("accelerator")),
    ("speedup", _sooner("accelerator")),
]


def _bench_times(records: Sequence[Record]) -> tuple[dict[int, dict[str, float]], list[Any]]:
    """Seconds by length and phase, of decoding those for a token; the runs' settings."""
    times: dict[int, dict[str, float]] = {}
    runs = []
    for record in _of_kind(records, "bench"):
        found = record["results"].get("moe-switch")
        config = record["config"]
        if not found or not found["timings"] or config.get("layers") is not None:
            continue
        for timing in found["timings"]:
            took = {phase: _each(timing, phase) for phase in timing["samples"]}
            times.setdefault(timing["prompt_tokens"], {}).update(took)
        first = found["timings"][0]
        speeds = {"decoded": first.get("decoded")} if SPEEDS[0] in first["samples"] else {}
        runs.append({"machine": _machine(record), **config, **speeds})
    return times, runs


def _each(timing: Mapping[str, Any], phase: str) -> float:
    """A phase's median seconds; of decoding, those for one token."""
    took = median(timing["samples"][phase])
    return took / timing["decoded"] if phase in SPEEDS else took


def budget(records: Sequence[Record]) -> Laid:
    """app:tab:budget, from records of ``bench --table memory-budget``."""
    cells: dict[tuple[int, int], Any] = {}
    runs = []
    for record in _of_kind(records, "memory_budget"):
        runs.append({"machine": _machine(record), **record["config"]})
        cells |= {(cell["context"], cell["batch"]): cell for cell in record["results"]}
    rows = []
    for context, batch in BUDGET:
        row: list[Any] = [None, _k(context), float(batch)]
        cell = cells.get((context, batch))
        rows.append(row + ([None] * 4 if cell is None else _budget_cells(cell)))
    columns = ["context", "batch", "full (tokens/s)", "narrowed", "narrowed + translator",
               "full → narrowed + translator (GB)"]  # fmt: skip
    return Laid("app:tab:budget", columns, rows, _otherwise("app:tab:budget", runs))


def _budget_cells(cell: Mapping[str, Any]) -> list[Any]:
    full = cell["batch"] * cell["decoded"] / min(cell["samples"]["full"])
    gains = [f"{cell['gain'][way]:+.0%}" for way in ("narrowed", "folded")]
    most = " → ".join(f"{cell['peak'][way] / 1e9:.1f}" for way in ("full", "folded"))
    return [round(full, 1), *gains, most]


# ---- a GPU --------------------------------------------------------------------------------------


def cost(records: Sequence[Record], lengths: Sequence[int] = TOKENS) -> Laid:
    """tab:cost, from records of ``cuda_switch``: maps that mix heads, by the fastest method."""
    times, runs = _switch_times(records)
    rows: list[list[Any]] = []
    for part, pairs in COST_PAIRS.items():
        for length in lengths:
            found = [times.get((pair, length), {}).get(name) for pair in pairs for name in _TERMS]
            cells = [None if seconds is None else round(1e3 * seconds, 1) for seconds in found]
            rows.append([part, float(length), *cells])
    into = ("into the smaller model", "into the larger model")
    columns = ["n", *(f"{side} / {name}" for side in into for name in _TERMS)]
    return Laid("tab:cost", columns, rows, _otherwise("tab:cost", runs))


_TERMS = ("translate", "step", "re-prefill")


def _switch_times(
    records: Sequence[Record],
) -> tuple[dict[tuple[str, int], dict[str, float]], list[Any]]:
    """Seconds by pair, length and term; the settings of each pair's run."""
    known = {pair for pairs in COST_PAIRS.values() for pair in pairs}
    times, runs = {}, []
    for record in _of_kind(records, "cuda_switch"):
        config, plans = record["config"], record["results"]["plans"]
        for pair, lengths in record["results"]["pairs"].items():
            if pair not in known:
                continue
            for found in lengths:
                took = {name: row["median_s"] for name, row in found["rows"].items()}
                times[pair, found["tokens"]] = {
                    **took,
                    "translate": took[found["fastest"]["mixing"]],
                }
            runs.append({
                "machine": _machine(record), "stack": config["stack"], "batch": config["batch"],
                "layers": config["layers"], "weights": config["dtype"],
                "nu": plans[pair]["nu"], "head_mixing": True,
            })  # fmt: skip
    return times, runs


def served(records: Sequence[Record], lengths: Sequence[int] = TOKENS) -> Laid:
    """app:tab:vllm, from records of ``cuda_vllm``: time to first token / per output token (ms)."""
    times, runs = _served_times(records)
    rows: list[list[Any]] = []
    for told, name in SERVED_ROWS.items():
        found = [times.get((name, length)) for length in lengths]
        cells = [None if t is None else f"{1e3 * t[0]:.0f} / {1e3 * t[1]:.1f}" for t in found]
        rows.append([None, told, *cells])
    columns = ["Prompt tokens", *map(_k, lengths)]
    return Laid("app:tab:vllm", columns, rows, _otherwise("app:tab:vllm", runs))


def _served_times(
    records: Sequence[Record],
) -> tuple[dict[tuple[str, int], tuple[float, float]], list[Any]]:
    """Median seconds to the first token and for each after it, by model and length."""
    times, runs = {}, []
    for record in _of_kind(records, "cuda_vllm"):
        config = record["config"]
        runs.append({"machine": _machine(record), **config, "weights": config["dtype"]})
        for name, lengths in record["results"]["models"].items():
            for found in lengths:
                both = median(found["first_token"]), median(found["per_token"])
                times[name, found["tokens"]] = both
    return times, runs


# ---- the figure ---------------------------------------------------------------------------------


def figure(records: Sequence[Record]) -> Laid:
    """fig:cost as points: panel, curve, tokens, value.

    (a) times sooner, a vLLM prefill by the translation and one of vLLM's decoding steps; (b) the
    terms of that in ms, into Qwen3-1.7B; (c) those of app:tab:moespeed, a step being one over the
    decoding speed.
    """
    switches, runs = _switch_times(records)
    prefills, more = _served_times(records)
    rows = [row for pair in sorted({p for p, _ in switches})
            for row in _speedups(pair, switches, prefills)]  # fmt: skip
    times, on_mac = _bench_times(records)
    curves: list[tuple[str, Make]] = [
        ("Qwen3-4B prefill", _ms("source_prefill")),
        ("Qwen3-30B-A3B prefill", _ms("native")),
        ("translation", _ms("translate float32")),
        ("decoding step", _ms("decode_native")),
    ]
    for name, make in curves:
        for length in sorted(times):
            try:
                rows.append(["c", name, length, make(times[length])])
            except KeyError:
                continue
    rows.sort(key=lambda row: row[0])
    sources = (("tab:cost", runs), ("app:tab:vllm", more), ("app:tab:moespeed", on_mac))
    differs = [f"{label}: {one}" for label, of in sources for one in _otherwise(label, of)]
    return Laid("fig:cost", ["curve", "tokens", "value"], rows, differs)


def _speedups(
    pair: str,
    switches: Mapping[tuple[str, int], Mapping[str, float]],
    prefills: Mapping[tuple[str, int], tuple[float, float]],
) -> Iterator[list[Any]]:
    """A target's points of panels (a) and (b)."""
    target = pair.split(":")[1]
    told = next(name for name, shape in SERVED_ROWS.items() if shape == target)
    for of, length in sorted(switches):
        if of != pair or (target, length) not in prefills:
            continue
        translate, (prefill, step) = switches[of, length]["translate"], prefills[target, length]
        yield ["a", f"into {told}", length, round(prefill / (translate + step), 2)]
        if told == "Qwen3-1.7B":
            terms = (("re-prefill", prefill), ("translation", translate), ("decoding step", step))
            yield from (["b", name, length, round(1e3 * took, 2)] for name, took in terms)


LABELS: dict[str, Callable[[Sequence[Record]], Laid]] = {
    "app:tab:moespeed": moe_speed,
    "app:tab:budget": budget,
    "tab:cost": cost,
    "app:tab:vllm": served,
    "fig:cost": figure,
}
NEEDED = {
    "app:tab:moespeed": "bench, its table moe-switch, at lengths of the paper's",
    "app:tab:budget": "memory_budget, at contexts and batches of the paper's",
    "tab:cost": "cuda_switch, of the paper's pairs and lengths",
    "app:tab:vllm": "cuda_vllm, of the paper's models and lengths",
    "fig:cost": "bench, or cuda_switch and cuda_vllm",
}
