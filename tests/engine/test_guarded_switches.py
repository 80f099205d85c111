"""A guard in a conversation: what it compares at a switch, and what follows where it doubts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.guards import logs, with_receipt
from tests.support.healings import in_a_row, noted
from tests.support.talks import talk_of

FIRST, SHORT = "the use of an other " * 12, "and you"
LONG = "is it on? hi there, and this is much longer than that " * 5
GUARD = 40
ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")


@pytest.fixture(scope="module")
def translators(models: dict[str, LanguageModel]) -> list[Translator]:
    """Poor translators between two models of different shape, with receipts."""
    data = [{"text": "the you and use is of an other " * 25}]
    ends = models["dense"], models["wide"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [with_receipt(kv.fit(a, b, data)) for a, b in (ends, ends[::-1])]


def entries(line: Line) -> list[np.ndarray]:
    """A line's keys and values as they lie in its caches, up to its end."""
    arrays = (getattr(c, side)[..., : len(line), :] for c in line.cache for side in SIDES)
    return [np.array(array.astype(mx.float32)) for array in arrays]


SIDES = ("keys", "values")


def told(talk: Conversation, name: str, message: Any, **options: Any) -> kv.GenerationResponse:
    """The last response of a reply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.KVLingoWarning)
        *_, last = talk.stream_reply(name, message, **{"max_tokens": 4, **options})
    return last


def expected(
    ends: Sequence[LanguageModel], translator: Translator, tokens: list[int], window: slice
) -> tuple[float, float, float]:
    """KL and both losses over a window, by plain calls; all before it is translated."""
    source, target = ends
    start, stop = window.start, window.stop
    p = logs(source, make_prompt_cache(source.model), tokens[:stop])[start:]
    cache = kv.hand_over(source, target, tokens[: start + 1], translator=translator)
    q = logs(target, cache, tokens[start:stop])
    true, rows = np.array(tokens[start + 1 : stop + 1]), np.arange(stop - start)
    return (np.exp(p) * (p - q)).sum(-1).mean(), -p[rows, true].mean(), -q[rows, true].mean()


@pytest.mark.parametrize("way", ["short", "long", "eager", "prefill", "stored"])
def test_against_two_plain_readings(
    models: dict[str, LanguageModel], translators: list[Translator], way: str
) -> None:
    """Few new tokens: the prompt's last ones. Many: those after what the other model holds."""
    pair = {"a": models["dense"], "b": models["wide"]}
    talk = Conversation(pair, translators, prefill_step_size=7, guard=GUARD, eager=way == "eager")
    message = LONG if way == "long" else SHORT
    options: dict[str, Any] = {"prefill": "a"} if way == "prefill" else {}
    if way != "prefill":
        told(talk, "a", FIRST)
    else:
        message = FIRST
    source = talk.lines["a"]
    held, before = list(source.tokens), entries(source) if source.tokens else []
    if way == "stored":
        talk.exchange.put_away("a", "disk")
    last = told(talk, "b", message, **options)
    prompt = talk.lines["b"].tokens[: last.prompt_tokens]
    common = next((i for i, (x, y) in enumerate(zip(held, prompt, strict=False)) if x != y), None)
    common = min(len(held), len(prompt)) if common is None else common
    common = len(prompt) - 1 if way == "prefill" else common
    start = min(common, len(prompt) - 1 - GUARD)
    assert (start == common) == (way == "long")
    found = last.guarded
    assert isinstance(found, Guarded) and found.tokens == GUARD
    ends = models["dense"], models["wide"]
    wanted = expected(ends, translators[0], prompt, slice(start, start + GUARD))
    assert (found.divergence, found.source_loss, found.target_loss) == pytest.approx(
        wanted, rel=1e-4
    )
    assert last.cached_tokens + last.translated_tokens == start
    assert last.read_tokens == len(prompt) - start
    assert talk.last_switch is not None and talk.last_switch.guarded == found
    if way != "prefill":  # the other model's line is what it was, bit by bit
        assert source.tokens[: len(held)] == held
        for one, other in zip(before, entries(source), strict=True):
            assert np.array_equal(one, other[..., : one.shape[-2], :])


def test_only_a_switch_to_something_translated_is_guarded(
    models: dict[str, LanguageModel], translators: list[Translator]
) -> None:
    pair = {"a": models["dense"], "b": models["wide"]}
    talk = Conversation(pair, translators, guard=GUARD)
    assert told(talk, "a", FIRST).guarded is None  # nothing is translated
    assert told(talk, "a", SHORT).guarded is None
    assert told(talk, "b", SHORT).guarded is not None
    assert told(talk, "b", SHORT).guarded is None  # no switch
    assert told(talk, "a", SHORT).guarded is not None
    few = Conversation(pair, translators, guard=2000)  # more than there are: half of them
    told(few, "a", FIRST)
    last = told(few, "b", SHORT)
    assert last.guarded is not None and last.guarded.tokens == (last.prompt_tokens - 1) // 2
    assert last.translated_tokens + last.cached_tokens == last.prompt_tokens // 2


# ---- trained models ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, LanguageModel], list[Translator]]:
    ends = {"a": kv.load(zoo(ENDS[0])), "b": kv.load(zoo(ENDS[1]))}
    names = ("--".join(ENDS), "--".join(ENDS[::-1]))
    return ends, [kv.load_translator(TRANSLATORS / name) for name in names]


