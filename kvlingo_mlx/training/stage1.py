"""Stage 1: moments of both models' states, then the solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Map, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import Moments, check_tokens, moment_widths, solve_maps
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, norm_named, token_weights
from kvlingo_mlx.stage1.selection import Tiles, assignment_of, candidates, choose
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.runtime import Pair

KINDS = ("xx", "xy", "yy")
Add = Callable[[Any, Any, Any], None]  # the source's states, the target's, the rows' weights


@dataclass
class Sums:
    """Sums over the samples read so far; a killed stage 1 resumes from them.

    Attributes:
        parts: :class:`~.runtime.Moments` by map, or :class:`Tiles` by side, from which source
            layers are chosen.
        read: The number of all samples.
        used: The number of usable samples.
        longest: The longest prefix of these, in tokens.
    """

    parts: dict[str, Any]
    read: int = 0
    used: int = 0
    longest: int = 0

    @property
    def tokens(self) -> int:
        return next(iter(self.parts.values())).tokens

    def counts(self) -> dict[str, int]:
        """The numbers of samples and tokens in the sums."""
        return {name: getattr(self, name) for name in ("read", "used", "longest", "tokens")}

    def tensors(self) -> dict[str, np.ndarray]:
        """The sums by name; a tile's name ends with its layers."""
        found = {}
        for name, part in self.parts.items():
            for kind in KINDS:
                sums = getattr(part, kind)
                for key, tile in sums.items() if isinstance(sums, dict) else [((), sums)]:
                    layers = key if isinstance(key, tuple) else (key,)
                    found["/".join([name, kind, *map(str, layers)])] = as_numpy(tile)
        return found

    def restore(
        self, pair: Pair, tensors: Mapping[str, np.ndarray], counts: Mapping[str, int]
    ) -> None:
        """Restore the results of :meth:`tensors` and :meth:`counts`, in either runtime."""
        for path, array in tensors.items():
            tensor = pair.array(array)
            name, kind, *layers = path.split("/")
            key = tuple(map(int, layers))
            if key:
                getattr(self.parts[name], kind)[key if len(key) > 1 else key[0]] = tensor
            else:
                setattr(self.parts[name], kind, tensor)
        for part in self.parts.values():
            part.tokens = counts["tokens"]
        self.read, self.used = counts["read"], counts["used"]
        self.longest = counts.get("longest", 0)  # older files lack it


def sums_of_maps(config: TranslatorConfig, pair: Pair) -> Sums:
    """The sums of every map before the first sample."""
    widths = moment_widths(config)
    return Sums({name: pair.moments(*width) for name, width in widths.items()})


def sums_of_tiles(config: TranslatorConfig) -> Sums:
    """The sums of both sides before the first sample."""
    reads = candidates(config.source.layers, config.target.layers)
    return Sums({side: Tiles(reads) for side in SIDES})


@dataclass(frozen=True)
class Hooks:
    """Functions called while a fit proceeds.

    Attributes:
        progress: Called after each sample with the number of samples used so far.
        keep: Called after each sample, to write the sums from time to time.
        solved: Called after each solved map.
    """

    progress: Callable[[int], None] = lambda used: None
    keep: Callable[[], None] = lambda: None
    solved: Callable[[], None] = lambda: None


