"""Each benchmark's records as conversations to continue; its choices are in :mod:`.choices`.

Each public function is a task's ``custom_dataset``: lm-eval calls it with the task's metadata and
``dataset_kwargs``. :mod:`.records` says what a document is, and how some of them are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.paper.tasks import QUAC_INSTRUCTION, QUAC_TURNS
from benchmarks.paper.tasks.records import (
    Document,
    Record,
    Source,
    asked,
    dataset,
    document,
    download,
    hub,
    read_file,
    to_judge,
    transcript,
    turns_of,
)
from kvlingo_mlx.errors import KVLingoError

COQA_INSTRUCTION = (
    "Answer each question about the text as briefly as possible, in a few words at most."
)
XQUAD_INSTRUCTION = "Answer the question with a short passage copied from the text."
LANGUAGES = ("en", "ar", "de", "el", "es", "hi", "ru", "th", "tr", "vi", "zh")  # the first, XQuAD's
REPLIQA_INSTRUCTION = "Answer the question from the document alone, in one or two sentences."
# The benchmark does not judge a first turn that only sets the scene.
UNJUDGED_FIRST = ("AR", "CM", "CR", "FR", "SA", "SC")
WITH_REFERENCE = ("GR", "MR")


def quac(*, path: str, revision: str, split: str, **settings: Any) -> Any:
    """QuAC's dialogues: each of the first turns is an item, after the true earlier answers."""
    source = Source("quac", _quac, _field("dialogue_id"), usable=_is_long)
    return dataset(source, lambda: hub(path, split, revision), settings)


def coqa(*, url: str, **settings: Any) -> Any:
    """CoQA's conversations: the last turn of each, after the true earlier answers."""
    source = Source("coqa_last_turn", _coqa, lambda r: str(r.get("id") or r["story"]))
    return dataset(source, lambda: download(url), settings)


def xquad(*, path: str, split: str, data: Record | None = None, **settings: Any) -> Any:
    """XQuAD: the questions that every language has, in each of its eleven languages.

    A local folder holds ``xquad.de.json`` or ``xquad.de.jsonl``, and so on.
    """
    folder = (data or {}).get("xquad_languages")

    def fetch() -> list[Record]:
        if folder is not None:
            return _parallel({language: _xquad_file(folder, language) for language in LANGUAGES})
        return _parallel({x: hub(path, split, name=f"xquad.{x}") for x in LANGUAGES})

    source = Source("xquad_languages", _xquad, _field("id"))
    return dataset(source, fetch, settings)


def mt_bench_101(*, url: str, seed: int = 0, **settings: Any) -> Any:
    """MT-Bench-101: one turn of each conversation, chosen by ``seed`` and the conversation."""
    read = partial(_mt_bench_101, seed=seed)
    source = Source("mt_bench_101", read, lambda r: f"{r['task']}-{r['id']}")
    return dataset(source, lambda: download(url), settings)


def repliqa(*, path: str, split: str, rubric: str, name: str = "repliqa", **settings: Any) -> Any:
    """RepLiQA's questions; ``rubric`` is "correct" or "facts", on those that can be answered.

    With the rubric "all" the others are asked too, and the right answer is that there is none.
    """
    source = Source(name, partial(_repliqa, rubric=rubric), _field("question_id"))
    return dataset(source, lambda: hub(path, split), settings)


def multichallenge(*, path: str, split: str, **settings: Any) -> Any:
    """MultiChallenge's conversations, each with a question that the judge answers."""
    source = Source("multichallenge", _multichallenge, lambda r: _lower(r)["question_id"])
    return dataset(source, lambda: hub(path, split), settings)


# ---- records to documents -------------------------------------------------------------


def _field(name: str) -> Any:
    return lambda record: record[name]


def _lower(record: Record) -> Record:
    # MultiChallenge's repository writes field names in capitals, the Hub does not.
    return {key.lower(): value for key, value in record.items()}


def _is_long(record: Record) -> bool:
    """Whether a dialogue has all the turns, so that every turn is scored on the same dialogues."""
    return len(record["questions"]) >= QUAC_TURNS


