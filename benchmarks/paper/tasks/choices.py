"""Questions with answers to choose from, which a model answers in words (generate and parse).

lm-eval compares the likelihoods of the answers, or looks for one phrase. In the paper (appendix
"Evaluation data") the model writes, with reasoning or without, and its letter is read from that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.paper.tasks.records import (
    Document,
    Record,
    Source,
    asked,
    counter,
    dataset,
    document,
    hub,
)

LETTERS = "ABCDEFGHIJ"
LAST_LINE = 'End with this line: "The answer is (X)", where X is the letter of the right option.'
READ = "Read the text and answer the question about it."
LONGEST = 32_768  # the paper's longest prefix: LongBench-v2's untruncated subset


def mmlu_pro(*, path: str, split: str, **settings: Any) -> Any:
    """MMLU-Pro's questions; a subset has as many of each category."""
    source = Source(
        "mmlu_pro_written",
        _mmlu_pro,
        lambda r: str(r["question_id"]),
        stratum=lambda r: r["category"],
    )
    return dataset(source, lambda: hub(path, split), settings)


def arc(*, path: str, name: str, split: str, **settings: Any) -> Any:
    """ARC's science questions."""
    source = Source("arc_challenge_written", _arc, lambda r: str(r["id"]))
    return dataset(source, lambda: hub(path, split, name=name), settings)


def longbench_v2(*, path: str, split: str, longest: int = LONGEST, **settings: Any) -> Any:
    """LongBench-v2's questions whose whole prompt has at most ``longest`` tokens."""
    read = partial(_longbench_v2, longest=longest, count=counter(settings))
    source = Source("longbench_v2_written", read, lambda r: str(r["_id"]))
    return dataset(source, lambda: hub(path, split), settings)


# ---- records to documents -------------------------------------------------------------


def _mmlu_pro(record: Record) -> list[Document]:
    options, right = [str(option) for option in record["options"]], record["answer"]
    text = _question(record["question"], options)
    return [_chosen(str(record["question_id"]), text, options, right, record["category"])]


def _arc(record: Record) -> list[Document]:
    options, labels = list(record["choices"]["text"]), list(record["choices"]["label"])
    if len(options) != len(labels):
        raise ValueError(f"{len(options)} choices and {len(labels)} labels")
    right = LETTERS[labels.index(record["answerKey"])]  # some labels are numbers
    text = _question(record["question"], options)
    return [_chosen(str(record["id"]), text, options, right, "ARC-Challenge")]


def _longbench_v2(record: Record, longest: int, count: Callable[[str], int]) -> list[Document]:
    options = [str(record[f"choice_{letter}"]) for letter in "ABCD"]
    question = _question(record["question"].strip(), options)
    text = f"{READ}\n\n{record['context'].strip()}\n\nQuestion: {question}"
    # No tokenizer has fewer than a token for each dozen characters of such texts.
    if len(text) > 16 * longest or count(text) > longest:
        return []
    return [_chosen(str(record["_id"]), text, options, record["answer"], record["length"])]


def _question(question: str, options: Sequence[str]) -> str:
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"a question has {len(options)} options; 2 to {len(LETTERS)} are possible")
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))
    return f"{question}\n\n{listed}\n\n{LAST_LINE}"


def _chosen(name: str, text: str, options: Sequence[str], right: str, subset: str) -> Document:
    if right not in tuple(LETTERS[: len(options)]):
        raise ValueError(f"the answer is {right!r}, and there are {len(options)} options")
    return document(name, asked(text), subset=subset, references=[right], options=options)


# ---- the letter of an answer ------------------------------------------------------------

OPENED = r"(?:[\s*_`\"'(\[{$]|\\boxed|\\text|\\mathrm|\\mathbf)*"
SAID = r"\banswer\b[*_\s]*(?:is|would\s+be|should\s+be|:)\s*:?\s*(?:(?:option|choice)\b)?"
NAMED = re.compile(rf"(?i:{SAID}){OPENED}([A-J])\b")
MEANT = re.compile(rf"(?i:\b(?:option|choice)\b){OPENED}([A-J])\b")
BOXED = re.compile(rf"\\boxed\s*\{{{OPENED}([A-J])\b")
ALONE = re.compile(r"[\s*_`\"'(\[{$]*([A-J])[\s*_`\"')\]}$.:,]*")
FIRST = re.compile(r"[\s*_`\"'(\[]*([A-J])[*_`\"')\]]*[.):]\s*\S")
# "The answer is A good conductor" and "I think": words, not letters.
WORD = re.compile(r"\s+[a-z]")


def scored(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the letter is right, and whether there is one; no letter is a wrong answer."""
    found = letter(results[0], doc["options"])
    return {"acc": float(found == doc["references"][0]), "parsed": float(found is not None)}


def letter(text: str, options: Sequence[str]) -> str | None:
    """The option that an answer chooses, leniently; None if it chooses none.

    The first of these counts, and of several the last: "the answer is (B)" or the like;
    ``\\boxed{B}``; a line that is a letter, or begins with "B." or "B)", or is the text of one
    option; "option B". What stands in a reasoning trace that never ends is no answer.
    """
    if text.lstrip().startswith("<think>") and "</think>" not in text:
        return None
    text = text.rpartition("</think>")[2]
    possible = LETTERS[: len(options)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (
        _last(NAMED, text, possible)
        or _last(BOXED, text, possible)
        or next(filter(None, (_of_line(line, options, possible) for line in lines[::-1])), None)
        or _last(MEANT, text, possible)
    )


def _last(pattern: re.Pattern[str], text: str, possible: str) -> str | None:
    found = [m[1] for m in pattern.finditer(text) if m[1] in possible and not _is_word(m, text)]
    return found[-1] if found else None


def _of_line(line: str, options: Sequence[str], possible: str) -> str | None:
    """The option that a line alone names, by its letter or its text."""
    if one := ALONE.fullmatch(line) or FIRST.match(line):
        return one[1] if one[1] in possible else None
    said = [at for at, option in enumerate(options) if _same(option, line)]
    return possible[said[0]] if len(said) == 1 else None


def _is_word(match: re.Match[str], text: str) -> bool:
    """Whether a lone A or I is the word, since a word in small letters follows."""
    return match[1] in "AI" and WORD.match(text, match.end()) is not None


def _same(option: str, line: str) -> bool:
    return option.strip(" .*").casefold() == line.strip(" .*").casefold()
