"""The paper's benchmarks as tasks: records, draws, rungs, and what is read from an answer."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.errors import KVLingoError

pytest.importorskip("lm_eval")

from benchmarks.paper.tasks import CHATS, NAMES, QUESTION_AT, choices, memory, scoring, sources
from tests.support import paper_records

HUB: dict[str, Any] = {"path": "nowhere", "split": "test"}
FILE: dict[str, Any] = {"path": "nowhere", "file": "none"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return paper_records.write(tmp_path)


def read(task: Callable[..., Any], **options: Any) -> list[dict[str, Any]]:
    return list(task(**options)["test"])


def test_multiple_choice_records(files: dict[str, str]) -> None:
    found = read(choices.mmlu_pro, data=files, **HUB)
    assert len(found) == 42 and found[0]["subset"] == "biology"
    text = found[1]["messages"][0]["content"]
    assert text.startswith("Which biology 1?\n\nA. option 0\nB. option 1\nC. option 2\n\n")
    assert found[0]["messages"][0]["content"].count("\n") == 1 + 10 + 2
    assert [d["references"] for d in found[:3]] == [["A"], ["B"], ["C"]]
    found = read(choices.arc, name="ARC-Challenge", data=files, **HUB)
    assert [(d["id"], d["references"][0], len(d["options"])) for d in found] == [
        ("Mercury_1", "B", 4), ("NYSED_2", "C", 4), ("MEA_3", "C", 3)]  # fmt: skip


COUNT = {"tokenizer": str(zoo("tiny-qwen3-l"))}


def test_long_documents_are_left_out_by_the_targets_tokens(files: dict[str, str]) -> None:
    short, long = 2000, 40_000
    kept = {n: [d["id"] for d in read(choices.longbench_v2, data=files, longest=n, **HUB, **COUNT)]
            for n in (short, long)}  # fmt: skip
    assert kept == {short: ["66f0"], long: ["66f0", "66f1"]}
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(COUNT["tokenizer"]).encode
    both = read(choices.longbench_v2, data=files, longest=long, **HUB, **COUNT)
    exact = len(encode(both[1]["messages"][0]["content"]))
    for longest, count in ((exact, 2), (exact - 1, 1)):  # the bound itself fits
        assert len(read(choices.longbench_v2, data=files, longest=longest, **HUB, **COUNT)) == count
    with pytest.raises(KVLingoError, match="needs a tokenizer"):
        read(choices.longbench_v2, data=files, **HUB)


FOUR = ["cat", "dog", "cow", "hen"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is (B)", "B"),
        ("**Answer: C**", "C"),
        ("Answer: **(D)**", "D"),
        ("B", "B"),
        ("**B. dog**", "B"),
        ("The answer is $\\boxed{C}$", "C"),
        ("The answer is (A). No: the answer is (C).", "C"),
        ("Option A is wrong, option B as well.\nThe answer is (D)", "D"),
        ("<think>the answer is A</think>The answer is (C)", "C"),
        ("Option A is wrong.\n\nB", "B"),
        ("Answer B is wrong.\n(A)", "A"),
        ("<think>\nthe answer is (B), or", None),
        ("E", None),
        ("The answer is (J)", None),
        ("I think so", None),
        ("cat dog", None),
        ("The answer is not B", None),
    ],
)  # fmt: skip
def test_letters(text: str, found: str | None) -> None:
    assert choices.letter(text, FOUR) == found
    doc = {"options": FOUR, "references": ["B"]}
    assert choices.scored(doc, [text]) == {
        "acc": float(found == "B"), "parsed": float(found is not None)}  # fmt: skip


def test_a_text_that_two_options_share_is_no_choice() -> None:
    assert choices.letter("same", ["same", "Same.", "other"]) is None
    assert choices.letter("other", ["same", "Same.", "other"]) == "C"
    assert choices.letter("The answer is (J)", [f"o{i}" for i in range(10)]) == "J"


def test_coqa_asks_the_last_turn_alone(files: dict[str, str]) -> None:
    found = read(sources.coqa, url="x", data=files)
    assert [d["id"] for d in found] == [f"c{i}" for i in range(5)]
    roles = [m["role"] for m in found[0]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert found[0]["messages"][0]["content"].endswith("A white cat lived here.\n\nWho lived here?")
    assert [m["content"] for m in found[0]["messages"][1:]] == [
        "a cat", "What colour was it?", "white", "Was it a dog?"]  # fmt: skip
    assert found[0]["references"] == ["no", "No.", "not a dog", "no"]


def test_gold_is_looked_for_in_whole_words() -> None:
    assert scoring.coqa_f1({"references": ["no"]}, ["nothing is known"])["gold_in_answer"] == 0
    assert scoring.coqa_f1({"references": ["no"]}, ["well, no!"])["gold_in_answer"] == 1
    assert scoring.coqa_f1({"references": ["the"]}, ["anything"])["gold_in_answer"] == 0


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("Blau, 7", "blau 7", 1.0),
        ("синий цвет", "синий", 2 / 3),
        ("中国北京", "北京", 2 / 3),
        ("กข", "กค", 0.5),
        ("أزرق، ٧", "أزرق ٧", 1.0),
        ("rot", "blau", 0.0),
    ],
)  # fmt: skip
def test_token_f1_in_other_scripts(answer: str, reference: str, f1: float) -> None:
    assert scoring.xquad_f1({"references": ["zzz", reference]}, [answer])["f1"] == pytest.approx(f1)


def test_xquad_asks_the_same_questions_in_every_language(tmp_path: Path) -> None:
    folder = paper_records.xquad(tmp_path / "xquad", missing="de3")
    data = {"xquad_languages": str(folder)}
    found = read(sources.xquad, data=data, **HUB)
    assert len(found) == 5 * 11 and "q3" not in {d["cluster"] for d in found}
    for language in paper_records.LANGUAGES:
        ids = [d["cluster"] for d in found if d["subset"] == language]
        assert ids == ["q0", "q1", "q2", "q4", "q5"]
    de = next(d for d in found if d["id"] == "de/q1")
    assert de["messages"][0]["content"].endswith("de text 1 says blue 1.\n\nQuestion: de 1?")
    assert de["references"] == ["blue 1"]
    drawn = read(sources.xquad, data=data, draw=2, **HUB)
    assert len(drawn) == 22 and len({d["cluster"] for d in drawn}) == 2
    (folder / "xquad.th.jsonl").unlink()
    with pytest.raises(KVLingoError, match=r"no xquad\.th\.json or xquad\.th\.jsonl"):
        read(sources.xquad, data=data, **HUB)
    (folder / "xquad.th.jsonl").write_text('{"question": "x"}')
    with pytest.raises(KVLingoError, match=r"th\.jsonl is no file of XQuAD: 'id' is missing"):
        read(sources.xquad, data=data, **HUB)


def test_repliqa_with_and_without_unanswerable_questions(files: dict[str, str]) -> None:
    every = read(sources.repliqa, rubric="all", name="repliqa_all", data=files, **HUB)
    some = read(sources.repliqa, rubric="correct", data=files, **HUB)
    facts = read(sources.repliqa, rubric="facts", name="repliqa_facts", data=files, **HUB)
    assert len(every) == 10 and len(some) == len(facts) == 8
    templates = [json.loads(d["judge"])["template"] for d in every]
    assert templates == ["repliqa/unanswerable" if i % 5 == 4 else "repliqa/correct"
                         for i in range(10)]  # fmt: skip
    # The same questions are drawn, then those without an answer are left out.
    drawn = read(sources.repliqa, rubric="all", name="repliqa_all", data=files, draw=6, **HUB)
    assert len(drawn) == 6


def test_a_draw_is_even_over_categories_and_always_the_same(files: dict[str, str]) -> None:
    def ids(**options: Any) -> list[str]:
        return [d["id"] for d in read(choices.mmlu_pro, data=files, **options, **HUB)]

    found = read(choices.mmlu_pro, data=files, draw=28, **HUB)
    assert Counter(d["subset"] for d in found) == dict.fromkeys(
        (c.replace("_", " ") for c in paper_records.CATEGORIES), 2)  # fmt: skip
    assert ids(draw=28) == ids(draw=28, seed=5) != ids()[:28]
    assert ids(draw=28)[:14] == ids(draw=14)  # a smaller draw is the front of a larger one
    assert len({d["subset"] for d in found[:14]}) == 14  # any front is spread over categories
    assert sorted(ids(draw=1000)) == sorted(ids())
    for count in (0, -1, "x", 1.5):
        with pytest.raises(KVLingoError, match="give a number of records"):
            ids(draw=count)


def test_a_draw_does_not_depend_on_the_order_of_records(files: dict[str, str]) -> None:
    records = sources.read_file(Path(files["mmlu_pro_written"]))
    before = {d["id"] for d in read(choices.mmlu_pro, data=files, draw=14, **HUB)}
    Path(files["mmlu_pro_written"]).write_text(json.dumps(records[::-1]))
    assert {d["id"] for d in read(choices.mmlu_pro, data=files, draw=14, **HUB)} == before


def test_dialogues_are_drawn_whole_and_long(files: dict[str, str]) -> None:
    options = {"path": "x", "revision": "y", "split": "z", "data": files}
    assert Counter(d["cluster"] for d in read(sources.quac, **options))["d1"] == 2
    drawn = Counter(d["cluster"] for d in read(sources.quac, draw=2, **options))
    assert list(drawn.values()) == [8, 8] and "d1" not in drawn


def words_of(text: str) -> int:
    return len(text.split())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are words, which everybody can count."""
    monkeypatch.setattr(memory, "counter", lambda settings: words_of)


