"""Where an answer ends, what of it is what, and how its tokens are chosen: against plain mlx-lm."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine.answers import AnswerReader
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.fixtures import Models, Pair, Temp
from tests.support.identity import identity_of
from tests.support.responses import response
from tests.support.talks import expected, spelled, talk_of, writing
from tests.support.tool_callers import TEMPLATE, TOOLS


@pytest.fixture(scope="module")
def model(tmp_path_factory: Temp) -> LanguageModel:
    """A tiny Qwen3 whose template announces tools; mlx-lm infers Qwen's parser from it."""
    kind, sizes = tiny.FAMILIES["qwen3"]
    folder = tiny.write_tiny_model(tmp_path_factory.mktemp("tools") / "qwen3", kind, **sizes)
    tiny.amend(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return kv.load(folder)


def question() -> list[dict[str, Any]]:
    talk = next(iter(dialogues.held_out(1)))
    return [*talk.messages[:-1], {"role": "user", "content": talk.questions[0]}]


def naive_stop(text: str, stops: list[str], opened: bool = False) -> str | None:
    """What comes before the stop text that is complete first, letter by letter; else None.

    What lies wholly within the reasoning, which may be ``opened`` already, does not count.
    """
    thought, since = [opened], 0
    for end in range(len(text) + 1):
        if end and text[since:end].endswith("</think>" if thought[-1] else "<think>"):
            thought, since = [*thought, not thought[-1]], end
        elif end:
            thought.append(thought[-1])
        fits = [s for s in stops if text[:end].endswith(s)]
        if found := [s for s in fits if not (thought[end] and thought[end - len(s)])]:
            return text[: end - max(map(len, found))]
    return None


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", "b", "\n", "<think>", "</think>"]), max_size=14).map(
        "".join
    ),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    opened=st.booleans(),
)
def test_stops_are_found_however_a_text_is_cut(
    text: str, cuts: list[int], stops: list[str], opened: bool, model: LanguageModel
) -> None:
    reader = AnswerReader(model.tokenizer, opened=opened, stop=stops)
    marks = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(marks)] or [""]
    out, told = "", None
    for index, piece in enumerate(pieces):
        told = reader.take(response(piece, "length" if index == len(pieces) - 1 else None))
        out += told.text
        if told.finish_reason is not None:
            break
        # Nothing is given out that a stop text could still take back.
        assert out == text[: len(out)]
        assert (naive_stop(text, stops, opened) or text).startswith(out)
    expected = naive_stop(text, stops, opened)
    assert reader.stopped_at(text) == (None if expected is None else len(expected))
    assert told is not None
    assert (out, told.finish_reason) == (
        (text, "length") if expected is None else (expected, "stop")
    )


def ways(small: LanguageModel, large: LanguageModel, options: dict[str, Any]) -> dict[str, Any]:
    """The same question asked in every way; all responses, by way."""
    talk = kv.Conversation(
        {"small": small, "large": large},
        [str(TRANSLATORS / f"tiny-qwen3-{way}") for way in ("s--tiny-qwen3-l", "l--tiny-qwen3-s")],
    )
    asked = {"max_tokens": 60} | options
    folds = identity_of(large, capture="post_rope")
    found = {
        "native": list(kv.stream_generate(small, large, question(), strategy="native", **asked)),
        "accelerator": list(kv.stream_generate(small, large, question(), **asked)),
        "folded": list(
            kv.folded_stream_generate(large, large, question(), translator=folds, **asked)
        ),
        "talk": list(talk.stream_reply("large", messages=question(), **asked)),
    }
    assert talk.messages[-1]["content"] == "".join(r.content for r in found["talk"])
    return found


def test_an_answer_ends_before_a_stop_text_in_every_way(pair: Pair) -> None:
    thinks = {"enable_thinking": True}
    whole = ways(*pair, thinks)
    for stop in ("</think>", "the home", ["zz", "k fo"], "never said"):
        for way, responses in ways(*pair, {"stop": stop, **thinks}).items():
            text = "".join(r.text for r in whole[way])
            stops = [stop] if isinstance(stop, str) else stop
            expected = naive_stop(text, stops)
            assert "".join(r.text for r in responses) == (text if expected is None else expected)
            assert responses[-1].finish_reason == "stop"
            assert all(r.finish_reason is None for r in responses[:-1])
            if expected is not None:
                assert len(responses) < len(whole[way])
        assert naive_stop("".join(r.text for r in whole["native"]), ["</think>"])  # it is there


def test_a_conversation_goes_on_from_before_the_stop_text(model: LanguageModel) -> None:
    """Tokens that were written before it stay; of the token that is cut, the rest is spelled."""
    talk = talk_of(model)
    ids = model.tokenizer.encode("in the house", add_special_tokens=False)
    assert "Ġthe" in model.tokenizer.convert_ids_to_tokens(ids)
    text = talk.reply("a", "hi", stop="he h", sampler=writing(ids))
    assert text == "in t" == talk.messages[-1]["content"]
    header = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    written = talk.transcript.tokens[len(header) :]
    assert written == [*ids[:1], *model.tokenizer.encode(" t", add_special_tokens=False)]
    assert talk.lines["b"].tokens == talk.transcript.tokens[: len(talk.lines["b"])]
    prompt = talk.transcript.prompt(model, [{"role": "user", "content": "and you"}])
    turns = [*talk.messages, {"role": "user", "content": "and you"}]
    rendered = model.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    assert model.tokenizer.decode(prompt) == rendered


