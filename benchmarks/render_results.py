"""Render benchmarks/RESULTS.md from the records under benchmarks/results.

    python benchmarks/render_results.py

Every number on that page comes from a record, beside the command that made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx import pictures

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
HEAD = """# Results

Rendered by `python benchmarks/render_results.py` from the records under results/. The models are
the tiny embedded ones (`kvlingo_mlx/embedded`), so this page says how methods compare, not how well
they do on models that people use. Nothing here was measured on Apple hardware.
"""


def records(name: str) -> list[dict]:
    """The records of one file, oldest first; none where it is absent."""
    path = HERE / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def source(record: dict) -> str:
    """Where numbers come from: command, machine, versions."""
    machine, versions = record["environment"], record["environment"]["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    gpu = f"{machine['cuda']}, " if machine.get("cuda") else ""
    command = record["command"]
    if not command.startswith("kvlingo-mlx "):
        command = f"python benchmarks/{command}"
    return (
        f"`{command}`, {record['date']}; {gpu}{machine['chip']}, "
        f"{machine['cores']} cores, {machine['system']}; {listed}.\n"
    )


def with_error(values: Sequence[float]) -> str:
    """Mean and standard error over seeds."""
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"


# ---- closed forms ------------------------------------------------------------------------


def closed_forms() -> str:
    """Recall and KL of closed forms and of the package's translators, beside the controls."""
    whole = [r for r in records("quality") if r["config"]["nu"]]
    if not whole:
        return ""
    parts = [
        "## Closed forms beside controls\n\n"
        "Recall of first askings on held-out dialogues, and KL (nats per token) over their\n"
        "continuation; standard errors over questions and over dialogues. `shuffled` is the same\n"
        "translator with its maps at wrong layers.\n"
    ]
    return "\n".join([*parts, *recalls(whole[-1])])


def recalls(record: dict) -> list[str]:
    """A table a pair of what benchmarks/quality.py scored, and where the numbers come from."""
    parts = []
    for pair, scores in record["results"].items():
        rows = [
            [name, *(f"{s[m]:.3f} ± {s[f'{m}_se']:.3f}" for m in ("hits", "kl"))]
            for name, s in scores.items()
        ]
        parts.append(f"### {pair.replace(':', ' to ')}\n\n{table(['cache', 'recall', 'KL'], rows)}")
    return [*parts, source(record)]


def families() -> str:
    """The same for pairs of other families, by assignment."""
    found = records("families")
    parts = [
        "## Other families, by assignment\n\n"
        "Gemma-3: tiny-gemma3-s has four layers, every second one global, four KV heads of width\n"
        "32; tiny-gemma3-l six, every third one global, two of width 64. Windows hold 64 tokens,\n"
        "prefixes 147 to 276. A kind of layer with fewer than nu source layers gives all it has.\n"
        "`self-distilled` reads one layer, by relative depth.\n"
    ]
    return "\n".join([*parts, *(p for r in found for p in recalls(r))]) if found else ""


# ---- objectives --------------------------------------------------------------------------


def steps_to_reach(curve: Sequence[float], goal: float) -> float:
    """Where a curve first falls to ``goal``, in its own intervals, interpolated; NaN if never."""
    for index in range(1, len(curve)):
        before, after = curve[index - 1], curve[index]
        if after <= goal:
            return index - 1 + (before - goal) / (before - after)
    return float("nan")


