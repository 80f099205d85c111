"""Whole prefixes translated at once in PyTorch: against plain loops, and against MLX."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvlingo_mlx.backend import mx  # noqa: E402

from kvlingo_mlx import caches  # noqa: E402
from kvlingo_mlx.cuda import model as torch_model  # noqa: E402
from kvlingo_mlx.cuda.fast_translation import METHODS, FastTranslation  # noqa: E402
from kvlingo_mlx.cuda.finish import finish_plainly, in_pairs  # noqa: E402
from kvlingo_mlx.cuda.maps import Cut  # noqa: E402
from kvlingo_mlx.cuda.memory import Memory  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.tile import Tile  # noqa: E402
from kvlingo_mlx.engine import fill  # noqa: E402
from kvlingo_mlx.errors import UnsupportedModelError  # noqa: E402
from kvlingo_mlx.format.assignment import Assignment  # noqa: E402
from kvlingo_mlx.format.kinds import SIDES  # noqa: E402
from kvlingo_mlx.format.maps import expected_shapes, head_map_of  # noqa: E402
from kvlingo_mlx.format.tensor_file import Weights  # noqa: E402
from kvlingo_mlx.format.translator_config import TranslatorConfig  # noqa: E402
from kvlingo_mlx.models.language_model import LanguageModel  # noqa: E402
from kvlingo_mlx.models.states import KVStates  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, make_config  # noqa: E402
from kvlingo_mlx.translators import build  # noqa: E402

# Triton's interpreter runs kernels on a CPU where TRITON_INTERPRET=1 is set, slowly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="needs a CUDA GPU, or TRITON_INTERPRET=1",
)
DEPTHS = {"shallow": (3, 2, 32), "deep": (5, 4, 16), "long": (7, 4, 16)}  # layers, heads, width
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fast")
    found = {
        name: tiny.write_tiny_model(
            root / name, "qwen3", seed=i, layers=layers, kv_heads=heads, head_dim=dim
        )
        for i, (name, (layers, heads, dim)) in enumerate(DEPTHS.items())
    }
    found["llama"] = tiny.write_tiny_model(
        root / "llama", "llama", seed=9, layers=5, kv_heads=4, head_dim=16,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    )  # fmt: skip
    found["gemma"] = tiny.write_tiny_model(
        root / "gemma", "gemma3_text", seed=10, layers=3, kv_heads=2, head_dim=32
    )
    return found


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, TorchModel]:
    return {n: torch_model.load(str(f), dtype=torch.float32) for n, f in folders.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    source: str = "shallow"
    target: str = "deep"
    nu: int = 1
    capture: str = "pre_norm"
    head_mixing: bool = True
    bias: bool = False
    layers: Any = None  # an assignment of its own

    def config(self, models: dict[str, TorchModel]) -> TranslatorConfig:
        plan = TrainingPlan(nu=self.nu, capture=self.capture, head_mixing=self.head_mixing)
        config = make_config(models[self.source], models[self.target], plan)
        if self.layers is None:
            return config
        return dataclasses.replace(config, assignment=Assignment(self.layers, self.layers[::-1]))

    def arrays(self, config: TranslatorConfig, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        names = ["keys.0.bias"] if self.bias else []
        shapes = expected_shapes(config, names)
        return {n: rng.normal(size=s) / math.sqrt(s[-1]) for n, s in shapes.items()}


CASES = [
    *(Case(nu=nu, head_mixing=mixing, capture=capture)
      for nu in (1, 3) for mixing in (True, False)
      for capture in ("pre_norm", "post_norm", "post_rope")),
    Case("long", "shallow", nu=3),
    Case("deep", "shallow", bias=True),
    Case("deep", "long", nu=2, head_mixing=False, bias=True),
    Case("deep", "llama", nu=2),
    Case("long", "deep", layers=((6, 0), (4, 2), (4, 3), (1, 3), (3, 5))),
]  # fmt: skip


def random_states(config: TranslatorConfig, tokens: int, seed: int = 1) -> list[np.ndarray]:
    """Keys and values of every source layer, (Ls, T, Hs * Ds)."""
    rng = np.random.default_rng(seed)
    layers = config.source.layers
    return [rng.normal(size=(len(layers), tokens, layers[0].width(side))) for side in SIDES]


def expected(
    config: TranslatorConfig, arrays: Arrays, states: list[np.ndarray], target: TorchModel,
    start: int,
) -> list[np.ndarray]:  # fmt: skip
    """A layer, a head and a token at a time, in float64: (L, H, T, D) a side."""
    spec, eps = target.geometry.layers[0], target.config["rms_norm_eps"]
    frequencies = target.model.model.rotary_emb.inv_freq.double().numpy()
    found = [np.full((len(config.target.layers), spec.kv_heads, states[0].shape[1],
                      spec.head_dim(side)), np.nan) for side in SIDES]  # fmt: skip
    for out, side, given in zip(found, SIDES, states, strict=True):
        width = config.source.layers[0].head_dim(side)
        for t, read in enumerate(config.assignment.side(side)):
            weight, bias = arrays[f"{side}.{t}.weight"], arrays.get(f"{side}.{t}.bias")
            for h, n in np.ndindex(out.shape[1:3]):
                rows = slice(h * spec.head_dim(side), (h + 1) * spec.head_dim(side))
                if config.head_mixing:
                    state = weight[rows] @ np.concatenate([given[s, n] for s in read])
                else:
                    first = head_map_of(config)[h] * width
                    parts = [given[s, n, first : first + width] for s in read]
                    state = weight[h] @ np.concatenate(parts)
                state = state if bias is None else state + bias[rows]
                if side == "keys":
                    attention = target.attentions[t]
                    if config.capture == "pre_norm" and hasattr(attention, "k_norm"):
                        state = state / np.sqrt(np.mean(state**2) + eps)
                        state = state * attention.k_norm.weight.double().numpy()
                    if config.capture != "post_rope":
                        angles = (start + n) * frequencies
                        a, b = np.split(state, 2)
                        cos, sin = np.cos(angles), np.sin(angles)
                        state = np.concatenate([a * cos - b * sin, b * cos + a * sin])
                out[t, h, n] = state
    return found


def translated(
    config: TranslatorConfig, arrays: Arrays, states: list[np.ndarray], target: TorchModel,
    start: int, *, dtype: Any = torch.float64, by_head: bool = False, room: int = 2,
    device: str = "cpu", **options: Any,
) -> list[np.ndarray]:  # fmt: skip
    """The same by the package, in memory that has ``room`` more; all of it but the span is NaN."""
    tokens = states[0].shape[1]
    tensors = {n: torch.tensor(a) for n, a in arrays.items()}
    fast = FastTranslation.build(config, tensors, target, start + tokens, dtype)
    memory = Memory.allocate(config.target, start + tokens + room, dtype, device)
    given = [torch.tensor(s, dtype=dtype, device=device) for s in states]
    if by_head:
        heads = config.source.layers[0].kv_heads
        given = [g.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for g in given]
    for array in (memory.keys, memory.values):
        array.fill_(math.nan)
    fast(*given, memory, start, **options)
    spans = []
    for array in (memory.keys, memory.values):
        array = array.double().cpu()
        assert array[:, :, :start].isnan().all() and array[:, :, start + tokens :].isnan().all()
        spans.append(array[:, :, start : start + tokens].numpy())
    return spans


def distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_loop_over_layers_heads_and_tokens(
    ours: dict[str, TorchModel], case: Case
) -> None:
    target, start = ours[case.target], 5
    config = case.config(ours)
    arrays, states = case.arrays(config), random_states(config, 13)
    wanted = expected(config, arrays, states, target, start)
    for cut in (Cut(), Cut(tokens=4, layers=2), Cut(tokens=13, layers=1, direct=False)):
        for by_head in (False, True):
            found = translated(config, arrays, states, target, start, cut=cut, by_head=by_head)
            # transformers' inverse frequencies are float32, and so are the angles.
            assert distance(found, wanted) < 2e-6
    if case.capture == "post_rope":
        return
    shifted = expected(config, arrays, states, target, start + 1)
    assert distance(found, shifted) > 0.02
    assert distance(found[1:], shifted[1:]) < 2e-6


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("case", [c for c in CASES if c.layers is None], ids=str)
def test_equals_the_device(
    folders: dict[str, Path], ours: dict[str, TorchModel], case: Case, tokens: int
) -> None:
    """Two spans, by the package's own MLX path."""
    source, target = (kv_load(folders[name]) for name in (case.source, case.target))
    config = case.config(ours)
    arrays = {n: a.astype(np.float32) for n, a in case.arrays(config).items()}
    states = random_states(config, 9 + tokens)
    cache = caches.allocate(target, 9 + tokens)
    translator = build(config, Weights("float32", arrays))
    for start, end in ((0, 9), (9, 9 + tokens)):
        sides = (tuple(mx.array(layer[None, start:end].astype(np.float32)) for layer in side)
                 for side in states)  # fmt: skip
        theirs = KVStates(*sides, config.capture, start)
        fill.translate_span(cache, theirs, source, target, translator, 9 + tokens)
    wanted = [
        np.stack([np.array(array)[0, :, 9 : 9 + tokens] for array in arrays_of])
        for arrays_of in ([c.keys for c in cache], [c.values for c in cache])
    ]
    found = translated(config, arrays, [s[:, 9:] for s in states], ours[case.target], 9,
                       dtype=torch.float32, cut=Cut(tokens=16))  # fmt: skip
    assert distance(found, wanted) < 2e-6