CHOICES: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = [
    ({"temperature": 0.9, "seed": 4}, lambda: {"sampler": make_sampler(0.9)}),
    (
        {"temperature": 0.8, "top_p": 0.6, "min_p": 0.02, "top_k": 7, "seed": 5},
        lambda: {"sampler": make_sampler(0.8, 0.6, 0.02, top_k=7)},
    ),
    (
        {"repetition_penalty": 1.7},
        lambda: {"logits_processors": make_logits_processors(repetition_penalty=1.7)},
    ),
    ({"temperature": 0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1}, dict),
]


@pytest.mark.parametrize("given_, built", CHOICES)
def test_plain_arguments_choose_as_mlx_lms_own(
    model: LanguageModel, given_: dict[str, Any], built: Callable[[], dict[str, Any]]
) -> None:
    prompt = [{"role": "user", "content": "is it on?"}]
    ids = model.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    mx.random.seed(given_.get("seed", 0))
    right = expected(model, ids, 12, **built())
    found = kv.stream_generate(model, model, prompt, strategy="native", max_tokens=12, **given_)
    assert [r.token for r in found] == right
    same = {"translator": identity_of(model), "max_tokens": 12}
    assert [r.token for r in kv.stream_generate(model, model, prompt, **same, **given_)] == right
    talk = talk_of(model)
    found = talk.stream_reply("a", "is it on?", max_tokens=12, **given_)
    assert [r.token for r in found] == right


