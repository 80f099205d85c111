"""The judge of free answers: a model, or in a tiny run a rule that stands for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.paper.evaluation.judge import Ask, Judge
from benchmarks.paper.reproducing.work import Work

MARKS = ("<reply>", "<response>", "Model response:", "Answer:")


def judge_of(work: Work) -> Callable[[], Ask] | None:
    """Makes the judge of a run; None if there is none."""
    model: Any = work.benchmarks.get("judge")
    if model is not None:
        return lambda: Judge(model, responses=work.responses)
    return (lambda: by_words) if work.tiny else None


def by_words(prompt: str) -> str:
    """A verdict in the form that a prompt asks for, by the words that an answer shares.

    It counts how many of the answer's words stand in the rest of the prompt. It tests the way, not
    the answers.
    """
    at = max(prompt.rfind(mark) for mark in MARKS)
    head, _, rest = prompt[at:].partition("\n\n")
    answer = re.findall(r"\w+", head.partition(">" if head.startswith("<") else ":")[2].lower())
    others = set(re.findall(r"\w+", (prompt[: max(at, 0)] + rest).lower()))
    share = sum(word in others for word in answer) / max(len(answer), 1)
    if "Rating: [[" in prompt:
        return f"Rating: [[{1 + round(9 * share)}]]"
    if "Facts: [[" in prompt:
        return f"Facts: [[{round(2 * share)}/2]]"
    return "[[yes]]" if share > 0.5 else "[[no]]"
