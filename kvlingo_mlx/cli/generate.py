"""kvlingo-mlx generate: one model reads the prompt, another one answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli.command import (
    AllowMismatch,
    HealShare,
    NativeLayers,
    Quantize,
    Shard,
    Thinking,
    Translator,
    TwoModels,
    option,
    verb,
)
from kvlingo_mlx.cli.output import awaited, keep, native_number, say
from kvlingo_mlx.cli.prompt_input import MESSAGES_HELP, read_prompt
from kvlingo_mlx.cli.sampling import WritingOptions

if TYPE_CHECKING:
    from kvlingo_mlx.models.language_model import LanguageModel

TIMES = (
    "strategy prompt_tokens prefill_s translate_s native_s ttft_s generation_tps translator "
    "translator_digest"
)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(WritingOptions, TwoModels):
    prompt: str | None = option(None, "The prompt; - reads standard input.", "--prompt", "-p")
    messages_file: str | None = option(None, MESSAGES_HELP, "--messages")
    translator: Translator = None
    quantize: Quantize = None
    strategy: str = option(
        "accelerator", "accelerator: the source reads the prompt; native: the target reads it."
    )
    native_layers: NativeLayers = None
    shard: Shard = None
    placement: str | None = option(
        None,
        "Under mlx.launch, the source reads: replicated (on each rank), sharded, or first (on the "
        "first rank, which sends what it writes); default: the quickest that fits.",
    )
    native_head: int = option(0, "First tokens that the target reads itself.")
    native_tail: int = option(0, "Last tokens that it reads itself.")
    heal: str | None = option(
        None,
        "interleaved: the target reads the prompt behind the translation, between its tokens; "
        "layers: its first layers at once, the others so.",
    )
    heal_share: HealShare = 0.5
    guard: int = option(
        0,
        "Compare both models over so many last tokens of the prompt, as the receipt does with 32; "
        "0: do not.",
    )
    on_doubt: str = option(
        "warn",
        "If they are further apart than usual: warn; heal, as heal = interleaved; or reread, the "
        "target reads the prompt itself first.",
    )
    system_prompt: str | None = option(None, "System message for the chat template.")
    ignore_chat_template: bool = option(False, "Take the prompt as raw text.")
    thinking: Thinking = None
    kv_bits: int | None = option(None, "Quantise the target's cache.")
    kv_group_size: int = option(64, "Numbers that share a scale under --kv-bits.")
    quantized_kv_start: int = option(5000, "Tokens before --kv-bits applies.")
    draft_model: str | None = option(None, "Drafts for speculative decoding; the source can.")
    num_draft_tokens: int = option(3, "Tokens that --draft-model drafts at a time.")
    memory_budget: bool = option(
        False, "Decode from the source's own cache; --kv-bits is then that cache's."
    )
    allow_mismatch: AllowMismatch = False
    verbose: bool = option(True, "Print the times after the answer.")


@verb(GenerateOptions, waits=True)
def command(options: GenerateOptions) -> None:
    """Read a prompt with one model and answer with another."""
    asked = read_prompt(options.prompt, options.messages_file)

    from kvlingo_mlx.engine.generation import stream_generate
    from kvlingo_mlx.engine.plan import check_strategy
    from kvlingo_mlx.engine.responses import summary
    from kvlingo_mlx.folding import folded_stream_generate
    from kvlingo_mlx.loading import sharding
    from kvlingo_mlx.loading.models import load_pair, reached
    from kvlingo_mlx.translators.quantised import check_bits

    check_bits(options.quantize)
    check_strategy(options.strategy)
    native_number(options.native_layers)  # refused before any model is loaded
    sampler = options.sampler()
    if sharding.group() is not None or options.shard or options.placement:
        source, target = _spread(options, asked)
    else:
        budget = options.memory_budget  # by which the source decodes, and so is needed here
        named = options.source if budget else reached(options.source, options.strategy)
        native = options.strategy == "native"
        source, target = load_pair(
            named, options.target, asked, translator=options.translator, native=native
        )
    templated = _check_template(options, target)
    given = _arguments(options, source, target)
    respond = folded_stream_generate if options.memory_budget else stream_generate
    prompt = _messages(asked, options.system_prompt) if templated else asked
    pieces = []
    answer = respond(
        source, target, prompt, sampler=sampler, enable_thinking=options.thinking, **given
    )
    for response in awaited("reading the prompt", answer):
        pieces.append(response.text)
        say(response.text, end="\n" if response.finish_reason else "")
    if options.verbose:
        say("=" * 10)
        say(summary(response))
    config = {"prefill_model": source.name, "decode_model": target.name, "prompt": asked}
    config |= options.some("quantize memory_budget")
    results = {"text": "".join(pieces), **{name: getattr(response, name) for name in TIMES.split()}}
    if response.guarded is not None:
        results["guarded"] = asdict(response.guarded)
    if response.received is not None:
        results["received"] = asdict(response.received)
    keep(options.json_file, "generate", config, results)


def _spread(
    options: GenerateOptions, asked: str | list[dict[str, Any]]
) -> tuple[LanguageModel, LanguageModel]:
    """The source, and this rank's part of the target, under ``mlx.launch``."""
    from kvlingo_mlx.loading.models import load, read_together
    from kvlingo_mlx.loading.placement import place
    from kvlingo_mlx.models.prompts import encode

    target = load(options.target, shard=options.shard or "auto", lazy=True)
    tokens, step_size = len(encode(target, asked)), options.prefill_step_size
    source = place(options.source, target, options.placement, tokens, step_size)
    models = [target] if options.strategy == "native" else [source, target]
    read_together(models, (source, target), asked, options.translator)
    return source, target


def _check_template(options: GenerateOptions, target: LanguageModel) -> bool:
    """Whether the target's chat template renders the prompt."""
    if target.tokenizer.has_chat_template and not options.ignore_chat_template:
        return True
    if options.system_prompt is not None or options.thinking is not None:
        unused = "--system-prompt" if options.system_prompt is not None else "--thinking"
        raise ValueError(
            f"{unused} is for a chat template, and {target.name} has none; put what is to be said "
            "into --prompt"
        )
    return False


def _arguments(
    options: GenerateOptions, source: LanguageModel, target: LanguageModel
) -> dict[str, Any]:
    """The options as arguments of the library's functions."""
    from kvlingo_mlx.loading.translators import resolve_translator

    given = options.some("translator max_tokens stop prefill_step_size allow_mismatch")
    if options.quantize is not None:
        asked = options.some("allow_mismatch quantize")
        given["translator"] = resolve_translator(options.translator, source, target, **asked)
    given["native_layers"] = native_number(options.native_layers)
    if options.kv_bits is not None:
        given |= options.some("kv_bits kv_group_size")
    if options.memory_budget:
        return given
    given |= options.some("strategy native_head native_tail heal heal_share guard on_doubt")
    if options.kv_bits is not None:
        given |= options.some("quantized_kv_start")
    if options.draft_model is not None:
        drafts = source if options.draft_model == options.source else options.draft_model
        given |= {"draft_model": drafts} | options.some("num_draft_tokens")
    return given


def _messages(asked: str | list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    if not isinstance(asked, str):
        return asked
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": asked}]
