"""How a prompt gets from one model to another: settled here, before anything is read.

Whatever hands a prompt over, ``generate``, ``hand_over`` or folded decoding, asks for it by an
:class:`Asked` and gets a :class:`Plan`, in which everything is loaded, chosen and checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.handover import timings
from kvlingo_mlx.handover.hybrid import Native, native_part
from kvlingo_mlx.loading.models import Model, load, load_pair
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.loading.translators import find_translator, resolve_translator, translator_facts
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, check_tools, encode, rendering
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.translators.base import Translator

STRATEGIES = ("accelerator", "native", "auto")
AnyTranslator = Translator | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Asked:
    """What a caller asks of a hand-over, by the names and defaults of ``hand_over``.

    ``strategy`` is as in ``generate``, and ``draft_model`` too.
    """

    translator: AnyTranslator = None
    strategy: str = "accelerator"
    prefill_step_size: int = 2048
    enable_thinking: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    native_layers: int | str | None = None
    native_head: int = 0
    native_tail: int = 0
    allow_mismatch: bool = False
    draft_model: Model | None = None

    def native(self, config: TranslatorConfig) -> Native:
        """What the target is to read itself beside this translator."""
        return native_part(config, self.native_layers, self.native_head, self.native_tail)


@dataclass(frozen=True, eq=False)
class Plan:
    """A prompt on its way from one model's cache to another's.

    Attributes:
        source: Reads the prompt.
        target: Whose cache of it is wanted.
        tokens: The prompt by the target's tokenizer and template; the last one is left for the
            target to run.
        translator: From source to target; None where nothing is translated.
        native: What the target reads itself.
        aligned: The prompt as both read it, between two tokenizers; else None.
        step_size: Tokens per prefill chunk.
        draft: A draft model, which needs a cache of its own.
        way: ``accelerator``; ``native`` where the target reads the prompt itself; ``folded``.
        loaded_at: When both models were there, by ``time.perf_counter``.
    """

    source: LanguageModel
    target: LanguageModel
    tokens: list[int]
    translator: Translator | None = None
    native: Native = field(default_factory=Native)
    aligned: AlignedPrefix | None = None
    step_size: int = 2048
    draft: LanguageModel | None = None
    way: str = "accelerator"
    loaded_at: float | None = None

    @cached_property
    def prefix(self) -> list[int]:
        """What a cache is made of."""
        return self.tokens[:-1]

    @property
    def span(self) -> range:
        """The positions of the prefix at which some layer is translated (one tokenizer)."""
        return self.native.translated(len(self.prefix), len(self.target.attentions))

    @property
    def read(self) -> Sequence[int]:
        """What the source reads for it, in its own tokens."""
        if self.aligned is not None:
            return self.aligned.source_ids[: self.aligned.num_read]
        return self.prefix[: self.span.stop]

    @property
    def num_translated(self) -> int:
        """Tokens of the prompt that go through the translator."""
        if self.translator is None:
            return 0
        if self.aligned is not None:
            return len(self.prefix) - len(self.aligned.own)
        return len(self.span)


def begin(
    prefill_model: Model, decode_model: Model, prompt: Prompt, asked: Asked, *, count: bool = True
) -> Plan:
    """Both models loaded and the prompt encoded; no translator yet, and no token checked.

    ``count``: what loading takes is to fit into memory with the translator and the prompt's caches.
    """
    source, target = load_pair(
        prefill_model,
        decode_model,
        prompt if count else None,
        translator=asked.translator,
        native=asked.strategy == "native",
    )
    loaded_at, draft = time.perf_counter(), asked.draft_model
    if draft is not None and not isinstance(draft, LanguageModel):
        draft = source if draft == prefill_model else load(draft)
    check_tools(target, prompt, asked.tools)
    tokens = encode(target, prompt, asked.enable_thinking, tools=asked.tools)
    step_size = asked.prefill_step_size
    return Plan(source, target, tokens, step_size=step_size, draft=draft, loaded_at=loaded_at)


def prepare(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    asked: Asked,
    check: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """The plan of a hand-over, or of a prefill by the target where ``strategy`` comes to that.

    ``check`` refuses what cannot be done with the cache, before a translator is looked for.

    Raises:
        ValueError: An empty prompt, an id out of range, more than a model's context, or a bad
            argument.
        MissingModelError, UnsupportedModelError: A model cannot be used.
        NotEnoughMemoryError: The models, the translator and the prompt's caches do not fit.
        MissingTranslatorError, IncompatibleTranslatorError, MalformedTranslatorError: No
            translator for this pair can be used.
        MissingProfileError, MalformedProfileError: ``auto`` has no timings to go by.
    """
    check_strategy(asked.strategy)
    plan = begin(prefill_model, decode_model, prompt, asked)
    native = asked.strategy == "native" or (asked.strategy == "auto" and _reads_itself(plan, asked))
    readers = (plan.target,) if native else (plan.source, plan.target)
    check_tokens(readers, plan.tokens, plan.step_size)
    check_caches(readers, len(plan.tokens))
    check(plan)
    if native:
        return replace(plan, way="native")
    if len(plan.tokens) == 1:  # nothing to translate
        return plan
    translator = resolve_translator(
        asked.translator, plan.source, plan.target, allow_mismatch=asked.allow_mismatch
    )
    plan = replace(plan, translator=translator, native=asked.native(translator.config))
    tell_of_length(translator.config, len(plan.tokens))
    if translator.config.alignment is None:
        return plan
    if plan.native != Native():
        raise ValueError(
            "native_layers, native_head and native_tail cannot be used between two tokenizers, "
            "where the decode model reads what is not translated already; leave them out"
        )
    switches = {"enable_thinking": asked.enable_thinking, "tools": asked.tools}
    return replace(plan, aligned=align(plan.source, plan.target, prompt, **switches))


def prepare_whole(
    plan: Plan,
    asked: Asked,
    suits: Callable[[TranslatorConfig], bool],
    check: Callable[[Translator], None],
) -> Plan:
    """A plan with a translator that is applied to every layer, as folded decoding needs one.

    Args:
        plan: As :func:`begin` makes it.
        asked: What is asked for.
        suits: Which of several stored translators will do.
        check: Refuses a translator that will not.
    """
    check_caches((plan.source,), len(plan.tokens))
    pair, mismatch, found = (plan.source, plan.target), asked.allow_mismatch, asked.translator
    if found is None:
        found = find_translator(*pair, allow_mismatch=mismatch, suits=suits)
    translator = resolve_translator(found, *pair, allow_mismatch=mismatch)
    tell_of_length(translator.config, len(plan.tokens))
    check(translator)
    return replace(plan, translator=translator)


def align(
    source: LanguageModel, target: LanguageModel, prompt: Prompt, **switches: Any
) -> AlignedPrefix:
    """A prompt as two models of different tokenizers read it; ``switches`` are the templates'.

    Raises:
        ValueError: It is empty, or token ids; more than a model's context; or a model has no
            template for messages.
    """
    found = AlignedPrefix.of(*(rendering(model, prompt, **switches) for model in (source, target)))
    source.check_tokens(found.source_ids)
    target.check_tokens(found.target_ids)
    return found


def check_tokens(models: Sequence[LanguageModel], tokens: Sequence[int], step_size: int) -> None:
    """Refuse (ValueError) a prompt that a model cannot read, or chunks of no tokens.

    The last of the ``models`` has the prompt's tokenizer.
    """
    if not tokens:
        raise ValueError("the prompt is empty; give some text")
    if step_size < 1:
        raise ValueError(f"prefill_step_size is {step_size}; it must be at least 1")
    for model in models:
        if model.tokenizer_fingerprint == models[-1].tokenizer_fingerprint:  # else it has its own
            model.check_tokens(tokens)


def check_strategy(strategy: str) -> None:
    """Refuse what is no way to read a prompt.

    Raises:
        ValueError: Says which there are; a switch needs a source that holds the conversation.
    """
    if strategy == "switch":
        raise ValueError(
            "strategy is 'switch', but nobody has read this prompt yet; switches are made by "
            "Conversation and `kvlingo-mlx chat`; give accelerator, native or auto"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; give accelerator, native or auto")


def _reads_itself(plan: Plan, asked: Asked) -> bool:
    """Whether this machine's timings say that the target has its first token sooner by itself.

    Timings are of one choice of native layers and tokens and one size of chunks; those of another
    say nothing of it. A source that drafts reads the prompt whichever way is taken.
    """
    count = len(plan.tokens)
    if count == 1:
        return True  # nothing to translate
    facts = translator_facts(
        asked.translator, plan.source, plan.target, allow_mismatch=asked.allow_mismatch
    )
    check_one_tokenizer(facts.config, "strategy auto")
    native = asked.native(facts.config)
    if not replace(plan, native=native).span:
        return True  # nothing would be translated
    key = timings.key_of(plan.source, plan.target, facts, native, plan.step_size)
    given = asked.translator
    if given is not None:
        given = "FOLDER" if isinstance(given, Translator) else os.fspath(given)
    names = plan.source.name, plan.target.name
    found = timings.read(key, names, given, facts.config.native_layers)
    # What remains then is a switch, which timings know of plain translation alone.
    remains = "switch" if plan.draft is plan.source and native == Native() else "accelerator"
    return found.best(count, remains) == "native"
