"""The paper's evaluation suites as data: what each benchmark asks, how often, and what is shown.

``PAPER`` is the table of appendix "Evaluation data"; ``BASE`` is the table of the released Base
pairs (appendix "Cache translation with Qwen3-like models pretrained from scratch").
:mod:`.suite_runs` runs a benchmark. What the paper leaves open was decided here: which records are
drawn (always the same ones, ``harness.tasks.records.DRAWN_BY``), that chat models see no examples,
and which needles RULER's are.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

ITEMS, GROUPS, CLUSTERS = "items", "groups", "clusters"
NEEDLES = "needles"
# The paper's error bars leave no other choice: 0.700 +- 0.012 over 400 items is narrower than any
# set allows of which half is right or wrong, so these are RULER's forms with four values each.
NEEDLE_FORMS = ("multi-value", "multi-query")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One row of a suite.

    Attributes:
        name: Its name in ``--suite paper:NAME``.
        title: Its name in the paper's tables.
        task: The name of the task that asks its questions, as for ``--tasks``.
        metrics: The scores that are shown, the paper's first.
        budget: The most new tokens of an answer with reasoning off and on; None where nothing is
            written.
        reasoning: The modes in which the paper scores it: False for off, True for on.
        draw: The number of records drawn, or of needles at each length; None for all. A record is
            a question, a conversation or a dialogue; a language or a rung is not another one.
        limit: The first items that are used, where a task of lm-eval's draws none.
        shots: The number of examples shown.
        pooled: How all items make one score: ``items``, each counts once; ``groups``, each part
            (category, length) counts once; ``clusters``, each question counts once over its rungs.
        by_group: Whether the parts are shown, too.
        against: The part against which the others' loss is compared (difference in differences).
        lengths: The lengths of haystacks, or LongMemEval's rungs.
        chat: Whether prompts are chats; None if the target has a template.
        needs: Modules that lm-eval's task needs beside lm-eval.
    """

    name: str
    title: str
    task: str
    metrics: tuple[str, ...]
    budget: tuple[int, int] | None
    reasoning: tuple[bool, ...] = (False,)
    draw: int | None = None
    limit: int | None = None
    shots: int | None = None
    pooled: str = ITEMS
    by_group: bool = False
    against: str | None = None
    lengths: tuple[int | str, ...] = ()
    chat: bool | None = None
    needs: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        """Whether a model judges the answers."""
        from benchmarks.paper.tasks import JUDGED

        return self.task in JUDGED

    def tokens(self, thinking: bool) -> int | None:
        """The most new tokens of an answer in a mode."""
        return None if self.budget is None else self.budget[thinking]


