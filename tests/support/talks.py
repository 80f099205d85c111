"""Conversations of one model under several names, held to what mlx-lm answers."""

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generate_step

from kvlingo_mlx import caches
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.identity import identity_of
from tests.support.native_caches import native

NEW = 6
CLOSE = 1e-4  # of an array's norm: how near one is that was read in other chunks


def talk_of(
    model: LanguageModel, names: str = "ab", *, state_maps: bool = False, **options: Any
) -> Conversation:
    """A conversation of one model under several names, with identity translators."""
    same = identity_of(model, capture=model.family.points[0], state_maps=state_maps)
    return Conversation(dict.fromkeys(names, model), [same], **{"prefill_step_size": 7} | options)


def expected(model: LanguageModel, prompt: list[int], most: int = NEW, **options: Any) -> list[int]:
    """What mlx-lm answers to a prompt that it reads whole."""
    stops, answer = model.tokenizer.eos_token_ids, []
    for token, _ in generate_step(mx.array(prompt), model.model, max_tokens=most, **options):
        answer.append(int(token))
        if answer[-1] in stops:
            break
    return answer


def check_caches(line: Line, without: Collection[str] = ()) -> None:
    """A line's caches end with its tokens, wherever they are.

    States do not say where they end: they must be those of a model that reads the tokens alone.
    """
    counting = [cache for cache in line._caches if not caches.is_recurrent(cache)]
    assert {cache.offset for cache in counting} == {len(line)}
    if len(counting) == len(line._caches) or line.away:
        return
    assert apart(line, without=without) < CLOSE, line.name


def apart(line: Line, tokens: list[int] | None = None, without: Collection[str] = ()) -> float:
    """The most by which an array of a line differs from that of a plain reading, of its norm.

    ``without`` names parts of a state that are left out.
    """
    tokens = line.tokens if tokens is None else tokens
    own = native(line.model, tokens, 7) if tokens else line.model.model.make_cache()
    most = 0.0
    for mine, theirs in zip(line._caches, own, strict=True):
        both = caches.held(mine), caches.held(theirs)
        assert both[0].keys() == both[1].keys() or not tokens
        for name in both[1].keys() - set(without):
            one, other = (each[name] for each in both)
            end = min(one.shape[2], other.shape[2], len(tokens)) if one.ndim == 4 else None
            if not caches.is_recurrent(mine):
                one, other = one[..., :end, :], other[..., :end, :]
            most = max(most, _norm(one - other) / _norm(other))
    return most


def _norm(array: mx.array) -> float:
    return float(mx.linalg.norm(array.astype(mx.float32).reshape(-1)).item())


def ask(
    talk: Conversation, name: str, message: str, without: Collection[str] = (), **options: Any
) -> None:
    """One reply, which must be the model's own; the active line must hold what was said."""
    model = talk.lines[name].model
    prompt = talk.transcript.prompt(model, [{"role": "user", "content": message}])
    text = talk.reply(name, message, max_tokens=NEW, **options)
    answer = talk.transcript.tokens[len(prompt) :]
    assert talk.transcript.tokens[: len(prompt)] == prompt
    assert answer == expected(model, prompt)
    if "<think>" not in text:  # random models write marks, too
        assert talk.messages[-1] == {"role": "assistant", "content": text}
    for line in talk.lines.values():
        check_caches(line, without)
        assert [s.start for s in line.spans] == [0, *(s.stop for s in line.spans[:-1])][
            : len(line.spans)
        ]
        assert (line.spans[-1].stop if line.spans else 0) == len(line)
        assert all(span.passes <= 1 for span in line.spans)
        assert all((span.writer == line.name) == (span.passes == 0) for span in line.spans)


def spelled(model: LanguageModel, text: str) -> list[int]:
    """The tokens of an answer that is written letter by letter where it can be, with its stop."""
    ids: list[int] = []
    for piece in re.split("(</?think>)", text):
        for letter in [piece] if piece in ("<think>", "</think>") else piece:
            ids += model.tokenizer.encode(letter, add_special_tokens=False)
    return [*ids, int(model.tokenizer.eos_token_id)]


def writing(ids: Sequence[int]) -> Callable[[Any], mx.array]:
    """A sampler that writes these tokens, and then the last one again and again."""
    left = itertools.chain(ids, itertools.repeat(ids[-1]))
    return lambda _: mx.array([next(left)])


def thought(talk: Conversation, name: str, message: str, text: str, **options: Any) -> list[int]:
    """Let a model give a scripted answer, letter by letter; its tokens."""
    ids = spelled(talk.lines[name].model, text)
    talk.reply(name, message, sampler=writing(ids), max_tokens=99, **options)
    assert talk.lines[name].model.tokenizer.decode(ids[:-1]) == text
    return ids
