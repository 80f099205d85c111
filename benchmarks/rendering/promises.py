"""Sections on ratios that are promised, and on what memory holds."""

from __future__ import annotations

import numpy as np

from rendering.records import records, source, table


def ratios() -> str:
    """Every promised ratio beside its bound, as it was last measured."""
    latest: dict[str, list[str]] = {}
    sources: dict[str, str] = {}
    for record in records("ratios"):
        for name, found in record["results"].items():
            values, bound = found["ratios"], record["config"]["bounds"][name]
            latest[name] = [
                name, f"{bound:.2f}", f"{np.median(values):.3f}",
                f"{min(values):.3f} to {max(values):.3f}",
            ]  # fmt: skip
            sources[name] = source(record)
    if not latest:
        return ""
    return "\n".join([
        "## Ratios, and what they are bound by\n",
        "Both sides of each alternate in one run; `benchmarks/ratios.py` says what is divided by\n"
        "what. `head-wise` is to be at least its bound, all others at most.\n",
        table(["ratio", "bound", "median", "least to most"], latest.values()),
        *dict.fromkeys(sources.values()),
    ])  # fmt: skip


def folded() -> str:
    """Decoding from a narrower cache: speed, and what is alive."""
    rows, sources = [], []
    for record in (r for r in records("folded_decoding") if not r["config"]["attention"]):
        config = record["config"]
        for found in record["results"]:
            rows.append([
                str(config["layers"] or "all"), config["precision"], str(found["context"]),
                str(found["batch"]), f"{found['speed_beside_full']:.2f}",
                f"{found['speed_beside_narrowed']:.2f}", f"{100 * found['translator_share']:.1f} %",
                f"{found['alive_beside_source_cache']:.3f}",
                f"{found['alive_beside_full_cache']:.3f}",
            ])  # fmt: skip
        sources.append(source(record))
    if not rows:
        return ""
    columns = ["layers", "weights", "tokens", "batch", "speed / full", "speed / narrowed",
               "translator", "alive / source's cache", "alive / full cache"]  # fmt: skip
    return "\n".join([
        "## Decoding under a memory budget\n",
        "Gemma-3-12B's widths, random weights: decoding with queries and pooled values folded\n"
        "into the narrower cache of Gemma-3-4B, beside the full cache and a cache that is as\n"
        "narrow by nature. `translator`: its products alone, of a step; `alive`: the most that is\n"
        "alive beyond weights while decoding.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip


def checks() -> str:
    """What validation takes of a hand-over."""
    found = records("checks_cost")
    if not found:
        return ""
    rows = [
        [name, str(cell["tokens"]), str(cell["layers"]), f"{1e3 * cell['median']['checks_s']:.2f}",
         f"{1e3 * cell['median']['hand_over']:.0f}", f"{100 * cell['median']['share']:.3f} %"]
        for name, cells in found[-1]["results"].items() for cell in cells
    ]  # fmt: skip
    return "\n".join([
        "## What the checks cost\n",
        "Tokens, cache and first prediction are checked in every hand-over. Medians in ms.\n",
        table(["models", "tokens", "layers", "checks", "hand-over", "share"], rows),
        source(found[-1]),
    ])  # fmt: skip


def fit_memory() -> str:
    """The largest resident size of stage 1 by assignment."""
    rows, sources = {}, {}
    for record in records("fit_memory"):
        for name, found in record["results"].items():
            rows[name] = [name, *(f"{found[k]:.2f}" for k in ("peak", "before")),
                          f"{found['seconds']:.0f}"]  # fmt: skip
            sources[name] = source(record)
    if not rows:
        return ""
    return "\n".join([
        "## What a fit holds in memory\n",
        "36 layers of width 1024 on both sides, float64 sums: a process's largest resident size.\n",
        table(["assignment", "peak (GiB)", "before the fit", "seconds"], rows.values()),
        *dict.fromkeys(sources.values()),
    ])  # fmt: skip


ALIGNMENT = {
    "one_to_one": "one to one", "one_to_many": "one to several", "many_to_one": "several to one",
    "many_to_many": "several to several", "targets_without_entry": "positions without entry",
}  # fmt: skip


def alignment() -> str:
    """How two tokenizers' tokens correspond, and how long finding that takes."""
    found = records("alignment")
    if not found:
        return ""
    results = found[-1]["results"]
    rows = [
        [way, str(shares["all"]["groups"]),
         *(f"{100 * shares['all'][name]:.0f} %" for name in ALIGNMENT),
         f"{100 * shares['en']['one_to_one']:.0f} %"]
        for way, shares in results["shares"].items()
    ]  # fmt: skip
    times = ", ".join(
        f"{name} {1e3 * np.median(seconds):.0f}" for name, seconds in results["samples_s"].items()
    )
    return "\n".join([
        "## Two tokenizers\n",
        "Minimal groups of two tokenizers trained on the same small corpus, over texts in all the\n"
        "languages of `tests/support/languages.py`; the last column is English alone.\n",
        table(["", "groups", *ALIGNMENT.values(), "one to one, English"], rows),
        f"A text of {max(results['tokens'].values())} tokens, medians in ms: {times}.\n",
        source(found[-1]),
    ])  # fmt: skip


def streams() -> str:
    """The training stream beside plain epochs, by context and seed."""
    rows, sources = [], {}
    for record in records("training_stream"):
        found = record["results"]
        scores = found["scores"]["trained"]
        rows.append([
            str(found["seed"]), found["arm"], f"{found['distinct']} of {found['samples']}",
            f"{scores['recall']:.3f} +- {scores['recall_se']:.3f}",
            f"{scores['kl']:.3f} +- {scores['kl_se']:.3f}",
            f"{found['held_out_kl'][0]:.3f}", f"{min(found['held_out_kl']):.3f}",
        ])  # fmt: skip
        sources[source(record)] = None
    if not rows:
        return ""
    columns = ["seed", "stream", "different samples", "recall", "KL", "held-out KL at first",
               "at best"]  # fmt: skip
    return "\n".join([
        "## The training stream on short chats\n",
        "tiny-qwen3-s to -l by `kvlingo-mlx train` on 4,300 dialogues of at most 256 tokens, none\n"
        "packed, 400 steps of 4: models whose context is raised, beside plain shuffled epochs of\n"
        "the same records. An arm that draws the very samples of another is not trained again.\n",
        table(columns, rows), *sources,
    ])  # fmt: skip


def threads() -> str:
    """Threads on shared models, against one thread."""
    found = records("thread_stress")
    if not found:
        return ""
    rows = [
        [str(r["config"]["threads"]), str(r["results"]["actions"]), str(r["results"]["differ"]),
         str(r["results"]["errors"])]
        for r in found
    ]  # fmt: skip
    return "\n".join([
        "## Threads on shared models\n",
        "Random replies, switches, undos, branches, saves, hand-overs and plain generations of\n"
        "mlx-lm's on three models: answers other than one thread's, and errors.\n",
        table(["threads", "actions", "other answers", "errors"], rows), source(found[-1]),
    ])  # fmt: skip
