"""Records from the Hub or a local file, and the documents that our tasks are made of.

Every document has the same fields:

- ``id``, unique, and ``cluster``, shared by items whose scores belong together (error bars);
- ``subset``, the benchmark's own kind of question;
- ``messages``, the conversation to continue, and ``references``, answers to compare with;
- ``judge``, JSON with the prompt that judges the answer and the prompt's fields, or empty.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation.judge_prompts import TEMPLATES
from kvlingo_mlx.errors import KVLingoError

Record = Mapping[str, Any]
Document = dict[str, Any]
SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}
Message = dict[str, str]
DRAWN_BY = 42  # the seed of every subset; it never changes, so that all runs have the same items
SECONDS = 30
# What a record of another schema raises when it is read.
ODD = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as plain text, for models without a chat template and for judges."""
    return "\n\n".join(f"{SPEAKERS[m['role']]}: {m['content']}" for m in messages)


@dataclass(frozen=True)
class Source:
    """How the records of one benchmark become documents, and how a subset of them is drawn.

    Attributes:
        name: The task's name.
        documents: The documents of a record; none if it has no question for the task.
        key: What names a record, and decides whether it is drawn.
        stratum: The part of the benchmark of which each gives the same number of records.
        usable: Whether a record may be drawn.
    """

    name: str
    documents: Callable[[Record], list[Document]]
    key: Callable[[Record], str]
    stratum: Callable[[Record], str] = lambda record: ""
    usable: Callable[[Record], bool] = lambda record: True


def document(
    name: str,
    messages: Sequence[Mapping[str, str]],
    *,
    subset: str,
    references: Sequence[str],
    cluster: str | None = None,
    judge: str = "",
    options: Sequence[str] = (),
) -> Document:
    """One item; ``options`` are the answers to choose from, if there are any."""
    return {
        "id": name,
        "cluster": cluster or name,
        "subset": subset,
        "messages": [dict(message) for message in messages],
        "references": list(references),
        "judge": judge,
        "options": list(options),
    }


def asked(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def turns_of(found: Any, field: str) -> list[dict[str, str]]:
    """Messages from a list of them, or from Arrow's form: a mapping of lists."""
    if isinstance(found, Mapping):
        found = [
            {"role": role, "content": content}
            for role, content in zip(found["role"], found["content"], strict=True)
        ]
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in found]
    if not messages or any(
        message["role"] not in SPEAKERS or not isinstance(message["content"], str)
        for message in messages
    ):
        raise ValueError(f"{field} is no conversation of system, user and assistant")
    return messages


def to_judge(template: str, fields: Mapping[str, str], expected: str | None = None) -> str:
    """What a judge needs to know; with ``expected``, its verdict must be that word."""
    if template not in TEMPLATES:
        raise ValueError(f"{template} is no kind of question that there is a judge prompt for")
    if expected not in (None, "yes", "no"):
        raise ValueError(f"{expected} is neither yes nor no")
    return json.dumps({"template": template, "fields": fields, "expected": expected})


# ---- data sets ----------------------------------------------------------------------------


def dataset(
    source: Source, fetch: Callable[[], Iterable[Record]], settings: Record
) -> dict[str, Any]:
    """The documents as a data set for lm-eval, with the single split "test".

    Args:
        source: How records become documents.
        fetch: Brings the records if there is no local file.
        settings: ``data``, local files by the task's name; ``draw``, the number of records in all,
            shared evenly by the strata, or none for every record in order.

    Raises:
        KVLingoError: A record lacks a field, there is no record, or ``draw`` is odd.
    """
    from datasets import Dataset

    file = (settings.get("data") or {}).get(source.name)
    where = f"{file or 'the data'}"
    records = list(enumerate(read_file(Path(file)) if file else fetch(), 1))
    if settings.get("draw") is not None:
        records = _drawn(source, records, settings["draw"], where)
    found = []
    for number, record in records:
        found += read_record(source.name, source.documents, number, record, where)
    if not found:
        raise KVLingoError(f"{where}: no question for the task {source.name} was found")
    return {"test": Dataset.from_list(found)}


