"""kvlingo-mlx generate: one model reads the prompt, another one answers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import HOLD_IN_BITS, TwoModels, WritingOptions, verb
from kvlingo_mlx.cli.output import awaited, keep, say
from kvlingo_mlx.options import (
    BITS,
    CacheOptions,
    DraftOptions,
    HandoverOptions,
    Need,
    SamplingOptions,
    but,
    off,
    option,
)

if TYPE_CHECKING:
    from kvlingo_mlx.models.language_model import LanguageModel

MESSAGES_HELP = 'A JSON or JSONL file of chat messages, {"role": ..., "content": ...}; - reads \
standard input.'
TIMES = (
    "strategy prompt_tokens prefill_s translate_s native_s ttft_s generation_tps translator "
    "translator_digest"
)
OWN_CACHE = "which decodes from the source's own cache"


@dataclass(frozen=True, kw_only=True)
class GenerateVerb(WritingOptions, HandoverOptions, CacheOptions, DraftOptions, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("draft_model num_draft_tokens strategy native_head native_tail native_middle "
             "quantized_kv_start heal guard", "memory_budget", off, why=OWN_CACHE),
        Need("native_layers", "memory_budget native_layers",
             lambda budget, layers: off(budget) or str(layers) == "0", why=OWN_CACHE),
        Need("system_prompt ignore_chat_template", "messages_file", off, why="which is a chat"),
        Need("quantize", "strategy", but("native"), "accelerator",
             "by which the target reads all of the prompt"),
        Need("system_prompt thinking", "ignore_chat_template", off,
             why="which takes the prompt as it is"),
    )  # fmt: skip
    KEYS: ClassVar[str] = (
        "quantize native_layers native_head native_tail native_middle heal heal_share "
        "guard on_doubt ignore_chat_template kv_group_size quantized_kv_start num_draft_tokens "
        "memory_budget verbose"
    )
    prompt: str | None = option(None, "The prompt; - reads standard input.", "--prompt", "-p")
    messages_file: str | None = option(None, MESSAGES_HELP, "--messages")
    quantize: int | None = option(None, HOLD_IN_BITS, kind=BITS)
    system_prompt: str | None = option(None, "System message for the chat template.")
    ignore_chat_template: bool = option(False, "Take the prompt as raw text.")
    thinking: bool | None = None
    memory_budget: bool = option(
        False, "Decode from the source's own cache; --kv-bits is then that cache's."
    )
    verbose: bool = option(True, "Print the times after the answer.")


@verb(GenerateVerb, waits=True)
def command(options: GenerateVerb) -> None:
    """Read a prompt with one model and answer with another."""
    asked = read_prompt(options.prompt, options.messages_file)

    from kvlingo_mlx.engine.generation import stream_generate
    from kvlingo_mlx.engine.responses import summary
    from kvlingo_mlx.folding import folded_stream_generate

    source, target = _models(options, asked)
    prompt = _prompt(asked, options, target)
    given = _arguments(options, source, target)
    respond = folded_stream_generate if options.memory_budget else stream_generate
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
    for name in ("guarded", "received"):
        if (found := getattr(response, name)) is not None:
            results[name] = found
    keep(options.json_file, "generate", config, results)


def _models(options: GenerateVerb, asked: Any) -> tuple[LanguageModel, LanguageModel]:
    """The source and the target; under ``mlx.launch`` this machine's parts of them."""
    from kvlingo_mlx.loading.models import load_pair, open_pair, reached, read_together
    from kvlingo_mlx.machines import here

    native, translator = options.strategy == "native", options.translator
    if not here().several:
        budget = options.memory_budget  # by which the source decodes, and so is needed here
        source = options.source if budget else reached(options.source, options.strategy)
        return load_pair(source, options.target, asked, translator=translator, native=native)
    pair = open_pair(options.source, options.target, asked)
    read_together(pair[1:] if native else list(pair), pair, asked, translator)
    return pair


def _prompt(asked: Any, options: GenerateVerb, target: LanguageModel) -> Any:
    """The messages that the target's chat template renders, or the text as it is."""
    if not target.tokenizer.has_chat_template or options.ignore_chat_template:
        for name, value in options.some("system_prompt thinking").items():
            if value is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for a chat template, and {target.name} has "
                    "none; put what is to be said into --prompt"
                )
        return asked
    if not isinstance(asked, str):
        return asked
    system = options.system_prompt
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": asked}]


def _arguments(
    options: GenerateVerb, source: LanguageModel, target: LanguageModel
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


def read_prompt(prompt: str | None, messages_file: str | None) -> str | list[dict[str, Any]]:
    """The text of ``--prompt``, or the messages of ``--messages``.

    Raises:
        ValueError: Neither or both were given, the input is empty, or it is something else.
    """
    if messages_file is not None:
        if prompt is not None:
            raise ValueError("--prompt and --messages are both given; leave out one of them")
        return _messages(_read(messages_file), messages_file)
    if prompt is None:
        raise ValueError("no prompt is given; give --prompt TEXT, or --messages FILE")
    text = prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = _stdin("--prompt") if prompt == "-" else text
    if not text.strip():
        raise ValueError("the prompt is empty; give some text")
    return text


def _read(path: str) -> str:
    if path == "-":
        return _stdin("--messages")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"--messages {path} cannot be read: {error.strerror}") from None


def _stdin(option: str) -> str:
    if sys.stdin is None:
        raise ValueError(f"{option} - reads standard input, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error.reason})") from None


def _messages(text: str, path: str) -> list[dict[str, Any]]:
    """Messages from a JSON list, one per line, or a training record {"messages": [...]}."""
    found = _json(text, path)
    records = [r for r in found if isinstance(r, dict) and "messages" in r]
    if len(records) > 1:
        raise ValueError(f"{path} holds {len(records)} conversations; give a file of one")
    if records:
        found = records[0]["messages"]
    bad = next((m for m in found if not isinstance(m, dict) or "role" not in m), None)
    if not isinstance(found, list) or not found or bad is not None:
        what = "no messages" if not found else f"{bad!r:.60}"
        raise ValueError(f'{path} holds {what}; give messages {{"role": ..., "content": ...}}')
    return found


def _json(text: str, path: str) -> list[Any]:
    """All values in a JSON or JSONL file, as a list."""
    found, at, white = list[Any](), 0, re.compile(r"\s*")
    try:
        while (at := white.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            value, at = json.JSONDecoder().raw_decode(text, at)
            found.append(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found
