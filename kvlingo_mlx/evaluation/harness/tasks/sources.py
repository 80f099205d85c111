"""Records of each benchmark, from the Hub or a local file, as conversations to continue.

Each public function but :func:`read_file` is a task's ``custom_dataset``: lm-eval calls it with the
task's metadata and ``dataset_kwargs``. Every document has the same fields:

- ``id``, unique, and ``cluster``, shared by items whose scores belong together (error bars);
- ``subset``, the benchmark's own kind of question;
- ``messages``, the conversation to continue, and ``references``, answers to compare with;
- ``judge``, JSON with the prompt that judges the answer and the prompt's fields, or empty.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.harness.judge_prompts import TEMPLATES
from kvlingo_mlx.evaluation.harness.tasks.chat import transcript

Record = Mapping[str, Any]
Document = dict[str, Any]

QUAC_TURNS = 8  # turns used of a dialogue, as in the paper
QUAC_INSTRUCTION = (
    "Answer each question about the text with a short passage copied from it. If the text does "
    "not answer the question, reply CANNOTANSWER."
)
REPLIQA_INSTRUCTION = "Answer the question from the document alone, in one or two sentences."
LONGMEMEVAL_INSTRUCTION = (
    "Below are past chats between you and a user, oldest first. Use them to answer the question "
    "that follows."
)
# The benchmark does not judge a first turn that only sets the scene.
UNJUDGED_FIRST = ("AR", "CM", "CR", "FR", "SA", "SC")
WITH_REFERENCE = ("GR", "MR")
SECONDS = 30


def quac(*, path: str, revision: str, split: str, data: Record | None = None, **_: Any) -> Any:
    """QuAC's dialogues: each of the first turns is an item, after the true earlier answers."""
    return _dataset("quac", _quac, data, lambda: _hub(path, split, revision))


def mt_bench_101(*, url: str, data: Record | None = None, seed: int = 0, **_: Any) -> Any:
    """MT-Bench-101: one turn of each conversation, chosen by ``seed`` and the conversation."""
    return _dataset("mt_bench_101", lambda r: _mt_bench_101(r, seed), data, lambda: _download(url))


def longmemeval(*, path: str, file: str, data: Record | None = None, **_: Any) -> Any:
    """LongMemEval: the sessions by date as one text, then the question."""
    # `datasets` is not used: some answers are numbers, and Arrow does not mix them with text.
    return _dataset("longmemeval", _longmemeval, data, lambda: _hub_file(path, file))


def repliqa(*, path: str, split: str, rubric: str, data: Record | None = None, **_: Any) -> Any:
    """RepLiQA's answerable questions; ``rubric`` is "correct" or "facts"."""
    name = "repliqa_facts" if rubric == "facts" else "repliqa"
    return _dataset(name, lambda r: _repliqa(r, rubric), data, lambda: _hub(path, split))


def multichallenge(*, path: str, split: str, data: Record | None = None, **_: Any) -> Any:
    """MultiChallenge's conversations, each with a question that the judge answers."""
    return _dataset("multichallenge", _multichallenge, data, lambda: _hub(path, split))


# ---- records to documents -------------------------------------------------------------


def _quac(record: Record) -> list[Document]:
    text = record["context"].removesuffix("CANNOTANSWER").rstrip()
    head = f"{record['wikipedia_page_title']}: {record['section_title']}"
    messages = [{"role": "user", "content": f"{QUAC_INSTRUCTION}\n\n{head}\n\n{text}"}]
    documents = []
    questions = list(record["questions"])[:QUAC_TURNS]
    for turn, question in enumerate(questions):
        if turn == 0:
            messages[0]["content"] += f"\n\n{question}"
        else:
            messages.append({"role": "user", "content": question})
        documents.append(
            _document(
                f"{record['dialogue_id']}#{turn}",
                messages,
                cluster=record["dialogue_id"],
                subset=f"turn {turn + 1}",
                references=record["answers"]["texts"][turn],
            )
        )
        answer = record["orig_answers"]["texts"][turn]
        messages.append({"role": "assistant", "content": answer})
    return documents


def _mt_bench_101(record: Record, seed: int) -> list[Document]:
    task, turns = record["task"], record["history"]
    name = f"{task}-{record['id']}"
    first = 1 if task in UNJUDGED_FIRST and len(turns) > 1 else 0
    chosen = random.Random(f"mt_bench_101/{seed}/{name}").randrange(first, len(turns))
    messages = []
    for turn in turns[:chosen]:
        messages.append({"role": "user", "content": turn["user"]})
        messages.append({"role": "assistant", "content": turn["bot"]})
    messages.append({"role": "user", "content": turns[chosen]["user"]})
    fields = {"conversation": transcript(messages)}
    if task in WITH_REFERENCE:
        fields["reference"] = turns[chosen]["bot"]
    judge = _judge(f"mt_bench_101/{task}", fields)
    return [_document(name, messages, subset=task, references=[turns[chosen]["bot"]], judge=judge)]


