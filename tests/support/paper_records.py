"""A few records of each of the paper's benchmarks, in the public data sets' own schemas."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.lm_eval_tasks import MT_BENCH, QUAC, words

CATEGORIES = (
    "biology business chemistry computer_science economics engineering health history law math "
    "other philosophy physics psychology"
).split()
LANGUAGES = "en ar de el es hi ru th tr vi zh".split()


def mmlu_pro(each: int = 3) -> list[dict[str, Any]]:
    """Sorted by category, as the data set is; some questions have three options, some ten."""
    return [
        {"question_id": 100 * c + i, "question": f"Which {category} {i}?", "answer": "ABC"[i % 3],
         "options": [f"option {o}" for o in range(3 if i % 2 else 10)], "answer_index": i % 3,
         "cot_content": "", "category": category.replace("_", " "), "src": "x"}
        for c, category in enumerate(CATEGORIES) for i in range(each)
    ]  # fmt: skip


def arc() -> list[dict[str, Any]]:
    letters = {"text": ["cat", "dog", "cow", "hen"], "label": ["A", "B", "C", "D"]}
    return [
        {"id": "Mercury_1", "question": "Who barks?", "choices": letters, "answerKey": "B"},
        {"id": "NYSED_2", "question": "Who moos?", "answerKey": "3",
         "choices": {"text": letters["text"], "label": ["1", "2", "3", "4"]}},
        {"id": "MEA_3", "question": "Who crows?", "answerKey": "C",
         "choices": {"text": letters["text"][:3], "label": ["A", "B", "C"]}},
    ]  # fmt: skip


def longbench_v2(lengths: tuple[int, ...] = (20, 5000)) -> list[dict[str, Any]]:
    rng = random.Random(2)
    return [
        {"_id": f"66f{i}", "domain": "Single-Document QA", "sub_domain": "Legal",
         "difficulty": "hard", "length": "short", "question": " What is held? ",
         "choice_A": "one", "choice_B": "two", "choice_C": "three", "choice_D": "four",
         "answer": "D", "context": " ".join(words(rng, 2, 3) for _ in range(length))}
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def coqa() -> dict[str, Any]:
    """Its authors' file: an object with the conversations under "data"."""

    def turns(*texts: str) -> list[dict[str, Any]]:
        return [{"input_text": t, "span_start": 0, "turn_id": i} for i, t in enumerate(texts, 1)]

    return {"version": "1.0", "data": [
        {"source": "mctest", "id": f"c{i}", "filename": "a.txt", "story": "A white cat lived here.",
         "questions": turns("Who lived here?", "What colour was it?", "Was it a dog?"),
         "answers": turns("a cat", "white", "no"), "name": "a.txt",
         "additional_answers": {str(k): turns("cat", "It was white", text)
                                for k, text in enumerate(("No.", "not a dog", "no"))}}
        for i in range(5)
    ]}  # fmt: skip


def xquad(folder: Path, count: int = 6, missing: str = "") -> Path:
    """A file a language: English as SQuAD has it, the others as the Hub has them."""
    folder.mkdir(exist_ok=True)
    for language in LANGUAGES:
        rows = [
            {"id": f"q{i}", "context": f"{language} text {i} says blue {i}.",
             "question": f"{language} {i}?", "answers": {"text": [f"blue {i}"],
                                                         "answer_start": [0]}}
            for i in range(count) if f"{language}{i}" != missing
        ]  # fmt: skip
        if language == "en":
            nested = [{"title": "t", "paragraphs": [
                {"context": r["context"], "qas": [{"id": r["id"], "question": r["question"],
                 "answers": [{"text": t, "answer_start": 0} for t in r["answers"]["text"]]}]}
                for r in rows]}]  # fmt: skip
            (folder / "xquad.en.json").write_text(json.dumps({"version": "1", "data": nested}))
        else:
            text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            (folder / f"xquad.{language}.jsonl").write_text(text)
    return folder