REFUSED = [
    ({"temp": 0.7}, "temp is no argument of .*; did you mean temperature"),
    ({"xyz": 1}, "xyz is no argument of .*; its arguments are .*temperature"),
    ({"temperature": "0.7"}, "temperature is '0.7'; give a number, 0 or more"),
    ({"temperature": -1}, "temperature is -1; give a number, 0 or more"),
    ({"temperature": 0.5, "top_p": 0.0}, "top_p is 0.0; give a number above 0, at most 1"),
    ({"stop": ""}, "stop is ''; give a text, or a list of texts"),
    ({"stop": ["a", 3]}, "stop is .*; give a text, or a list of texts"),
    ({"tools": [{"type": {1}}]}, "tools must be what JSON can hold"),
    ({"kv_group_size": 32}, "kv_group_size .*(without kv_bits|is no argument)"),
    ({"quantized_kv_start": 3}, "quantized_kv_start .*kv_bits|quantized_kv_start is no argument"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_bad_arguments_are_refused_in_every_way(
    model: LanguageModel, options: dict[str, Any], message: str
) -> None:
    prompt = [{"role": "user", "content": "hi"}]
    talk = talk_of(model)
    with pytest.raises(ValueError, match=message):
        kv.generate(model, model, prompt, translator=identity_of(model), **options)
    with pytest.raises(ValueError, match=message):
        talk.reply("a", "hi", **options)
    if "kv_group_size" not in options:  # folded decoding has its own, 64 unless told otherwise
        with pytest.raises(ValueError, match=message):
            kv.folded_generate(model, model, prompt, **options)
    assert talk.messages == [] and len(talk.lines["a"]) == 0  # before anything was read
    asked = kv.generate(model, model, prompt, strategy="native", max_tokens=2, temperature=None)
    assert isinstance(asked, str)  # None is as good as leaving it out


def test_tools_that_nobody_announces_are_refused(model: LanguageModel, models: Models) -> None:
    with pytest.raises(ValueError, match="tools are announced by a chat template, but the prompt"):
        kv.generate(model, model, "hi", strategy="native", tools=TOOLS)
    with pytest.raises(ValueError, match="template of .* does not announce tools"):
        kv.generate(models["dense"], models["dense"], question(), tools=TOOLS)


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.mark.parametrize("way", ["native", "talk"])
def test_reasoning_content_and_calls_are_told_apart(model: LanguageModel, way: str) -> None:
    assert model.tokenizer.has_tool_calling and model.tokenizer.has_thinking
    text = f"<think>who\nis it</think>\n\nI look. {CALL} So < 3.{CALL}"
    prompt = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {
        "sampler": writing(spelled(model, text)), "max_tokens": 400, "tools": TOOLS,
    }  # fmt: skip
    if way == "talk":
        responses = list(talk_of(model).stream_reply("a", "hi", **options))
    else:
        responses = list(kv.stream_generate(model, model, prompt, strategy="native", **options))
    assert "".join(r.text for r in responses) == text  # raw, as ever
    assert "".join(r.reasoning for r in responses) == "who\nis it"
    assert "".join(r.content for r in responses) == "I look.  So < 3."
    calls = [call for r in responses for call in r.tool_calls]
    assert [c["function"] for c in calls] == [{"name": "look", "arguments": '{"at": "é"}'}] * 2
    assert {c["type"] for c in calls} == {"function"} and len({c["id"] for c in calls}) == 2
    announced = model.tokenizer.apply_chat_template(prompt, tools=TOOLS, add_generation_prompt=True)
    assert responses[0].prompt_tokens == len(announced)


def test_a_trace_that_the_template_opens_is_reasoning(model: LanguageModel) -> None:
    opened = [*model.tokenizer.encode("so <think>"), *model.tokenizer.encode("hm")]
    sampler = writing(spelled(model, "why</think>on"))
    responses = list(kv.stream_generate(model, model, opened, strategy="native", sampler=sampler))
    parts = [("".join(getattr(r, n) for r in responses)) for n in ("reasoning", "content")]
    assert parts == ["why", "on"]


def test_tokens_and_times_are_told_where_they_belong(pair: Pair) -> None:
    found = {way: r[0] for way, r in ways(*pair, {}).items()}
    count = found["native"].prompt_tokens
    tokens = {w: (r.cached_tokens, r.translated_tokens, r.read_tokens) for w, r in found.items()}
    assert tokens == {
        "native": (0, 0, count), "accelerator": (0, count - 1, 1), "folded": (0, count - 1, 1),
        "talk": (0, 0, count),
    }  # fmt: skip
    assert found["native"].prefill_s > 0 == found["native"].translate_s
    assert found["talk"].translate_s == 0 == found["talk"].prefill_s  # nothing was translated
    assert 0 < found["talk"].native_s <= found["talk"].ttft_s
    partly = next(iter(kv.stream_generate(*pair, question(), native_head=5, native_tail=7)))
    assert (partly.translated_tokens, partly.read_tokens) == (count - 13, 13)


def test_a_switch_tells_what_it_took(model: LanguageModel) -> None:
    """Where who read the prompt, translated it and answered are told apart by their times."""
    for eager in (True, False):
        talk = talk_of(model, eager=eager)
        talk.reply("a", "the use of an other", max_tokens=4)
        first = next(iter(talk.stream_reply("b", "is it on?", max_tokens=4)))
        assert (first.translate_s > 0) is not eager and first.native_s > 0 == first.prefill_s
    first = next(iter(talk_of(model).stream_reply("b", "is it on?", prefill="a", max_tokens=4)))
    assert first.prefill_s > 0 and first.translate_s > 0 and first.native_s == 0
    assert (first.translated_tokens, first.read_tokens) == (first.prompt_tokens - 1, 1)


def test_hand_over_takes_the_templates_switches(model: LanguageModel, pair: Pair) -> None:
    asked = question()
    template = pair[1].tokenizer.apply_chat_template
    ids = template(asked, add_generation_prompt=True, enable_thinking=False)
    assert ids != template(asked, add_generation_prompt=True)
    caches = kv.hand_over(*pair, asked, enable_thinking=False), kv.hand_over(*pair, ids)
    for found, right in zip(*caches, strict=True):
        assert found.offset == len(ids) - 1
        np.testing.assert_array_equal(np.array(found.keys), np.array(right.keys))
    asked = [{"role": "user", "content": "is it on?"}]
    tools = kv.hand_over(model, model, asked, tools=TOOLS, translator=identity_of(model))
    announced = model.tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True)
    assert tools[0].offset == len(announced) - 1


@pytest.mark.parametrize("draft", ["b", "other"])
def test_a_draft_changes_no_greedy_answer(model: LanguageModel, draft: str, tmp_path: Path) -> None:
    kind, sizes = tiny.FAMILIES["qwen3"]
    other = kv.load(tiny.write_tiny_model(tmp_path / "o", kind, **{**sizes, "seed": 99}))
    talk = talk_of(model)
    drafted = []
    for name, message in (("a", "the use of an other"), ("a", "is it on?"), ("b", "and you")):
        prompt = talk.transcript.prompt(model, [{"role": "user", "content": message}])
        given_ = "b" if draft == "b" else other
        found = list(
            talk.stream_reply(name, message, max_tokens=12, draft_model=given_, num_draft_tokens=3)
        )
        assert [r.token for r in found] == expected(model, prompt, 12)
        drafted += [r.from_draft for r in found]
        assert len(talk.lines[name]) == len(talk.transcript.tokens)
    assert draft == "other" or any(drafted)


def test_what_cannot_be_combined_is_said_before_anything_is_read(
    model: LanguageModel, pair: Pair
) -> None:
    talk = talk_of(model)
    for options, message in (
        ({"draft_model": "b", "reasoning": "b"}, "draft_model cannot be used beside reasoning"),
        ({"draft_model": "b", "max_tokens": -1}, "with a draft model give a positive number"),
        ({"draft_model": pair[0]}, "has another vocabulary than"),
        ({"messages": [{"role": "user", "content": "x"}]}, "message and messages are both given"),
    ):
        with pytest.raises(ValueError, match=message):
            talk.reply("a", "hi", **options)
        assert len(talk.lines["a"]) == len(talk.lines["b"]) == 0 and talk.messages == []
    with pytest.raises(ValueError, match="messages is 'hi'; give the whole conversation"):
        talk.reply("a", messages="hi")
