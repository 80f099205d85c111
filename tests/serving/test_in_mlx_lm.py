"""mlx-lm's own server with a store that translates: against hand-overs, and mlx-lm alone."""

import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.engine.spans import common_prefix, exact
from kvlingo_mlx.errors import MissingTranslatorError, UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, TranslatedStates
from kvlingo_mlx.serving import in_mlx_lm
from kvlingo_mlx.serving.in_mlx_lm import Key, SignedCache, TranslatingPromptCache
from kvlingo_mlx.translators.base import Translator
from tests.support.fixtures import Models, Pair, Patch
from tests.support.identity import identity, identity_of, same_layers
from tests.support.native_caches import held, native
from tests.support.processes import command_line
from tests.support.served import PLAIN, THEIRS, Server, of_mlx_lm

NEW = 12  # tokens an answer
USAGE = {"include_usage": True}
Message = dict[str, str]


# ---- the store alone -----------------------------------------------------------------------


class Doubling(Translator):
    """A translator of a model to itself that doubles values, so that they tell their number."""

    def __call__(self, states: KVStates, first: Sequence[int] | None = None) -> TranslatedStates:
        found = super().__call__(states, first)
        return replace(found, values=tuple(replace(g, states=2 * g.states) for g in found.values))


class Store(TranslatingPromptCache):
    """A store of three models of the same weights, used as mlx-lm's server uses it."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(1000, provider=SimpleNamespace(model=model.model, model_key=None))
        self.model, same = model, identity_of(model, capture="post_rope")
        doubling = Doubling(**{f.name: getattr(same, f.name) for f in fields(Translator)})
        vars(self).update(_open=lambda name: model, _translator=lambda source, target: doubling)

    def ask(self, key: Key, tokens: list[int], answer: list[int]) -> int:
        """Let a model answer a prompt; returns the number of tokens that it need not read."""
        self._provider.model_key = key
        cache, rest = self.fetch_nearest_cache(key, tokens)
        cache = cache or make_prompt_cache(self.model.model)
        self.model.model(mx.array([[*rest, *answer]]), cache=cache)
        self.insert_cache(key, [*tokens, *answer], cache, cache_type="assistant")
        return len(tokens) - len(rest)

    def checked(self, key: Key, tokens: list[int]) -> SignedCache | None:
        """What is held of just these tokens; values of the first layer are doubled as it says."""
        entry = self._nearest(key, tokens)
        if entry.end < len(tokens):
            return None
        found, own = (held(c[0])[1][0, 0] for c in (entry, native(self.model, tokens, 1000)))
        times = [2**span.passes for span in entry.spans for _ in range(span.start, span.stop)]
        assert set(times) <= {1, 2}  # no row goes through two translators
        np.testing.assert_allclose(found, own * np.array(times[-len(own) :])[:, None], atol=1e-5)
        return entry


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_rows_are_what_their_marks_say(family: str, families: Models, monkeypatch: Patch) -> None:
    """Three models in turns over histories that branch; then each reads what is not its own."""
    monkeypatch.setattr(in_mlx_lm, "LEAST", 8)
    monkeypatch.setattr(in_mlx_lm, "IDLE_S", 100)  # however slow the machine is
    store, rng, texts, saved = Store(families[family]), random.Random(family), [[1, 2, 3]], 0
    entries: list[tuple[Key, list[int]]] = []
    for _ in range(24):
        history = rng.choice(texts[-3:])
        if not rng.randrange(3):
            history = history[: rng.randint(1, len(history))]
        more, answer = (rng.choices(range(280), k=rng.randint(1, 25)) for _ in range(2))
        tokens, key = [*history, *more], (rng.choice("abc"), None, None)
        saved += store.ask(key, tokens, answer)
        texts.append([*tokens, *answer])
        entries.append((key, texts[-1]))
        assert store.checked(*entries[-1]) is not None
    alive = [entry for entry in entries if store.checked(*entry) is not None]
    assert saved > 300 and not all(exact(store._nearest(*entry).spans) for entry in alive)
    for name in "abc":
        store._provider.model_key = (name, None, None)
        while store.healing or store._next():
            store.heal()
    for key, tokens in alive:
        entry = store.checked(key, tokens)
        assert entry is not None and exact(entry.spans)
        for found, own in zip(entry, native(store.model, tokens, 1000), strict=True):
            for one, other in zip(held(found), held(own), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)


# ---- the server ----------------------------------------------------------------------------


def ask(server: Server, model: LanguageModel, messages: list[Message], **more: Any) -> Any:
    """An answer to messages, by OpenAI's client."""
    return server.openai.chat.completions.create(
        model=str(model.path), messages=messages, max_tokens=NEW, extra_body=PLAIN, **more
    )


def said(found: Any) -> tuple[str, list[float]]:
    """The text of an answer, and the log probabilities of its tokens."""
    choice = found.choices[0]
    return choice.message.content, [token.logprob for token in choice.logprobs.content]


def alone(
    model: LanguageModel, tokens: list[int], cache: list[Any] | None = None
) -> tuple[str, list[int], Any]:
    """mlx-lm's own answer: its text, its tokens and their log probabilities, nearly."""
    ids, told, rest = list[int](), list[float](), tokens if cache is None else tokens[-1:]
    steps = generate_step(mx.array(rest), model.model, max_tokens=NEW, prompt_cache=cache)
    for token, probabilities in steps:
        ids.append(token)
        told.append(probabilities[token].item())
        if token in model.tokenizer.eos_token_ids:
            break
    text = model.tokenizer.decode(ids, skip_special_tokens=True)
    return text, ids, pytest.approx(told, abs=1e-3)


