"""Records of CoQA, QuAC and MultiChallenge as conversations to be held turn by turn.

Each benchmark's records are read as its authors publish them and as the Hub has them. What could
not be a conversation is refused with its place in the data, and never left out without a word.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation.turn_scores import Benchmark
from benchmarks.paper.evaluation.turns import Talk, Turn
from benchmarks.paper.tasks import QUAC_INSTRUCTION, QUAC_TURNS
from benchmarks.paper.tasks.records import hub, read_file, read_record
from benchmarks.paper.tasks.scoring import best_f1, one_left_out
from kvlingo_mlx.errors import KVLingoError, needs_extra
from kvlingo_mlx.models.prompts import Message

Record = Mapping[str, Any]

COQA_TURNS = 10  # turns used of a conversation, as in the paper
COQA_INSTRUCTION = (
    "Answer each question about the text in a few words, copied from it where that is possible. If "
    "the text does not answer the question, reply unknown."
)


# ---- records to conversations ----------------------------------------------------------------


def _coqa(record: Record) -> list[Talk]:
    questions = _listed(record["questions"])
    answers = _listed(record["answers"])
    more = [_listed(found) for found in (record.get("additional_answers") or {}).values()]
    if any(len(found) != len(questions) for found in (answers, *more)):
        raise ValueError(f"{len(questions)} questions have {len(answers)} answers")
    head = f"{COQA_INSTRUCTION}\n\n{_text(record['story'])}"
    return [_talk(record.get("id"), head, questions, list(zip(answers, *more, strict=True)))]


def _quac(record: Record) -> list[Talk]:
    if "paragraphs" in record:  # the authors' file: an article with its sections
        return [talk for section in record["paragraphs"] for talk in _section(record, section)]
    text = _text(record["context"]).removesuffix("CANNOTANSWER").rstrip()
    title = f"{record['wikipedia_page_title']}: {record['section_title']}"
    answers = [[_text(one) for one in found] for found in record["answers"]["texts"]]
    head = f"{QUAC_INSTRUCTION}\n\n{title}\n\n{text}"
    return [_talk(record["dialogue_id"], head, list(record["questions"]), answers)]


def _section(article: Record, section: Record) -> list[Talk]:
    asked = section["qas"]
    return _quac(
        {
            "dialogue_id": section["id"],
            "wikipedia_page_title": article["title"],
            "section_title": article["section_title"],
            "context": section["context"],
            "questions": [one["question"] for one in asked],
            "answers": {"texts": [[_field(a, "text") for a in one["answers"]] for one in asked]},
        }
    )


def _multichallenge(record: Record) -> list[Talk]:
    # The benchmark's repository writes field names in capitals, the Hub does not.
    record = {key.lower(): value for key, value in record.items()}
    given = record["conversation"]
    if isinstance(given, Mapping):  # as `datasets` stores a list of objects
        given = [
            dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)
        ]
    expected = _text(record["pass_criteria"]).strip().lower()
    if expected not in ("yes", "no"):
        raise ValueError(f"pass_criteria is {record['pass_criteria']!r:.40}, expected YES or NO")
    judge = {"template": "multichallenge", "expected": expected,
             "fields": {"criterion": _text(record["target_question"])}}  # fmt: skip
    return [Talk(str(record["question_id"]), tuple(_history(given)), judge)]


def _history(given: Sequence[Record]) -> list[Turn]:
    """Messages as turns: each ends with an assistant's, but for the last one."""
    turns: list[Turn] = []
    new: list[Message] = []
    for place, message in enumerate(given, 1):
        role, content = message["role"], _text(message["content"])
        wanted = ("assistant",) if new and new[-1]["role"] == "user" else ("user",)
        if role not in (wanted if turns or new else ("user", "system")):
            raise ValueError(f"message {place} is {role!r:.40}'s, expected {wanted[0]}'s")
        if role == "assistant":
            turns.append(Turn(tuple(new), written=content))
            new = []
        else:
            new.append({"role": role, "content": content})
    if not new or new[-1]["role"] != "user":
        raise ValueError("the conversation does not end with a user's message")
    return [*turns, Turn(tuple(new))]


def _talk(name: Any, head: str, questions: Sequence[Any], answers: Sequence[Sequence[str]]) -> Talk:
    """Questions about a text; ``head`` is what stands before the first of them."""
    turns = []
    for place, (question, references) in enumerate(zip(questions, answers, strict=True), 1):
        if not references:
            raise ValueError(f"question {place} has no answer")
        whole = f"{head}\n\n{_text(question)}" if place == 1 else _text(question)
        messages, bare = (({"role": "user", "content": text},) for text in (whole, question))
        turns.append(Turn(messages, bare, tuple(references)))
    return Talk("" if name is None else str(name), tuple(turns))


