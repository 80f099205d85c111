"""kvlingo-mlx bench: what a switch saves on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli import bench_budget
from kvlingo_mlx.cli.bench_options import (
    BUDGET,
    check_numbers,
    geometry_names,
    numbers,
)
from kvlingo_mlx.cli.bench_output import Pair, draw, foot, keep_profile, show
from kvlingo_mlx.cli.output import (
    JSON_HELP,
    given_options,
    keep_stdout_for_json,
    progress_bar,
    say,
    warn,
)
from kvlingo_mlx.errors import MissingTranslatorError

if TYPE_CHECKING:
    from kvlingo_mlx.timing.tables import Table

NAMES = ("moe-switch", "switch", "quant")
PROFILE_HELP = "Keep the times for `generate --strategy auto`, which goes by them."
TABLE_HELP = f"{', '.join(NAMES)}, or all of these; or {BUDGET}, which all leaves out."


def command(
    context: typer.Context,
    table_name: str = typer.Option("moe-switch", "--table", help=TABLE_HELP),
    source: str = typer.Option(None, help="The prefill model; default: a tiny embedded one."),
    target: str = typer.Option(None, help="The decode model; default: a tiny embedded one."),
    translator: str = typer.Option(None, help="A folder or Hub id; else the local store's."),
    geometry: str = typer.Option(
        None, help="Random models of true widths instead: qwen3-4b:qwen3-30b-a3b, say."
    ),
    layers: int = typer.Option(None, help="Layers of each model of --geometry; default: all."),
    precision: str = typer.Option(
        None, help="Of --geometry: float32, bfloat16, 8bit, 4bit; default: the machine's."
    ),
    nu: int = typer.Option(1, help="Source layers a target layer reads, where maps are random."),
    quantize: str = typer.Option("8,4", help="Bits of more forms of the maps: 8,4 or none."),
    native_layers: str = typer.Option(None, help="Also switches of so many native layers: 1,2."),
    prompt: str = typer.Option(None, help="text (bundled) or random token ids."),
    prompt_tokens: str = typer.Option(None, "--prompt-tokens", "-p", help="Lengths: 64,256."),
    batch: int = typer.Option(1, help="Prompts at once, of one length; fewer rows above 1."),
    num_trials: int = typer.Option(5, "--num-trials", "-n", help="Trials per length."),
    time_limit: float = typer.Option(150.0, help="Seconds in all; longer prompts are left out."),
    batch_sizes: str = typer.Option("1,8", help=f"Rows that {BUDGET} decodes at once."),
    prefill_step_size: int = typer.Option(2048, help="Tokens per prefill chunk."),
    reference: str = typer.Option(None, help="paper-m3-ultra, or a file of --json, beside it."),
    plot: str = typer.Option(None, help="Draw times over prompt lengths into this file."),
    save_profile: bool = typer.Option(False, "--save-profile", help=PROFILE_HELP),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Time to first token: native, switch, accelerator; beside what the machine could do."""
    names = NAMES if table_name == "all" else (table_name,)
    if table_name not in (*NAMES, BUDGET, "all"):
        raise ValueError(f"--table is {table_name!r}; give {', '.join(NAMES)} or all; or {BUDGET}")
    check_numbers(time_limit, num_trials=num_trials, batch=batch, nu=nu,
                  prefill_step_size=prefill_step_size)  # fmt: skip
    least = 1 if table_name == BUDGET else 2  # a prompt of one token leaves nothing to hand over
    lengths = numbers("--prompt-tokens", prompt_tokens, "64,256", least) if prompt_tokens else None
    if table_name == BUDGET:
        batches = numbers("--batch-sizes", batch_sizes, "1,8")
        bench_budget.run(lengths, batches, layers, precision, num_trials, time_limit, json_file)
        return
    bits = [] if quantize == "none" else numbers("--quantize", quantize, "8,4 or none")
    hybrids = numbers("--native-layers", native_layers, "1,2") if native_layers else []
    if prompt not in (None, "text", "random"):
        raise ValueError(f"--prompt is {prompt!r}; give text or random")

    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.timing import tables
    from kvlingo_mlx.timing.ceilings import measured_rates
    from kvlingo_mlx.timing.reference import load_reference
    from kvlingo_mlx.translators.quantised import check_bits

    keep_stdout_for_json(json_file)
    for number in bits:
        check_bits(number)
    ends = geometry_names(geometry, layers, precision, nu) if geometry else None
    if plot:
        pictures.check(plot)
    beside = load_reference(reference) if reference else None
    clock = tables.Clock(time_limit)  # models are made or read within it, too
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    if ends is not None:
        pair = _of_geometry(ends, layers, precision, nu, bits)
    else:
        pair = _of_models(source, target, translator, nu, bits, stored=save_profile)
    own = next(iter(pair.translators.values())).config.nu
    if "nu" in given_options(context) and nu != own:
        raise ValueError(f"--nu is {nu}, for random maps; this pair stores ones of {own}: omit it")
    most = len(pair.target.attentions)
    if max(hybrids, default=0) > most:
        raise ValueError(f"--native-layers is {native_layers!r}; give numbers from 1 to {most}")
    wanted = {name: _wanted(pair, tables.TABLES[name], lengths) for name in names}
    text = not geometry and prompt != "random"
    rates = measured_rates()
    config: dict[str, Any] = {
        "source": pair.source.name, "target": pair.target.name, "layers": pair.layers,
        "prompt": "bundled text" if text else "random token ids", "trials": num_trials,
        "batch": batch, "nu": own,
        "prefill_step_size": prefill_step_size, "native_layers": hybrids,
        "forms": list(pair.translators), "precision": pair.precision,
        "weights": [pair.source.precision, pair.target.precision],
    }  # fmt: skip
    results: dict[str, Any] = {}
    before = None
    for index, name in enumerate(names):
        shown = tables.with_hybrids(tables.batched(tables.TABLES[name], batch), hybrids)
        fits, beyond = wanted[name]
        with progress_bar(f"timing {name}", len(fits) * num_trials) as step:
            timings, left_out = tables.run_table(
                pair.source, pair.target, pair.translators, shown, fits, text=text,
                trials=num_trials, clock=clock.part(len(names) - index),
                step_size=prefill_step_size, progress=step, before=before, batch=batch,
            )  # fmt: skip
        before = timings[0] if timings else before
        rates = rates.best(measured_rates())
        results[name] = show(name, shown, timings, (left_out, beyond), pair, rates, beside)
        if save_profile:
            keep_profile(shown, timings, pair, prefill_step_size)
    if beside is not None and (differs := beside.differences(config)):
        say(f"the reference is not of the same run: {differs}")
    config["rates"] = vars(rates)
    foot(pair, rates, text)
    say(measure.machine_line())
    if plot:
        draw(plot, results, pair)
    if json_file:
        measure.append_json(json_file, measure.record("bench", config, results))


