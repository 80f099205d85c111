"""Stage 1 of a pair: passes over the data, the sums of each, and the maps solved from them.

Sums that do not fit in memory together are made one part after the other, each in a pass of its
own. A runtime runs the models (:class:`Rows`); all else is the same code for MLX and PyTorch.
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
from kvlingo_mlx.phases import Step, phase
from kvlingo_mlx.stage1 import bilinear
from kvlingo_mlx.stage1.closed_form import check_tokens, solve_maps
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, token_weights
from kvlingo_mlx.stage1.selection import METHODS, candidates, choose
from kvlingo_mlx.stage1.tiles import Regression, State, Tiles, as_numpy, batches
from kvlingo_mlx.tokenization.samples import Sample

MEMORY = 8 * 2**30  # bytes of sums at once, which leaves room for the models in 16 GB
COUNTS = ("part", "read", "used", "tokens", "longest", "ranks", "ridges")


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

    def array(self, array: np.ndarray) -> Any:
        """An array where the sums are."""

    def kept(
        self, sample: Sample, tokens: int
    ) -> tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]:
        """Both models' recurrent states after the first ``tokens`` of a prefix, by layer."""

    def attention_mass(self, sample: Sample) -> np.ndarray:
        """The attention that the continuation pays to each prefix position (eq. "attn-norm")."""


@dataclass(frozen=True)
class Part:
    """One pass over the data.

    Attributes:
        maps: The maps that it sums for, by name.
        chooses: Whether their source layers are yet to be chosen.
    """

    maps: Mapping[str, Regression]
    chooses: bool


