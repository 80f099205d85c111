"""The floating-point operations that a step of self-distillation needs, by the shapes alone.

Products with weights, and the scores and sums of what causal attention sees. What a runtime does
beside them (recomputing, scores that its mask drops) is none of it, so a rate of them is that of
MFU. PyTorch's own counter counts whole squares, and of some releases fails at grouped attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.widths import cache_layers
from kvlingo_mlx.format.maps import Map

SOURCE, PREFIX, TEACHER = "source prefix", "target prefix", "continuation"
STUDENT, STEP = "continuation and backward", "step"
NEEDED = (SOURCE, PREFIX, TEACHER, STUDENT)
# FLOP/s of dense 16-bit products by their makers' data sheets; the first name that fits counts.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


def peak_of(gpu: str | None, dtype: str) -> float | None:
    """The rate of MFU's 1; None for another GPU, for none, or in float32."""
    fits = (peak for name, peak in PEAKS.items() if gpu and name in gpu)
    return next(fits, None) if dtype in ("bfloat16", "float16") else None


class ModelFlops:
    """The operations of a frozen model's passes, from its ``config.json``."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        width, heads = shape["hidden_size"], shape["head_dim"] * shape["num_attention_heads"]
        self.windows = [layer.window for layer in cache_layers(shape)]
        self.depth, self.head = len(self.windows), 2 * width * shape["vocab_size"]
        self.sides = 4 * width * shape["head_dim"] * shape["num_key_value_heads"]
        self.queries, self.seen = 2 * width * heads, 4 * heads
        self.behind = 2 * width * heads + 6 * width * shape["intermediate_size"]
        if experts := shape.get("num_experts"):
            chosen = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
            self.behind = 2 * width * (heads + experts + 3 * chosen)
        self.layer = self.sides + self.queries + self.behind

    def prefix(self, tokens: int) -> int:
        """A prefix is read up to the last layer's keys and values."""
        last = self.layer - self.sides
        return tokens * (self.depth * self.layer - last) + sum(self._attention(tokens, 0)[:-1])

    def continuation(self, tokens: int, before: int) -> int:
        """Tokens after ``before`` others are read, and their logits made."""
        linear = self.depth * self.layer + self.head
        return tokens * linear + sum(self._attention(tokens, before))

    def backward(self, tokens: int, before: int) -> int:
        """The gradients of the cache's entries; no weight has one, nor has the first input."""
        attention = self._attention(tokens, before)
        linear = self.depth * self.layer - self.sides - self.queries + self.head
        return tokens * linear + 2 * sum(attention) - attention[0] // 2

    def _attention(self, tokens: int, before: int) -> list[int]:
        """Each layer's scores and sums."""
        ends = range(before + 1, before + tokens + 1)
        return [self.seen * sum(min(end, most or end) for end in ends) for most in self.windows]


def flops_of(
    source: ModelFlops, target: ModelFlops, maps: Iterable[Map], prefix: int, continuation: int
) -> dict[str, int]:
    """The bare passes by name, and a step: these, the maps and the gradients of their weights."""
    read = prefix - 1  # the target runs the prefix's last token itself
    found = {
        SOURCE: source.prefix(read),
        PREFIX: target.prefix(read),
        TEACHER: (teacher := target.continuation(continuation, read)),
        STUDENT: teacher + target.backward(continuation, read),
    }
    learnt = sum(4 * read * m.outputs * m.inputs for m in maps)
    return found | {STEP: sum(found.values()) + learnt}
