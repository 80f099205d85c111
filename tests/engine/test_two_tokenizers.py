"""Two tokenizers, in a hand-over and in conversations: against PyTorch, and one tokenizer."""

import importlib
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.caches.entries import PositionedKVCache
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.fill import take_over
from kvlingo_mlx.engine.plan import Plan, align
from kvlingo_mlx.loading import pairing
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from tests.support import hybrid_models, plain_models, tiny
from tests.support.command_line import fails
from tests.support.fixtures import Patch, Printed, Temp
from tests.support.identity import identity_of
from tests.support.native_caches import native
from tests.support.talks import writing
from tests.support.two_tokenizers import TALK, Script, write_mistral, write_qwen, write_translator

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "3"))  # more of them by hand
FOLLOWING = [7, 30, 41, 9]
PAIRS = (("qwen", "mistral"), ("mistral", "qwen"))
TOLERANCE, WRONG = 1e-4, 1e-2
TEXT = "The ferryman said: you and the other one, in the house, use the money. " * 3
SYSTEM = "You are the ferryman of a long river."
ASKED = (
    "Who is the other passenger, and where is the money?",
    "Summarise this unbelievably long prefix. Then: 1 + 23 = ?",
    "And the rest of it?",
)
SAID = ("In the house.", "On the boat.", "None.")
Opener = Callable[[str], LanguageModel]


@pytest.fixture(scope="module")
def root(tmp_path_factory: Temp) -> Path:
    """A tiny Qwen and a tiny Mistral, a random translator for each direction."""
    root = tmp_path_factory.mktemp("two-tokenizers")
    write_qwen(root / "qwen"), write_mistral(root / "mistral")
    for seed, pair in zip((7, 11), PAIRS, strict=True):
        write_translator(root / "-".join(pair), *(root / name for name in pair), seed=seed)
    return root


@pytest.fixture(scope="module")
def opened(root: Path) -> Opener:
    """A model by name, loaded once."""
    return cache(lambda name: kv.load(root / name))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The PyTorch reference; tests that need it are skipped where PyTorch is absent."""
    pytest.importorskip("torch")
    return importlib.import_module("tests.support.cross_reference")


def logits(model: LanguageModel, cache: list[Any], tokens: list[int]) -> np.ndarray:
    """(T, vocabulary), a token at a time."""
    rows = [model.model(mx.array([[token]]), cache=cache)[0, -1] for token in tokens]
    return np.array(mx.stack(rows))


@pytest.mark.parametrize(("pair", "options"), [
    *((pair, {"capture": "post_norm"}) for pair in PAIRS),
    (PAIRS[0], {"nu": 2, "bias": True}),
    (PAIRS[1], {"head_mixing": False, "head_map": (0, 0)}),
])  # fmt: skip
def test_a_hand_over_is_that_of_plain_loops(
    pair: tuple[str, str], options: dict[str, Any], root: Path, tmp_path: Path, opened: Opener,
    reference: ModuleType,
) -> None:  # fmt: skip
    """Token by token at true positions in PyTorch, one pass at shifted ones here."""
    source, target = map(opened, pair)
    plan = align(source, target, TALK)  # the pair shows what can go wrong
    assert plan.shift != 0 and (np.diff(plan.positions) < 0).any()  # the system message moves
    assert len(set(plan.positions.tolist())) < len(plan.positions)
    ends = [root / name for name in pair]
    folder = write_translator(tmp_path / "t", *ends, **options)
    slow = reference.SlowLine(ends[0])
    reference.listen(slow, TALK)
    stop = int(target.tokenizer.eos_token_id)
    script = Script([*FOLLOWING, stop], "", [0] * len(FOLLOWING), "")

    def expected(shift: int) -> np.ndarray:
        line = reference.SlowLine(ends[1])
        return reference.answer(line, slow, folder, TALK, script, shift=shift)

    right = expected(0)
    last = encode(target, TALK)[-1]
    for step in (2048, 13):
        handed = kv.hand_over(source, target, TALK, translator=folder, prefill_step_size=step)
        found = logits(target, handed, [last, *FOLLOWING]).astype(np.float64)
        found -= np.log(np.exp(found).sum(-1, keepdims=True))
        assert np.abs(found - right).max() < TOLERANCE
    if options == {"capture": "post_norm"}:
        assert np.abs(expected(1) - right).max() > WRONG  # the control


@pytest.mark.parametrize("prompt", [TALK, TEXT], ids=["messages", "text"])
def test_identical_tokenizers_give_the_same_bits(
    prompt: Any, root: Path, opened: Opener, tmp_path: Path
) -> None:
    """As a translator between one tokenizer's models does."""
    write_qwen(root / "other", seed=8, layers=4, kv_heads=1)
    source, target = opened("qwen"), opened("other")
    tiny.write_random_translator(tmp_path / "one", root / "qwen", root / "other", nu=2)
    one = load_translator(tmp_path / "one")
    across = replace(one, config=replace(one.config, alignment="minimal_groups"))
    options: Any = {"prefill_step_size": 50}
    expected = kv.hand_over(source, target, encode(target, prompt), translator=one, **options)
    found = kv.hand_over(source, target, prompt, translator=across, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs) is KVCache and ours.offset == theirs.offset
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert np.array_equal(np.array(a), np.array(b))