def closed_form(
    config: TranslatorConfig,
    pair: Pair,
    samples: Iterable[Sample],
    *,
    norm: str = "frobenius",
    sums: Sums | None = None,
    hooks: Hooks | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Fit linear maps in closed form (paper: "Training the translator", equation (3.2)).

    ``sums`` are the sums over the samples that were read before ``samples``.

    Returns:
        The maps (float64) by their names in the format, and the provenance of the fit.

    Raises:
        ValueError: There is no such norm, or no usable sample.
    """
    sums, hooks = sums or sums_of_maps(config, pair), hooks or Hooks()

    def add(read: Any, wanted: Any, weights: Any) -> None:
        for m in maps_of(config):
            x, y = rows(pair, m, read, wanted)
            own = None if weights is None else weights[m.layer % len(weights)]
            sums.parts[m.name].add(x, y, own)

    norm = norm_named(norm)
    _read(pair, config.capture, samples, norm, sums, add, hooks)
    check_tokens(config, sums.tokens)
    moments = {name: _numpy(m) for name, m in sums.parts.items()}
    arrays, ranks = solve_maps(config, moments, hooks.solved)
    return arrays, _provenance(norm, sums, ranks)


def select(
    config: TranslatorConfig,
    pair: Pair,
    samples: Iterable[Sample],
    method: str,
    *,
    norm: str = "frobenius",
    sums: Sums | None = None,
    hooks: Hooks | None = None,
) -> tuple[Assignment, dict[str, np.ndarray], dict[str, object]]:
    """Choose ``config.nu`` source layers from data ("r2" or "greedy"), and solve their maps.

    An attention norm weighs tokens differently in each layer. The choice then counts every token
    alike, and the maps are left to :func:`closed_form`. The sums take 16 GB a side for 36 layers of
    width 1024 on both sides.

    Returns:
        The assignment, the maps (none under an attention norm), and the provenance of the fit.

    Raises:
        ValueError: There is no such norm or method, or no usable sample.
    """
    sums, hooks = sums or sums_of_tiles(config), hooks or Hooks()

    counts = [len(layers) for layers in (config.source.layers, config.target.layers)]

    def add(read: Any, wanted: Any, weights: Any) -> None:
        for side, tiles in sums.parts.items():
            xs, ys = (
                [pair.wide(pair.rows(states, side, layer)) for layer in range(count)]
                for states, count in zip((read, wanted), counts, strict=True)
            )
            tiles.add(xs, ys, None if weights is None else weights[0])

    norm = norm_named(norm)
    shared = norm not in ATTENTION_NORMS
    read_by = norm if shared else "frobenius"
    _read(pair, config.capture, samples, read_by, sums, add, hooks)
    check_tokens(config, sums.tokens)
    chosen = {side: choose(tiles, method, config.nu) for side, tiles in sums.parts.items()}
    config = dataclasses.replace(config, assignment=assignment_of(chosen))
    arrays: dict[str, np.ndarray] = {}
    ranks = [0]
    if shared:
        moments = {
            f"{side}.{t}": sums.parts[side].moments(t, layers)
            for side in SIDES
            for t, layers in chosen[side].items()
        }
        arrays, ranks = solve_maps(config, moments, hooks.solved)
    return config.assignment, arrays, _provenance(norm, sums, ranks)


def _read(
    pair: Pair,
    capture: str,
    samples: Iterable[Sample],
    norm: str,
    sums: Sums,
    add: Add,
    hooks: Hooks,
) -> None:
    """Pass both models' states of every usable prefix, and its weights, to ``add``."""
    for sample in samples:
        sums.read += 1
        if sample.num_translated and (sample.continuation or norm not in ATTENTION_NORMS):
            read, wanted = pair.states(sample, capture)
            mass = partial(pair.attention_mass, sample)
            weights = _paired(sample, token_weights(norm, len(sample.prefix), mass))
            add(read, wanted, None if weights is None else pair.array(weights))
            sums.used += 1
            sums.longest = max(sums.longest, len(sample.prefix))
        hooks.progress(sums.used)
        hooks.keep()
    if sums.used == 0:
        raise ValueError("the data hold no usable sample: every prefix is empty")


def _paired(sample: Sample, weights: np.ndarray | None) -> np.ndarray | None:
    """The weights (layers or 1, rows) of a prefix's rows, from those of its tokens."""
    if sample.aligned is None or weights is None:
        return weights
    return sample.aligned.spread(weights)


def _provenance(norm: str, sums: Sums, ranks: Sequence[int]) -> dict[str, object]:
    return {
        "norm": norm,
        "samples": sums.used,
        "prefix_tokens": sums.tokens,
        "lowest_rank": min(ranks),
        "longest_prefix": sums.longest,
    }


def rows(pair: Pair, m: Map, read: Any, wanted: Any) -> tuple[Any, Any]:
    """A map's inputs (T, in) and its desired outputs (T, out), all heads side by side."""
    inputs = [pair.rows(read, side, layer) for side, layer in m.reads]
    goal = [pair.rows(wanted, side, m.layer) for side in m.writes]
    return pair.joined(inputs), pair.joined(goal)


def as_numpy(array: Any) -> np.ndarray:
    """Sums of either runtime as a NumPy array."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def _numpy(sums: Any) -> Moments:
    """Sums as NumPy arrays, for the solver."""
    inputs, outputs = sums.xy.shape
    moments = Moments(inputs, outputs, sums.tokens)
    moments.xx, moments.xy, moments.yy = map(as_numpy, (sums.xx, sums.xy, sums.yy))
    return moments
