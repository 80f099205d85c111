"""kvlingo-mlx chat: several models in one conversation, in the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.chat_input import Lines, history
from kvlingo_mlx.cli.chat_session import AUTO, Chat
from kvlingo_mlx.cli.output import (
    JSON_HELP,
    NATIVE_HELP,
    QUANTIZE_HELP,
    keep_stdout_for_json,
    native_number,
)
from kvlingo_mlx.cli.prompt_input import thinking_switch
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
    from kvlingo_mlx.conversation import Conversation
    from kvlingo_mlx.models.language_model import LanguageModel

OFFLOAD = ("8bit", "disk")
HISTORY_HELP = "Keep the lines that are typed in a terminal for later chats' arrow keys."


def command(
    model: list[str] = typer.Option(..., help="NAME=MODEL, a folder or Hub id; once a model."),
    translator: list[str] = typer.Option(None, help="A folder or Hub id; else the local store's."),
    quantize: int = typer.Option(None, help=QUANTIZE_HELP),
    system_prompt: str = typer.Option(None, help="System message to begin with."),
    use: str = typer.Option(
        None, help="Who answers at first; default: --route, or --model's first."
    ),
    route: str = typer.Option(
        None, help="Chooses who answers: FILE.toml, module:function or FILE.py:function."
    ),
    on_missing: str = typer.Option(
        "error", help="error, or reprefill: read what no translator brings."
    ),
    eager: bool = typer.Option(True, help="Translate for the others as soon as one has answered."),
    offload: str = typer.Option(None, help="Keep the others' caches in 8bit, or on disk."),
    resume: str = typer.Option(None, help="Go on with the conversation saved in this folder."),
    save: str = typer.Option(None, help="Save the conversation to this folder at the end."),
    native_layers: str = typer.Option(None, help=NATIVE_HELP),
    thinking: bool = typer.Option(None, help="The chat template's thinking switch."),
    verbatim: bool = typer.Option(None, help="Keep earlier turns as written, thinking included."),
    max_tokens: int = typer.Option(512, "--max-tokens", "-m", help="Most tokens of an answer."),
    temp: float = typer.Option(0.0, help=TEMP_HELP),
    top_p: float = typer.Option(1.0, help=TOP_P_HELP),
    top_k: int = typer.Option(0, help=TOP_K_HELP),
    min_p: float = typer.Option(0.0, help=MIN_P_HELP),
    seed: int = typer.Option(None, help=SEED_HELP),
    prefill_step_size: int = typer.Option(2048, help="Tokens per prefill chunk."),
    allow_mismatch: bool = typer.Option(False, help="Accept another checkpoint's translator."),
    keep_history: bool = typer.Option(True, "--history/--no-history", help=HISTORY_HELP),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Talk to several models in one conversation; /help lists what can be typed.

    In a terminal a paste is one message, however many lines it has. --json appends the messages
    and what each model holds when the chat ends.
    """
    keep_stdout_for_json(json_file)
    check_sampling(temp, top_p, top_k, min_p, seed)
    check_ranges(
        ("--max-tokens", max_tokens, max_tokens > 0 or max_tokens == -1, "1 or more, or -1"),
        ("--prefill-step-size", prefill_step_size, prefill_step_size > 0, "1 or more"),
        ("--on-missing", on_missing, on_missing in ("error", "reprefill"), "error or reprefill"),
        ("--offload", offload, offload in (None, *OFFLOAD), " or ".join(OFFLOAD)),
    )
    named = _named(model)
    _check_use(use, named, routed=route is not None)
    _check_folder(save)
    layers = native_number(native_layers)
    lines = Lines()

    from kvlingo_mlx.conversation.routing import load_route
    from kvlingo_mlx.loading.translators import store
    from kvlingo_mlx.translators.quantised import check_bits

    check_bits(quantize)
    chosen = None if route is None else load_route(route, tuple(named))
    sampler = sampler_of(temp, top_p, top_k, min_p, seed)
    models = _models(named)
    if resume is None:
        thinking = thinking_switch(thinking, models.values())
    begin = {"system": system_prompt, "enable_thinking": thinking, "verbatim": bool(verbatim)}
    talk = _conversation(
        resume, models, translator or (), begin,
        {"on_missing": on_missing, "eager": eager, "prefill_step_size": prefill_step_size,
         "allow_mismatch": allow_mismatch, "offload": offload, "quantize": quantize,
         "native_layers": layers},
    )  # fmt: skip
    options = {"max_tokens": max_tokens, "sampler": sampler}
    chat = Chat(talk, lines, options, route=chosen, use=use, save=save, resume=resume)
    with history(store().parent / "chat_history" if keep_history else None, lines):
        chat.run()
    if json_file:
        _record(json_file, talk)


def _record(json_file: str, talk: Conversation) -> None:
    """What was said, what each model holds of it, and what the last switch took."""
    import dataclasses

    from kvlingo_mlx.reporting import measure

    switch = talk.last_switch
    results = {
        "messages": talk.messages,
        "stats": dataclasses.asdict(talk.stats()),
        "last_switch": None if switch is None else dataclasses.asdict(switch),
    }
    models = {name: line.model.name for name, line in talk.lines.items()}
    measure.append_json(json_file, measure.record("chat", {"models": models}, results))


# ---- before anything is loaded ---------------------------------------------------------------


def _named(models: Sequence[str]) -> dict[str, str]:
    """Models by name, from NAME=MODEL."""
    named: dict[str, str] = {}
    for text in models:
        name, _, path = (part.strip() for part in text.partition("="))
        if not (name and path):
            raise ValueError(f"--model is {text!r}; give NAME=MODEL: small=Qwen/Qwen3-0.6B")
        if name in named or name == AUTO:
            raise ValueError(f"--model {text}: the name {name!r} is taken; give another")
        named[name] = path
    return named


def _check_use(use: str | None, named: Mapping[str, str], *, routed: bool) -> None:
    names = [*named, *([AUTO] if routed else [])]
    if use is not None and use not in names:
        raise ValueError(f"--use is {use!r}; give one of {', '.join(names)}")


def _check_folder(save: str | None) -> None:
    """Refuse what could not be written to after the conversation."""
    if save is None:
        return
    from kvlingo_mlx.conversation.folder import check_destination

    path = Path(os.path.expanduser(save)).absolute()
    check_destination(path)
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"--save is {save!r}; name a folder that can be written")


# ---- what is loaded --------------------------------------------------------------------------


def _models(named: Mapping[str, str]) -> dict[str, LanguageModel]:
    """The models by name; one that has two names is loaded once."""
    from kvlingo_mlx.loading.models import load_together

    paths = list(dict.fromkeys(named.values()))
    loaded = dict(zip(paths, load_together(paths), strict=True))
    return {name: loaded[path] for name, path in named.items()}


def _conversation(
    resume: str | None,
    models: Mapping[str, LanguageModel],
    translators: Sequence[str],
    begin: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Conversation:
    from kvlingo_mlx.conversation import Conversation

    if resume is None:
        return Conversation(models, translators, **begin, **options)
    return Conversation.resume(os.path.expanduser(resume), models, translators, **options)
