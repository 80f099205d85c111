"""A guard compares both models where a translation ends: what it measures, and what follows."""

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.embedded.bundled import bundled
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.loading.grading import receipt_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.fixtures import Models
from tests.support.guards import logs, with_receipt
from tests.support.healings import in_a_row, noted
from tests.support.native_caches import entries, native
from tests.support.ranks import no_end
from tests.support.talks import talk_of
from tests.support.tiny import Case

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.errors.KVLingoWarning")
NAMES = ("tiny-qwen3-s", "tiny-qwen3-l")
CASES = (
    Case("dense4x16", "moe2x32", nu=2),
    Case("gemma2x32", "gemma4x16"),
    Case("same2x32", "shared2x32", nu=2),
    Case("mla48", "mla64"),
)
DOUBT = "is in doubt: the models are .* nats apart"
Ends = Sequence[LanguageModel]


def plainly(
    ends: Ends, translator: Translator, tokens: list[int], start: int, stop: int, **options: Any
) -> float:
    """KL over a window, by plain calls; all before it is translated."""
    source, target = ends
    p = logs(source, make_prompt_cache(source.model), tokens[:stop])[start:]
    cache = kv.hand_over(source, target, tokens[: start + 1], translator=translator, **options)
    q = logs(target, cache, tokens[start:stop])[:, : p.shape[1]]
    q -= np.log(np.exp(q).sum(-1, keepdims=True))  # over the tokens that both have
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hand_over_against_two_plain_readings(case: Case, tmp_path: Path) -> None:
    source, target, folder = tiny.write_case(tmp_path, case)
    ends, translator = (kv.load(source), kv.load(target)), kv.load_translator(folder)
    translator = with_receipt(translator)
    tokens, number = tiny.random_tokens(70), 20
    last = len(tokens) - 1 - number
    for step in (16, 2048):
        options: Any = {"translator": translator, "prefill_step_size": step}
        (response,) = kv.stream_generate(*ends, tokens, guard=number, max_tokens=1, **options)
        found, wanted = response.guarded, plainly(ends, tokens=tokens, start=last,
                                                  stop=len(tokens) - 1, **options)  # fmt: skip
        assert found is not None and found.tokens == number
        assert found.divergence == pytest.approx(wanted, rel=1e-4)
        limit = 0.5 + 4 * 0.1 * (32 / number) ** 0.5  # fewer tokens than the receipt's tell less
        assert found.limit == pytest.approx(limit)
        assert bool(found.doubts) == (found.divergence > limit)
        assert response.read_tokens == number + 1


def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    """As in one family's released sizes: the same tokens, and rows that no token has."""
    facts: dict[str, Any] = dict(seed=1, layers=3, kv_heads=2, head_dim=32)
    small = kv.load(tiny.write_tiny_model(tmp_path / "a", "qwen3", **facts))
    large = kv.load(tiny.write_tiny_model(tmp_path / "b", "qwen3", **facts, vocab=tiny.VOCAB + 24))
    talks = dialogues.for_fitting(2, facts=(4, 6))
    fitted = kv.fit(small, large, [{"messages": talk.conversation()} for talk in talks])
    tokens, options = tiny.random_tokens(70), {"guard": 20, "max_tokens": 1}
    (found,) = kv.stream_generate(small, large, tokens, translator=with_receipt(fitted), **options)
    wanted = plainly((small, large), fitted, tokens, len(tokens) - 21, len(tokens) - 1)
    assert found.guarded.divergence == pytest.approx(wanted, rel=1e-4)


def last_of(talk: Conversation, name: str, message: Any, **options: Any) -> kv.GenerationResponse:
    *_, last = talk.stream_reply(name, message, **{"max_tokens": 4, **options})
    return last


FIRST, SHORT = "the use of an other " * 12, "and you"
LONG = "is it on? hi there, and this is much longer than that " * 5
GUARD = 40