def names_in(document: dict[str, Any]) -> list[str]:
    text = document["messages"][0]["content"]
    return [part.partition(">")[0] for part in text.split("<")[1:]]


def test_rungs_keep_the_evidence_and_fill_up(files: dict[str, str], counted: None) -> None:
    rungs = ["oracle", 200, 300, 400]
    found = read(memory.longmemeval_rungs, data=files, rungs=rungs, **FILE)
    assert [d["id"] for d in found[:4]] == ["q0@oracle", "q0@200", "q0@300", "q0@400"]
    assert {d["subset"] for d in found} == {"oracle", "200", "300", "400"}
    records = {r["question_id"]: r for r in paper_records.longmemeval()}
    for at in range(0, len(found), 4):
        documents = dict(zip(rungs, found[at : at + 4], strict=True))
        record = records[documents["oracle"]["cluster"]]
        assert {d["cluster"] for d in documents.values()} == {record["question_id"]}
        evidence = set(record["answer_session_ids"])
        assert set(names_in(documents["oracle"])) == evidence
        sizes = {name: words_of(" ".join(m["content"] for m in chat)) + 4 + 5
                 for name, chat in zip(record["haystack_session_ids"], record["haystack_sessions"],
                                       strict=True)}  # fmt: skip
        before: set[str] = evidence
        for rung in rungs[1:]:
            names = names_in(documents[rung])
            length = words_of(documents[rung]["messages"][0]["content"])
            assert before <= set(names) and len(names) == len(set(names))
            assert length <= rung
            left = set(sizes) - set(names)
            # Full: no session that was left out has room. "Chat of DATE:" and two speakers are
            # eight or nine words beside a session's own.
            assert not left or length + min(sizes[n] for n in left) > rung - 2
            order = [record["haystack_session_ids"].index(n) for n in names]
            assert order == sorted(order)  # by date
            before = set(names)
    assert read(memory.longmemeval_rungs, data=files, rungs=rungs, **FILE) == found


