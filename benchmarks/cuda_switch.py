"""What a switch costs on a GPU: the components of the paper's table, beside a re-prefill.

    python benchmarks/cuda_switch.py --json benchmarks/results/cuda_switch.jsonl        # a GPU
    python benchmarks/cuda_switch.py --device cpu --dtype float32 --pairs tiny-s:tiny-l \
        --tokens 40 --gemm 64                                                           # a trial

Random weights at true widths (``--layers`` cuts depths). For each pair and length n:

- translation: of n tokens' recorded states into the target's cache; products, k_norm, RoPE, cast
  and layout. Maps that mix heads and head-wise ones, keys taken before k_norm; maps that mix heads,
  keys taken after RoPE, out of the source's own cache. Each by every method there is
  (kvlingo_mlx/training/fast_translation.py), and beside all of it the bare products alone.
- step: the target reads one token over a cache of n; its logits.
- switch: translation (mixing, before k_norm, by the fastest method) and step, measured as one.
- re-prefill: the target reads n tokens, with cache; the last one's logits. One token less than a
  switch ends with. In chunks, where a whole one does not fit in memory.

The fastest translation and the last three also as CUDA graphs, which spare both paths what Python
and launches take; a ratio is one of two times of one kind. Wall clock between synchronisations.
Every action is warmed up until its times settle, then all take turns; medians. Translations are
compared with float32 PyTorch before anything is timed. Fractions are of the rates of a large
matrix product and of a large copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvlingo_mlx.cuda.fast_translation import METHODS, FastTranslation
from kvlingo_mlx.cuda.maps import Cut
from kvlingo_mlx.cuda.memory import Memory
from kvlingo_mlx.cuda.tile import Tile
from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.training.on_torch.model import TorchModel

COMMON = {
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
TINY = {**COMMON, "vocab_size": 64, "head_dim": 16, "num_key_value_heads": 2}
VARIED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": COMMON | dict(zip(VARIED, (1024, 3072, 28, 16), strict=True)),
    "qwen3-1.7b": COMMON | dict(zip(VARIED, (2048, 6144, 28, 16), strict=True)),
    "qwen3-4b": COMMON | dict(zip(VARIED, (2560, 9728, 36, 32), strict=True)),
    "qwen3-8b": COMMON | dict(zip(VARIED, (4096, 12288, 36, 32), strict=True))
    | {"tie_word_embeddings": False},
    "tiny-s": TINY | dict(zip(VARIED, (32, 64, 2, 4), strict=True)),
    "tiny-l": TINY | dict(zip(VARIED, (48, 96, 3, 4), strict=True)),
}  # fmt: skip
PAIRS = ["qwen3-0.6b:qwen3-1.7b", "qwen3-1.7b:qwen3-0.6b", "qwen3-4b:qwen3-8b",
         "qwen3-8b:qwen3-4b"]  # fmt: skip
TOKENS = [2048, 4096, 8192, 16384, 32768]
# Capture point and whether maps mix heads.
FORMS = {
    "mixing": ("pre_norm", True),
    "head-wise": ("pre_norm", False),
    "mixing, after RoPE": ("post_rope", True),
}
CHECKED = 200  # tokens that are compared
ERRORS = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-4}
SETTLED, MOST_WARM_UPS = 0.05, 10
Action = Callable[[], Any]


class NoTokenizer:
    """Random token ids need none."""

    def get_vocab(self) -> dict[str, int]:
        return {}


# ---- models, translators, states -----------------------------------------------------------


def depth(name: str, args: argparse.Namespace) -> int:
    return min(args.layers or 10**9, SHAPES[name]["num_hidden_layers"])


def build_target(name: str, args: argparse.Namespace) -> TorchModel:
    """A frozen model of random weights at a true model's widths."""
    config = Qwen3Config(**SHAPES[name] | {"num_hidden_layers": depth(name, args)})
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        with torch.device(args.device):
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation("sdpa")
    model = model.eval().requires_grad_(False)
    return TorchModel(model, NoTokenizer(), config.to_dict(), name)


