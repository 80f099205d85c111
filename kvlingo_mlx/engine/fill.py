"""Carry out a plan: turn a source's states into a target's cache.

The prefix comes chunk by chunk. Each chunk is captured, moved to the translator's capture point,
translated and written. The target may read some of the prefix itself (:mod:`.hybrid`). Pairs with
two tokenizers go through :mod:`.cross_tokenizer`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine import cross_tokenizer, guarding, healing, hybrid
from kvlingo_mlx.engine.guarding import Guarded, Watch
from kvlingo_mlx.engine.plan import Asked, Plan, prepare
from kvlingo_mlx.loading import sharding, spreading
from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import hidden_states, recorded
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt
from kvlingo_mlx.models.states import KVStates, TranslatedStates
from kvlingo_mlx.remote import stream
from kvlingo_mlx.remote.model import RemoteModel
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator

PHASES = ("prefill", "translate", "native")


class Clock:
    """Seconds by phase since ``started``: each ``lap`` books the time since the last one.

    ``received`` is what came from another machine meanwhile.
    """

    def __init__(self, started: float | None = None) -> None:
        self.started = self._last = time.perf_counter() if started is None else started
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.received: stream.Received | None = None

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def translate_span(
    cache: Sequence[Any],
    states: KVStates,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    num_tokens: int,
) -> None:
    """Write one span of a source's keys and values into a target's cache, without evaluating it.

    ``num_tokens`` is the number of tokens that the cache will hold in the end. A layer with a
    window takes only the last positions of these.
    """
    states = capture.move(states, source, translator.config.capture)
    caches.write(cache, translator(states, target.geometry.first_kept(num_tokens)), target)


def filled(
    plan: Plan,
    clock: Clock | None = None,
    source_cache: list[Any] | None = None,
    held: KVStates | None = None,
    below: hybrid.Below | None = None,
    watch: Watch | None = None,
) -> list[Any]:
    """Fill the target's cache with a plan's prefix, chunk by chunk; return it evaluated.

    The maps work token by token, so each chunk's capture is dropped once it is translated. After
    the last chunk there is one synchronisation, for all layers together. The source's own cache
    is dropped too, unless the caller gives ``source_cache``, which is then filled. ``held`` are the
    states that ``source_cache`` holds already. ``below`` keeps what the native layers end on,
    ``watch`` what both models make of the last tokens.

    Returns:
        Stock mlx-lm caches. Between two tokenizers their ``offset`` is the number of entries, which
        may differ from the number of tokens, and the handed-over part cannot be trimmed.
    """
    if plan.translator is None or not plan.prefix:
        return make_prompt_cache(plan.target.model)
    clock = clock or Clock()
    if isinstance(plan.source, RemoteModel):
        with mx.stream(generation_stream), contextlib.closing(_sent(plan, clock)) as arriving:
            return take_over(plan, arriving, clock, below)
    read = plan.read if source_cache is None else plan.prefix
    first: Iterator[KVStates] = iter(())
    begun = 0
    if held is not None:
        _check_end(plan, held)
        begun, starts = held.end, range(held.start, held.end, plan.step_size)
        first = (held.part(start, min(start + plan.step_size, held.end)) for start in starts)
    own = make_prompt_cache(plan.source.model) if source_cache is None else source_cache
    prefilled = _read(plan, read, own, begun, watch)
    del own
    with mx.stream(generation_stream), contextlib.closing(prefilled) as rest:
        return take_over(plan, itertools.chain(first, rest), clock, below, watch)


def _check_end(plan: Plan, held: KVStates) -> None:
    """Refuse (ValueError) held states that end behind the token after which they are mapped."""
    assert plan.translator is not None
    span = plan.span
    if plan.translator.config.state_maps and span and held.end > span.stop:
        raise ValueError(
            f"prompt_cache holds {held.end} tokens, and recurrent states are mapped after "
            f"{span.stop}, where the target begins to read itself: leave out native_tail and "
            "guard, or give a cache of fewer tokens"
        )


def _read(
    plan: Plan, tokens: Sequence[int], cache: list[Any], begun: int, watch: Watch | None
) -> Generator[KVStates, None, None]:
    """The source's states of ``tokens`` from position ``begun`` on, chunk by chunk."""
    assert plan.translator is not None
    source, config = plan.source, plan.translator.config
    last = len(tokens) - (watch.tokens if watch else 0)
    # A state is mapped as it is after the last token that is translated.
    stops = [plan.span.stop, last] if config.state_maps else [last]
    for stop in stops:
        read = tokens[:stop]
        yield from spreading.prefill(source, read, plan.step_size, cache, begun, config)
        begun = max(begun, stop)
    if watch is None:
        return
    with working(), recorded(source) as hidden:
        spans = list(spreading.prefill(source, tokens, watch.tokens, cache, last, config))
        mx.eval(hidden)
    watch.source_read(hidden[0][0])
    yield from spans


def _sent(plan: Plan, clock: Clock) -> stream.Spans:
    """The states of a source on another machine, as they arrive; ``clock`` gets their number."""
    assert isinstance(plan.source, RemoteModel) and plan.translator is not None
    target, span = plan.target, plan.span
    received = clock.received = stream.Received(plan.source.address, "", len(span))
    if span:
        firsts = target.geometry.first_kept(span.stop)
        dtype: Any = str(target.cache_dtype).rsplit(".", 1)[-1]
        layers, step_size = plan.native.layers, plan.step_size
        wanted = stream.Wanted(
            plan.read, step_size, span.start, plan.translator, layers, firsts, dtype
        )
        yield from stream.spans(plan.source, wanted, received)
    if received.lacking:
        title, address = plan.translator.config.title, plan.source.address
        tell(
            f"{title} on {address}",
            f"{address} does not have {title}, so the source's states were sent, which are more "
            "bytes; give it to `serve-prefill --translator` there",
        )


def take_over(
    plan: Plan,
    spans: Iterable[KVStates | TranslatedStates],
    clock: Clock | None = None,
    below: hybrid.Below | None = None,
    watch: Watch | None = None,
) -> list[Any]:
    """Fill the target's cache from source states that exist already or arrive span by span.

    Args:
        plan: A plan with a translator.
        spans: The source's states of the prefix, in order, or what they were translated to; each
            is freed once it is written.
        clock: Books the time of each phase.
        below: Keeps the hidden states on which the native layers end.
        watch: Keeps the target's hidden states of the last tokens.

    Returns:
        Stock mlx-lm caches, evaluated.
    """
    lap = (clock or Clock()).lap
    if plan.aligned is not None:
        own = cast("Iterable[KVStates]", spans)  # only models of one tokenizer are apart
        cache = cross_tokenizer.filled_across(plan, plan.aligned, own, lap)
        validate_cache(cache, plan.target, plan.aligned.num_entries)
    else:
        cache = _take_over(plan, spans, lap, below, watch)
        validate_cache(cache, plan.target, len(plan.prefix))
    return cache


