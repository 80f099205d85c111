"""Conversations: whatever is said and done, an answer is mlx-lm's to the history, read anew."""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import finished
from tests.support import tiny
from tests.support.fixtures import Models
from tests.support.identity import identity_of
from tests.support.native_caches import held
from tests.support.talks import NEW, ask, check_caches, expected, talk_of, thought
from tests.support.two_tokenizers import identities

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "4"))  # more of them by hand
MESSAGES = ("the use of an other", "is it on?", "and you", "hi there")
PLAIN = ("qwen3", "gemma3", "gemma4", "deepseek_v3")
HYBRIDS = ("granitemoehybrid", "nemotron_h", "lfm2")  # of a state and a tail, or a tail alone
ACROSS = "two tokenizers"
CHANGED = [("a", "system", 143), ("b", "system", 41)]  # only the first message is another one
Mask = Callable[[mx.array, mx.array], mx.array]


def altered(folder: Path, name: str, **facts: Any) -> LanguageModel:
    """A tiny Qwen3 with other entries in its tokenizer's config, and the stop that it has there."""
    kind, sizes = tiny.FAMILIES["qwen3"]
    folder = tiny.write_tiny_model(folder / name, kind, **sizes)
    tiny.amend(folder / "tokenizer_config.json", **facts)
    if "eos_token" in facts:
        stop = tiny.byte_tokenizer().token_to_id(facts["eos_token"])
        tiny.amend(folder / "config.json", eos_token_id=stop)
    return kv.load(folder)


def plain_text(model: LanguageModel, most: int = 9) -> Mask:
    """Only tokens of letters, ``most`` at most, and the stop: what any decoder gives back."""
    mask = np.full(model.geometry.embedding_rows, -np.inf, np.float32)
    for token in range(len(model.tokenizer.get_vocab())):
        text = model.tokenizer.decode([token])
        if 0 < len(text) <= most and all(c in "abcdefghijklmnopqrstuvwxyz" for c in text):
            mask[token] = 0
    mask[list(model.tokenizer.eos_token_ids)] = 0
    return lambda tokens, logits: logits + mx.array(mask)


@dataclasses.dataclass
class Shadow:
    """A conversation as a list: messages, and the tokens in which answers were written."""

    model: LanguageModel
    only: Mask
    header: str = ""
    room: int | None = None
    spelled: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    before: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)

    def _encode(self, text: str) -> list[int]:
        return list(self.model.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """All tokens: answers as they were written, what stands between them as one text."""
        ids, text = [], ""
        for message in messages:
            opened = f"<|im_start|>{message['role']}\n"
            if message["role"] == "assistant" and message["content"] in self.spelled:
                ids += self._encode(text + opened) + self.spelled[message["content"]]
                text = "<|im_end|>\n"
            else:
                text += f"{opened}{message['content']}<|im_end|>\n"
        return ids + self._encode(text + "<|im_start|>assistant\n" + self.header)

    def fitting(self, messages: list[dict[str, Any]]) -> list[Any]:
        """Messages without the oldest turns that leave an answer no room."""
        while self.room is not None and len(self.prompt(messages)) + NEW > self.room + 1:
            users = [i for i, m in enumerate(messages) if m["role"] == "user"]
            if len(users) < 2:
                break
            kept = [m for m in messages[: users[0]] if m["role"] == "system"]
            messages = kept + messages[users[1] :]
        return messages

    def cut(self, characters: int) -> None:
        """The last answer's first characters: its whole tokens, and the rest cut anew."""
        content = self.messages[-1]["content"]
        left = content[:characters]
        self.messages = [*self.messages[:-1], {"role": "assistant", "content": left}]
        ids, whole = self.spelled.get(content, []), 0
        for count in range(1, len(ids) + 1):
            if left.startswith(self.model.tokenizer.decode(ids[:count])):
                whole = count
        if left and left != content:
            done = len(self.model.tokenizer.decode(ids[:whole]))
            self.spelled[left] = ids[:whole] + self._encode(left[done:])


def reply(
    talk: Conversation, shadow: Shadow, name: str, new: list[Any], steps: int = 99, **options: Any
) -> None:
    """One reply to all of ``new``, left after some steps, which must be mlx-lm's own."""
    asked = shadow.fitting(new)
    prompt, line = shadow.prompt(asked), talk.lines[name]
    held = list(line.tokens)
    answer = talk.stream_reply(name, max_tokens=NEW, logits_processors=[shadow.only], **options)
    responses = list(itertools.islice(answer, steps))
    answer.close()
    ids = [response.token for response in responses]
    right = expected(shadow.model, prompt, logits_processors=[shadow.only])
    assert ids == right[: len(ids)] and (steps < NEW or len(ids) == len(right))
    kept, first = common_prefix(held, prompt[:-1]), responses[0]
    assert first.prompt_tokens == len(prompt)
    assert first.cached_tokens + first.translated_tokens + first.read_tokens == len(prompt)
    there = first.cached_tokens + first.ahead_tokens
    assert there <= kept  # a ring or a state may have to go back further
    if there < kept and "prefill" not in options:
        across = len({line.model.tokenizer for line in talk.lines.values()}) > 1
        assert across or any(map(caches.forgets, line._caches))
    ids = ids[:-1] if ids[-1] in shadow.model.tokenizer.eos_token_ids else ids
    text = shadow.model.tokenizer.decode(ids)
    assert "".join(r.text for r in responses) == text
    shadow.before.append(shadow.messages)
    shadow.messages = [*asked, {"role": "assistant", "content": text}]
    if text:
        shadow.spelled[text] = ids
    assert talk.messages == shadow.messages
    for each in talk.lines.values():
        check_caches(each)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            "ask ask prefill stop history set truncate undo branch resume offload".split()
        ),
        st.sampled_from("abb"),
        st.sampled_from("append edit shorten answer system".split()),
        st.integers(0, 999),
    ),
    min_size=3,
    max_size=9,
)


