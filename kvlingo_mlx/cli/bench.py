"""kvlingo-mlx bench: what a switch saves on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from kvlingo_mlx.cli import bench_budget
from kvlingo_mlx.cli.bench_output import Pair, draw, foot, keep_profile, show
from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, progress_bar, say, warn
from kvlingo_mlx.errors import MissingTranslatorError

NAMES = ("moe-switch", "switch", "quant")
PROFILE_HELP = "Keep the times for `generate --strategy auto`, which goes by them."
BUDGET = "memory-budget"  # a table of its own: no translation is timed, so "all" leaves it out


def command(
    table_name: str = typer.Option(
        "moe-switch", "--table", help=f"{', '.join(NAMES)} or all; {BUDGET}."
    ),
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
    lengths = _numbers("--prompt-tokens", prompt_tokens, "64,256") if prompt_tokens else None
    if table_name == BUDGET:
        if num_trials < 1:
            raise ValueError(f"--num-trials is {num_trials}; give at least 1")
        others = {"--source": source, "--target": target, "--translator": translator,
                  "--geometry": geometry, "--reference": reference, "--plot": plot}  # fmt: skip
        batches = _numbers("--batch-sizes", batch_sizes, "1,8")
        bench_budget.check([name for name, value in others.items() if value], lengths, batches)
        bench_budget.run(lengths, batches, layers, precision, num_trials, time_limit, json_file)
        return
    bits = [] if quantize == "none" else _numbers("--quantize", quantize, "8,4 or none")
    if num_trials < 1:
        raise ValueError(f"--num-trials is {num_trials}; give at least 1")
    hybrids = _numbers("--native-layers", native_layers, "1,2") if native_layers else []
    if hybrids and batch > 1:
        raise ValueError(f"--native-layers is of single prompts; leave out --batch {batch}")
    if batch < 1:
        raise ValueError(f"--batch is {batch}; give at least 1")
    if prompt not in (None, "text", "random"):
        raise ValueError(f"--prompt is {prompt!r}; give text or random")
    if prompt == "text" and geometry:
        raise ValueError("--prompt text does not go with --geometry: random models have no tokens")
    for name, given in (("--layers", layers), ("--precision", precision)):
        if given is not None and not geometry:
            raise ValueError(f"{name} is for --geometry; models from a folder are as they are")
    if save_profile:
        _check_profile(names, geometry, batch)

    from kvlingo_mlx import measure, pictures
    from kvlingo_mlx.timing import tables
    from kvlingo_mlx.timing.ceilings import measured_rates
    from kvlingo_mlx.timing.reference import load_reference

    keep_stdout_for_json(json_file)
    clock = tables.Clock(time_limit)  # models are made or read within it, too
    if plot:
        pictures.check(plot)
    beside = load_reference(reference) if reference else None
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    if geometry:
        pair = _of_geometry(geometry, layers, precision, nu, bits)
    else:
        pair = _of_models(source, target, translator, nu, bits, stored=save_profile)
    most = len(pair.target.attentions)
    if not all(0 < j <= most for j in hybrids):
        raise ValueError(f"--native-layers is {native_layers!r}; give numbers from 1 to {most}")
    rates = measured_rates()
    text = not geometry and prompt != "random"
    results: dict[str, Any] = {}
    before = None
    for index, name in enumerate(names):
        shown = tables.with_hybrids(tables.batched(tables.TABLES[name], batch), hybrids)
        wanted = lengths or list(shown.lengths)
        with progress_bar(f"timing {name}", len(wanted) * num_trials) as step:
            timings, left_out = tables.run_table(
                pair.source, pair.target, pair.translators, shown, wanted, text=text,
                trials=num_trials, clock=clock.part(len(names) - index),
                step_size=prefill_step_size, progress=step, before=before, batch=batch,
            )  # fmt: skip
        before = timings[0] if timings else before
        results[name] = show(shown, timings, left_out, pair, rates, beside)
        if save_profile:
            keep_profile(shown, timings, pair)
    foot(pair, rates, text)
    say(measure.machine_line())
    if plot:
        draw(plot, results)
    if json_file:
        config = {
            "source": pair.source.name, "target": pair.target.name, "layers": pair.layers,
            "prompt": "bundled text" if text else "random token ids", "trials": num_trials,
            "batch": batch,
            "forms": list(pair.translators), "rates": vars(rates), "precision": precision,
            "weights": [pair.source.precision, pair.target.precision],
        }  # fmt: skip
        measure.append_json(json_file, measure.record("bench", config, results))


def _numbers(option: str, text: str, example: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers: {example}") from None


def _check_profile(names: Sequence[str], geometry: str | None, batch: int) -> None:
    if batch > 1:
        raise ValueError(f"--save-profile is of single prompts; leave out --batch {batch}")
    if geometry:
        raise ValueError("--save-profile is for models that answer; --geometry has random ones")
    if "moe-switch" not in names:
        raise ValueError("--save-profile needs every way to a first token: --table moe-switch")


# ---- what is timed ---------------------------------------------------------------------------


def _of_geometry(
    geometry: str, layers: int | None, precision: str | None, nu: int, bits: Sequence[int]
) -> Pair:
    from kvlingo_mlx.backend import on_gpu

    from kvlingo_mlx.timing import geometries

    names = geometry.split(":")
    if len(names) != 2:
        raise ValueError(
            f"--geometry is {geometry!r}; give SOURCE:TARGET of {', '.join(geometries.GEOMETRIES)}"
        )
    precision = precision or ("bfloat16" if on_gpu() else "float32")
    models = [
        geometries.random_model(name, layers, precision, seed) for seed, name in enumerate(names)
    ]
    whole = [geometries.GEOMETRIES[name]["num_hidden_layers"] for name in names]
    forms = _forms(bits)
    translators = geometries.random_translators(models[0], models[1], nu, forms)
    if layers is None:
        return Pair(models[0], models[1], translators, None, (f"random weights in {precision}",))
    note = f"random weights in {precision}, {layers} layers of each model"
    depths = (layers, whole[0]), (layers, whole[1])
    return Pair(models[0], models[1], translators, depths, (note,))


def _forms(bits: Sequence[int]) -> dict[str, tuple[Any, int | None]]:
    """Forms of a translator's maps; on a CPU 16-bit maps are widened, so they are left out."""
    from kvlingo_mlx.backend import on_gpu

    from kvlingo_mlx.translators.quantised import check_bits

    for number in bits:
        check_bits(number)
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
    from kvlingo_mlx.loading import load_pair, resolve_translator
    from kvlingo_mlx.pairing import check_one_tokenizer
    from kvlingo_mlx.timing import geometries
    from kvlingo_mlx.translators.quantised import check_bits

    for number in bits:
        check_bits(number)
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