BOTH = (False, True)
PAPER = (
    Benchmark(
        name="mmlu_pro", title="MMLU-Pro", task="mmlu_pro_written", metrics=("acc", "parsed"),
        budget=(1024, 8192), reasoning=BOTH, draw=1400, pooled=GROUPS, by_group=True,
    ),
    Benchmark(
        name="arc_challenge", title="ARC-C", task="arc_challenge_written",
        metrics=("acc", "parsed"), budget=(1024, 8192), reasoning=BOTH,
    ),
    Benchmark(
        name="gsm8k", title="GSM8K", task="gsm8k", metrics=("exact_match,flexible-extract",),
        budget=(2048, 2048), reasoning=(True,), limit=256, shots=0,
    ),
    Benchmark(
        name="ifeval", title="IFEval", task="ifeval",
        metrics=("prompt_level_strict_acc", "inst_level_strict_acc"), budget=(1024, 1024),
        needs=("langdetect", "immutabledict"),
    ),
    Benchmark(
        name="coqa", title="CoQA", task="coqa_last_turn", metrics=("f1", "gold_in_answer"),
        budget=(128, 2048), draw=256,
    ),
    Benchmark(
        name="quac", title="QuAC", task="quac", metrics=("f1",), budget=(128, 2048), draw=256,
        pooled=CLUSTERS, by_group=True,
    ),
    Benchmark(
        name="repliqa", title="RepLiQA", task="repliqa", metrics=("correct",), budget=(512, 2048),
        reasoning=BOTH, draw=512,
    ),
    Benchmark(
        name="repliqa_facts", title="RepLiQA, fact coverage", task="repliqa_facts",
        metrics=("fact_coverage",), budget=(512, 2048), reasoning=BOTH, draw=512,
    ),
    Benchmark(
        name="repliqa_all", title="RepLiQA, all questions", task="repliqa_all",
        metrics=("correct",), budget=(512, 2048), reasoning=BOTH, draw=512,
    ),
    Benchmark(
        name="xquad", title="XQuAD", task="xquad_languages", metrics=("f1",), budget=(128, 2048),
        draw=256, by_group=True, against="en",
    ),
    Benchmark(
        name="mt_bench_101", title="MT-Bench-101", task="mt_bench_101", metrics=("rating",),
        budget=(2048, 2048), reasoning=BOTH, draw=256,
    ),
    Benchmark(
        name="multichallenge", title="MultiChallenge", task="multichallenge", metrics=("pass",),
        budget=(2048, 2048),
    ),
    Benchmark(
        name="ruler", title="needles (RULER-like)", task=NEEDLES, metrics=("recall",),
        budget=(2048, 2048), reasoning=BOTH, draw=400, pooled=GROUPS, by_group=True,
        lengths=(4096, 8192, 16384, 32768),
    ),
    Benchmark(
        name="longmemeval", title="LongMemEval", task="longmemeval_rungs", metrics=("accuracy",),
        budget=(2048, 2048), reasoning=BOTH, pooled=CLUSTERS, by_group=True,
        lengths=("oracle", 8192, 16384, 32768),
    ),
    Benchmark(
        name="longbench_v2", title="LongBench-v2", task="longbench_v2_written",
        metrics=("acc", "parsed"), budget=(512, 4096), reasoning=BOTH,
    ),
)  # fmt: skip
BASE = (
    Benchmark(
        name="arc_challenge", title="ARC-C", task="arc_challenge", metrics=("acc_norm",),
        budget=None, limit=2000, shots=5, chat=False,
    ),
    Benchmark(
        name="squad", title="SQuAD-v1", task="squad_v1", metrics=("f1",), budget=(64, 64),
        limit=2000, shots=5, chat=False,
    ),
    Benchmark(
        name="boolq", title="BoolQ", task="boolq", metrics=("acc",), budget=None, limit=2000,
        shots=5, chat=False,
    ),
    Benchmark(
        name="winogrande", title="WinoGrande", task="winogrande", metrics=("acc",), budget=None,
        limit=2000, shots=5, chat=False,
    ),
)  # fmt: skip
SCRATCH = tuple(
    Benchmark(
        name=task, title=title, task=task, metrics=(metric,), budget=None, limit=2000, shots=0,
        chat=False,
    )
    for task, title, metric in (
        ("boolq", "BoolQ", "acc"), ("hellaswag", "HellaSwag", "acc_norm"),
        ("piqa", "PIQA", "acc_norm"), ("arc_easy", "ARC-E", "acc_norm"),
        ("arc_challenge", "ARC-C", "acc_norm"), ("winogrande", "WinoGrande", "acc"),
    )
)  # fmt: skip
SUITES = {"paper": PAPER, "base": BASE, "scratch": SCRATCH}


def benchmark(name: str, suite: str = "paper") -> Benchmark:
    """A benchmark of a suite by its name.

    Raises:
        ValueError: There is no such suite or benchmark.
    """
    rows = {row.name: row for row in _rows(suite)}
    if name not in rows:
        close = difflib.get_close_matches(name, rows, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(rows)}"
        raise ValueError(f"--suite {suite} has no benchmark {name!r}; {hint}")
    return rows[name]


def chosen(text: str, thinking: bool = False) -> list[Benchmark]:
    """The benchmarks of ``--suite``: those of a suite in one mode, or those that are named.

    Args:
        text: ``paper``, ``base``, or one of them with names: ``paper:ruler,xquad``.
        thinking: The mode. A named benchmark is taken in either.

    Raises:
        ValueError: There is no such suite or benchmark, or none of it is scored in this mode.
    """
    suite, colon, listed = text.partition(":")
    rows = _rows(suite)
    if not colon:
        found = [row for row in rows if thinking in row.reasoning]
        if not found:
            raise ValueError(f"--suite {suite} has no row with reasoning on; leave --thinking out")
        return found
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--suite {text!r} names no benchmark; give {suite}, or {suite}:NAME")
    return [benchmark(name, suite) for name in names]


def without_judge(rows: Sequence[Benchmark], text: str) -> tuple[list[Benchmark], str]:
    """The benchmarks that need no judge, and a line about those that do, empty if there are none.

    Raises:
        ValueError: One that needs a judge was named, or none is left.
    """
    judged = [row.name for row in rows if row.judged]
    if not judged:
        return list(rows), ""
    told = f"a model judges the answers of {', '.join(judged)}"
    if ":" in text:
        raise ValueError(f"{told}; add --judge MODEL")
    return [row for row in rows if not row.judged], f"left out: {told}; --judge MODEL adds them"


def _rows(suite: str) -> tuple[Benchmark, ...]:
    if suite not in SUITES:
        raise ValueError(f"--suite is {suite!r}; known are {', '.join(SUITES)}, and paper:ruler")
    return SUITES[suite]
