"""python -m benchmarks.paper bench: times of a switch, of healing, and a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from benchmarks.paper.timing.phases import (
    HEAL_IDLE,
    HEAL_INTERLEAVED,
    HEAL_LAYERS,
    LABELS,
    SPEED_LABELS,
    label,
    layers_of,
)
from kvlingo_mlx.cli.bench import FORMS
from kvlingo_mlx.cli.command import BOTH, COUNTS, LENGTHS, Configured, verb
from kvlingo_mlx.cli.output import keep, ms, phase, say, table, tell_of_machine, warn
from kvlingo_mlx.options import COUNT, SECONDS, Need, among, but, is_set, off, one_of, option

if TYPE_CHECKING:
    from benchmarks.paper.timing.memory_budget import Cell
    from benchmarks.paper.timing.tables import Timing
    from kvlingo_mlx.timing.bench import BenchPair

TABLES = ("moe-switch", "switch", "quant")
HEALING = "healing"  # not every pair can be healed, so "all" leaves it out
BUDGET = "memory-budget"  # it times no translation, so "all" leaves it out
NONE = "-"
BUDGET_TITLE = (
    "Decoding under a memory budget (paper, app. of that name): {}, random weights, cache"
)
BUDGET_COLUMNS = [
    *("context", "batch", "full (tokens/s)", "narrowed", "narrowed + translator"),
    *("translator's share", "full (GB)", "narrowed", "narrowed + translator"),
]


@dataclass(frozen=True, kw_only=True)
class PaperBenchOptions(Configured):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("source target translator geometry nu quantize prefill_step_size", "table_name",
             but(BUDGET), "moe-switch", "whose models, maps and cache are the paper's, random"),
        Need("quantize", "table_name", but(HEALING), "moe-switch",
             "which heals one prompt behind the maps as they are"),
        Need("batch_sizes", "table_name", among(BUDGET), BUDGET),
        Need("source target translator", "geometry", off, why="whose models and maps are random"),
        Need("layers precision", "geometry table_name",
             lambda geometry, table: is_set(geometry) or table == BUDGET,
             "qwen3-4b:qwen3-30b-a3b", "and models from a folder are as they are"),
        Need("decode_tokens", "table_name", among("moe-switch", "all", HEALING, BUDGET),
             "moe-switch", "which times no decoding"),
    )  # fmt: skip
    table_name: str = option(
        "moe-switch",
        f"{', '.join(TABLES)}, or all of these; or {HEALING} or {BUDGET}, which all leaves out.",
        "--table",
        kind=one_of(*TABLES, "all", HEALING, BUDGET),
    )
    models: Annotated[list[str] | None, BOTH] = None
    source: str | None = None
    target: str | None = None
    translator: str | None = None
    geometry: str | None = option(
        None, "Random models of true widths instead: qwen3-4b:qwen3-30b-a3b, say."
    )
    layers: int | None = option(None, "Layers of each model of --geometry; default: all.")
    precision: str | None = option(
        None, "Of --geometry: bfloat16, 4bit, 8bit or float32; default: the machine's."
    )
    nu: int | None = option(
        None,
        "Source layers a target layer reads, in random maps; default: the paper's, else 1.",
        kind=COUNT,
    )
    quantize: list[int] = option(
        "8,4", "Also time the maps in so many bits: 8,4 or none.", kind=FORMS
    )
    prompt_tokens: list[int] | None = option(
        None, "Lengths: 64,256.", "--prompt-tokens", "-p", kind=LENGTHS
    )
    num_trials: int = option(5, "Trials per length.", "--num-trials", "-n", kind=COUNT)
    decode_tokens: int | None = option(
        None,
        "Tokens that decoding speeds are over; default: the paper's, on a CPU a few.",
        kind=COUNT,
    )
    time_limit: float = option(
        150.0, "Seconds of measuring; longer prompts are left out.", kind=SECONDS
    )
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
    batch_sizes: list[int] = option(
        "1,8", f"With --table {BUDGET}: how many rows are decoded at once.", kind=COUNTS
    )


@verb(PaperBenchOptions, long=True)
def command(options: PaperBenchOptions) -> None:
    """Time to first token by each way, until a cache is native, and under a memory budget."""
    lengths = options.prompt_tokens
    tell_of_machine()
    if options.table_name == BUDGET:
        _budget(options, lengths)
    else:
        _switch(options, lengths)


# ---- a switch -------------------------------------------------------------------------------


def _switch(options: PaperBenchOptions, lengths: Sequence[int] | None) -> None:
    """Time the tables of a switch, print them and append the record."""
    from kvlingo_mlx.backend import on_gpu

    from benchmarks.paper.timing import tables
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.timing.switching import Stopwatch

    pair = _pair(options, max(lengths or [0]))
    clock, results = Stopwatch(options.time_limit), dict[str, Any]()
    decoded = options.decode_tokens or (256 if on_gpu() else 8)
    names = TABLES if options.table_name == "all" else (options.table_name,)
    for index, name in enumerate(names):
        shown = tables.TABLES[name]
        own = tables.lengths_of(pair, shown, lengths)
        with phase(f"timing {name}", len(own) * options.num_trials) as step:
            effort = tables.Effort(
                options.num_trials, clock.part(len(names) - index), decoded,
                options.prefill_step_size, step,
            )  # fmt: skip
            timings, left_out = tables.run_table(pair, shown, own, effort)
        results[name] = {"timings": [t.as_json() for t in timings], "left_out": left_out}
        if timings:
            results[name] |= _show(shown, pair, timings)
        if left_out:
            listed = ", ".join(map(str, left_out))
            say(f"{name}: left out, since --time-limit allows no more: {listed} tokens")
    _check_measured(any(found["timings"] for found in results.values()), options)
    for note in pair.notes:
        say(note)
    say(f"prompts: {'bundled text' if pair.text else 'random token ids'}")
    say(measure.machine_line())
    keep(options.json_file, "bench", _config(options, pair), results)


def _check_measured(measured: bool, options: PaperBenchOptions) -> None:
    if not measured:
        raise ValueError(
            f"--time-limit is {options.time_limit:g}, and the shortest measurement takes longer; "
            "give more, or fewer --prompt-tokens or --layers"
        )


def _pair(options: PaperBenchOptions, tokens: int) -> BenchPair:
    """The timed pair: models from folders, or random ones."""
    from benchmarks.paper.timing import geometries
    from kvlingo_mlx.timing import bench

    bits = [] if options.table_name == HEALING else options.quantize
    names = geometry_names(options)
    if names is None:
        ends = options.source, options.target, options.translator
        found = bench.of_models(*ends, options.nu, bits)
        papers = _papers_nu(options.source or "", options.target or "")
        if found.notes:
            found = bench.of_models(*ends, options.nu or papers, bits)
            warn("no translator of this pair is stored; random maps of the same shapes are timed")
        return found
    nu = options.nu or _papers_nu(*names) or 1
    check_depth(names[0], options.layers, nu)
    with phase("making the models") as step:
        form = options.layers, options.precision, nu, bits
        return geometries.of_geometry(names, *form, tokens=tokens, progress=step)


def geometry_names(options: Any) -> tuple[str, str] | None:
    """The source and target of ``--geometry``; None without it.

    Raises:
        ValueError: They are not two known names, or do not fit ``layers`` or ``precision``.
    """
    if options.geometry is None:
        return None
    from benchmarks.paper.timing.geometries import GEOMETRIES, check

    names = options.geometry.split(":")
    if len(names) != 2:
        known = ", ".join(GEOMETRIES)
        raise ValueError(f"--geometry is {options.geometry!r}; give SOURCE:TARGET of {known}")
    for name in names:
        check(name, options.layers, options.precision)
    return names[0], names[1]


def check_depth(source: str, layers: int | None, nu: int) -> None:
    """Refuse (ValueError) maps that read more layers than a geometry has."""
    from benchmarks.paper.timing.geometries import GEOMETRIES

    depth = layers or GEOMETRIES[source]["num_hidden_layers"]
    if nu > depth:
        raise ValueError(f"nu is {nu}; {source} has {depth} layers here to read: give fewer")


def _papers_nu(source: str, target: str) -> int | None:
    """The source layers of the paper's recipe for a pair; None for others."""
    from benchmarks.paper.timing.widths import released
    from benchmarks.paper.training.paper_pairs import best_of

    best = best_of(released(source), released(target))
    return None if best is None else best.nu


def _config(options: PaperBenchOptions, pair: BenchPair) -> dict[str, Any]:
    """The run's settings in a record."""
    from kvlingo_mlx.reporting import measure

    form, translator = next(iter(pair.translators.items()))
    return {
        "machine": measure.environment()["chip"],
        "source": pair.source.name,
        "target": pair.target.name,
        "layers": options.layers,
        "prompt": "bundled text" if pair.text else "random token ids",
        "trials": options.num_trials,
        "batch": 1,
        "nu": translator.config.nu,
        "head_mixing": translator.config.head_mixing,
        "translator": form,
        "prefill_step_size": options.prefill_step_size,
        "forms": list(pair.translators),
        "precision": options.precision,
        "weights": [pair.source.precision, pair.target.precision],
    }


def _show(shown: Any, pair: BenchPair, timings: Sequence[Timing]) -> dict[str, Any]:
    """Print a table; returns what a record holds beside its times."""
    first = timings[0]
    columns = ["prompt tokens", *(str(t.prompt_tokens) for t in timings)]
    phases = [phase for phase in first.samples if phase not in SPEED_LABELS]
    rows = [[label(phase), *(ms(t.median(phase)) for t in timings)] for phase in phases]
    for way in first.speedups:
        rows.append([f"{way}, times sooner", *(f"{t.speedups[way]:.2f}" for t in timings)])
    for name in first.tokens_per_second:
        speeds = [f"{t.tokens_per_second[name]:.1f}" for t in timings]
        rows.append([f"{SPEED_LABELS[name]} (tokens/s)", *speeds])
    rows += [_while_healed(phase, timings) for phase in first.meanwhile]
    for name in shown.peaks:
        peaks = [f"{t.peak[name] / 1e6:.0f}" for t in timings]
        rows.append([f"{LABELS[name]}, peak (MB)", *peaks])
    table(f"{shown.title}\n{pair.source.name} to {pair.target.name} (ms, medians)", columns, rows)
    spreads = [
        [
            label(phase, first.decoded),
            *(f"{ms(t.summary[phase]['min'])} / {ms(t.summary[phase]['iqr'])}" for t in timings),
        ]
        for phase in first.samples
    ]
    table("Fastest / interquartile range (ms)", columns, spreads)
    return _work(pair, timings, columns) if shown.heals else {}


