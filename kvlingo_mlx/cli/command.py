"""A verb gets its options as a frozen dataclass with a field for each option.

A verb's own options are fields made by :func:`option`. Options of several verbs are types in this
file, so that each has the same name, help and spellings everywhere.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvlingo_mlx import blas
from kvlingo_mlx.cli.output import keep_stdout_for_json


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field for an option; a default of ``...`` makes it required, ``names`` spell it."""
    return _described(default, typer.Option(*names, help=help, **more))


def argument(default: Any, help: str, **more: Any) -> Any:
    """A field for a positional argument."""
    return _described(default, typer.Argument(help=help, **more))


def _described(default: Any, info: Any) -> Any:
    return field(default=MISSING if default is ... else default, metadata={"typer": info})


# ---- options of several verbs ------------------------------------------------------------------

SOURCE = typer.Option(
    "--source", "--prefill-model", help="The model that reads: a folder or Hub id."
)
TARGET = typer.Option(
    "--target", "--decode-model", help="The model that answers: a folder or Hub id."
)
Source = Annotated[str, SOURCE]
Target = Annotated[str, TARGET]
MaybeSource = Annotated[str | None, SOURCE]
MaybeTarget = Annotated[str | None, TARGET]
Both = Annotated[
    list[str] | None,
    typer.Argument(help="Short for --source A --target B.", metavar="[A B]"),
]
Translator = Annotated[
    str | None, typer.Option(help="A folder or Hub id; default: the local store's.")
]
Quantize = Annotated[int | None, typer.Option(help="Hold the translator's weights in 8 or 4 bits.")]
NativeLayers = Annotated[
    str | None,
    typer.Option(help="How many first cache layers the target reads itself; auto: as tuned."),
]
HealShare = Annotated[float, typer.Option(help="The share of its speed that decoding keeps.")]
AllowMismatch = Annotated[
    bool, typer.Option(help="Accept a translator of other checkpoints of the same shape.")
]
PrefillStepSize = Annotated[int, typer.Option(help="Tokens per prefill chunk.")]
Thinking = Annotated[bool | None, typer.Option(help="The chat template's thinking switch.")]
Shard = Annotated[
    str | None,
    typer.Option(
        help="Under mlx.launch, each rank holds of a model: tensor (some heads) or pipeline (some "
        "layers); default: what mlx-lm can do."
    ),
]
Sharded = Annotated[
    list[str] | None,
    typer.Option(
        help="Under mlx.launch, a name whose model the ranks hold together; default: the largest."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another translator there.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every verb takes."""

    json_file: str | None = option(
        None,
        "Append the record as one JSON line to this file; - writes it to standard output.",
        "--json",
    )

    def some(self, names: str) -> dict[str, Any]:
        """The options named in ``names``, which are separated by spaces."""
        return {name: getattr(self, name) for name in names.split()}


def two_models(
    verb: str, both: Sequence[str] | None, source: str | None, target: str | None
) -> tuple[str, str]:
    """The two models of a verb, from their options or as two arguments."""
    both = both or []
    if not both and source is not None and target is not None:
        return source, target
    if len(both) == 2 and (source, target) == (None, None):
        return both[0], both[1]
    named = {"--source": source, "--target": target}
    found = [*both, *(f"{name} {value}" for name, value in named.items() if value)]
    raise ValueError(
        f"`{verb}` is for two models, and found {', '.join(found) or 'none'}; give --source A "
        "--target B, or A B alone"
    )


# ---- verbs -------------------------------------------------------------------------------------

Given = TypeVar("Given", bound=Options)


def verb(
    options: type[Given], *, long: bool = False
) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Make a function of ``options`` one that typer can run; inherited fields are listed last.

    ``long`` says that the verb computes for long, so that it tells if the machine is slow.
    """
    hints = get_type_hints(options, include_extras=True)
    listed = (name for cls in options.__mro__ for name in inspect.get_annotations(cls))
    known = {field.name: field for field in fields(options)}
    parameters = [_parameter(known[name], hints[name]) for name in dict.fromkeys(listed)]

    def decorate(function: Callable[[Given], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            given = options(**values)
            keep_stdout_for_json(given.json_file)
            os.environ[blas.LONG_RUN] = "1" if long else ""
            function(given)

        command.__doc__ = function.__doc__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(described: Field, hint: Any) -> inspect.Parameter:
    """A field as the parameter that typer reads."""
    if info := described.metadata.get("typer"):
        hint = Annotated[hint, info]
    default = inspect.Parameter.empty if described.default is MISSING else described.default
    return inspect.Parameter(
        described.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )
