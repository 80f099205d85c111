"""Stage 1 of a pair: passes over the data, the sums of each, and the maps solved from them.

Where the sums of all maps do not fit in memory together, the data are read again for each group of
maps. A runtime runs the models (:class:`Rows`); all else is the same code for MLX and PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import StateMap, maps_of, maps_states, reads_of, state_maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.phases import phase
from kvlingo_mlx.stage1 import bilinear
from kvlingo_mlx.stage1.closed_form import check_tokens, solve_maps
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, token_weights
from kvlingo_mlx.stage1.selection import METHODS, candidates, greedy, r2
from kvlingo_mlx.stage1.sums import Regression, State, Sums, batches
from kvlingo_mlx.tokenization.samples import Sample

MEMORY = 8 * 2**30  # bytes of sums at once, which leaves room for the models in 16 GB
Maps = Mapping[str, Regression]


class Rows(Protocol):
    """Two models whose states are a regression's inputs and outputs, row by row.

    With one tokenizer, a row is a token. With two, a row is a translated source token, and the
    target's side is the mean over the target tokens of its minimal group (paper: appendix
    "Cross-tokenizer cache translation", paragraph "Initialising the translators").
    """

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[Any, Any]]:
        """The source's and the target's states of a prefix, from its first row to its last."""

    def rows(self, states: Any, side: str, layer: int) -> Any:
        """One side of a layer's states, (T, d)."""

    def wide(self, rows: Any) -> Any:
        """Rows in float64, where the sums are."""

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Such rows of several layers, by columns."""

    def array(self, array: np.ndarray) -> Any:
        """An array where the sums are."""

    def kept(
        self, sample: Sample, tokens: int
    ) -> tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]:
        """Both models' recurrent states after the first ``tokens`` of a prefix, by layer."""

    def attention_mass(self, sample: Sample) -> np.ndarray:
        """The attention that the continuation pays to each prefix position (eq. "attn-norm")."""


