"""The PyTorch side of `training_throughput.py`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.tokenization.samples import Sample

VOCABULARY = 151_936  # Qwen3's
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


class Side:
    """See :class:`training_throughput.Side`."""

    def __init__(self, args: argparse.Namespace, sample: Sample) -> None:
        if args.threads:
            torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        self.ends = build(args.source, args), build(args.target, args)
        self.sample, target = sample, self.ends[1]
        count, spec = len(sample.prefix) - 1, target.geometry.layers[0]
        shape = (1, spec.kv_heads, count, spec.key_dim)
        self._native = [
            [torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2)]
            for _ in target.attentions
        ]
        self._gpu = args.device != "cpu"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    @torch.no_grad()
    def read(self, model: TorchModel) -> None:
        model.hidden(self.sample.prefix[:-1])

    def continue_(self, *, backward: bool) -> None:
        target, sample = self.ends[1], self.sample
        tokens = (sample.prefix[-1], *sample.continuation[:-1])
        labels = torch.tensor(sample.continuation, device=target.device)
        leaves = [tuple(a.detach().requires_grad_(backward) for a in p) for p in self._native]
        with torch.set_grad_enabled(backward):
            hidden = target.hidden(tokens, target.cache(leaves, len(sample.prefix) - 1))
            loss = cross_entropy(target.logits(hidden), labels)
        if backward:
            loss.backward()

    def timed(self, action: Callable[[], object]) -> float:
        if self._gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        if self._gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def counted(self, action: Callable[[], object]) -> int | None:
        with FlopCounterMode(display=False) as counter:
            action()
        return int(counter.get_total_flops())

    def facts(self) -> dict[str, Any]:
        if not self._gpu:
            return {}
        name = torch.cuda.get_device_name()
        found = {"gpu": name, "peak_bytes": torch.cuda.max_memory_allocated()}
        peak = next((p for chip, p in PEAKS.items() if chip in name), None)
        return found | ({} if peak is None else {"peak_flops": peak})


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
