"""kvlingo-mlx chat: several models in one conversation, in the terminal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvlingo_mlx.cli.chat_input import Lines, history
from kvlingo_mlx.cli.chat_session import AUTO, Chat
from kvlingo_mlx.cli.command import HOLD_IN_BITS, NAMED, PAIR, WritingOptions, named_models, verb
from kvlingo_mlx.cli.output import keep
from kvlingo_mlx.group import launched
from kvlingo_mlx.options import (
    ANSWER,
    BITS,
    LAYERS,
    NATIVE_LAYERS,
    GuardOptions,
    HealOptions,
    Need,
    SamplingOptions,
    off,
    one_of,
    option,
    several,
)

if TYPE_CHECKING:
    from kvlingo_mlx.engine.conversation import Conversation
    from kvlingo_mlx.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class ChatOptions(WritingOptions, HealOptions, GuardOptions):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        *PAIR,
        Need("source target", "model", lambda model: not model, why="which names the models"),
        Need("translator quantize use route on_missing eager offload native_layers heal "
             "guard allow_mismatch", "model", several,
             told="with one model; give --model NAME=MODEL twice or more"),
        Need("system_prompt thinking verbatim", "resume", off,
             why="which goes on with those that it was begun with"),
    )  # fmt: skip
    KEYS: ClassVar[str] = (
        "quantize on_missing on_full eager offload heal heal_share guard on_doubt sharded "
        "native_layers verbatim keep_history"
    )
    models: Annotated[list[str] | None, NAMED] = None
    model: list[str] | None = None
    source: str | None = None
    target: str | None = None
    translator: list[str] | None = None
    quantize: int | None = option(None, HOLD_IN_BITS, kind=BITS)
    system_prompt: str | None = option(None, "System message to begin with.")
    use: str | None = option(
        None, "Name of who answers at first; default: --route, or the first model."
    )
    route: str | None = option(
        None, "Chooses who answers: plan-build, FILE.toml, module:function or FILE.py:function."
    )
    on_missing: str = option(
        "error", "Without a translator: error, or reprefill (read it all again).",
        kind=one_of("error", "reprefill"),
    )  # fmt: skip
    on_full: str = option(
        "error", "A full context: error, or drop_oldest (drop the oldest turns, each whole).",
        kind=one_of("error", "drop_oldest"),
    )  # fmt: skip
    eager: bool = option(True, "Translate for the others as soon as one has answered.")
    offload: str | None = option(
        None, "Keep the others' caches in 8bit, or on disk.", kind=one_of("8bit", "disk")
    )
    heal: str | None = option(
        None,
        "Read what is translated, in its place: idle (while you type), interleaved (between the "
        "tokens of an answer), or layers (the first layers at once, then so).",
        kind=one_of("idle", "interleaved", "layers"),
    )
    sharded: list[str] | None = None
    resume: str | None = option(None, "Go on with the conversation saved in this folder.")
    save: str | None = option(None, "Save the conversation to this folder at the end.")
    native_layers: int | str | None = option(None, NATIVE_LAYERS, kind=LAYERS)
    thinking: bool | None = None
    verbatim: bool | None = option(None, "Keep earlier turns as written, thinking included.")
    allow_mismatch: bool = False
    keep_history: bool = option(
        True, "Keep the lines that are typed in a terminal for later chats' arrow keys.",
        "--history/--no-history",
    )  # fmt: skip
    max_tokens: int = option(
        512, "Longest answer; -1: to the context's end.", "--max-tokens", "-m", kind=ANSWER
    )


@verb(ChatOptions, long=True, waits=True)
def command(options: ChatOptions) -> None:
    """Talk to several models in one conversation; /help lists what can be typed.

    In a terminal a paste is one message, however many lines it has. --json appends the messages
    and what each model holds when the chat ends.
    """
    names = _names(options)
    if options.save is not None:
        _check_folder(options.save)
    lines = Lines()

    from kvlingo_mlx.backend import mx

    from kvlingo_mlx.engine.routing import load_route
    from kvlingo_mlx.loading.translators import store

    route = None if options.route is None else load_route(options.route, tuple(names))
    conversation = _conversation(options, _models(options, names))
    asked = options.given(SamplingOptions) | {"max_tokens": options.max_tokens}
    if "seed" in asked:  # once, not for each answer
        mx.random.seed(asked.pop("seed"))
    chat = Chat(conversation, lines, asked, route=route, **options.some("use save resume"))
    if options.heal == "idle":
        chat.heal_while_idle()
    file = store().parent / "chat_history" if options.keep_history else None
    with history(file, lines.readline):
        chat.run()
    if options.json_file:
        results = {
            "messages": conversation.messages,
            "stats": conversation.stats(),
            "last_switch": conversation.last_switch,
        }
        models = {name: line.model.name for name, line in conversation.lines.items()}
        keep(options.json_file, "chat", {"models": models}, results)


def _names(options: ChatOptions) -> dict[str, str]:
    """The models' folders or Hub ids by name: of NAME=MODEL, or of source and target."""
    if options.source is not None and options.target is not None:
        names = options.some("source target")
    elif not options.model:
        raise ValueError("no model is given; give A B, or NAME=A NAME=B ...")
    else:
        names = named_models(options.model)
    if AUTO in names:
        raise ValueError(f"a model is named {AUTO}, the name of routing; give NAME=MODEL")
    known = [*names, *([] if options.route is None else [AUTO])]
    if options.use not in (None, *known):
        raise ValueError(f"--use is {options.use!r}; give one of {', '.join(known)}")
    if unknown := [name for name in options.sharded or () if name not in names]:
        raise ValueError(f"sharded is {unknown[0]!r}; give one of {', '.join(names)}")
    if launched() and options.heal == "idle":
        raise ValueError(
            "heal is idle, and all of mlx.launch wait for the line that is typed on the first; "
            "give interleaved or layers"
        )
    return names


def _check_folder(save: str) -> None:
    """Refuse a folder that could not be written after the conversation."""
    from kvlingo_mlx.engine.folder import check_destination

    path = Path(os.path.expanduser(save)).absolute()
    check_destination(path)
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"--save is {save!r}; name a folder that can be written")


def _models(options: ChatOptions, names: dict[str, str]) -> dict[str, LanguageModel]:
    """The models by name; a model with two names is loaded once."""
    from kvlingo_mlx.loading.models import open_sharded, read_together

    sharded = [names[name] for name in options.sharded or ()]
    opened = open_sharded(list(dict.fromkeys(names.values())), sharded)
    models = list(opened.values())
    read_together(models, models)
    return {name: opened[path] for name, path in names.items()}


def _conversation(options: ChatOptions, models: dict[str, LanguageModel]) -> Conversation:
    """A new conversation, or the saved one that is resumed."""
    from kvlingo_mlx.engine.conversation import Conversation

    translators = options.translator or ()
    given: dict[str, Any] = options.some(
        "on_missing on_full eager prefill_step_size allow_mismatch offload quantize native_layers"
    )
    if options.heal in ("interleaved", "layers"):
        given |= options.some("heal heal_share")
    if options.guard:
        given |= options.some("guard on_doubt")
    if options.resume is not None:
        folder = os.path.expanduser(options.resume)
        return Conversation.resume(folder, models, translators, **given)
    return Conversation(
        models,
        translators,
        system=options.system_prompt,
        enable_thinking=options.thinking,
        verbatim=bool(options.verbatim),
        **given,
    )
