"""Sections on what translators recall, and on what two caches have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rendering.records import HERE, records, source, table


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
        "`self-distilled` reads one layer, by relative depth. tiny-qwen3-s has four layers,\n"
        "tiny-qwen3-moe six. MLA: tiny-mla-s has four layers with latents of 128, tiny-mla-l six\n"
        "of 160, both k_R of 32.\n"
    ]
    return "\n".join([*parts, *(p for r in found for p in recalls(r))]) if found else ""


def across_tokenizers() -> str:
    """The same for a pair of two tokenizers, with the control of positions."""
    found = records("cross_tokenizer")
    return "\n".join([
        "## Two tokenizers: recall and KL\n\n"
        "tiny-qwen3-s (byte-level BPE, four layers) and tiny-mistral (SentencePiece with byte\n"
        "fallback, five layers, another template). `canonical positions` rotates translated keys\n"
        "by where their entries stand in the text, not by the tokens that they stand for.\n",
        *(p for r in found[-1:] for p in recalls(r)),
    ]) if found else ""  # fmt: skip


def folded_recalls() -> str:
    """What a target recalls from a narrower source's own cache."""
    found = records("folded_quality")
    return "\n".join([
        "## Folded decoding: recall and KL\n\n"
        "tiny-qwen3-narrow has two KV heads of width 32, tiny-qwen3-l four. `folded` decodes from\n"
        "the source's own cache; the line above it writes the translated cache out. Maps that mix\n"
        "heads first, head-wise ones (nu = 4) after them.\n",
        *(p for r in found for p in recalls(r)),
    ]) if found else ""  # fmt: skip


def with_error(values: Sequence[float]) -> str:
    """Mean and standard error over seeds."""
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"


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
    """What ``python -m benchmarks.paper analyze`` found, before anything is trained."""
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


def hybrids() -> str:
    """Recall and KL by the number of layers that the target reads itself."""
    parts, latest = [], {}
    for record in (r for r in records("hybrid") if r["config"]["what"] == "quality"):
        latest |= {pair: (found, source(record)) for pair, found in record["results"].items()}
    for pair, (found, _) in latest.items():
        parts.append(f"### {pair.replace(':', ' to ')}\n\n{hybrid_table(found)}")
    parts += dict.fromkeys(origin for _, origin in latest.values())
    timed = [r for r in records("hybrid") if r["config"]["what"] == "time"]
    parts += [native_times(record) for record in timed[-1:]]
    head = [
        "## Native layers below, translated ones above\n",
        "Recall / KL where the target reads its first j layers itself; `one alone`: closed form,\n"
        "layer j alone native. `at j` was distilled with j native layers. At j = all layers every\n"
        "way is the target's own cache.\n",
    ]
    return "\n".join([*head, *parts]) if parts else ""


def native_times(record: dict) -> str:
    """First tokens by the number of native layers, beside two predictions of them."""
    layers, tokens = record["config"]["layers"], record["config"]["tokens"]
    samples, ratios = record["results"]["samples_s"], record["results"]["ratio"]
    times = {int(j): float(np.median(samples[f"j = {j}"])) for j in ratios}
    some = [j for j in times if j]
    slope, start = np.polyfit(some, [times[j] for j in some], 1)
    rows = [[str(j), f"{1e3 * times[j]:.0f}", f"{ratios[str(j)]:.2f}",
             f"{times[j] / (start + slope * j):.2f}" if j else ""] for j in times]  # fmt: skip
    columns = ["native layers", "first token (ms)", "of j / N of a re-prefill + the rest",
               "of the straight line"]  # fmt: skip
    return "\n".join([
        f"### Time, {layers} layers, {tokens} tokens, random weights\n",
        "Of layer j only keys and values are computed, so few native layers take less than their\n"
        "share of a re-prefill. The line is fitted to all rows but the first.\n",
        table(columns, rows), source(record),
    ])  # fmt: skip


WAYS = {
    "closed form": "closed form, j = {j}",
    "self-distilled": "self-distilled, j = {j}",
    "at j": "distilled at j, j = {j}",
    "DroidSpeak": "DroidSpeak, j = {j}",
    "one alone": "closed form, layer {j} native",
}


def hybrid_table(found: dict) -> str:
    scores, layers = found["scores"], found["layers"]
    rows = []
    for way, name in WAYS.items():
        cells = [recall_and_kl(scores.get(name.format(j=j))) for j in range(layers)]
        if any(cells):
            rows.append([way, *cells])
    controls = ("native", "prefix hidden", "closed form, shuffled", "self-distilled, shuffled")
    told = "; ".join(f"{name} {recall_and_kl(scores[name])}" for name in controls if name in scores)
    return table(["", *(f"j = {j}" for j in range(layers))], rows) + f"\nBeside them: {told}.\n"


def recall_and_kl(score: dict | None) -> str:
    return f"{score['hits']:.2f} / {score['kl']:.3f}" if score else ""
