"""Stage 1 on the device: run both models, sum moments, solve every map in closed form."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.errors import KVLingoError, KVLingoWarning
from kvlingo_mlx.evaluation.verification import receipt
from kvlingo_mlx.fitting.aligned import aligned_states
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.format.assignment import Assignment, by_depth, check_windows
from kvlingo_mlx.format.config_reading import parse_assignment
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import check_head_ratio
from kvlingo_mlx.format.projections import facts_of_models
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig, capture_point
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_positions
from kvlingo_mlx.models.capture import move, prefill
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.stage1.closed_form import (
    Moments,
    check_tokens,
    moment_widths,
    shortage,
    solve_maps,
)
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS, norm_named, token_weights
from kvlingo_mlx.stage1.selection import METHODS, Candidates, Tiles, candidates, choose, tile_bytes
from kvlingo_mlx.tokenization.aligned_prefix import check_capture
from kvlingo_mlx.tokenization.samples import Sample, other_tokenizer, read_jsonl, to_samples
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.version import __version__

Progress = Callable[[int, int | None], None]
# Called with both models' states of a span, and the tokens' weights (layers or 1, tokens).
AddSpan = Callable[[KVStates, KVStates, np.ndarray | None], None]
MEMORY = 8 * 2**30  # bytes of moments at once, which leaves room for the models in 16 GB


@checked
def fit(
    source: LanguageModel | str,
    target: LanguageModel | str,
    samples: Iterable[Mapping[str, Any] | Sample] | str | os.PathLike[str],
    *,
    capture: str | None = None,
    norm: str = "frobenius",
    assignment: Assignment | str | None = None,
    nu: int = 1,
    head_mixing: bool = True,
    memory: int = MEMORY,
    progress: Progress | None = None,
    solving: Progress | None = None,
) -> Translator:
    """Fit a translator in closed form (section "Training the translator", equation (3.2)).

    Args:
        source: The model whose cache will be translated.
        target: The model that will decode from the translation.
        samples: Records {"messages": [...]} or {"text": ...}, or ``Sample`` objects; or the path of
            a JSONL file of such records.
        capture: The point where keys are read and written: pre_norm, post_norm, post_rope, or
            latent (MLA). None is pre_norm, or latent for models that cache latents.
        norm: frobenius, sink_2 to sink_32, attention_mass (or attention) or
            attention_fisher.
        assignment: The source layers of each target layer, or the method to choose them:
            relative_depth (None; layer to layer for equal depth and nu = 1), r2 or greedy. The
            last two weigh all tokens alike under the attention norms.
        nu: The number of source layers that each target layer reads.
        head_mixing: False for block-diagonal maps, one block per head.
        memory: Most bytes of moments in memory at once; where they would take more, the samples
            are read several times, for some layers at a time.
        progress: Called with (samples done, number of samples or None).
        solving: Called with (maps solved, number of maps); with little memory some maps are solved
            before the samples are read again.

    Raises:
        ValueError: An argument is bad, no sample is usable, or there are fewer tokens than a map
            has unknowns (its input width: ``nu`` source layers; head-wise, one head).
        IncompatibleTranslatorError: The layers have no counterpart, no translator connects models
            of these kinds, or they have two tokenizers and are captured after RoPE.
        UnsupportedModelError: There are two tokenizers, and the target's cache must hold one entry
            per token.
        MalformedTranslatorError: An ``Assignment`` does not fit these models.

    Warns:
        KVLingoWarning: The data have few tokens for the unknowns; it says how many suffice.
    """
    if isinstance(samples, str | os.PathLike):
        samples = read_jsonl(samples)
    source, target = load_pair(source, target)
    norm = norm_named(norm)
    method = assignment if isinstance(assignment, str) else None
    if method not in (None, "relative_depth", *METHODS):
        raise ValueError(
            f"assignment is {method!r}; it must be relative_depth, {' or '.join(METHODS)}, or an "
            "Assignment"
        )
    capture = capture_point(source, target, capture)
    explicit = assignment if isinstance(assignment, Assignment) else None
    config = _config(source, target, explicit, nu, head_mixing, capture)
    reader = _Reader(source, target, samples, capture, norm, progress, solving)
    weights: dict[str, np.ndarray] = {}
    ranks: list[int] = []
    if method in METHODS:
        config, weights, ranks = _select(config, reader, method, nu, memory)
    if not weights:
        weights, ranks = _solve(config, reader, memory)
    if short := shortage(config, reader.tokens, min(ranks)):
        warnings.warn(short, KVLingoWarning, stacklevel=2)
    provenance = {
        "stage": 1,
        "norm": norm,
        "assignment": method or ("explicit" if assignment else "relative_depth"),
        **reader.facts(),
        "lowest_rank": min(ranks),
        "kvlingo_mlx": __version__,
        "mlx": version("mlx"),
        "date": time.strftime("%Y-%m-%d"),
        **facts_of_models({"source": source, "target": target}),
    }
    fitted = build(config, Weights.from_float32(weights, "float32"))
    if (left := _receipt(source, target, fitted)) is not None:
        provenance["receipt"] = left
    return dataclasses.replace(fitted, config=dataclasses.replace(config, provenance=provenance))


def _config(
    source: LanguageModel,
    target: LanguageModel,
    assignment: Assignment | None,
    nu: int,
    head_mixing: bool,
    capture: str,
) -> TranslatorConfig:
    """The checked config of the translator to be fitted; layers by depth unless given."""
    two = source.tokenizer_fingerprint != target.tokenizer_fingerprint
    if two:
        check_capture(capture)
        check_positions(target)
    alignment = "minimal_groups" if two else None
    specs, ends = (source.spec(), target.spec()), (source.geometry.layers, target.geometry.layers)
    if not head_mixing:
        check_head_ratio(*specs)
    check_windows(*ends)
    if assignment is None:
        chosen = by_depth(*ends, nu)
    else:
        chosen = parse_assignment(Path("assignment"), assignment.to_json(), *specs)
    return TranslatorConfig(
        *specs, chosen, head_mixing=head_mixing, capture=capture, alignment=alignment
    )


def _receipt(
    source: LanguageModel, target: LanguageModel, fitted: Translator
) -> dict[str, Any] | None:
    """The translator's receipt on the bundled conversations, if these models can read them."""
    try:
        return receipt(source, target, fitted)
    except (KVLingoError, ValueError) as problem:
        warnings.warn(f"the fit leaves no receipt: {problem}", KVLingoWarning, stacklevel=3)
        return None


@dataclasses.dataclass
class _Reader:
    """Runs both models over every sample's prefix, once per pass over the samples."""

    source: LanguageModel
    target: LanguageModel
    samples: Iterable[Mapping[str, Any] | Sample]
    capture: str
    norm: str
    progress: Progress | None
    solving: Progress | None
    used: int = 0
    tokens: int = 0
    longest: int = 0
    solved: int = 0

    def facts(self) -> dict[str, int]:
        """The facts about the samples that a provenance keeps."""
        return {"samples": self.used, "prefix_tokens": self.tokens, "longest_prefix": self.longest}

    def tell_solved(self) -> None:
        """Report one more solved map; each target layer has one for keys and one for values."""
        self.solved += 1
        if self.solving is not None:
            self.solving(self.solved, len(SIDES) * len(self.target.attentions))

    def passes(self, count: int) -> None:
        """Announce how often the samples will be read."""
        if count > 1 and not isinstance(self.samples, Sequence):
            self.samples = list(self.samples)
        self.total = len(self.samples) * count if isinstance(self.samples, Sequence) else None
        self.done = 0

    def read(self, add: AddSpan, *, weighted: bool = True) -> None:
        """Pass every span's states to ``add``, with the norm's weights if ``weighted``."""
        norm = self.norm if weighted else "frobenius"
        self.used = self.tokens = 0
        context = min(self.source.context_length, self.target.context_length)
        other = other_tokenizer(self.source.tokenizer, self.target.tokenizer)
        for sample in to_samples(self.samples, self.target.tokenizer, context, other):
            self._check(sample)
            if self.norm in ATTENTION_NORMS and not sample.continuation:
                continue  # no token attends to this prefix
            if not sample.num_translated:
                continue
            mass = partial(attention_mass, self.target, sample)
            weights = token_weights(norm, len(sample.prefix), mass)
            self._add(sample, weights, add)
            self.tokens += sample.num_translated
            self.longest = max(self.longest, len(sample.prefix))
            self.used += 1
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)
        if self.used == 0:
            raise ValueError(
                "the data hold no usable sample: every prefix is empty or too long"
                + (", or nothing follows it" if self.norm in ATTENTION_NORMS else "")
            )

    def _check(self, sample: Sample) -> None:
        """Refuse tokens that a model does not know."""
        self.target.check_tokens((*sample.prefix, *sample.continuation))
        if sample.aligned is None:
            self.source.check_tokens((*sample.prefix, *sample.continuation))
        else:
            self.source.check_tokens(sample.source_prefix)

    def _add(self, sample: Sample, weights: np.ndarray | None, add: AddSpan) -> None:
        """Pass one sample's states to ``add``, with the tokens' weights (layers or 1, T)."""
        if sample.aligned is not None:
            pair = aligned_states(self.source, self.target, sample.aligned, self.capture)
            add(*pair, None if weights is None else sample.aligned.spread(weights))
            return
        with contextlib.closing(_spans(self.source, self.target, sample.prefix)) as spans:
            for read, wanted in spans:
                span = slice(read.start, read.start + read.num_tokens)
                add(
                    move(read, self.source, self.capture),
                    move(wanted, self.target, self.capture),
                    None if weights is None else weights[:, span],
                )