def kv_load(folder: Path) -> LanguageModel:
    from kvlingo_mlx.loading.models import load

    return load(folder)


def test_a_target_decodes_from_the_memory_that_was_written(ours: dict[str, TorchModel]) -> None:
    """The identity, of a model's own states, is its own cache; and the cache grows in place."""
    model = ours["deep"]
    config = make_config(model, model, TrainingPlan())
    eye = np.eye(config.target.layers[0].key_width)
    tensors = {n: torch.tensor(eye) for n in expected_shapes(config, ())}
    fast = FastTranslation.build(config, tensors, model, 32)
    tokens = tiny.random_tokens(24)
    states = model.states(tokens[:-2])
    memory = Memory.allocate(config.target, 24, torch.float32, "cpu")
    fast(*(torch.stack(states.side(side)) for side in SIDES), memory)
    cache = memory.cache(22)
    with torch.no_grad():
        wanted = model.hidden(tokens)[-2:]
        found = [model.hidden([token], cache)[0] for token in tokens[-2:]]
        together = model.hidden(tokens[-2:], memory.cache(22))
        afresh = model.hidden(tokens, memory.cache(0))[-2:]
    assert torch.allclose(torch.stack(found), wanted, atol=2e-5)
    assert torch.allclose(together, wanted, atol=2e-5)
    assert torch.allclose(afresh, wanted, atol=2e-5)
    assert cache.get_seq_length() == 24
    assert cache.layers[0].keys.data_ptr() == memory.keys.data_ptr()


