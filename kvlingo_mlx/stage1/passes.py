"""Stage 1 of a pair: sums over the data for a group of maps, and the maps solved from them.

Where the sums of all maps do not fit in memory together, the data are read again for each group of
maps. A runtime runs the models (:class:`Rows`); all else is the same code for MLX and PyTorch.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from kvlingo_mlx.format.assignment import Assignment, attention_groups
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import (
    StateMap,
    first_readers,
    maps_of,
    maps_states,
    reads_of,
    state_maps_of,
)
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.phases import phase
from kvlingo_mlx.stage1 import closed_form
from kvlingo_mlx.stage1.bilinear import STATES, solve_states
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, token_weights
from kvlingo_mlx.tokenization.samples import Sample

MEMORY = 8 * 2**30  # bytes of sums at once, which leaves room for the models in 16 GB
State = tuple[str, int]  # (side, layer)
Item = TypeVar("Item")


class Rows(Protocol):
    """Two models whose states are a regression's inputs and outputs, row by row.

    With one tokenizer, a row is a token. With two, a row is a translated source token, and the
    target's side is the mean over the target tokens of its minimal group (paper: appendix
    "Cross-tokenizer cache translation", paragraph "Initialising the translators").
    """

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[Any, Any]]:
        """The source's and the target's states of a prefix, from its first row to its last."""

    def rows(self, states: Any, reads: Sequence[State]) -> Any:
        """Sides of layers in float64, joined by columns: (T, width), where the sums are."""

    def array(self, array: np.ndarray) -> Any:
        """An array where the sums are."""

    def kept(
        self, sample: Sample, tokens: int
    ) -> tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]:
        """Both models' recurrent states after the first ``tokens`` of a prefix, by layer."""

    def attention_mass(self, sample: Sample) -> np.ndarray:
        """The attention that the continuation pays to each prefix position (eq. "attn-norm")."""


# ---- sums --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression:
    """What a map reads of the source and writes of the target."""

    reads: tuple[State, ...]  # in the order of its input columns
    writes: tuple[State, ...]  # in the order of its output rows
    row: int = 0  # the row of the tokens' weights that counts for it

    @property
    def inputs(self) -> tuple[int, tuple[State, ...]]:
        """What maps that share a sum of x x^T have in common."""
        return self.row, self.reads


class Sums:
    """Sums over tokens of w x x^T, w x, w x y^T and w y^2 of several maps, in a runtime's float64.

    Maps that read the same states share the first one. Float32 sums would leave noise of 1e-7 of
    the largest eigenvalue, which is above the tolerance at which eigenvalues count as zero.
    """

    def __init__(self, maps: Mapping[str, Regression], shapes: Mapping[Any, Any]) -> None:
        self.maps, self.shapes, self.tokens = maps, shapes, 0
        self._sums: dict[Any, Any] = {}

    def add(
        self,
        x: Callable[[Sequence[State]], Any],
        y: Callable[[Sequence[State]], Any],
        weights: Any = None,
    ) -> None:
        """Add tokens: ``x`` and ``y`` give states' rows; ``weights`` are (rows, T), or None."""
        for inputs in dict.fromkeys(m.inputs for m in self.maps.values()):
            row, reads = inputs
            read = x(reads)
            weighted = read if weights is None else read * weights[row][:, None]
            # The product of an array with itself takes half of the work.
            self._plus(inputs, weighted.T @ read)
            self._plus((inputs, "x"), weighted.sum(0))
            for name, m in self.maps.items():
                if m.inputs == inputs:
                    wanted = y(m.writes)
                    squares = wanted * wanted
                    squares = squares if weights is None else squares * weights[row][:, None]
                    self._plus((name, "xy"), weighted.T @ wanted)
                    self._plus((name, "yy"), squares.sum(0))
        self.tokens += len(read)

    def _plus(self, key: Any, part: Any) -> None:
        if key in self._sums:
            self._sums[key] += part
        else:
            self._sums[key] = part

    def total(self, group: Group) -> None:
        """Add up what all processes of a group have summed; each may have added no token."""
        own = (_numpy(self._sums.get(key, np.zeros(n))) for key, n in self.shapes.items())
        self._sums = dict(zip(self.shapes, group.totals(own), strict=True))

    def moments(self, name: str) -> closed_form.Moments:
        """The moments of a map."""
        inputs = self.maps[name].inputs
        keys = inputs, (name, "xy"), (name, "yy"), (inputs, "x")
        xx, xy, yy, x = (_numpy(self._sums[key]) for key in keys)
        return closed_form.Moments(xx, xy, yy, self.tokens, x)


