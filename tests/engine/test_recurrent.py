"""Models that keep recurrent states: no state is ahead of its line's tokens, and none goes back.

Where states are mapped, the models' convolutions read the present token alone. So the tail, which
is not mapped, has no effect, and through unit matrices every state must be that of a model that
reads all by itself.
"""

import functools
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine import healing
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.spans import Span
from kvlingo_mlx.folding import check_foldable
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from tests.support import TESTS, hybrid_models, talks, tiny
from tests.support.fixtures import Models, Patch, Temp
from tests.support.guards import with_receipt
from tests.support.identity import TOKENS, identity_of
from tests.support.native_caches import native
from tests.support.opened import cast
from tests.support.talks import CLOSE, NEW, apart, check_caches

LONG = "the use of an other is it on? " * 2
NAMES = ("granitemoehybrid", "delta", "lfm2")
MAPPED = ("delta mapped", "nemotron_h mapped")
RINGS = "gemma3"  # which go back no further, once their windows are full
TAIL = ("tail",)
refused = kv.UnsupportedModelError


@pytest.fixture(scope="module")
def models(tmp_path_factory: Temp) -> Models:
    """Of each rule one, and those whose tails do not matter."""
    root, found = tmp_path_factory.mktemp("recurrent"), dict[str, LanguageModel]()
    for name in (*NAMES, *MAPPED):
        family, *mapped = name.split()
        more: dict[str, Any] = {"num_hidden_layers": 4} if family == "delta" else {}
        folder = root / name.replace(" ", "-")
        family = {"delta": "qwen3_5"}.get(family, family)
        found[name] = kv.load(hybrid_models.write_hybrid_model(folder, family, **more))
        if mapped:
            hybrid_models.forget_tails(found[name])
    kind, sizes = tiny.FAMILIES[RINGS]
    return found | {RINGS: kv.load(tiny.write_tiny_model(root / RINGS, kind, **sizes))}


@pytest.fixture
def model(models: Models) -> LanguageModel:
    return models["granitemoehybrid"]


def same(model: LanguageModel, name: str = "") -> Any:
    point = model.family.points[0]
    return identity_of(model, capture=point, **({"state_maps": True} if "mapped" in name else {}))


def talk_of(model: LanguageModel, name: str = "", **options: Any) -> Conversation:
    return talks.talk_of(model, state_maps="mapped" in name, **{"verbatim": True} | options)


def check(talk: Conversation) -> None:
    """Each line holds what its model makes of its tokens; a tail that is not mapped may differ."""
    for line in talk.lines.values():
        check_caches(line, TAIL)


ask = functools.partial(talks.ask, without=TAIL)


@pytest.mark.parametrize("name", [*NAMES, MAPPED[0]])
def test_a_state_that_is_ahead_is_noticed(models: Models, name: str) -> None:
    """The control of every comparison here: one token more is not a matter of rounding."""
    talk = talk_of(models[name], name)
    ask(talk, "a", "the use of an other")
    line = talk.lines["a"]
    assert apart(line) < CLOSE
    assert apart(line, line.tokens[:-1]) > 0.3
    for cache in line.cache:  # keys and values alone go back
        if not caches.is_recurrent(cache):
            cache.trim(1)
    line.tokens = line.tokens[:-1]
    if name != "lfm2":  # which keeps a tail alone
        with pytest.raises(AssertionError):
            check(talk)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", ["granitemoehybrid", *MAPPED])
def test_the_usual_turn_reads_nothing_twice(models: Models, name: str, eager: bool) -> None:
    """What the other one wrote is translated, at every turn."""
    talk, turns = talk_of(models[name], name, eager=eager), "abbaab"
    for turn, who in enumerate(turns):
        before = len(talk.lines[who])
        ask(talk, who, ("is it on?", "and you")[turn % 2])
        switch = talk.last_switch
        assert switch is not None and switch.kept + switch.ahead == before
        if turn and not eager and who != turns[turn - 1]:
            assert switch.translated > 0
    assert any(span.passes == 1 for span in talk.lines["b"].spans)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("name", "verbatim"),
    [*((n, True) for n in ("granitemoehybrid", *MAPPED, RINGS)), (RINGS, False)],
)
def test_going_back(models: Models, name: str, verbatim: bool, eager: bool) -> None:
    """To marks, which lie where a state is known, or a full window's tokens; and on from there."""
    options: dict[str, Any] = {} if verbatim else {"verbatim": False, "enable_thinking": False}
    talk = talk_of(models[name], name, eager=eager, **options)
    ask(talk, "a", LONG)
    ask(talk, "b", "is it on?")
    header = talk.lines["b"]._marks[-1][0]
    begin = models[name].tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert talk.transcript.tokens[header] == begin not in talk.transcript.tokens[header + 1 :]
    rings = [cache for cache in talk.lines["b"].cache if caches.is_ring(cache)]
    assert bool(rings) == (name == RINGS) and not any(ring.is_trimmable() for ring in rings)
    talk.undo()
    ask(talk, "b", "is it on?")  # the same answer again: only its header is read
    assert talk.last_switch is not None and talk.last_switch.kept == header
    for _ in range(2):  # another question that is as long: no mark of the former is left
        talk.undo()
        ask(talk, "b", "is on it?")
    assert talk.last_switch.kept == header
    talk.truncate_answer(1)
    ask(talk, "b", "hi there")  # what is left of the answer is read again, no more
    assert talk.last_switch.kept == header
    ask(talk, "a", "hi there")
    talk.undo()
    talk.undo()
    ask(talk, "b", "is it on?")
    ask(talk, "a", "and you")


