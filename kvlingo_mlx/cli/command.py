"""A verb's command line, made from its options: a frozen dataclass with a field for each.

A field says what it does, how it is typed and which values it takes (``options.option``). Beside
the fields a class says in ``NEEDS`` which options have no effect without others, and in ``KEYS``
which are keys of ``--config`` and no flags: what a first month does not need.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from kvlingo_mlx import blas
from kvlingo_mlx.cli.config import is_key, read_config, spelled, write_help
from kvlingo_mlx.cli.output import keep_stdout_for_json
from kvlingo_mlx.cli.progress import watching
from kvlingo_mlx.group import launched, leads
from kvlingo_mlx.options import (
    ANSWER,
    COUNT,
    Need,
    OptionError,
    OptionGroup,
    SamplingOptions,
    as_argument,
    is_set,
    needs_of,
    option,
    read_as,
    text_of,
)

# ---- options of several verbs ------------------------------------------------------------------

SHARED = {  # by the field's name: what it does, and how it is typed
    "source": ("The source, which reads: a folder or Hub id.", "--source", "--prefill-model"),
    "target": ("The target, which answers: a folder or Hub id.", "--target", "--decode-model"),
    "model": ("NAME=MODEL, a folder or Hub id; once a model. Without NAME: its last part's name.",),
    "translator": ("A folder or Hub id; default: the local store's.",),
    "allow_mismatch": ("Accept a translator of other checkpoints of the same shape.",),
    "thinking": ("The chat template's thinking switch.",),
    "sharded": ("Under mlx.launch, a name whose model all hold together; default: the largest.",),
    "force": ("Replace another translator there.", "--force"),
}
HOLD_IN_BITS = "Hold the translator's weights in 8 or 4 bits."
PAIR = (Need("source", "target", is_set, "MODEL"), Need("target", "source", is_set, "MODEL"))


@dataclass(frozen=True, kw_only=True)
class VerbOptions(OptionGroup):
    """The options that every verb takes."""

    KEYS: ClassVar[str] = ""  # names, separated by spaces
    PASSES_ON: ClassVar[bool] = False  # whether options that it does not know are another's
    json_file: str | None = option(
        None,
        "Append the record as one JSON line to this file; - writes it to standard output.",
        "--json",
    )

    def some(self, names: str) -> dict[str, Any]:
        """The options named in ``names``, which are separated by spaces."""
        return {name: getattr(self, name) for name in names.split()}

    def part(self, group: type[OptionGroup]) -> dict[str, Any]:
        """The options of a group."""
        return {field.name: getattr(self, field.name) for field in fields(group)}


@dataclass(frozen=True, kw_only=True)
class Configured(VerbOptions):
    """The options of a verb that has keys."""

    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", "-c", is_eager=True, callback=read_config,
            help="KEY=VALUE, or a TOML or JSON file of them: an option, or one of the keys below.",
        ),
    ] = None  # fmt: skip


BOTH = typer.Argument(help="The source and the target; or --source A --target B.", metavar="A B")
NAMED = typer.Argument(help="A folder or Hub id, or NAME=MODEL; as --model.", metavar="MODEL")


@dataclass(frozen=True, kw_only=True)
class TwoModels(VerbOptions):
    """The two models of a verb, as options or as its first two words."""

    models: Annotated[list[str] | None, BOTH] = None
    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class PerhapsTwoModels(VerbOptions):
    """Two models, or none."""

    NEEDS: ClassVar[tuple[Need, ...]] = PAIR
    source: str | None = None
    target: str | None = None

    @property
    def pair(self) -> tuple[str, str] | None:
        """The names of both, if they are given."""
        return None if self.source is None or self.target is None else (self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class WritingOptions(SamplingOptions, Configured):
    """The options of every verb whose model writes an answer."""

    max_tokens: int = option(
        100, "Longest answer; -1: to the context's end.", "--max-tokens", "-m", kind=ANSWER
    )
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)


# ---- values that are lists ---------------------------------------------------------------------


def words(text: str) -> list[str]:
    """The parts of a list such as ``a,b``, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, least: float = 1, read: Callable[[str], float] = int) -> list[Any]:
    """The numbers of a list such as ``64,256``, each once, in the given order.

    Raises:
        ValueError: There are none, a part is no number, or one is below ``least``.
    """
    found = [read(word) for word in words(text)]
    if not found or not all(least <= number < float("inf") for number in found):
        raise ValueError
    return found


