"""A whole training: from two models and a stream of conversations to a translator folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load_file

from kvlingo_mlx.errors import MalformedTranslatorError, NotEnoughMemoryError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.assignment import Assignment, narrow_groups
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.model_files import files_fingerprint
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.stage1.closed_form import shortage
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.stage1.passes import ClosedForm, Hooks
from kvlingo_mlx.stage1.selection import METHODS
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.checkpoints import (
    KEEP_EVERY,
    Checkpoints,
    check_settings,
    disk_errors,
    log_of,
    other_version,
    read_facts,
    write_log,
    write_state,
)
from kvlingo_mlx.training.distill import Distillation, DivergedError, Report, Samples
from kvlingo_mlx.training.initial import initial
from kvlingo_mlx.training.interruption import Interruption, postponed
from kvlingo_mlx.training.plan import TrainingPlan, make_config, provenance_of
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runs import Best, start_runs
from kvlingo_mlx.training.runtime import Model, Pair, pair_of
from kvlingo_mlx.training.sweep import Curve, Sweep, Trained, chosen
from kvlingo_mlx.training.watch import complaints
from kvlingo_mlx.version import __version__


class Data(Samples, Protocol):
    """A training stream (``data.Stream``): numbered samples, and held-out ones."""

    def held_out(self, count: int = 64) -> Sequence[Sample]: ...


LOOK = 16  # conversations between two looks of several processes whether to keep their sums
SHORT = 16  # tokens of a continuation that serves to see whether there is a gradient
Progress = Callable[[str, Report], None]


@dataclass(frozen=True)
class Work:
    """What both stages share: the held-out conversations, the signal to stop, and how many
    translators of a sweep are trained together."""

    held_out: Sequence[Sample]
    stop: Interruption
    at_once: int


@dataclass(frozen=True)
class Training:
    """One command's work: both stages of a plan, resumable, and the folder with the result.

    ``settings`` are further settings that must not change on resumption (for example ``data``, the
    sources). ``keep_every`` is the most seconds of work that a kill may lose; Ctrl-C and SIGTERM
    lose none. ``notes`` are shown to the user as warnings before the work begins. ``fit`` is the
    closed form of this plan and data where it has been made before. ``lengths`` are the tokens of
    the longest prefix and continuation of the data, if known; ``say`` is told what they take.
    ``at_once`` is the most learning rates of a sweep that are trained together; None: what fits.
    """

    source: Model
    target: Model
    data: Data
    plan: TrainingPlan
    out: Path
    group: Group = field(default_factory=Group)
    progress: Progress = lambda stage, report: None
    settings: Mapping[str, Any] = field(default_factory=dict)
    warn: Callable[[str], None] = lambda text: None
    keep_every: float = KEEP_EVERY
    notes: Sequence[str] = ()
    force: bool = False
    fit: ClosedForm | None = None
    lengths: tuple[int, int] | None = None
    say: Callable[[str], None] = lambda text: None
    at_once: int | None = None

    def finished(self) -> bool:
        """Whether ``out`` holds the finished result of this same training.

        With ``force`` the answer is always False: the translator is trained again and replaces the
        old one.

        Raises:
            ValueError: ``out`` holds something else, and ``force`` is off.
        """
        return self.group.firsts(self._finished)

    def _finished(self) -> bool:
        translator_folder.check_destination(self.out)
        there = (self.out / translator_folder.CONFIG_FILE).exists()
        if self.force or not there:
            return False
        if not self._is_ours(make_config(self.source, self.target, self.plan)):
            raise ValueError(
                f"{self.out} holds a translator that this command did not make (other options, "
                "data, models or an older version); give another --out, or replace it with --force"
            )
        return not self.partial.exists()

    def run(self) -> Path:
        """Train, or resume a training; returns the folder written.

        A :meth:`finished` result is left as it is.

        Raises:
            ValueError: ``out`` holds something else, or the settings differ from those of the run
                that is resumed.
            IncompatibleTranslatorError: The tokenizers differ.
            KVLingoError: Training diverged, or the disk is full.
            KeyboardInterrupt, SystemExit: A signal asked to stop; the work is kept.
        """
        if self.finished():
            return self.out
        config = make_config(self.source, self.target, self.plan)
        narrow = narrow_groups(config.source.layers, config.target.layers, self.plan.nu)
        for note in filter(None, (narrow, *self.notes)):
            if self.group.leads:
                self.warn(note)
        with postponed() as stop:
            try:
                return self._run(config, stop)
            except (KeyboardInterrupt, SystemExit):
                if self.group.leads and self.partial.exists():
                    self.warn(f"stopped; {self.partial} keeps the work for the same command")
                raise

    def _run(self, config: TranslatorConfig, stop: Interruption) -> Path:
        self.group.agree(lambda: self._told(config))
        self.group.firsts(
            lambda: self._initial.exists() and bool(self._check(self._initial, config))
        )
        # Checked even if this plan has no stage 2: unfinished work on one must not be lost
        # silently.
        self._checkpoints("stage2", config, self.plan.recipe)
        trains = bool(self.plan.recipe.steps) or not config.spec.solved
        held_out = self._held_out() if trains else []
        at_once = self._at_once(config)
        if self.plan.recipe.steps and (sample := _short(held_out)):
            self.pair.check_gradients(sample, config)
        work = Work(held_out, stop, at_once)
        config, arrays, provenance = self._first(config, work)
        best: Best | None = None
        curve: Curve = ()
        if self.plan.recipe.steps:
            found = self._distill("stage2", config, arrays, self.plan.recipe, work)
            best, curve, arrays = found.best, found.curve, dict(found.best.tensors)
            if self.plan.recipe.sweep:
                provenance = {**provenance, "sweep": found.tried}
        if self.group.leads:
            told = ("data", "english", "apart_from")
            own = {name: self.settings[name] for name in told if name in self.settings}
            facts = provenance_of(self.plan, self.pair, own | provenance, best, held_out, curve)
            self._write(config, arrays, facts, held_out)
            if best is not None:
                write_log(self.log, curve)
            shutil.rmtree(self.partial)
        self.group.wait()
        return self.out

    def _at_once(self, config: TranslatorConfig) -> int:
        """How many translators are trained together: all of a run, of a sweep those that fit.

        Raises:
            NotEnoughMemoryError: There is too little for one step.
        """
        recipe, hidden = self.plan.recipe, self.plan.hidden
        wanted = len(recipe.learning_rates)
        most = min(wanted, self.at_once or wanted) if recipe.sweep else wanted
        told = ""
        if recipe.steps and self.lengths is not None:
            most, told = self._fitting(config, self.lengths, most, hidden)
        if self.group.leads and told:
            self.say(told)
        if self.group.leads and most < wanted:
            self.say(
                f"sweep: of {wanted} learning rates at most {most} are trained at a time; each "
                "group reads the same samples again"
            )
        return most

    def _fitting(
        self, config: TranslatorConfig, lengths: tuple[int, int], most: int, hidden: int
    ) -> tuple[int, str]:
        """As many translators as fit into memory, and what they take; fewer only in a sweep."""
        fewest = 1 if self.plan.recipe.sweep else most
        for count in range(most, fewest, -1):
            with contextlib.suppress(NotEnoughMemoryError):
                return count, self.pair.check_memory(config, lengths, count, hidden)
        return fewest, self.pair.check_memory(config, lengths, fewest, hidden)

    @cached_property
    def pair(self) -> Pair:
        """Both models, on their runtime."""
        return pair_of(self.source, self.target)

    @property
    def partial(self) -> Path:
        """The folder of unfinished work."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def log(self) -> Path:
        """The log of a finished stage 2: JSON lines with the held-out KL and more."""
        return log_of(self.out)

    def _held_out(self) -> list[Sample]:
        held_out = list(self.data.held_out(self.plan.held_out))
        if len(held_out) < self.plan.held_out and self.group.leads:
            self.warn(
                f"only {len(held_out)} of {self.plan.held_out} held-out conversations could be "
                "made; what training keeps is chosen on these; give more data for more"
            )
        return held_out

    # ---- files kept on the way --------------------------------------------------------

    @property
    def _initial(self) -> Path:
        return self.partial / "initial.safetensors"

    def _settings(self, config: TranslatorConfig) -> dict[str, Any]:
        """All that stage 1 depends on: the plan, the data and both models."""
        plan = dataclasses.asdict(self.plan)
        del plan["recipe"]
        roles = (
            ("source", config.source, self.source),
            ("target", config.target, self.target),
        )
        models = {
            f"{role}'s {fact}": value
            for role, spec, model in roles
            for fact, value in {
                "name": spec.name,
                **spec.fingerprint,
                "precision": model.precision,
                "weights": self._weights(model),
            }.items()
        }
        return {**plan, **self.settings, **models}

    def _told(self, config: TranslatorConfig) -> dict[str, str]:
        """What every process must have been given alike."""
        told = self._settings(config) | dataclasses.asdict(self.plan.recipe)
        versions = {"kvlingo-mlx": __version__, **self.pair.versions}
        return {name: canonical_json({name: fact}) for name, fact in (told | versions).items()}

    def _weights(self, model: Model) -> dict[str, str]:
        """What identifies a model's weights: in its runtime and, by its files, in both."""
        found = {self.pair.runtime: model.weights_fingerprint}
        if model.path is not None:
            found["files"] = files_fingerprint(model.path)
        return found

    def _identity(self, config: TranslatorConfig) -> str:
        """The sha256 of all that the result depends on; its provenance keeps it as ``run``.

        It is the same on both runtimes where the models' files are known.
        """
        facts = {**self._settings(config), **dataclasses.asdict(self.plan.recipe)}
        for name, value in facts.items():
            if isinstance(value, dict) and "files" in value:
                facts[name] = value["files"]
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()

    def _is_ours(self, config: TranslatorConfig) -> bool:
        """Whether ``out`` holds the result of a training with these settings."""
        try:
            there = translator_folder.read_config(self.out).provenance
        except MalformedTranslatorError:
            return False
        return there.get("run") == self._identity(config)

    def _check(self, path: Path, config: TranslatorConfig) -> dict[str, Any]:
        """The facts of one of our files; raises ValueError if its settings differ."""
        facts = read_facts(path)
        check_settings(self.partial, facts["settings"], self._settings(config))
        return facts

    def _checkpoints(self, stage: str, config: TranslatorConfig, recipe: Recipe) -> Checkpoints:
        """The checkpoints of a stage; those of a diverged run with other settings are removed."""
        settings = {**self._settings(config), **dataclasses.asdict(recipe)}
        checkpoints = Checkpoints(self.partial / stage, settings)
        stale = self.group.firsts(checkpoints.stale)
        self.group.wait()  # until every process has read the folder
        if stale and self.group.leads:
            shutil.rmtree(checkpoints.folder)
        self.group.wait()
        return checkpoints

    # ---- the stages -------------------------------------------------------------------

    def _first(
        self, config: TranslatorConfig, work: Work
    ) -> tuple[TranslatorConfig, dict[str, np.ndarray], dict[str, Any]]:
        """The starting point of stage 2: computed once, and kept for resumed runs."""
        ready = self.group.firsts(self._initial.exists)
        self.group.wait()  # a late process must not see the file that the leading one writes next
        if not ready:
            config, arrays, provenance = self._stage1(config, work)
            if self.group.leads:
                tensors = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
                facts = {
                    "settings": self._settings(config),
                    "provenance": provenance,
                    "assignment": config.assignment.to_json(),
                }
                write_state(self._initial, "stage 1", tensors, facts)
                shutil.rmtree(self.partial / "stage1", ignore_errors=True)
            self.group.wait()
        arrays, facts = self.group.firsts(
            lambda: (load_file(self._initial), self._check(self._initial, config))
        )
        config = dataclasses.replace(config, assignment=Assignment.from_json(facts["assignment"]))
        return config, arrays, facts["provenance"]

    def _stage1(
        self, config: TranslatorConfig, work: Work
    ) -> tuple[TranslatorConfig, dict[str, np.ndarray], dict[str, Any]]:
        plan, spec = self.plan, config.spec
        arrays: dict[str, np.ndarray] = {}
        provenance: dict[str, Any] = {}
        if spec.solved or plan.assignment in METHODS:
            fit = self.fit or self._closed_form(config, work.stop)
            config = dataclasses.replace(config, assignment=fit.config.assignment)
            provenance = {"norm": fit.norm, **fit.facts()}
            arrays = fit.weights if spec.solved else {}
            if (
                arrays
                and self.group.leads
                and (short := shortage(config, fit.used, fit.tokens, fit.lowest))
            ):
                self.warn(short)
        arrays |= initial(config, plan.hidden, plan.seed, gated=plan.gated)
        if not spec.solved:
            found = self._distill("stage1", config, arrays, plan.stage1_recipe, work)
            arrays = dict(found.best.tensors)
            provenance = {"stage1_rate": found.best.rate, "stage1_error": found.best.held_out}
            if plan.stage1_recipe.sweep:
                provenance["stage1_sweep"] = found.tried
        return config, arrays, provenance

    def _closed_form(self, config: TranslatorConfig, stop: Interruption) -> ClosedForm:
        """The source layers chosen and the maps solved; a stopped run resumes."""
        plan, group = self.plan, self.group.of_fits

        def sample(number: int) -> Sample | None:
            return self.data.sample(number) if group.owns(number) else None

        fit = ClosedForm(
            dataclasses.replace(config, kind="linear"),
            self.pair,
            lambda start: map(sample, range(start, plan.fit_samples)),
            norm_named(plan.norm),
            plan.assignment,
            plan.nu,
            ridge=plan.ridge,
            group=group,
            count=plan.fit_samples,
        )
        path = self.partial / "stage1" / "sums.safetensors"

        def kept() -> tuple[dict[str, np.ndarray], Any] | None:
            if not path.exists():
                return None
            counts = self._check(path, config)["counts"]
            return load_file(path), counts

        if (there := group.firsts(kept)) is not None:
            try:
                fit.restore(*there)
            except (ValueError, KeyError):
                raise other_version(path) from None
        fit.hooks = Hooks(keep=self._keeper(fit, path, config, stop))
        fit.run()
        return fit

    def _keeper(
        self, fit: ClosedForm, path: Path, config: TranslatorConfig, stop: Interruption
    ) -> Callable[[], None]:
        """Keeps a fit's sums every ``keep_every`` seconds, after each pass, and when stopped.

        Several processes look up from their samples now and then, and the leading one's clock
        counts. What it keeps is what one process would have: others may resume it.
        """
        last, group = time.monotonic(), fit.group

        def keep() -> None:
            nonlocal last
            if group.size > 1 and fit.read % (LOOK * group.size):
                return
            late = group.leads and time.monotonic() - last >= self.keep_every
            due, stopped = group.total(np.array([float(late), float(bool(stop))]))
            if fit.read and not due and not stopped:
                return
            if fit.read:
                fit.gather(ends=False)
            if self.group.leads:
                what = f"stage 1 at {fit.read} conversations"
                facts = {"settings": self._settings(config), "counts": fit.counts()}
                write_state(path, what, fit.tensors(), facts)
            last = time.monotonic()
            if stopped:
                raise stop.error()

        return keep

    def _distill(
        self,
        stage: str,
        config: TranslatorConfig,
        arrays: Mapping[str, np.ndarray],
        recipe: Recipe,
        work: Work,
    ) -> Trained:
        """The best translator of a stage, over all learning rates of a run or a sweep."""

        def train(number: int, rates: Sequence[float]) -> Trained:
            training = Distillation(
                self.pair,
                start_runs(self.pair, config, arrays, rates),
                self.data,
                work.held_out,
                recipe,
                self._checkpoints(_part(stage, number), config, recipe),
                self.group,
                self.keep_every,
                work.stop,
                (lambda text: None) if recipe.sweep else self.warn,
            )
            try:
                best = training.run(lambda report: self.progress(stage, report))
            except DivergedError:
                if not recipe.sweep or training.best is None:
                    raise
                best = training.best
            return Trained.of(best, training.runs, training.curve)

        if not recipe.sweep:
            return train(0, recipe.learning_rates)

        def begun(number: int) -> tuple[float, ...]:
            there = self._checkpoints(_part(stage, number), config, recipe)
            return tuple(self.group.firsts(lambda: there.rates))

        tell = self.say if self.group.leads else (lambda text: None)
        found = Sweep(recipe.learning_rates, work.at_once, train, begun, tell).run()
        if self.group.leads:
            self._judge(found, recipe)
        return found

    def _judge(self, found: Trained, recipe: Recipe) -> None:
        """Tell what speaks against a sweep's result."""
        if chosen(found.finals) in (min(found.finals), max(found.finals)):
            rates = f"{min(found.finals):g} to {max(found.finals):g}"
            self.warn(f"the best learning rate is at the edge of those tried, {rates}")
        # An MLP's stage 1 measures the reconstruction error, and no KL to judge.
        for text in (
            {} if recipe.objective == "reconstruction" else complaints(found.curve).values()
        ):
            self.warn(text)

    # ---- the result -------------------------------------------------------------------

    def _write(
        self,
        config: TranslatorConfig,
        arrays: Mapping[str, np.ndarray],
        provenance: Mapping[str, Any],
        held_out: Sequence[Sample],
    ) -> None:
        data = ", ".join(Path(name).name for name in self.settings.get("data", ())) or "the data"
        found = self.pair.receipt(config, arrays, HeldOut.of(data, held_out))
        left = {} if found is None else {"receipt": found}
        provenance = {**provenance, "run": self._identity(config), **left}
        overwrite = self.force or self._is_ours(config)
        config = dataclasses.replace(config, provenance=provenance)
        with disk_errors(f"the translator {self.out.name}", self.out.parent):
            weights = Weights.from_float32(dict(arrays), "float32")
            translator_folder.write(self.out, config, weights, overwrite=overwrite)


def _short(samples: Sequence[Sample]) -> Sample | None:
    """The sample of the shortest prefix with translated tokens, with a short continuation."""
    found = [sample for sample in samples if sample.num_translated]
    if not found:
        return None
    sample = min(found, key=lambda sample: len(sample.prefix))
    return dataclasses.replace(sample, continuation=sample.continuation[:SHORT])


def _part(stage: str, number: int) -> str:
    """The folder of a stage's group of learning rates; one that is not swept has one group."""
    return stage if number == 0 else f"{stage}-{number + 1}"