def objectives() -> str:
    """What self-distillation earns, over seeds; and the attention-mass start's head start."""
    groups: dict[tuple, list[dict]] = {}
    for record in records("self_distillation"):
        config = record["config"]
        groups.setdefault((config["pair"], config["nu"], config["steps"]), []).append(record)
    if not groups:
        return ""
    parts = [
        "## What self-distillation earns\n\n"
        "From one stream of dialogues, in lockstep: KL from either closed form, cross-entropy and\n"
        "mixed from the better one. Means over seeds (of the dialogues drawn), with standard\n"
        "errors over seeds.\n"
    ]
    for (pair, nu, steps), found in groups.items():
        seeds = [record["results"] for record in found]
        native = np.mean([seed["scores"]["native"]["recall"] for seed in seeds])
        rows = []
        for name in seeds[0]["scores"]:
            recalls = [seed["scores"][name]["recall"] for seed in seeds]
            kls = [seed["scores"][name]["kl"] for seed in seeds]
            rows.append([name, with_error(recalls), f"{np.mean(recalls) / native:.2f}",
                         with_error(kls)])  # fmt: skip
        parts.append(
            f"### {pair.replace(':', ' to ')}, nu = {nu}, {steps} steps of "
            f"{found[0]['config']['batch']}, {len(seeds)} seeds\n\n"
            + table(["cache", "recall", "of native", "KL"], rows)
        )
        parts.append(head_start(seeds, steps))
        parts.append(source(found[-1]))
    return "\n".join(parts)


def head_start(seeds: Sequence[dict], steps: int) -> str:
    """The share of steps after which one start has the other's final held-out KL."""
    starts = ("kl from frobenius", "kl from attention_mass")
    if any(name not in seed["curves"] for seed in seeds for name in starts):
        return ""
    shares = []
    for seed in seeds:
        final = seed["curves"][starts[0]][-1]
        shares.append(steps_to_reach(seed["curves"][starts[1]], final) * seed["every"] / steps)
    text = ", ".join("never" if np.isnan(share) else f"{share:.2f}" for share in shares)
    return (
        "The attention-mass start reaches the Frobenius start's final held-out KL after this\n"
        f"share of the steps, by seed: {text}.\n"
    )


# ---- evaluations and analyses ------------------------------------------------------------


def mean(entry: dict) -> str:
    """A mean of the verb eval, with its standard error over items."""
    if entry["value"] is None:
        return "none"
    error = entry["error"]
    return f"{entry['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")


ALTERNATIVES = """Alternatives in build/variants come from `python tools/fit_zoo.py --pairs
tiny-qwen3-s:tiny-qwen3-l --threads 1 --work build/variants/work-NAME --out build/variants/NAME`
and

- closed: `--steps 0`; closed_mass: `--steps 0 --norm attention_mass`; closed_head_wise:
  `--steps 0 --head-wise`;
- linear: `--steps 600 --lr 1e-2 3e-3`; post_rope: the same with `--capture post_rope`; mlp: the
  same with `--kind mlp` (gated, 256 hidden units a map, 600 steps of reconstruction first).

`native` is also what a full re-prefill gives; its time is a re-prefill's. `text` hands the
conversation over as text: the tokenizers agree here, so it is a re-prefill too. Standard errors
are over items.
"""


def evaluations() -> str:
    """What ``kvlingo-mlx eval`` found: a table a task, and the times beside the first one."""
    parts = []
    for record in records("eval"):
        config, found = record["config"], record["results"]
        parts.append(f"### {config['source']} to {config['target']}\n")
        if found["first_token_s"]:
            rows = [[name, f"{1e3 * np.median(samples):.1f}"]
                    for name, samples in found["first_token_s"].items()]  # fmt: skip
            parts.append("Time to first token at a switch, median:\n")
            parts.append(table(["cache", "ms"], rows))
        for task, conditions in found["means"].items():
            groups = list(next(iter(conditions.values())))
            metrics = list(next(iter(conditions.values()))[groups[0]])
            if len(metrics) == 1:
                (metric,) = metrics
                rows = [[group, *(mean(scores[group][metric]) for scores in conditions.values())]
                        for group in groups]  # fmt: skip
                parts.append(f"{task}, {metrics[0]}:\n\n{table(['', *conditions], rows)}")
                continue
            for group in groups:
                rows = [[name, *(mean(scores[group][m]) for m in metrics)]
                        for name, scores in conditions.items()]  # fmt: skip
                parts.append(f"{task} ({group}):\n\n{table(['cache', *metrics], rows)}")
        parts.append(source(record))
    return "\n".join(["## Methods compared\n", ALTERNATIVES, *parts]) if parts else ""


