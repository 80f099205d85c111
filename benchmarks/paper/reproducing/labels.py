"""LABELS.md: what an audit found of every label, and what its entry asks today.

python -m benchmarks.paper.reproducing.labels
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper.reproducing.entries import BY_LABEL
from benchmarks.paper.reproducing.listing import Listed, listed

PAGE = Path(__file__).parents[1] / "LABELS.md"
HEAD = """# Label by label

What an audit of 2026-11-27 found of each label of the paper, and what its entry does today;
written by `python -m benchmarks.paper.reproducing.labels`. **Other quantity**: the number beside
the paper's was of something else. *Same*: as the caption says it, by reading and by
`tests/paper/reproducing/test_captions.py`; none has been made at the paper's size. What is said
here of a label stands under its numbers, too.

Of all labels: RULER is our own needles, RULER-like; a judge gets our wording unless
`--judge-prompts` has the benchmarks'; a closed form has a ridge, chosen for each map.

| label | audit | today | command |
|---|---|---|---|
"""
OTHER, MISSING = "**other quantity**", "not made"
RATES, NUS = "ok but for rates of MLPs; stops on CUDA", "ok but for seed 56 and rates"
FOUND = {
    OTHER: "fig:cka app:fig:cka fig:qwen3small fig:head_mixing_mlp_shape tab:xdepth fig:gemma-3 "
    "fig:gemma-4 tab:gemma4 app:fig:reasoningboost tab:xtok fig:xtok_pair tab:droidspeak "
    "app:tab:moe app:fig:moe app:tab:cachedist tab:pre_vs_post_rope tab:baseppl tab:splitjoint "
    "tab:seedsets",
    MISSING: "fig:mla_pair tab:mla app:tab:mla app:fig:scratch tab:scratch tab:scratchppl",
    RATES: "tab:qwen3ls tab:qwen3sl fig:suite_off fig:suite_on fig:suite_small_on_mean",
    NUS: "fig:xdepth_all_1 fig:xdepth_all_2 fig:assignment_comparison_1 app:tab:xdepthlme "
    "fig:assignment_comparison_2 fig:head_wise_vs_head_mixing fig:xdepth_think app:tab:nsrc "
    "fig:n_src_cross_depth app:tab:xdepthruler",
    "ok but for all conversations": "fig:multiturn_coqa app:fig:multiturn_quac "
    "app:fig:multiturn_multichallenge",
    "ok but for 32k asked, rates of nu 2 and 4": "tab:gemma3 tab:gemma3nu",
    "scores alone": "fig:ttft fig:nsrc_ttft",
    "ok but for rates of Base pairs": "tab:lrs tab:base",
    "ok but not English alone": "fig:prefixhist",
    "ok but for a row and cells": "app:tab:knorm",
    "ok but for one seed": "fig:pre_vs_post_rope_extrapolation",
    "ok but for 256 questions": "tab:ctxonly",
    "reasoning off alone": "tab:seedsd",
}
AUDIT = {label: verdict for verdict, labels in FOUND.items() for label in labels.split()}


def page() -> str:
    """The page."""
    return HEAD + "".join(map(_row, listed(Path("nowhere"))))


def _row(one: Listed) -> str:
    entry = BY_LABEL[one.label]
    today = "; ".join(entry.differs) or "same"
    if entry.maker == "protocol":
        today = f"described: {entry.why}"
    command = f"`{one.command}`" if one.command else ""
    return f"| {one.label} | {AUDIT.get(one.label, 'ok')} | {today} | {command} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
