"""A verb gets its options as a frozen dataclass with a field for each option.

A verb's own options are fields made by :func:`option`. Options of several verbs are types in this
file, so that each has the same name, help and spellings everywhere.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvlingo_mlx import blas
from kvlingo_mlx.cli.keys import read_config
from kvlingo_mlx.cli.output import keep_stdout_for_json
from kvlingo_mlx.cli.progress import watching
from kvlingo_mlx.group import launched, leads
from kvlingo_mlx.options import Group, Kind, needs_of


def option(
    default: Any, help: str, *names: str, kind: Kind | None = None, read: Any = None, **more: Any
) -> Any:
    """A field for an option of one verb, as ``options.option``; ``...`` makes it required."""
    return _described(default, typer.Option(*names, help=help, **more), kind=kind, read=read)


def argument(default: Any, help: str, **more: Any) -> Any:
    """A field for a positional argument."""
    return _described(default, typer.Argument(help=help, **more))


def _described(default: Any, info: Any, **more: Any) -> Any:
    facts = {"typer": info, **more}
    return field(default=MISSING if default is ... else default, metadata=facts)


# ---- options of several verbs ------------------------------------------------------------------

SOURCE = typer.Option(
    "--source", "--prefill-model", help="The source, which reads: a folder or Hub id."
)
TARGET = typer.Option(
    "--target", "--decode-model", help="The target, which answers: a folder or Hub id."
)
Source = Annotated[str, SOURCE]
Target = Annotated[str, TARGET]
MaybeSource = Annotated[str | None, SOURCE]
MaybeTarget = Annotated[str | None, TARGET]
Both = Annotated[
    list[str] | None,
    typer.Argument(help="The source and the target; or --source A --target B.", metavar="A B"),
]
Named = Annotated[
    list[str] | None,
    typer.Argument(help="A folder or Hub id, or NAME=MODEL; as --model.", metavar="MODEL"),
]
Model = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=MODEL, a folder or Hub id; once a model. Without NAME: its last part's name."
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        is_eager=True,
        callback=read_config,
        help="KEY=VALUE, or a TOML or JSON file of them: an option, or one of the keys below.",
    ),
]
Translator = Annotated[
    str | None, typer.Option(help="A folder or Hub id; default: the local store's.")
]
Quantize = Annotated[int | None, typer.Option(help="Hold the translator's weights in 8 or 4 bits.")]
NativeLayers = Annotated[
    str | None,
    typer.Option(help="How many first cache layers the target reads itself; auto: as tuned."),
]
AllowMismatch = Annotated[
    bool, typer.Option(help="Accept a translator of other checkpoints of the same shape.")
]
PrefillStepSize = Annotated[int, typer.Option(help="Tokens per prefill chunk.")]
Thinking = Annotated[bool | None, typer.Option(help="The chat template's thinking switch.")]
Sharded = Annotated[
    list[str] | None,
    typer.Option(
        help="Under mlx.launch, a name whose model all hold together; default: the largest."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another translator there.")]


@dataclass(frozen=True, kw_only=True)
class Options(Group):
    """The options that every verb takes."""

    json_file: str | None = option(
        None,
        "Append the record as one JSON line to this file; - writes it to standard output.",
        "--json",
    )

    def some(self, names: str) -> dict[str, Any]:
        """The options named in ``names``, which are separated by spaces."""
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Configured(Options):
    """The options of a verb that has keys."""

    config: Config = None


@dataclass(frozen=True, kw_only=True)
class TwoModels(Options):
    """The two models of a verb, as options or as its first two words."""

    models: Both = None
    source: Source
    target: Target


WORDS = ("models", "translators")  # the arguments by which a verb may be given its models


def take_words(verb: str, values: dict[str, Any]) -> list[str]:
    """Give a verb's first words to the options that they stand for; returns these options' names.

    Raises:
        ValueError: More words, or fewer, than there are models to name.
    """
    name = next((name for name in WORDS if values.get(name)), None)
    if name is None or not {"source", "model"} & values.keys():
        return []
    words, taken = list(values[name]), list[str]()
    most = 2 if name == "models" else max(2, len(words))
    if "model" in values:  # of which there may be any number
        values["model"], words, taken = [*words, *(values["model"] or ())], [], ["model"]
    elif values["source"] is values["target"] is None and len(words) in (2, most):
        values["source"], values["target"], *words = words
        taken = ["source", "target"]
    if words and name == "models":
        refuse_models(verb, words, values)
    values[name] = tuple(words)
    return taken


def refuse_models(verb: str, words: Sequence[str], values: Mapping[str, Any]) -> None:
    """Say (ValueError) that a verb was not given two models."""
    named = (f"--{end} {values[end]}" for end in ("source", "target") if values[end] is not None)
    found = [*words, *named]
    raise ValueError(
        f"`{verb}` is for two models, and found {', '.join(found) or 'none'}; give --source "
        "A --target B, or A B alone"
    )


def named_models(texts: Sequence[str]) -> dict[str, str]:
    """The models of ``NAME=MODEL`` texts; one without a name is called like its last part.

    Raises:
        ValueError: A text lacks a part, or two have one name.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, mark, path = (part.strip() for part in text.partition("="))
        if not mark:
            name, path = Path(text).expanduser().absolute().name, name
        if not (name and path):
            raise ValueError(f"{text!r} names no model; give NAME=MODEL: small=Qwen/Qwen3-0.6B")
        if name in found:
            raise ValueError(f"{text}: the name {name!r} is taken; give another: NAME=MODEL")
        found[name] = path
    return found