def prompt(model: LanguageModel, messages: list[Message]) -> list[int]:
    return model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, enable_thinking=False
    )


@pytest.fixture
def home(pair: Pair, tmp_path: Path) -> Path:
    """A store of translators that read caches, in both directions; what they say is nonsense."""
    facts: Any = {"head_mixing": True, "capture": "post_norm"}
    for ends in (pair, pair[::-1]):
        source, target = (model.spec() for model in ends)
        made = identity(TranslatorConfig(source, target, same_layers(ends[0]), **facts))
        made.save(tmp_path / "translators" / "-".join(model.name for model in ends))
    return tmp_path


def talk(number: int) -> list[Message]:
    """Three messages of a user, each of more tokens than are always left to reading."""
    talks = [*dialogues.held_out(3 * number + 3, seed=5, facts=(4, 8))][3 * number :]
    name = "ABCDE"[number]  # so that no two talks share more than a header
    texts = [" ".join(m["content"] for m in talk.conversation()) for talk in talks]
    return [{"role": "user", "content": f"{name} {text}"} for text in texts]


def switch(home: Path, pair: Pair, number: int) -> tuple[list[Message], str, Any, int]:
    """A talk of two turns by two models: its messages, the first answer, the second one.

    The second is as after a hand-over, of so many tokens as are told at last.
    """
    (first, second), (one, two, _) = pair, talk(number)
    text, ids, _ = alone(first, begun := prompt(first, [one]))
    messages = [one, {"role": "assistant", "content": text}, two]
    tokens = prompt(second, messages)
    known = common_prefix([*begun, *ids], tokens[:-1])
    name = home / "translators" / f"{first.name}-{second.name}"
    # The header is known to the model of the first talk, as are those of all others.
    own = common_prefix(begun, prompt(first, talk(0)[:1])) if number else 0
    native = {"native_head": own, "native_tail": len(tokens) - 1 - known}
    cache = kv.hand_over(first, second, tokens, translator=name, **native)
    answer, _, told = alone(second, tokens, cache)
    return messages, text, (answer, told), known


def check(server: Server, pair: Pair, expected: Any, **more: Any) -> None:
    """Let both models answer in turn, as :func:`switch` expects it."""
    messages, first, second, known = expected
    assert ask(server, pair[0], messages[:1]).choices[0].message.content == first
    found = ask(server, pair[1], messages, logprobs=True, **more)
    assert found.usage.prompt_tokens_details.cached_tokens == known > 40
    assert said(found) == second


@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_a_switch_is_a_hand_over(home: Path, pair: Pair) -> None:
    first, second = pair
    one, *others = [switch(home, pair, number) for number in range(5)]
    with of_mlx_lm(home, command_line("in-mlx-lm"), first.path) as server:
        check(server, pair, one)
        tokens = prompt(second, one[0])
        text, ids, own = alone(second, tokens)
        server.until(lambda: "tokens are its own now" in (home / "log").read_text())
        found = ask(server, second, one[0], logprobs=True)
        assert said(found) == (text, own) != one[2]
        assert found.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1
        messages = [*one[0], {"role": "assistant", "content": text}, talk(0)[2]]
        again = prompt(first, messages)  # of which it has the first turn
        *_, last = ask(server, first, messages, stream=True, stream_options=USAGE)
        known = common_prefix([*tokens, *ids], again[:-1])
        assert last.usage.prompt_tokens_details.cached_tokens == known
        with ThreadPoolExecutor(4) as pool:  # answered together, but for those with a seed
            tried = zip(others, [{}, {}, {}, {"seed": 1}], strict=True)
            for job in [pool.submit(check, server, pair, o, **more) for o, more in tried]:
                job.result()


def test_without_a_translator_it_is_mlx_lms_own(pair: Pair, tmp_path: Path) -> None:
    """The embedded translators read keys that no cache of their models holds."""
    one, two, three = talk(0)
    noted = {"role": "assistant", "content": "Noted."}
    asked = [[one], [one, noted, two], [one, noted, two, noted, three], [one]]
    found = []
    for command in (THEIRS, command_line("in-mlx-lm", "--no-reread")):
        with of_mlx_lm(tmp_path, command, pair[0].path) as server:
            answers = [
                ask(server, pair[i % 2], messages, logprobs=True)
                for i, messages in enumerate(asked)
            ]
        found.append([answer.model_dump(exclude={"id", "created"}) for answer in answers])
    assert found[0] == found[1]
    told = f"keys cannot be read from a cache; .*`kvlingo-mlx pair {pair[0].name} TARGET --capture"
    assert re.search(told, (tmp_path / "log").read_text())


def test_where_none_is_stored_one_is_told_how_to_make_one_that_fits(families: Models) -> None:
    """A translator of `pair` alone reads keys that no cache has, and would be refused later."""
    store = TranslatingPromptCache(10, provider=SimpleNamespace(model=None))
    ends, key = [families["qwen3"], families["llama"]], (("a/b", None, None), ("c d", None, None))
    vars(store).update(_open={"a/b": ends[0], "c d": ends[1]}.__getitem__)
    told = "no translator is stored; `kvlingo-mlx pair a/b 'c d' --capture post_norm` makes one"
    with pytest.raises(MissingTranslatorError, match=told):
        store._find(*key)
    ends[1] = replace(ends[1])
    vars(ends[1])["tokenizer_fingerprint"] = "another"
    vars(store).update(_open={"a/b": ends[0], "c d": ends[1]}.__getitem__)
    with pytest.raises(UnsupportedModelError, match="tokenizers differ; use `kvlingo-mlx serve`"):
        store._find(*key)
