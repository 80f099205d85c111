"""Conversations that two models answer in turn: records, ways, scores, and the verb."""

import dataclasses
import itertools
import json
import shutil
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import turn_records, turn_scores, turns
from benchmarks.paper.evaluation.naive import NaiveConversation
from benchmarks.paper.evaluation.turn_records import read_talks
from benchmarks.paper.evaluation.turn_scores import Benchmark, Held
from benchmarks.paper.evaluation.turns import Manner, Talk, Turn, Way
from benchmarks.paper.tasks import scoring
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.evaluation.journal import Responses
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import paper_records, tiny
from tests.support.command_line import run
from tests.support.fixtures import Models, Patch, Printed
from tests.support.identity import identity_of
from tests.support.lm_eval_tasks import QUAC

STORY = "Anna lives in Paris. The code of Ben is C2."
ASKED = ("Where does Anna live?", "What is Ben's code?", "Who has a code?")
FIRST, SECOND = ("Paris", "C2", "Ben"), ("in Paris", "the code C2", "Ben does")


def objects(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"input_text": text, "turn_id": i} for i, text in enumerate(texts, 1)]


def columns(texts: Sequence[str]) -> dict[str, Any]:
    return {"input_text": list(texts), "turn_id": list(range(1, len(texts) + 1))}


COQA = {"source": "mctest", "id": "3z", "filename": "x.txt", "story": STORY, "name": "x.txt",
        "questions": objects(ASKED), "answers": [
            {"span_start": 0, "span_end": 4, "span_text": "x", **one} for one in objects(FIRST)],
        "additional_answers": {"0": objects(SECOND)}}  # fmt: skip
CHALLENGE = paper_records.multichallenge()[0]


def written(path: Path, *records: Any, whole: bool = False) -> str:
    """A file of records: one a line, or one JSON value."""
    lines = [json.dumps(record) for record in records]
    path.write_text(json.dumps(records[0], indent=1) if whole else "\n".join(lines) + "\n\n")
    return str(path)


def test_coqa_in_every_form_is_the_same(tmp_path: Path) -> None:
    """The authors' file, its records line by line, and the forms that the Hub has."""
    texts = {**COQA, "questions": list(ASKED), "answers": columns(FIRST)}
    tabled = {**COQA, "questions": columns(ASKED), "answers": columns(FIRST),
              "additional_answers": {"0": columns(SECOND)}}  # fmt: skip
    files = [
        written(tmp_path / "a.json", {"version": "1.0", "data": [COQA]}, whole=True),
        written(tmp_path / "b.jsonl", COQA),
        written(tmp_path / "c.json", [texts], whole=True),
        written(tmp_path / "d.jsonl", tabled),
    ]
    for file in files:
        (talk,), short = read_talks("coqa", file, depth=3)
        assert talk.name == "1 3z" and short == 0
        assert [turn.references for turn in talk.turns] == list(zip(FIRST, SECOND, strict=True))
        asked = [turn.messages[-1]["content"] for turn in talk.turns]
        assert asked[0].endswith(f"{STORY}\n\n{ASKED[0]}") and asked[1:] == list(ASKED[1:])
        assert [turn.bare[0]["content"] for turn in talk.turns] == list(ASKED)
    plain = {"story": STORY, "questions": list(ASKED), "answers": columns(FIRST)}
    (talk,), _ = read_talks("coqa", written(tmp_path / "e.jsonl", plain), depth=3)
    assert talk.name == "1" and talk.turns[0].references == ("Paris",)  # as stanfordnlp/coqa is


def test_quac_and_multichallenge(tmp_path: Path) -> None:
    (talk,), _ = read_talks("quac", written(tmp_path / "q.jsonl", QUAC), depth=2)
    text = "Daffy Duck: Origin\n\nDaffy first appeared in 1937.\n\nWhen did he appear?"
    assert talk.turns[0].messages[0]["content"].endswith(text)
    assert [turn.references for turn in talk.turns] == [
        ("in 1937", "Daffy first appeared in 1937"), ("CANNOTANSWER",)
    ]  # fmt: skip
    official = {"title": "Daffy Duck", "section_title": "Origin", "background": "", "paragraphs": [
        {"id": "d1", "context": QUAC["context"], "qas": [
            {"question": question, "answers": [{"text": t, "answer_start": 0} for t in texts]}
            for question, texts in zip(QUAC["questions"], QUAC["answers"]["texts"], strict=True)
        ]}]}  # fmt: skip
    file = written(tmp_path / "o.json", {"data": [official]}, whole=True)
    assert read_talks("quac", file, depth=2)[0] == [talk]

    (talk,), _ = read_talks("multichallenge", written(tmp_path / "m.jsonl", CHALLENGE))
    assert [turn.written for turn in talk.turns] == ["Gladly.", "Good.", None]
    assert talk.messages(2) == CHALLENGE["CONVERSATION"][:-1]
    assert talk.judge == {"template": "multichallenge", "expected": "yes",
                          "fields": {"criterion": "Is it polite?"}}  # fmt: skip
    lower = {key.lower(): value for key, value in CHALLENGE.items()}
    said = lower["conversation"]
    lower["conversation"] = {name: [m[name] for m in said] for name in said[0]}
    assert read_talks("multichallenge", written(tmp_path / "h.jsonl", lower))[0] == [talk]


def plain_f1(answer: str, references: Sequence[str]) -> float:
    """CoQA's score by plain loops: against all references but one, the mean over that one."""

    def bag(text: str) -> Counter[str]:
        bare = "".join(c for c in text.lower() if c not in string.punctuation)
        return Counter(word for word in bare.split() if word not in ("a", "an", "the"))

    def f1(one: str, other: str) -> float:
        a, b = bag(one), bag(other)
        return 2 * (a & b).total() / (a + b).total() if a and b else float(a == b)

    if len(references) == 1:
        return f1(answer, references[0])
    best = [max(f1(answer, other) for j, other in enumerate(references) if j != i)
            for i in range(len(references))]  # fmt: skip
    return sum(best) / len(best)


def test_coqas_score_by_plain_loops() -> None:
    texts = ["Paris", "in the Paris", "in Paris, in France", "", "No!", "the", "red red blue"]
    for answer, count in itertools.product(texts, (1, 2, 3)):
        for references in itertools.permutations(texts, count):
            wanted = pytest.approx(plain_f1(answer, references))
            assert scoring.one_left_out(answer, references) == wanted
            task = scoring.coqa_f1({"references": list(references)}, [answer])
            assert task["f1"] == wanted
    assert (
        scoring.one_left_out("Paris", ["Paris", "Rome"]) == 0.5
    )  # it may only be compared with the other


def test_means_errors_seeds_and_bins(models: Models) -> None:
    """Answers that are kept stand for those of models: two ways, one of two seeds."""
    ends = dict(zip("ab", (models["dense"], models["dense"]), strict=True))
    questions = [({"role": "user", "content": f"question {i}"},) for i in range(3)]
    talks = [Talk(str(i), tuple(Turn(q, references=("yes",)) for q in questions)) for i in range(4)]
    ways = [Way("one"), Way("two", seeds=((), ()))]
    rng = np.random.default_rng(0)
    kept = rng.integers(0, 2, (2, 3, 4, 3))  # order, way and seed, conversation, turn

    class Planted(Held):
        def said(self, order: Sequence[str], progress: Any = None) -> Any:
            found = [[["yes" if x else "no" for x in talk] for talk in seed]
                     for seed in kept[int(order[0] == "b")]]  # fmt: skip
            return {"one": found[:1], "two": found[1:]}

    benchmark = Benchmark("planted", "f1", turn_records.best_f1, 8)
    outcomes = turn_scores.evaluate(benchmark, Planted(ends, talks, ways, Manner(8)))
    assert [o.task for o in outcomes] == ["planted, a first", "planted, b first"]
    for order, outcome in enumerate(outcomes):
        for name, seeds in (("one", [0]), ("two", [1, 2])):
            scores = np.zeros((4, 3))
            for talk, turn in itertools.product(range(4), range(3)):
                scores[talk, turn] = sum(kept[order][s][talk][turn] for s in seeds) / len(seeds)
            table = outcome.tables[name]
            for turn in range(3):
                mean = table[f"turn {turn + 1}"]["f1"]
                assert mean.value == pytest.approx(scores[:, turn].mean())
                assert mean.error == pytest.approx(scores[:, turn].std(ddof=1) / 2)
            each = scores.mean(axis=1)
            assert table["mean"]["f1"].value == pytest.approx(each.mean())
            assert table["mean"]["f1"].error == pytest.approx(each.std(ddof=1) / 2)