def _quac(record: Record) -> list[Document]:
    text = record["context"].removesuffix("CANNOTANSWER").rstrip()
    head = f"{record['wikipedia_page_title']}: {record['section_title']}"
    messages = asked(f"{QUAC_INSTRUCTION}\n\n{head}\n\n{text}")
    documents = []
    questions = list(record["questions"])[:QUAC_TURNS]
    for turn, question in enumerate(questions):
        if turn == 0:
            messages[0]["content"] += f"\n\n{question}"
        else:
            messages += asked(question)
        documents.append(
            document(
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


def _coqa(record: Record) -> list[Document]:
    questions, answers = _texts(record["questions"]), _texts(record["answers"])
    if not questions or len(questions) != len(answers):
        raise ValueError(f"{len(questions)} questions and {len(answers)} answers")
    messages = asked(f"{COQA_INSTRUCTION}\n\n{record['story']}\n\n{questions[0]}")
    for answer, question in zip(answers[:-1], questions[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages += asked(question)
    more = (record.get("additional_answers") or {}).values()
    references = [answers[-1], *(_texts(found)[-1] for found in more)]
    name = str(record.get("id") or record["story"][:80])
    return [document(name, messages, subset=str(record.get("source")), references=references)]


def _texts(found: Any) -> list[str]:
    """Texts of CoQA's turns: a list of them, of turns, or the Hub's mapping of lists."""
    if isinstance(found, Mapping):
        found = found["input_text"]
    return [str(each["input_text"] if isinstance(each, Mapping) else each) for each in found]


def _xquad(record: Record) -> list[Document]:
    return [
        document(
            f"{language}/{record['id']}",
            asked(f"{XQUAD_INSTRUCTION}\n\n{each['context']}\n\nQuestion: {each['question']}"),
            cluster=record["id"],
            subset=language,
            references=[str(text) for text in _answers(each["answers"])],
        )
        for language, each in record["languages"].items()
    ]


def _answers(found: Any) -> list[str]:
    """SQuAD's answers: a list of mappings, or the Hub's mapping of lists."""
    texts = found["text"] if isinstance(found, Mapping) else [each["text"] for each in found]
    if not texts:
        raise ValueError("a question has no answer")
    return list(texts)


def _parallel(languages: Mapping[str, Iterable[Record]]) -> list[Record]:
    """One record for each question that every language has, in English's order."""
    by_id = {name: {str(r["id"]): r for r in rows} for name, rows in languages.items()}
    shared = set.intersection(*(set(rows) for rows in by_id.values()))
    return [
        {"id": key, "languages": {name: rows[key] for name, rows in by_id.items()}}
        for key in by_id[LANGUAGES[0]]
        if key in shared
    ]


def _xquad_file(folder: str, language: str) -> list[Record]:
    """The questions of a language: SQuAD's nested form, or one record a question, as the Hub's."""
    names = [Path(folder) / f"xquad.{language}.{end}" for end in ("json", "jsonl")]
    path = next((name for name in names if name.is_file()), None)
    if path is None:
        raise KVLingoError(
            f"{folder} has no {names[0].name} or {names[1].name}; xquad_languages is a folder with "
            f"a file for each of {', '.join(LANGUAGES)}"
        )
    try:
        return [question for record in read_file(path) for question in _questions(record)]
    except (KeyError, TypeError) as error:
        raise KVLingoError(f"{path} is no file of XQuAD: {error} is missing") from None


def _questions(record: Record) -> list[Record]:
    if "paragraphs" not in record:
        return [{**record, "id": str(record["id"])}]
    return [
        {**question, "id": str(question["id"]), "context": paragraph["context"]}
        for paragraph in record["paragraphs"]
        for question in paragraph["qas"]
    ]


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
    judge = to_judge(f"mt_bench_101/{task}", fields)
    return [document(name, messages, subset=task, references=[turns[chosen]["bot"]], judge=judge)]


def _repliqa(record: Record, rubric: str) -> list[Document]:
    question, answer = record["question"], record["answer"]
    without = answer.strip().upper() == "UNANSWERABLE"
    if without and rubric != "all":
        return []
    text = f"{REPLIQA_INSTRUCTION}\n\n{record['document_extracted']}\n\nQuestion: {question}"
    kind = "correct" if rubric == "all" else rubric
    kind, fields = "unanswerable" if without else kind, {"question": question, "reference": answer}
    judge = to_judge(f"repliqa/{kind}", fields, None if kind == "facts" else "yes")
    return [
        document(
            record["question_id"],
            asked(text),
            cluster=record["document_id"],
            subset=record["document_topic"],
            references=[answer],
            judge=judge,
        )
    ]


def _multichallenge(record: Record) -> list[Document]:
    record = _lower(record)
    judge = to_judge(
        "multichallenge",
        {"criterion": record["target_question"]},
        record["pass_criteria"].strip().lower(),
    )
    return [
        document(
            str(record["question_id"]),
            turns_of(record["conversation"], "conversation"),
            subset=record["axis"],
            references=[],
            judge=judge,
        )
    ]