@pytest.mark.parametrize("name", ["granitemoehybrid", *MAPPED])
def test_in_the_middle_of_an_answer(models: Models, name: str) -> None:
    """A snapshot's lines are those before it; who takes over what was left reads the rest."""
    talk = talk_of(models[name], name, eager=False)
    ask(talk, "a", LONG)
    answer = talk.stream_reply("a", "is it on?", max_tokens=NEW)
    for _ in range(3):
        next(answer)
    assert apart(talk.lines["a"]) > 0.3  # ahead of what is booked
    made = talk.snapshot()
    check(made)
    answer.close()
    check(talk)
    for each in (made, talk):
        ask(each, "a", "and you")
        ask(each, "b", "and you")
        assert each.last_switch is not None and each.last_switch.translated > 0


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2"])
@pytest.mark.parametrize(
    ("place", "error"),
    [("reading", KeyboardInterrupt), ("decoding", MemoryError), ("translating", MemoryError)],
)
def test_some_layers_are_ahead_when_it_stops(
    models: Models, name: str, place: str, error: type[BaseException], monkeypatch: Patch
) -> None:
    """The last layer does not run, so those below it are ahead of it, and of the tokens."""
    model = models[name]
    talk = talk_of(model, name, eager=False)
    ask(talk, "a", LONG)
    ask(talk, "b", "is it on?")
    line, append, ahead = talk.lines["a"], caches.append, [0.0]
    last, cls = model.attentions[-1], type(model.attentions[-1])

    def look() -> None:
        last.__class__ = cls
        ahead.append(apart(line))
        if ahead[-1] > 0.01:
            raise error

    class Stops(cls):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
            if x.shape[1] == (1 if place == "decoding" else 7):
                look()
            return super().__call__(x, *args, **options)

    def stops(*arguments: Any) -> None:
        append(*arguments)
        look()

    with monkeypatch.context() as patch, pytest.raises(error):
        if place == "translating":
            patch.setattr(caches, "append", stops)
        else:
            last.__class__ = Stops
        talk.reply("a", LONG, max_tokens=NEW)
    assert type(last) is cls and ahead[-1] > 0.01  # there was something to put right
    check(talk)
    for each in "ab":
        ask(talk, each, "and you")


def test_without_a_state_nothing_is_taken_over(models: Models, monkeypatch: Patch) -> None:
    """The control: tokens whose state is not known are read, and are right all the same."""
    monkeypatch.setattr(capture, "recurrent_states", lambda *_: {})  # as if they were not kept
    for name in MAPPED:
        talk = talk_of(models[name], name, eager=False)
        ask(talk, "a", LONG)
        ask(talk, "b", "is it on?")
        assert talk.last_switch is not None and talk.last_switch.translated == 0


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_is_recorded(models: Models, name: str, kind: str, tmp_path: Path) -> None:
    """States, also beside keys and values of another dtype: saved and resumed."""
    model = models[name]
    model = model if kind == "float32" else cast(model, tmp_path / "half", mx.bfloat16)
    talk = talk_of(model, name, eager=False)
    for who in "ab":
        talk.reply(who, "is it on?", max_tokens=NEW)
    kept = [part.kept for part in talk.lines["b"].native.parts if part.kept]
    assert kept and all(state.dtype == mx.float32 for each in kept for state in each.values())
    both = dict.fromkeys("ab", model)
    folder = talk.save(tmp_path / "talk")
    again = Conversation.resume(folder, both, [same(model, name)], prefill_step_size=7)
    for who, line in talk.lines.items():
        for mine, theirs in zip(again.lines[who].native.parts, line.native.parts, strict=True):
            for one, other in zip(mine.arrays, theirs.arrays, strict=True):
                assert one.dtype == other.dtype and mx.array_equal(one, other).item()
    for each in (talk, again):
        each.reply("a", "and you", max_tokens=NEW)
    assert again.transcript.tokens == talk.transcript.tokens