def test_only_questions_that_every_rung_has_room_for(files: dict[str, str], counted: None) -> None:
    oracle = read(memory.longmemeval_rungs, data=files, rungs=["oracle"], **FILE)
    sizes = {d["cluster"]: words_of(d["messages"][0]["content"]) for d in oracle}
    middle = sorted(sizes.values())[1]
    found = read(memory.longmemeval_rungs, data=files, rungs=["oracle", 4000, middle], **FILE)
    assert {d["cluster"] for d in found} == {q for q, size in sizes.items() if size <= middle}
    assert Counter(d["cluster"] for d in found) == {q: 3 for q, s in sizes.items() if s <= middle}
    with pytest.raises(KVLingoError, match="no question for the task longmemeval_rungs"):
        read(memory.longmemeval_rungs, data=files, rungs=[5], **FILE)


def test_the_question_begins_where_it_is_said(files: dict[str, str]) -> None:
    documents = {
        "longmemeval_rungs": read(memory.longmemeval_rungs, data=files, **FILE, **COUNT),
        "longbench_v2_written": read(choices.longbench_v2, data=files, **HUB, **COUNT),
        "repliqa": read(sources.repliqa, rubric="correct", data=files, **HUB),
        "repliqa_all": read(sources.repliqa, rubric="all", name="repliqa_all", data=files, **HUB),
    }
    asked = {"longmemeval_rungs": "What number", "longbench_v2_written": "What is held?"}
    for task, found in documents.items():
        for d in found:
            text = d["messages"][0]["content"]
            before, mark, after = text.rpartition(QUESTION_AT[task])
            assert mark and asked.get(task, "Who") in after and asked.get(task, "Who") not in before
    assert set(QUESTION_AT) - {"needles"} <= {*NAMES} | {n for n in QUESTION_AT if "niah_" in n}


def test_every_task_has_a_file() -> None:
    folder = Path(choices.__file__).parent
    assert {path.stem for path in folder.glob("*.yaml")} == set(NAMES)
    assert set(NAMES) - set(CHATS) == {"squad_v1"}
