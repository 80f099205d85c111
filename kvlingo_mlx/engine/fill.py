"""Hand a prompt over from one model's cache to another's."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.arguments import checked
from kvlingo_mlx.engine import guarding, healing
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.one_turn import TARGET, OneTurn, bring, source_line, take_over
from kvlingo_mlx.engine.plan import HandoverRequest, Plan, prepare
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import finished
from kvlingo_mlx.translators.base import Translator

__all__ = ["bring", "hand_over", "take_over"]


class HealingCache(list[Any]):
    """A translated cache, a list of mlx-lm's own caches, that its model can read behind.

    Decoding may go on between two calls of :meth:`heal`; what it appends stays. Do not shorten the
    caches below the prompt before all of it is read. ``save_prompt_cache`` keeps the entries as
    they are, and not what is left to read.
    """

    def __init__(self, line: Line, group: Group = ALONE) -> None:
        super().__init__(line.cache)
        self._line, self._pace, self._end = line, healing.Pace(group), self[0].offset

    @property
    def left(self) -> int:
        """The number of prompt tokens that the model has yet to read as it would alone."""
        return self._line.left(answers=True)

    def heal(self, seconds: float = healing.IDLE_S) -> int:
        """Let the model read on for about so many ``seconds``; return the tokens that are left.

        A call reads one chunk. The first one is short, since the machine's pace is not known yet.

        Raises:
            ValueError: The caches have been shortened below the prompt.
        """
        if seconds <= 0:
            raise ValueError(f"seconds is {seconds!r}; give a number above 0")
        if self.left and (end := self[0].offset) < self._end:
            raise ValueError(
                f"the caches hold {end} tokens, fewer than the {self._end} of the prompt, which is "
                "not read to its end; hand the prompt over again"
            )
        if self.left:
            read = functools.partial(self._line.heal, answers=True)
            self._pace.read(read, seconds)
        return self.left


@checked
def hand_over(
    prefill_model: Model,
    decode_model: Model,
    tokens: Prompt,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
    prefill_step_size: int = 2048,
    native_layers: int | str | None = None,
    native_head: int = 0,
    native_tail: int = 0,
    native_middle: int = 0,
    allow_mismatch: bool = False,
    prompt_cache: list[Any] | None = None,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    heal: str | None = None,
    guard: int = 0,
    on_doubt: str = guarding.WARN,
) -> list[Any]:
    """Prefill with one model; return the other model's cache of ``tokens[:-1]``.

    Args:
        prefill_model: The source, which reads the tokens; also one on another machine, as in
            ``generate``.
        decode_model: The target, whose cache is returned.
        tokens: Token ids, text or messages; two tokenizers need text or messages. The last token,
            by the decode model's tokenizer and template, is left for the decode model to run.
        translator: A loaded translator, a folder or a Hub id; None searches the local store.
        prefill_step_size: Tokens per prefill chunk.
        native_layers: Number of cache layers, from the first on, that the decode model reads
            itself. They cost that share of a prefill; the other layers are translated. None takes
            the tuned number, or 0 if the translator was not tuned; ``auto`` refuses a translator
            that was not tuned. All layers together are a full prefill.
        native_head: Number of first tokens that the decode model reads itself in all layers.
        native_tail: Number of last prefix tokens that it reads itself in all layers.
        native_middle: Number of tokens between these that it reads itself in all layers, at even
            distances, behind what is translated before each.
        allow_mismatch: Accept a translator made for another checkpoint of the same shape.
        prompt_cache: The prefill model's own caches of the first of these tokens, for example
            from ``mlx_lm``'s ``load_prompt_cache``. The prefill model reads the remaining tokens
            into them, so they hold ``tokens[:-1]`` afterwards. The translator must read keys as
            they are cached (capture post_norm or post_rope, where keys are normed). Nothing can
            check that the caches belong to these tokens.
        enable_thinking: The chat template's switch, for messages.
        tools: The tools that the chat template announces, for messages.
        heal: ``idle`` returns a :class:`~kvlingo_mlx.engine.fill.HealingCache`, a list whose
            ``heal()`` lets the decode model read the prompt itself, a chunk a call, in the place of
            the translation. ``layers`` also lets it read some layers at once: ``native_layers``,
            the tuned number or a quarter of all.
        guard: The number of last tokens over which both models are compared, as in ``generate``; 0
            for no guard.
        on_doubt: What is done if the translation looks out of its depth: ``warn``, or ``reread``,
            the decode model reads the tokens itself.

    Returns:
        Stock mlx-lm caches, evaluated, for ``mlx_lm.generate.generate_step(
        mx.array(tokens[-1:]), decode_model.model, prompt_cache=...)`` and for mlx-lm's other uses
        of caches: batches, ``save_prompt_cache``, ``trim_prompt_cache``, ``kv_bits``. Between two
        tokenizers ``offset`` counts entries, and there is not one entry per token: only tokens
        that come after the hand-over can be trimmed.

    Raises:
        ValueError: There are no tokens, an id is out of range, or there are more tokens than a
            model's context holds.
        IncompatibleTranslatorError: The translator is for another pair.
        MissingTranslatorError: None was given and none is stored.
        RemoteModelError: The prefill model's machine fails, or sends what is wrong.
        UnsupportedModelError: A ``prompt_cache`` does not hold what the translator reads; or
            ``heal`` is given, and the decode model has windows, recurrent states or another
            tokenizer.
    """
    request = HandoverRequest.of(locals())

    def check(plan: Plan) -> None:
        if heal is not None:
            healing.check_models(plan.source, plan.target)

    plan = prepare(prefill_model, decode_model, tokens, request, check)
    if plan.way == "native" and prompt_cache is not None:
        raise ValueError(
            f"prompt_cache is a cache of {plan.target.name} already, since it is both models; "
            "let it read the rest of the tokens into it"
        )
    source = None if prompt_cache is None else _holding(plan, prompt_cache)
    turn = OneTurn(plan, request, source=source)
    finished(turn.bring(TARGET, plan.prefix))
    if source is not None:
        finished(source.read(plan.prefix[len(source) :], plan.step_size))
    if heal is None:
        return turn.target.cache
    return HealingCache(turn.target, plan.group)


def _holding(plan: Plan, cache: list[Any]) -> Line | None:
    """The source's line with a cache of its own, which may hold the first tokens of the prefix.

    Raises:
        ValueError: The cache is not one of the source's, or holds too much; or the source is on
            another machine, or has another tokenizer.
        UnsupportedModelError: Several machines hold the source together.
    """
    if plan.translator is None:
        return None
    if plan.source.address is not None:
        raise ValueError(
            f"prompt_cache holds caches of {plan.source.name}, which is on {plan.source.address} "
            "and reads the prompt there; leave it out"
        )
    plan.source.group.refuse({"prompt_cache": True})
    if plan.aligned is not None:
        raise ValueError("prompt_cache cannot be used between two tokenizers; leave it out")
    held = _held(cache, plan.source, plan.translator, len(plan.prefix))
    mapped, span = plan.translator.config.state_maps, plan.span
    if held is not None and mapped and span and held.end > span.stop:
        raise ValueError(
            f"prompt_cache holds {held.end} tokens, and recurrent states are mapped after "
            f"{span.stop}, where the target begins to read itself: leave out native_tail and "
            "guard, or give a cache of fewer tokens"
        )
    line = source_line(plan)
    line.hold(plan.prefix[: 0 if held is None else held.end], held, cache)
    return line


def _held(
    cache: list[Any], source: LanguageModel, translator: Translator, most: int
) -> KVStates | None:
    """The states in a source's caches of a prompt with ``most`` prefix tokens; None if empty."""
    stock = make_prompt_cache(source.model)
    if not isinstance(cache, list) or len(cache) != len(stock):
        what = f"{len(cache)} caches" if isinstance(cache, list) else f"{cache!r:.60}"
        raise ValueError(
            f"prompt_cache is {what}; give the list of the {len(stock)} caches of {source.name}, "
            "as mlx_lm's make_prompt_cache or load_prompt_cache has it"
        )
    for own, usual in zip(cache, stock, strict=True):
        if caches.is_ring(own) and not caches.is_ring(usual) and own.offset <= own.max_size < most:
            raise ValueError(
                f"prompt_cache keeps {own.max_size} tokens, but {most} come before the prompt's "
                "last one: make it without max_kv_size"
            )
    if not any(c.offset for c in cache if not caches.is_recurrent(c)):
        return None
    config = translator.config
    held = caches.read(cache, source, config.capture, kept=config.state_maps)
    if held.end > most:
        raise ValueError(
            f"prompt_cache holds {held.end} tokens, but only {most} come before the prompt's last "
            "one: trim it (mlx_lm's trim_prompt_cache), or give the whole prompt"
        )
    return held
