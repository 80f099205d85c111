"""LongMemEval: chats with a user, and a question about them; its rungs are diluted histories.

A rung is a length in tokens. The sessions that hold the evidence are always there; other sessions
of the same history are added until no more fits. Every rung holds the sessions of the one below,
and asks the same questions: those whose evidence fits into the shortest one.
"""

from __future__ import annotations

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
    hub_file,
    ordered_by,
    to_judge,
    transcript,
    turns_of,
)
from kvlingo_mlx.errors import KVLingoError

INSTRUCTION = (
    "Below are past chats between you and a user, oldest first. Use them to answer the question "
    "that follows."
)
BETWEEN = "\n\n"
ORACLE = "oracle"
RUNGS = (ORACLE, 8192, 16384, 32768)
Session = tuple[str, str]  # its date and its text


def longmemeval(*, path: str, file: str, **settings: Any) -> Any:
    """LongMemEval: the sessions by date as one text, then the question."""
    # `datasets` is not used: some answers are numbers, and Arrow does not mix them with text.
    source = Source("longmemeval", _whole, _name)
    return dataset(source, lambda: hub_file(path, file), settings)


def longmemeval_rungs(*, path: str, file: str, rungs: Any = RUNGS, **settings: Any) -> Any:
    """Every question that all rungs have room for, at each of them.

    Args:
        path, file: Where histories with distracting sessions are.
        rungs: Lengths in tokens, and "oracle" for the evidence alone.
        settings: Those of :func:`.records.dataset`, and the ``tokenizer`` that counts.

    Raises:
        KVLingoError: A rung is neither a length nor "oracle", or there is no tokenizer.
    """
    rungs = list(rungs) if isinstance(rungs, list | tuple) else [rungs]
    wrong = [r for r in rungs if r != ORACLE and not (isinstance(r, int) and r > 0)]
    if wrong or not rungs:
        raise KVLingoError(f"rungs are {rungs}; give lengths in tokens, and {ORACLE!r}")
    read = partial(_on_rungs, rungs=rungs, count=counter(settings))
    source = Source("longmemeval_rungs", read, _name)
    return dataset(source, lambda: hub_file(path, file), settings)


def rung_name(rung: int | str) -> str:
    """A rung as tables name it: 8192 is 8k."""
    return f"{rung // 1024}k" if isinstance(rung, int) and rung % 1024 == 0 else str(rung)


def _name(record: Record) -> str:
    return str(record["question_id"])


def _sessions(record: Record) -> list[Session]:
    """The sessions in the record's order."""
    chats = zip(record["haystack_dates"], record["haystack_sessions"], strict=True)
    return [
        (date, f"Chat of {date}:\n\n{transcript(turns_of(chat, 'haystack_sessions'))}")
        for date, chat in chats
    ]


def _end(record: Record) -> str:
    return f"Today is {record['question_date']}. Question: {record['question']}"


def _text(record: Record, sessions: Sequence[Session]) -> str:
    chats = [text for _, text in sorted(sessions, key=lambda session: session[0])]
    return BETWEEN.join([INSTRUCTION, *chats, _end(record)])


def _document(record: Record, text: str, rung: str | None = None) -> Document:
    question, answer, name = record["question"], str(record["answer"]), _name(record)
    kind = "abstention" if name.endswith("_abs") else record["question_type"]
    judge = to_judge(f"longmemeval/{kind}", {"question": question, "reference": answer}, "yes")
    own = name if rung is None else f"{name}@{rung}"
    return document(
        own, asked(text), cluster=name, subset=rung or kind, references=[answer], judge=judge
    )


def _whole(record: Record) -> list[Document]:
    return [_document(record, _text(record, _sessions(record)))]


def _on_rungs(
    record: Record, rungs: Sequence[int | str], count: Callable[[str], int]
) -> list[Document]:
    """The question at every rung; none if its evidence does not fit into the shortest."""
    sessions, ids = _sessions(record), [str(i) for i in record["haystack_session_ids"]]
    wanted = {str(i) for i in record["answer_session_ids"]}
    if len(ids) != len(sessions) or not wanted <= set(ids):
        raise ValueError("answer_session_ids are not among the ids of haystack_sessions")
    evidence = [place for place, name in enumerate(ids) if name in wanted]
    order = sorted(
        (place for place, name in enumerate(ids) if name not in wanted),
        key=lambda place: ordered_by("longmemeval", _name(record), ids[place], str(place)),
    )
    sizes = {place: count(BETWEEN + sessions[place][1]) for place in evidence}
    used = count(INSTRUCTION) + count(BETWEEN + _end(record)) + sum(sizes.values())
    lengths = sorted(rung for rung in rungs if isinstance(rung, int))
    if lengths and used > lengths[0]:
        return []
    chosen: dict[int | str, list[int]] = {ORACLE: list(evidence)}
    held = list(evidence)
    for length in lengths:
        for place in [place for place in order if place not in held]:
            size = count(BETWEEN + sessions[place][1])
            if used + size <= length:
                used, held = used + size, [*held, place]
        chosen[length] = held
    return [
        _document(record, _text(record, [sessions[p] for p in sorted(chosen[rung])]), name)
        for rung in rungs
        for name in [rung_name(rung)]
    ]
