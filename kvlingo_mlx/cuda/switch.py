"""What a switch costs on a GPU: the components of the paper's table "tab:cost", any pair's.

Random weights at true widths. For each pair and length n:

- translation: of n tokens' recorded states into the target's cache; products, k_norm, RoPE, cast
  and layout. Maps that mix heads and head-wise ones (where both have as many KV heads), keys taken
  before k_norm; maps that mix heads, keys taken after RoPE, out of the source's own cache. By the
  fused kernel, or by plain PyTorch where that cannot run; beside it the bare products alone.
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

import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvlingo_mlx.cuda import clock
from kvlingo_mlx.cuda.clock import Action
from kvlingo_mlx.cuda.scene import (
    ERRORS,
    Both,
    Scene,
    build_target,
    shape_of,
    source_spec,
    translators,
)
from kvlingo_mlx.cuda.shapes import FORMS, TOKENS, ends_of, forms_of, nu_of
from kvlingo_mlx.cuda.translation import METHODS, PrefixTranslation, nbytes
from kvlingo_mlx.errors import KVLingoError

ROLES, PERIOD = ("source", "target"), "sliding_window_pattern"


@dataclass(frozen=True)
class SwitchSettings:
    """How pairs are timed."""

    device: str = "cuda"  # or ``cpu``, for a trial
    dtype: str = "bfloat16"  # of weights, states and caches
    tokens: tuple[int, ...] = TOKENS  # prefix lengths
    layers: int | None = None  # at most so many of each model; None: all
    nu: int | None = None  # source layers a target layer reads; None: the paper's for the pair
    trials: int = 9  # how often each action is timed
    methods: tuple[str, ...] = ()  # of a translation; none: the fastest there is
    prefill_chunk: int | None = None  # tokens of a re-prefill's chunks; None: what memory allows
    graphs: bool = True  # whether CUDA graphs are timed as well
    gemm: int = 8192  # width of the large product whose rate is measured

    def check(self, pairs: Sequence[str]) -> None:
        """Refuse, before anything is made, what cannot be timed.

        Raises:
            ValueError: A pair, a dtype, a method or a number is not one of those there are.
            KVLingoError: There is no GPU.
        """
        for pair in pairs:
            plan(pair, self)
        if self.dtype not in ERRORS:
            raise ValueError(f"dtype is {self.dtype!r}; give one of {', '.join(ERRORS)}")
        if unknown := [m for m in self.methods if m not in METHODS]:
            raise ValueError(f"methods hold {unknown[0]!r}; give some of {', '.join(METHODS)}")
        chunk = 1 if self.prefill_chunk is None else self.prefill_chunk
        least = {"tokens": min(self.tokens, default=0), "trials": self.trials, "gemm": self.gemm}
        for name, number in (*least.items(), ("prefill_chunk", chunk)):
            if number < 1:
                raise ValueError(f"{name} holds {number}; give at least 1")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise KVLingoError(
                "PyTorch finds no CUDA GPU here; run this on a machine that has one, or give "
                "--device cpu for a trial of tiny shapes"
            )


def plan(pair: str, settings: SwitchSettings) -> dict[str, Any]:
    """What is timed of a pair, as plain data; nothing is made.

    Raises:
        ValueError: There is no such pair, or it cannot be read by so many source layers.
    """
    source, target = ends_of(pair)
    if settings.layers is not None and settings.layers < 1:
        raise ValueError(f"layers is {settings.layers}; give at least 1")
    nu = nu_of(source, target) if settings.nu is None else settings.nu
    named = zip(ROLES, (source, target), strict=True)
    ends = {role: shape_of(name, settings.layers) for role, name in named}
    depth, period = ends["source"]["num_hidden_layers"], ends["target"].get(PERIOD, 1)
    if not 1 <= nu <= depth:
        raise ValueError(f"nu is {nu}; {source} has {depth} layers here: give 1 to {depth}")
    if settings.layers is not None and settings.layers < max(period, ends["source"].get(PERIOD, 1)):
        raise ValueError(f"layers is {settings.layers}; of {pair} every {period}th sees all: more")
    longest = max(settings.tokens, default=0)
    room = min(shape["max_position_embeddings"] for shape in ends.values())
    if longest >= room:
        raise ValueError(f"tokens hold {longest}; the context of {pair} is {room}: give fewer")
    return {
        "source": source,
        "target": target,
        "nu": nu,
        "forms": list(forms_of(source, target)),
        "layers": {role: shape["num_hidden_layers"] for role, shape in ends.items()},
        "kv_heads": {role: shape["num_key_value_heads"] for role, shape in ends.items()},
        "head_dim": {role: shape["head_dim"] for role, shape in ends.items()},
        "windows": {role: shape.get("sliding_window") for role, shape in ends.items()},
        "tokens": list(settings.tokens),
        "dtype": settings.dtype,
    }


def time_pairs(
    pairs: Sequence[str],
    settings: SwitchSettings,
    listen: Callable[[str, dict[str, Any]], None] = lambda pair, found: None,
) -> dict[str, Any]:
    """Time pairs one after the other; returns the results of a record of kind ``cuda_switch``.

    Args:
        pairs: ``SOURCE:TARGET`` of :data:`~kvlingo_mlx.cuda.shapes.SHAPES`, or those of a label in
            :data:`~kvlingo_mlx.cuda.shapes.PAIRS`.
        settings: How they are timed.
        listen: Called with each pair and length's findings as they come; what was told is all
            that is left of a run that fails.

    Raises:
        ValueError: As for :meth:`SwitchSettings.check`.
        KVLingoError: There is no GPU; or a translation is wrong, which is looked at before it is
            timed.
    """
    settings.check(pairs)
    torch.manual_seed(0)
    dtype = getattr(torch, settings.dtype)
    rate = clock.rates(settings.device, dtype, settings.gemm)
    results: dict[str, Any] = {
        "rates": rate,
        "plans": {pair: plan(pair, settings) for pair in pairs},
        "pairs": {},
    }
    for pair in pairs:
        names = ends_of(pair)
        source = source_spec(names[0], settings.layers)
        target = build_target(names[1], settings.device, dtype, settings.layers)
        nu = results["plans"][pair]["nu"]
        forms = translators(source, target, nu, max(settings.tokens))
        for num_tokens in settings.tokens:
            found = time_length(Scene.of(source, target, num_tokens), forms, rate, settings)
            results["pairs"].setdefault(pair, []).append(found)
            listen(pair, found)
            gc.collect()
        del target, forms
        gc.collect()
    return results


def config_of_record(pairs: Sequence[str], settings: SwitchSettings) -> dict[str, Any]:
    """The settings as a record keeps them, with what makes a run comparable."""
    return {**asdict(settings), "pairs": list(pairs), "batch": 1, "stack": "transformers"}


# ---- one length -------------------------------------------------------------------------------


@dataclass
class Timed:
    """What is timed at one length, by name, with what is known of it before."""

    actions: dict[str, Action]
    details: dict[str, dict[str, Any]]
    fastest: dict[str, str]


def _translations(scene: Scene, forms: Mapping[str, Both], settings: SwitchSettings) -> Timed:
    """Every form by every method, checked and warmed up; the fastest of each form."""
    found, best = Timed({}, {}, {}), dict[str, float]()
    for form, both in forms.items():
        fast, there = both[0], both[0].methods
        if unknown := set(settings.methods) - set(there):
            raise KVLingoError(f"there is no {min(unknown)!r} here; there is {', '.join(there)}")
        for method in settings.methods or there[-1:]:
            error = scene.error(FORMS[form], both, method)
            if not error < ERRORS[settings.dtype]:
                raise KVLingoError(f"{form}, {method}: its relative error is {error:.1e}")
            name, given = f"translation: {form}, {method}", scene.given(FORMS[form])
            found.actions[name] = functools.partial(fast, given, scene.memory, method=method)
            found.details[name] = {
                "form": form,
                "way": method,
                "error": error,
                "flops": fast.flops(scene.num_tokens),
                "bytes": nbytes(*scene.states) + scene.memory.nbytes + fast.nbytes,
            }
            took = clock.warmed_up(found.actions[name], settings.device)
            if took < best.get(form, math.inf):
                best[form], found.fastest[form] = took, name
    return found


def _bare(scene: Scene, mixing: PrefixTranslation) -> Action | None:
    """The products of all layers alone; only of one group of maps, each of one layer of its own."""
    weights = [m.weight.transpose(1, 2).flatten(2) for m in mixing.maps[0]]
    count, inputs, outputs = weights[0].shape
    alone = len(mixing.groups) == 1 and inputs == scene.states[0].shape[2]
    if not alone or len(scene.source.layers) < count:
        return None
    there: dict[str, Any] = {"device": scene.target.device, "dtype": scene.target.dtype}
    out = torch.empty(count, scene.num_tokens, outputs, **there)

    def multiply() -> None:
        for states, stacked in zip(scene.states, weights, strict=True):
            torch.bmm(states[:count], stacked, out=out)

    return multiply


@torch.no_grad()
def time_length(
    scene: Scene, forms: Mapping[str, Both], rate: Mapping[str, float], settings: SwitchSettings
) -> dict[str, Any]:
    """All rows of one pair at one length."""
    timed, mixing = _translations(scene, forms, settings), forms["mixing"][0]
    actions, details = timed.actions, timed.details
    if (bare := _bare(scene, mixing)) is not None:
        actions["bare products"] = bare
        details["bare products"] = {"flops": mixing.flops(scene.num_tokens)}
    translate = actions[timed.fastest["mixing"]]
    chunk = _fitting_chunk(scene, settings.prefill_chunk)
    paths: dict[str, Action] = {
        "step": scene.step,
        "switch": lambda: (translate(), scene.step()),
        "re-prefill": functools.partial(scene.read, 0, scene.num_tokens, chunk),
    }
    for name, action in paths.items():
        clock.warmed_up(action, settings.device)
        actions[name] = action
    phases = {"translation": translate, **paths}
    extra = {name: clock.extra_bytes(a, settings.device) for name, a in phases.items()}
    refused = _graphs(phases, actions) if settings.device != "cpu" and settings.graphs else {}
    if "translation (graph)" in actions:
        details["translation (graph)"] = details[timed.fastest["mixing"]]
    times = _in_turns(actions, settings)
    held = {
        "weights": nbytes(*scene.target.model.parameters()),
        "translator": mixing.nbytes,
        "states": nbytes(*scene.states),
        "cache": scene.memory.nbytes,
    }
    return {
        "tokens": scene.num_tokens,
        "fastest": timed.fastest,
        "prefill_chunk": chunk,
        "rows": _rows(times, details, rate),
        "ratios": _ratios(times),
        "held_bytes": held,
        "extra_bytes": extra,
        "peak_bytes": peaks(held, extra),
        "not_captured": refused,
    }


def _fitting_chunk(scene: Scene, asked: int | None) -> int:
    """Tokens of a re-prefill's chunks: all of them, halved until memory suffices."""
    chunk = asked or scene.num_tokens
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