def longmemeval(count: int = 3, sessions: int = 12, evidence: int = 2) -> list[dict[str, Any]]:
    """Histories of several sessions, of which the first ``evidence`` by id hold the answer."""
    rng = random.Random(4)
    kinds = ("multi-session", "temporal-reasoning", "knowledge-update")
    records = []
    for i in range(count):
        ids = [f"answer_{i}_{k}" if k < evidence else f"ultra_{i}_{k}" for k in range(sessions)]
        rng.shuffle(ids)
        records.append(
            {"question_id": f"q{i}" + ("_abs" if i == 2 else ""), "question_type": kinds[i % 3],
             "question": f"What number {i}?", "answer": i if i % 2 else f"number {i}",
             "question_date": "2023/05/30 (Tue) 23:40",
             "haystack_dates": [f"2023/05/{10 + k:02d} (Sat) 02:21" for k in range(sessions)],
             "haystack_session_ids": ids, "answer_session_ids": [x for x in ids if "answer" in x],
             "haystack_sessions": [
                 [{"role": "user", "content": f"<{name}> " + words(rng, 10, 40)},
                  {"role": "assistant", "content": words(rng, 10, 40)}] for name in ids]}
        )  # fmt: skip
    return records


def repliqa(count: int = 10) -> list[dict[str, Any]]:
    return [
        {"document_id": f"d{i // 5}", "document_topic": "News", "document_path": "x.pdf",
         "document_extracted": "Ann won.", "question_id": f"d{i // 5}-q{i}",
         "question": f"Who {i}?", "answer": "UNANSWERABLE" if i % 5 == 4 else "Ann.",
         "long_answer": "NA"}
        for i in range(count)
    ]  # fmt: skip


def multichallenge() -> list[dict[str, Any]]:
    """As its authors write it, and as the Hub has it."""
    said = [("user", "Be polite."), ("assistant", "Gladly."), ("user", "I like it."),
            ("assistant", "Good."), ("user", "Bye.")]  # fmt: skip
    return [
        {"QUESTION_ID": "m1", "AXIS": "SELF_COHERENCE", "TARGET_QUESTION": "Is it polite?",
         "PASS_CRITERIA": "YES", "CONVERSATION": [{"role": r, "content": c} for r, c in said]},
        {"question_id": "m2", "axis": "SELF_COHERENCE", "target_question": "Is it rude?",
         "pass_criteria": "NO", "num_turns": 1,
         "conversation": {"role": ["user"], "content": ["Bye."]}},
    ]  # fmt: skip


def quac(dialogues: int = 3, turns: int = 8) -> list[dict[str, Any]]:
    """Dialogues of eight turns, and the two-turn one."""
    many = [
        QUAC | {"dialogue_id": f"long{d}", "questions": [f"Question {t}?" for t in range(turns)],
                "answers": {"texts": [[f"answer {t}"] for t in range(turns)]},
                "orig_answers": {"texts": [f"answer {t}" for t in range(turns)]}}
        for d in range(dialogues)
    ]  # fmt: skip
    return [QUAC, *many]


def gsm8k() -> list[dict[str, Any]]:
    return [{"question": f"{i} and {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(4)]


def put(folder: Path, found: Mapping[str, Any]) -> dict[str, str]:
    """A file of each task's records, a line each, or of one JSON object."""
    files = {}
    for name, records in found.items():
        files[name] = str(folder / f"{name}.json")
        lines = "\n".join(json.dumps(record) for record in records)
        whole = isinstance(records, dict)
        Path(files[name]).write_text(json.dumps(records) if whole else lines)
    return files


def write(folder: Path) -> dict[str, str]:
    """A local file or folder for every task of the paper's suite, by the task's name."""
    found = {
        "mmlu_pro_written": mmlu_pro(), "arc_challenge_written": arc(),
        "longbench_v2_written": longbench_v2(), "coqa_last_turn": coqa(), "quac": quac(),
        "repliqa": repliqa(), "repliqa_facts": repliqa(), "repliqa_all": repliqa(),
        "mt_bench_101": MT_BENCH, "multichallenge": multichallenge(),
        "longmemeval_rungs": longmemeval(), "gsm8k": gsm8k(),
    }  # fmt: skip
    return put(folder, found) | {"xquad_languages": str(xquad(folder / "xquad"))}
