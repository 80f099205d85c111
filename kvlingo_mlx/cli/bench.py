"""kvlingo-mlx bench: what a switch saves on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from kvlingo_mlx.cli.bench_output import Pair, draw, foot, show
from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, progress_bar, say, warn
from kvlingo_mlx.errors import MissingTranslatorError

NAMES = ("moe-switch", "switch", "quant")


def command(
    table_name: str = typer.Option("moe-switch", "--table", help=f"{', '.join(NAMES)} or all."),
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
    prompt: str = typer.Option(None, help="text (bundled) or random token ids."),
    prompt_tokens: str = typer.Option(None, "--prompt-tokens", "-p", help="Lengths: 64,256."),
    num_trials: int = typer.Option(5, "--num-trials", "-n", help="Trials per length."),
    time_limit: float = typer.Option(150.0, help="Seconds in all; longer prompts are left out."),
    prefill_step_size: int = typer.Option(2048, help="Tokens per prefill chunk."),
    reference: str = typer.Option(None, help="paper-m3-ultra, or a file of --json, beside it."),
    plot: str = typer.Option(None, help="Draw times over prompt lengths into this file."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Time to first token: native, switch, accelerator; beside what the machine could do."""
    names = NAMES if table_name == "all" else (table_name,)
    if table_name not in (*NAMES, "all"):
        raise ValueError(f"--table is {table_name!r}; give {', '.join(NAMES)} or all")
    lengths = _numbers("--prompt-tokens", prompt_tokens, "64,256") if prompt_tokens else None
    bits = [] if quantize == "none" else _numbers("--quantize", quantize, "8,4 or none")
    if num_trials < 1:
        raise ValueError(f"--num-trials is {num_trials}; give at least 1")
    if prompt not in (None, "text", "random"):
        raise ValueError(f"--prompt is {prompt!r}; give text or random")
    if prompt == "text" and geometry:
        raise ValueError("--prompt text does not go with --geometry: random models have no tokens")
    for name, given in (("--layers", layers), ("--precision", precision)):
        if given is not None and not geometry:
            raise ValueError(f"{name} is for --geometry; models from a folder are as they are")

    from kvlingo_mlx import measure, pictures
    from kvlingo_mlx.timing import tables
    from kvlingo_mlx.timing.ceilings import measured_rates
    from kvlingo_mlx.timing.reference import load_reference

    keep_stdout_for_json(json_file)
    if plot:
        pictures.check(plot)
    beside = load_reference(reference) if reference else None
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    if geometry:
        pair = _of_geometry(geometry, layers, precision, nu, bits)
    else:
        pair = _of_models(source, target, translator, nu, bits)
    rates, clock = measured_rates(), tables.Clock(time_limit)
    text = not geometry and prompt != "random"
    results: dict[str, Any] = {}
    for name in names:
        shown = tables.TABLES[name]
        wanted = lengths or list(shown.lengths)
        with progress_bar(f"timing {name}", len(wanted) * num_trials) as step:
            timings, left_out = tables.run_table(
                pair.source, pair.target, pair.translators, shown, wanted, text=text,
                trials=num_trials, clock=clock, step_size=prefill_step_size, progress=step,
            )  # fmt: skip
        results[name] = show(shown, timings, left_out, pair, rates, beside)
    foot(pair, rates, text)
    say(measure.machine_line())
    if plot:
        draw(plot, results)
    if json_file:
        config = {
            "source": pair.source.name, "target": pair.target.name, "layers": pair.layers,
            "prompt": "bundled text" if text else "random token ids", "trials": num_trials,
            "forms": list(pair.translators), "rates": vars(rates), "precision": precision,
        }  # fmt: skip
        measure.append_json(json_file, measure.record("bench", config, results))


def _numbers(option: str, text: str, example: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers: {example}") from None


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
    source: str | None, target: str | None, translator: str | None, nu: int, bits: Sequence[int]
) -> Pair:
    from kvlingo_mlx.embedded import zoo
    from kvlingo_mlx.loading import load, resolve_translator
    from kvlingo_mlx.pairing import check_one_tokenizer
    from kvlingo_mlx.timing import geometries
    from kvlingo_mlx.translators.quantised import check_bits

    for number in bits:
        check_bits(number)
    models = load(source or zoo("tiny-qwen3-s")), load(target or zoo("tiny-qwen3-moe"))
    try:
        found = {"stored": resolve_translator(translator, *models)}
        check_one_tokenizer(found["stored"].config, "bench")
        found |= {f"{n} bits": resolve_translator(translator, *models, quantize=n) for n in bits}
    except MissingTranslatorError:
        if translator is not None:
            raise
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
        found = geometries.random_translators(models[0], models[1], nu, _forms(bits))
        return Pair(*models, found, None, (f"random maps, nu = {nu}",))
    return Pair(*models, found, None)
