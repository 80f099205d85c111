"""kvlingo-mlx demo: the whole product on the embedded tiny models, no network."""

from __future__ import annotations

from typing import Any

import typer

from kvlingo_mlx.cli.output import (
    JSON_HELP,
    keep_stdout_for_json,
    ms,
    progress_bar,
    say,
    table,
)

SAMPLES, SHOWN = 12, 4
# From dense to mixture of experts, and between two dense models, both ways.
PAIRS = (
    ("tiny-qwen3-s", "tiny-qwen3-moe"),
    ("tiny-qwen3-s", "tiny-qwen3-l"),
    ("tiny-qwen3-l", "tiny-qwen3-s"),
)


def command(
    every_pair: bool = typer.Option(False, "--every-pair", help="All six pairs, not three."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Answer questions from a translated cache, beside native and hidden-prefix answers."""
    from kvlingo_mlx.embedded import zoo_pairs
    from kvlingo_mlx.reporting import measure

    keep_stdout_for_json(json_file)
    pairs = zoo_pairs() if every_pair else PAIRS
    say("Each dialogue tells 12 to 28 facts, then asks about some. One tiny model reads it; a")
    say("second one answers from the first one's translated cache, without reading it again.")
    results = {}
    with progress_bar("demo", len(pairs) * SAMPLES) as step:
        for names in pairs:
            results[" to ".join(names)] = _run_pair(*names, step)
    _print_answers(results)
    _print_quality(results)
    _print_latency(results)
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    say(measure.machine_line())
    if json_file:
        entry = measure.record("demo", {"dialogues": SAMPLES}, _plain(results))
        measure.append_json(json_file, entry)


def _run_pair(source_name: str, target_name: str, step) -> dict:
    from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
    from kvlingo_mlx.evaluation import conditions
    from kvlingo_mlx.evaluation import continuation as quality
    from kvlingo_mlx.loading.models import load
    from kvlingo_mlx.loading.translators import resolve_translator
    from kvlingo_mlx.timing import tables

    source, target = load(zoo(source_name)), load(zoo(target_name))
    folder = TRANSLATORS / f"{source_name}--{target_name}"  # whatever the user's store holds
    translator = resolve_translator(folder, source, target)
    talks = list(dialogues.held_out(SAMPLES, seed=1))
    samples = [quality.recall_sample(target, talk) for talk in talks]
    makers = {
        "translated": conditions.translated(source, target, translator),
        "shuffled": conditions.translated(source, target, conditions.shuffled(translator)),
        "hidden": conditions.hidden(target),
    }
    scores = quality.score(target, samples, makers, step)
    timings, _ = tables.run_table(
        source, target, {"stored": translator}, tables.FIRST_TOKENS, [512], text=True, trials=3,
        clock=tables.Clock(None),
    )  # fmt: skip
    answers = [_answers(talk, source, target, translator) for talk in talks[:SHOWN]]
    return {"scores": scores, "latency": timings[0], "answers": answers}


def _answers(talk, source, target, translator) -> list[str]:
    """The question, the true value, and what each condition answers, decoded greedily."""
    import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

    from mlx_lm.generate import stream_generate as mlx_stream_generate

    from kvlingo_mlx.handover.generation import generate
    from kvlingo_mlx.models.prompts import encode

    options: dict[str, Any] = {"max_tokens": 24}

    def own(messages: list) -> str:
        tokens = encode(target, messages, False)
        responses = mlx_stream_generate(target.model, target.tokenizer, tokens, **options)
        return "".join(response.text for response in responses)

    native, alone = own(talk.messages), own(talk.messages[-1:])
    translated = generate(
        source, target, talk.messages, translator=translator, enable_thinking=False, **options
    )
    return [talk.questions[0], talk.asked[0].value, native, translated, alone]


def _print_answers(results: dict) -> None:
    for pair, result in results.items():
        columns = ["question", "truth", "native", "translated", "prefix hidden"]
        table(pair, columns, result["answers"])


def _print_quality(results: dict) -> None:
    rows = []
    for pair, result in results.items():
        for name, score in result["scores"].items():
            kl = "-" if name == "native" else f"{sum(score.kl) / len(score.kl):.3f}"
            rows.append([pair, name, f"{score.recall:.2f}", kl])
    columns = ["pair", "cache", "recall", "KL (nats per token)"]
    table(f"Recall on {SAMPLES} held-out dialogues, first askings", columns, rows)


def _print_latency(results: dict) -> None:
    columns = ["pair", "native", "switch", "accelerator"]
    rows = [
        [pair, *(ms(result["latency"].median(path)) for path in columns[1:])]
        for pair, result in results.items()
    ]
    table("Time to first token at 512 prompt tokens (ms, median of 3)", columns, rows)


def _plain(results: dict) -> dict:
    return {
        pair: {
            "scores": {name: vars(score) for name, score in result["scores"].items()},
            "latency": vars(result["latency"]),
            "answers": result["answers"],
        }
        for pair, result in results.items()
    }
