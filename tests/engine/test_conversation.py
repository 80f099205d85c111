"""Conversations that switch models, against mlx-lm reading each prompt from its first token."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import finished
from tests.support import hybrid_models, tiny
from tests.support.identity import identity_of
from tests.support.parity import in_order
from tests.support.talks import NEW, ask, talk_of

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "3"))  # more of them by hand
MESSAGES = ("the use of an other", "is it on?", "and you", "hi there")


@pytest.fixture(scope="module")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root = tmp_path_factory.mktemp("talk")
    rows = {name: tiny.FAMILIES[name] for name in ("qwen3", "gemma3", "gemma4", "deepseek_v3")}
    found = {n: kv.load(tiny.write_tiny_model(root / n, t, **o)) for n, (t, o) in rows.items()}
    for name in ("nemotron_h", "lfm2"):  # hybrids of a state and a tail, and of a tail alone
        found[name] = kv.load(hybrid_models.write_hybrid_model(root / name, name))
    return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "undo", "branch", "offload", "resume", "stop"]),
        st.integers(0, len(MESSAGES) - 1),
        st.sampled_from([None, "a", "b"]),
    ),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4", "deepseek_v3", "nemotron_h", "lfm2"])
def test_switching_between_copies_is_one_model(
    family_models: dict[str, LanguageModel], name: str, tmp_path: Path
) -> None:
    model = family_models[name]

    @settings(max_examples=EXAMPLES + 1, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        steps=STEPS,
        thinking=st.sampled_from([None, False]),
        verbatim=st.booleans(),
        layers=st.sampled_from([None, 1, 2]),
        eager=st.booleans(),
    )
    def run(
        steps: list, thinking: bool | None, verbatim: bool, layers: int | None, eager: bool
    ) -> None:
        talk = talk_of(
            model,
            "abc",
            eager=eager,
            enable_thinking=thinking,
            verbatim=verbatim,
            native_layers=layers,
        )
        for action, message, prefill in steps:
            if action == "undo":
                if talk.messages:
                    talk.undo()
            elif action == "branch":
                talk, left = talk.branch(), talk
                ask(left, "a", "something else")
            elif action == "offload":
                talk.offload("abc"[message % 3], "disk")
            elif action == "resume":
                folder = talk.save(tmp_path / "talk")
                talk = Conversation.resume(
                    folder, dict.fromkeys("abc", model), talk.exchange.directions.loaded.values(),
                    eager=eager, prefill_step_size=7, native_layers=layers,
                )  # fmt: skip
            elif action == "stop":
                answer = talk.stream_reply("abc"[message % 3], MESSAGES[message], max_tokens=NEW)
                next(answer)
                answer.close()
            else:
                ask(talk, action, MESSAGES[message], prefill=prefill)

    run()


def test_only_what_a_line_lacks_is_translated(family_models: dict[str, LanguageModel]) -> None:
    talk = talk_of(family_models["qwen3"], eager=False, verbatim=True)
    ask(talk, "a", "the use of an other")
    first = len(talk.transcript.tokens)
    assert talk.lines["a"].native.nbytes > 0 == len(talk.lines["b"])
    ask(talk, "b", "is it on?")
    assert talk.last_switch is not None
    assert (talk.last_switch.kept, talk.last_switch.translated) == (0, first)
    assert talk.lines["a"].native.nbytes == 0  # nobody lacks it any more
    second = len(talk.transcript.tokens)
    ask(talk, "a", "and you")
    assert (talk.last_switch.kept, talk.last_switch.translated) == (first, second - first)
    assert talk.last_switch.ahead == 0
    spans = [(s.start, s.stop, s.writer, s.passes) for s in talk.lines["a"].spans]
    third = len(talk.transcript.tokens)
    assert spans == [(0, first, "a", 0), (first, second, "b", 1), (second, third, "a", 0)]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_native_layers_read_what_is_brought(
    family_models: dict[str, LanguageModel], name: str, eager: bool, tmp_path: Path
) -> None:
    """Below them the line is the model's own, above it what a wrong translator made of it."""
    model = family_models[name]
    assert model.path is not None
    wrong = tiny.write_random_translator(tmp_path / "wrong", model.path, model.path)
    own = talk_of(model, "ab", switching="reprefill")
    for layers in (0, 1, len(model.attentions)):
        talk = Conversation(
            dict.fromkeys("ab", model), [wrong], prefill_step_size=7, native_layers=layers,
            eager=eager, verbatim=True,
        )  # fmt: skip
        talk.reply("a", "the use of an other", max_tokens=NEW)
        tokens = talk.transcript.tokens
        finished(talk.exchange.bring("b", tokens))
        own.lines["b"].clear()
        finished(own.exchange.bring("b", tokens))
        held, expected = (
            [a for c in t.lines["b"].cache for a in (in_order(c, c.keys), in_order(c, c.values))]
            for t in (talk, own)
        )
        same = [np.allclose(a, b, atol=1e-5) for a, b in zip(held, expected, strict=True)]
        assert same[: 2 * layers] == [True] * 2 * layers
        assert not any(same[2 * layers :])


