"""What a model wrote is a message: for its own template, for another model's, and for clients."""

from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.identity import identity_of
from tests.support.talks import talk_of, thought, writing
from tests.support.tool_callers import TEMPLATE, TOOLS, write_caller

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
# As Gemma 4's: a result stands beside the call that it belongs to, or nowhere.
BESIDE = (
    "{%- for m in messages -%}{%- if m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{{- m.content or '' -}}{%- if m.tool_calls -%}"
    "{%- for c in m.tool_calls -%}{{- '[' + c.function.name -}}"
    "{%- for name, value in c.function.arguments|items -%}{{- ' ' ~ name ~ '=' ~ value -}}"
    "{%- endfor -%}{{- ']' -}}{%- endfor -%}"
    "{%- for t in messages[loop.index:] if t.role == 'tool' -%}{{- '=' + t.content -}}"
    "{%- endfor -%}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if tools -%}{{- '# ' ~ (tools | length) -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def caller(folder: Path, template: str) -> LanguageModel:
    tiny.amend(write_caller(folder) / "tokenizer_config.json", chat_template=template)
    return kv.load(folder)


def prompt_of(talk: Conversation, name: str, new: list[dict[str, Any]]) -> str:
    """The text of what a model would read."""
    model = talk.lines[name].model
    return model.tokenizer.decode(talk.transcript.prompt(model, new))


def test_a_call_reaches_each_template_in_its_own_form(tmp_path: Path) -> None:
    """With its result; and the model that wrote it keeps its tokens."""
    models = {
        "own": caller(tmp_path / "own", TEMPLATE),
        "beside": caller(tmp_path / "beside", BESIDE),
    }
    options: dict[str, Any] = {"on_missing": "reprefill", "allow_mismatch": True}
    talk = Conversation(models, [identity_of(models["own"])], tools=TOOLS, **options)
    thought(talk, "own", "is it on?", CALL)
    said = talk.messages[-1]
    assert said["content"] == "" and len(said["tool_calls"]) == 1
    call = said["tool_calls"][0]
    assert call["function"] == {"name": "look", "arguments": {"at": 1}}
    result = [{"role": "tool", "content": "a lamp", "tool_call_id": call["id"]}]
    assert "[look at=1]=a lamp" in prompt_of(talk, "beside", result)
    own, held = prompt_of(talk, "own", result), talk.transcript.tokens
    assert CALL in own and "<tool_response>\na lamp\n</tool_response>" in own
    assert talk.transcript.prompt(models["own"], result)[: len(held)] == held
    # A client sends it back as the JSON text of an object, under an id of its own.
    function = {"name": "look", "arguments": '{"at":1}'}
    sent = {"id": "x", "type": "function", "function": function}
    talk.messages = [
        talk.messages[0],
        {"role": "assistant", "content": None, "tool_calls": [sent]},
        {**result[0], "tool_call_id": "x"},
    ]
    assert talk.messages[1]["tool_calls"] == [{**call, "id": "x"}]
    assert "[look at=1]=a lamp" in prompt_of(talk, "beside", [])
    assert prompt_of(talk, "own", []) == own


@pytest.mark.parametrize("verbatim", [True, False])
def test_a_thought_that_was_cut_ends_there(model: LanguageModel, verbatim: bool) -> None:
    """Later answers are no reasoning, whoever gives them, and no later prompt is left open."""
    talk = talk_of(model, verbatim=verbatim)
    mark = model.tokenizer.get_vocab()["<think>"]

    def reply(name: str, message: str, ids: list[int]) -> list[kv.GenerationResponse]:
        return list(talk.stream_reply(name, message, sampler=writing(ids), max_tokens=2))

    assert "".join(r.reasoning for r in reply("a", "hi", [mark, *model.tokenizer.encode("on")]))
    assert talk.messages[-1]["content"] == "" != talk.messages[-1]["reasoning_content"]
    prompt = prompt_of(talk, "b", [{"role": "user", "content": "and you"}])
    assert verbatim or prompt.count("<think>") == prompt.count("</think>")
    for name in "ab":
        found = reply(name, "and <think> you", model.tokenizer.encode("the use of it"))
        assert not any(response.reasoning for response in found)
        assert "".join(response.content for response in found)


def test_what_was_cut_is_divided_again(model: LanguageModel) -> None:
    """A cut counts the characters that were written, marks included."""
    talk = talk_of(model)
    thought(talk, "a", "hi", "<think>so it is</think>\n\non it")
    assert talk.messages[-1]["content"] == "on it"
    talk.truncate_answer(len("<think>so it is</think>\n\non"))
    assert (talk.messages[-1]["reasoning_content"], talk.messages[-1]["content"]) == (
        "so it is",
        "on",
    )
    talk.truncate_answer(len("<think>so"))
    assert (talk.messages[-1]["reasoning_content"], talk.messages[-1]["content"]) == ("so", "")


TURNS = "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content -}}{%- endfor -%}"
SHORT = "{%- if add_generation_prompt -%}{{- '[assistant]HEADER' -}}{%- endif -%}"
HEADERS = {
    TURNS + SHORT.replace("HEADER", ""): False,
    TURNS + SHORT.replace("HEADER", "<think>\\n"): True,
    TURNS + SHORT.replace("HEADER", "<think>\\n\\n</think>\\n\\n"): False,
    TURNS + SHORT.replace("HEADER", "<think>\\nIn short: "): True,
    TURNS + "{{- '[/]' -}}": False,  # without a header, or always with one
    TURNS + "{{- '[assistant]<think>\\n' -}}": True,
}
MARKED = ("plain", "what is <think>", "and </think>", "<think>a</think> or <think>\n", "</think>\n")


@pytest.mark.parametrize("template, opens", HEADERS.items())
def test_only_the_template_opens_a_trace(template: str, opens: bool, tmp_path: Path) -> None:
    """Whatever marks questions, results, instructions and earlier answers hold."""
    model = caller(tmp_path / "m", template)
    ids = model.tokenizer.encode("the use of it", add_special_tokens=False)
    talk, most = talk_of(model), {"max_tokens": len(ids)}
    for mark in MARKED:
        told = [
            {"role": "system", "content": mark},
            {"role": "user", "content": mark},
            {"role": "assistant", "content": mark},
            {"role": "tool", "content": mark},
        ]
        for listed in (told, told[:2]):
            ways = [
                talk.stream_reply("a", messages=listed, sampler=writing(ids), **most),
                kv.stream_generate(
                    model, model, listed, strategy="native", sampler=writing(ids), **most
                ),
            ]
            for responses in map(list, ways):
                content, reasoning = (
                    "".join(getattr(r, name) for r in responses)
                    for name in ("content", "reasoning")
                )
                assert (content, reasoning) == (
                    ("", "the use of it") if opens else ("the use of it", "")
                )


def test_models_of_one_vocabulary_keep_lines_in_their_own_templates(tmp_path: Path) -> None:
    """What another template makes of the conversation takes nothing from a model's line."""
    models = {
        "own": caller(tmp_path / "own", TEMPLATE),
        "other": caller(tmp_path / "other", BESIDE.replace("<|im_start|>", "<|im_start|># ")),
    }
    talk = Conversation(models, on_missing="reprefill", allow_mismatch=True)
    thought(talk, "own", "is it on?", "it is on and on")
    held = list(talk.lines["own"].tokens)
    thought(talk, "other", "are you there?", "here")
    prompt = talk.transcript.prompt(models["own"], [{"role": "user", "content": "and now?"}])
    kept = talk.lines["own"].common(prompt)
    assert kept > len(held) - 3 > 10 and talk.lines["own"].tokens[:kept] == held[:kept]
