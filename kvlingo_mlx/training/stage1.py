"""Stage 1 on a GPU or CPU: moments of both models' states, then the shared solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Map, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import Moments, check_tokens, moment_widths, solve_maps
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, norm_named, token_weights
from kvlingo_mlx.stage1.selection import Tiles, assignment_of, candidates, choose
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.aligned import paired_states, paired_weights
from kvlingo_mlx.training.torch_model import States, TorchModel, tapped

KINDS = ("xx", "xy", "yy")
SCORE_NUMBERS = 2**28  # the most attention scores in memory at once: 1 GB in float32


class TorchMoments:
    """The sums of :class:`kvlingo_mlx.stage1.closed_form.Moments`, in float64 on a device."""

    def __init__(self, input_width: int, output_width: int, device: torch.device) -> None:
        shapes = (input_width, input_width), (input_width, output_width), (output_width,)
        self.xx, self.xy, self.yy = (
            torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes
        )
        self.tokens = 0

    def add(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Add tokens: ``x`` (T, input), ``y`` (T, output), ``weights`` (T,) or None."""
        x, y = x.double(), y.double()
        weighted = x if weights is None else x * weights[:, None]
        self.xx.addmm_(weighted.T, x)
        self.xy.addmm_(weighted.T, y)
        self.yy += (y * y if weights is None else y * y * weights[:, None]).sum(dim=0)
        self.tokens += len(x)

    def to_numpy(self) -> Moments:
        """The sums as NumPy arrays, for the shared solver."""
        moments = Moments(*self.xy.shape)
        moments.tokens = self.tokens
        moments.xx, moments.xy, moments.yy = (a.cpu().numpy() for a in (self.xx, self.xy, self.yy))
        return moments


@dataclass
class Sums:
    """Sums over the samples read so far; a killed stage 1 resumes from them.

    Attributes:
        parts: :class:`TorchMoments` by map, or :class:`Tiles` by side, from which source layers are
            chosen.
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name; a tile's name ends with its layers."""
        found = {}
        for name, part in self.parts.items():
            for kind in KINDS:
                sums = getattr(part, kind)
                for key, tile in sums.items() if isinstance(sums, dict) else [((), sums)]:
                    layers = key if isinstance(key, tuple) else (key,)
                    found["/".join([name, kind, *map(str, layers)])] = tile
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Restore the results of :meth:`tensors`, on the target's device, and :meth:`counts`."""
        for path, tensor in tensors.items():
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


def sums_of_maps(config: TranslatorConfig, device: torch.device) -> Sums:
    """The sums of every map before the first sample."""
    widths = moment_widths(config)
    return Sums({name: TorchMoments(*width, device) for name, width in widths.items()})


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
    source: TorchModel,
    target: TorchModel,
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
    sums, hooks = sums or sums_of_maps(config, target.device), hooks or Hooks()

    def add(read: States, wanted: States, weights: torch.Tensor | None) -> None:
        for m in maps_of(config):
            x, y = pair(m, read, wanted)
            own = None if weights is None else weights[m.layer % len(weights)]
            sums.parts[m.name].add(x, y, own)

    norm = norm_named(norm)
    _read((source, target), config.capture, samples, norm, sums, add, hooks)
    check_tokens(config, sums.tokens)
    moments = {name: m.to_numpy() for name, m in sums.parts.items()}
    arrays, ranks = solve_maps(config, moments, hooks.solved)
    return arrays, _provenance(norm, sums, ranks)