class TruePositions(KVCache):
    """Rotates where its offset says, however many entries it holds."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        return self.put(keys, values)

    def put(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, count: int, *args: Any, **kwargs: Any) -> mx.array | None:
        held = 0 if self.keys is None else self.keys.shape[2]
        return mx.arange(held + count) <= held + mx.arange(count)[:, None]


OTHERS = ("qwen3", "qwen3_moe", *tiny.LATENT)
IDS = tiny.random_tokens(40)
STRETCHES = ((0, 5, False), (5, 15, True), (15, 22, False), (22, 33, True), (33, 39, False))


def several(start: int, stop: int) -> list[int]:
    """Rows of a stretch, some twice and some not at all."""
    rows = range(start, stop)
    return sorted([*rows[::3], *rows[::2], *rows[1::4], *rows[2:4]])


def stretch_by_stretch(model: LanguageModel, kind: type) -> np.ndarray:
    """Logits from caches that rotate where they are told, entries put between what is read."""
    own = native(model, IDS, 99)
    slow: list[Any] = [kind() for _ in model.attentions]
    for start, stop, translated in STRETCHES:
        if not translated:
            model.model(mx.array(IDS[start:stop])[None], cache=slow)
            continue
        rows = mx.array(several(start, stop))
        for known, layer in zip(own, slow, strict=True):
            layer.put(known.keys[:, :, rows], known.values[:, :, rows])
            layer.offset = stop
    return logits(model, slow, [IDS[-1], *FOLLOWING])


def differing(model: LanguageModel, expected: np.ndarray) -> float:
    """How far one pass is from stretch by stretch at true positions, in logits."""
    rows = np.concatenate([several(a, b) for a, b, translated in STRETCHES if translated])
    native = np.concatenate([np.arange(a, b) for a, b, translated in STRETCHES if not translated])
    plan = AlignedPrefix(
        tuple(IDS), tuple(IDS), rows, rows, np.stack([rows, rows + 1], axis=1), native
    )
    assert plan.shift != 0
    translator = identity_of(model, capture=model.family.points[0])
    spans = capture.prefill(model, IDS[: plan.num_read])
    fast = take_over(Plan(model, model, IDS, translator, aligned=plan), spans).cache
    found = logits(model, fast, [IDS[-1], *FOLLOWING])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", [*sorted(plain_models.CONFIGS), *OTHERS])
def test_every_family_that_is_let_through_is_exact(name: str, tmp_path: Path) -> None:
    """And one that is refused, for another reason than a window, is not."""
    if name in OTHERS:
        facts = {"seed": 3, "layers": 3, "kv_heads": 4 if name in tiny.LATENT else 2}
        model = kv.load(tiny.write_tiny_model(tmp_path, name, head_dim=32, **facts))
    else:
        model = kv.load(plain_models.write_plain_model(tmp_path, name))
    try:
        pairing.check_positions(model)
    except kv.UnsupportedModelError as error:
        assert "cannot take over from a model of another tokenizer" in str(error)
        if not any(g.window for g in model.geometry.layers):
            assert differing(model, stretch_by_stretch(model, TruePositions)) > 1e-3
        return
    expected = stretch_by_stretch(model, TruePositions)
    assert differing(model, expected) < 1e-4
    found = stretch_by_stretch(model, PositionedKVCache)  # as a conversation's lines have it
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.fixture(params=PAIRS, ids="-".join)
def handed(request: Any, root: Path, opened: Opener) -> tuple[LanguageModel, Callable[[], list]]:
    """A target, and what makes its cache."""
    source, target = map(opened, request.param)
    translator = load_translator(root / "-".join(request.param))
    return target, lambda: kv.hand_over(source, target, TALK, translator=translator)


def decode(model: LanguageModel, cache: list, token: int, count: int = 6, **options: Any) -> list:
    steps = generate_step(
        mx.array([token]), model.model, max_tokens=count, prompt_cache=cache, **options
    )
    return [int(found) for found, _ in steps]


def test_saved_loaded_trimmed_and_quantised(handed: Any, tmp_path: Path) -> None:
    target, make = handed
    last, cache = encode(target, TALK)[-1], make()
    prefix = cache[0].offset
    expected = decode(target, make(), last)
    save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
    for each in (cache, loaded):
        assert decode(target, each, last) == expected
        assert trim_prompt_cache(each, each[0].offset - prefix) > 0
        assert decode(target, each, last) == expected
        assert each[0].offset > prefix
        with pytest.raises(ValueError, match=f"from another tokenizer, whose {prefix} entries"):
            trim_prompt_cache(each, each[0].offset - prefix + 1)
    cache = make()
    decode(target, cache, last, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert type(cache[0]).__name__ == "TranslatedQuantizedKVCache"
    with pytest.raises(ValueError, match="hand over again"):
        cache[0].trim(cache[0].offset - prefix + 1)
    assert cache[0].trim(2) == 2


def test_batches_with_prompts_of_its_own(handed: Any) -> None:
    """Beside a prompt that mlx-lm prefilled, whichever comes first."""
    target, make = handed
    last, ids = encode(target, TALK)[-1], [3, 5, 8, 13, 21, 34, 55]
    read = partial(native, target, ids[:-1], 99)
    expected = [decode(target, make(), last), decode(target, read(), ids[-1])]
    for order in ((0, 1), (1, 0)):
        caches, tokens = (make(), read()), ([last], ids[-1:])
        generator = BatchGenerator(target.model, max_tokens=6)
        uids = generator.insert(
            [tokens[i] for i in order], caches=[caches[i] for i in order], max_tokens=[6, 6]
        )
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        for _ in range(12):
            for response in generator.next_generated():
                found[response.uid].append(response.token)
        generator.close()
        assert [found[uid] for uid in uids] == [expected[i] for i in order]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_generate(pair: tuple[str, str], root: Path, opened: Opener, store: Path) -> None:
    """With the translator that is given, or stored."""
    source, target = map(opened, pair)
    folder = root / "-".join(pair)
    for prompt in (TALK, TEXT, TALK[1:2], f"<s>{TEXT}"):
        ids = encode(target, prompt)
        handed = kv.hand_over(source, target, prompt, translator=folder)
        expected = decode(target, handed, ids[-1])
        options: Any = {"translator": folder, "max_tokens": 6}
        responses = list(kv.stream_generate(source, target, prompt, **options))
        ended = [t for t in expected if t not in target.tokenizer.eos_token_ids]
        assert [r.token for r in responses][: len(ended)] == expected[: len(ended)]
        assert responses[-1].prompt_tokens == len(ids)
    with pytest.raises(kv.MissingTranslatorError):
        kv.generate(source, target, TEXT)
    store.mkdir(parents=True)
    (store / "pair").symlink_to(folder)
    expected_text = kv.generate(source, target, TEXT, max_tokens=3, translator=folder)
    assert kv.generate(source, target, TEXT, max_tokens=3) == expected_text


def script(model: LanguageModel, text: str) -> Script:
    """An answer in other tokens than the tokenizer would cut it into."""
    vocabulary = model.tokenizer.get_vocab()
    mark = "Ġ" if "Ġ" in vocabulary else "▁"
    lead = "" if mark == "Ġ" else " "  # Mistral's template puts a space in front
    spelled = [mark if c == " " else c for c in lead + text]
    ids = [vocabulary.get(c) or vocabulary[f"<0x{ord(c):02X}>"] for c in spelled]
    ends = list(range(1, len(ids) + 1))
    return Script([*ids, int(model.tokenizer.eos_token_id)], lead + text, ends, text)


def talk_of(root: Path, opened: Opener, **options: Any) -> Conversation:
    translators = [root / "-".join(pair) for pair in PAIRS]
    models = {name: opened(name) for name in PAIRS[0]}
    return Conversation(models, translators, **{"prefill_step_size": 13} | options)


def say(talk: Conversation, name: str, message: str, text: str) -> np.ndarray:
    """Let a model give a scripted answer; the log probabilities of each of its tokens."""
    told = script(talk.lines[name].model, text)
    responses = list(talk.stream_reply(name, message, sampler=writing(told.ids), max_tokens=99))
    check_order(talk)
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    return np.stack([np.array(r.logprobs.astype(mx.float32)) for r in responses])


def check_order(talk: Conversation) -> None:
    """Lines end where their caches do; their spans join; who wrote is who is named."""
    for line in talk.lines.values():
        assert {c.offset for c in line._caches} == {len(line)}
        starts, stops = ([getattr(s, end) for s in line.spans] for end in ("start", "stop"))
        assert starts == [0, *stops][: len(starts)] and (stops[-1] if stops else 0) == len(line)
        assert all((span.writer == line.name) == (span.passes == 0) for span in line.spans)


@pytest.mark.parametrize(("first", "system"), [("qwen", True), ("mistral", False)])
def test_three_turns_are_those_of_plain_loops(
    first: str, system: bool, root: Path, opened: Opener, reference: ModuleType
) -> None:
    """Each turn by the other model, every answer in tokens that no tokenizer would choose."""
    second = {"qwen": "mistral", "mistral": "qwen"}[first]
    talks = [
        talk_of(root, opened, eager=eager, system=SYSTEM if system else None)
        for eager in (True, False)
    ]
    slow = {name: reference.SlowLine(root / name) for name in (first, second)}
    messages = talks[0].messages
    for turn, name in enumerate((first, second, first)):
        told = script(opened(name), SAID[turn])
        messages.append({"role": "user", "content": ASKED[turn]})
        other = second if name == first else first
        source = (slow[other], root / f"{other}-{name}") if turn else (None, None)
        expected = reference.answer(slow[name], *source, messages, told)
        messages.append({"role": "assistant", "content": told.said})
        for talk in talks:
            found = say(talk, name, ASKED[turn], told.said)
            assert np.abs(found - expected).max() < TOLERANCE
            assert talk.lines[name].tokens == slow[name].ids
        switches = [talk.last_switch for talk in talks]
        assert switches[0] is not None and switches[0].ahead == 0  # eager is for one tokenizer
        assert (switches[0].translated > 20) == (turn > 0)


@pytest.mark.parametrize("most", [1, None])
def test_an_answer_that_another_model_begins(
    most: int | None, root: Path, opened: Opener, reference: ModuleType
) -> None:
    """Its first token, or all of its reasoning: text for who goes on, content to be translated."""
    begun = "One moment.</think>"[:most]
    slow = {name: reference.SlowLine(root / name) for name in ("qwen", "mistral")}
    messages = [{"role": "user", "content": ASKED[0]}]
    first, then = script(opened("qwen"), begun), script(opened("mistral"), " so it is.")
    part = replace(first, ids=first.ids[:-1], text=begun[:-1], ends=first.ends[:-1])
    reference.answer(slow["qwen"], None, None, messages, part)
    expected = reference.answer(
        slow["mistral"], slow["qwen"], root / "qwen-mistral", messages, then,
        begun=(f" {begun}", "One moment."[:most]) if most is None else (f" {begun}",),
    )  # fmt: skip
    scripts = {
        opened(name).geometry.embedding_rows: writing(ids)
        for name, ids in (("qwen", part.ids), ("mistral", then.ids))
    }
    how = {"prefill": "qwen", "first_token": "source"} if most else {"reasoning": "qwen"}
    talk = talk_of(root, opened)
    responses = list(
        talk.stream_reply(
            "mistral", ASKED[0], max_tokens=60, **how,
            sampler=lambda logprobs: scripts[logprobs.shape[-1]](logprobs),
        )
    )  # fmt: skip
    found = np.stack([np.array(r.logprobs) for r in responses[len(part.ids) :]])
    assert np.abs(found - expected).max() < TOLERANCE
    assert talk.messages[-1]["content"] == begun + then.text
    streamed = "".join(response.text for response in responses)
    assert (begun + then.text).startswith(streamed) and streamed.startswith(begun + " ")
    assert talk.lines["mistral"].tokens == slow["mistral"].ids
    say(talk, "qwen", ASKED[1], SAID[1])


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_whatever_is_said_and_done(seed: int, root: Path, opened: Opener, tmp_path: Path) -> None:
    """Random models write bytes that are no text; every line stays in order."""
    draw = random.Random(seed)
    models = {"q": opened("qwen"), "m": opened("mistral"), "r": opened("qwen")}
    translators = [load_translator(root / f) for f in ("qwen-mistral", "mistral-qwen")]
    translators.append(identity_of(models["q"]))
    talk = Conversation(
        models, translators, eager=seed % 2 == 0, prefill_step_size=64, verbatim=seed % 3 == 1,
        offload=draw.choice([None, "disk", "8bit"]), system=draw.choice([None, SYSTEM]),
    )  # fmt: skip
    for _ in range(6):
        act = draw.choice(["reply", "reply", "reply", "undo", "branch", "resume", "stop"])
        if act == "undo" and talk.messages and talk.messages[-1]["role"] != "system":
            talk.undo()
        elif act == "branch":
            talk = talk.branch()
        elif act == "resume" and talk.messages and talk.messages[-1]["role"] != "system":
            talk = Conversation.resume(talk.save(tmp_path / "talk"), models, translators)
        else:
            other = draw.choice("qmr")
            how = draw.choice([
                {}, {"prefill": other}, {"prefill": other, "first_token": "source"},
                {"reasoning": other},
            ])  # fmt: skip
            answer = talk.stream_reply(
                draw.choice("qmr"), draw.choice(["is it on?", "ok", "日本 é 👩‍👧 x"]), **how,
                max_tokens=draw.choice([1, 4, 9]), sampler=mx.random.categorical,
            )  # fmt: skip
            said = [next(answer)] if act == "stop" else list(answer)
            answer.close()
            assert said
        check_order(talk)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_switch_that_is_interrupted_changes_nothing(
    error: type[BaseException], root: Path, opened: Opener, monkeypatch: Patch
) -> None:
    """In the middle of a translation whose entries stand between what is read."""
    talk, calm = (talk_of(root, opened, eager=False) for _ in range(2))
    for each in (talk, calm):
        say(each, "qwen", ASKED[0], SAID[0])
    messages, tokens = talk.messages, list(talk.transcript.tokens)
    real, calls = caches.append, list[int]()

    def put(cache: Any, *rest: Any) -> None:
        real(cache, *rest)
        calls.append(1)
        if len(calls) == 3:
            cache[0].entries += 1
            raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(caches, "append", put)
        talk.reply("mistral", ASKED[1], max_tokens=3)
    assert (talk.messages, talk.transcript.tokens) == (messages, tokens)
    found, expected = (say(each, "mistral", ASKED[1], SAID[1]) for each in (talk, calm))
    assert np.abs(found - expected).max() < TOLERANCE
    found, expected = (say(each, "qwen", ASKED[2], SAID[2]) for each in (talk, calm))
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("eager", [True, False])
def test_going_on_elsewhere_is_going_on(
    eager: bool, root: Path, opened: Opener, tmp_path: Path
) -> None:
    """Resumed from a folder, or with lines on disk."""
    talk = talk_of(root, opened, eager=eager)
    say(talk, "qwen", ASKED[0], SAID[0])
    say(talk, "mistral", ASKED[1], SAID[1])
    models = {name: opened(name) for name in talk.lines}
    translators = [root / "-".join(pair) for pair in PAIRS]
    resumed = Conversation.resume(
        talk.save(tmp_path / "talk"), models, translators, eager=eager, prefill_step_size=13
    )
    assert resumed.messages == talk.messages
    away = talk.branch()
    for name in models:
        away.offload(name, "disk")
        assert away.lines[name].where == "disk"
    for name, message, text in (("qwen", ASKED[2], SAID[2]), ("mistral", "And?", "No.")):
        expected = say(talk, name, message, text)
        assert np.array_equal(say(resumed, name, message, text), expected)
        assert np.array_equal(say(away, name, message, text), expected)
    for each in (talk, resumed):
        each.undo(), each.undo()
        assert [m["content"] for m in each.messages] == [ASKED[0], SAID[0], ASKED[1], SAID[1]]
        each.undo()
    expected = say(talk, "mistral", ASKED[1], SAID[1])
    assert np.abs(say(resumed, "mistral", ASKED[1], SAID[1]) - expected).max() < TOLERANCE


def test_a_model_of_another_tokenizer_joins(root: Path, opened: Opener, tmp_path: Path) -> None:
    alone = Conversation({"qwen": opened("qwen")})
    ids = script(opened("qwen"), SAID[0]).ids
    alone.reply("qwen", ASKED[0], sampler=writing(ids), max_tokens=99)
    both = {name: opened(name) for name in ("qwen", "mistral")}
    talk = Conversation.resume(alone.save(tmp_path / "alone"), both, [root / "mistral-qwen"])
    assert talk.transcript.tokens == alone.transcript.tokens
    tokens = list(talk.lines["qwen"].tokens)
    say(talk, "mistral", ASKED[1], SAID[1])
    say(talk, "qwen", ASKED[2], SAID[2])
    assert talk.last_switch is not None and talk.last_switch.kept >= len(tokens)
    assert any(span.writer == "mistral" for span in talk.lines["qwen"].spans)
    talk.undo(), talk.undo()
    assert talk.messages == alone.messages


def test_what_a_hand_over_refuses(root: Path, opened: Opener) -> None:
    source, target = map(opened, PAIRS[0])
    translator = load_translator(root / "qwen-mistral")
    with pytest.raises(ValueError, match="token ids, which the two tokenizers .* give text"):
        kv.hand_over(source, target, [1, 2, 3], translator=translator)
    for options in ({"native_layers": 1}, {"native_head": 4}, {"native_middle": 2}):
        with pytest.raises(ValueError, match="cannot be used between two tokenizers"):
            kv.hand_over(source, target, TALK, translator=translator, **options)
    for facts, message in (
        ({"capture": "post_rope"}, "rotated at the source's; use"),
        ({"alignment": None}, "tokenizers of .* differ"),
    ):
        other = replace(translator, config=replace(translator.config, **facts))
        with pytest.raises(kv.IncompatibleTranslatorError, match=message):
            kv.hand_over(source, target, TALK, translator=other)
    with pytest.raises(ValueError, match="has another vocabulary"):
        kv.generate(source, target, TALK, translator=translator, draft_model=source)


def test_what_a_conversation_refuses(root: Path, opened: Opener) -> None:
    """Windows and states cannot take over; such models read, and others take over from them."""
    for layers in (1, "auto"):
        with pytest.raises(ValueError, match="native_layers cannot be used between two tokenizers"):
            talk_of(root, opened, native_layers=layers)
    with pytest.raises(ValueError, match="draft_model cannot be used .*several tokenizers"):
        talk_of(root, opened).reply("mistral", "hi", draft_model="qwen")
    across = load_translator(root / "qwen-mistral")
    models = {name: opened(name) for name in ("qwen", "mistral")}
    plain = replace(across, config=replace(across.config, alignment=None))
    with pytest.raises(kv.IncompatibleTranslatorError, match="the tokenizers of .* differ"):
        Conversation(models, [plain])
    with pytest.raises(kv.IncompatibleTranslatorError, match="is between two tokenizers"):
        Conversation(dict.fromkeys("ab", models["qwen"]), [across])
    gemma = dict(seed=1, layers=3, kv_heads=1, head_dim=32)
    three = {
        "mistral": models["mistral"],
        "gemma": kv.load(tiny.write_tiny_model(root / "gemma", "gemma3_text", **gemma)),
        "lfm2": kv.load(hybrid_models.write_hybrid_model(root / "lfm2", "lfm2")),
    }
    with pytest.raises(kv.UnsupportedModelError, match="windows of 16 tokens, which count entries"):
        pairing.check_positions(three["gemma"])
    talk, reader = Conversation(three), Conversation(three, on_missing="reprefill")
    for each in (talk, reader):
        ids = script(models["mistral"], SAID[0]).ids
        each.reply("mistral", ASKED[0], sampler=writing(ids), max_tokens=99)
    for name in ("gemma", "lfm2"):
        message = f"{name} cannot take over from a model of an"
        with pytest.raises(kv.UnsupportedModelError, match=message):
            talk.reply(name, ASKED[1], max_tokens=3)
        reader.reply(name, ASKED[1], max_tokens=3)
    reader.reply("mistral", ASKED[1], max_tokens=3)


def test_the_verbs(
    root: Path, tmp_path: Path, store: Path, capsys: Printed,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    """Made, shown, used, judged and talked with; no flag says that the tokenizers differ."""
    ends = [str(root / "qwen"), str(root / "mistral")]
    pair = ["--source", ends[0], "--target", ends[1]]
    data, out = tmp_path / "data.jsonl", tmp_path / "fitted"
    record = {"messages": [*TALK, {"role": "assistant", "content": "It is 24."}]}
    data.write_text(json.dumps(record) + "\n")
    assert run(["fit", *pair, "--data", str(data), "--out", str(out), "--nu", "2"]) == 0
    assert run(["show", str(out)]) == 0
    assert "minimal_groups" in capsys.readouterr().out
    models = ["--prefill-model", ends[0], "--decode-model", ends[1], "--translator", str(out)]
    assert run(["generate", *models, "-p", "Who is it?", "--max-tokens", "3"]) == 0
    assert run(["eval", *pair, str(out), "--tasks", "continuation", "--data",
                str(data), "--baselines", "hidden,text", "--limit", "1",
                "--out", str(tmp_path / "scores.jsonl")]) == 0  # fmt: skip
    assert "prefix hidden" in capsys.readouterr().out
    for verb in (["bench", *pair, "--translator", str(out)],
                 ["tune", *ends, "--translator", str(out), "--data", str(data)]):  # fmt: skip
        fails(verb, "between two tokenizers", capsys)
    for each in PAIRS:
        load_translator(root / "-".join(each)).save(store / "-".join(each))
    typed = "is it on?\n/use m\nand you\n/undo\n/use q\nhi\n/stats\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    named = [f"--model=q={ends[0]}", f"--model=m={ends[1]}"]
    assert run(["chat", *named, "--max-tokens", "4"]) == 0
    said, told = capsys.readouterr()
    assert said.strip() and "error" not in told and "template" not in told
