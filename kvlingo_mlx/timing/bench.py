"""What a switch costs on this machine: its four phases, timed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from kvlingo_mlx.timing import switching
from kvlingo_mlx.timing.random_maps import random_translators
from kvlingo_mlx.timing.switching import OutOfTime, Stopwatch
from kvlingo_mlx.translators.base import Translator

READ, STEP, NATIVE = "source_prefill", "target_step", "native"
TRANSLATE = "translate "  # before a form of the maps
LENGTHS = (64, 256, 1024, 4096, 16384)
WARM = 3  # runs of each phase, at least: two to warm up and one that counts


# ---- what is timed ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchPair:
    """Two models, and a translator between them in several forms (its dtype, its bits).

    A prompt is handed over by the first form. ``notes`` say what is random; ``text`` says whether
    prompts are text, or random tokens.
    """

    source: LanguageModel
    target: LanguageModel
    translators: Mapping[str, Translator]
    notes: tuple[str, ...] = ()
    text: bool = True

    @property
    def translator(self) -> Translator:
        return next(iter(self.translators.values()))

    @property
    def shorter(self) -> LanguageModel:
        """The model with the shorter context, which every prompt must fit."""
        return min((self.source, self.target), key=lambda model: model.context_length)

    def caches_bytes(self, tokens: int) -> int:
        """The bytes of both models' caches."""
        return sum(memory.cache_bytes(model, tokens) for model in (self.source, self.target))

    @property
    def native(self) -> Native:
        """What the target reads itself, as the translator is tuned."""
        return native_part(self.translator.config)


def of_models(
    source: str | None, target: str | None, translator: str | None, nu: int | None,
    bits: Sequence[int],
) -> BenchPair:  # fmt: skip
    """Real models; with random maps if no translator is given or stored.

    Raises:
        MissingTranslatorError, IncompatibleTranslatorError: The one that is given does not exist,
            or is between two tokenizers or other models.
        ValueError: ``nu`` is not the translator's.
    """
    models = load_pair(source or zoo("tiny-qwen3-s"), target or zoo("tiny-qwen3-moe"))
    try:
        found = resolve_translator(translator, *models)
    except MissingTranslatorError:
        if translator is not None:
            raise
        return BenchPair(*models, *random_forms(models, nu or 1, bits))
    check_one_tokenizer(found.config, "bench", "give two models of one tokenizer")
    if nu not in (None, found.config.nu):
        raise ValueError(
            f"nu is {nu}, but it is for random maps, and the stored translator of this pair has "
            f"nu = {found.config.nu}; leave nu out"
        )
    forms = {f"{n} bits": resolve_translator(translator, *models, quantize=n) for n in bits}
    return BenchPair(*models, {found.dtype: found, **forms})


def random_forms(
    ends: tuple[LanguageModel, LanguageModel], nu: int, bits: Sequence[int], *notes: str
) -> tuple[dict[str, Translator], tuple[str, ...]]:
    """Random maps by form, and what to note; 16-bit maps only on a GPU: a CPU widens them."""
    forms: dict[str, tuple[Any, int | None]] = {"float32": ("float32", None)}
    if on_gpu():
        forms["bfloat16"] = ("bfloat16", None)
    forms |= {f"{number} bits": ("float32", number) for number in bits}
    maps = random_translators(*ends, nu, forms)
    return maps, (*notes, f"random maps, nu = {nu}")


def phases(
    pair: BenchPair, tokens: Sequence[int], step_size: int = 2048
) -> dict[str, Callable[[], object]]:
    """The four phases of handing a prompt over, each to be run as often as one likes.

    The source reads all but the last token; its states are translated, once for each form, the
    target's native layers read as tuned; the target runs the last token; the target reads it all.
    """
    source, target, ids = pair.source, pair.target, list(tokens)
    plans = {
        form: Plan(source, target, ids, translator, pair.native, step_size=step_size)
        for form, translator in pair.translators.items()
    }
    states = switching.recorded(next(iter(plans.values())))
    fill = {TRANSLATE + form: switching.translation(plan, states) for form, plan in plans.items()}
    cache, kept = next(iter(fill.values()))(), pair.translator.config.state_maps

    def read() -> None:
        for _ in capture.prefill(source, ids[:-1], step_size, kept=kept):
            pass

    def step() -> None:
        switching.first_token(target, ids[-1:], switching.again(cache))

    native = partial(switching.first_token, target, ids, None, step_size)
    return {READ: read, **fill, STEP: step, NATIVE: native}


