"""How a prompt gets from one model to another, settled before anything is read.

``generate``, ``hand_over`` and folded decoding describe what they want in a
:class:`HandoverRequest` and get a :class:`Plan`, in which everything is loaded, chosen and checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvlingo_mlx.caches.limits import check_going_back
from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.engine import guarding
from kvlingo_mlx.engine.healing import LAYERS
from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading.grading import watched
from kvlingo_mlx.loading.models import Model, load, load_pair, reached
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.translators import name_of, resolve_translator
from kvlingo_mlx.machines import digest_of, facts_of, group_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, check_tools, encode, header_of, is_chat, rendering
from kvlingo_mlx.options import HandoverOptions
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.translators.base import Translator

AnyTranslator = Translator | str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class HandoverRequest(HandoverOptions):
    """A caller's request for a hand-over; the options are those of ``generate``."""

    translator: AnyTranslator = None  # type: ignore[assignment]
    heal: str | None = None  # or ``idle``, which hand_over has
    enable_thinking: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    draft_model: Model | None = None

    def native(self, config: TranslatorConfig) -> Native:
        """The part of the prefix that the target reads itself if this translator is used."""
        own = self.native_layers, self.native_head, self.native_tail, self.native_middle
        return native_part(config, *own, at_once=self.heal == LAYERS)


@dataclass(frozen=True, eq=False)
class Plan:
    """A prompt on its way from one model's cache to another's."""

    source: LanguageModel  # the model that reads the prompt
    target: LanguageModel  # the model whose cache is filled
    # The prompt by the target's tokenizer and template; the last token is left for the target to
    # run
    tokens: list[int]
    # The translator from source to target; None where nothing is translated
    translator: Translator | None = None
    # The part of the prefix that the target reads itself
    native: Native = field(default_factory=Native)
    # Between two tokenizers, the prompt as both models read it; else None
    aligned: AlignedPrefix | None = None
    step_size: int = 2048  # tokens per prefill chunk
    draft: LanguageModel | None = None  # a draft model, which needs a cache of its own
    # The last tokens of the prefix over which both models are compared. The target reads them
    # itself, and the source too.
    guard: int = 0
    # ``accelerator``; ``native`` where the target reads the prompt itself; ``folded``
    way: str = "accelerator"
    # What the target's chat template put before the answer, "" if that is unknown; None for a
    # plain text
    header: str | None = None
    loaded_at: float | None = None  # when both models were loaded, by ``time.perf_counter``

    @property
    def group(self) -> Group:
        """The processes that hold one of the models together."""
        return group_of((self.source, self.target, self.draft))

    @cached_property
    def prefix(self) -> list[int]:
        """The prompt without its last token: the tokens that the target's cache holds."""
        return self.tokens[:-1]

    @property
    def span(self) -> range:
        """The positions of the prefix at which some layer is translated (one tokenizer)."""
        return self.native.translated(len(self.prefix), len(self.target.attentions))

    @property
    def read(self) -> Sequence[int]:
        """The tokens that the source reads, by its own tokenizer."""
        if self.aligned is not None:
            return self.aligned.source_ids[: self.aligned.num_read]
        return self.prefix if self.guard else self.prefix[: self.span.stop]

    @property
    def num_translated(self) -> int:
        """The number of prompt tokens that go through the translator."""
        if self.translator is None:
            return 0
        if self.aligned is not None:
            return len(self.prefix) - len(self.aligned.own)
        return len(self.span) - len(self.native.amid(self.span))


def begin(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    request: HandoverRequest,
    *,
    count: bool = True,
) -> Plan:
    """Load both models and encode the prompt; no translator is found and no token checked yet.

    ``count`` asks for a check that the models, translator and prompt's caches fit into memory.
    """
    source, target = load_pair(
        prefill_model,
        decode_model,
        prompt if count else None,
        translator=request.translator,
        native=request.strategy == "native",
    )
    loaded_at, draft = time.perf_counter(), request.draft_model
    if draft is not None and not isinstance(draft, LanguageModel):
        draft = source if draft == prefill_model else load(draft)
    check_tools(target, prompt, request.tools)
    switches: dict[str, Any] = {"enable_thinking": request.enable_thinking, "tools": request.tools}
    tokens = encode(target, prompt, **switches)
    header = header_of(target, prompt, **switches) if is_chat(prompt) else None
    step_size = request.prefill_step_size
    return Plan(
        source, target, tokens, step_size=step_size, draft=draft, header=header,
        loaded_at=loaded_at,
    )  # fmt: skip


def prepare(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    request: HandoverRequest,
    check: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """The plan of a hand-over, or of a prefill by the target where ``strategy`` leads to that.

    ``check`` can refuse a plan for its cache, before a translator is searched for.

    Raises:
        ValueError: The prompt is empty, an id is out of range, there are more tokens than a model's
            context holds, or an argument is bad.
        MissingModelError, UnsupportedModelError: A model cannot be used.
        RemoteModelError: A prefill model on another machine cannot be reached.
        NotEnoughMemoryError: The models, the translator and the prompt's caches do not fit.
        MissingTranslatorError, IncompatibleTranslatorError, MalformedTranslatorError: No
            translator for this pair can be used.
    """
    plan = begin(reached(prefill_model, request.strategy), decode_model, prompt, request)
    plan = _planned(plan, prompt, request, check)
    plan.group.agree(
        lambda: {
            **facts_of({"source": plan.source, "target": plan.target}),
            "translator": "none" if plan.translator is None else plan.translator.digest,
            "prompt": digest_of(plan.tokens),
        }
    )
    return plan


def _check_remote(plan: Plan, request: HandoverRequest) -> None:
    """Refuse what needs more of a source on another machine than its states."""
    source, target = plan.source, plan.target
    if source.address is None:
        return
    for name, given in {
        "draft_model": plan.draft is not None and plan.draft.address is not None,
        "guard": bool(request.guard),
        "a target that several machines hold": target.group.several,
    }.items():
        if given:
            raise UnsupportedModelError(
                f"{source.name} is on {source.address}, which cannot be used with {name}; leave "
                "one of them out"
            )
    if source.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise UnsupportedModelError(
            f"{source.name} is on {source.address}, and {target.name} has another tokenizer: both "
            "must be on one machine (give a folder or a Hub id)"
        )


def _planned(
    plan: Plan, prompt: Prompt, request: HandoverRequest, check: Callable[[Plan], None]
) -> Plan:
    """A plan that was begun, checked, and with its translator."""
    middle = bool(request.native_middle)
    plan.group.refuse({"draft_model": plan.draft is not None, "native_middle": middle})
    if middle:
        amid = "cannot read tokens amid translated ones"
        check_going_back(plan.target, amid, "no entry for each token; leave out native_middle")
    _check_remote(plan, request)
    native = request.strategy == "native" or _one_model(plan, request)
    readers = (plan.target,) if native else (plan.source, plan.target)
    check_tokens(readers, plan.tokens)
    check_caches(readers, len(plan.tokens))
    check(plan)
    if native:
        return replace(plan, way="native")
    alone = len(plan.tokens) == 1  # nothing to translate
    if alone and request.translator is None:
        return plan
    translator = resolve_translator(
        request.translator, plan.source, plan.target, allow_mismatch=request.allow_mismatch
    )
    plan.group.refuse({"two tokenizers": translator.config.alignment is not None})
    if alone:
        return plan
    own = request.native(translator.config)
    plan = replace(plan, translator=translator, native=own)
    if request.guard:
        return guarded(plan, request.guard)
    tell_of_length(translator.config, len(plan.tokens), name_of(translator.path))
    if translator.config.alignment is None:
        return plan
    if plan.native != Native():
        raise ValueError(
            "native_layers, native_head, native_tail and native_middle cannot be used between two "
            "tokenizers; leave them out"
        )
    switches = {"enable_thinking": request.enable_thinking, "tools": request.tools}
    return replace(plan, aligned=align(plan.source, plan.target, prompt, **switches))


def _one_model(plan: Plan, request: HandoverRequest) -> bool:
    """Whether both ends are one model, which reads the prompt itself: nothing is translated.

    Raises:
        ValueError: An option asks for something beside a translation.
    """
    if request.translator is not None or not plan.source.is_same(plan.target):
        return False
    beside = "native_layers native_head native_tail native_middle heal guard".split()
    unused = [name for name in beside if getattr(request, name)]
    if unused:
        raise ValueError(
            f"{unused[0]} has no effect with {plan.target.name} as both models, since nothing is "
            "translated; leave it out, or give another prefill_model (--source)"
        )
    return True


def guarded(plan: Plan, tokens: int) -> Plan:
    """A plan whose last ``tokens`` both models read, so that they can be compared.

    Raises:
        IncompatibleTranslatorError: The translator's receipt does not say what is usual.
    """
    assert plan.translator is not None
    guarding.check_reference(plan.translator.config)
    number = watched(tokens, len(plan.prefix))
    native = replace(plan.native, tail=max(plan.native.tail, number))
    made = replace(plan, native=native)
    return replace(made, guard=number) if made.span else plan


def align(
    source: LanguageModel, target: LanguageModel, prompt: Prompt, **switches: Any
) -> AlignedPrefix:
    """Align a prompt for two models of different tokenizers.

    ``switches`` are the chat templates' options.

    Raises:
        ValueError: The prompt is empty, consists of token ids, or is beyond a model's context; or a
            model has no template for messages.
    """
    found = AlignedPrefix.of(*(rendering(model, prompt, **switches) for model in (source, target)))
    source.check_tokens(found.source_ids)
    target.check_tokens(found.target_ids)
    return found


def check_tokens(models: Sequence[LanguageModel], tokens: Sequence[int]) -> None:
    """Raise ValueError for a prompt that a model cannot read.

    The ``tokens`` are by the tokenizer of the last of the ``models``.
    """
    if not tokens:
        raise ValueError("the prompt is empty; give some text")
    for model in models:
        if model.tokenizer_fingerprint == models[-1].tokenizer_fingerprint:  # else: other tokens
            model.check_tokens(tokens)