def source_spec(name: str, args: argparse.Namespace) -> ModelSpec:
    """What a translator knows of its source; the source itself is not needed."""
    heads, dim = (SHAPES[name][n] for n in ("num_key_value_heads", "head_dim"))
    layers = tuple(LayerGeometry(i, heads, dim, dim) for i in range(depth(name, args)))
    return ModelSpec(name, None, "qwen3", dict.fromkeys(("geometry", "norms", "tokenizer")), layers)


def translators(
    source: ModelSpec, target: TorchModel, positions: int
) -> dict[str, tuple[FastTranslation, FastTranslation]]:
    """By form, a random translator in the target's dtype, and the same in float32."""
    found = {}
    for form, (capture, mixing) in FORMS.items():
        assignment = relative_depth(len(source.layers), len(target.attentions))
        config = TranslatorConfig(
            source, target.spec(), assignment, head_mixing=mixing, capture=capture
        )
        tensors = {}
        for m in maps_of(config):
            shape = (*(() if m.heads is None else (m.heads,)), m.outputs, m.inputs)
            drawn = torch.randn(shape, device=target.device) / math.sqrt(m.inputs)
            tensors[f"{m.name}.weight"] = drawn.to(target.dtype)
        build = functools.partial(FastTranslation.build, config, tensors, target, positions)
        found[form] = build(), build(torch.float32)
    return found