def _while_healed(phase: str, timings: Sequence[Timing]) -> list[str]:
    """A row of decoding while the target reads; no number where it wrote too few tokens."""
    found = [t.while_healed.get(phase) for t in timings]
    cells = [
        NONE if f is None else f"{f['tokens_per_second']:.1f} ({f['share']:.0%})" for f in found
    ]
    layers = phase.removeprefix(HEAL_LAYERS)
    way = "healed meanwhile" if phase == HEAL_INTERLEAVED else f"{layers_of(layers)} at once"
    return [f"target, {way} (tokens/s)", *cells]


def _work(pair: BenchPair, timings: Sequence[Timing], columns: list[str]) -> dict[str, list[Any]]:
    """Print the work of each way to a native cache; returns what a record holds of healing."""
    from benchmarks.paper.timing import healing
    from benchmarks.paper.timing.paths import FEW

    say("Healed idle: nothing is decoded, the first token neither.")
    say(
        "Healed meanwhile, layers at once: from the first token until the cache is native; in "
        f"brackets the share of the translated cache's speed; {NONE}: fewer than {FEW} tokens."
    )
    if any(one.left for t in timings for rounds in t.meanwhile.values() for one in rounds):
        say("an answer filled the context before; the rest was read without it")
    names = [p for p in timings[0].samples if p.startswith(HEAL_LAYERS)]
    layers = [int(name.removeprefix(HEAL_LAYERS)) for name in names]
    ends = pair.source, pair.target, pair.translator
    work = [healing.work(*ends, layers, t.prompt_tokens - 1) for t in timings]
    ways = {"switch": "switch, not healed", HEAL_IDLE: "healed idle or between tokens"}
    ways |= {name: f"{layers_of(name.removeprefix(HEAL_LAYERS))} at once" for name in names}
    ways |= {"native": "target prefill"}
    table(
        "Work before the first token / until the cache is native (GFLOP)",
        columns,
        [[said, *(_gflop(one[phase]) for one in work)] for phase, said in ways.items()],
    )
    say("Work is counted: linear layers, maps, causal attention; decoding steps are left out.")
    return {"work": work, "while_healed": [t.while_healed for t in timings]}