@pytest.mark.parametrize("way", ["short", "long", "eager", "prefill", "stored"])
def test_a_switch_against_two_plain_readings(
    models: dict[str, LanguageModel], poor: list[Translator], way: str
) -> None:
    """Few new tokens: the prompt's last ones. Many: those after what the other model holds."""
    ends = models["dense"], models["wide"]
    pair = dict(zip("ab", ends, strict=True))
    talk = Conversation(pair, poor, prefill_step_size=7, guard=GUARD, eager=way == "eager")
    held: list[int] = []
    if way != "prefill":
        last_of(talk, "a", FIRST)
        held, before = list(talk.lines["a"].tokens), entries(talk.lines["a"].cache)
    if way == "stored":
        talk.offload("a", "disk")
    message = {"long": LONG, "prefill": FIRST}.get(way, SHORT)
    last = last_of(talk, "b", message, **({"prefill": "a"} if way == "prefill" else {}))
    prompt = talk.lines["b"].tokens[: last.prompt_tokens]
    common = len(prompt) - 1
    if held:
        apart = (i for i, (x, y) in enumerate(zip(held, prompt, strict=False)) if x != y)
        common = next(apart, min(len(held), len(prompt)))
    start = min(common, len(prompt) - 1 - GUARD)
    assert (start == common) == (way == "long")
    found = last.guarded
    assert found is not None and found.tokens == GUARD
    wanted = plainly(ends, poor[0], prompt, start, start + GUARD)
    assert found.divergence == pytest.approx(wanted, rel=1e-4)
    assert last.cached_tokens + last.translated_tokens == start
    assert last.read_tokens == len(prompt) - start
    assert talk.last_switch is not None and talk.last_switch.guarded == found
    if held:  # the other model's line is what it was, bit by bit
        assert talk.lines["a"].tokens[: len(held)] == held
        for one, other in zip(before, entries(talk.lines["a"].cache), strict=True):
            assert np.array_equal(one, other[..., : one.shape[-2], :])


def test_only_a_switch_to_something_translated_is_guarded(
    models: dict[str, LanguageModel], poor: list[Translator]
) -> None:
    pair = {"a": models["dense"], "b": models["wide"]}
    talk = Conversation(pair, poor, guard=GUARD)
    messages = (("a", FIRST), ("a", SHORT), ("b", SHORT), ("b", SHORT), ("a", SHORT))
    found = [last_of(talk, *each).guarded is not None for each in messages]
    assert found == [False, False, True, False, True]
    few = Conversation(pair, poor, guard=2000)  # more than there are: half of them
    last_of(few, "a", FIRST)
    last = last_of(few, "b", SHORT)
    assert last.guarded is not None and last.guarded.tokens == (last.prompt_tokens - 1) // 2
    assert last.translated_tokens + last.cached_tokens == last.prompt_tokens // 2


@pytest.fixture(scope="module")
def good() -> list[Translator]:
    return [kv.load_translator(TRANSLATORS / "--".join(ends)) for ends in (NAMES, NAMES[::-1])]


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [list(t.messages) for t in dialogues.held_out(count, seed=11, facts=(12, 28))]


def answered(pair: Ends, prompt: Any, **options: Any) -> tuple[list[int], kv.GenerationResponse]:
    options = {"max_tokens": 12, **options}
    found = list(kv.stream_generate(*pair, prompt, enable_thinking=False, **options))
    return [response.token for response in found], found[-1]


