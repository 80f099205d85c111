"""What a switch costs on this machine: four phases, beside the least time that each could take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np

from kvlingo_mlx.caches import memory
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.errors import MissingTranslatorError
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.timing import geometries, switching
from kvlingo_mlx.timing.ceilings import Costs, Rates, Work, measured_rates, translation_work
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch
from kvlingo_mlx.translators.base import Translator

READ, STEP, NATIVE = "source_prefill", "target_step", "native"
TRANSLATE = "translate "  # before a form of the maps
LENGTHS = (64, 256, 1024, 4096, 16384)
WARM = 3  # runs of each phase, at least: two to warm up and one that counts


@dataclass(frozen=True)
class BenchPair:
    """Two models, and a translator between them in several forms (its dtype, its bits).

    The first form is that by which a prompt is handed over. ``notes`` say what of them is random.
    ``text`` says whether prompts are text, or random tokens.
    """

    source: LanguageModel
    target: LanguageModel
    translators: Mapping[str, Translator]
    notes: tuple[str, ...] = ()
    text: bool = True

    @property
    def stored(self) -> bool:
        """Whether models and maps are those that would be used."""
        return not self.notes

    @property
    def translator(self) -> Translator:
        return next(iter(self.translators.values()))

    @property
    def context_length(self) -> int:
        return min(self.source.context_length, self.target.context_length)

    def caches_bytes(self, tokens: int) -> int:
        """The bytes of both models' caches."""
        return sum(memory.cache_bytes(model, tokens) for model in (self.source, self.target))


def of_geometry(
    names: Sequence[str], layers: int | None, precision: str | None, nu: int, bits: Sequence[int],
    *, tokens: int = 0, progress: geometries.Progress = lambda done, total: None,
) -> BenchPair:  # fmt: skip
    """Random models of released widths, and random maps that read ``nu`` source layers.

    Args:
        names: The source's name and the target's, in ``GEOMETRIES``.
        layers: The number of layers of each; None is all.
        precision: Of the weights; None is this machine's usual one.
        nu: The number of source layers that a target layer reads.
        bits: 8 or 4; each adds one form of the maps.
        tokens: The most tokens that both caches will hold.
        progress: As for :func:`geometries.make`.

    Raises:
        NotEnoughMemoryError, UnsupportedModelError: As for :func:`geometries.make`.
    """
    precision = precision or ("bfloat16" if on_gpu() else "float32")
    source, target = models = [
        geometries.unmade_model(name, layers, precision, seed) for seed, name in enumerate(names)
    ]
    needs = {
        "maps": geometries.least_maps_bytes(source.geometry.layers, target.geometry.layers, nu),
        memory.caches_of(tokens): sum(memory.cache_bytes(model, tokens) for model in models),
    }
    geometries.make(models, {name: size for name, size in needs.items() if size}, progress)
    weights = f"random weights in {precision}"
    if layers is not None:
        whole = [str(geometries.GEOMETRIES[name]["num_hidden_layers"]) for name in names]
        weights += f", {layers} layer{'s' * (layers > 1)} of {' and '.join(whole)}"
    maps = geometries.random_translators(source, target, nu, _forms(bits))
    return BenchPair(source, target, maps, (weights, f"random maps, nu = {nu}"), False)


def of_models(
    source: str | None, target: str | None, translator: str | None, nu: int | None,
    bits: Sequence[int],
) -> BenchPair:  # fmt: skip
    """Real models; with random maps if no translator is given or stored.

    Raises:
        MissingTranslatorError: The one that is given does not exist.
        IncompatibleTranslatorError: It is between two tokenizers, or of other models.
        ValueError: ``nu`` is not the translator's.
    """
    models = load_pair(source or zoo("tiny-qwen3-s"), target or zoo("tiny-qwen3-moe"))
    try:
        found = resolve_translator(translator, *models)
        check_one_tokenizer(found.config, "bench", "give two models of one tokenizer")
        forms = {f"{n} bits": resolve_translator(translator, *models, quantize=n) for n in bits}
    except MissingTranslatorError:
        if translator is not None:
            raise
        nu = nu or 1
        maps = geometries.random_translators(*models, nu, _forms(bits))
        return BenchPair(*models, maps, (f"random maps, nu = {nu}",))
    if nu not in (None, found.config.nu):
        raise ValueError(
            f"nu is {nu}, but it is for random maps, and the stored translator of this pair has "
            f"nu = {found.config.nu}; leave nu out"
        )
    return BenchPair(*models, {found.dtype: found, **forms})