def _graphs(phases: Mapping[str, Action], actions: dict[str, Action]) -> dict[str, str]:
    """Add each phase as a CUDA graph; returns why some are none."""
    refused = {}
    for name, action in phases.items():
        try:
            actions[f"{name} (graph)"] = clock.captured(action)
        except RuntimeError as error:
            refused[name] = " ".join(str(error).split())[:200]
    return refused


def _in_turns(actions: Mapping[str, Action], settings: SwitchSettings) -> dict[str, list[float]]:
    for action in actions.values():
        clock.warmed_up(action, settings.device)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(settings.trials):
        for name, action in actions.items():
            times[name].append(clock.seconds(action, settings.device))
    return times


def _rows(
    times: Mapping[str, Sequence[float]],
    details: Mapping[str, dict[str, Any]],
    rate: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    rows = {
        name: {**details.get(name, {}), **clock.summary(found)} for name, found in times.items()
    }
    for row in rows.values():
        for work, best in (("flops", "gemm_flops"), ("bytes", "copy_bytes")):
            if work in row:
                share = f"of_{best.split('_')[0]}_rate"
                row[share] = row[work] / row["median_s"] / rate[best]
    return rows


def _ratios(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """A re-prefill's time by a switch's, round by round; of graphs both are graphs."""
    found = {}
    for kind in ("", " (graph)"):
        if f"switch{kind}" in times and f"re-prefill{kind}" in times:
            both = zip(times[f"re-prefill{kind}"], times[f"switch{kind}"], strict=True)
            found[f"re-prefill / switch{kind}"] = [float(slow / quick) for slow, quick in both]
    return found


def peaks(held: Mapping[str, int], extra: Mapping[str, int | None]) -> dict[str, int]:
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