def edited(messages: list[Any], edit: str, number: int) -> list[Any]:
    """A history that ends with a user's message, with one change somewhere."""
    history = [dict(message) for message in messages]
    at = number % (len(history) or 1)
    if edit == "shorten":
        history = history[:at]
    elif edit == "system":
        history = [{"role": "system", "content": MESSAGES[number % 4]}] + [
            m for m in history if m["role"] != "system"
        ]
    elif history and (edit == "edit" or (edit == "answer" and at % 2)):
        history[at]["content"] += " so"
    return [*history, {"role": "user", "content": MESSAGES[number % 4]}]


FAMILIES = [
    *((name, "error") for name in (*PLAIN, *HYBRIDS, ACROSS)),
    *((name, "drop_oldest") for name in ("qwen3", "gemma3", HYBRIDS[0], ACROSS)),
]


@pytest.mark.parametrize(("family", "on_full"), FAMILIES)
def test_any_history_is_answered_as_if_read_anew(
    families: Models, twins: list[LanguageModel], family: str, on_full: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Switches between copies of one model are no change; nor is what a line kept of a history."""
    across = family == ACROSS
    one = twins[0] if across else families[family]
    only = plain_text(one, 1 if across else 9)
    models = dict(zip("ab", twins if across else [one, one], strict=True))
    translators = identities(*twins) if across else [
        identity_of(one, capture=one.family.points[0])
    ]  # fmt: skip
    room = None
    if on_full == "drop_oldest":
        room = 250 if across else 110  # letters are tokens there
        monkeypatch.setattr(LanguageModel, "context_length", room)

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # to shrink one takes minutes
    )  # fmt: skip
    @given(
        steps=STEPS,
        thinking=st.sampled_from([None, False]),
        eager=st.booleans(),
        layers=st.sampled_from([None, 1]),
    )
    @example([("history", *each) for each in CHANGED], None, False, None)
    def run(steps: list[Any], thinking: bool | None, eager: bool, layers: int | None) -> None:
        if across:  # an answer is taken over in the context it was written in
            thinking = layers = None
        rules: dict[str, Any] = {"prefill_step_size": 7, "on_full": on_full, "eager": eager}
        rules["native_layers"] = layers
        talk = Conversation(models, translators, enable_thinking=thinking, **rules)
        shadow = Shadow(one, only, "" if thinking is None else "<think>\n\n</think>\n\n", room)
        for action, name, edit, number in steps:
            asked = {"role": "user", "content": MESSAGES[number % 4]}
            history = edited(shadow.messages, edit, number)
            if room is None and len(history) > 16:
                return
            new, more = [*shadow.messages, asked], {"message": asked["content"]}
            if action in ("ask", "stop"):
                steps_of = 1 + number % 2 if action == "stop" else 99
                reply(talk, shadow, name, new, steps_of, **more)
            elif action == "prefill" and not across:
                reply(talk, shadow, name, new, prefill="ab"[number % 2], **more)
            elif action == "history":
                reply(talk, shadow, name, history, messages=history)
            elif action == "set":
                talk.messages = history
                assert talk.messages == history
                shadow.before.append(shadow.messages)
                shadow.messages = history
                reply(talk, shadow, name, history)
            elif action == "truncate" and shadow.messages:
                if shadow.messages[-1]["role"] == "user":  # set, answered, and that undone
                    with pytest.raises(ValueError, match="nothing to truncate"):
                        talk.truncate_answer(0)
                    continue
                characters = number % (len(shadow.messages[-1]["content"]) + 1)
                talk.truncate_answer(characters)
                shadow.cut(characters)
                assert talk.messages == shadow.messages
            elif action == "undo" and shadow.before:
                talk.undo()
                shadow.messages = shadow.before.pop()
                assert talk.messages == shadow.messages
            elif action == "branch":
                left, talk = talk, talk.branch()
                left.reply("a", "something else", max_tokens=2)
            elif action == "offload":
                talk.offload(name, "disk")
            elif action == "resume":
                talk = Conversation.resume(
                    talk.save(tmp_path / "talk"), models, translators, **rules
                )

    run()


def test_only_what_a_line_lacks_is_translated(model: LanguageModel) -> None:
    talk = talk_of(model, eager=False, verbatim=True)
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


@pytest.mark.parametrize(("name", "eager"), [("qwen3", True), ("gemma3", False)])
def test_native_layers_read_what_is_brought(
    families: Models, name: str, eager: bool, tmp_path: Path
) -> None:
    """Below them the line is the model's own, above it what a wrong translator made of it."""
    model = families[name]
    assert model.path is not None
    wrong = tiny.write_random_translator(tmp_path / "wrong", model.path, model.path)
    own = talk_of(model, "ab", switching="reprefill")
    for layers in (0, 1, len(model.attentions)):
        talk = Conversation(
            dict.fromkeys("ab", model), [wrong], prefill_step_size=7, native_layers=layers,
            eager=eager, verbatim=True,
        )  # fmt: skip
        talk.reply("a", "the use of an other", max_tokens=NEW)
        own.lines["b"].clear()
        for each in (talk, own):
            finished(each.exchange.bring("b", talk.transcript.tokens))
        found, expected = (
            [array for cache in each.lines["b"].cache for array in held(cache)]
            for each in (talk, own)
        )
        alike = [np.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)]
        assert alike == [True] * 2 * layers + [False] * (len(alike) - 2 * layers)


