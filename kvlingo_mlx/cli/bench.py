"""kvlingo-mlx bench: what a switch saves on this machine."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import (
    JSON_HELP,
    QUANTIZE_HELP,
    keep_stdout_for_json,
    ms,
    progress_bar,
    say,
    table,
)

ROWS = {
    "source_prefill": "source prefill (ms)",
    "translate": "translation (ms)",
    "target_step": "target step (ms)",
    "native": "native first token (ms)",
    "switch": "switch first token (ms)",
    "accelerator": "accelerator first token (ms)",
}


def command(
    source: str = typer.Option(None, help="The prefill model; default: a tiny embedded one."),
    target: str = typer.Option(None, help="The decode model; default: a tiny embedded one."),
    translator: str = typer.Option(None, help="A folder or Hub id; else the local store's."),
    quantize: int = typer.Option(None, help=QUANTIZE_HELP),
    prompt_tokens: str = typer.Option("64,256,1024", "--prompt-tokens", "-p", help="Lengths."),
    num_trials: int = typer.Option(5, "--num-trials", "-n", help="Trials per length."),
    prefill_step_size: int = typer.Option(2048, help="Tokens per prefill chunk."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Time to first token: native, switch, accelerator; random token ids."""
    try:
        lengths = [int(text) for text in prompt_tokens.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-tokens is {prompt_tokens!r}; give numbers: 64,256") from None

    from kvlingo_mlx import measure
    from kvlingo_mlx.embedded import zoo
    from kvlingo_mlx.evaluation.latency import measure_latency
    from kvlingo_mlx.loading import load, resolve_translator
    from kvlingo_mlx.translators.quantised import check_bits

    keep_stdout_for_json(json_file)
    check_bits(quantize)
    models = load(source or zoo("tiny-qwen3-s")), load(target or zoo("tiny-qwen3-moe"))
    loaded = resolve_translator(translator, *models, quantize=quantize)
    results = []
    with progress_bar("timing", len(lengths) * num_trials) as step:
        for length in lengths:
            results.append(
                measure_latency(
                    *models,
                    loaded,
                    length,
                    trials=num_trials,
                    step_size=prefill_step_size,
                    progress=step,
                )
            )
    form = "" if quantize is None else f", translator of {quantize} bits"
    _print(results, f"{models[0].name} to {models[1].name}{form}, medians of {num_trials}")
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    say(measure.machine_line())
    if json_file:
        config = {"source": models[0].name, "target": models[1].name, "prompt": "random token ids",
                  "quantize": quantize}  # fmt: skip
        measure.append_json(
            json_file, measure.record("bench", config, [vars(result) for result in results])
        )


def _print(results: list, title: str) -> None:
    rows = [
        [label, *(ms(result.median(phase)) for result in results)] for phase, label in ROWS.items()
    ]
    for path in ("switch", "accelerator"):
        ratios = [result.median("native") / result.median(path) for result in results]
        rows.append([f"{path} speedup", *(f"{ratio:.2f}x" for ratio in ratios)])
    for path in ("native", "switch", "accelerator"):
        rows.append([f"{path} peak (MB)", *(f"{r.peak[path] / 1e6:.1f}" for r in results)])
    table(title, ["prompt tokens", *(str(result.prompt_tokens) for result in results)], rows)
