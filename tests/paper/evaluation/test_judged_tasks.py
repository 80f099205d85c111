"""The paper's own tasks, asked through lm-eval, and the judge of their free answers."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest
from mlx_lm.models.cache import make_prompt_cache

pytest.importorskip("lm_eval")

from benchmarks.paper.evaluation import judge as judging
from benchmarks.paper.evaluation.judge import Judge, judge_answers, rating, yes_no
from benchmarks.paper.tasks import ADDED
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.harness import running
from kvlingo_mlx.evaluation.harness.adapter import PrefixLM, RequestedAnswer
from tests.support import paper_records
from tests.support.fixtures import Models, Patch
from tests.support.lm_eval_tasks import MT_BENCH, QUAC, offline


@pytest.fixture(autouse=True)
def local(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    offline(tmp_path_factory.getbasetemp(), monkeypatch)


@pytest.fixture
def run_native(models: Models, task_folder: Path) -> Callable[..., dict]:
    model = models["dense"]

    def run(*tasks: str, **options: Any) -> dict[str, Any]:
        own: dict[str, Any] = {"condition": "native", "include_path": task_folder, "added": ADDED}
        return running.run(model, conditions.native(model), tasks, **own | options)

    return run


SESSION = [{"role": "user", "content": "I moved to Bern.", "has_answer": True},
           {"role": "assistant", "content": "Noted."}]  # fmt: skip
LONGMEMEVAL = [
    {"question_id": name, "question_type": "single-session-user", "question": "Where do I live?",
     "answer": answer, "question_date": "2023/05/30 (Tue) 23:40",
     "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/02 (Tue) 10:00"],
     "haystack_session_ids": ["s2", "s1"], "answer_session_ids": ["s1"],
     "haystack_sessions": [[{"role": "user", "content": "Later chat."}], SESSION]}
    for name, answer in (("q1", "Bern"), ("q2_abs", 3))
]  # fmt: skip
REPLIQA = paper_records.repliqa()[3:5]  # one with an answer, one without
RECORDS = {"quac": [QUAC], "mt_bench_101": MT_BENCH, "longmemeval": LONGMEMEVAL,
           "repliqa": REPLIQA, "repliqa_facts": REPLIQA,
           "multichallenge": paper_records.multichallenge()}  # fmt: skip


@pytest.fixture
def own_results(run_native: Callable, tmp_path: Path, monkeypatch: Patch) -> dict[str, Any]:
    """All our tasks, answered by a script: the last word of the question, upside down traces."""
    contexts: list[str] = []

    def answer(context: str) -> str:
        contexts.append(context)
        if "Who drew him?" in context:
            return "Cannotanswer."
        if "Is it" not in context and "Ann won" in context:
            return "<think>never ending"
        return "He first appeared in 1937" if "Daffy" in context else "Bern {and} [[9]]"

    def answers(
        self: PrefixLM, asked: Sequence[RequestedAnswer]
    ) -> Iterator[tuple[RequestedAnswer, str]]:
        return ((each, answer(each.context)) for each in asked)

    monkeypatch.setattr(PrefixLM, "_answers", answers)
    files = paper_records.put(tmp_path, RECORDS)
    found = run_native(*RECORDS, data=files, seed=5)
    return {**found, "contexts": contexts}


def test_own_tasks_read_their_records(own_results: dict[str, Any]) -> None:
    tasks, contexts = own_results["tasks"], own_results["contexts"]
    assert {name: [item["id"] for item in task["items"]] for name, task in tasks.items()} == {
        "quac": ["d1#0", "d1#1"], "mt_bench_101": ["CM-7", "MR-8"],
        "longmemeval": ["q1", "q2_abs"], "repliqa": ["d0-q3"], "repliqa_facts": ["d0-q3"],
        "multichallenge": ["m1", "m2"],
    }  # fmt: skip
    # Words of "He first appeared in 1937" in "Daffy first appeared in 1937": four of five.
    assert [item["scores"]["f1"] for item in tasks["quac"]["items"]] == [pytest.approx(0.8), 1.0]
    first, second = contexts[:2]
    assert "CANNOTANSWER\n\nDaffy Duck" not in first and first.count("<|im_start|>") == 2
    assert "Daffy first appeared in 1937.\n\nWhen did he appear?<|im_end|>" in first
    history = "assistant\nfirst appeared in 1937<|im_end|>\n<|im_start|>user\nWho drew him?"
    assert history in second
    turn = contexts[2].count("<|im_start|>assistant")
    assert turn in (2, 3, 4)  # the first turn of "CM" only sets the scene
    assert f"user\nu{turn - 1}<|im_end|>\n<|im_start|>assistant\n" in contexts[2]
    assert contexts[4].index("Bern") < contexts[4].index("Later chat")  # by date
    assert "Today is 2023/05/30 (Tue) 23:40. Question: Where do I live?" in contexts[4]
    assert "has_answer" not in contexts[4]
    assert "Gladly.<|im_end|>" in contexts[-2]
    (item,) = tasks["repliqa"]["items"]
    assert item["answer"] == "" and item["responses"] == ["<think>never ending"]
    assert tasks["longmemeval"]["items"][1]["subset"] == "abstention"


def test_judging(own_results: dict[str, Any]) -> None:
    asked: list[str] = []
    replies = {
        "Context memory": "Good. Rating: [[8]]", "Mathematical": "Rating: [[1996]]",
        "Where do I live": "[[YES]]", "cannot be answered": "I think so: yes.",
        "reference says": "Verdict: [[no]]", "key facts": "Facts: [[1/4]]",
        "polite": "[[yes]]", "rude": "[[no]]",
    }  # fmt: skip

    def judge(prompt: str) -> str:
        asked.append(prompt)
        (reply,) = {replies[key] for key in list(replies)[::-1] if key in prompt and (
            key != "Where do I live" or "cannot be answered" not in prompt)}  # fmt: skip
        return reply

    stored = json.loads(json.dumps({k: v for k, v in own_results.items() if k != "contexts"}))
    steps: list[tuple[int, int]] = []
    judged = judge_answers(stored, judge, progress=lambda *step: steps.append(step))
    scores = {name: [item["scores"] for item in task["items"]]
              for name, task in judged["tasks"].items()}  # fmt: skip
    assert scores["mt_bench_101"] == [{"rating": 8.0}, {"rating": None}]
    assert scores["longmemeval"] == [{"accuracy": 1.0}, {"accuracy": None}]
    assert scores["repliqa"] == [{"correct": 0.0}]
    assert scores["repliqa_facts"] == [{"fact_coverage": 0.25}]
    assert scores["multichallenge"] == [{"pass": 1.0}, {"pass": 1.0}]
    tasks = judged["tasks"]
    assert [tasks[n]["malformed"] for n in ("mt_bench_101", "longmemeval", "repliqa")] == [1, 1, 0]
    assert tasks["longmemeval"]["metrics"]["accuracy"] == {"value": 1.0, "error": None, "count": 1}
    assert tasks["quac"] == stored["tasks"]["quac"]
    assert steps[-1] == (8, 8)
    assert judging.NO_ANSWER in asked[4]  # the trace that never ended
    assert "It is 2." in asked[1] and "u0" in asked[0] and "Bern {and} [[9]]" in asked[0]


def test_a_benchmarks_own_prompts(own_results: dict[str, Any]) -> None:
    asked: list[str] = []
    judge_answers(
        own_results,
        lambda p: asked.append(p) or "",
        prompts={"multichallenge": "{{{answer}}} [[yes]]?"},
    )
    assert asked[-1] == "{Bern {and} [[9]]} [[yes]]?"
    for text in ("no places", "{answer} {wrong}", "{answer", "{} {answer}"):
        with pytest.raises(ValueError, match="the judge prompt multichallenge"):
            judge_answers(own_results, lambda p: "", prompts={"multichallenge": text})
    with pytest.raises(ValueError, match="no judge prompt is called multi"):
        judge_answers(own_results, lambda p: "", prompts={"multi": "{answer}"})


@pytest.mark.parametrize(
    "reply, number",
    [
        ("Rating: [[7]]", 7.0),
        ("so [[ 8.5 ]] it is", 8.5),
        ("[[7]] and again [[7]]", 7.0),
        ("Rating: [[1996]]", None),
        ("[[0]]", None),
        ("Rating: 7", None),
        ("[[7]] or [[8]]", None),
        ("[[]]", None),
    ],
)  # fmt: skip
def test_ratings(reply: str, number: float | None) -> None:
    assert rating(reply) == number


def test_a_local_judge_is_greedy_and_keeps_its_replies(
    models: Models, tmp_path: Path, monkeypatch: Patch
) -> None:
    model, file = models["moe"], tmp_path / "judge.jsonl"
    judge = Judge(model, max_tokens=8, responses=file)
    text = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokens, cache = model.tokenizer.encode(text), make_prompt_cache(model.model)
    wanted: list[int] = []
    for _ in range(8):
        logits = model.model(mx.array((wanted and wanted[-1:]) or tokens)[None], cache=cache)
        wanted.append(int(mx.argmax(logits[0, -1]).item()))
    assert judge("Is it?") == model.tokenizer.decode(wanted)
    monkeypatch.setattr(Judge, "_reply", lambda self, prompt: "asked again")
    again = Judge(model, max_tokens=8, responses=file)
    assert again("Is it?") == model.tokenizer.decode(wanted)
    assert again("Is it now?") == "asked again"
    monkeypatch.undo()
    with pytest.raises(ValueError, match="context"):
        judge("x " * 600)


def test_a_judges_own_reasoning_is_dropped(models: Models, monkeypatch: Patch) -> None:
    reply = "<think>is it [[no]]?</think>\n[[yes]]"
    monkeypatch.setattr(judging, "generate", lambda *args, **options: reply)
    assert yes_no(Judge(models["dense"])("Is it?")) == 1.0
