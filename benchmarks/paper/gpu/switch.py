"""What a switch costs on a GPU: its parts, timed at true widths beside a re-prefill.

Weights, states and tokens are random. For a pair and a length n:

- translation: of n tokens' recorded states into the target's cache; products, k_norm, RoPE, cast
  and layout, in each of ``FORMS``. By the fused kernel, or by plain PyTorch where that cannot run.
- step: the target reads one token over a cache of n; its logits.
- switch: translation (mixing, before k_norm) and step, measured as one.
- re-prefill: the target reads n tokens, with cache; the last one's logits. One token less than a
  switch ends with. In chunks, where a whole one does not fit in memory.

The mixing translation and the last three are timed as CUDA graphs too, which spare both paths what
Python and launches take. Wall clock between synchronisations. Every action is warmed up until its
times settle, then all take turns. Translations are first compared with float32 PyTorch.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.paper.gpu.translation import CacheMemory, PrefixTranslation, nbytes
from benchmarks.paper.timing.widths import cache_layers
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.assignment import by_depth
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig

Action = Callable[[], Any]
Both = tuple[PrefixTranslation, PrefixTranslation]  # a translator, and the same in float32
Shape = Mapping[str, Any]  # a model's config.json
CHECKED = 200  # tokens of a translation that are compared
ERRORS = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-4}  # relative
SETTLED, MOST_WARM_UPS = 0.05, 10


@dataclass(frozen=True)
class MapForm:
    """A translator's form: where its keys are captured, and whether its maps mix heads."""

    capture: str
    head_mixing: bool


FORMS = {
    "mixing": MapForm("pre_norm", True),
    "head-wise": MapForm("pre_norm", False),
    "mixing, after RoPE": MapForm("post_rope", True),
}


@dataclass(frozen=True)
class SwitchSettings:
    """How pairs are timed.

    Raises:
        ValueError: A dtype or a number is not one of those there are.
    """

    device: str = "cuda"  # or ``cpu``, for a trial
    dtype: str = "bfloat16"  # of weights, states and caches
    tokens: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)  # prefix lengths
    trials: int = 9  # how often each action is timed
    prefill_chunk: int | None = None  # tokens of a re-prefill's chunks; None: what memory allows
    graphs: bool = True  # whether CUDA graphs are timed as well

    def __post_init__(self) -> None:
        if self.dtype not in ERRORS:
            raise ValueError(f"dtype is {self.dtype!r}; give one of {', '.join(ERRORS)}")
        for name, number in vars(self).items():
            least = min(number, default=0) if isinstance(number, tuple) else number
            if isinstance(least, int) and not isinstance(least, bool) and least < 1:
                raise ValueError(f"{name} holds {least}; give at least 1")


# ---- the clock ----------------------------------------------------------------------------------


def seconds(action: Action, device: str) -> float:
    """The wall seconds of an action, between two synchronisations."""
    synchronize = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - started


def warmed_up(action: Action, device: str) -> None:
    """Run until two times in a row are close to the best one."""
    best, close = math.inf, 0
    for _ in range(MOST_WARM_UPS):
        found = seconds(action, device)
        close = close + 1 if abs(found - best) <= SETTLED * best else 0
        best = min(best, found)
        if close >= 2:
            return


def extra_bytes(action: Action, device: str) -> int | None:
    """Most bytes that an action allocates above what there is; PyTorch counts none on a CPU."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds(action, device)
    return torch.cuda.max_memory_allocated() - before


# ---- what is timed ------------------------------------------------------------------------------


def config_of(shape: Shape) -> Any:
    """transformers' config of a shape."""
    numbers = {**shape}
    return AutoConfig.for_model(numbers.pop("model_type"), **numbers)