def test_what_cannot_be_done_is_refused(ours: dict[str, TorchModel]) -> None:
    case = Case()
    config = case.config(ours)
    arrays, states = case.arrays(config), random_states(config, 4)

    def built(config: TranslatorConfig, target: str = "deep") -> FastTranslation:
        tensors = {n: torch.tensor(a) for n, a in arrays.items()}
        return FastTranslation.build(config, tensors, ours[target], 8)

    with pytest.raises(ValueError, match="only linear maps .* joint"):
        built(dataclasses.replace(config, joint=True))
    with pytest.raises(UnsupportedModelError, match="differ or keep windows"):
        built(dataclasses.replace(config, target=ours["gemma"].spec()), "gemma")
    wide = dataclasses.replace(config.source.layers[0], kv_heads=9)
    mixed = dataclasses.replace(config.source, layers=(wide, *config.source.layers[1:]))
    with pytest.raises(UnsupportedModelError, match="layers differ in shape"):
        built(dataclasses.replace(config, source=mixed))
    with pytest.raises(ValueError, match="positions 6 to 10 .* room for 9"):
        memory = Memory.allocate(config.target, 9, torch.float32, "cpu")
        built(config)(*map(torch.tensor, states), memory, 6)
    with pytest.raises(ValueError, match="cosines for 8"):
        memory = Memory.allocate(config.target, 99, torch.float32, "cpu")
        built(config)(*map(torch.tensor, states), memory, 6)
    memory = Memory.allocate(config.target, 8, torch.float32, "cpu")
    keys, values = (torch.tensor(s, dtype=torch.float32) for s in states)
    for wrong in ((keys[:2], values), (keys, values[:, :3]), (keys[..., :32], values),
                  (keys, values.double())):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            built(config)(*wrong, memory)
    with pytest.raises(ValueError, match="do not fit"):
        built(config)(keys, values, Memory(memory.keys[:4], memory.values))
    with pytest.raises(ValueError, match="'fused'; here it must be one of torch"):
        built(config)(*map(torch.tensor, states), memory, method="fused")