def _forms(bits: Sequence[int]) -> dict[str, tuple[Any, int | None]]:
    """The forms of random maps; 16-bit maps only on a GPU, since a CPU widens them."""
    floats: dict[str, tuple[Any, int | None]] = {"float32": ("float32", None)}
    if on_gpu():
        floats["bfloat16"] = ("bfloat16", None)
    return floats | {f"{number} bits": ("float32", number) for number in bits}


# ---- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of each phase at one prompt length: every sample, and the least it could take."""

    prompt_tokens: int
    samples: Mapping[str, Sequence[float]]
    floors: Mapping[str, float]

    def median(self, phase: str) -> float:
        return float(np.median(self.samples[phase]))

    @property
    def ways(self) -> dict[str, float]:
        """Seconds to the first token: after a switch, from nothing, by the target itself."""
        translate = next(name for name in self.samples if name.startswith(TRANSLATE))
        switch = self.median(translate) + self.median(STEP)
        return {
            "switch": switch,
            "accelerator": self.median(READ) + switch,
            NATIVE: self.median(NATIVE),
        }

    def as_json(self) -> dict[str, Any]:
        """All samples, and of each phase the median, the least and the quartiles' distance."""
        summary = {}
        for name, values in self.samples.items():
            low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
            summary[name] = {"median": middle, "min": min(values), "iqr": high - low}
        return {**vars(self), "summary": summary, "ways": self.ways}


def phases(
    pair: BenchPair, tokens: Sequence[int], step_size: int = 2048
) -> dict[str, Callable[[], object]]:
    """The four phases of handing a prompt over, each to be run as often as one likes.

    The source reads all but the last token; its states are translated, once for each form, the
    target's native layers read as tuned; the target runs the last token; the target reads it all.
    """
    source, target, ids = pair.source, pair.target, list(tokens)
    part = _native(pair, len(ids))
    plans = {
        form: Plan(source, target, ids, translator, part, step_size=step_size)
        for form, translator in pair.translators.items()
    }
    first = next(iter(plans.values()))
    states = switching.recorded(first)
    fill = {TRANSLATE + form: switching.translation(plan, states) for form, plan in plans.items()}
    cache = next(iter(fill.values()))()

    def read() -> None:
        for _ in capture.prefill(
            source, ids[:-1], step_size, kept=pair.translator.config.state_maps
        ):
            pass

    def step() -> None:
        switching.first_token(target, ids[-1:], switching.again(cache))

    native = partial(switching.first_token, target, ids, None, step_size)
    return {READ: read, **fill, STEP: step, NATIVE: native}


def _native(pair: BenchPair, count: int) -> Native:
    return native_part(pair.translator.config, tokens=count - 1)


def floors(pair: BenchPair, count: int, rates: Rates) -> dict[str, float]:
    """The least seconds of each phase for ``count`` prompt tokens at a machine's measured rates.

    Of a mixture of experts the weights of those that one token uses count as read. A translation
    below which the target reads layers itself has none.
    """
    reads, own = Costs(pair.source), Costs(pair.target)
    least = own.active / max(1, int(pair.target.facts.get("num_experts") or 1))
    first = reads.active / max(1, int(pair.source.facts.get("num_experts") or 1))
    step = own.tokens(1, count - 1, least)
    work: dict[str, Work] = {READ: reads.reading(count - 1, first)}
    if _native(pair, count) == Native():
        for form, translator in pair.translators.items():
            maps = translation_work(translator, pair.source, pair.target, count - 1)
            work[TRANSLATE + form] = maps
    work |= {STEP: step, NATIVE: own.reading(count - 1, least) + step}
    return {name: rates.floor(each) for name, each in work.items()}