COUNTS = text_of(numbers, "numbers, 1 or more: 64,256")
LENGTHS = text_of(lambda text: numbers(text, 2), "numbers of tokens, 2 or more: 64,256")


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

Given = TypeVar("Given", bound=VerbOptions)
WORDS = ("models", "translators")  # the arguments by which a verb may be given its models


def verb(
    options: type[Given], *, long: bool = False, waits: bool = False
) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Make a function of ``options`` one that typer can run; inherited fields are listed last.

    ``long`` says that the verb computes for long, so that it warns if the machine is slow. A verb
    that ``waits`` for a person or for clients, or whose answer can be read as it comes, shows its
    phases alone (``cli/progress``); others show that they run, too.
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

    def decorate(function: Callable[[Given], None]) -> Callable[..., None]:
        name = function.__module__.rpartition(".")[2].strip("_").replace("_", "-")

        def command(**values: Any) -> None:
            if None in [values[model] for model in needed]:
                _refuse_models(name, values.get("translators") or (), values)
            given = options(**{n: read_as(known[n], value) for n, value in values.items()})
            keep_stdout_for_json(given.json_file)
            # mlx.launch keeps the terminal to itself, and a dumb one cannot be drawn in.
            dumb = launched() or os.environ.get("TERM") == "dumb"
            shown = watching(None if waits else name, sys.stderr.isatty() and not dumb, not leads())
            blas.long_run = long
            with shown:
                function(given)

        command.__doc__ = function.__doc__
        command.options = options  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(described: Field, hint: Any, required: bool) -> inspect.Parameter:
    """A field as the parameter that typer reads."""
    facts = described.metadata
    if facts.get("read"):
        hint = str | None if described.default is None else str
    help, *flags = SHARED.get(described.name, ("",)) if not facts else ("",)
    if facts.get("word"):
        hint = Annotated[hint, typer.Argument(help=facts["help"])]
    elif help := facts.get("help", help):
        hint = Annotated[hint, typer.Option(*facts.get("flags", flags), help=help)]
    default = described.default
    if default is MISSING:
        default = inspect.Parameter.empty if required else None
    return inspect.Parameter(
        described.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


def _take_words(verb: str, values: dict[str, Any]) -> list[str]:
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
        _refuse_models(verb, words, values)
    values[name] = tuple(words)
    return taken


def _refuse_models(verb: str, words: Sequence[str], values: Mapping[str, Any]) -> None:
    """Say (ValueError) that a verb was not given two models."""
    named = (f"--{end} {values[end]}" for end in ("source", "target") if values[end] is not None)
    found = [*words, *named]
    raise ValueError(
        f"`{verb}` is for two models, and found {', '.join(found) or 'none'}; give --source "
        "A --target B, or A B alone"
    )


class VerbCommand(TyperCommand):
    """A verb that refuses options without effect before it begins."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        options: type[VerbOptions] = self.callback.options  # type: ignore[union-attr]
        self.needs = needs_of(options)
        self.context_settings["ignore_unknown_options"] = options.PASSES_ON
        for parameter in self.params:  # a key is left out of the flags in help and completion
            parameter.hidden = parameter.name in options.KEYS.split()  # type: ignore[attr-defined]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb; of two models there are no more."""
        return [piece.replace("[A B]...", "[A B]") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help, in groups."""
        write_help(self, ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Check the options, then run the verb; wrong ones are named as they are typed."""
        options = {p.name: p for p in self.params}
        sources = {name: ctx.get_parameter_source(name) for name in options}
        typed = [n for n, at in sources.items() if at and at.name in ("COMMANDLINE", "DEFAULT_MAP")]
        typed += _take_words(self.name or "", ctx.params)

        def spell(name: str, value: Any) -> str:
            if name not in options:
                return as_argument(name, value)
            option = options[name]
            unchanged = is_key(option) and value is option.default is False
            return spelled(option, None if unchanged else value)

        try:
            for need in self.needs:
                need.check(typed, ctx.params)
            return super().invoke(ctx)
        except OptionError as error:
            raise ValueError(error.write(spell)) from error
