"""kvlingo-mlx generate: one model reads the prompt, another one answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import Quantize, Thinking, TwoModels, option, verb
from kvlingo_mlx.cli.output import awaited, keep, say
from kvlingo_mlx.cli.prompt_input import MESSAGES_HELP, read_prompt
from kvlingo_mlx.cli.sampling import WritingOptions
from kvlingo_mlx.options import (
    CacheOptions,
    DraftOptions,
    HandoverOptions,
    Need,
    SamplingOptions,
    off,
    one_of,
)

if TYPE_CHECKING:
    from kvlingo_mlx.models.language_model import LanguageModel

TIMES = (
    "strategy prompt_tokens prefill_s translate_s native_s ttft_s generation_tps translator "
    "translator_digest"
)
OWN_CACHE = "which decodes from the source's own cache"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(WritingOptions, HandoverOptions, CacheOptions, DraftOptions, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("draft_model num_draft_tokens strategy native_head native_tail quantized_kv_start "
             "heal guard", "memory_budget", off, why=OWN_CACHE),
        Need("native_layers", "memory_budget native_layers",
             lambda budget, layers: off(budget) or str(layers) == "0", why=OWN_CACHE),
        Need("system_prompt ignore_chat_template", "messages_file", off, why="which is a chat"),
        Need("quantize", "strategy", lambda strategy: strategy != "native", "accelerator",
             "by which the target reads all of the prompt"),
        Need("system_prompt thinking", "ignore_chat_template", off,
             why="which takes the prompt as it is"),
    )  # fmt: skip
    prompt: str | None = option(None, "The prompt; - reads standard input.", "--prompt", "-p")
    messages_file: str | None = option(None, MESSAGES_HELP, "--messages")
    quantize: Quantize = None
    placement: str | None = option(
        None,
        "Under mlx.launch, the source is: replicated (whole on each machine), or sharded; default: "
        "replicated where it fits.",
        kind=one_of("replicated", "sharded"),
    )
    system_prompt: str | None = option(None, "System message for the chat template.")
    ignore_chat_template: bool = option(False, "Take the prompt as raw text.")
    thinking: Thinking = None
    memory_budget: bool = option(
        False, "Decode from the source's own cache; --kv-bits is then that cache's."
    )
    verbose: bool = option(True, "Print the times after the answer.")


@verb(GenerateOptions, waits=True)
def command(options: GenerateOptions) -> None:
    """Read a prompt with one model and answer with another."""
    asked = read_prompt(options.prompt, options.messages_file)

    from kvlingo_mlx.engine.generation import stream_generate
    from kvlingo_mlx.engine.plan import check_strategy
    from kvlingo_mlx.engine.responses import summary
    from kvlingo_mlx.folding import folded_stream_generate
    from kvlingo_mlx.loading.models import load_pair, open_pair, reached, read_together
    from kvlingo_mlx.machines import here
    from kvlingo_mlx.translators.quantised import check_bits

    check_bits(options.quantize)
    check_strategy(options.strategy)
    if here().several or options.placement:
        source, target = open_pair(options.source, options.target, asked, options.placement)
        models = [target] if options.strategy == "native" else [source, target]
        read_together(models, (source, target), asked, options.translator)
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
    answer = respond(source, target, prompt, enable_thinking=options.thinking, **given)
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

    given = options.given(SamplingOptions, CacheOptions, DraftOptions, HandoverOptions)
    given |= options.some("max_tokens prefill_step_size")
    if options.quantize is not None:
        asked = options.some("allow_mismatch quantize")
        given["translator"] = resolve_translator(options.translator, source, target, **asked)
    if options.kv_bits is not None and not options.memory_budget:
        given |= options.some("quantized_kv_start")  # of which mlx-lm's own default is another
    if options.draft_model == options.source:
        given["draft_model"] = source
    return given


def _messages(asked: str | list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    if not isinstance(asked, str):
        return asked
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": asked}]