def _take_over(
    plan: Plan,
    spans: Iterable[KVStates | TranslatedStates],
    lap: Callable[[str], None],
    below: hybrid.Below | None,
    watch: Watch | None,
) -> list[Any]:
    """:func:`take_over` for two models of one tokenizer."""
    assert plan.translator is not None
    source = spreading.writer(plan.source, plan.translator.config)
    target, prefix, span = plan.target, plan.prefix, plan.span
    layers, step_size = plan.native.layers, plan.step_size
    upper = plan.translator.above(layers)
    cache = hybrid.allocate(target, prefix[: span.stop], plan.native, step_size)
    lap("native")
    wanted = target.geometry.first_kept(span.stop)[layers:]
    done = max(span.start, min(wanted, default=0))
    for states in spans:
        lap("prefill")
        if done < min(states.start, span.stop):  # a gap in the cache would hold zeros
            raise ValueError(
                f"the source holds nothing before position {states.start}, and {done} is to be "
                "translated; prefill the source"
            )
        done = max(done, states.end)
        start, stop = max(states.start, span.start), min(states.end, span.stop)
        if start < stop:
            hybrid.read_layers(target, prefix[start:stop], cache, step_size, layers, below)
            lap("native")
        with working():
            if isinstance(states, TranslatedStates):
                caches.write(cache, states, target)
            elif start < stop:
                translate_span(cache, states.part(start, stop), source, target, upper, span.stop)
            del states
            mx.eval(caches.arrays(cache))
        lap("translate")
    last = len(prefix) - (watch.tokens if watch else 0)
    hybrid.read_layers(target, prefix[span.stop : last], cache, step_size)
    if watch is not None:
        with working():
            hidden = hidden_states(target, prefix[last:], cache)
            mx.eval(hidden, caches.arrays(cache))
        watch.target_read(hidden)
    lap("native")
    return cache


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
        allow_mismatch: Accept a translator made for another checkpoint of the same shape.
        prompt_cache: The prefill model's own caches of the first of these tokens, for example
            from ``mlx_lm``'s ``load_prompt_cache``. The prefill model reads the remaining tokens
            into them, so they hold ``tokens[:-1]`` afterwards. The translator must read keys as
            they are cached (capture post_norm or post_rope, where keys are normed). Nothing can
            check that the caches belong to these tokens.
        enable_thinking: The chat template's switch, for messages.
        tools: The tools that the chat template announces, for messages.
        heal: ``idle`` returns a :class:`~kvlingo_mlx.engine.healing.HealingCache`, a list whose
            ``heal()`` lets the decode model read the prompt itself, a chunk a call, in the place of
            the translation. ``layers`` also lets it read some layers at once: ``native_layers``,
            the tuned number or a quarter of all. No layer is read twice.
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
    healing.check_way(heal, healing.HANDED)
    guarding.check_guard(guard, on_doubt, guarding.HANDED)
    asked = Asked(
        translator,
        prefill_step_size=prefill_step_size,
        enable_thinking=enable_thinking,
        tools=tools,
        native_layers=native_layers,
        native_head=native_head,
        native_tail=native_tail,
        allow_mismatch=allow_mismatch,
        heal=heal,
        guard=guard,
    )

    def check(plan: Plan) -> None:
        if heal is not None:
            healing.check_models(plan.source, plan.target)

    plan = prepare(prefill_model, decode_model, tokens, asked, check)
    if plan.way == "native":
        if prompt_cache is not None:
            raise ValueError(
                f"prompt_cache is a cache of {plan.target.name} already, since it is both models; "
                "let it read the rest of the tokens into it"
            )
        return _read_alone(plan)
    held = None
    if prompt_cache is not None:
        _check_own(plan)
    if prompt_cache is not None and plan.translator is not None:
        held = _held(prompt_cache, plan.source, plan.translator, len(plan.prefix))
    below = None if heal is None else plan.below()
    watch = plan.watch()
    cache = filled(plan, source_cache=prompt_cache, held=held, below=below, watch=watch)
    doubts = () if watch is None else judged(plan, watch, on_doubt).doubts
    if doubts and on_doubt == guarding.REREAD:
        plan = alone(plan)
        cache = _read_alone(plan)
    if heal is None:
        return cache
    return healing.HealingCache(cache, healing_of(plan, cache, below), together=plan.spread)


def alone(plan: Plan) -> Plan:
    """A plan by which the target reads the prompt itself."""
    return replace(plan, way="native", translator=None, native=hybrid.Native(), guard=0)


def _read_alone(plan: Plan) -> list[Any]:
    """The cache of a prompt's prefix that the target has read itself."""
    cache = make_prompt_cache(plan.target.model)
    with mx.stream(generation_stream):
        hybrid.read_layers(plan.target, plan.prefix, cache, plan.step_size)
    return cache


def judged(plan: Plan, watch: Watch, on_doubt: str) -> Guarded:
    """What the guard makes of a plan that was carried out; warns if that was asked for."""
    assert plan.translator is not None
    with working():
        measured = watch.measured(plan.tokens[-watch.tokens :])
        measured = sharding.firsts(measured) if plan.spread else measured
    config = plan.translator.config
    found = guarding.judged(config, measured, watch.tokens, len(plan.prefix))
    if found.doubts and on_doubt == guarding.WARN:
        guarding.warn(config, found)
    return found


def healing_of(plan: Plan, cache: Sequence[Any], below: hybrid.Below | None) -> healing.Prefix:
    """What the target reads in the place of its translated entries, from the front on.

    ``below`` has the hidden states on which its native layers ended. The tokens that it read for a
    guard alone attended to translated ones, so they are read again.
    """
    span = plan.span if plan.translator is not None else range(0)
    stop = len(plan.prefix) if plan.guard else span.stop
    return healing.Prefix(plan.target, cache, plan.prefix[:stop], span.start, below)


def _check_own(plan: Plan) -> None:
    """Refuse a ``prompt_cache`` of a source that is not whole in this process.

    Raises:
        ValueError: It is on another machine, or has another tokenizer.
        UnsupportedModelError: Several ranks hold it together.
    """
    if plan.source.address is not None:
        raise ValueError(
            f"prompt_cache holds caches of {plan.source.name}, which is on {plan.source.address} "
            "and reads the prompt there; leave it out"
        )
    if plan.source.part is not None:
        sharding.check_use((plan.source, plan.target), {"prompt_cache": True})
    if plan.aligned is not None:
        raise ValueError("prompt_cache cannot be used between two tokenizers; leave it out")


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