def test_what_is_good_is_not_doubted_and_what_is_wrong_is(
    pair: Ends, good: list[Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warned of, read behind, or read anew; a good one answers as without a guard."""
    wrong, chunks = conditions.shuffled(good[0]), noted(monkeypatch)
    for prompt in prompts(4):
        with warnings.catch_warnings():
            warnings.simplefilter("error", kv.KVLingoWarning)
            tokens, last = answered(pair, prompt, translator=good[0], guard=32, on_doubt="heal")
        assert last.guarded is not None and not last.guarded.doubts and not chunks
        assert tokens == answered(pair, prompt, translator=good[0], native_tail=32)[0]
        asked: dict[str, Any] = {"translator": wrong, "guard": 32}
        with pytest.warns(kv.KVLingoWarning, match=DOUBT):
            answered(pair, prompt, **asked)
        assert not chunks
        tokens, last = answered(pair, prompt, **asked, on_doubt="reread")
        own, alone = answered(pair, prompt, strategy="native")
        assert tokens == own and last.strategy == "native" and last.translated_tokens == 0
        assert last.translator is None and last.read_tokens == alone.read_tokens
        assert last.guarded is not None and len(last.guarded.doubts) == 1
        _, last = answered(pair, prompt, **asked, on_doubt="heal")
        assert last.strategy == "accelerator" and chunks and chunks[0].start == 0
        chunks.clear()


def tokens_of(model: LanguageModel) -> list[int]:
    """A prompt's tokens."""
    return list(
        model.tokenizer.apply_chat_template(
            prompts(1)[0], add_generation_prompt=True, enable_thinking=False
        )
    )


@pytest.mark.parametrize("layers", [0, 2])
def test_what_was_read_for_the_guard_alone_is_read_again(
    pair: Ends, good: list[Translator], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Its tokens attended to translated ones, which are wrong here."""
    target, wrong, chunks = pair[1], conditions.shuffled(good[0]), noted(monkeypatch)
    tokens = tokens_of(target)
    for _ in kv.stream_generate(
        *pair, tokens, translator=wrong, guard=32, on_doubt="heal", native_layers=layers,
        max_tokens=300, logits_processors=[no_end(target)],
    ):  # fmt: skip
        pass
    assert in_a_row(chunks) == len(tokens) - 1
    own = native(target, tokens[:-1], 2048)
    for a, b in zip(chunks[-1].cache, own, strict=True):
        for side in tiny.SIDES:
            found, wanted = (np.array(getattr(c, side)[0, :, : len(tokens) - 1]) for c in (a, b))
            assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_handed_over_cache_is_read_anew(pair: Ends, good: list[Translator]) -> None:
    target, wrong, tokens = pair[1], conditions.shuffled(good[0]), tokens_of(pair[1])
    own = native(target, tokens[:-1], 2048)
    for found, near, heal in ((wrong, True, None), (good[0], False, None), (wrong, True, "idle")):
        cache = kv.hand_over(
            *pair, tokens, translator=found, guard=32, on_doubt="reread", heal=heal
        )
        both = zip(cache, own, strict=True)
        apart = [mx.abs(a.keys[..., : a.offset, :] - b.keys[..., : b.offset, :]) for a, b in both]
        assert (max(array.max().item() for array in apart) < 1e-3) == near
        assert heal is None or cache.left == 0


def test_a_prompt_beyond_the_longest_is_doubted(pair: Ends, good: list[Translator]) -> None:
    facts = {**good[0].config.provenance, "longest_prefix": 100}
    short = build(dataclasses.replace(good[0].config, provenance=facts), good[0].to_weights())
    with pytest.warns(kv.KVLingoWarning, match="made and tested on prefixes of at most 100"):
        _, last = answered(pair, prompts(1)[0], translator=short, guard=32)
    assert last.guarded is not None and len(last.guarded.doubts) == 1


def test_the_receipt_says_what_is_usual(pair: Ends, good: list[Translator]) -> None:
    """Mean and spread over the bundled prefixes at each quarter, against the guard itself."""
    receipt = receipt_of(good[0].config)
    assert receipt is not None and receipt.guard is not None
    found = []
    for sample, _ in bundled(pair[1].tokenizer, 2048):
        for quarter in (1, 2, 3, 4):
            stop = quarter * (len(sample.prefix) - 1) // 4
            options: dict[str, Any] = {"translator": good[0], "guard": 32, "max_tokens": 1}
            (response,) = kv.stream_generate(*pair, list(sample.prefix[: stop + 1]), **options)
            assert response.guarded is not None
            found.append(response.guarded.divergence)
    mean, spread = np.mean(found), np.std(found, ddof=1)
    usual = receipt.guard
    expected = [mean, spread, mean + 4 * spread]
    assert [usual.mean, usual.spread, usual.limit(32)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 40])
def test_short_prompts(pair: Ends, good: list[Translator], length: int) -> None:
    """At least half of a prompt is translated; one too short for that is not compared."""
    asked: dict[str, Any] = {"translator": good[0], "guard": 32, "max_tokens": 2}
    *_, last = kv.stream_generate(*pair, tiny.random_tokens(length), **asked)
    assert (last.guarded is None) == (length < 3)
    assert last.guarded is None or last.guarded.tokens == (length - 1) // 2


def held(
    pair: Ends, translators: Sequence[Translator], turns: list[Any], **options: Any
) -> tuple[Conversation, list[str], Any]:
    """A conversation, what was said, and what the last answer tells of its guard."""
    models = dict(zip("ab", pair, strict=True))
    talk = Conversation(models, translators, enable_thinking=False, verbatim=True, **options)
    said = []
    for number, message in enumerate(turns):
        *_, last = responses = list(talk.stream_reply("ab"[number % 2], message, max_tokens=12))
        said.append("".join(r.text for r in responses))
    return talk, said, last.guarded


def two_turns(count: int) -> list[list[Any]]:
    drawn = dialogues.held_out(count, seed=11, facts=(12, 18), questions=4)
    return [
        [[*t.messages[:-1], {"role": "user", "content": t.questions[0]}], t.questions[1]]
        for t in drawn
    ]


def test_wrong_maps_are_read_anew_in_a_conversation(pair: Ends, good: list[Translator]) -> None:
    """Then the answers are those of a re-prefill."""
    wrong = [conditions.shuffled(t) for t in good]
    for turns in two_turns(2):
        talk, said, found = held(pair, wrong, turns, guard=32, on_doubt="reread")
        assert found.doubts and said == held(pair, [], turns, switching="reprefill")[1]
        switch = talk.last_switch
        assert switch is not None and switch.translated == switch.kept == 0


def test_a_doubt_lasts_until_the_line_is_read(pair: Ends, good: list[Translator]) -> None:
    """Over several answers without another switch, and in a branch."""
    wrong, (turns,) = [conditions.shuffled(t) for t in good], two_turns(1)
    talk, _, _ = held(pair, wrong, turns, guard=32, on_doubt="heal")
    for each in (talk, talk.branch()):
        line = each.lines["b"]
        for _ in range(40):
            if not (left := line.left(answers=False)):
                break
            last_of(each, "b", "Thank you. Can you say that again?", max_tokens=12)
            assert line.left(answers=False) < left
        assert not line.left(answers=False)
    calm, _, _ = held(pair, good, turns, guard=32, on_doubt="heal")
    left = calm.lines["b"].left(answers=False)
    last_of(calm, "b", "Thank you.", max_tokens=12)
    assert left and calm.lines["b"].left(answers=False) >= left  # the control


def test_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--source", str(zoo(NAMES[0])), "--target", str(zoo(NAMES[1]))]
    words += ["--no-thinking", "--max-tokens", "5", "-c", "guard=32"]
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(prompts(1)[0]))
    assert run([*words, "--messages", str(chat)]) == 0
    assert "Both models compared: nothing unusual: the models are " in capsys.readouterr().out
    assert run([*words, "--messages", str(chat), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["results"]["guarded"]
    assert told["tokens"] == 32 and 0 < told["divergence"] < told["limit"] and not told["doubts"]
    code = "def f(x):\n    return x + 1\n" * 20
    assert run([*words, "-c", "on_doubt=reread", "--prompt", code]) == 0
    out = capsys.readouterr().out
    assert "compared: the models are " in out and "read by the target" in out


def test_what_a_hand_over_refuses(pair: Ends, good: list[Translator]) -> None:
    source, target = pair
    translator, tokens = good[0], tiny.random_tokens(40)
    receipt = {k: v for k, v in translator.config.provenance["receipt"].items() if k != "guard"}
    for provenance in ({}, {"receipt": receipt}, {"receipt": {**receipt, "guard": {"tokens": 32}}}):
        config = dataclasses.replace(translator.config, provenance=provenance)
        old = build(config, translator.to_weights())
        with pytest.raises(kv.IncompatibleTranslatorError, match="`kvlingo-mlx verify TRANSLATOR"):
            kv.generate(source, target, tokens, translator=old, guard=32)
    few: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32}
    for options, message in (
        ({"guard": 8, "on_doubt": "cry"}, "on_doubt is 'cry'; give warn, heal or reread"),
        ({"guard": -1}, "guard is -1; give a number of tokens, 0 or more"),
        ({"guard": 8, "on_doubt": "heal", **few}, "on_doubt is 'heal', which needs a cache"),
        ({"max_tokens": object()}, "max_tokens is of type object; give"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.generate(source, target, tokens, translator=translator, **options)
    with pytest.raises(ValueError, match="on_doubt is 'heal'; give warn or reread"):
        kv.hand_over(source, target, tokens, translator=translator, guard=8, on_doubt="heal")


def test_what_a_conversation_refuses(
    models: Models, families: Models, poor: list[Translator], twins: list[LanguageModel]
) -> None:
    pair, windowed = {"a": models["dense"], "b": models["wide"]}, families["gemma3"]
    with pytest.raises(kv.UnsupportedModelError, match="cannot be guarded in a conversation: 4 of"):
        talk_of(windowed, "ab", guard=8)
    with pytest.raises(kv.UnsupportedModelError, match="they predict no tokens in common"):
        Conversation(dict(zip("ab", twins, strict=True)), on_missing="reprefill", guard=8)
    with pytest.raises(ValueError, match="guard is -1; give a number of tokens"):
        Conversation(pair, poor, guard=-1)
    with pytest.raises(ValueError, match="guard"):
        Conversation({"a": models["dense"]}, guard=8)
    talk = Conversation(pair, poor, guard=8, on_doubt="heal")
    with pytest.raises(
        ValueError, match="on_doubt is 'heal', and draft_model lets this answer be written"
    ):
        talk.reply("a", "hi", max_tokens=2, draft_model="b")
    bare = [build(dataclasses.replace(t.config, provenance={}), t.to_weights()) for t in poor]
    with pytest.raises(kv.IncompatibleTranslatorError, match="`kvlingo-mlx verify TRANSLATOR"):
        Conversation(pair, bare, guard=8)