def analyses() -> str:
    """What ``kvlingo-mlx analyze`` found, before anything is trained."""
    rows, sources = [], []
    for record in records("analyze"):
        config, found = record["config"], record["results"]
        pair = f"{config['source']} to {config['target']}"
        pair += ", random weights" if config["random_init"] else ""
        for side, fits in found["linearity"].items():
            r2 = [f"{np.mean([fit[kind] for fit in fits]):.3f}"
                  for kind in ("linear", "affine", "mlp")]  # fmt: skip
            summary = found["cka"][side]["summary"]
            diagonal = np.mean(np.diag(np.array(found["cka"][side]["cka"])))
            ranks = [np.mean([layer["effective"] for layer in found["rank"][end][side]])
                     for end in ("source", "target")]  # fmt: skip
            rows.append([pair, side, *r2, f"{diagonal:.2f}", f"{summary['contrast']:.2f}",
                         f"{summary['offset']:.1f}", *(f"{r:.1f}" for r in ranks)])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["pair", "side", "R² linear", "affine", "MLP", "CKA diagonal", "contrast", "offset",
               "rank, source", "rank, target"]  # fmt: skip
    parts = ["## What two caches have in common\n",
             "Means over layers, on held-out documents; effective ranks.\n",
             table(columns, rows)]  # fmt: skip
    for name, title in (("trained", "Linear CKA of every pair of layers, trained"),
                        ("random", "The same with random weights")):  # fmt: skip
        if (HERE / "figures" / f"cka-{name}.png").exists():
            parts.append(f"![{title}](figures/cka-{name}.png)\n")
    return "\n".join([*parts, *sources])