# ---- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of each phase at one prompt length: every sample."""

    prompt_tokens: int
    samples: Mapping[str, Sequence[float]]

    def median(self, phase: str) -> float:
        return float(np.median(self.samples[phase]))

    @property
    def ways(self) -> dict[str, float]:
        """Seconds to the first token: after a switch, from nothing, by the target itself."""
        translate = next(name for name in self.samples if name.startswith(TRANSLATE))
        switch = self.median(translate) + self.median(STEP)
        alone = self.median(NATIVE)
        return {"switch": switch, "accelerator": self.median(READ) + switch, NATIVE: alone}

    def as_json(self) -> dict[str, Any]:
        """All samples, and of each phase the median, the least and the quartiles' distance."""
        summary = {}
        for name, values in self.samples.items():
            low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
            summary[name] = {"median": middle, "min": min(values), "iqr": high - low}
        return {**vars(self), "summary": summary, "ways": self.ways}


def lengths_to_time(
    pair: BenchPair, lengths: Sequence[int] | None, usual: Sequence[int] = LENGTHS
) -> list[int]:
    """The lengths to time, shortest first; without any those of the ``usual`` ones that fit.

    Raises:
        ValueError: A length is beyond a context.
        NotEnoughMemoryError: The caches of the longest prompt do not fit.
    """
    room, free = pair.shorter.context_length, memory.free()
    if lengths is None:
        fit = (n for n in usual if n <= room)
        lengths = [n for n in fit if free is None or pair.caches_bytes(n) <= free] or usual[:1]
    longest = max(lengths)
    if longest > room:
        raise ValueError(
            f"--prompt-tokens holds {longest}, but the context of {pair.shorter.name} is {room}: "
            f"give at most {room}"
        )
    needed = {memory.caches_of(longest): pair.caches_bytes(longest)}
    memory.check(needed, instead="--prompt-tokens of less")
    return sorted(lengths)


def run(
    pair: BenchPair,
    lengths: Sequence[int] | None,
    *,
    trials: int,
    clock: Stopwatch,
    step_size: int = 2048,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[PhaseTimes], list[int]]:
    """Time the phases, shortest prompt first; ``lengths`` are by default those of ``LENGTHS`` that
    fit.

    A length is left out if it would take more than the time that is left, estimated from the one
    before it, and dropped if it does. Rounds beyond the first get an equal share of the time for
    each length to come.

    Returns:
        The times, and the lengths that were left out.

    Raises:
        ValueError, NotEnoughMemoryError: A model cannot read so long a prompt.
    """
    asked, done = lengths_to_time(pair, lengths), list[PhaseTimes]()
    with contextlib.suppress(OutOfTime), clock.limiting():
        for index, count in enumerate(asked):
            if done and _least(done[-1], count) > clock.left():
                break
            tokens = switching.prompt_of(pair.source, pair.target, count, text=pair.text)
            share = clock.part(len(asked) - index)
            ways = phases(pair, tokens, step_size)
            samples = switching.interleaved(ways, trials, progress, share.over)
            done.append(PhaseTimes(count, samples))
            del ways
            mx.clear_cache()
    return done, asked[len(done) :]


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
    times = {phase: [1e3 * t.median(phase) for t in timed] for phase in timed[0].samples}
    for phase, heights in times.items():
        axes.plot(lengths, heights, marker="o", label=label(phase))
    pictures.log_scale(axes, "y", [height for heights in times.values() for height in heights])
    pictures.log_scale(axes, "x", lengths)
    axes.set_xticks(lengths)
    axes.legend(fontsize="small")
    return drawn