def _numpy(array: Any) -> np.ndarray:
    """Sums of either runtime as a NumPy array."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def grouped(
    items: Iterable[Item], size: Callable[[Item, Sequence[Item]], int], memory: int
) -> list[list[Item]]:
    """Items in order, as many in a group as fit into ``memory`` bytes; at least one.

    ``size`` is what an item takes beside those of its group before it.
    """
    groups: list[list[Item]] = []
    held = 0
    for item in items:
        more = size(item, groups[-1]) if groups else memory + 1
        if held + more > memory:
            groups.append([])
            held, more = 0, size(item, ())
        groups[-1].append(item)
        held += more
    return groups


# ---- the fit -----------------------------------------------------------------------------------


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
    # Called after each usable sample with their number over all passes, and what that will be.
    progress: Callable[[int, int], None] = lambda done, total: None
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # float64, by their names
    learns: bool = False  # whether ``coordinates`` are wanted
    coordinates: dict[str, np.ndarray] = field(default_factory=dict)  # in which maps learn
    ranks: list[int] = field(default_factory=list)  # input directions that the data span
    ridges: list[float] = field(default_factory=list)
    used: int = 0  # the usable samples of the latest pass
    tokens: int = 0  # their rows
    longest: int = 0  # the longest prefix among them, in tokens

    def run(self) -> None:
        """Make all passes; ``weights``, ``ranks`` and ``config`` are then complete.

        An attention norm weighs tokens differently in each layer. A choice of layers then counts
        every token alike.

        Raises:
            ValueError: No sample is usable, or there are fewer tokens than a map has unknowns.
        """
        choosing, scores = self._to_choose(), dict[State, dict[int, float]]()
        norm = self.norm if self._shared else "frobenius"
        for done, maps in enumerate(choosing):
            sums = self._summed(maps, norm, done, len(choosing), " to choose layers")
            score_all: Callable[[], list[Any]] = partial(list, self._scored(sums))
            # Rounding may break a tie otherwise on another machine.
            for side, t, layer, score in self.group.firsts(score_all):
                scores.setdefault((side, t), {})[layer] = score
        if scores:
            self._assign(scores)
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
        """The config, the maps with what they learn in, and what a provenance keeps of them."""
        arrays = self.weights | self.coordinates
        return self.config, arrays, {"norm": self.norm, **self.facts()}

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

    @property
    def _shared(self) -> bool:
        """Whether a token weighs the same in every layer."""
        return self.norm not in ATTENTION_NORMS

    # ---- sums of groups of maps -----------------------------------------------------------

    def _to_choose(self) -> list[dict[str, Regression]]:
        """By R2 a regression for each source layer alone; greedily one from all of them."""
        if self.method not in closed_form.METHODS:
            return []
        found = {}
        groups = attention_groups(self.config.source.layers, self.config.target.layers)
        every = {t: theirs for theirs, ours in groups for t in ours}
        most = max(map(len, every.values()))
        if not 1 <= self.nu <= most:
            raise ValueError(
                f"nu is {self.nu}; it must be 1 to {most}, the source layers that a target layer "
                "can read"
            )
        for t, layers in every.items():
            parts = [[layer] for layer in layers] if self.method == "r2" else [layers]
            for side, part in itertools.product(SIDES, parts):
                if not maps_states(self.config, t):
                    reads = reads_of(self.config, side, t, part)
                    found[f"{side}.{t}.{part[0]}"] = Regression(reads, ((side, t),))
        return self._groups(found)

    def _to_solve(self) -> list[dict[str, Regression]]:
        def regression(m: Any) -> Regression:
            writes = tuple((side, m.layer) for side in m.writes)
            return Regression(m.reads, writes, 0 if self._shared else m.layer)

        return self._groups({m.name: regression(m) for m in maps_of(self.config)})

    def _groups(self, maps: Mapping[str, Regression]) -> list[dict[str, Regression]]:
        """Maps whose sums fit into memory together; those that read alike are neighbours."""

        def size(name: str, before: Sequence[str]) -> int:
            alike = any(maps[each].inputs == maps[name].inputs for each in before)
            width, out = self._widths(maps[name])
            return 8 * width * (out + (0 if alike else width))

        found = grouped(sorted(maps, key=lambda name: maps[name].inputs), size, self.memory)
        return [{name: maps[name] for name in names} for names in found]

    def _widths(self, m: Regression) -> tuple[int, int]:
        """How many inputs and outputs a map has."""
        ends = self.config.source.layers, self.config.target.layers
        read, written = (
            sum(layers[layer].width(side) for side, layer in states)
            for layers, states in zip(ends, (m.reads, m.writes), strict=True)
        )
        return read, written

    def _summed(
        self, maps: Mapping[str, Regression], norm: str, done: int, passes: int, why: str = ""
    ) -> Sums:
        """The sums of some maps over all samples."""
        shapes: dict[Any, tuple[int, ...]] = {}
        for name, m in maps.items():
            width, out = self._widths(m)
            shapes |= {m.inputs: (width, width), (m.inputs, "x"): (width,)}
            shapes |= {(name, "xy"): (width, out), (name, "yy"): (out,)}
        sums = Sums(maps, shapes)
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
                    total = self.count or 0
                    self.progress(seen + done * total, passes * total)
                step(number)
        self._total(sums)
        if self.used == 0:
            raise ValueError(
                "the data hold no usable sample: every prefix is empty or too long"
                + ("" if self._shared else ", or nothing follows it")
            )
        closed_form.check_tokens(self.config, self.tokens)
        return sums

    def _add(self, sums: Sums, sample: Sample, norm: str) -> None:
        """Add a sample to the sums, span by span."""
        mass = partial(self.models.attention_mass, sample)
        weights = token_weights(norm, len(sample.prefix), mass)
        if weights is not None:
            weights = sample.aligned.spread(weights) if sample.aligned is not None else weights
            weights = self.models.array(weights)
        start = 0
        for states in self.models.spans(sample, self.config.capture):
            x, y = (partial(self.models.rows, each) for each in states)
            stop = start + len(x([(SIDES[0], 0)]))
            sums.add(x, y, None if weights is None else weights[:, start:stop])
            start = stop

    def _total(self, sums: Sums) -> None:
        """Add up what all processes have read in this pass."""
        if self.group.size > 1:
            sums.total(self.group)
            used, tokens = self.group.total(np.array([self.used, sums.tokens]))
            self.used, sums.tokens = int(used), int(tokens)
            self.longest = max(self.group.gathered(self.longest))
        self.tokens = sums.tokens

    # ---- what the sums lead to ------------------------------------------------------------

    def _scored(self, sums: Sums) -> Iterator[tuple[str, int, int, float]]:
        """Each state of the target with a source layer and its score; the highest are chosen."""
        for name, m in sums.maps.items():
            moments, ((side, t),) = sums.moments(name), m.writes
            if self.method == "r2":
                yield side, t, m.reads[0][1], closed_form.r2(moments)
                continue
            widths = [self.config.source.layers[layer].width(side) for side, layer in m.reads]
            owner = np.repeat([layer for _, layer in m.reads], widths)  # of each input column
            columns = {layer: np.flatnonzero(owner == layer) for layer in set(owner.tolist())}
            for n, layer in enumerate(closed_form.greedy(moments, columns, self.nu)):
                yield side, t, layer, -float(n)

    def _assign(self, scores: Mapping[State, Mapping[int, float]]) -> None:
        """Take the source layers of the highest scores."""
        chosen = {side: list(self.config.assignment.side(side)) for side in SIDES}
        for (side, t), own in scores.items():
            best = sorted(own, key=lambda layer: (-own[layer], layer))[: self.nu]
            chosen[side][t] = tuple(sorted(best))
        assignment = Assignment(*(tuple(chosen[side]) for side in SIDES))
        self.config = dataclasses.replace(self.config, assignment=assignment)

    def _solve(self, sums: Sums) -> None:
        """Solve these maps; every process some of them."""
        weights, learnt = dict[str, np.ndarray](), dict[str, np.ndarray]()
        found: list[closed_form.Solution] = []
        inputs: Any = None
        first = first_readers(self.config)
        own = self.group.stretch(list(sums.maps))
        with phase("solving the maps", len(own)) as step:
            for name in own:
                parts = self._parts(sums, name)
                if self.config.head_mixing and inputs != sums.maps[name].inputs:
                    inputs, eigen = sums.maps[name].inputs, np.linalg.eigh(parts[0].xx)
                known = eigen if self.config.head_mixing else None
                solved = [closed_form.solve(part, ridge=self.ridge, eigen=known) for part in parts]
                made = {"": np.stack([each.weight for each in solved])}
                if self.learns:
                    made |= closed_form.coordinates(parts, solved, known, first[name] == name)
                for what, blocks in made.items():
                    array = blocks if known is None else blocks[0]
                    (learnt if what else weights)[f"{name}.weight{what}"] = array
                found += solved
                step()
        result = weights, learnt, [each.rank for each in found], [each.ridge for each in found]
        for theirs, scales, ranks, ridges in self.group.gathered(result):
            self.weights |= theirs
            self.coordinates |= scales
            self.ranks += ranks
            self.ridges += ridges

    def _parts(self, sums: Sums, name: str) -> list[closed_form.Moments]:
        """The moments of a map, or of each block of a head-wise one.

        Raises:
            ValueError: A sum is not finite; the message names the map.
        """
        config, moments = self.config, sums.moments(name)
        if not moments.finite:
            raise ValueError(
                f"the sums for the map {name} hold NaN or Inf: the keys or values that it reads of "
                f"{config.source.name}, or those of {config.target.name}, overflowed"
            )
        if config.head_mixing:
            return [moments]
        (m,) = (m for m in maps_of(config) if m.name == name)
        return [moments.block(*block) for block in closed_form.blocks_of(config, m)]

    # ---- recurrent states that are mapped --------------------------------------------------

    def _solve_states(self) -> None:
        """Solve the maps of recurrent states, which read the first few samples of each group."""
        maps = state_maps_of(self.config)
        for some in grouped(maps, lambda m, before: self._state_bytes(m), self.memory):
            given, wanted = self._states(some)
            own: dict[str, np.ndarray] = {}
            for m in self.group.stretch(some):
                own |= solve_states(m, given, wanted[m.layer])
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
            if len(found) * self.group.size >= STATES:
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
        """The bytes in float32 of all states that a map is fitted on."""
        layers = [*(self.config.source.layers[s] for s in m.reads)]
        recurrences = [g.recurrence for g in (*layers, self.config.target.layers[m.layer])]
        return STATES * sum(4 * math.prod(r.parts[1]) for r in recurrences if r is not None)