def build_target(name: str, shape: Shape, device: str, dtype: torch.dtype) -> TorchModel:
    """A frozen model of random weights."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=dtype, attn_implementation="sdpa"
        )
    no_tokenizer = SimpleNamespace(get_vocab=dict)  # random ids need none
    return TorchModel(model.eval().requires_grad_(False), no_tokenizer, {**shape}, name)


def source_spec(name: str, shape: Shape) -> ModelSpec:
    """What a translator knows of its source; the source itself is not needed."""
    unknown = dict.fromkeys(("geometry", "norms", "tokenizer"))
    return ModelSpec(name, None, shape["model_type"], unknown, cache_layers(shape))


def forms_between(source: Sequence[Any], target: Sequence[Any]) -> dict[str, MapForm]:
    """The forms in which a pair is translated, by both models' cache layers.

    Head-wise maps pair heads evenly, or are left out: the paper has none where the two have
    different numbers of KV heads.
    """
    even = source[0].kv_heads == target[0].kv_heads
    return {name: form for name, form in FORMS.items() if form.head_mixing or even}


def translators(source: ModelSpec, target: TorchModel, nu: int, positions: int) -> dict[str, Both]:
    """By form, a random translator in the target's dtype, and the same in float32."""
    found, layers = {}, target.geometry.layers
    for name, form in forms_between(source.layers, layers).items():
        config = TranslatorConfig(
            source,
            target.spec(),
            by_depth(source.layers, layers, nu),
            head_mixing=form.head_mixing,
            capture=form.capture,
        )
        tensors = {}
        for m in maps_of(config):
            shape = (*(() if m.heads is None else (m.heads,)), m.outputs, m.inputs)
            drawn = torch.randn(shape, device=target.device) / math.sqrt(m.inputs)
            tensors[f"{m.name}.weight"] = drawn.to(target.dtype)
        build = partial(PrefixTranslation.build, config, tensors, target, positions)
        found[name] = build(), build(torch.float32)
    return found