# ---- verbs -------------------------------------------------------------------------------------

Given = TypeVar("Given", bound=Options)


def verb(
    options: type[Given], *, long: bool = False, waits: bool = False
) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Make a function of ``options`` one that typer can run; inherited fields are listed last.

    ``long`` says that the verb computes for long, so that it tells if the machine is slow. How far
    it is, is told meanwhile (``cli/progress``). A verb that ``waits`` for a person or for clients,
    or whose answer can be read as it comes, tells of its phases alone.
    """
    hints = get_type_hints(options, include_extras=True)
    listed = [name for cls in options.__mro__ for name in inspect.get_annotations(cls)]
    known = {field.name: field for field in fields(options)}
    models = [name for name in ("models", "source", "target") if name in known]
    # Words may name the two models, so that click cannot tell whether they are missing.
    needed = [n for n in models if known[n].default is MISSING and {*WORDS} & {*known}]
    typed = [name for name in dict.fromkeys([*models, *listed]) if name in known]
    parameters = [
        _parameter(known[name], hints[name], required=name not in needed)
        for name in typed
        if known[name].metadata.get("help") != ""
    ]
    readers = {name: read for name in typed if (read := known[name].metadata.get("read"))}

    def decorate(function: Callable[[Given], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            if None in [values[name] for name in needed]:
                verb = function.__module__.rpartition(".")[2].rstrip("_")
                refuse_models(verb, values.get("translators") or (), values)
            values |= {name: read(values[name]) for name, read in readers.items()}
            given = options(**values)
            keep_stdout_for_json(given.json_file)
            name = function.__module__.rpartition(".")[2].strip("_").replace("_", "-")
            # mlx.launch keeps the terminal to itself, and a dumb one cannot be drawn in.
            dumb = launched() or os.environ.get("TERM") == "dumb"
            terminal = sys.stderr.isatty() and not dumb
            shown = watching(None if waits else name, terminal, silent=not leads())
            with blas.in_run(long), shown:
                function(given)

        command.__doc__ = function.__doc__
        command.needs = needs_of(options)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(described: Field, hint: Any, required: bool = True) -> inspect.Parameter:
    """A field as the parameter that typer reads."""
    if info := described.metadata.get("typer"):
        hint = Annotated[hint, info]
    elif text := described.metadata.get("help"):
        hint = Annotated[hint, typer.Option(*described.metadata["flags"], help=text)]
    default = described.default
    if default is MISSING:
        default = inspect.Parameter.empty if required else None
    return inspect.Parameter(
        described.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )
