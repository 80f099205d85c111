"""The options of ``python -m benchmarks.paper bench``, checked before a model is made or read."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.cli.command import (
    Both,
    Configured,
    MaybeSource,
    MaybeTarget,
    PrefillStepSize,
    Translator,
    option,
)
from kvlingo_mlx.cli.sampling import check_ranges

TABLES = ("moe-switch", "switch", "quant")
HEALING = "healing"  # not every pair can be healed, so "all" leaves it out
BUDGET = "memory-budget"  # it times no translation, so "all" leaves it out


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Configured):
    table_name: str = option(
        "moe-switch",
        f"{', '.join(TABLES)}, or all of these; or {HEALING} or {BUDGET}, which all leaves out.",
        "--table",
    )
    models: Both = None
    source: MaybeSource = None
    target: MaybeTarget = None
    translator: Translator = None
    geometry: str | None = option(
        None, "Random models of true widths instead: qwen3-4b:qwen3-30b-a3b, say."
    )
    layers: int | None = option(None, "Layers of each model of --geometry; default: all.")
    precision: str | None = option(
        None,
        "Of --geometry, one or several: bfloat16,4bit (float32, 8bit); default: the machine's.",
    )
    nu: int | None = option(
        None, "Source layers a target layer reads, in random maps; default: the paper's, else 1."
    )
    quantize: str = option("8,4", "Also time the maps in so many bits: 8,4 or none.")
    native_layers: str | None = option(
        None, f"Also switches of so many native layers: 1,2; {HEALING}: these, not a quarter."
    )
    prompt: str | None = option(None, "text (bundled) or random token ids.")
    prompt_tokens: str | None = option(None, "Lengths: 64,256.", "--prompt-tokens", "-p")
    batch: int = option(1, "Prompts at once, of one length; fewer rows above 1.")
    num_trials: int = option(5, "Trials per length.", "--num-trials", "-n")
    decode_tokens: int | None = option(
        None, "Tokens that decoding speeds are over; default: 256, as the time allows."
    )
    time_limit: float = option(150.0, "Seconds in all, models made; longer prompts are left out.")
    prefill_step_size: PrefillStepSize = 2048
    plot: str | None = option(None, "Draw times over prompt lengths into this file.")
    batch_sizes: str = option("1,8", f"With --table {BUDGET}: how many rows are decoded at once.")
    reference: str | None = option(None, "paper-m3-ultra, or a file of --json, to compare with.")


def check(options: BenchOptions) -> None:
    """Refuse (ValueError) meaningless option values."""
    table, limit, prompt = options.table_name, options.time_limit, options.prompt
    tables = f"{', '.join(TABLES)} or all; or {HEALING} or {BUDGET}"
    counts = options.some("num_trials batch nu decode_tokens prefill_step_size")
    check_ranges(
        ("--table", repr(table), table in (*TABLES, HEALING, BUDGET, "all"), tables),
        *(
            (f"--{name.replace('_', '-')}", count, count is None or count >= 1, "at least 1")
            for name, count in counts.items()
        ),
        ("--time-limit", f"{limit:g}", limit > 0, "seconds above 0"),
        ("--prompt", repr(prompt), prompt in (None, "text", "random"), "text or random"),
    )


def precisions(options: BenchOptions) -> list[str | None]:
    """The precisions of the key ``precision``, each once; one None without it.

    Raises:
        ValueError: There are several, and one picture.
    """
    if options.precision is None:
        return [None]
    found = list[str | None](dict.fromkeys(options.precision.split(",")))
    if len(found) > 1 and options.plot:
        raise ValueError(
            f"--plot draws one run, and precision is {options.precision!r}; give one of them, or "
            "leave --plot out"
        )
    return found


def geometry_names(options: BenchOptions) -> tuple[str, str] | None:
    """The source and target of ``--geometry``; None without it.

    Raises:
        ValueError: They are not two known names, or do not fit ``layers``, ``precision`` or
            ``nu``.
    """
    if options.geometry is None:
        return None
    from kvlingo_mlx.timing.geometries import GEOMETRIES, check

    known = ", ".join(GEOMETRIES)
    names = options.geometry.split(":")
    if len(names) != 2:
        raise ValueError(f"--geometry is {options.geometry!r}; give SOURCE:TARGET of {known}")
    for name in names:
        for precision in precisions(options):
            check(name, options.layers, precision)
    depth = options.layers or GEOMETRIES[names[0]]["num_hidden_layers"]
    if options.nu is not None and options.nu > depth:
        raise ValueError(
            f"nu is {options.nu}; {names[0]} has {depth} layers here to read: give fewer"
        )
    return names[0], names[1]