@pytest.fixture
def ends(models: Models) -> turns.Models:
    return turns.names_of([models["dense"], models["dense"]])


TALK = Talk("x", tuple(
    Turn(({"role": "user", "content": text},), ({"role": "user", "content": bare},))
    for text, bare in (("The sun is up. Who are you?", "Who are you?"), ("And I?", "And I?"),
                       ("What now?", "What now?"))
))  # fmt: skip


def test_one_model_with_itself_answers_the_same_in_every_way(ends: turns.Models) -> None:
    """By the identity, however often; without the text it answers otherwise."""
    same = identity_of(next(iter(ends.values())))
    ways, notes = turns.ways_of(ends, {"same": [(same, same)]}, ["hidden"])
    assert [way.name for way in ways] == ["re-prefill", "alternated", "naive", "text hidden",
                                          "A: dense alone", "B: dense alone"]  # fmt: skip
    assert not notes
    ways.append(Way("one switch", "alternated", ((same, same),), once=True))
    said = {way.name: turns.answers(ends, way, TALK, tuple(ends), Manner(6)) for way in ways}
    hidden = said.pop("text hidden")
    assert len({tuple(found) for found in said.values()}) == 1 and len(said["naive"]) == 3
    assert hidden != said["naive"]


def test_alone_is_what_mlx_lm_writes(ends: turns.Models) -> None:
    """Turn by turn, from prompts that are put together here."""
    from mlx_lm.generate import stream_generate

    name, model = next(iter(ends.items()))
    said = turns.answers(ends, Way("alone", alone=name), TALK, tuple(ends), Manner(6))
    tokens: list[int] = []
    for turn, answer in zip(TALK.turns, said, strict=True):
        asked = [dict(turn.messages[0])]
        if tokens:  # what the template puts between an answer and the next one
            before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "%%"}]
            text = model.tokenizer.apply_chat_template(
                [*before, *asked], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            rest = text.split("%%")[1]
            if tokens[-1] in model.tokenizer.eos_token_ids:
                rest = rest.removeprefix(model.tokenizer.decode(tokens[-1:]))
            tokens += model.tokenizer.encode(rest, add_special_tokens=False)
        else:
            tokens = encode(model, asked, enable_thinking=False)
        found = list(stream_generate(model.model, model.tokenizer, list(tokens), max_tokens=6))
        assert answer == "".join(response.text for response in found)
        tokens += [response.token for response in found]


def test_naive_switching_translates_all_anew(models: Models) -> None:
    """Its states are those of translators applied to translations, again and again."""
    pair = {"a": models["dense"], "b": models["wide"]}
    sample = Sample(tuple(tiny.random_tokens(90)), ())
    there, back = (kv.fit(*two, [sample]) for two in itertools.permutations(pair.values()))
    options = {"enable_thinking": False, "verbatim": True}
    tokens = tiny.random_tokens(24)
    with NaiveConversation(pair, [there, back], **options) as talk:
        for name, end in (("a", 10), ("b", 10), ("a", 10), ("b", 16)):
            talk.bring(name, tokens[:end])
        assert talk.switches == 3
        states = capture.whole(pair["a"], tokens[:10], there.config.capture)
        for translator, model in ((there, "b"), (back, "a"), (there, "b")):
            layers = len(pair[model].geometry.layers)
            states = translator(states).states(layers, pair[model].cache_dtype)
        held = talk._states
        assert held is not None and held.num_tokens == 16
        for mine, wanted in zip(held.part(0, 10).arrays, states.arrays, strict=True):
            assert mx.allclose(mine, wanted, rtol=1e-4, atol=1e-4).item()


ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
THERE, BACK = (str(TRANSLATORS / "--".join(pair)) for pair in itertools.permutations(ENDS))
PAIR = ["paper eval", "--source", ENDS[0], "--target", ENDS[1], "--turns"]


def test_translators_are_told_apart_by_their_models() -> None:
    pair = [kv.load(name) for name in ENDS]
    stored = turns.directed([None], pair)
    assert [[t.config.source.name for t in seed] for seed in stored] == [list(ENDS)]
    seeds = turns.directed([BACK, THERE, THERE, BACK], pair)
    assert len(seeds) == 2
    assert all([t.digest for t in seed] == [t.digest for t in stored[0]] for seed in seeds)
    with pytest.raises(ValueError, match="2 from tiny-qwen3-s to tiny-qwen3-l and 1 from"):
        turns.directed([THERE, BACK, THERE], pair)
    other = str(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-moe")
    with pytest.raises(kv.KVLingoError, match="which are not tiny-qwen3-s and tiny-qwen3-l"):
        turns.directed([other], pair)


def zoo_record(index: int, talk: dialogues.Dialogue) -> dict[str, Any]:
    """A dialogue of the zoo in CoQA's schema; its values alone are the answers."""
    story = " ".join(m["content"] for m in talk.messages[:-1] if m["role"] == "user")
    return {"source": "zoo", "id": f"z{index}", "story": story,
            "questions": objects(talk.questions), "additional_answers": {},
            "answers": objects([fact.value for fact in talk.asked])}  # fmt: skip


@pytest.fixture(scope="module")
def zoo_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    talks = dialogues.held_out(3, seed=3, facts=(4, 6), questions=3)
    folder = tmp_path_factory.mktemp("records")
    return written(folder / "coqa.jsonl", *itertools.starmap(zoo_record, enumerate(talks)))


def test_the_verb_scores_by_turn_and_resumes(
    zoo_file: str, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """On the zoo, with controls: naive translation collapses at the second switch, hidden text at
    once, wrong maps at the first switch; the scores are those of the answers that were kept."""
    monkeypatch.chdir(tmp_path)
    options = [*PAIR, "coqa:3", "--task-data", f"coqa={zoo_file}", "--max-tokens", "24",
               "--json", "r.json"]  # fmt: skip
    held, count = turns.answers, 0

    def counted(*given: Any) -> list[str]:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return held(*given)

    monkeypatch.setattr(turn_scores, "answers", counted)
    assert run(options) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert run(options) == 0
    assert count == 1 + 3 * (2 * 5 + 2)  # five ways twice, each model alone once
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    tasks = [f"coqa, {name} first" for name in ENDS]
    assert list(results["means"]) == tasks
    ways = ["re-prefill", "alternated", "naive", "text hidden", "shuffled",
            *(f"{name} alone" for name in ENDS)]  # fmt: skip
    gold = [json.loads(line)["answers"] for line in Path(zoo_file).read_text().split("\n")[:3]]
    kept = [json.loads(line)["response"] for line in
            (tmp_path / "kvlingo-eval.responses.jsonl").read_text().splitlines()]  # fmt: skip
    for task in tasks:
        assert list(results["means"][task]) == ways
        value = {
            way: [found[f"turn {i + 1}"]["f1"]["value"] for i in range(3)]
            for way, found in results["means"][task].items()
        }
        right = min(value["re-prefill"])
        assert right > 0.2 and sum(value["alternated"]) > 0.75 * sum(value["re-prefill"])
        assert value["naive"][2] < right / 2
        assert max(value["text hidden"]) < right / 2 and value["shuffled"][1] < right / 2
        assert value["shuffled"][0] == value["re-prefill"][0]
        for way, items in results["items"][task].items():
            assert len(items) == 3 * 3
            for turn in range(3):
                mine = [i["scores"]["f1"] for i in items if i["group"] == f"turn {turn + 1}"]
                assert value[way][turn] == pytest.approx(sum(mine) / 3)
    # The first three conversations kept are those of the first way.
    items = results["items"][tasks[0]]["re-prefill"]
    for talk, said in enumerate(kept[:3]):
        for turn, answer in enumerate(said):
            (item,) = [i for i in items if i["group"] == f"turn {turn + 1}"
                       and i["item"].startswith(f"{talk + 1} ")]  # fmt: skip
            wanted = gold[talk][turn]["input_text"]
            assert item["scores"]["f1"] == pytest.approx(plain_f1(answer, [wanted]))
    before = (tmp_path / "kvlingo-eval.responses.jsonl").read_text()
    assert run(options) == 0 and count == 37
    assert (tmp_path / "kvlingo-eval.responses.jsonl").read_text() == before


def test_the_verb_asks_a_judge(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    """Seeds of a method, a history that does not fit, and a judge's verdicts."""
    monkeypatch.chdir(tmp_path)
    long = {**CHALLENGE, "CONVERSATION": [*CHALLENGE["CONVERSATION"][:-1],
                                          {"role": "user", "content": "word " * 9000}]}  # fmt: skip
    file = written(tmp_path / "m.jsonl", CHALLENGE, long)
    asked: list[str] = []
    more = [shutil.copytree(place, tmp_path / Path(place).name) for place in (BACK, THERE)]

    class Planted:
        def __init__(self, model: str, responses: str) -> None:
            assert model == "someone" and responses == "kvlingo-eval.responses.jsonl"

        def __call__(self, prompt: str) -> str:
            asked.append(prompt)
            return "[[yes]]"

    monkeypatch.setattr("benchmarks.paper.evaluation.judge.Judge", Planted)
    status = run([PAIR[0], f"two={THERE},{BACK},{more[0]},{more[1]}", *PAIR[1:], "multichallenge",
                  "--task-data", f"multichallenge={file}", "--judge", "someone", "--max-tokens",
                  "4", "--baselines", "none", "--json", "r.json"])  # fmt: skip
    assert status == 0
    said = capsys.readouterr().err
    assert "1 conversations do not fit both contexts" in said and "naive" not in said
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    for found in results["means"].values():
        assert set(found["alternated"]) == {"turns 3-4"}  # one group, so no mean of groups
        assert all(f["turns 3-4"]["pass"] == {"value": 1.0, "error": None, "count": 1}
                   for f in found.values())  # fmt: skip
    assert len(asked) == 2 * (1 + 2 + 2 + 2) and len(results["translators"]["two"]) == 2


def test_kept_answers_go_by_all_that_they_depend_on(ends: turns.Models, tmp_path: Path) -> None:
    same = identity_of(next(iter(ends.values())))
    kept = Responses(tmp_path / "r.jsonl")

    def lines(talk: Talk, way: Way, most: int = 2) -> int:
        Held(ends, [talk], [way], Manner(most), kept).said(tuple(ends))
        return len((tmp_path / "r.jsonl").read_text().splitlines())

    way = Way("x", "alternated", ((same, same),))
    assert [lines(TALK, way), lines(TALK, dataclasses.replace(way, name="y"))] == [1, 1]
    assert lines(TALK, way, 3) == 2
    assert lines(TALK, dataclasses.replace(way, switching="naive")) == 3
    assert lines(TALK, dataclasses.replace(way, hidden=True)) == 4
    assert lines(dataclasses.replace(TALK, turns=TALK.turns[:2]), way) == 5
    scored = tuple(dataclasses.replace(turn, references=("z",)) for turn in TALK.turns)
    assert lines(dataclasses.replace(TALK, turns=scored), way) == 5
