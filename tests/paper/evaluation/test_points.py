"""Caches that change hands before a question, or after reasoning.

The embedded models recall facts and reason in a sentence, so answers are planted. The references
are mlx-lm's own decoding, one answer at a time, and this package's ``hand_over``.
"""

import dataclasses
from functools import partialmethod
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.evaluation import compare, conditions, lineup, probes
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.fixtures import Pair
from tests.support.recalling import NAMES, TALKS, Makers, alone, asked, prompt, recalled, same

pytest.importorskip("lm_eval")


from benchmarks.paper.evaluation.points import check_tasks, moved
from benchmarks.paper.evaluation.switching_lm import SwitchingLM
from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder
from kvlingo_mlx.evaluation.journal import Responses


def lm(
    model: LanguageModel, make: conditions.CacheMaker, size: int = 5, **more: Any
) -> SwitchingLM:
    return SwitchingLM(MLXDecoder(model, make, size), condition="x", **more)


LAST_TURN = "<|im_start|>user\n"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question of a dialogue is its last turn."""
    begin = SwitchingLM.__init__
    at = {"dialogues": LAST_TURN}
    monkeypatch.setattr(SwitchingLM, "__init__", partialmethod(begin, question_at=at))


def question_of(model: LanguageModel, context: str) -> int:
    """The tokens before the last turn; its first token is a special one, so nothing reaches in."""
    return len(model.tokenizer.encode(context[: context.rindex(LAST_TURN)]))


def test_the_target_reads_the_question_itself(pair: Pair, makers: Makers, marked: None) -> None:
    """As ``hand_over`` does with a native tail; a control shows what the question alone gives."""
    source, target = pair
    translator = kv.load_translator(TRANSLATORS / "--".join(NAMES))
    contexts = [prompt(target, talk) for talk in TALKS]
    read: list[int] = []

    def make(tokens: conditions.Prefix) -> list:
        read.append(len(tokens))
        return makers["translated"](tokens)

    found = lm(target, make, point="context").generate_until(asked(contexts))
    starts = [question_of(target, context) for context in contexts]
    assert sorted(read) == sorted(start + 1 for start in starts)  # the last one is not made
    wanted = []
    for context, start in zip(contexts, starts, strict=True):
        tokens = target.tokenizer.encode(context)
        tail = len(tokens) - 1 - start
        cache = kv.hand_over(source, target, tokens, translator=translator, native_tail=tail)
        wanted.append(alone(target, tokens, cache))
    assert same(found, wanted) >= 15 / 16
    recall = {
        name: recalled(lm(target, makers[name], point="context").generate_until(asked(contexts)))
        for name in ("native", "hidden", "shuffled")
    }
    assert min(recalled(found), recall["native"]) > 0.8
    assert max(recall["hidden"], recall["shuffled"]) < 0.3


@pytest.mark.parametrize("opened", [False, True])
def test_the_source_reasons_and_the_target_answers(
    pair: Pair, makers: Makers, opened: bool
) -> None:
    source, target = pair
    contexts = [prompt(target, t, thinking=True) + ("<think>\n" if opened else "") for t in TALKS]
    read: list[str] = []

    def make(tokens: conditions.Prefix) -> list:
        read.append(target.tokenizer.decode(list(conditions.target_ids(tokens))))
        return makers["translated"](tokens)

    writer = MLXDecoder(source, conditions.native(source), 5)
    responses = Responses()
    more: dict[str, Any] = {"point": "trace", "writer": writer, "responses": responses}
    found = lm(target, make, **more).generate_until(asked(contexts, most=40))
    traces = []
    for context in contexts:
        tokens = source.tokenizer.encode(context)
        text = alone(source, tokens, conditions.native(source)(tokens), 40)
        traces.append(text[: text.index("</think>") + len("</think>")])
    assert sum(c + t in read for c, t in zip(contexts, traces, strict=True)) >= 15
    wanted = []
    for context, trace in zip(contexts, traces, strict=True):
        tokens = target.tokenizer.encode(context + trace)
        wanted.append(alone(target, tokens, makers["translated"](tokens)))
    assert same(found, wanted) >= 15 / 16
    assert "look for" in traces[0] and "look for" not in found[0]
    assert recalled(found) > 0.8
    assert [lm(target, make).without_trace(text) for text in found] == found

    # Every other condition is given the same traces, which are not written again.
    writer.write = lambda wanted: iter([] if not wanted else pytest.fail("written again"))  # type: ignore[method-assign]
    recall = {
        name: recalled(
            SwitchingLM(MLXDecoder(target, makers[name]), condition=name, **more).generate_until(
                asked(contexts, most=40)
            )
        )
        for name in ("native", "hidden", "shuffled")
    }
    assert recall["native"] > 0.8 and max(recall["hidden"], recall["shuffled"]) < 0.3


def test_a_trace_that_does_not_end_is_gone_on_with(pair: Pair, makers: Makers) -> None:
    """At the budget, or where the context is full, the target reads it and goes on."""
    source, target = pair
    context = prompt(target, TALKS[0], thinking=True)
    tokens, read = target.tokenizer.encode(context), []

    def make(prefix: conditions.Prefix) -> list:
        read.append(len(conditions.target_ids(prefix)))
        return makers["native"](prefix)

    def answer(most: int, **more: Any) -> str:
        writer = MLXDecoder(source, conditions.native(source))
        model = lm(target, make, point="trace", writer=writer, **more)
        return model.generate_until(asked([context], most=most))[0]

    assert answer(4).startswith("<think>") and read[-1] == len(tokens) + 4
    text = answer(30, max_length=len(tokens) + 3)
    assert TALKS[0].asked[0].value in text and read[-1] == len(tokens) + 3
    assert TALKS[0].asked[0].value in answer(30, max_length=len(tokens))
    assert read[-1] == len(tokens)  # no room for a trace: the target reasons by itself


def test_a_source_that_does_not_reason_leaves_the_prompt(pair: Pair, makers: Makers) -> None:
    source, target = pair
    contexts = [prompt(target, talk) for talk in TALKS[:3]]  # reasoning is off
    steps: list[int] = []
    native = conditions.native(source)
    writer = MLXDecoder(source, lambda tokens: (steps.append(1), native(tokens))[1])
    model = lm(target, makers["translated"], point="trace", writer=writer)
    found = model.generate_until(asked(contexts))
    assert found == lm(target, makers["translated"]).generate_until(asked(contexts))
    assert len(steps) == 3 and len(model.responses._known) == 6


def test_a_needles_question_is_read_by_the_target(pair: Pair) -> None:
    source, target = pair
    options = probes.TaskOptions(limit=12, needles=["single"], style="facts", max_tokens=16)
    task = probes.find_needles(target, [150], options)
    for item in task.items:
        asked = target.tokenizer.decode(list(item.prefix[item.question :]))
        # The last full stop and the line's end are one token, which is the question's.
        assert asked.lstrip(".").startswith("\nWhat is the ")
        before = target.tokenizer.decode(list(item.prefix[: item.question]))
        assert item.references[0] in before and "What is the" not in before
    translator = kv.load_translator(TRANSLATORS / "--".join(NAMES))
    line = lineup.line_up(*pair, {"best": [translator]}, ["hidden"])
    line += [moved(condition, "context", pair, tasks=[task]) for condition in line[1:]]
    lengths: list[int] = []

    def count(make: conditions.CacheMaker) -> conditions.CacheMaker:
        return lambda tokens: (lengths.append(len(tokens)), make(tokens))[1]

    counted = dataclasses.replace(line[1], makers=tuple(map(count, line[1].makers)))
    line[3] = moved(counted, "context", pair, tasks=[task])
    found = compare.evaluate(target, [task], line, Journal())["needles"]
    assert lengths == [item.question + 1 for item in task.items]
    recall = {name: sum(s.scores["recall"] for s in every) / 12 for name, every in found.items()}
    assert recall["native"] > 0.7 and recall["best, context"] > 0.7
    assert recall["prefix hidden, context"] < 0.4 > recall["prefix hidden"]
    talks = probes.recall(target, 1, 0, source)
    with pytest.raises(ValueError, match="recall has no context after which .* out of --tasks"):
        check_tasks([talks], ["prompt", "context"])
    with pytest.raises(ValueError, match="needles has no trace"):
        check_tasks([task], ["trace"])