def test_a_stop_of_another_model_is_written_once(tmp_path: Path) -> None:
    """A base model stops elsewhere than its chat model, and goes on from what that one wrote."""
    stops = {"chat": "<|im_end|>", "base": "<|endoftext|>"}
    models = {name: altered(tmp_path, name, eos_token=stop) for name, stop in stops.items()}
    talk = Conversation(models, [identity_of(models["chat"])], verbatim=True)
    ids = iter(models["chat"].tokenizer.encode("so it is<|im_end|>") + [0] * 9)
    talk.reply("chat", "hi there", sampler=lambda _: mx.array([next(ids)]))
    new = [{"role": "user", "content": "and you"}]
    one, other = (talk.transcript.prompt(model, new) for model in models.values())
    assert one == other


def test_templates_that_differ_are_told_once(tmp_path: Path) -> None:
    """Nothing that stands behind the first token that differs can be handed over."""
    one = altered(tmp_path, "one")
    template = f"hi there{tiny.CHAT_TEMPLATE}"
    models = {"one": one, "other": altered(tmp_path, "other", chat_template=template)}
    options: dict[str, Any] = {"on_missing": "reprefill", "allow_mismatch": True}
    translator = identity_of(one)
    talk = Conversation(models, [translator], **options)
    with pytest.warns(UserWarning, match=r"templates of .*one and .*other differ from token 0 "):
        talk.reply("one", "is it on?", max_tokens=NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talk.reply("other", "and you", max_tokens=NEW)
        assert talk.last_switch is not None and talk.last_switch.translated == 0
        for quiet in (
            Conversation(models, [translator], verbatim=True, **options),
            Conversation(dict.fromkeys("ab", one), [translator], **options),
        ):
            quiet.reply(next(iter(quiet.lines)), "is it on?", max_tokens=NEW)


def test_the_source_writes_the_first_token_or_the_trace(model: LanguageModel) -> None:
    talk = talk_of(model)
    ask(talk, "b", "hi there", prefill="a", first_token="source")
    assert [s.writer for s in talk.lines["b"].spans] == ["a", "b"]
    ask(talk, "b", "and you", reasoning="a")
    # mlx-lm takes the second writer's first space off, as if nothing stood before.
    ids = iter(model.tokenizer.encode("the use of") * 9)
    scripted = {"sampler": lambda logprobs: mx.array([next(ids)]), "max_tokens": 3}
    talk = talk_of(model)
    said = talk.reply("b", "hi there", prefill="a", first_token="source", **scripted)
    assert " " in said and said == talk.messages[-1]["content"]


@pytest.mark.parametrize("verbatim", [True, False])
def test_a_history_without_its_reasoning_is_ours(model: LanguageModel, verbatim: bool) -> None:
    """It costs the new turn alone, and the answer's tokens are those that were written."""
    talk = talk_of(model, verbatim=verbatim)
    ids = thought(talk, "a", "hi there", "<think>the use of it</think>\n\nin the house")
    other, held = talk.branch(), talk.transcript.tokens
    sent = [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "in the house", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "and you", "name": None},
    ]
    first = next(iter(talk.stream_reply("a", messages=sent, max_tokens=NEW)))
    assert first.cached_tokens == len(held) == first.prompt_tokens - first.read_tokens
    assert talk.transcript.tokens[: len(held)] == held and held[-len(ids) :] == ids
    assert talk.messages[1]["reasoning_content"] == "the use of it"
    sent[1]["content"] = "in the boat"  # another answer is no answer of ours
    first = next(iter(other.stream_reply("a", messages=sent, max_tokens=NEW)))
    assert first.cached_tokens <= len(held) - len(ids)
    assert other.messages[1]["content"] == "in the boat"


