"""Pairs of the paper timed on a GPU, and the records of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.paper.gpu.switch import SwitchSettings, forms_between, seconds, time_pair
from benchmarks.paper.timing.widths import cache_layers, ends_of, nu_of, shape_of
from kvlingo_mlx.errors import KVLingoError

ROLES, PERIOD = ("source", "target"), "sliding_window_pattern"
USES = {  # what each phase has in memory
    "translation": ("translator", "states", "cache"),
    "step": ("weights", "cache"),
    "switch": ("weights", "translator", "states", "cache"),
    "re-prefill": ("weights", "cache"),
}
Listener = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class PairSettings(SwitchSettings):
    """How pairs are timed, and what of them."""

    layers: int | None = None  # at most so many of each model; None: all
    nu: int | None = None  # source layers a target layer reads; None: the paper's for the pair
    gemm: int = 8192  # width of the large product whose rate is measured


def plan(pair: str, settings: PairSettings) -> dict[str, Any]:
    """What is timed of a pair, as plain data; nothing is made.

    Raises:
        ValueError: There is no such pair, or it cannot be read by so many source layers.
    """
    named = dict(zip(ROLES, ends_of(pair), strict=True))
    nu = settings.nu or nu_of(**named)
    ends = {role: shape_of(name, settings.layers) for role, name in named.items()}
    depth = ends["source"]["num_hidden_layers"]
    period = max(shape.get(PERIOD, 1) for shape in ends.values())
    if nu > depth:
        raise ValueError(
            f"nu is {nu}; {named['source']} has {depth} layers here: give 1 to {depth}"
        )
    if settings.layers is not None and settings.layers < period:
        raise ValueError(f"layers is {settings.layers}; of {pair} every {period}th sees all: more")
    longest = max(settings.tokens)
    room = min(shape["max_position_embeddings"] for shape in ends.values())
    if longest >= room:
        raise ValueError(f"tokens hold {longest}; the context of {pair} is {room}: give fewer")
    facts = {"layers": "num_hidden_layers", "kv_heads": "num_key_value_heads",
             "head_dim": "head_dim", "windows": "sliding_window"}  # fmt: skip
    return {
        **named,
        "nu": nu,
        "forms": list(forms_between(*map(cache_layers, ends.values()))),
        **{fact: {r: s.get(name) for r, s in ends.items()} for fact, name in facts.items()},
        "tokens": list(settings.tokens),
        "dtype": settings.dtype,
    }


def time_pairs(
    pairs: Sequence[str], settings: PairSettings, listen: Listener = lambda pair, found: None
) -> dict[str, Any]:
    """Time pairs one after the other; returns the results of a record of kind ``cuda_switch``.

    Args:
        pairs: ``SOURCE:TARGET`` of ``SHAPES``, or those of a label in ``PAIRS`` (:mod:`.widths`).
        settings: How they are timed.
        listen: Called with each pair and length's findings as they come; what was told is all
            that is left of a run that fails.

    Raises:
        ValueError: As for :func:`plan`.
        KVLingoError: As for :func:`~benchmarks.paper.gpu.switch.time_pair`.
    """
    plans = {pair: plan(pair, settings) for pair in pairs}
    check_gpu(settings)
    torch.manual_seed(0)
    rate = rates(settings)
    results: dict[str, Any] = {"rates": rate, "plans": plans, "pairs": {}}
    for pair in pairs:
        ends = [(name, shape_of(name, settings.layers)) for name in ends_of(pair)]
        for found in time_pair(ends[0], ends[1], plans[pair]["nu"], settings):
            whole = completed(found, rate)
            results["pairs"].setdefault(pair, []).append(whole)
            listen(pair, whole)
        gc.collect()
    return results


def check_gpu(settings: SwitchSettings) -> None:
    """Refuse (KVLingoError) a machine without the GPU that is asked for."""
    if settings.device != "cpu" and not torch.cuda.is_available():
        raise KVLingoError(
            "PyTorch finds no CUDA GPU here; run this on a machine that has one, or give --device "
            "cpu for a trial of tiny shapes"
        )


def config_of_record(pairs: Sequence[str], settings: PairSettings) -> dict[str, Any]:
    """The settings as a record keeps them, with what makes a run comparable."""
    return {**asdict(settings), "pairs": list(pairs), "batch": 1, "stack": "transformers"}


def rates(settings: PairSettings) -> dict[str, float]:
    """FLOP/s of a large product, bytes/s (read and written) of a large copy; the best of some."""
    device, size = settings.device, settings.gemm
    there: dict[str, Any] = {"device": device, "dtype": getattr(torch, settings.dtype)}
    a, b = (torch.randn(size, size, **there) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, b, out=out)

    product = min(seconds(products, device) for _ in range(10)) / 4
    long = torch.randn(16 * size * size, **there)
    other = torch.empty_like(long)
    copied = min(seconds(lambda: other.copy_(long), device) for _ in range(10))
    return {
        "gemm_flops": 2 * size**3 / product,
        "copy_bytes": 2 * long.numel() * long.element_size() / copied,
    }


def completed(found: Mapping[str, Any], rate: Mapping[str, float]) -> dict[str, Any]:
    """A length's findings with what follows from them: shares of rates, ratios, peaks."""
    rows = {name: dict(row) for name, row in found["rows"].items()}
    for row in rows.values():
        for work, best in (("flops", "gemm_flops"), ("bytes", "copy_bytes")):
            if work in row:
                row[f"of_{best.split('_')[0]}_rate"] = row[work] / row["median_s"] / rate[best]
    ratios = {}
    for kind in ("", " (graph)"):  # of graphs both are graphs, round by round
        both = [rows.get(f"{name}{kind}", {}).get("samples_s") for name in ("re-prefill", "switch")]
        if all(both):
            pairs = zip(*both, strict=True)  # type: ignore[arg-type]
            ratios[f"re-prefill / switch{kind}"] = [slow / quick for slow, quick in pairs]
    peaks = {  # what each phase needs at most, had it nothing in memory but what it uses
        name: more + sum(found["held_bytes"][part] for part in USES[name])
        for name, more in found["extra_bytes"].items()
        if more is not None
    }
    return {**found, "rows": rows, "ratios": ratios, "peak_bytes": peaks}


def in_lines(pair: str, found: Mapping[str, Any]) -> list[str]:
    """One length's findings as lines of text."""
    lines = [f"{pair.replace(':', ' to ')}, {found['tokens']} tokens"]
    for name, row in found["rows"].items():
        line = (
            f"  {name:44s} {1e3 * row['median_s']:10.3f} ms  (min {1e3 * row['min_s']:.3f}, "
            f"IQR {1e3 * row['iqr_s']:.3f})"
        )
        if "flops" in row:
            line += (
                f"  {row['flops'] / row['median_s'] / 1e12:.3g} TFLOP/s, "
                f"{100 * row['of_gemm_rate']:.0f} % of the product's rate, "
                f"{100 * row['of_copy_rate']:.0f} % of the copy's"
            )
        lines.append(line)
    for name, each in found["ratios"].items():
        lines.append(f"  {name}: {np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    if found["prefill_chunk"] < found["tokens"]:
        lines.append(f"  re-prefill in chunks of {found['prefill_chunk']}")
    if found["peak_bytes"]:
        listed = (f"{name} {n / 1e9:.2f} GB" for name, n in found["peak_bytes"].items())
        lines.append(f"  most memory: {', '.join(listed)}")
    lines += [f"  {name} is no CUDA graph: {why}" for name, why in found["not_captured"].items()]
    return lines
