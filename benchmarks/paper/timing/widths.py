"""The pairs that are timed on a GPU, by the paper's tables and figures; no PyTorch.

Gemma-4 is in none of them: no table of the paper times it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.paper.timing.shapes import GEOMETRIES
from benchmarks.paper.training.paper_pairs import NU, best_of
from kvlingo_mlx.format.geometry import LayerGeometry

# The names under which the paper's recipes know these (``training/paper_pairs``).
RELEASED = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-4b": "Qwen3-4B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gemma-3-4b": "gemma-3-4b-it",
    "gemma-3-12b": "gemma-3-12b-it",
}


def released(name: str) -> str:
    """The released model of a geometry's name, "random" before it or not; else the name itself."""
    return RELEASED.get(name.removeprefix("random "), name)


def _tiny(name: str, **more: Any) -> dict[str, Any]:
    small = {"vocab_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {**GEOMETRIES[name], **small, **more}


# For trials without a GPU: each of the code paths at a size that a CPU runs in a moment.
TINY = {
    "tiny-s": _tiny("qwen3-0.6b", hidden_size=32, intermediate_size=64, num_hidden_layers=2),
    "tiny-l": _tiny("qwen3-1.7b", hidden_size=48, intermediate_size=96, num_hidden_layers=3),
    "tiny-moe": _tiny(
        "qwen3-30b-a3b", hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_key_value_heads=1, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
    ),
    "tiny-gemma-s": _tiny(
        "gemma-3-4b", hidden_size=32, intermediate_size=64, num_hidden_layers=5,
        num_key_value_heads=1, sliding_window=8, sliding_window_pattern=2,
    ),
    "tiny-gemma-l": _tiny(
        "gemma-3-12b", hidden_size=48, intermediate_size=96, num_hidden_layers=7,
        sliding_window=8, sliding_window_pattern=3,
    ),
}  # fmt: skip
ATTENTION = {name: s for name, s in GEOMETRIES.items() if "linear_num_key_heads" not in s}
SHAPES = ATTENTION | TINY


def _both(small: str, large: str) -> tuple[str, str]:
    return f"{large}:{small}", f"{small}:{large}"


TOKENS = (2048, 4096, 8192, 16384, 32768)
# By the label of the paper's table or figure. The tables list the smaller target first.
PAIRS = {
    "tab:cost": (*_both("qwen3-0.6b", "qwen3-1.7b"), *_both("qwen3-4b", "qwen3-8b")),
    "fig:nsrc_ttft": _both("qwen3-1.7b", "qwen3-4b"),
    "tab:xdepth": _both("qwen3-0.6b", "qwen3-8b"),
    "tab:gemma3": _both("gemma-3-4b", "gemma-3-12b"),
    "app:tab:moe": _both("qwen3-4b", "qwen3-30b-a3b"),
}


def ends_of(pair: str) -> tuple[str, str]:
    """The source and target of ``SOURCE:TARGET``.

    Raises:
        ValueError: These are not two known shapes.
    """
    names = pair.split(":")
    if len(names) != 2 or not set(names) <= set(SHAPES):
        raise ValueError(f"the pair is {pair!r}; give SOURCE:TARGET of {', '.join(SHAPES)}")
    return names[0], names[1]


def shape_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """A shape's config, of at most ``layers`` layers."""
    depth = min(layers or math.inf, SHAPES[name]["num_hidden_layers"])
    return {**SHAPES[name], "num_hidden_layers": int(depth)}


def nu_of(source: str, target: str) -> int:
    """The source layers that a target layer reads in the paper's recipe of a pair; 1 for others."""
    best = best_of(released(source), released(target))
    return NU if best is None else best.nu


def cache_layers(shape: Mapping[str, Any]) -> tuple[LayerGeometry, ...]:
    """The cache layers of a config."""
    heads, dim = shape["num_key_value_heads"], shape["head_dim"]
    period, window = shape.get("sliding_window_pattern", 1), shape.get("sliding_window")
    found = []
    for i in range(shape["num_hidden_layers"]):
        found.append(
            LayerGeometry(i, heads, dim, dim)
            if (i + 1) % period == 0
            else LayerGeometry(i, heads, dim, dim, "sliding", window)
        )
    return tuple(found)