@dataclass
class ClosedForm:
    """A fit in closed form (paper: "Training the translator", equation (3.2))."""

    config: TranslatorConfig  # the assignment is replaced by what is chosen
    models: Rows
    # The same ones for each pass; None stands for one that another process reads.
    samples: Callable[[], Iterable[Sample | None]]
    norm: str = "frobenius"  # by its full name
    method: str | None = None  # how source layers are chosen; any other keeps those of ``config``
    nu: int = 1  # source layers to choose for each target layer
    memory: int = MEMORY  # most bytes of sums at once
    ridge: float | None = None  # as a share of a map's mean square; None chooses one for each
    group: Group = field(default_factory=Group)  # processes that share the samples and the solving
    count: int | None = None  # the number of samples of a pass, if known
    # Called after each usable sample with their number in this pass, the passes of its kind that
    # are done, and the number of these; those of other processes count.
    progress: Callable[[int, int, int], None] = lambda used, done, passes: None
    solved: Callable[[int], None] = lambda number: None  # called with the number of maps so far
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # float64, by their names
    ranks: list[int] = field(default_factory=list)  # input directions that the data span
    ridges: list[float] = field(default_factory=list)
    used: int = 0  # the usable samples of the latest pass
    tokens: int = 0  # their rows
    longest: int = 0  # the longest prefix among them, in tokens
    _scores: dict[State, dict[int, float]] = field(default_factory=dict)

    def run(self) -> None:
        """Make all passes; ``weights``, ``ranks`` and ``config`` are then complete.

        An attention norm weighs tokens differently in each layer. A choice of layers then counts
        every token alike.

        Raises:
            ValueError: No sample is usable, or there are fewer tokens than a map has unknowns.
        """
        choosing = self._to_choose()
        for done, maps in enumerate(choosing):
            norm = self.norm if self._shared else "frobenius"
            self._choose(self._summed(maps, norm, done, len(choosing), " to choose layers"))
        solving = self._to_solve()
        for done, maps in enumerate(solving):
            self._solve(self._summed(maps, self.norm, done, len(solving)))
        self._solve_states()

    @property
    def passes(self) -> int:
        """How often the samples are read."""
        return len(self._to_choose()) + len(self._to_solve())

    @property
    def lowest(self) -> int:
        """The fewest input directions that the data of any map span."""
        return min(self.ranks)

    @property
    def result(self) -> tuple[TranslatorConfig, dict[str, np.ndarray], dict[str, Any]]:
        """The config, the maps and what a provenance keeps of them."""
        return self.config, self.weights, {"norm": self.norm, **self.facts()}

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

    def _to_choose(self) -> list[dict[str, Regression]]:
        """By R2 a regression for each source layer alone; greedily one from all of them."""
        found = {}
        if self.method in METHODS:
            every = candidates(self.config.source.layers, self.config.target.layers)
            for t, layers in every.items():
                if maps_states(self.config, t):
                    continue
                parts = [[layer] for layer in layers] if self.method == "r2" else [layers]
                for side in SIDES:
                    for part in parts:
                        reads = reads_of(self.config, side, t, part)
                        found[f"{side}.{t}.{part[0]}"] = Regression(reads, ((side, t),))
            self._check_nu(max(map(len, every.values())))
        return self._batches(found)

    def _to_solve(self) -> list[dict[str, Regression]]:
        return self._batches(
            {
                m.name: Regression(
                    m.reads,
                    tuple((side, m.layer) for side in m.writes),
                    0 if self._shared else m.layer,
                )
                for m in maps_of(self.config)
            }
        )

    def _check_nu(self, largest: int) -> None:
        if not 1 <= self.nu <= largest:
            raise ValueError(
                f"nu is {self.nu}; it must be 1 to {largest}, the source layers that a target "
                "layer can read"
            )

    def _batches(self, maps: Maps) -> list[dict[str, Regression]]:
        return batches(maps, self._source_width, self._target_width, self.memory)

    def _source_width(self, state: State) -> int:
        return self.config.source.layers[state[1]].width(state[0])

    def _target_width(self, state: State) -> int:
        return self.config.target.layers[state[1]].width(state[0])

    @property
    def _shared(self) -> bool:
        """Whether a token weighs the same in every layer."""
        return self.norm not in ATTENTION_NORMS

    # ---- one pass -------------------------------------------------------------------------

    def _summed(self, maps: Maps, norm: str, done: int, passes: int, why: str = "") -> Sums:
        """The sums of some maps over all samples."""
        sums = Sums(maps, self._source_width, self._target_width)
        self.used = self.longest = seen = 0
        again = "" if passes == 1 else f", pass {done + 1} of {passes}"
        with phase(f"reading the samples{why}{again}", self.count) as step:
            for number, sample in enumerate(self.samples(), 1):
                # Without a continuation, no token attends to the prefix.
                usable = sample and sample.num_translated and (sample.continuation or self._shared)
                if sample is not None and usable:
                    self._add(sums, sample, norm)
                    self.used += 1
                    self.longest = max(self.longest, len(sample.prefix))
                if sample is None or usable:
                    seen += 1
                    self.progress(seen, done, passes)
                step(number)
        self._total(sums)
        if self.used == 0:
            raise ValueError(
                "the data hold no usable sample: every prefix is empty or too long"
                + ("" if self._shared else ", or nothing follows it")
            )
        check_tokens(self.config, self.tokens)
        return sums

    def _add(self, sums: Sums, sample: Sample, norm: str) -> None:
        """Add a sample to the sums, span by span."""
        mass = partial(self.models.attention_mass, sample)
        weights = token_weights(norm, len(sample.prefix), mass)
        if weights is not None:
            weights = sample.aligned.spread(weights) if sample.aligned is not None else weights
            weights = self.models.array(weights)
        start = 0
        for read, wanted in self.models.spans(sample, self.config.capture):
            x, y = (self._wide(states) for states in (read, wanted))
            stop = start + len(x((SIDES[0], 0)))
            sums.add(x, y, self.models.joined, None if weights is None else weights[:, start:stop])
            start = stop

    def _wide(self, states: Any) -> Callable[[State], Any]:
        """The rows of a state in float64; kept as the models have them, which is half as large."""
        rows = cache(partial(self.models.rows, states))
        return lambda state: self.models.wide(rows(*state))

    def _total(self, sums: Sums) -> None:
        """Add up what all processes have read in this pass."""
        if self.group.size > 1:
            sums.total(self.group)
            used, tokens = self.group.total(np.array([self.used, sums.tokens]))
            self.used, sums.tokens = int(used), int(tokens)
            self.longest = max(self.group.gathered(self.longest))
        self.tokens = sums.tokens

    # ---- what a pass leads to -------------------------------------------------------------

    def _choose(self, sums: Sums) -> None:
        """Choose the source layers of this pass's maps."""
        # Rounding may break a tie otherwise on another machine.
        for side, t, layer, score in self.group.firsts(lambda: list(self._scored(sums))):
            self._scores.setdefault((side, t), {})[layer] = score
        chosen = {side: list(self.config.assignment.side(side)) for side in SIDES}
        for (side, t), scores in self._scores.items():
            best = sorted(scores, key=lambda layer: (-scores[layer], layer))[: self.nu]
            chosen[side][t] = tuple(sorted(best))
        assignment = Assignment(*(tuple(chosen[side]) for side in SIDES))
        self.config = dataclasses.replace(self.config, assignment=assignment)

    def _scored(self, sums: Sums) -> Iterator[tuple[str, int, int, float]]:
        """Each state of the target with a source layer and its score; the highest are chosen."""
        for name, m in sums.maps.items():
            moments, ((side, t),) = sums.moments(name), m.writes
            if self.method == "r2":
                yield side, t, m.reads[0][1], r2(moments)
                continue
            taken = greedy(moments, self._columns(m.reads), self.nu)
            yield from ((side, t, layer, -float(n)) for n, layer in enumerate(taken))

    def _columns(self, reads: Sequence[State]) -> dict[int, np.ndarray]:
        """The input columns of each source layer."""
        ends = np.cumsum([0, *map(self._source_width, reads)])
        found: dict[int, list[np.ndarray]] = {}
        for (_, layer), start, stop in zip(reads, ends[:-1], ends[1:], strict=True):
            found.setdefault(layer, []).append(np.arange(start, stop))
        return {layer: np.concatenate(parts) for layer, parts in found.items()}

    def _solve(self, sums: Sums) -> None:
        """Solve this pass's maps; every process some of them, beside one another."""
        names = list(sums.maps)
        own = self.group.stretch(names)
        before, numbers = len(self.weights), count(1)

        def solved() -> None:
            self.solved(before + min(next(numbers) * self.group.size, len(names)))
            step()

        with phase("solving the maps", len(own)) as step:
            moments = ((name, sums.moments(name)) for name in own)
            weights, found = solve_maps(self.config, moments, solved, self.ridge)
        made = weights, [each.rank for each in found], [each.ridge for each in found]
        for theirs, ranks, ridges in self.group.gathered(made):
            self.weights |= theirs
            self.ranks += ranks
            self.ridges += ridges

    # ---- recurrent states that are mapped --------------------------------------------------

    def _solve_states(self) -> None:
        """Solve the maps of recurrent states, in passes over the first few samples each."""
        maps = state_maps_of(self.config)
        for some in bilinear.batches(maps, self._state_bytes, self.memory):
            given, wanted = self._states(some)
            own: dict[str, np.ndarray] = {}
            for m in self.group.stretch(some):
                own |= bilinear.solve_states(m, given, wanted[m.layer])
                self.solved(len(self.weights) + len(own) // len(m.shapes))
            for theirs in self.group.gathered(own):
                self.weights |= theirs

    def _states(
        self, maps: Sequence[StateMap]
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """What maps read and write: states (N, heads, value dim, key dim) by layer."""
        reads = sorted({layer for m in maps for layer in m.reads})
        writes = [m.layer for m in maps]
        found: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        for number, sample in enumerate(self.samples()):
            if len(found) * self.group.size >= bilinear.STATES:
                break
            if sample is None or not sample.num_translated:
                continue
            most = len(sample.prefix)  # some texts are cut, since a state depends on the length
            tokens = int(np.random.default_rng(number).integers(-(-most // 2), most + 1))
            given, wanted = self.models.kept(sample, tokens)
            found.append(([given[s] for s in reads], [wanted[t] for t in writes]))
        every = [pair for theirs in self.group.gathered(found) for pair in theirs]

        def by_layer(end: int, layers: Sequence[int]) -> dict[int, np.ndarray]:
            return {t: np.stack([each[end][i] for each in every]) for i, t in enumerate(layers)}

        return by_layer(0, reads), by_layer(1, writes)

    def _state_bytes(self, m: StateMap) -> int:
        """The bytes of the states that a map reads and writes, in float32."""
        layers = [self.config.source.layers[s] for s in m.reads]
        shapes = (g.recurrence.parts[1] for g in (*layers, self.config.target.layers[m.layer])
                  if g.recurrence is not None)  # fmt: skip
        return sum(4 * math.prod(shape) for shape in shapes)