def _longmemeval(record: Record) -> list[Document]:
    question, answer = record["question"], str(record["answer"])
    sessions = sorted(
        zip(record["haystack_dates"], record["haystack_sessions"], strict=True),
        key=lambda session: session[0],
    )
    chats = [
        f"Chat of {date}:\n\n{transcript(_turns(session, 'haystack_sessions'))}"
        for date, session in sessions
    ]
    text = "\n\n".join([LONGMEMEVAL_INSTRUCTION, *chats])
    text += f"\n\nToday is {record['question_date']}. Question: {question}"
    name = record["question_id"]
    kind = "abstention" if name.endswith("_abs") else record["question_type"]
    judge = _judge(f"longmemeval/{kind}", {"question": question, "reference": answer}, "yes")
    return [
        _document(
            name, [{"role": "user", "content": text}], subset=kind, references=[answer], judge=judge
        )
    ]


def _repliqa(record: Record, rubric: str) -> list[Document]:
    question, answer = record["question"], record["answer"]
    if answer.strip().upper() == "UNANSWERABLE":
        return []
    text = f"{REPLIQA_INSTRUCTION}\n\n{record['document_extracted']}\n\nQuestion: {question}"
    fields = {"question": question, "reference": answer}
    judge = _judge(f"repliqa/{rubric}", fields, "yes" if rubric == "correct" else None)
    return [
        _document(
            record["question_id"],
            [{"role": "user", "content": text}],
            cluster=record["document_id"],
            subset=record["document_topic"],
            references=[answer],
            judge=judge,
        )
    ]


def _multichallenge(record: Record) -> list[Document]:
    # The benchmark's repository writes field names in capitals, the Hub does not.
    record = {key.lower(): value for key, value in record.items()}
    messages = _turns(record["conversation"], "conversation")
    judge = _judge(
        "multichallenge",
        {"criterion": record["target_question"]},
        record["pass_criteria"].strip().lower(),
    )
    name = str(record["question_id"])
    return [_document(name, messages, subset=record["axis"], references=[], judge=judge)]


def _turns(turns: Any, name: str) -> list[dict[str, str]]:
    """The messages in a list of them or, as `datasets` stores them, in a dict of lists."""
    if isinstance(turns, Mapping):
        turns = [
            {"role": role, "content": content}
            for role, content in zip(turns["role"], turns["content"], strict=True)
        ]
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    if not messages or any(m["role"] not in ("system", "user", "assistant") for m in messages):
        raise ValueError(f"{name} is no conversation of users and assistants")
    return messages


def _judge(template: str, fields: dict[str, str], expected: str | None = None) -> str:
    if template not in TEMPLATES:
        raise ValueError(f"{template} is no kind of question that there is a judge prompt for")
    if expected not in (None, "yes", "no"):
        raise ValueError(f"{expected} is neither yes nor no")
    return json.dumps({"template": template, "fields": fields, "expected": expected})


def _document(
    name: str,
    messages: Sequence[dict[str, str]],
    *,
    subset: str,
    references: Sequence[str],
    cluster: str | None = None,
    judge: str = "",
) -> Document:
    return {
        "id": name,
        "cluster": cluster or name,
        "subset": subset,
        "messages": [dict(message) for message in messages],
        "references": list(references),
        "judge": judge,
    }


# ---- fetching records -------------------------------------------------------------------


def _dataset(
    name: str,
    documents: Callable[[Record], list[Document]],
    data: Record | None,
    fetch: Callable[[], Iterable[Record]],
) -> dict[str, Any]:
    """The documents as a data set for lm-eval, with the single split "test".

    Raises:
        KVLingoError: A record lacks a field, or there is no record.
    """
    from datasets import Dataset

    file = (data or {}).get(name)
    found = []
    for number, record in enumerate(read_file(Path(file)) if file else fetch(), 1):
        try:
            found += documents(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise KVLingoError(
                f"record {number} of {file or 'the data'} is not a record of {name}: {what}"
            ) from None
    if not found:
        raise KVLingoError(f"{file or 'the data'}: no question for the task {name} was found")
    return {"test": Dataset.from_list(found)}


def read_file(path: Path) -> list[Record]:
    """The records of a JSON file: one list, or one record per line.

    Raises:
        KVLingoError: The file cannot be read.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KVLingoError(
            f"{path} cannot be read ({error}); give a JSON list of records, or one record a line"
        ) from None


def _parse(text: str) -> list[Record]:
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _hub(path: str, split: str, revision: str | None = None) -> Iterable[Record]:
    from datasets import load_dataset

    return load_dataset(path, split=split, revision=revision)


def _hub_file(path: str, file: str) -> list[Record]:
    from huggingface_hub import hf_hub_download

    return _parse(Path(hf_hub_download(path, file, repo_type="dataset")).read_text("utf-8"))


def _download(url: str) -> list[Record]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("offline (HF_HUB_OFFLINE)")
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return _parse(answer.read().decode("utf-8"))