def throughput() -> str:
    """What a training step costs beside the passes that it cannot do without."""
    rows, sources = [], []
    for record in records("training_throughput"):
        config, found = record["config"], record["results"]
        step = float(np.median(found["times"]["step"]))
        prefix, continuation = config["prefix"], config["continuation"]
        rows.append([
            f"{config['source']} to {config['target']}", str(config["layers"] or "all"),
            f"{prefix} + {continuation}", found.get("gpu", "CPU"), f"{step:.1f}",
            f"{(prefix + continuation) / step:.0f}",
            f"{found['ratio']:.2f} ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})",
        ])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["widths of", "layers", "tokens", "on", "step (s)", "tokens/s", "of bare passes"]
    return "\n".join([
        "## What a training step costs\n",
        "Beside the sum of the source's prefix, the target's prefix and one pass forward and\n"
        "backward over the continuation, in one run; random weights.\n",
        table(columns, rows), *sources,
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


# ---- conversations -----------------------------------------------------------------------

CONDITIONS = ("reprefill", "alternated", "one switch", "naive", "shuffled", "facts hidden")
Hits = dict[str, dict[str, np.ndarray]]  # by order and condition, a row a dialogue, over all seeds


def conversations() -> str:
    """Recall turn by turn while two models alternate, by strategy."""
    groups: dict[str, list[dict]] = {}
    for record in records("conversations"):
        shared = {k: v for k, v in record["config"].items() if k != "conditions"}
        groups.setdefault(json.dumps(shared), []).append(record)
    parts = [
        "## Ten turns, the models alternating\n\n"
        "Share of answers with the right value, by turn: means over seeds (of the dialogues),\n"
        "with standard errors over dialogues. When alternated, the facts are read once, by who\n"
        "answers first; the other model, which answers at even turns, has them by translation\n"
        "alone. `one switch` has the first model answer all turns but the one scored.\n"
        "`shuffled` and `facts hidden` are controls of `alternated`.\n"
    ]
    parts += [conversation_group(found) for found in groups.values()]
    return "\n".join(parts) if groups else ""


def conversation_group(found: Sequence[dict]) -> str:
    """The tables and the figure of runs that differ in their seeds and conditions alone."""
    config, hits = found[0]["config"], pooled(found)
    turns = "as written" if config["verbatim"] else "as the template has them"
    title = f"### {config['pair'].replace(':', ' and ')}, earlier turns {turns}\n"
    seeds = len({record["results"]["seed"] for record in found})
    parts = [title, f"{config['dialogues']} dialogues of each of {seeds} seeds.\n"]
    for order, by_name in hits.items():
        rows = [[name, *map(turn_cell, rows.T)] for name, rows in by_name.items()]
        columns = [order, *(f"turn {turn + 1}" for turn in range(config["questions"]))]
        parts.append(table(columns, rows))
    name = "conversations" if config["verbatim"] else "conversations-template"
    pictures.save(conversation_figure(hits), HERE / "figures" / f"{name}.png")
    picture = f"![Recall by turn and strategy](figures/{name}.png)\n"
    sources = dict.fromkeys(source(record) for record in found)
    return "\n".join([*parts, last_turns(hits), picture, *sources])


def pooled(found: Sequence[dict]) -> Hits:
    """Hits of all seeds; every seed has as many dialogues, so the mean is one over seeds too."""
    rows: dict[str, dict[str, list]] = {}
    for record in found:
        for order, by_name in record["results"]["hits"].items():
            for name, hits in by_name.items():
                rows.setdefault(order, {}).setdefault(name, []).extend(hits)
    return {
        order: {name: np.array(by_name[name]) for name in sorted(by_name, key=CONDITIONS.index)}
        for order, by_name in rows.items()
    }


def turn_cell(hits: np.ndarray) -> str:
    return f"{hits.mean():.2f} ± {standard_error(hits):.2f}"


def standard_error(values: np.ndarray) -> np.ndarray:
    """Over rows."""
    return np.std(values, ddof=1, axis=0) / np.sqrt(len(values))


def last_turns(hits: Hits) -> str:
    """What alternating loses against re-prefill, and against one switch: first, last, all."""
    columns = ["", "order", "turn 2", "last turn", "even turns"]
    rows = []
    for other in ("reprefill", "one switch"):
        lost = {
            order: by_name[other] - by_name["alternated"]
            for order, by_name in hits.items()
            if {other, "alternated"} <= by_name.keys()
        }
        if lost:
            lost["both"] = np.concatenate(list(lost.values()))
        for order, drop in lost.items():
            shown = (drop[:, 1], drop[:, -1], drop[:, 1::2].mean(axis=1))
            rows.append([f"{other} less alternated", order, *map(signed, shown)])
    return table(columns, rows) if rows else ""


def signed(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {standard_error(values):.3f}"


def conversation_figure(hits: Hits) -> Any:
    """A panel an order, a line a condition."""
    figure = pictures.figure(2 * pictures.WIDTH, pictures.HEIGHT)
    panels = figure.subplots(1, len(hits), sharey=True)
    for axes, (order, by_name) in zip(panels, hits.items(), strict=True):
        for name, rows in by_name.items():
            turns, means = np.arange(1, rows.shape[1] + 1), rows.mean(axis=0)
            errors = standard_error(rows)
            axes.errorbar(turns, means, yerr=errors, marker="o", capsize=2, label=name)
        axes.set(title=order, xlabel="turn", ylim=(-0.05, 1.05))
        pictures.whole_numbers(axes.xaxis)
    panels[0].set_ylabel("right answers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


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
    forms = [best[form] for form in ("mixing", "head-wise", "mixing, after RoPE")]
    times = [f"{1e3 * timed[name]['median_s']:.2f}" for name in (*forms, "step", "re-prefill")]
    ratios = [f"{np.median(found['ratios'][name]):.1f}" if name in found["ratios"] else "-"
              for name in ("re-prefill / switch", "re-prefill / switch (graph)")]  # fmt: skip
    peak = [f"{found['peak_bytes'][name] / 1e9:.1f}" if name in found["peak_bytes"] else "-"
            for name in ("switch", "re-prefill")]  # fmt: skip
    share = f"{timed[forms[0]]['of_gemm_rate']:.2f}"
    return [pair.replace(":", " to "), str(found["tokens"]), *times[:3], share, *times[3:],
            *ratios, " / ".join(peak)]  # fmt: skip


def main() -> None:
    sections = [
        HEAD,
        closed_forms(),
        families(),
        objectives(),
        throughput(),
        windows(),
        conversations(),
        switches(),
        gpu_switches(),
        evaluations(),
        analyses(),
    ]
    PAGE.write_text("\n".join(section for section in sections if section))


if __name__ == "__main__":
    main()
