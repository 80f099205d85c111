"""Stage 1 of a pair: passes over the data, the sums of each, and the maps solved from them.

Sums that do not fit in memory together are made one part after the other, each in a pass of its
own. A runtime runs the models (:class:`Rows`); all else is the same code for MLX and PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import Moments, check_tokens, moment_widths, solve_maps
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, token_weights
from kvlingo_mlx.stage1.selection import (
    METHODS,
    Candidates,
    Tiles,
    as_numpy,
    candidates,
    choose,
    tile_bytes,
)
from kvlingo_mlx.tokenization.samples import Sample

MEMORY = 8 * 2**30  # bytes of sums at once, which leaves room for the models in 16 GB
KINDS = ("xx", "xy", "yy")
COUNTS = ("part", "read", "used", "tokens", "longest", "ranks", "ridges")


class Sums(Protocol):
    """The sums of :class:`.closed_form.Moments`, where a runtime has its rows."""

    tokens: int
    xx: Any
    xy: Any
    yy: Any

    def add(self, x: Any, y: Any, weights: Any = None) -> None: ...


class Rows(Protocol):
    """Two models whose states are a regression's inputs and outputs, row by row.

    With one tokenizer, a row is a token. With two, a row is a translated source token, and the
    target's side is the mean over the target tokens of its minimal group (paper: appendix
    "Cross-tokenizer cache translation", paragraph "Initialising the translators").
    """

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[Any, Any]]:
        """The source's and the target's states of a prefix, from its first row to its last."""

    def rows(self, states: Any, side: str, layer: int) -> Any:
        """One side of a layer's states, (T, d), as :meth:`sums` adds them."""

    def joined(self, rows: Sequence[Any]) -> Any:
        """Rows side by side, (T, sum of d)."""

    def wide(self, rows: Any) -> Any:
        """Rows in float64."""

    def array(self, array: np.ndarray) -> Any:
        """An array where the sums are."""

    def sums(self, inputs: int, outputs: int) -> Sums:
        """Empty sums of a map."""

    def attention_mass(self, sample: Sample) -> np.ndarray:
        """The attention that the continuation pays to each prefix position (eq. "attn-norm")."""


@dataclass(frozen=True)
class Part:
    """The sums of one pass: of some maps, or of some target layers of a side to choose them by."""

    maps: tuple[str, ...] = ()
    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Hooks:
    """Functions called while a fit proceeds.

    Attributes:
        progress: Called after each usable sample with their number in this pass, the passes of its
            kind that are done, and the number of these passes.
        keep: Called after each sample and each pass, to write the state from time to time.
        solved: Called after each solved map with their number so far.
    """

    progress: Callable[[int, int, int], None] = lambda used, done, passes: None
    keep: Callable[[], None] = lambda: None
    solved: Callable[[int], None] = lambda number: None


