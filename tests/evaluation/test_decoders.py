"""Who decodes lm-eval's tasks: answers several at once.

The embedded models recall facts and reason in a sentence, so answers are planted. The references
are mlx-lm's own decoding, one answer at a time, and this package's ``hand_over``.
"""

from typing import Any

import pytest

from kvlingo_mlx.caches import memory
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.fixtures import Pair
from tests.support.recalling import MOST, TALKS, Makers, alone, asked, prompt, recalled, same

pytest.importorskip("lm_eval")


from kvlingo_mlx.evaluation.harness.adapter import PrefixLM
from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder


def lm(model: LanguageModel, make: conditions.CacheMaker, size: int = 5, **more: Any) -> PrefixLM:
    return PrefixLM(MLXDecoder(model, make, size), condition="x", **more)


def test_answers_written_together_are_those_written_alone(pair: Pair, makers: Makers) -> None:
    """Prompts of 30 to 500 tokens, 5 at once; greedy choices may differ where two are a tie."""
    target, recall = pair[1], {}
    contexts = [prompt(target, talk) for talk in TALKS]
    tokens = [target.tokenizer.encode(c, add_special_tokens=False) for c in contexts]
    for name, make in makers.items():
        found = lm(target, make).generate_until(asked(contexts))
        wanted = [alone(target, t, make(t)) for t in tokens]
        assert same(found, wanted) >= 15 / 16, name
        assert abs(recalled(found) - recalled(wanted)) <= 1 / 16
        recall[name] = recalled(found)
    assert min(recall["native"], recall["translated"]) > 0.8
    assert max(recall["hidden"], recall["shuffled"]) < 0.3


def test_each_ends_at_its_own_place(pair: Pair, makers: Makers) -> None:
    """Stop strings and budgets of its own, beside others that go on."""
    target, make = pair[1], makers["native"]
    contexts = [prompt(target, talk) for talk in TALKS[:6]]
    whole = lm(target, make).generate_until(asked(contexts))
    requests = []
    for n, (context, answer) in enumerate(zip(contexts, whole, strict=True)):
        until = [answer[8:11]] if n % 2 else []
        requests += asked([context], until, most=3 + n if n % 3 == 0 else MOST)
    found = lm(target, make).generate_until(requests)
    for n, (answer, text) in enumerate(zip(whole, found, strict=True)):
        if n % 3 == 0:
            ids = target.tokenizer.encode(answer, add_special_tokens=False)[: 3 + n]
            answer = target.tokenizer.decode(ids)
        assert text == (answer[: answer.find(whole[n][8:11])] if n % 2 else answer)
    assert len(set(map(len, found))) >= 3


def counted(decoder: MLXDecoder, seen: list[int]) -> MLXDecoder:
    """The same, with the number of answers that are in hand at each look for room."""
    fits = decoder._fits

    def look(wanted: Any, running: dict) -> bool:
        seen.append(len(running))
        return fits(wanted, running)

    decoder._fits = look  # type: ignore[method-assign]
    return decoder


def test_fewer_at_once_where_memory_is_short(
    pair: Pair, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, make = pair[1], makers["translated"]
    contexts = [prompt(target, talk) for talk in TALKS[:6]]
    most: dict[str, int] = {}
    answers = {}
    longest = max(len(target.tokenizer.encode(c)) for c in contexts) + MOST
    for name, free in (("all", None), ("two", 3), ("one", 0)):
        # Two together need three: the joined caches, and the copy of those that were there.
        room = None if free is None else free * memory.cache_bytes(target, longest)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "free", lambda room=room: room)
            patch.setattr(memory, "check_caches", lambda *args: None)
            patch.setattr(conditions, "check_caches", lambda *args: None)
            seen: list[int] = []
            decoder = counted(MLXDecoder(target, make, 4), seen)
            answers[name] = PrefixLM(decoder, condition="x").generate_until(asked(contexts))
        most[name] = max(seen)
    # At a look, those in hand are one fewer than are written where the next one fits.
    assert most == {"all": 4, "two": 2, "one": 1}
    assert answers["all"] == answers["two"] == answers["one"]
