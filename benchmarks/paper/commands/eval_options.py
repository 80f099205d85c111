"""The options that the paper's ``eval`` has beside the package's, and their values' parsing."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paper.tasks import JUDGED
from kvlingo_mlx.cli import eval_options
from kvlingo_mlx.cli.command import option
from kvlingo_mlx.cli.eval_options import words


@dataclass(frozen=True, kw_only=True)
class PaperEvalOptions(eval_options.EvalOptions):
    suite: str | None = option(
        None, "The paper's benchmarks: paper, base, or some of them: paper:ruler,xquad."
    )
    turns: str | None = option(
        None,
        "Instead of --tasks: coqa, quac or multichallenge, answered by both models in turn; coqa:J "
        "for J turns.",
    )
    baselines: str = option(
        "hidden,shuffled",
        "hidden, shuffled, canonical, reuse, droidspeak:J, text, folded; or none.",
    )
    switch_at: str = option(
        "prompt",
        "Where the cache changes hands: after the prompt, after its context, after a trace; "
        "prompt,context,trace compares them.",
    )
    judge: str | None = option(None, "A model that judges free answers: a folder or Hub id.")
    judge_prompts: str | None = option(
        None, "The benchmarks' own judge prompts: a folder of texts, or a JSON file."
    )


def split_tasks(options: PaperEvalOptions) -> tuple[list[str], list[str]]:
    """Our own tasks, and the tasks that lm-eval runs; none of either where a suite is asked for.

    Raises:
        ValueError: As in the package, or answers need a judge and have none.
    """
    if options.suite is not None:
        return [], []
    own, public = eval_options.split_tasks(words(options.tasks))
    for name in public:
        if name in JUDGED and options.judge is None:
            raise ValueError(f"a model judges the answers of {name}; add --judge MODEL")
    return own, public


def points(text: str, thinking: bool) -> list[str]:
    """Where the cache changes hands, by ``--switch-at``; the words are checked later.

    Raises:
        ValueError: A trace is to be handed over, and thinking is off.
    """
    found = words(text)
    if "trace" in found and not thinking:
        raise ValueError(
            "--switch-at names trace, but without --thinking no reasoning is written; add "
            "--thinking, or take trace out"
        )
    return found


def turns(text: str) -> list[tuple[str, int | None]]:
    """The benchmarks of ``--turns``, each with the number of turns to use if it is given."""
    found = []
    for word in words(text):
        name, colon, number = word.partition(":")
        if colon and not (number.isdecimal() and int(number) > 0):
            raise ValueError(
                f"--turns names {word!r}; give {name}, or {name}:J with J of 1 or more"
            )
        found.append((name, int(number) if colon else None))
    if not found or len({name for name, _ in found}) < len(found):
        raise ValueError(f"--turns is {text!r}; give benchmarks, each once: coqa,quac")
    return found