def read_record(
    name: str, read: Callable[[Record], Any], number: int, record: Record, where: str
) -> Any:
    """What ``read`` makes of a record.

    Raises:
        KVLingoError: It is no record of the benchmark ``name``; says where it stands.
    """
    try:
        return read(record)
    except ODD as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise KVLingoError(
            f"record {number} of {where} is not a record of {name}: {what}"
        ) from None


def _drawn(
    source: Source, records: Sequence[tuple[int, Record]], count: Any, where: str
) -> list[tuple[int, Record]]:
    """The records that are drawn, each stratum's first one first, then each one's second.

    So any number of the first ones is spread over the strata, too.
    """
    if not isinstance(count, int) or count < 1:
        raise KVLingoError(f"draw is {count!r}; give a number of records, 1 or more")
    strata: dict[str, list[tuple[str, int, Record]]] = {}
    for number, record in records:
        if read_record(source.name, source.usable, number, record, where):
            key, stratum = (
                str(read_record(source.name, f, number, record, where))
                for f in (source.key, source.stratum)
            )
            strata.setdefault(stratum, []).append((ordered_by(source.name, key), number, record))
    each = -(-count // max(len(strata), 1))
    first = [sorted(strata[name], key=lambda row: row[:2])[:each] for name in sorted(strata)]
    rows = [row for rank in zip_longest(*first) for row in rank if row is not None]
    return [(number, record) for _, number, record in rows[:count]]


def ordered_by(*names: str) -> str:
    """A text by which things are sorted as if at random, always in the same way."""
    return hashlib.sha256("/".join((str(DRAWN_BY), *names)).encode()).hexdigest()


# ---- tokens -------------------------------------------------------------------------------


def counter(settings: Record) -> Callable[[str], int]:
    """A function that counts a text's tokens, by the ``tokenizer`` of the settings."""
    name = settings.get("tokenizer")
    if not name:
        raise KVLingoError("a task that counts tokens needs a tokenizer; give its folder or Hub id")

    def count(text: str) -> int:
        key = (str(name), hashlib.sha256(text.encode()).digest())  # the texts are long, and many
        if key not in _counted:
            _counted[key] = len(_tokenizer(str(name)).encode(text, add_special_tokens=False))
        return _counted[key]

    return count


_counted: dict[tuple[str, bytes], int] = {}  # the same sessions are read for every condition


@lru_cache
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


# ---- fetching -----------------------------------------------------------------------------


def read_file(path: Path) -> list[Any]:
    """The records of a JSON file: a list, one record per line, or a list under "data".

    Raises:
        KVLingoError: The file cannot be read, or holds no record.
    """
    try:
        found = _parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise KVLingoError(
            f"{path} cannot be read ({error}); give a JSON list of records, or one record a line"
        ) from None
    if not found:
        raise KVLingoError(f"{path} holds no records")
    return found


def _parse(text: str) -> list[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        # One a line. Not splitlines, which would also split at U+2028 inside a JSON string.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list):
        raise ValueError("it is neither a list nor an object with a list as data")
    return whole


def hub(path: str, split: str, revision: str | None = None, name: str | None = None) -> Any:
    """The records of a split of a Hub data set."""
    from datasets import load_dataset

    return load_dataset(path, name, split=split, revision=revision)


def hub_file(path: str, file: str) -> list[Record]:
    """The records of one file of a Hub data set."""
    from huggingface_hub import hf_hub_download

    return _parse(Path(hf_hub_download(path, file, repo_type="dataset")).read_text("utf-8"))


def download(url: str) -> list[Record]:
    """The records of a file elsewhere."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("offline (HF_HUB_OFFLINE)")
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return _parse(answer.read().decode("utf-8"))
