"""kvlingo-mlx generate: prefill with one model, answer with another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.output import (
    JSON_HELP,
    NATIVE_HELP,
    QUANTIZE_HELP,
    keep_stdout_for_json,
    native_number,
    say,
)
from kvlingo_mlx.cli.prompt_input import (
    MESSAGES_HELP,
    read_prompt,
    tell_of_cut_thought,
    thinking_switch,
)
from kvlingo_mlx.cli.sampling import (
    MIN_P_HELP,
    SEED_HELP,
    TEMP_HELP,
    TOP_K_HELP,
    TOP_P_HELP,
    check_ranges,
    check_sampling,
    sampler_of,
)

if TYPE_CHECKING:
    from kvlingo_mlx.handover.responses import GenerationResponse
    from kvlingo_mlx.translators.base import Translator

STRATEGY_HELP = "accelerator, native, or auto: the sooner one by `bench --save-profile`."
TIMES = ("strategy", "prompt_tokens", "prefill_s", "translate_s", "native_s", "ttft_s",
         "generation_tps", "translator", "translator_digest")  # fmt: skip


def command(
    prefill_model: str = typer.Option(..., help="Reads the prompt: a folder or Hub id."),
    decode_model: str = typer.Option(..., help="Writes the answer: a folder or Hub id."),
    prompt: str = typer.Option(None, "--prompt", "-p", help="The prompt; - reads standard input."),
    messages_file: str = typer.Option(None, "--messages", help=MESSAGES_HELP),
    translator: str = typer.Option(None, help="A folder or Hub id; else the local store's."),
    quantize: int = typer.Option(None, help=QUANTIZE_HELP),
    strategy: str = typer.Option("accelerator", help=STRATEGY_HELP),
    native_layers: str = typer.Option(None, help=NATIVE_HELP),
    native_head: int = typer.Option(0, help="First tokens that the decode model reads itself."),
    native_tail: int = typer.Option(0, help="Last tokens that it reads itself."),
    system_prompt: str = typer.Option(None, help="System message for the chat template."),
    ignore_chat_template: bool = typer.Option(False, help="Take the prompt as raw text."),
    thinking: bool = typer.Option(None, help="The chat template's thinking switch."),
    max_tokens: int = typer.Option(100, "--max-tokens", "-m", help="Most tokens to generate."),
    temp: float = typer.Option(0.0, help=TEMP_HELP),
    top_p: float = typer.Option(1.0, help=TOP_P_HELP),
    top_k: int = typer.Option(0, help=TOP_K_HELP),
    min_p: float = typer.Option(0.0, help=MIN_P_HELP),
    seed: int = typer.Option(None, help=SEED_HELP),
    prefill_step_size: int = typer.Option(2048, help="Tokens per prefill chunk."),
    kv_bits: int = typer.Option(None, help="Quantise the decode model's cache."),
    kv_group_size: int = typer.Option(64, help="Group size for --kv-bits."),
    quantized_kv_start: int = typer.Option(5000, help="Tokens before --kv-bits applies."),
    draft_model: str = typer.Option(None, help="Speculative decoding; --prefill-model will do."),
    num_draft_tokens: int = typer.Option(3, help="Tokens that --draft-model drafts at a time."),
    memory_budget: bool = typer.Option(
        False, help="Decode from the prefill model's own cache; --kv-bits is then that cache's."
    ),
    allow_mismatch: bool = typer.Option(False, help="Accept another checkpoint's translator."),
    verbose: bool = typer.Option(True, help="Print the times after the answer."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Prefill a prompt with one model and answer with another."""
    check_sampling(temp, top_p, top_k, min_p, seed)
    check_ranges(
        ("--max-tokens", max_tokens, max_tokens > 0 or max_tokens == -1, "1 or more, or -1"),
        ("--prefill-step-size", prefill_step_size, prefill_step_size > 0, "1 or more"),
    )
    asked = read_prompt(prompt, messages_file)

    from kvlingo_mlx.handover.generation import stream_generate
    from kvlingo_mlx.handover.plan import check_strategy
    from kvlingo_mlx.handover.responses import summary
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.translators import resolve_translator
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.translators.quantised import check_bits

    keep_stdout_for_json(json_file)
    check_bits(quantize)
    sampler = sampler_of(temp, top_p, top_k, min_p, seed)
    layers = native_number(native_layers)
    check_strategy(strategy)
    source, target = load_pair(
        prefill_model, decode_model, asked, translator=translator, native=strategy == "native"
    )
    used: str | Translator = translator
    if quantize is not None:
        used = resolve_translator(
            translator, source, target, allow_mismatch=allow_mismatch, quantize=quantize
        )
    templated = target.tokenizer.has_chat_template and not ignore_chat_template
    if not templated and (system_prompt is not None or thinking is not None):
        unused = "--system-prompt" if system_prompt is not None else "--thinking"
        raise ValueError(
            f"{unused} is for a chat template, and {target.name} has none; put what is to be said "
            "into --prompt"
        )
    switch = thinking_switch(thinking, [target]) if templated else thinking
    options: dict[str, Any] = {
        "translator": used,
        "max_tokens": max_tokens,
        "sampler": sampler,
        "prefill_step_size": prefill_step_size,
        "enable_thinking": switch,
        "allow_mismatch": allow_mismatch,
    }
    if kv_bits is not None:
        options |= {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    respond: Callable[..., Iterable[GenerationResponse]] = stream_generate
    if memory_budget:
        from kvlingo_mlx.folding import folded_stream_generate

        respond = folded_stream_generate
        options["native_layers"] = layers
    else:
        options |= {
            "strategy": strategy,
            "native_layers": layers,
            "native_head": native_head,
            "native_tail": native_tail,
        }
        if kv_bits is not None:
            options["quantized_kv_start"] = quantized_kv_start
        if draft_model is not None:
            options["draft_model"] = source if draft_model == prefill_model else draft_model
            options["num_draft_tokens"] = num_draft_tokens
    full_prompt = _messages(asked, system_prompt) if templated else asked
    pieces = []
    for response in respond(source, target, full_prompt, **options):
        pieces.append(response.text)
        say(response.text, end="")
    say("")
    if verbose:
        say("=" * 10)
        say(summary(response))
    if templated and response.finish_reason == "length":
        tell_of_cut_thought(target, "".join(pieces), switch)
    if json_file:
        config = {"prefill_model": source.name, "decode_model": target.name, "prompt": asked,
                  "quantize": quantize, "memory_budget": memory_budget}  # fmt: skip
        results = {"text": "".join(pieces), **{name: getattr(response, name) for name in TIMES}}
        measure.append_json(json_file, measure.record("generate", config, results))


def _messages(asked: str | list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    if not isinstance(asked, str):
        return asked
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": asked}]
