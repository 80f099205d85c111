"""Records of times laid out as the paper's tables are, to stand beside the paper's values.

From records, as ``--json`` appends them, to rows in the order of the paper's rows and columns. What
was not measured is None. Of two records that hold the same cell the later one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.timing.paper import BUDGET, LENGTHS, differences
from benchmarks.paper.timing.phases import SPEEDS
from benchmarks.paper.timing.vllm_serving import SERVED_ROWS
from benchmarks.paper.timing.widths import PAIRS, TOKENS
from kvlingo_mlx.reporting.measure import median

Record = Mapping[str, Any]
Times = Mapping[tuple[Any, ...], Any]  # what was measured, by what it is of
Make = Callable[[Times], Any]  # a cell; KeyError where it was not measured
Rows = list[list[Any]]  # constants, and cells yet to be made
# tab:cost: a part of the table, and its pairs into the smaller and into the larger model.
COST_PAIRS = {"Qwen3-0.6B/1.7B": PAIRS["tab:cost"][:2], "Qwen3-4B/8B": PAIRS["tab:cost"][2:]}

FIGURE = ("tab:cost", "app:tab:vllm", "app:tab:moespeed")  # whose records make fig:cost


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
    columns, table, needed = LABELS[label]
    times: dict[tuple[Any, ...], Any] = {}
    differs: dict[str, list[str]] = {of: [] for of, _ in READERS.values()}
    for record in records:
        if record.get("kind") in READERS:
            of, read = READERS[record["kind"]]
            found, runs = read(record["config"], record["results"])
            times |= found
            machine = record["environment"].get("cuda") or record["environment"]["chip"]
            for run in runs:
                differs[of] += differences(of, {"machine": machine, **run})
    measured, rows = False, []
    for row in table(times):
        made = [_made(cell, times) if callable(cell) else cell for cell in row]
        some = any(
            callable(cell) and value is not None for cell, value in zip(row, made, strict=True)
        )
        measured |= some
        if some or label != "fig:cost":
            rows.append(made)
    if not measured:
        kinds = ", ".join(sorted({str(record.get("kind")) for record in records}))
        raise ValueError(
            f"no record holds a number of {label}: found {kinds or 'no records'}, expected {needed}"
        )
    told = differs.get(label, [f"{of}: {one}" for of in FIGURE for one in differs[of]])
    return Laid(label, columns, rows, list(dict.fromkeys(told)))


def _made(cell: Make, times: Times) -> Any:
    try:
        return cell(times)
    except KeyError:
        return None


# ---- records ------------------------------------------------------------------------------------


def _bench(config: Record, results: Record) -> tuple[Times, list[Record]]:
    """Seconds by length and phase, of decoding those for a token, of whole models."""
    timings = (results.get("moe-switch") or {}).get("timings")
    if not timings or config.get("layers") is not None:
        return {}, []
    times = {
        ("bench", t["prompt_tokens"], phase): median(samples)
        / (t["decoded"] if phase in SPEEDS else 1)
        for t in timings
        for phase, samples in t["samples"].items()
    }
    decoding = SPEEDS[0] in timings[0]["samples"]
    return times, [{**config, **({"decoded": timings[0].get("decoded")} if decoding else {})}]


def _budgets(config: Record, results: Any) -> tuple[Times, list[Record]]:
    """The cells of a row by context and batch."""
    times = dict[tuple[Any, ...], Any]()
    for cell in results:
        full = cell["batch"] * cell["decoded"] / min(cell["samples"]["full"])
        gains = [f"{cell['gain'][way]:+.0%}" for way in ("narrowed", "folded")]
        most = " → ".join(f"{cell['peak'][way] / 1e9:.1f}" for way in ("full", "folded"))
        times["budget", cell["context"], cell["batch"]] = [round(full, 1), *gains, most]
    return times, [config]


def _switches(config: Record, results: Record) -> tuple[Times, list[Record]]:
    """Seconds by pair, length and term, translation by the fastest method of maps that mix."""
    times, runs = dict[tuple[Any, ...], Any](), list[Record]()
    for pair, lengths in results["pairs"].items():
        if pair not in PAIRS["tab:cost"]:
            continue
        for found in lengths:
            took = {name: row["median_s"] for name, row in found["rows"].items()}
            took["translate"] = took[found["fastest"]["mixing"]]
            times |= {(pair, found["tokens"], name): each for name, each in took.items()}
        nu = results["plans"][pair]["nu"]
        runs.append({**config, "weights": config["dtype"], "nu": nu, "head_mixing": True})
    return times, runs


def _served(config: Record, results: Record) -> tuple[Times, list[Record]]:
    """Median seconds to the first token and for each after it, by model and length."""
    times = {
        (name, found["tokens"], what): median(found[what])
        for name, lengths in results["models"].items()
        for found in lengths
        for what in ("first_token", "per_token")
    }
    return times, [{**config, "weights": config["dtype"]}]


# By a record's kind, the label whose runs it holds and what reads it.
READERS: dict[str, tuple[str, Callable[[Any, Any], tuple[Times, list[Record]]]]] = {
    "cuda_switch": ("tab:cost", _switches),
    "cuda_vllm": ("app:tab:vllm", _served),
    "bench": ("app:tab:moespeed", _bench),
    "memory_budget": ("app:tab:budget", _budgets),
}


# ---- tables -------------------------------------------------------------------------------------


def _ms(*key: Any, digits: int = 1) -> Make:
    return lambda times: round(1e3 * times[key], digits)


def _rate(*key: Any) -> Make:
    return lambda times: round(1 / times[key], 1)


def _sooner(*key: Any) -> Make:
    return lambda times: f"{times[*key[:-1], 'native'] / times[key]:.2f}×"


MOE_ROWS: list[tuple[str, Callable[..., Make], str]] = [
    ("Qwen3-4B prefill (ms)", _ms, "source_prefill"),
    ("Qwen3-30B-A3B prefill (ms)", _ms, "native"),
    ("translation, fp32 (ms)", _ms, "translate float32"),
    ("translation, bf16 (ms)", _ms, "translate bfloat16"),
    ("Qwen3-4B decoding (tokens/s)", _rate, "decode_source"),
    ("Qwen3-30B-A3B decoding (tokens/s)", _rate, "decode_native"),
    ("switch, first token (ms)", _ms, "switch"),
    ("speedup", _sooner, "switch"),
    ("prefill accelerator, first token (ms)", _ms, "accelerator"),
    ("speedup", _sooner, "accelerator"),
]
TERMS = ("translate", "step", "re-prefill")


def _moe_speed(times: Times) -> Rows:
    return [[None, told, *(form("bench", n, phase) for n in LENGTHS)]
            for told, form, phase in MOE_ROWS]  # fmt: skip


def _budget(times: Times) -> Rows:
    def cell(key: tuple[Any, ...], column: int) -> Make:
        return lambda times: times[key][column]

    return [[None, _k(context), float(batch),
             *(cell(("budget", context, batch), column) for column in range(4))]
            for context, batch in BUDGET]  # fmt: skip


def _cost(times: Times) -> Rows:
    return [[part, float(n), *(_ms(pair, n, term) for pair in pairs for term in TERMS)]
            for part, pairs in COST_PAIRS.items() for n in TOKENS]  # fmt: skip


def _vllm(times: Times) -> Rows:
    def cell(name: str, n: int) -> Make:
        return lambda times: " / ".join(
            f"{1e3 * times[name, n, what]:.{digits}f}"
            for what, digits in (("first_token", 0), ("per_token", 1))
        )

    return [[None, told, *(cell(name, n) for n in TOKENS)] for told, name in SERVED_ROWS.items()]


def _figure(times: Times) -> Rows:
    """fig:cost as points: panel, curve, tokens, value.

    (a) times sooner, a vLLM prefill by the translation and one of vLLM's decoding steps; (b) the
    terms of that in ms, into Qwen3-1.7B; (c) those of app:tab:moespeed, a step being one over the
    decoding speed.
    """

    def sooner(pair: str, target: str, n: int) -> Make:
        return lambda times: round(
            times[target, n, "first_token"]
            / (times[pair, n, "translate"] + times[target, n, "per_token"]),
            2,
        )

    told_of = {name: told for told, name in SERVED_ROWS.items()}
    rows: Rows = []
    for pair in sorted(PAIRS["tab:cost"]):
        target = pair.split(":")[1]
        for n in sorted({key[1] for key in times if key[0] == pair}):
            rows.append(["a", f"into {told_of[target]}", n, sooner(pair, target, n)])
            if told_of[target] == "Qwen3-1.7B":
                terms = {"re-prefill": (target, n, "first_token"),
                         "translation": (pair, n, "translate"),
                         "decoding step": (target, n, "per_token")}  # fmt: skip
                rows += [["b", name, n, _ms(*key, digits=2)] for name, key in terms.items()]
    curves = {"Qwen3-4B prefill": "source_prefill", "Qwen3-30B-A3B prefill": "native",
              "translation": "translate float32", "decoding step": "decode_native"}  # fmt: skip
    lengths = sorted({key[1] for key in times if key[0] == "bench"})
    rows += [["c", name, n, _ms("bench", n, phase)]
             for name, phase in curves.items() for n in lengths]  # fmt: skip
    return sorted(rows, key=lambda row: row[0])


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k"


# By label: the columns, the rows, and in words the records that hold its numbers.
LABELS: dict[str, tuple[list[str], Callable[[Times], Rows], str]] = {
    "app:tab:moespeed": (
        ["Prompt tokens", *map(str, LENGTHS)], _moe_speed,
        "bench, its table moe-switch, at lengths of the paper's",
    ),
    "app:tab:budget": (
        ["context", "batch", "full (tokens/s)", "narrowed", "narrowed + translator",
         "full → narrowed + translator (GB)"], _budget,
        "memory_budget, at contexts and batches of the paper's",
    ),
    "tab:cost": (
        ["n", *(f"into the {side} model / {name}" for side in ("smaller", "larger")
                for name in TERMS)], _cost,
        "cuda_switch, of the paper's pairs and lengths",
    ),
    "app:tab:vllm": (
        ["Prompt tokens", *map(_k, TOKENS)], _vllm,
        "cuda_vllm, of the paper's models and lengths",
    ),
    "fig:cost": (["curve", "tokens", "value"], _figure, "bench, or cuda_switch and cuda_vllm"),
}  # fmt: skip