@dataclass
class ClosedForm:
    """A fit in closed form (paper: "Training the translator", equation (3.2)), resumable.

    Attributes:
        config: The config of the translator; the assignment is replaced by what is chosen.
        models: The two models.
        samples: The samples from a number on, the same ones for each pass.
        norm: The norm, by its full name.
        method: How source layers are chosen from data; any other name keeps those of ``config``.
        nu: The number of source layers to choose for each target layer.
        memory: Most bytes of sums at once.
        hooks: What is told on the way.
        ridge: The ridge of each map, as a share of its inputs' mean square; None chooses one.
        weights: The maps solved so far, in float64, by their names in the format.
        ranks: Their input directions that the data span.
        ridges: Their ridges.
        part: The number of passes that are done.
        read: The samples of this pass so far; 0 between two passes.
        used: The usable samples of this pass, or of the last one between two passes.
        tokens: Their rows.
        longest: The longest prefix among them, in tokens.
    """

    config: TranslatorConfig
    models: Rows
    samples: Callable[[int], Iterable[Sample]]
    norm: str = "frobenius"
    method: str | None = None
    nu: int = 1
    memory: int = MEMORY
    hooks: Hooks = field(default_factory=Hooks)
    ridge: float | None = None
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    ridges: list[float] = field(default_factory=list)
    part: int = 0
    read: int = 0
    used: int = 0
    tokens: int = 0
    longest: int = 0
    _sums: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Make all passes; ``weights``, ``ranks`` and ``config`` are then complete.

        An attention norm weighs tokens differently in each layer. A choice of layers then counts
        every token alike, and the data are read once more for the maps.

        Raises:
            ValueError: No sample is usable, or there are fewer tokens than a map has unknowns.
        """
        before = 0
        for plan in (self._parts_to_choose, self._parts_to_solve):
            parts = plan()
            for done, part in enumerate(parts):
                if before + done == self.part:
                    self._pass(part, done, len(parts))
            before += len(parts)

    @property
    def lowest(self) -> int:
        """The fewest input directions that the data of any map span."""
        return min(self.ranks)

    def facts(self) -> dict[str, float]:
        """What a provenance keeps of the samples and the solution.

        ``ridge`` is the one that was given, or the median of those that were chosen.
        """
        return {
            "ridge": float(np.median(self.ridges)),
            "samples": self.used,
            "prefix_tokens": self.tokens,
            "longest_prefix": self.longest,
            "lowest_rank": self.lowest,
        }

    # ---- what each pass sums --------------------------------------------------------------

    def _parts_to_choose(self) -> list[Part]:
        if self.method not in METHODS:
            return []
        reads = self._candidates
        sizes = {side: tile_bytes(self.config.source.layers, reads, side) for side in SIDES}
        if sum(between + sum(each.values()) for between, each in sizes.values()) <= self.memory:
            return [Part(tiles={side: tuple(reads) for side in SIDES})]
        return [
            Part(tiles={side: tuple(batch)})
            for side, (between, each) in sizes.items()
            for batch in batches(each, self.memory - between)
        ]

    def _parts_to_solve(self) -> list[Part]:
        if self.method in METHODS and self._shared:
            return []  # solved from the sums that chose the layers
        widths = moment_widths(self.config).items()
        sizes = {name: 8 * inputs * (inputs + outputs) for name, (inputs, outputs) in widths}
        return [Part(maps=tuple(batch)) for batch in batches(sizes, self.memory)]

    @property
    def _candidates(self) -> Candidates:
        return candidates(self.config.source.layers, self.config.target.layers)

    @property
    def _shared(self) -> bool:
        """Whether a token weighs the same in every layer."""
        return self.norm not in ATTENTION_NORMS

    # ---- one pass -------------------------------------------------------------------------

    def _pass(self, part: Part, done: int, passes: int) -> None:
        self._begin(part)
        norm = "frobenius" if part.tiles and not self._shared else self.norm
        for sample in self.samples(self.read):
            self.read += 1
            # Without a continuation, no token attends to the prefix.
            if sample.num_translated and (sample.continuation or self._shared):
                self._add(part, sample, norm)
                self.used += 1
                self.longest = max(self.longest, len(sample.prefix))
                self.hooks.progress(self.used, done, passes)
            self.hooks.keep()
        if self.used == 0:
            raise ValueError(
                "the data hold no usable sample: every prefix is empty or too long"
                + ("" if self._shared else ", or nothing follows it")
            )
        check_tokens(self.config, self.tokens)
        if part.tiles:
            self._choose(part.tiles)
        else:
            self._solve({name: _numpy(sums) for name, sums in self._sums.items()})
            self._sums = {}
        self.part, self.read = self.part + 1, 0
        self.hooks.keep()

    def _begin(self, part: Part) -> None:
        """Make the pass's sums, but for those of a pass that is resumed."""
        reads = {
            side: {t: self._candidates[t] for t in layers} for side, layers in part.tiles.items()
        }
        if self.read:
            for side, read in reads.items():
                self._sums[side].reads = read
            return
        self.used = self.tokens = self.longest = 0
        if part.maps:
            widths = moment_widths(self.config)
            self._sums = {name: self.models.sums(*widths[name]) for name in part.maps}
            return
        # The tiles between source layers serve every pass of their side.
        self._sums = {side: self._sums.get(side, Tiles({})) for side in part.tiles}
        for side, tiles in self._sums.items():
            tiles.turn_to(reads[side])

    def _add(self, part: Part, sample: Sample, norm: str) -> None:
        """Add a sample to the sums, span by span."""
        mass = partial(self.models.attention_mass, sample)
        weights = token_weights(norm, len(sample.prefix), mass)
        if weights is not None:
            weights = sample.aligned.spread(weights) if sample.aligned is not None else weights
            weights = self.models.array(weights)
        start = 0
        for read, wanted in self.models.spans(sample, self.config.capture):
            stop = start + len(self.models.rows(read, SIDES[0], 0))
            span = None if weights is None else weights[:, start:stop]
            if part.tiles:
                self._add_tiles(read, wanted, span)
            else:
                self._add_maps(read, wanted, span)
            start = stop
        self.tokens += start

    def _add_maps(self, read: Any, wanted: Any, weights: Any) -> None:
        models = self.models
        inputs = cache(partial(models.rows, read))
        for m in maps_of(self.config):
            if m.name in self._sums:
                x = models.joined([inputs(side, layer) for side, layer in m.reads])
                y = models.joined([models.rows(wanted, side, m.layer) for side in m.writes])
                own = None if weights is None else weights[m.layer % len(weights)]
                self._sums[m.name].add(x, y, own)

    def _add_tiles(self, read: Any, wanted: Any, weights: Any) -> None:
        models, ends = self.models, (self.config.source.layers, self.config.target.layers)
        for side, tiles in self._sums.items():
            xs, ys = (
                [models.wide(models.rows(states, side, layer)) for layer in range(len(layers))]
                for states, layers in zip((read, wanted), ends, strict=True)
            )
            tiles.add(xs, ys, None if weights is None else weights[0])

    # ---- what a pass leads to -------------------------------------------------------------

    def _choose(self, part: Mapping[str, Sequence[int]]) -> None:
        """Choose the source layers of some target layers, and solve their maps if possible."""
        chosen = {side: list(self.config.assignment.side(side)) for side in SIDES}
        moments: dict[str, Moments] = {}
        for side in part:
            tiles = self._sums[side]
            for t, layers in choose(tiles, str(self.method), self.nu).items():
                chosen[side][t] = layers
                moments[f"{side}.{t}"] = tiles.moments(t, layers)
        assignment = Assignment(*(tuple(chosen[side]) for side in SIDES))
        self.config = dataclasses.replace(self.config, assignment=assignment)
        if self._shared:
            self._solve(moments)
        for side in part:
            self._sums[side].turn_to({})

    def _solve(self, moments: Mapping[str, Moments]) -> None:
        numbers = count(len(self.weights) + 1)
        solved = lambda: self.hooks.solved(next(numbers))  # noqa: E731
        weights, found = solve_maps(self.config, moments, solved, self.ridge)
        self.weights |= weights
        self.ranks += [solution.rank for solution in found]
        self.ridges += [solution.ridge for solution in found]

    # ---- the state on disk ----------------------------------------------------------------

    def tensors(self) -> dict[str, np.ndarray]:
        """The maps solved so far and the sums of this pass, by name."""
        found = {f"weights/{name}": weight for name, weight in self.weights.items()}
        for name, sums in self._sums.items():
            named = sums.tensors() if name in SIDES else {k: getattr(sums, k) for k in KINDS}
            found |= {f"{name}/{key}": as_numpy(array) for key, array in named.items()}
        return found

    def counts(self) -> dict[str, Any]:
        """The numbers beside :meth:`tensors`, and the source layers chosen so far."""
        own = {name: getattr(self, name) for name in COUNTS}
        return {**own, "assignment": self.config.assignment.to_json()}

    def restore(self, tensors: Mapping[str, np.ndarray], counts: Mapping[str, Any]) -> None:
        """Become what gave :meth:`tensors` and :meth:`counts`, in either runtime."""
        for name in COUNTS:
            setattr(self, name, counts[name])
        assignment = Assignment.from_json(counts["assignment"])
        self.config = dataclasses.replace(self.config, assignment=assignment)
        parts: dict[str, dict[str, np.ndarray]] = {}
        for path, array in tensors.items():
            name, key = path.split("/", 1)
            parts.setdefault(name, {})[key] = array
        self.weights = parts.pop("weights", {})
        for name, arrays in parts.items():
            found = {key: self.models.array(array) for key, array in arrays.items()}
            if name in SIDES:
                self._sums[name] = Tiles.restored(found, self.tokens)
                continue
            self._sums[name] = sums = self.models.sums(*moment_widths(self.config)[name])
            sums.tokens = self.tokens
            for key, tensor in found.items():
                setattr(sums, key, tensor)


def batches(sizes: Mapping[Any, int], memory: int) -> Iterator[list[Any]]:
    """Names in order, in batches that fit into ``memory``, with at least one name each."""
    batch: list[Any] = []
    room = memory
    for name, size in sizes.items():
        if batch and size > room:
            yield batch
            batch, room = [], memory
        batch.append(name)
        room -= size
    if batch:
        yield batch


def _numpy(sums: Any) -> Moments:
    """Sums as NumPy arrays, for the solver."""
    inputs, outputs = sums.xy.shape
    moments = Moments(inputs, outputs, sums.tokens)
    moments.xx, moments.xy, moments.yy = map(as_numpy, (sums.xx, sums.xy, sums.yy))
    return moments