# ---- the kernels ---------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_plain_pytorch(
    folders: dict[str, Path],
    ours: dict[str, TorchModel],
    case: Case,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    sizes, device = ((1, 0), (37, 3), (700, 11)), "cuda"
    if INTERPRETED:
        dtype = dtype.replace("bfloat", "float")  # the interpreter multiplies bfloat16's bits
        monkeypatch.setattr(FastTranslation, "methods", METHODS)
        sizes, device = sizes[1:2], "cpu"
    config, kind = case.config(ours), getattr(torch, dtype)
    there = torch_model.load(str(folders[case.target]), dtype=kind, device=device)
    arrays = case.arrays(config)
    for tokens, start in sizes:
        states = random_states(config, tokens)
        common = (config, arrays, states)
        wanted = translated(*common, ours[case.target], start, method="torch")
        for method, by_head in itertools.product(METHODS, (False, True)):
            found = translated(
                *common, there, start, dtype=kind, device=device, method=method,
                by_head=by_head, cut=Cut(tokens=64, layers=3),
                tile=Tile(tokens=64, inputs=16, warps=4, stages=3) if by_head else None,
            )  # fmt: skip
            most = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
            assert distance(found, wanted) < most


def test_pairs_hold_what_turns_together() -> None:
    assert in_pairs(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    keys = torch.randn(1, 1, 1, 6)
    out = torch.empty(1, 1, 1, 6)
    finish_plainly(out, in_pairs(keys), None, 0.0, (torch.ones(1, 3), torch.zeros(1, 3)))
    assert torch.equal(out, keys)
    finish_plainly(out, in_pairs(keys), None, 0.0, (torch.zeros(1, 3), torch.ones(1, 3)))
    assert torch.equal(out, torch.cat([-keys[..., 3:], keys[..., :3]], dim=-1))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_kernels_pipeline_fits_in_shared_memory(itemsize: int) -> None:
    """For heads of 128 numbers, on Hopper: as Triton compiles it for compute capability 9.0."""
    pytest.importorskip("triton")
    from kvlingo_mlx.cuda import kernels

    for mixing in (True, False):
        tile = kernels.tile_of(mixing, itemsize)
        stage = (tile.tokens + 128) * tile.inputs * itemsize
        assert tile.stages * stage <= 227 * 1024
