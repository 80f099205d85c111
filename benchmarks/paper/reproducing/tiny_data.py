"""Tiny data in the schemas of the paper's benchmarks, made of the zoo's dialogues.

The facts of a dialogue are the document, its questions the questions. So the zoo's models can
answer some of them, and a cache that lost the document answers none.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.tasks.sources import LANGUAGES
from kvlingo_mlx.embedded.dialogues import ANSWER, VALUES, Dialogue, Fact, held_out

TALKS, SEED, TURNS = 8, 11, 8
FOLDER = "benchmarks"
Records = list[dict[str, Any]]


def written(work: Work) -> dict[str, str]:
    """Write records for every benchmark; files, or folders with a file for each split, by task."""
    talks = list(held_out(TALKS, seed=SEED, questions=TURNS))
    found = {
        name: _file(work, f"{name}.jsonl", [make(t, n) for n, t in enumerate(talks)])
        for name, make in CHATS.items()
    }
    others = [*talks[1:], talks[0]]
    memories = [_memory(*both, n) for n, both in enumerate(zip(talks, others, strict=True))]
    found["longmemeval_rungs"] = _file(work, "longmemeval_rungs.jsonl", memories)
    rows = [row for n, t in enumerate(talks) for row in _repliqa(t, n)]
    for name in ("repliqa", "repliqa_facts", "repliqa_all"):
        found[name] = _file(work, "repliqa.jsonl", rows)
    for language in LANGUAGES:
        _file(work, f"xquad/xquad.{language}.jsonl", [_squad(t, n) for n, t in enumerate(talks)])
    found["xquad_languages"] = str(work.room / FOLDER / "xquad")
    shown = list(held_out(TALKS, seed=SEED + 1, questions=TURNS))
    for name, make in SPLIT.items():
        for split, these in (("train", shown), ("validation", talks), ("test", talks)):
            _file(work, f"{name}/{split}.jsonl", [make(t, n) for n, t in enumerate(these)])
        found[name] = str(work.room / FOLDER / name)
    return found


def _file(work: Work, name: str, records: Records) -> str:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return str(work.write(f"{FOLDER}/{name}", "".join(lines)).resolve())


# ---- a dialogue as a record of each data set --------------------------------------------------


def _story(talk: Dialogue) -> str:
    """The document: all that tells facts."""
    return "\n".join(m["content"] for m in talk.messages[:-1] if m["role"] == "user")


def _choices(fact: Fact) -> list[str]:
    """The right value among three others of its kind, in the order of the alphabet."""
    others = [value for value in VALUES[fact.attribute] if value != fact.value][:3]
    return sorted([fact.value, *others])


def _coqa(talk: Dialogue, number: int) -> dict[str, Any]:
    return {
        "source": "zoo",
        "id": f"c{number}",
        "story": _story(talk),
        "questions": [{"input_text": q, "turn_id": i} for i, q in enumerate(talk.questions, 1)],
        "answers": [
            {"input_text": fact.say(ANSWER), "turn_id": i} for i, fact in enumerate(talk.asked, 1)
        ],
        "additional_answers": {},
    }


def _quac(talk: Dialogue, number: int) -> dict[str, Any]:
    values = [fact.say(ANSWER) for fact in talk.asked]
    return {
        "dialogue_id": f"d{number}",
        "wikipedia_page_title": "People",
        "section_title": "Facts",
        "context": f"{_story(talk)} CANNOTANSWER",
        "questions": list(talk.questions),
        "answers": {"texts": [[value] for value in values]},
        "orig_answers": {"texts": values},
    }


def _mmlu_pro(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    options = _choices(fact)
    return {
        "question_id": number,
        "question": f"{_story(talk)}\n{talk.questions[0]}",
        "options": options,
        "answer": "ABCD"[options.index(fact.value)],
        "category": ("law", "health")[number % 2],
    }


def _arc(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    options = _choices(fact)
    return {
        "id": f"a{number}",
        "question": f"{_story(talk)}\n{talk.questions[0]}",
        "choices": {"text": options, "label": list("ABCD")},
        "answerKey": "ABCD"[options.index(fact.value)],
    }


def _longbench(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    options = _choices(fact)
    return {
        "_id": f"b{number}",
        "length": "short",
        "context": _story(talk),
        "question": talk.questions[0],
        **{f"choice_{letter}": option for letter, option in zip("ABCD", options, strict=True)},
        "answer": "ABCD"[options.index(fact.value)],
    }


def _memory(talk: Dialogue, other: Dialogue, number: int) -> dict[str, Any]:
    """A history of which the first session holds the answer, and the second does not."""
    sessions = [[{"role": "user", "content": _story(each)}] for each in (talk, other)]
    names = [f"answer_{number}", f"other_{number}"]
    return {
        "question_id": f"q{number}",
        "question_type": "single-session-user",
        "question": talk.questions[0],
        "answer": talk.asked[0].value,
        "question_date": "2023/05/30 (Tue) 23:40",
        "haystack_dates": [f"2023/05/{day} (Sat) 02:21" for day in (10, 11)],
        "haystack_session_ids": names,
        "answer_session_ids": names[:1],
        "haystack_sessions": sessions,
    }


def _mt_bench(talk: Dialogue, number: int) -> dict[str, Any]:
    turns = zip(talk.questions, talk.asked, strict=True)
    history = [{"user": question, "bot": fact.value} for question, fact in turns]
    history[0]["user"] = f"{_story(talk)}\n{history[0]['user']}"
    return {"id": number, "task": ("CM", "GR")[number % 2], "history": history[:3]}


def _multichallenge(talk: Dialogue, number: int) -> dict[str, Any]:
    return {
        "QUESTION_ID": f"m{number}",
        "AXIS": "INFERENCE_MEMORY",
        "CONVERSATION": [dict(message) for message in talk.messages],
        "TARGET_QUESTION": f"Does the response say {talk.asked[0].value}?",
        "PASS_CRITERIA": "YES",
    }


def _repliqa(talk: Dialogue, number: int) -> Records:
    """Two questions of a document, of which the second has no answer."""
    document = {
        "document_id": f"d{number}",
        "document_topic": "News",
        "document_extracted": _story(talk),
    }
    asked = ((talk.questions[0], talk.asked[0].value), ("Who won?", "UNANSWERABLE"))
    return [
        {**document, "question_id": f"d{number}-{place}", "question": question, "answer": answer}
        for place, (question, answer) in enumerate(asked)
    ]


def _squad(talk: Dialogue, number: int) -> dict[str, Any]:
    text = _story(talk)
    value = talk.asked[0].value
    return {
        "id": f"s{number}",
        "context": text,
        "question": talk.questions[0],
        "answers": {"text": [value], "answer_start": [text.index(value)]},
    }


def _hellaswag(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    endings = _choices(fact)
    return {
        "activity_label": "Facts",
        "ctx_a": _story(talk),
        "ctx_b": f"the {fact.attribute} of {fact.name} is",
        "endings": endings,
        "label": str(endings.index(fact.value)),
    }


def _piqa(talk: Dialogue, number: int) -> dict[str, Any]:
    asked = _winogrande(talk, number)
    goal, label = f"{_story(talk)}\n{talk.questions[0]}", int(asked["answer"]) - 1
    return {"goal": goal, "sol1": asked["option1"], "sol2": asked["option2"], "label": label}


def _gsm8k(talk: Dialogue, number: int) -> dict[str, Any]:
    """A number to read off: the digit of a code."""
    fact = next((f for f in talk.facts if f.attribute in ("code", "key")), talk.asked[0])
    digits = "".join(c for c in fact.value if c.isdigit()) or "0"
    question = f"{_story(talk)}\nWhat is the {fact.attribute} of {fact.name}?"
    return {"question": question, "answer": f"It is {fact.value}.\n#### {digits}"}


def _ifeval(talk: Dialogue, number: int) -> dict[str, Any]:
    return {
        "key": number,
        "prompt": f"{talk.questions[0]} Answer without any comma.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }


def _boolq(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    said = fact.value if number % 2 else _choices(fact)[0]
    question = f"is the {fact.attribute} of {fact.name} {said}"
    return {"passage": _story(talk), "question": question, "label": int(said == fact.value)}


def _winogrande(talk: Dialogue, number: int) -> dict[str, Any]:
    fact = talk.asked[0]
    options = [fact.value, next(v for v in _choices(fact) if v != fact.value)]
    right = number % 2
    ordered = options if right == 0 else options[::-1]
    return {
        "sentence": f"{_story(talk)} The {fact.attribute} of {fact.name} is _.",
        "option1": ordered[0],
        "option2": ordered[1],
        "answer": str(right + 1),
    }


CHATS = {
    "coqa_last_turn": _coqa,
    "quac": _quac,
    "mmlu_pro_written": _mmlu_pro,
    "arc_challenge_written": _arc,
    "longbench_v2_written": _longbench,
    "mt_bench_101": _mt_bench,
    "multichallenge": _multichallenge,
}
SPLIT = {  # tasks that lm-eval reads, some of which show examples
    "gsm8k": _gsm8k,
    "ifeval": _ifeval,
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "squad_v1": _squad,
    "boolq": _boolq,
    "winogrande": _winogrande,
}