def test_a_line_that_a_template_rewrites_is_read_again_from_there(
    family_models: dict[str, LanguageModel],
) -> None:
    """The empty think block of an earlier answer goes; what stood before it is kept."""
    model = family_models["qwen3"]
    talk = talk_of(model, enable_thinking=False)
    ask(talk, "a", "hi there")
    header = model.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    turns = [{"role": "user", "content": "hi there"}]
    bare = model.tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=False)
    ask(talk, "a", "and you")
    assert talk.last_switch is not None and talk.last_switch.kept == len(bare) + len(header)


def test_a_stop_of_another_model_is_written_once(tmp_path: Path) -> None:
    """A base model stops elsewhere than its chat model, and goes on from what that one wrote."""
    models, (kind, sizes) = {}, tiny.FAMILIES["qwen3"]
    for name, stop in (("chat", "<|im_end|>"), ("base", "<|endoftext|>")):
        folder = tiny.write_tiny_model(tmp_path / name, kind, **sizes)
        for file, key in (("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")):
            facts = json.loads((folder / file).read_text())
            facts[key] = stop if key == "eos_token" else tiny.byte_tokenizer().token_to_id(stop)
            (folder / file).write_text(json.dumps(facts))
        models[name] = kv.load(folder)
    talk = Conversation(models, [identity_of(models["chat"])], verbatim=True)
    ids = iter(models["chat"].tokenizer.encode("so it is<|im_end|>") + [0] * 9)
    talk.reply("chat", "hi there", sampler=lambda _: mx.array([next(ids)]))
    new = [{"role": "user", "content": "and you"}]
    one, other = (talk.transcript.prompt(model, new) for model in models.values())
    assert one == other