def _wanted(pair: Pair, table: Table, lengths: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """A table's prompt lengths; and those of its own that go beyond a model's context.

    Raises:
        ValueError: One that was asked for does.
    """
    model = min((pair.source, pair.target), key=lambda model: model.context_length)
    room = model.context_length
    if lengths is not None and max(lengths) > room:
        raise ValueError(
            f"--prompt-tokens holds {max(lengths)}, but the context of {model.name} is {room}: "
            f"give at most {room}"
        )
    own = lengths or table.lengths
    return [n for n in own if n <= room], [n for n in own if n > room]


# ---- what is timed ---------------------------------------------------------------------------


def _of_geometry(
    names: Sequence[str], layers: int | None, precision: str | None, nu: int, bits: Sequence[int]
) -> Pair:
    from kvlingo_mlx.backend import on_gpu

    from kvlingo_mlx.timing import geometries

    precision = precision or ("bfloat16" if on_gpu() else "float32")
    models = [
        geometries.random_model(name, layers, precision, seed) for seed, name in enumerate(names)
    ]
    whole = [geometries.GEOMETRIES[name]["num_hidden_layers"] for name in names]
    translators = geometries.random_translators(models[0], models[1], nu, _forms(bits))
    if layers is None:
        note = f"random weights in {precision}"
        return Pair(models[0], models[1], translators, None, (note,), precision)
    note = f"random weights in {precision}, {layers} layers of each model"
    depths = (layers, whole[0]), (layers, whole[1])
    return Pair(models[0], models[1], translators, depths, (note,), precision)


def _forms(bits: Sequence[int]) -> dict[str, tuple[Any, int | None]]:
    """Forms of a translator's maps; on a CPU 16-bit maps are widened, so they are left out."""
    from kvlingo_mlx.backend import on_gpu

    floats: dict[str, tuple[Any, int | None]] = {"float32": ("float32", None)}
    if on_gpu():
        floats = {"bfloat16": ("bfloat16", None), **floats}
    return floats | {f"{number} bits": ("float32", number) for number in bits}


def _of_models(
    source: str | None, target: str | None, translator: str | None, nu: int, bits: Sequence[int],
    stored: bool,
) -> Pair:  # fmt: skip
    """Real models; where no translator is ``stored`` and none has to be, random maps."""
    from kvlingo_mlx.embedded import zoo
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_one_tokenizer
    from kvlingo_mlx.loading.translators import resolve_translator
    from kvlingo_mlx.timing import geometries

    models = load_pair(source or zoo("tiny-qwen3-s"), target or zoo("tiny-qwen3-moe"))
    try:
        found = {"stored": resolve_translator(translator, *models)}
        check_one_tokenizer(found["stored"].config, "bench")
        found |= {f"{n} bits": resolve_translator(translator, *models, quantize=n) for n in bits}
    except MissingTranslatorError:
        if translator is not None or stored:
            raise
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
        found = geometries.random_translators(models[0], models[1], nu, _forms(bits))
        return Pair(*models, found, None, (f"random maps, nu = {nu}",))
    return Pair(*models, found, None)
