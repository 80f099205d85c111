"""Sections on what training, translation and switches cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvlingo_mlx.reporting import pictures
from rendering.records import HERE, records, source, table

# The passes that a training step cannot do without, as benchmarks/training_throughput.py has them.
NEEDED = ("source prefix", "target prefix", "continuation", "continuation and backward")


def throughput() -> str:
    """What a training step costs beside the passes that it cannot do without."""
    rows, sources = [], []
    for record in records("training_throughput"):
        config, found = record["config"], record["results"]
        times = found["times"]
        step = float(np.median(times["step"]))
        ratios = [t / sum(times[what][i] for what in NEEDED) for i, t in enumerate(times["step"])]
        prefix, continuation = config["prefix"], config["continuation"]
        rows.append([
            f"{config['source']} to {config['target']}", str(config["layers"] or "all"),
            f"{prefix} + {continuation}", config.get("runtime", "torch"), found.get("gpu", "CPU"),
            f"{step:.1f}", f"{(prefix + continuation) / step:.0f}",
            f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["widths of", "layers", "tokens", "runtime", "on", "step (s)", "tokens/s",
               "of bare passes"]  # fmt: skip
    return "\n".join([
        "## What a training step costs\n",
        "Beside the sum of its bare passes, in one run: the source's prefix, the target's prefix,\n"
        "the teacher's continuation, and the student's continuation forward and backward. Random\n"
        "weights.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip


def training_memory() -> str:
    """What a training step takes in memory, beside what the formula says."""
    parts = []
    for record in records("training_memory"):
        config = record["config"]
        rows = [
            [f"{row['prefix']} + {row['continuation']}",
             *(f"{(row[name] - row['at rest']) / 2**20:,.0f}"
               for name in ("reading", "loss", "update", "said")),
             f"{row['ratio beyond rest']:.2f}", f"{row['ratio']:.2f}"]
            for row in record["results"]
        ]  # fmt: skip
        rest = record["results"][0]["at rest"] / 2**20
        parts += [
            f"{' to '.join(config['geometries'])}, {config['layers']} layers, "
            f"{config['precision']}, two translators; {rest:,.0f} MiB at rest:\n",
            table(["tokens", "reading", "learning", "update", "said", "said / peak",
                   "with what rests"], rows),
            source(record),
        ]  # fmt: skip
    if not parts:
        return ""
    return "\n".join([
        "## What a training step takes in memory\n",
        "MiB beyond weights, translators and optimizers, the peak of each part of a step on MLX;\n"
        "`said` is what `train` says before it starts.\n",
        *parts,
    ])  # fmt: skip


def windows() -> str:
    """What is saved where a layer keeps a window alone."""
    rows, sources = [], []
    for record in records("window_cost"):
        config, found = record["config"], record["results"]
        times = [f"{np.median(found['samples_s'][name]):.2f}" for name in ("window", "every token")]
        rows.append([
            str(config["tokens"]), str(config["layers"]), str(config["nu"]), *times,
            f"{found['ratio']:.2f} ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})",
            f"{found['tokens_kept']:.2f}",
        ])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["tokens", "layers", "nu", "window (s)", "every token (s)", "ratio", "of the tokens"]
    return "\n".join([
        "## What translating a window alone costs\n",
        "Beside translating every token, at the widths of Gemma-3-4B to Gemma-3-12B, five local\n"
        "layers of 1024 tokens to a global one; norms, RoPE and cache write included.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip


STEPS = ("eager", "no switch", "mlx-lm", "step, next queued", "step")


def switches() -> str:
    """What a switch costs by context length and strategy, and what is left of it when eager."""
    found = records("switch_cost")
    costs, steps = (latest_by_tokens(found, part) for part in ("switches", "steps"))
    if not costs or not steps:
        return ""
    pictures.save(switch_figure(costs), HERE / "figures" / "switch_cost.png")
    return "\n".join([
        "## What a switch costs\n\n"
        "Random models of 3 and 4 layers on a conversation of so many tokens; the last 64 of them\n"
        "were written by the smaller one when the larger one comes back, with a message of one\n"
        "token. Medians in ms: to bring its line up to date, and to the first token; `before` is\n"
        "what an eager translation takes behind the answer before the switch.\n",
        table(["tokens", "strategy", "translated", "read", "switch", "first token", "before"],
              (row for result in costs for row in switch_rows(result))),
        "![Switch and first token by context length](figures/switch_cost.png)\n",
        "First tokens after an eager switch (ms), beside a conversation without a switch and\n"
        "single steps from a cache of that length. mlx-lm queues the second step before it hands\n"
        "out the first token, which on a CPU takes about two steps whoever calls it: `step, next\n"
        "queued` is that alone. Ratios are medians of rounds and, in brackets, those of processor\n"
        "time, which a busy machine disturbs less.\n",
        table(["tokens", *STEPS, *(f"eager / {name}" for name in STEPS[1:])], map(step_row, steps)),
        *dict.fromkeys(map(source, found)),
    ])  # fmt: skip


def latest_by_tokens(found: Sequence[dict], part: str) -> list[dict]:
    """The newest results of every length in which a part was measured."""
    latest = {r["results"]["tokens"]: r["results"] for r in found if r["results"].get(part)}
    return [latest[tokens] for tokens in sorted(latest)]


def switch_median(samples: Sequence[Mapping[str, float]], name: str) -> float:
    """Without the first round, in which caches grow."""
    return float(np.median([sample[name] for sample in samples[1:]]))


def switch_rows(result: dict) -> Iterable[list[str]]:
    for name, samples in result["switches"].items():
        times = (
            f"{1e3 * switch_median(samples, key):.1f}" for key in ("switch_s", "first_token_s")
        )
        behind = f"{1e3 * switch_median(samples, 'behind_answer_s'):.1f}" if name == "eager" else ""
        counts = (str(samples[-1][key]) for key in ("translated", "read"))
        yield [str(result["tokens"]), name, *counts, *times, behind]


def step_row(result: dict) -> list[str]:
    """Medians without the first round, and ratios by both clocks."""
    times = (np.median(result["steps"][name][1:], axis=0)[0] for name in STEPS)
    ratios = (result["ratios"][f"eager / {name}"] for name in STEPS[1:])
    shown = (f"{ratio['median']:.2f} ({ratio['processor']:.2f})" for ratio in ratios)
    return [str(result["tokens"]), *(f"{1e3 * seconds:.1f}" for seconds in times), *shown]


def switch_figure(found: Sequence[dict]) -> Any:
    """Seconds over context length, both on logarithmic axes."""
    figure = pictures.figure(2 * pictures.WIDTH, pictures.HEIGHT)
    titles = {"switch_s": "line up to date", "first_token_s": "first token"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name in found[0]["switches"]:
            middle = [switch_median(result["switches"][name], key) for result in found]
            axes.loglog([result["tokens"] for result in found], middle, marker="o", label=name)
        axes.set(title=title, xlabel="tokens in the conversation", ylabel="seconds")
        axes.legend(fontsize="small")
    return figure


def gpu_switches() -> str:
    """A switch on a GPU beside a re-prefill, with all that it consists of."""
    rows, sources = [], []
    for record in records("cuda_switch"):
        for pair, lengths in record["results"]["pairs"].items():
            rows += [switch_row(pair, found) for found in lengths]
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["widths of", "tokens", "mixing", "head-wise", "after RoPE", "of the product's rate",
               "step", "re-prefill", "ratio", "graphs", "GB, switch / re-prefill"]  # fmt: skip
    return "\n".join([
        "## What a switch costs on a GPU\n",
        "Medians in ms, of the fastest method: translations of states before k_norm by maps that\n"
        "mix heads and by head-wise ones, and of a cache by maps that mix heads; norm, RoPE and\n"
        "cache write included. `of the product's rate`: the first of these beside a large matrix\n"
        "product. A switch is that translation and a step, measured as one; `ratio`: a re-prefill\n"
        "beside it; `graphs`: the same of both as CUDA graphs. Random weights.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip


def switch_row(pair: str, found: dict) -> list[str]:
    timed, best = found["rows"], found["fastest"]
    forms = [best.get(form) for form in ("mixing", "head-wise", "mixing, after RoPE")]
    times = [f"{1e3 * timed[name]['median_s']:.2f}" if name in timed else "-"
             for name in (*forms, "step", "re-prefill")]  # fmt: skip
    ratios = [f"{np.median(found['ratios'][name]):.1f}" if name in found["ratios"] else "-"
              for name in ("re-prefill / switch", "re-prefill / switch (graph)")]  # fmt: skip
    peak = [f"{found['peak_bytes'][name] / 1e9:.1f}" if name in found["peak_bytes"] else "-"
            for name in ("switch", "re-prefill")]  # fmt: skip
    share = f"{timed[forms[0]]['of_gemm_rate']:.2f}"
    return [pair.replace(":", " to "), str(found["tokens"]), *times[:3], share, *times[3:],
            *ratios, " / ".join(peak)]  # fmt: skip