def test_a_full_context_is_told_where_no_turn_can_be_dropped(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "context_length", 100)
    short: dict[str, Any] = {"max_tokens": NEW, "logits_processors": [plain_text(model)]}
    full = talk_of(model, on_full="error", system="be kind")
    with pytest.raises(ValueError, match="the context of .* is 100; shorten the prompt"):
        for _ in range(9):
            full.reply("a", "is it on?", **short)
    talk = talk_of(model, on_full="drop_oldest", system="be kind")
    talk.reply("a", "is it on?", **short)
    before = talk.messages
    with pytest.raises(ValueError, match="the context of"):
        talk.reply("a", "is it on? " * 40, max_tokens=NEW)
    assert talk.messages == before
    with pytest.raises(ValueError, match="on_full is 'drop'; give error or drop_oldest"):
        talk_of(model, on_full="drop")


def test_what_cannot_be_truncated_or_set_is_said(model: LanguageModel) -> None:
    talk = talk_of(model)
    with pytest.raises(ValueError, match="the last message is no answer, so there is nothing"):
        talk.truncate_answer(1)
    thought(talk, "a", "hi there", "in the house")
    wrong_cuts: list[tuple[Any, str]] = [
        (13, "but the answer has 12; give 0 to 12"),
        (-1, "characters is -1; give a number of characters, 0 or more"),
        ("3", "characters is '3'; give a number of characters"),
    ]
    for cut, message in wrong_cuts:
        with pytest.raises(ValueError, match=message):
            talk.truncate_answer(cut)
    for wrong in ("hi", ["hi"], [{"content": "hi"}]):
        with pytest.raises(ValueError, match="give "):
            talk.messages = wrong  # type: ignore[assignment]
    answer = talk.stream_reply("a", "x", max_tokens=3)
    next(answer)
    for change in (lambda: talk.truncate_answer(1), lambda: setattr(talk, "messages", [])):
        with pytest.raises(ValueError, match="an answer is still being written"):
            change()
    answer.close()
    talk.undo()
    assert [m["content"] for m in talk.messages] == ["hi there", "in the house"]
    talk.messages = []
    talk.undo()  # takes back the change
    assert len(talk.messages) == 2


def test_bad_arguments(families: Models) -> None:
    model, other = families["qwen3"], families["deepseek_v3"]
    with pytest.raises(ValueError, match="switching is 'fast'; give alternated or reprefill"):
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
    with pytest.raises(kv.IncompatibleTranslatorError, match="fits no two of this conversation's"):
        Conversation({"a": model, "b": model}, [identity_of(other, capture="latent")])