def select(
    config: TranslatorConfig,
    source: TorchModel,
    target: TorchModel,
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

    def add(read: States, wanted: States, weights: torch.Tensor | None) -> None:
        for side, tiles in sums.parts.items():
            xs, ys = (
                [a.double().to(target.device) for a in states.side(side)]
                for states in (read, wanted)
            )
            tiles.add(xs, ys, None if weights is None else weights[0])

    norm = norm_named(norm)
    shared = norm not in ATTENTION_NORMS
    read_by = norm if shared else "frobenius"
    _read((source, target), config.capture, samples, read_by, sums, add, hooks)
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


@torch.no_grad()
def _read(
    pair: tuple[TorchModel, TorchModel],
    capture: str,
    samples: Iterable[Sample],
    norm: str,
    sums: Sums,
    add: Callable[[States, States, torch.Tensor | None], None],
    hooks: Hooks,
) -> None:
    """Pass both models' states of every usable prefix, and its weights, to ``add``."""
    for sample in samples:
        sums.read += 1
        if sample.num_translated and (sample.continuation or norm not in ATTENTION_NORMS):
            read, wanted = paired_states(*pair, sample, capture)
            target = pair[1]
            mass = partial(_mass, target, sample)
            weights = paired_weights(sample, token_weights(norm, len(sample.prefix), mass))
            add(read, wanted, None if weights is None else torch.tensor(weights).to(target.device))
            sums.used += 1
            sums.longest = max(sums.longest, len(sample.prefix))
        hooks.progress(sums.used)
        hooks.keep()
    if sums.used == 0:
        raise ValueError("the data hold no usable sample: every prefix is empty")


def _mass(target: TorchModel, sample: Sample) -> np.ndarray:
    return attention_mass(target, sample).cpu().numpy()


def _provenance(norm: str, sums: Sums, ranks: Sequence[int]) -> dict[str, object]:
    return {
        "norm": norm,
        "samples": sums.used,
        "prefix_tokens": sums.tokens,
        "lowest_rank": min(ranks),
        "longest_prefix": sums.longest,
    }


def pair(m: Map, read: States, wanted: States) -> tuple[torch.Tensor, torch.Tensor]:
    """A map's inputs (T, in) and its desired outputs (T, out), all heads side by side."""
    goal = torch.cat([wanted.side(side)[m.layer] for side in m.writes], dim=-1)
    inputs = torch.cat([read.side(side)[s] for side, s in m.reads], dim=-1)
    return inputs.to(goal.device), goal


@torch.no_grad()
def attention_mass(target: TorchModel, sample: Sample) -> torch.Tensor:
    """The attention that the continuation's queries pay to each prefix position (eq. "attn-norm").

    It is averaged over the continuation's queries, over heads, and over the layers that read the
    same cache. Positions before a window get 0. (N layers, T), float64.
    """
    start, family = len(sample.prefix), target.family
    readers = family.readers(target.model)
    modules = [
        *(module for attention in target.attentions for module in family.taps(attention)),
        *(family.query_projection(reader) for group in readers for reader in group),
    ]
    with tapped(modules) as taken:
        target.hidden((*sample.prefix, *sample.continuation))
    states = target.states_of(taken, "post_rope")
    rows = []
    for layer, attention in enumerate(target.attentions):
        geometry = target.geometry.layers[layer]
        keys, values = (
            side[layer].view(start + len(sample.continuation), geometry.kv_heads, -1)
            for side in (states.keys, states.values)
        )
        keys = family.attended(attention, keys.transpose(0, 1), values.transpose(0, 1))
        masses = []
        for reader in readers[layer]:
            projected = taken[family.query_projection(reader)][start:]
            queries = family.queries(target.model, reader, projected, start)
            masses.append(_mean_attention(queries, keys, reader.scaling, start, geometry.window))
        rows.append(torch.stack(masses).mean(dim=0))
    return torch.stack(rows)


def _mean_attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, num_prefix: int, window: int | None
) -> torch.Tensor:
    """The mean over queries and heads of softmax(q k) on the prefix, in blocks of queries.

    ``queries`` (Hq, M, D) are at positions num_prefix.., ``keys`` are (H, T + M, D).
    """
    heads, count, dim = queries.shape
    kv_heads, total, _ = keys.shape
    block = max(1, SCORE_NUMBERS // (heads * total))
    keys = keys.float().mT
    positions = torch.arange(total, device=keys.device)
    mass = torch.zeros(num_prefix, dtype=torch.float64, device=keys.device)
    for start in range(0, count, block):
        part = queries[:, start : start + block].float()
        size = part.shape[1]
        scores = (part.reshape(kv_heads, -1, dim) @ keys * scale).view(heads, size, total)
        own = num_prefix + start + torch.arange(size, device=keys.device)[:, None]
        scores.masked_fill_(positions > own, -torch.inf)
        if window is not None:
            scores.masked_fill_(positions <= own - window, -torch.inf)
        mass += scores.softmax(dim=-1)[..., :num_prefix].sum(dim=(0, 1), dtype=torch.float64)
    return mass / (heads * count)