def _listed(found: Any) -> list[str]:
    """CoQA's texts in any form: a list of objects or of texts, or an object of lists."""
    if isinstance(found, Mapping):
        return [_text(answer) for answer in found["input_text"]]
    return [_field(answer, "input_text") for answer in found]


def _field(found: Any, name: str) -> str:
    return _text(found[name] if isinstance(found, Mapping) else found)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError(f"found {found!r:.40} where text is expected")
    return found


# ---- the benchmarks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A benchmark's records.

    Attributes:
        talks: The conversations of a record.
        depth: The turns that are used of each, as in the paper; None for all.
        hub: The path, revision and split of its data set on the Hub.
        benchmark: How its conversations are scored.
    """

    talks: Callable[[Record], list[Talk]]
    depth: int | None
    hub: tuple[str, str | None, str]
    benchmark: Benchmark


PUBLISHED = {
    "coqa": Published(
        _coqa, COQA_TURNS, ("stanfordnlp/coqa", None, "validation"),
        Benchmark("coqa", "f1", one_left_out, 128),
    ),
    "quac": Published(
        _quac, QUAC_TURNS, ("allenai/quac", "refs/convert/parquet", "validation"),
        Benchmark("quac", "f1", best_f1, 128),
    ),
    "multichallenge": Published(
        _multichallenge, None, ("ScaleAI/MultiChallenge", None, "test"),
        Benchmark("multichallenge", "pass", None, 2048),
    ),
}  # fmt: skip


def read_talks(
    name: str, file: str | None = None, *, depth: int | None = None, limit: int | None = None
) -> tuple[list[Talk], int]:
    """A benchmark's conversations, in the order of its records, and how many were too short.

    Args:
        name: A name in ``PUBLISHED``.
        file: A local file of its records; by default they are fetched from the Hub.
        depth: Use this many turns, and no conversation that has fewer; by default the paper's
            number. A history that is written before is used whole.
        limit: Stop after so many conversations.

    Raises:
        ValueError: There is no such benchmark, its histories have no ``depth``, or no conversation
            is long enough.
        KVLingoError: The records cannot be read, or one is not a record of this benchmark.
    """
    if name not in PUBLISHED:
        raise ValueError(f"{name!r} has no turns to score; known are {', '.join(PUBLISHED)}")
    known = PUBLISHED[name]
    if depth is not None and (known.depth is None or depth < 1):
        raise ValueError(
            f"{name}:{depth} is no number of turns; " + (
                f"give {name} alone, whose histories are used whole"
                if known.depth is None else f"give {name}:J with J of 1 or more"
            )
        )  # fmt: skip
    depth = depth or known.depth
    talks: list[Talk] = []
    longest = short = 0
    for number, record in enumerate(read_file(Path(file)) if file else _hub(name, *known.hub), 1):
        for talk in read_record(name, known.talks, number, record, file or "the data"):
            longest = max(longest, len(talk.turns))
            short += len(talk.turns) < (depth or 1)
            if len(talk.turns) >= (depth or 1):
                label = f"{number}" if not talk.name else f"{number} {talk.name}"
                turns = talk.turns if known.depth is None else talk.turns[:depth]
                talks.append(Talk(label, turns, talk.judge))
        if limit is not None and len(talks) >= limit:
            return talks[:limit], short
    if not talks:
        raise ValueError(
            f"no conversation of {file or name} has {depth or 1} turns; the longest has {longest}: "
            f"give --turns {name}:{longest or 1}, or other data"
        )
    return talks, short


def _hub(name: str, path: str, revision: str | None, split: str) -> Iterable[Record]:
    """A data set of the Hub.

    Raises:
        MissingExtraError: The ``[eval]`` extra is not installed.
        KVLingoError: The data set cannot be fetched.
    """
    with needs_extra("eval", f"the records of {name} come from the Hub, which needs `datasets`"):
        importlib.import_module("datasets")
    try:
        return hub(path, split, revision)
    except Exception as error:  # `datasets` raises many kinds
        said = " ".join(str(error).split()).split(". ")[0][:200]
        raise KVLingoError(
            f"the records of {name} cannot be fetched ({said}); run once online, or give "
            f"--task-data {name}=FILE"
        ) from None
