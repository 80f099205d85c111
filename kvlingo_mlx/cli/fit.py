"""kvlingo-mlx fit: make a translator in closed form, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvlingo_mlx.cli.command import Configured, TwoModels, verb
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.group import leads
from kvlingo_mlx.options import ABOVE_0, Need, option
from kvlingo_mlx.training.recipe import MapOptions

if TYPE_CHECKING:
    from kvlingo_mlx.format.assignment import Assignment
    from kvlingo_mlx.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class FitOptions(MapOptions, Configured, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("nu", "assignment", lambda rule: not rule.endswith(".json"), "relative_depth",
             "which lists the layers itself"),
    )  # fmt: skip
    KEYS: ClassVar[str] = "capture head_mixing state_maps ridge"
    data: str = option(..., 'JSONL of {"messages": [...]} or {"text": ...}.')
    out: str = option(..., "The translator folder to write.")
    assignment: str = option(
        "relative_depth",
        'relative_depth, r2, greedy, or a JSON file {"keys": [[0], ...], "values": ...}.',
    )
    memory_gb: float = option(
        8.0, "Most GB of sums at once; with less, the data are read several times.", kind=ABOVE_0
    )
    tokens: int | None = option(
        None, "Tokens to read, from all over the data; default: 64 for each unknown of a map."
    )
    force: bool = False


@verb(FitOptions, long=True)
def command(options: FitOptions) -> None:
    """Fit a translator in closed form on your own text.

    A map has an unknown for each number that it reads: KV heads x head dim x --nu; with
    head_mixing off, of one head. 64 tokens for each are read, from all over the data: 65,536 for
    a KV width of 1,024. Data of fewer than 32 get a warning, of fewer than one an error.
    """
    from kvlingo_mlx.fitting import fit
    from kvlingo_mlx.format import translator_folder
    from kvlingo_mlx.format.assignment import narrow_groups
    from kvlingo_mlx.loading.grading import NO_RECEIPT, said_of
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.tokenization.records import open_lines

    if leads():  # which has the folder, if mlx.launch started several
        translator_folder.check_destination(options.out)
        if not options.force:
            translator_folder.check_free(options.out)
    open_lines(Path(options.data))  # refused before models are loaded
    models = load_pair(options.source, options.target)
    own = options.part(MapOptions) | {"assignment": _assignment(options.assignment, *models)}
    translator = fit(
        *models,
        options.data,
        **own,
        tokens=options.tokens,
        memory=int(options.memory_gb * 2**30),
        say=say,
    )
    ends = translator.config.source.layers, translator.config.target.layers
    listed = options.assignment.endswith(".json")
    if not listed and (narrow := narrow_groups(*ends, options.nu)):
        warn(narrow)
    if not leads():
        return
    folder = translator.save(options.out, overwrite=options.force)
    made = translator.config.provenance
    skipped = made["records"] - made["samples"] - made.get("held_out", 0)
    say(
        f"wrote {folder}: {translator.num_parameters:,} parameters from {made['samples']} samples"
        + (f" ({skipped} skipped: not usable)" if skipped else "")
        + f", {made['prefix_tokens']} prefix tokens"
    )
    say(f"grade: {said_of(translator.config) if 'receipt' in made else NO_RECEIPT}")
    config = {"source": models[0].name, "target": models[1].name, "data": options.data}
    results = {"parameters": translator.num_parameters, "skipped": skipped, **made}
    keep(options.json_file, "fit", config, results)


def _assignment(text: str, source: LanguageModel, target: LanguageModel) -> Assignment | str:
    """The name of a rule unchanged, or the assignment in a file."""
    if not text.endswith(".json"):
        return text
    from kvlingo_mlx.format.config_reading import parse_assignment
    from kvlingo_mlx.format.files import parse_json

    path = Path(text)
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--assignment {text} cannot be read: {error.strerror}") from None
    return parse_assignment(path, parse_json(path, blob), source.spec(), target.spec())