def test_reading_behind_a_translation_makes_the_models_own_states(
    model: LanguageModel, monkeypatch: Patch
) -> None:
    right = identity_of(model, provenance={})
    halved = {name: array / 2 for name, array in right.to_weights().arrays.items()}
    wrong = build(right.config, Weights("float32", halved))
    talk = Conversation(
        dict.fromkeys("ab", model), [wrong], verbatim=True, eager=False, prefill_step_size=7,
        enable_thinking=False,
    )  # fmt: skip
    talk.reply("a", LONG, max_tokens=NEW)
    talk.reply("b", "is it on?", max_tokens=NEW)
    line = talk.lines["b"]
    assert apart(line) > 0.1  # the control
    reread, whole = healing.reread, len(line)

    def stops(*arguments: Any) -> None:
        reread(*arguments)
        raise KeyboardInterrupt

    assert 0 < talk.heal("b", until=iter([False, False, True]).__next__) < whole
    with monkeypatch.context() as patch:
        patch.setattr(healing, "reread", stops)
        with pytest.raises(KeyboardInterrupt):
            talk.heal("b")
    assert line.left(answers=False) == whole  # its states are ahead of it, so it begins anew
    talk.heal("b", until=iter([False, False, True]).__next__)
    said = talk.reply("b", "and you", max_tokens=NEW)
    assert said and talk.heal("b") == 0
    assert apart(line) < CLOSE and line.spans == [Span(0, len(line), "b")]
    talk.undo()
    talk.reply("b", "hi there", max_tokens=NEW)  # from a mark that was healed, too
    assert talk.last_switch is not None and talk.last_switch.kept > whole - 20
    assert apart(line) < CLOSE


def test_what_would_go_back_is_refused_before_anything_is_read(
    models: Models, monkeypatch: Patch
) -> None:
    model, reads = models["delta"], list[int]()
    own = native(model, TOKENS[:9], 9)
    assert model.cache_dtype  # which is found by a run, once
    cls = type(model.model)
    call = cls.__call__

    def noted(self: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
        reads.append(inputs.shape[1])
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(cls, "__call__", noted)
    given: dict[str, Any] = {"translator": same(model)}
    drafts = "draft_model cannot be used: .*keeps recurrent states"
    healed = "cannot be healed while it answers: 3 of its 4 .*recurrent"
    talk = talk_of(model)
    for use, options, message in (
        (kv.generate, {"heal": "interleaved"}, healed),
        (kv.generate, {"heal": "layers"}, healed),
        (kv.generate, {"draft_model": model}, drafts),
        (kv.hand_over, {"heal": "idle"}, healed),
        (kv.hand_over, {"prompt_cache": own}, "recurrent states, and what went into them is not"),
    ):
        with pytest.raises(refused, match=message):
            use(model, model, TOKENS, **given, **options)
    for options, message in (
        ({"heal": "interleaved"}, "cannot be healed while it answers: 3 of its 4 cache layers"),
        ({"guard": 8}, "cannot be guarded in a conversation: 3 of its 4 .*a recurrent state"),
    ):
        with pytest.raises(refused, match=message):
            talk_of(model, **options)
    with pytest.raises(refused, match=drafts):
        talk.reply("a", "hi", draft_model=model, max_tokens=NEW)
    assert not talk.messages
    with pytest.raises(kv.IncompatibleTranslatorError, match="no keys for queries to meet"):
        check_foldable(model, model, identity_of(model, capture="post_rope"))
    with pytest.raises(refused, match="what went into them is not read back"):
        caches.read(own, model)
    assert not reads
    kv.generate(model, model, TOKENS, **given, max_tokens=4)
    assert reads  # the control


def test_a_guard_looks_on(models: Models) -> None:
    """The last tokens are read once, after the translation, so nothing has to go back."""
    model = models["delta"]
    given: dict[str, Any] = {"translator": with_receipt(same(model)), "max_tokens": 4}
    *_, last = kv.stream_generate(model, model, TOKENS, guard=8, **given)
    assert last.guarded is not None and last.guarded.divergence == pytest.approx(0, abs=1e-5)
    answers = [kv.generate(model, model, TOKENS, guard=guard, **given) for guard in (0, 8)]
    assert answers[0] == answers[1]


def test_a_translator_that_cannot_be_made_is_not_advised(models: dict[str, Any]) -> None:
    """Between two tokenizers, where ``fit`` would refuse the same pair."""
    model, other = models["delta"], kv.load(TESTS / "zoo/models/tiny-mistral")
    with pytest.raises(kv.MissingTranslatorError, match="none can be made: .*recurrent states"):
        kv.generate(other, model, "Hello", max_tokens=2)
    with pytest.raises(refused, match="recurrent states"):
        kv.fit(other, model, [{"text": "Hello there, all of you"}])
    with pytest.raises(kv.MissingTranslatorError, match="store; make one with"):
        kv.generate(model, other, "Hello", max_tokens=2)