def test_templates_that_differ_are_told_once(tmp_path: Path) -> None:
    """Nothing that stands behind the first token that differs can be handed over."""
    models = {}
    kind, sizes = tiny.FAMILIES["qwen3"]
    for name, opening in (("one", ""), ("other", "hi there")):
        folder = tiny.write_tiny_model(tmp_path / name, kind, **sizes)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = opening + config["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        models[name] = kv.load(folder)
    translator = identity_of(models["one"])
    options: dict[str, Any] = {"on_missing": "reprefill", "allow_mismatch": True}
    talk = Conversation(models, [translator], **options)
    with pytest.warns(UserWarning, match=r"templates of .*one and .*other differ from token 0 "):
        talk.reply("one", "is it on?", max_tokens=NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talk.reply("other", "and you", max_tokens=NEW)
        assert talk.last_switch is not None and talk.last_switch.translated == 0
        for quiet in (
            Conversation(models, [translator], verbatim=True, **options),
            Conversation(dict.fromkeys("ab", models["one"]), [translator], **options),
        ):
            quiet.reply(next(iter(quiet.lines)), "is it on?", max_tokens=NEW)


def test_reprefill_reads_the_whole_prefix(family_models: dict[str, LanguageModel]) -> None:
    talk = talk_of(family_models["qwen3"], switching="reprefill", verbatim=True, eager=False)
    for name in "abab":
        before = len(talk.transcript.tokens)
        ask(talk, name, "is it on?")
        assert talk.last_switch is not None and talk.last_switch.translated == 0
        assert not before or talk.last_switch.kept == 0
        assert [span.passes for span in talk.lines[name].spans] == [0]


def test_a_switch_without_a_translator_changes_nothing(
    family_models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLINGO_HOME", str(tmp_path))
    model = family_models["qwen3"]
    copy = kv.load(shutil.copytree(model.path, tmp_path / "copy"))
    with pytest.warns(kv.KVLingoWarning, match="no translator from a to b, none from b to a"):
        talk = Conversation({"a": model, "b": copy})
    ask(talk, "a", "hi there")
    before = talk.messages, talk.transcript.tokens
    with pytest.raises(kv.MissingTranslatorError, match="from a .* to b .*on_missing='reprefill'"):
        talk.reply("b", "and you")
    assert (talk.messages, talk.transcript.tokens) == before
    ask(talk, "a", "and you")
    talk.exchange.rules = dataclasses.replace(talk.exchange.rules, on_missing="reprefill")
    ask(talk, "b", "is it on?")
    assert talk.last_switch is not None and talk.last_switch.translated == 0


def test_an_answer_cut_short_is_kept(family_models: dict[str, LanguageModel]) -> None:
    talk = talk_of(family_models["qwen3"])
    answer = talk.stream_reply("a", "hi there", max_tokens=NEW)
    texts = [next(answer).text for _ in range(2)]
    answer.close()
    # Bytes of a character that is not yet complete are told, though they were not streamed.
    said = family_models["qwen3"].tokenizer.decode(talk.transcript.tokens[-2:])
    assert talk.messages[-1]["content"] == said and said.startswith("".join(texts))
    ask(talk, "b", "and you")


def test_the_source_writes_the_first_token_or_the_trace(
    family_models: dict[str, LanguageModel],
) -> None:
    talk = talk_of(family_models["qwen3"])
    ask(talk, "b", "hi there", prefill="a", first_token="source")
    assert [s.writer for s in talk.lines["b"].spans] == ["a", "b"]
    ask(talk, "b", "and you", reasoning="a")
    with pytest.raises(ValueError, match="first_token has no effect without prefill"):
        talk.reply("b", "x", first_token="source")


def test_the_second_writers_text_keeps_its_first_space(
    family_models: dict[str, LanguageModel],
) -> None:
    """mlx-lm takes it off, as if nothing stood before."""
    model = family_models["qwen3"]
    ids = iter(model.tokenizer.encode("the use of") * 9)
    scripted = {"sampler": lambda logprobs: mx.array([next(ids)]), "max_tokens": 3}
    talk = talk_of(model)
    said = talk.reply("b", "hi there", prefill="a", first_token="source", **scripted)
    assert len(model.tokenizer.encode("the use of")) >= 3 and " " in said
    assert said == talk.messages[-1]["content"]


def test_an_answer_ends_with_its_models_context(
    family_models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_models["qwen3"]
    talk = talk_of(model)
    prompt = len(talk.transcript.prompt(model, [{"role": "user", "content": "hi there"}]))
    monkeypatch.setattr(type(model), "context_length", prompt + 3)
    parts = list(talk.stream_reply("a", "hi there", max_tokens=-1))
    assert len(parts) <= 4 and len(talk.lines["a"]) <= prompt + 4
    with pytest.raises(ValueError, match="the context of"):
        talk.reply("b", "and you")


def test_bad_arguments(family_models: dict[str, LanguageModel]) -> None:
    model = family_models["qwen3"]
    with pytest.raises(ValueError, match="switching is 'fast'; it must be one of alternated"):
        talk_of(model, switching="fast")
    with pytest.raises(ValueError, match="there is no model 'z'; there are a, b"):
        talk_of(model).reply("z", "hi")
    for message in (None, {"role": "user"}, ["hi"], b"hi", []):
        with pytest.raises(ValueError, match="the message is .*; give text, or a list of messages"):
            talk_of(model).reply("a", message)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tools must be what JSON can hold"):
        talk_of(model, tools=[{"names": {1, 2}}])
    with pytest.raises(ValueError, match="there is nothing to undo"):
        talk_of(model).undo()
    other = family_models["deepseek_v3"]
    with pytest.raises(kv.IncompatibleTranslatorError, match="fits no two of this conversation's"):
        Conversation({"a": model, "b": model}, [identity_of(other, capture="latent")])