@dataclass(frozen=True)
class Hooks:
    """Functions called while a fit proceeds.

    Attributes:
        progress: Called after each usable sample with their number in this pass, the passes of its
            kind that are done, and the number of these passes. Those of other processes count.
        keep: Called after each sample and each pass, to write the state from time to time. With
            several processes, all of them call it for the samples of each.
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
        samples: The samples from a number on, the same ones for each pass; None stands for one
            that another process reads.
        norm: The norm, by its full name.
        method: How source layers are chosen from data; any other name keeps those of ``config``.
        nu: The number of source layers to choose for each target layer.
        memory: Most bytes of sums at once.
        hooks: What is told on the way.
        ridge: The ridge of each map, as a share of its inputs' mean square; None chooses one.
        count: The number of samples of a pass, if known.
        group: The processes that share the samples and the solving. Between two of the
            :meth:`gather` calls, sums and counts are of what this process has read.
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
    samples: Callable[[int], Iterable[Sample | None]]
    norm: str = "frobenius"
    method: str | None = None
    nu: int = 1
    memory: int = MEMORY
    hooks: Hooks = field(default_factory=Hooks)
    ridge: float | None = None
    group: Group = field(default_factory=Group)
    count: int | None = None
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    ridges: list[float] = field(default_factory=list)
    part: int = 0
    read: int = 0
    used: int = 0
    tokens: int = 0
    longest: int = 0
    _tiles: Tiles = field(default_factory=lambda: Tiles({}))

    def run(self) -> None:
        """Make all passes; ``weights``, ``ranks`` and ``config`` are then complete.

        An attention norm weighs tokens differently in each layer. A choice of layers then counts
        every token alike, and the data are read once more for the maps.

        Raises:
            ValueError: No sample is usable, or there are fewer tokens than a map has unknowns.
        """
        before = 0
        for plan in self._plans:
            parts = plan()
            for done, part in enumerate(parts):
                if before + done == self.part:
                    self._read(part, done, len(parts))
                    self._lead(part, parts[done + 1].maps if part is not parts[-1] else {})
            before += len(parts)
        self._solve_states(before)

    @property
    def _plans(self) -> tuple[Callable[[], list[Part]], ...]:
        return self._parts_to_choose, self._parts_to_solve

    @property
    def passes(self) -> int:
        """How often the samples are read."""
        return sum(len(plan()) for plan in self._plans)

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
        every = candidates(self.config.source.layers, self.config.target.layers)
        reads = {t: own for t, own in every.items() if not maps_states(self.config, t)}
        return self._parts(
            {
                f"{side}.{t}": Regression(reads_of(self.config, side, t, own), ((side, t),))
                for side in SIDES
                for t, own in reads.items()
            },
            chooses=True,
        )

    def _parts_to_solve(self) -> list[Part]:
        if self.method in METHODS and self._shared:
            return []  # solved from the sums that chose the layers
        return self._parts(
            {
                m.name: Regression(
                    m.reads,
                    tuple((side, m.layer) for side in m.writes),
                    0 if self._shared else m.layer,
                )
                for m in maps_of(self.config)
            },
            chooses=False,
        )

    def _parts(self, maps: Mapping[str, Regression], chooses: bool) -> list[Part]:
        widths, outputs = self._widths()
        return [Part(batch, chooses) for batch in batches(maps, widths, outputs, self.memory)]

    def _widths(self) -> tuple[Callable[[State], int], Callable[[State], int]]:
        """The width of a state of the source, and of the target."""
        source, target = self.config.source.layers, self.config.target.layers
        return (
            lambda state: source[state[1]].width(state[0]),
            lambda state: target[state[1]].width(state[0]),
        )

    @property
    def _shared(self) -> bool:
        """Whether a token weighs the same in every layer."""
        return self.norm not in ATTENTION_NORMS

    # ---- one pass -------------------------------------------------------------------------

    def _read(self, part: Part, done: int, passes: int) -> None:
        if self.read == 0:
            self.used = self.tokens = self.longest = 0
            self._tiles.turn_to(part.maps)
        self._tiles.maps = part.maps  # which a file does not hold
        norm = "frobenius" if part.chooses and not self._shared else self.norm
        again = "" if passes == 1 else f", pass {done + 1} of {passes}"
        with phase(f"reading the samples{again}", self.count) as step:
            self._read_samples(norm, lambda seen: self.hooks.progress(seen, done, passes), step)
        self.gather()
        if self.used == 0:
            raise ValueError(
                "the data hold no usable sample: every prefix is empty or too long"
                + ("" if self._shared else ", or nothing follows it")
            )
        check_tokens(self.config, self.tokens)

    def _read_samples(self, norm: str, told: Callable[[int], None], step: Step) -> None:
        seen = self.used
        for sample in self.samples(self.read):
            self.read += 1
            # Without a continuation, no token attends to the prefix.
            usable = sample and sample.num_translated and (sample.continuation or self._shared)
            if sample is not None and usable:
                self._add(sample, norm)
                self.used += 1
                self.longest = max(self.longest, len(sample.prefix))
            if sample is None or usable:
                seen += 1
                told(seen)
            step(self.read)
            self.hooks.keep()

    def _add(self, sample: Sample, norm: str) -> None:
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
            span = None if weights is None else weights[:, start:stop]
            self._tiles.add(x, y, span)
            start = stop
        self.tokens += start

    def gather(self, ends: bool = True) -> None:
        """Add up what all processes have read in this pass, at one point of it for all.

        Where the pass goes on (``ends`` is false), the leading process has all sums, as one
        process would that had read every sample, and the others begin anew.
        """
        if self.group.size == 1:
            return
        widths, outputs = self._widths()
        self._tiles.total(self.group, widths, outputs, self.models.array)
        longest = self.longest * (np.arange(self.group.size) == self.group.rank)
        used, tokens, *every = self.group.total(np.array([self.used, self.tokens, *longest]))
        counts = int(used), int(tokens), int(max(every))
        self.used, self.tokens, self.longest = counts if ends or self.group.leads else (0, 0, 0)
        self._tiles.tokens = self.tokens
        if not (ends or self.group.leads):
            self._tiles.clear()

    def _wide(self, states: Any) -> Callable[[State], Any]:
        """The rows of a state in float64; kept as the models have them, which is half as large."""
        rows = cache(partial(self.models.rows, states))
        return lambda state: self.models.wide(rows(*state))

    # ---- what a pass leads to -------------------------------------------------------------

    def _lead(self, part: Part, following: Mapping[str, Regression]) -> None:
        """Choose the source layers of this pass's maps, or solve them, or both."""
        chosen = (
            self._choose() if part.chooses else {name: m.reads for name, m in part.maps.items()}
        )
        if self._shared or not part.chooses:
            self._solve(chosen)
        self._tiles.turn_to(following)
        self.part, self.read = self.part + 1, 0
        self.hooks.keep()

    def _choose(self) -> dict[str, tuple[State, ...]]:
        """Choose the source layers of this pass's maps."""
        # Rounding may break a tie otherwise on another machine.
        told = self.group.firsts(lambda: choose(self._tiles, str(self.method), self.nu))
        found = {name: tuple((side, i) for side, i in reads) for name, reads in told.items()}
        chosen = {side: list(self.config.assignment.side(side)) for side in SIDES}
        for name, reads in found.items():
            ((side, t),) = self._tiles.maps[name].writes
            chosen[side][t] = tuple(dict.fromkeys(i for _, i in reads))
        assignment = Assignment(*(tuple(chosen[side]) for side in SIDES))
        self.config = dataclasses.replace(self.config, assignment=assignment)
        return found

    def _solve(self, chosen: Mapping[str, Sequence[State]]) -> None:
        """Solve maps from what each reads; every process some of them, beside one another."""
        names, rank, size = list(chosen), self.group.rank, self.group.size
        own = names[rank * len(names) // size : (rank + 1) * len(names) // size]
        before, numbers = len(self.weights), count(1)

        def solved() -> None:
            self.hooks.solved(before + min(next(numbers) * size, len(names)))
            step()

        moments = ((name, self._tiles.moments(name, chosen[name])) for name in own)
        with phase("solving the maps", len(own)) as step:
            weights, found = solve_maps(self.config, moments, solved, self.ridge)
        told = weights, [each.rank for each in found], [each.ridge for each in found]
        for theirs, ranks, ridges in self.group.gathered(told):
            self.weights |= theirs
            self.ranks += ranks
            self.ridges += ridges

    # ---- recurrent states that are mapped --------------------------------------------------

    def _solve_states(self, before: int) -> None:
        """Solve the maps of recurrent states, in passes over the first few samples each."""
        maps = state_maps_of(self.config)
        for number, some in enumerate(bilinear.batches(maps, self._state_bytes, self.memory)):
            if before + number != self.part:
                continue
            given, wanted = self._states(some)
            rank, size = self.group.rank, self.group.size
            own: dict[str, np.ndarray] = {}
            for m in some[rank * len(some) // size : (rank + 1) * len(some) // size]:
                own |= bilinear.solve_states(m, given, wanted[m.layer])
                self.hooks.solved(len(self.weights) + len(own) // len(m.shapes))
            for theirs in self.group.gathered(own):
                self.weights |= theirs
            self.part += 1
            self.hooks.keep()

    def _states(
        self, maps: Sequence[StateMap]
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """What maps read and write: states (N, heads, value dim, key dim) by layer."""
        reads = sorted({layer for m in maps for layer in m.reads})
        writes = [m.layer for m in maps]
        found: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        for number, sample in enumerate(self.samples(0)):
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

    # ---- the state on disk ----------------------------------------------------------------

    def tensors(self) -> dict[str, np.ndarray]:
        """The maps solved so far and the sums of this pass, by name."""
        found = {f"weights/{name}": weight for name, weight in self.weights.items()}
        for name, tile in self._tiles.tensors().items():
            found[name] = as_numpy(tile)
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
        solved = {name for name in tensors if name.startswith("weights/")}
        self.weights = {name.split("/", 1)[1]: tensors[name] for name in solved}
        tiles = {n: self.models.array(array) for n, array in tensors.items() if n not in solved}
        self._tiles = Tiles.restored(tiles, self.tokens)
        if self.read and not self.group.leads:  # which has the sums of this pass so far
            self.used = self.tokens = self.longest = 0
            self._tiles.clear()