def check_lengths(pair: BenchPair, lengths: Sequence[int]) -> None:
    """Refuse lengths that a model cannot read, or whose caches do not fit.

    Raises:
        ValueError: A length is beyond a context.
        NotEnoughMemoryError: The caches of the longest prompt do not fit.
    """
    longest, room = max(lengths), pair.context_length
    if longest > room:
        small = min((pair.source, pair.target), key=lambda model: model.context_length)
        raise ValueError(
            f"--prompt-tokens holds {longest}, but the context of {small.name} is {room}: "
            f"give at most {room}"
        )
    needed = {memory.caches_of(longest): pair.caches_bytes(longest)}
    memory.check(needed, instead="--prompt-tokens of less")


def run(
    pair: BenchPair,
    lengths: Sequence[int] | None,
    *,
    trials: int,
    clock: Stopwatch,
    step_size: int = 2048,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[PhaseTimes], list[int], Rates]:
    """Time the phases, shortest prompt first.

    A length is left out if it would take more than the time that is left, estimated from the one
    before it, and dropped if it does. Rounds beyond the first get an equal share of the time for
    each length to come.

    Args:
        pair: The models and maps.
        lengths: Prompt lengths in tokens; None is those of ``LENGTHS`` that fit.
        trials: Rounds at each length, if there is time.
        clock: The time that is left.
        step_size: Tokens per prefill chunk.
        progress: Called after each round.

    Returns:
        The times, the lengths that were left out, and the machine's rates behind the floors.
    """
    if lengths is None:
        free = memory.free()
        fit = (n for n in LENGTHS if n <= pair.context_length)
        lengths = [n for n in fit if free is None or pair.caches_bytes(n) <= free]
    check_lengths(pair, lengths)
    lengths, done = sorted(lengths), list[PhaseTimes]()
    rates = measured_rates()
    with contextlib.suppress(OutOfTime), clock.limiting():
        for index, count in enumerate(lengths):
            if done and _least(done[-1], count) > clock.left():
                break
            tokens = switching.prompt_of(pair.source, pair.target, count, text=pair.text)
            share = clock.part(len(lengths) - index)
            ways = phases(pair, tokens, step_size)
            samples = switching.interleaved(ways, trials, progress, share.over)
            done.append(PhaseTimes(count, samples, {}))
            del ways
            mx.clear_cache()
    rates = rates.best(measured_rates())  # a machine that was busy before may not be after
    timed = [replace(t, floors=floors(pair, t.prompt_tokens, rates)) for t in done]
    return timed, lengths[len(done) :], rates


def _least(before: PhaseTimes, count: int) -> float:
    """The least seconds for a length, from another one; a step's do not depend on it."""
    grows = count / before.prompt_tokens
    return sum(
        WARM * before.median(name) * (1.0 if name == STEP else grows) for name in before.samples
    )


def figure(timed: Sequence[PhaseTimes], label: Callable[[str], str]) -> Any:
    """A figure of median milliseconds over the prompt's length, a line for each phase."""
    drawn, lengths = pictures.figure(), [t.prompt_tokens for t in timed]
    axes = drawn.add_subplot(xlabel="prompt tokens", ylabel="ms")
    heights: list[float] = []
    for phase in timed[0].samples:
        times = [1e3 * t.median(phase) for t in timed]
        axes.plot(lengths, times, marker="o", label=label(phase))
        heights += times
    pictures.log_scale(axes, "y", heights)
    pictures.log_scale(axes, "x", lengths)
    axes.set_xticks(lengths)
    axes.legend(fontsize="small")
    return drawn