@dataclass(frozen=True)
class Scene:
    """One pair at one length: what all actions share."""

    source: ModelSpec
    target: TorchModel
    states: tuple[torch.Tensor, torch.Tensor]  # (Ls, n, Hs * Ds) each
    memory: CacheMemory
    ids: torch.Tensor
    num_tokens: int

    @classmethod
    def of(cls, source: ModelSpec, target: TorchModel, num_tokens: int) -> Scene:
        """A scene of random states and tokens."""
        there: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
        widths = (source.layers[0].width(side) for side in SIDES)
        keys, values = (torch.randn(len(source.layers), num_tokens, w, **there) for w in widths)
        memory = CacheMemory.allocate(target, num_tokens, target.dtype)
        vocabulary = target.geometry.embedding_rows
        ids = torch.randint(vocabulary, (1, num_tokens + 1), device=target.device)
        return cls(source, target, (keys, values), memory, ids, num_tokens)

    def given(self, form: MapForm) -> list[torch.Tensor]:
        """States as a form finds them: after RoPE, in a cache (the same numbers, read anew)."""
        if form.capture != "post_rope":
            return list(self.states)
        dim = self.source.layers[0].key_dim
        layers, tokens, width = self.states[0].shape
        return [array.view(layers, width // dim, tokens, dim) for array in self.states]

    def read(self, start: int, end: int, chunk: int) -> torch.Tensor:
        """Logits of token ``end - 1``, after the cache's first ``start`` tokens."""
        cache: Any = self.memory.cache(start)
        hidden = None
        for begin in range(start, end, chunk):
            hidden = self.target.run(self.ids[:, begin : min(begin + chunk, end)], cache)
        assert hidden is not None
        return self.target.logits(hidden[0, -1:])

    def step(self) -> torch.Tensor:
        """Logits of the token after the prefix."""
        return self.read(self.num_tokens, self.num_tokens + 1, 1)

    @torch.no_grad()
    def error(self, form: MapForm, both: Both, method: str) -> float:
        """Relative error of a translation's last tokens, the worst side of any layer's.

        Raises:
            RuntimeError: The translation left something unwritten.
        """
        count = min(CHECKED, self.num_tokens)
        first, given = self.num_tokens - count, self.given(form)
        for sides in self.memory.arrays:
            for array in sides:
                array.fill_(math.nan)
        both[0](given, self.memory, method=method)
        exact = CacheMemory.allocate(self.target, count, torch.float32, 0)
        both[1]([array[..., first:, :].float() for array in given], exact, first, "torch")
        worst, rooms = 0.0, zip(self.memory.rooms(), exact.rooms(), strict=True)
        for layer, ((like, mine), (_, theirs)) in enumerate(rooms):
            for side, ours, whole in zip(SIDES, mine, theirs, strict=True):
                written = ours[:, :, : like.kept(self.num_tokens)]
                if written.isnan().any():
                    raise RuntimeError(f"{method}: some {side} of layer {layer} were not written")
                off = (written[:, :, -whole.shape[2] :].float() - whole).norm() / whole.norm()
                worst = max(worst, float(off))
        return worst

    def fitting_chunk(self, asked: int | None) -> int:
        """Tokens of a re-prefill's chunks: all of them, halved until memory suffices."""
        chunk = asked or self.num_tokens
        while True:
            try:
                self.read(0, self.num_tokens, chunk)
                return chunk
            except torch.OutOfMemoryError:
                if chunk == 1:
                    raise
            gc.collect()
            torch.cuda.empty_cache()
            chunk = -(-chunk // 2)


# ---- the times ----------------------------------------------------------------------------------


def time_pair(
    source: tuple[str, Shape], target: tuple[str, Shape], nu: int, settings: SwitchSettings
) -> Iterator[dict[str, Any]]:
    """Time a switch between two models, given by names and configs, at each length.

    Raises:
        KVLingoError: A translation is wrong, which is looked at before it is timed.
    """
    spec = source_spec(*source)
    built = build_target(*target, settings.device, getattr(torch, settings.dtype))
    forms = translators(spec, built, nu, max(settings.tokens))
    for num_tokens in settings.tokens:
        yield time_length(Scene.of(spec, built, num_tokens), forms, settings)
        gc.collect()


@torch.no_grad()
def time_length(
    scene: Scene, forms: Mapping[str, Both], settings: SwitchSettings
) -> dict[str, Any]:
    """All rows of one pair at one length."""
    actions, details, fastest = _translations(scene, forms, settings)
    mixing, device = forms["mixing"][0], settings.device
    translate = actions[fastest["mixing"]]
    chunk = scene.fitting_chunk(settings.prefill_chunk)
    phases: dict[str, Action] = {
        "translation": translate,
        "step": scene.step,
        "switch": lambda: (translate(), scene.step()),
        "re-prefill": partial(scene.read, 0, scene.num_tokens, chunk),
    }
    actions |= {name: phases[name] for name in ("step", "switch", "re-prefill")}
    extra = {name: extra_bytes(action, device) for name, action in phases.items()}
    refused = _graphs(phases, actions) if device != "cpu" and settings.graphs else {}
    if "translation (graph)" in actions:
        details["translation (graph)"] = details[fastest["mixing"]]
    times = _in_turns(actions, settings)
    held = {
        "weights": nbytes(*scene.target.model.parameters()),
        "translator": mixing.nbytes,
        "states": nbytes(*scene.states),
        "cache": scene.memory.nbytes,
    }
    return {
        "tokens": scene.num_tokens,
        "fastest": fastest,
        "prefill_chunk": chunk,
        "rows": {name: details.get(name, {}) | found for name, found in times.items()},
        "held_bytes": held,
        "extra_bytes": extra,
        "not_captured": refused,
    }


def _translations(
    scene: Scene, forms: Mapping[str, Both], settings: SwitchSettings
) -> tuple[dict[str, Action], dict[str, dict[str, Any]], dict[str, str]]:
    """Every form by its fastest method, checked; what is known of each; their names by form."""
    actions, details, names = dict[str, Action](), dict[str, dict[str, Any]](), dict[str, str]()
    for form, both in forms.items():
        fast: Any = both[0]  # PyTorch's decorators hide that it can be called where it is missing
        given = scene.given(FORMS[form])
        method = fast.methods[-1]
        error = scene.error(FORMS[form], both, method)
        if not error < ERRORS[settings.dtype]:
            raise KVLingoError(f"{form}, {method}: its relative error is {error:.1e}")
        names[form] = name = f"translation: {form}, {method}"
        actions[name] = partial(fast, given, scene.memory, method=method)
        details[name] = {
            "form": form,
            "way": method,
            "error": error,
            "flops": fast.flops(scene.num_tokens),
            "bytes": nbytes(*scene.states) + scene.memory.nbytes + fast.nbytes,
        }
    return actions, details, names


def _graphs(phases: Mapping[str, Action], actions: dict[str, Action]) -> dict[str, str]:
    """Add each phase, which has run before, as a CUDA graph; returns why some are none."""
    refused = {}
    for name, action in phases.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                action()
        except RuntimeError as error:
            refused[name] = " ".join(str(error).split())[:200]
        else:
            actions[f"{name} (graph)"] = graph.replay
    return refused


def _in_turns(actions: Mapping[str, Action], settings: SwitchSettings) -> dict[str, Any]:
    """Samples of each in seconds, with their median, least and distance between the quartiles."""
    for action in actions.values():
        warmed_up(action, settings.device)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(settings.trials):
        for name, action in actions.items():
            times[name].append(seconds(action, settings.device))
    found = {}
    for name, samples in times.items():
        low, middle, high = map(float, np.percentile(samples, (25, 50, 75)))
        found[name] = {"samples_s": samples, "median_s": middle, "min_s": min(samples),
                       "iqr_s": high - low}  # fmt: skip
    return found