def _solve(
    config: TranslatorConfig, reader: _Reader, memory: int
) -> tuple[dict[str, np.ndarray], list[int]]:
    """All maps of a config with a fixed assignment, and their ranks."""
    widths = moment_widths(config)
    sizes = {name: 8 * inputs * (inputs + outputs) for name, (inputs, outputs) in widths.items()}
    weights: dict[str, np.ndarray] = {}
    ranks: list[int] = []
    batches = list(_batches(sizes, memory))
    reader.passes(len(batches))
    for names in batches:
        moments = {name: Moments(*widths[name]) for name in names}
        reader.read(partial(_add_maps, moments, config.assignment))
        check_tokens(config, reader.tokens)
        solved, found = solve_maps(config, moments, reader.tell_solved)
        weights |= solved
        ranks += found
    return weights, ranks


def _select(
    config: TranslatorConfig, reader: _Reader, method: str, nu: int, memory: int
) -> tuple[TranslatorConfig, dict[str, np.ndarray], list[int]]:
    """The config with source layers chosen from data, and its maps.

    The tiles of moments that serve to choose layers also serve to solve maps. Norms that weigh
    tokens differently in each layer are the exception: their maps are left to :func:`_solve`.
    """
    source = config.source.layers
    reads = candidates(source, config.target.layers)
    lists = {side: list(config.assignment.side(side)) for side in SIDES}
    weights: dict[str, np.ndarray] = {}
    ranks: list[int] = []
    parts = _parts(source, reads, memory)
    reader.passes(len(parts))
    weighted = reader.norm not in ATTENTION_NORMS
    tiles: dict[str, Tiles] = {}
    for part in parts:
        tiles = {side: tiles.get(side, Tiles({})) for side in part}
        for side, batch in part.items():
            tiles[side].turn_to({t: reads[t] for t in batch})
        reader.read(partial(_add_tiles, tiles), weighted=weighted)
        check_tokens(config, reader.tokens)
        for side in part:
            for t, layers in choose(tiles[side], method, nu).items():
                lists[side][t] = layers
                assignment = Assignment(*(tuple(lists[s]) for s in SIDES))
                config = dataclasses.replace(config, assignment=assignment)
                if weighted:
                    moments = {f"{side}.{t}": tiles[side].moments(t, layers)}
                    solved, found = solve_maps(config, moments, reader.tell_solved)
                    weights |= solved
                    ranks += found
    return config, weights, ranks


def _parts(
    source: Sequence[LayerGeometry], reads: Candidates, memory: int
) -> list[dict[str, list[int]]]:
    """The target layers, by side, of each pass over the data; one pass if memory allows."""
    sizes = {side: tile_bytes(source, reads, side) for side in SIDES}
    if sum(between + sum(each.values()) for between, each in sizes.values()) <= memory:
        return [{side: list(each) for side, (_, each) in sizes.items()}]
    return [
        {side: batch}
        for side, (between, each) in sizes.items()
        for batch in _batches(each, memory - between)
    ]


def _batches(sizes: Mapping[Any, int], memory: int) -> Iterator[list[Any]]:
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


def _spans(
    source: LanguageModel, target: LanguageModel, tokens: Sequence[int]
) -> Generator[tuple[KVStates, KVStates], None, None]:
    """Both models' states, chunk by chunk; a model fitted to itself is run only once."""
    with contextlib.closing(prefill(source, tokens)) as read:
        if source is target:
            yield from ((states, states) for states in read)
            return
        with contextlib.closing(prefill(target, tokens)) as wanted:
            yield from zip(read, wanted, strict=True)


def _add_maps(
    moments: dict[str, Moments],
    assignment: Assignment,
    read: KVStates,
    wanted: KVStates,
    weights: np.ndarray | None,
) -> None:
    rows: dict[tuple[str, int], np.ndarray] = {}
    for name, sums in moments.items():
        side, layer = name.split(".")[0], int(name.split(".")[1])
        sources = assignment.side(side)[layer]
        for s in sources:
            if (side, s) not in rows:
                rows[side, s] = _rows(read.side(side)[s])
        x = np.concatenate([rows[side, s] for s in sources], axis=1)
        own = None if weights is None else weights[layer % len(weights)]
        sums.add(x, _rows(wanted.side(side)[layer]), own)


def _add_tiles(
    tiles: Mapping[str, Tiles], read: KVStates, wanted: KVStates, weights: np.ndarray | None
) -> None:
    for side, sums in tiles.items():
        xs, ys = (
            [_rows(a).astype(np.float64) for a in states.side(side)] for states in (read, wanted)
        )
        sums.add(xs, ys, None if weights is None else weights[0])


def _rows(array: mx.array) -> np.ndarray:
    """(B, T, d) to (B * T, d), float32."""
    return np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1])
