"""What a switch of models costs, by the length of the conversation and by strategy.

    python benchmarks/switch_cost.py [--lengths 2048 4096 8192 16384] [--json FILE]

Two random models of Qwen3's shape, of 3 and 4 layers, on one conversation: `large` holds a context
of the given length, `small` takes a question and answers it (a span of 64 tokens in all), and
`large` comes back. Measured are the seconds that bring its line up to date, and those from the
call to its first token. The message with which it comes back is a single token, which the first
decoding step runs: nothing else is left to read. So the tokenizer is the zoo's, but its template
puts messages one after another and nothing between them, and no token ends an answer early.

Then the switch that was translated for beforehand (`eager`) beside single steps:

- `no switch`: the same, by a conversation in which `large` is alone and wrote everything itself;
- `mlx-lm`: its `stream_generate` from a cache of that length, to the first token;
- `step`: the model called on one token and that cache, and the largest logit taken;
- `step, next queued`: the same with the step after it queued before the first is awaited, as
  mlx-lm does. On a CPU, whose queue is short, that alone takes about as long as two steps.

All alternate in one run; medians, and ratios within a round. Of these steps the processor time (of
all threads) is kept as well, which a busy machine disturbs less. After every round the
conversations are taken back by what was asked (`undo`), so each length stays what it is. Left out
is the first round, in which the caches grow: mlx-lm copies one every 256 tokens, whoever writes.

One JSON line a length.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from transformers import AutoTokenizer
from translation_cost import model_of_shape, random_translator

from kvlingo_mlx import Conversation
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.translators.base import Translator

LAYERS = {"small": 3, "large": 4}
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
STRATEGIES = {
    "alternated": {"eager": False},
    "eager": {"eager": True},
    "reprefill": {"switching": "reprefill", "eager": False},
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
Times = tuple[float, float]  # seconds, and seconds of processor time
ONE_TOKEN = "."
CONTEXT = 40960  # what model_of_shape gives its models


def plain_tokenizer() -> TokenizerWrapper:
    """The zoo's tokenizer; a conversation is its messages' tokens and no others."""
    tokenizer = AutoTokenizer.from_pretrained(zoo("tiny-qwen3-s"), model_max_length=CONTEXT)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, None
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


def random_models() -> dict[str, LanguageModel]:
    tokenizer = plain_tokenizer()
    models = {}
    for name, layers in LAYERS.items():
        model = model_of_shape(
            "qwen3", layers, KV_HEADS, HEAD_DIM, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
            num_attention_heads=HEADS, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        models[name] = dataclasses.replace(model, tokenizer=tokenizer, name=f"random {name}")
        assert models[name].cache_dtype == mx.float32  # learnt once, not at the first switch
    return models


def text_of(tokens: int, first: int = 0) -> str:
    """Words that are one token each; another ``first`` begins with another word."""
    words = dialogues.NAMES
    return "".join(f" {words[(first + index) % len(words)]}" for index in range(tokens))


def settle() -> None:
    """Wait for what a reply has left to be computed, such as an eager translation."""
    mx.synchronize(generation_stream)
    mx.synchronize()


def ask(
    conversation: Conversation, name: str, message: str, max_tokens: int
) -> dict[str, float | int]:
    """One reply: seconds to its first token, and after its last one until all is done."""
    settle()
    first = first_cpu = 0.0
    last, started_cpu = time.perf_counter(), time.process_time()
    for response in conversation.stream_reply(name, message, max_tokens=max_tokens):
        first_cpu = first_cpu or time.process_time() - started_cpu
        first, last = first or response.ttft_s, time.perf_counter()
    settle()
    switch = conversation.last_switch
    assert switch is not None
    return {
        "first_token_s": first, "first_token_cpu_s": first_cpu,
        "after_s": time.perf_counter() - last, "switch_s": switch.seconds,
        "kept": switch.kept, "translated": switch.translated, "read": switch.read,
    }  # fmt: skip


def begun(conversation: Conversation, tokens: int) -> Conversation:
    """A conversation of ``tokens`` tokens, which ``large`` has read; one is its answer."""
    ask(conversation, "large", text_of(tokens - 1), 1)
    assert len(conversation.transcript.tokens) == tokens
    return conversation


def back(conversation: Conversation, writer: str, index: int, span: int) -> dict[str, float | int]:
    """``writer`` takes a question and answers it, ``large`` comes back; then both are undone."""
    written = ask(conversation, writer, text_of(span // 2, index), span - span // 2)
    found = ask(conversation, "large", ONE_TOKEN, 1)
    for _ in range(2):
        conversation.undo()
    return {**found, "behind_answer_s": written["after_s"]}


def all_switches(
    models: dict[str, LanguageModel], translators: list[Translator], tokens: int,
    args: argparse.Namespace,
) -> dict[str, list[dict]]:  # fmt: skip
    """By strategy, what each round found."""
    talks = {
        name: begun(Conversation(models, translators, verbatim=True, **options), tokens)
        for name, options in STRATEGIES.items()
    }
    found: dict[str, list[dict]] = {name: [] for name in talks}
    for index in range(args.trials + 1):
        for name, talk in talks.items():
            found[name].append(back(talk, "small", index, args.span))
    return found


def all_steps(
    models: dict[str, LanguageModel], translators: list[Translator], tokens: int,
    args: argparse.Namespace,
) -> dict[str, list[Times]]:  # fmt: skip
    """What the first token takes, by who decodes it."""
    eager = begun(Conversation(models, translators, verbatim=True), tokens)
    alone = begun(Conversation({"large": models["large"]}, verbatim=True), tokens)
    bare = single_steps(models["large"], tokens + args.span)
    found: dict[str, list[Times]] = collections.defaultdict(list)
    for index in range(args.steps + 1):
        for name, talk, writer in (("eager", eager, "small"), ("no switch", alone, "large")):
            reply = back(talk, writer, index, args.span)
            found[name].append((reply["first_token_s"], reply["first_token_cpu_s"]))
        for name, times in next(bare).items():
            found[name].append(times)
    return found


def single_steps(model: LanguageModel, tokens: int) -> Iterator[dict[str, Times]]:
    """What one decoding step at a length takes, by mlx-lm and bare, again and again."""
    held = model.tokenizer.encode(text_of(tokens), add_special_tokens=False)
    last = model.tokenizer.encode(ONE_TOKEN, add_special_tokens=False)
    assert len(last) == 1
    cache = conditions.native(model)([*held, *last])

    def queued(token: mx.array) -> mx.array:
        found = mx.argmax(model.model(token, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(found)
        return found

    def two() -> None:
        first = queued(mx.array([last]))
        queued(first)
        mx.eval(first)

    actions = {
        "mlx-lm": lambda: next(mlx_stream_generate(
            model.model, model.tokenizer, last, max_tokens=1, prompt_cache=cache
        )),
        "step": lambda: mx.eval(queued(mx.array([last]))),
        "step, next queued": two,
    }  # fmt: skip
    while True:
        found = {}
        for name, action in actions.items():
            settle()
            started, started_cpu = time.perf_counter(), time.process_time()
            action()
            found[name] = time.perf_counter() - started, time.process_time() - started_cpu
            settle()
            trim_prompt_cache(cache, cache[0].offset - tokens)
        yield found


def run(
    models: dict[str, LanguageModel], translators: list[Translator], tokens: int,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    found: dict[str, Any] = {"tokens": tokens, "switches": {}, "steps": {}, "ratios": {}}
    if args.trials:
        found["switches"] = all_switches(models, translators, tokens, args)
    if args.steps:
        found["steps"] = all_steps(models, translators, tokens, args)
        found["ratios"] = ratios(found["steps"])
    return found


def ratios(steps: dict[str, list[Times]]) -> dict[str, dict[str, float]]:
    """First token after an eager switch over each of the others, round by round."""
    found = {}
    for name in steps.keys() - {"eager"}:
        rounds = zip(steps["eager"][1:], steps[name][1:], strict=True)
        values, processor = zip(*((a[0] / b[0], a[1] / b[1]) for a, b in rounds), strict=True)
        found[f"eager / {name}"] = {
            "median": measure.median(values), "min": min(values), "max": max(values),
            "processor": measure.median(processor), "ratios": values, "processor_ratios": processor,
        }  # fmt: skip
    return dict(sorted(found.items()))


def report(found: dict[str, Any]) -> None:
    print(f"{found['tokens']} tokens", flush=True)
    for name, samples in found["switches"].items():
        middle = functools.partial(median_of, samples[1:])
        print(
            f"  {name:11s} switch {1e3 * middle('switch_s'):9.1f} ms, first token "
            f"{1e3 * middle('first_token_s'):9.1f} ms, behind the answer before "
            f"{1e3 * middle('behind_answer_s'):6.1f} ms; translated {samples[-1]['translated']}, "
            f"read {samples[-1]['read']}"
        )
    for name, times in found["steps"].items():
        wall, processor = (1e3 * measure.median(column[1:]) for column in zip(*times, strict=True))
        print(f"  {name:17s} {wall:8.2f} ms to the first token, {processor:8.2f} of the processor")
    for name, ratio in found["ratios"].items():
        print(
            f"  {name}: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}), "
            f"of processor time {ratio['processor']:.3f}"
        )


def median_of(samples: list[dict], name: str) -> float:
    return measure.median([sample[name] for sample in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--span", type=int, default=64, help="tokens of a question and its answer")
    parser.add_argument("--trials", type=int, default=3, help="of every strategy; 0: leave out")
    parser.add_argument("--steps", type=int, default=15, help="of single steps; 0: leave out")
    parser.add_argument("--json", help="append a record a length to this file")
    args = parser.parse_args()
    models = random_models()
    small, large = models.values()
    translators = [random_translator(*pair, 1) for pair in ((small, large), (large, small))]
    for tokens in args.lengths:
        found = run(models, translators, tokens, args)
        report(found)
        if args.json:
            config = {k: v for k, v in vars(args).items() if k not in ("json", "lengths")}
            measure.append_json(args.json, measure.record("switch_cost", config, found))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