@dataclasses.dataclass(frozen=True)
class Scene:
    """One pair at one length: what all actions share."""

    target: TorchModel
    states: tuple[torch.Tensor, torch.Tensor]  # (Ls, n, Hs * Ds) each
    memory: Memory
    ids: torch.Tensor
    num_tokens: int

    def given(self, form: str) -> list[torch.Tensor]:
        """States as a form finds them: after RoPE, in a cache (the same numbers, read anew)."""
        if FORMS[form][0] != "post_rope":
            return list(self.states)
        dim = self.target.geometry.layers[0].key_dim  # the pairs' own
        layers, tokens, width = self.states[0].shape
        return [array.view(layers, width // dim, tokens, dim) for array in self.states]

    def read(self, start: int, end: int, chunk: int) -> torch.Tensor:
        """Logits of token ``end - 1``, after the cache's first ``start`` tokens."""
        cache, decoder = self.memory.cache(start), self.target.family.text(self.target.model)
        hidden = None
        for begin in range(start, end, chunk):
            ids = self.ids[:, begin : min(begin + chunk, end)]
            hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state
        assert hidden is not None
        return self.target.logits(hidden[0, -1:])

    def step(self) -> torch.Tensor:
        return self.read(self.num_tokens, self.num_tokens + 1, 1)

    def bare(self, out: torch.Tensor, maps: Sequence[torch.Tensor]) -> None:
        """The products alone, two of all layers, out of place; both sides into one array."""
        for states, stacked in zip(self.states, maps, strict=True):
            torch.bmm(states[: len(stacked)], stacked, out=out)


def make_scene(source: ModelSpec, target: TorchModel, num_tokens: int) -> Scene:
    there: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    widths = (source.layers[0].width(side) for side in SIDES)
    keys, values = (torch.randn(len(source.layers), num_tokens, w, **there) for w in widths)
    memory = Memory.allocate(
        dataclasses.replace(source, layers=target.geometry.layers), num_tokens + 1, **there
    )
    vocabulary = target.config["vocab_size"]
    ids = torch.randint(vocabulary, (1, num_tokens + 1), device=target.device)
    return Scene(target, (keys, values), memory, ids, num_tokens)


def ways(fast: FastTranslation, args: argparse.Namespace) -> dict[str, dict[str, str | Cut | Tile]]:
    """Each method there is, by each cut that was asked for; options of a translation."""
    found: dict[str, dict[str, str | Cut | Tile]] = {}
    for method in fast.methods:
        if args.methods and method not in args.methods:
            continue
        if method == "torch" and len(fast.methods) > 1 and not args.methods:
            continue  # what is there without Triton
        for text in (args.tiles if method == "fused" else args.cuts) or [None]:
            options: dict[str, str | Cut | Tile] = {"method": method}
            if text is not None:
                numbers = [int(part) for part in text.split(",")]
                if method == "fused":
                    options["tile"] = Tile(*numbers)
                else:
                    options["cut"] = Cut(numbers[0], numbers[1], bool(numbers[2]))
            found[method if text is None else f"{method} {text}"] = options
    return found


def error_of(scene: Scene, form: str, fast: FastTranslation, exact: FastTranslation,
             options: dict[str, Any]) -> float:  # fmt: skip
    """Relative error of a translation's last tokens; refuses one that left anything unwritten."""
    count = min(CHECKED, scene.num_tokens)
    first = scene.num_tokens - count
    given = scene.given(form)
    for array in (scene.memory.keys, scene.memory.values):
        array.fill_(math.nan)
    fast(*given, scene.memory, **options)
    if exact.finish is not None:  # the last positions, as if they were the first
        tables = (exact.finish.cos[first:], exact.finish.sin[first:])
        exact = dataclasses.replace(
            exact, finish=dataclasses.replace(exact.finish, cos=tables[0], sin=tables[1])
        )
    shape = (*scene.memory.keys.shape[:2], count, scene.memory.keys.shape[3])
    wanted = Memory(*(torch.empty(shape, device=scene.target.device) for _ in SIDES))
    exact(*(array[..., first:, :].float() for array in given), wanted, method="torch")
    worst = 0.0
    for side in SIDES:
        mine, theirs = getattr(scene.memory, side), getattr(wanted, side)
        if any(layer[:, : scene.num_tokens].isnan().any() for layer in mine):
            raise SystemExit(f"{form}, {options}: some {side} were not written")
        off = (mine[:, :, first : scene.num_tokens].float() - theirs).norm() / theirs.norm()
        worst = max(worst, float(off))
    return worst


# ---- measuring -----------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(action: Action, device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


def warmed_up(action: Action, device: str) -> float:
    """Run until two times in a row are close to the best one; the best."""
    best, close = math.inf, 0
    for _ in range(MOST_WARM_UPS):
        found = seconds(action, device)
        close = close + 1 if abs(found - best) <= SETTLED * best else 0
        best = min(best, found)
        if close >= 2:
            break
    return best


def extra_bytes(action: Action, device: str) -> int | None:
    """Most bytes that an action allocates above what there is; PyTorch counts none on a CPU."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def rates(args: argparse.Namespace) -> dict[str, float]:
    """FLOP/s of a large product, bytes/s (read and written) of a large copy; the best of some."""
    size, there = args.gemm, {"device": args.device, "dtype": getattr(torch, args.dtype)}
    a, b = (torch.randn(size, size, **there) for _ in range(2))
    out = torch.empty_like(a)
    product = min(seconds(lambda: [torch.mm(a, b, out=out) for _ in range(4)], args.device)
                  for _ in range(10)) / 4  # fmt: skip
    long = torch.randn(16 * size * size, **there)
    other = torch.empty_like(long)
    copied = min(seconds(lambda: other.copy_(long), args.device) for _ in range(10))
    return {
        "gemm_flops": 2 * size**3 / product,
        "copy_bytes": 2 * long.numel() * long.element_size() / copied,
    }


def captured(action: Action) -> Action:
    """An action as a CUDA graph; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def fitting_chunk(scene: Scene, args: argparse.Namespace) -> int:
    """Tokens of a re-prefill's chunks: all of them, halved until memory suffices."""
    chunk = args.prefill_chunk or scene.num_tokens
    while True:
        try:
            scene.read(0, scene.num_tokens, chunk)
            return chunk
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        chunk = -(-chunk // 2)


def summary(samples: Sequence[float]) -> dict[str, Any]:
    low, high = np.percentile(samples, (25, 75))
    return {"samples_s": list(samples), "median_s": float(np.median(samples)),
            "min_s": min(samples), "iqr_s": float(high - low)}  # fmt: skip


def nbytes(*arrays: torch.Tensor) -> int:
    return sum(array.numel() * array.element_size() for array in arrays)


@torch.no_grad()
def run(
    source: ModelSpec,
    target: TorchModel,
    fasts: dict[str, tuple[FastTranslation, FastTranslation]],
    num_tokens: int,
    rate: dict[str, float],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All rows of one pair at one length."""
    device, scene = args.device, make_scene(source, target, num_tokens)
    actions: dict[str, Action] = {}
    details: dict[str, dict[str, Any]] = {}
    best: dict[str, tuple[float, str]] = {}
    moved = nbytes(*scene.states) + nbytes(scene.memory.keys, scene.memory.values)
    for form, (fast, exact) in fasts.items():
        if not ways(fast, args):
            raise SystemExit(f"there is no such method here; there is {', '.join(fast.methods)}")
        for way, options in ways(fast, args).items():
            error = error_of(scene, form, fast, exact, options)
            if not error < ERRORS[args.dtype]:
                raise SystemExit(f"{form}, {way}: relative error {error:.1e}")
            name = f"translation: {form}, {way}"
            actions[name] = functools.partial(fast, *scene.given(form), scene.memory, **options)
            details[name] = {"form": form, "way": way, "error": error,
                             "flops": num_tokens * fast.flops_per_token,
                             "bytes": moved + fast.nbytes}  # fmt: skip
            took = warmed_up(actions[name], device)
            best[form] = min(best.get(form, (math.inf, "")), (took, name))
    mixing = fasts["mixing"][0]
    weights = [m.weight.transpose(1, 2).flatten(2) for m in (mixing.keys, mixing.values)]
    if len(source.layers) >= len(weights[0]):
        out = torch.empty(len(weights[0]), num_tokens, weights[0].shape[2],
                          device=target.device, dtype=target.dtype)  # fmt: skip
        actions["bare products"] = functools.partial(scene.bare, out, weights)
        details["bare products"] = {"flops": num_tokens * mixing.flops_per_token}
    translate = actions[best["mixing"][1]]
    chunk = fitting_chunk(scene, args)
    paths: dict[str, Action] = {
        "step": scene.step,
        "switch": lambda: (translate(), scene.step()),
        "re-prefill": functools.partial(scene.read, 0, num_tokens, chunk),
    }
    not_captured = {}
    for name, action in paths.items():
        warmed_up(action, device)
        actions[name] = action
    phases = {"translation": translate, **paths}
    extra = {name: extra_bytes(action, device) for name, action in phases.items()}
    if device != "cpu" and not args.no_graphs:
        for name, action in phases.items():
            try:
                actions[f"{name} (graph)"] = captured(action)
            except RuntimeError as error:
                not_captured[name] = " ".join(str(error).split())[:200]
        details["translation (graph)"] = details[best["mixing"][1]]
    for action in actions.values():
        warmed_up(action, device)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(args.trials):
        for name, action in actions.items():
            times[name].append(seconds(action, device))
    rows = {name: {**details.get(name, {}), **summary(times[name])} for name in actions}
    for row in rows.values():
        if "flops" in row:
            row["of_gemm_rate"] = row["flops"] / row["median_s"] / rate["gemm_flops"]
        if "bytes" in row:
            row["of_copy_rate"] = row["bytes"] / row["median_s"] / rate["copy_bytes"]
    ratios = {}
    for kind in ("", " (graph)"):
        if f"switch{kind}" in times and f"re-prefill{kind}" in times:
            both = zip(times[f"re-prefill{kind}"], times[f"switch{kind}"], strict=True)
            ratios[f"re-prefill / switch{kind}"] = [slow / quick for slow, quick in both]
    held = {
        "weights": nbytes(*target.model.parameters()),
        "translator": mixing.nbytes,
        "states": nbytes(*scene.states),
        "cache": nbytes(scene.memory.keys, scene.memory.values),
    }
    return {
        "tokens": num_tokens,
        "fastest": {form: name for form, (_, name) in best.items()},
        "prefill_chunk": chunk,
        "rows": rows,
        "ratios": ratios,
        "held_bytes": held,
        "extra_bytes": extra,
        "peak_bytes": peaks(held, extra),
        "not_captured": not_captured,
    }


def peaks(held: dict[str, int], extra: dict[str, int | None]) -> dict[str, int]:
    """What each phase needs at most, had it nothing in memory but what it uses."""
    uses = {
        "translation": ("translator", "states", "cache"),
        "step": ("weights", "cache"),
        "switch": ("weights", "translator", "states", "cache"),
        "re-prefill": ("weights", "cache"),
    }
    return {
        name: more + sum(held[part] for part in uses[name])
        for name, more in extra.items()
        if more is not None
    }


# ---- printing ------------------------------------------------------------------------------


def show(pair: str, found: dict[str, Any]) -> None:
    print(f"\n{pair.replace(':', ' to ')}, {found['tokens']} tokens")
    for name, row in found["rows"].items():
        line = (f"  {name:44s} {1e3 * row['median_s']:10.3f} ms  (min {1e3 * row['min_s']:.3f}, "
                f"IQR {1e3 * row['iqr_s']:.3f})")  # fmt: skip
        if "flops" in row:
            line += (f"  {row['flops'] / row['median_s'] / 1e12:.3g} TFLOP/s, "
                     f"{100 * row['of_gemm_rate']:.0f} % of the product's rate")  # fmt: skip
        if "bytes" in row:
            line += f", {100 * row['of_copy_rate']:.0f} % of the copy's"
        print(line)
    for name, each in found["ratios"].items():
        print(f"  {name}: {np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    if found["prefill_chunk"] < found["tokens"]:
        print(f"  re-prefill in chunks of {found['prefill_chunk']}")
    if found["peak_bytes"]:
        listed = (f"{name} {n / 1e9:.2f} GB" for name, n in found["peak_bytes"].items())
        print(f"  most memory: {', '.join(listed)}")
    for name, why in found["not_captured"].items():
        print(f"  {name} is no CUDA graph: {why}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="SOURCE:TARGET")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=ERRORS)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all that "
                        "there are, but plain PyTorch only where there is no other")  # fmt: skip
    parser.add_argument("--cuts", nargs="+", metavar="TOKENS,LAYERS,DIRECT",
                        help="cuts of products to try, as 4096,4,1")  # fmt: skip
    parser.add_argument("--tiles", nargs="+", metavar="TOKENS,INPUTS,WARPS,STAGES",
                        help="cuts of the fused kernel to try, as 256,64,8,4")  # fmt: skip
    parser.add_argument("--prefill-chunk", type=int, help="tokens of a re-prefill's chunks")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--gemm", type=int, default=8192, help="width of the large product")
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args(argv)
    for pair in args.pairs:
        names = pair.split(":")
        if len(names) != 2 or not set(names) <= set(SHAPES):
            parser.error(f"--pairs: {pair} is not SOURCE:TARGET of {', '.join(SHAPES)}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu for a trial")
    if min(args.tokens) < 1 or args.trials < 1 or (args.layers or 1) < 1:
        parser.error("--tokens, --trials and --layers must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(0)
    rate = rates(args)
    print(f"product of {args.gemm}: {rate['gemm_flops'] / 1e12:.3g} TFLOP/s in {args.dtype}; "
          f"copy: {rate['copy_bytes'] / 1e9:.3g} GB/s")  # fmt: skip
    results: dict[str, list[dict[str, Any]]] = {}
    try:
        for pair in args.pairs:
            names = pair.split(":")
            source, target = source_spec(names[0], args), build_target(names[1], args)
            fasts = translators(source, target, max(args.tokens))
            for num_tokens in args.tokens:
                found = run(source, target, fasts, num_tokens, rate, args)
                show(pair, found)
                results.setdefault(pair, []).append(found)
                gc.collect()
            del target, fasts
            gc.collect()
    finally:  # a pair that fails takes nothing with it of those before
        print(measure.machine_line())
        if args.json and results:
            config = {name: value for name, value in vars(args).items() if name != "json"}
            entry = {"rates": rate, "pairs": results}
            measure.append_json(args.json, measure.record("cuda_switch", config, entry))


if __name__ == "__main__":
    main()
