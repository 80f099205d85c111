"""What a step of self-distillation costs beside the bare passes that it cannot do without.

    python benchmarks/training_throughput.py --source qwen3-0.6b --target qwen3-1.7b --layers 4 \
        --prefix 4096 --continuation 512                                    # a CPU
    python benchmarks/training_throughput.py --device cuda --dtype bfloat16 \
        --prefix 16384 --continuation 2048                                  # a GPU, full depth

Random weights at true widths; ``--layers`` cuts both depths. Bare passes: the source over the
prefix, the target over the prefix, the target over the continuation on a cache, and one
backward pass over the continuation down to that cache, logits of the whole vocabulary
included. Passes and steps take turns; medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Distillation
from kvlingo_mlx.training.on_torch.model import TorchModel
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runs import start_runs
from kvlingo_mlx.training.runtime import pair_of

VOCABULARY = 151_936
DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
SHAPES = {
    "qwen3-0.6b": dict(zip(DENSE, (1024, 3072, 28, 16, 8), strict=True)),
    "qwen3-1.7b": dict(zip(DENSE, (2048, 6144, 28, 16, 8), strict=True)),
    "qwen3-4b": dict(zip(DENSE, (2560, 9728, 36, 32, 8), strict=True)),
    "qwen3-30b-a3b": dict(zip(DENSE, (2048, 6144, 48, 32, 4), strict=True))
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
       "norm_topk_prob": True},
}  # fmt: skip
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16, FLOP/s


class NoTokenizer:
    """Random token ids need none."""

    def get_vocab(self) -> dict[str, int]:
        return {}


def build(name: str, args: argparse.Namespace) -> TorchModel:
    """A frozen model of random weights at a true model's widths."""
    shape = dict(SHAPES[name])
    shape["num_hidden_layers"] = min(args.layers or 10**9, shape["num_hidden_layers"])
    moe = "num_experts" in shape
    config = (Qwen3MoeConfig if moe else Qwen3Config)(
        **shape, head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with torch.device(args.device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, args.dtype))
        model = (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config)
        torch.set_default_dtype(previous)
    model.set_attn_implementation("sdpa")
    model = model.eval().requires_grad_(False)
    return TorchModel(model, NoTokenizer(), config.to_dict(), name)


def start(source: TorchModel, target: TorchModel, args: argparse.Namespace) -> Distillation:
    """A training of one translator, its maps random."""
    depths = [len(model.attentions) for model in (source, target)]
    config = TranslatorConfig(source.spec(), target.spec(), relative_depth(*depths, args.nu))
    rng = np.random.default_rng(0)
    arrays = {}
    for m in maps_of(config):
        shape = (m.outputs, m.inputs)
        arrays[f"{m.name}.weight"] = rng.normal(size=shape).astype(np.float32) / m.inputs**0.5
        arrays[f"{m.name}.bias"] = np.zeros(m.outputs, np.float32)
    pair = pair_of(source, target)
    runs = start_runs(pair, config, arrays, (1e-4,))
    stream = OneSample(random_sample(args))
    return Distillation(pair, runs, stream, [], Recipe(batch=1))


class OneSample:
    def __init__(self, sample: Sample) -> None:
        self.only = sample

    def sample(self, index: int) -> Sample:
        return self.only


def random_sample(args: argparse.Namespace) -> Sample:
    ids = np.random.default_rng(1).integers(VOCABULARY, size=args.prefix + args.continuation)
    return Sample(tuple(ids[: args.prefix].tolist()), tuple(ids[args.prefix :].tolist()))


def bare_passes(source: TorchModel, target: TorchModel, sample: Sample) -> dict[str, Callable]:
    """The four passes, each to be timed alone."""
    tokens = (sample.prefix[-1], *sample.continuation[:-1])
    labels = torch.tensor(sample.continuation, device=target.device)
    count, spec = len(sample.prefix) - 1, target.geometry.layers[0]
    shape = (1, spec.kv_heads, count, spec.key_dim)
    native = [
        [torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2)]
        for _ in target.attentions
    ]

    def loss(learns: bool) -> torch.Tensor:
        leaves = [tuple(a.detach().requires_grad_(learns) for a in pair) for pair in native]
        with torch.set_grad_enabled(learns):
            hidden = target.hidden(tokens, target.cache(leaves, count))
            return cross_entropy(target.logits(hidden), labels)

    @torch.no_grad()
    def reads(model: TorchModel) -> None:
        model.hidden(sample.prefix[:-1])

    return {
        "source prefix": lambda: reads(source),
        "target prefix": lambda: reads(target),
        "continuation": lambda: loss(False),
        "continuation and backward": lambda: loss(True).backward(),
    }


def seconds(action: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--target", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--continuation", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    source, target = build(args.source, args), build(args.target, args)
    training = start(source, target, args)
    passes = bare_passes(source, target, training.stream.sample(0))
    actions = {**passes, "step": training.advance}
    flops = {}
    for name, action in actions.items():  # also the warm-up
        with FlopCounterMode(display=False) as counter:
            action()
        flops[name] = counter.get_total_flops()
    times: dict[str, list[float]] = {name: [] for name in actions}
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.trials):
        for name, action in actions.items():
            times[name].append(seconds(action, args.device))
    medians = {name: float(np.median(t)) for name, t in times.items()}
    # "continuation and backward" holds its own forward pass, so "continuation" is information only.
    needed = ("source prefix", "target prefix", "continuation and backward")
    bare = sum(medians[name] for name in needed)
    each = [t / sum(times[n][i] for n in needed) for i, t in enumerate(times["step"])]
    for name, value in medians.items():
        print(f"{name:28s} {value:9.3f} s   {flops[name] / 1e12:8.3f} TFLOP   "
              f"{flops[name] / value / 1e12:8.2f} TFLOP/s")  # fmt: skip
    tokens = args.prefix + args.continuation
    print(f"step / bare passes           {medians['step'] / bare:.2f} "
          f"({min(each):.2f} to {max(each):.2f}); {tokens / medians['step']:.0f} tokens/s; "
          f"FLOP ratio {flops['step'] / sum(flops[n] for n in needed):.2f}")  # fmt: skip
    results = {"times": times, "flops": flops, "ratio": medians["step"] / bare, "ratios": each}
    if args.device != "cpu":
        name = torch.cuda.get_device_name()
        results |= {"gpu": name, "peak_bytes": torch.cuda.max_memory_allocated()}
        peak = next((p for chip, p in PEAKS.items() if chip in name), None)
        if peak:
            results["fraction_of_peak"] = flops["step"] / medians["step"] / peak
        share = 100 * results.get("fraction_of_peak", float("nan"))
        print(f"{name}: {results['peak_bytes'] / 1e9:.1f} GB, {share:.0f} % of bfloat16 peak")
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("training_throughput", config, results))


if __name__ == "__main__":
    main()