def talks(count: int) -> list[list[Any]]:
    """The first message of a dialogue, and one question after the other."""
    drawn = dialogues.held_out(count, seed=11, facts=(12, 18), questions=4)
    return [
        [[*t.messages[:-1], {"role": "user", "content": t.questions[0]}], *t.questions[1:]]
        for t in drawn
    ]


def run(
    trained: Any, turns: list[Any], translators: list[Translator] | None = None, **options: Any
) -> tuple[Conversation, list[str], list[Guarded | None]]:
    ends, good = trained
    given = good if translators is None else translators
    talk = Conversation(ends, given, enable_thinking=False, verbatim=True, **options)
    said, found = [], []
    for number, message in enumerate(turns):
        *_, last = responses = list(talk.stream_reply("ab"[number % 2], message, max_tokens=12))
        said.append("".join(r.text for r in responses))
        found.append(last.guarded)
    return talk, said, found


def test_wrong_maps_are_doubted(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warned of, read behind, or read anew: then the answers are those of a re-prefill."""
    wrong = [conditions.shuffled(t) for t in trained[1]]
    chunks = noted(monkeypatch)
    for turns in talks(3):
        with pytest.warns(kv.KVLingoWarning, match="is in doubt: the models are .* nats apart"):
            found = run(trained, turns[:2], wrong, guard=32)[2]
        assert found[1] is not None and found[1].doubts and not chunks
        options = {"guard": 32, "on_doubt": "reread"}
        talk, said, found = run(trained, turns[:2], wrong, **options)
        alone = run(trained, turns[:2], [], switching="reprefill")
        assert said == alone[1] and found[1] is not None and found[1].doubts
        switch = talk.last_switch
        assert switch is not None and switch.translated == switch.kept == 0
        assert switch.read == len(talk.lines["b"].tokens) - len(answer_of(talk)) - 1
        talk, _, found = run(trained, turns[:2], wrong, guard=32, on_doubt="heal")
        assert found[1] is not None and found[1].doubts and chunks and chunks[0].start == 0
        in_a_row(chunks)
        chunks.clear()
        run(trained, turns[:2], guard=32, on_doubt="heal")  # nothing to doubt: nothing is read
        assert not chunks


def answer_of(talk: Conversation) -> list[int]:
    """The tokens of the last answer in the line that wrote it, but for the one that began it."""
    assert talk.last_switch is not None
    line = talk.lines[talk.last_switch.name]
    switch = talk.last_switch
    return line.tokens[switch.kept + switch.translated + switch.read + 1 :]


def test_a_doubt_lasts_until_the_line_is_read(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several answers without another switch, and in a branch."""
    wrong = [conditions.shuffled(t) for t in trained[1]]
    talk, _, _ = run(trained, talks(1)[0][:2], wrong, guard=32, on_doubt="heal")
    line = talk.lines["b"]
    branch = talk.branch()
    for each in (talk, branch):
        line = each.lines["b"]
        for _ in range(40):
            if not (left := line.left(answers=False)):
                break
            told(each, "b", "Thank you. Can you say that again?", max_tokens=12)
            assert line.left(answers=False) < left
        assert not line.left(answers=False)
    calm, _, _ = run(trained, talks(1)[0][:2], guard=32, on_doubt="heal")
    left = calm.lines["b"].left(answers=False)
    told(calm, "b", "Thank you.", max_tokens=12)
    assert left and calm.lines["b"].left(answers=False) >= left  # the control


# ---- bad input --------------------------------------------------------------------------------


def test_what_is_refused(
    models: dict[str, LanguageModel],
    translators: list[Translator],
    twins: list[LanguageModel],
    tmp_path: Path,
) -> None:
    pair = {"a": models["dense"], "b": models["wide"]}
    name, options = tiny.FAMILIES["gemma3"]
    model = kv.load(tiny.write_tiny_model(tmp_path / "g", name, **options))
    with pytest.raises(kv.UnsupportedModelError, match="cannot be guarded in a conversation: 4 of"):
        talk_of(model, "ab", guard=8)
    with pytest.raises(kv.UnsupportedModelError, match="they predict no tokens in common"):
        Conversation(dict(zip("ab", twins, strict=True)), on_missing="reprefill", guard=8)
    for given, message in (
        ({"guard": -1}, "guard is -1; give a number of tokens"),
        ({"guard": 8, "switching": "reprefill"}, "guard has no effect with switching"),
    ):
        with pytest.raises(ValueError, match=message):
            Conversation(pair, translators, **given)
    with pytest.raises(ValueError, match="guard"):
        Conversation({"a": models["dense"]}, guard=8)
    talk = Conversation(pair, translators, guard=8, on_doubt="heal")
    with pytest.raises(ValueError, match="on_doubt is 'heal', and this answer would be written"):
        talk.reply("a", "hi", max_tokens=2, kv_bits=8, kv_group_size=32)
    bare = [
        build(dataclasses.replace(t.config, provenance={}), t.to_weights()) for t in translators
    ]
    with pytest.raises(kv.IncompatibleTranslatorError, match="`kvlingo-mlx verify TRANSLATOR"):
        Conversation(pair, bare, guard=8)