def _gflop(work: Mapping[str, float]) -> str:
    """Both numbers of a way; a plain switch has no second one."""
    both = (work.get(name) for name in ("first_token", "until_native"))
    return " / ".join(NONE if flops is None else f"{flops / 1e9:.3g}" for flops in both)


# ---- a memory budget ------------------------------------------------------------------------


def _budget(options: PaperBenchOptions, contexts: Sequence[int] | None) -> None:
    """Measure decoding from a narrower model's cache, print the table and append the record."""
    from benchmarks.paper.timing import memory_budget
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.timing.switching import Stopwatch

    batches = options.batch_sizes
    precision, trials = options.precision or "4bit", options.num_trials
    with phase("making the models") as making:
        models = memory_budget.setup(options.layers, precision, making)
    contexts = contexts or memory_budget.CONTEXTS
    decoded = options.decode_tokens or memory_budget.default_decoded()
    clock = Stopwatch(options.time_limit)
    with phase("timing memory-budget", len(contexts) * len(batches) * trials) as step:
        found = memory_budget.run(
            models, contexts, batches, trials=trials, decoded=decoded, clock=clock, progress=step
        )
        cells = list(found)
    _check_measured(bool(cells), options)
    title = BUDGET_TITLE.format(memory_budget.FULL)
    table(title, BUDGET_COLUMNS, [_budget_row(cell) for cell in cells])
    left_out = len(contexts) * len(batches) - len(cells)
    if left_out:
        say(f"{left_out} of {left_out + len(cells)} cells left out: time or memory allow no more")
    depth, whole = len(models.full.attentions), memory_budget.whole_depth()
    if depth < whole:
        say(
            f"{depth} of {whole} layers are run: caches and layers' weights have that part of "
            "their full size, embeddings and head all of it"
        )
    say(
        f"{precision} weights, head-wise post-RoPE maps; {decoded} tokens a row, best of {trials}; "
        "memory: the most alive while decoding"
    )
    say(measure.machine_line())
    config = {
        "machine": measure.environment()["chip"],
        "layers": depth,
        "whole_layers": whole,
        "precision": precision,
        "weights": models.full.precision,
        "trials": trials,
        "decoded": decoded,
        "head_mixing": False,
        "capture": models.translator.config.capture,
    }
    keep(options.json_file, "memory_budget", config, [cell.as_json() for cell in cells])


def _budget_row(cell: Cell) -> list[str]:
    return [
        f"{cell.context}",
        f"{cell.batch}",
        f"{cell.rate('full'):.2f}",
        *(f"{cell.gain(way):+.0%}" for way in ("narrowed", "folded")),
        f"{cell.share:.1%}",
        *(f"{cell.peak[way] / 1e9:.2f}" for way in ("full", "narrowed", "folded")),
    ]
