"""A whole training: from two models and a stream of conversations to a translator folder."""

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import MalformedTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.assignment import Assignment, narrow_groups
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.typed import read
from kvlingo_mlx.group import Group
from kvlingo_mlx.stage1.closed_form import METHODS, shortage
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training import distill
from kvlingo_mlx.training.checkpoints import KEEP_EVERY, Checkpoint, disk_errors, log_of, write_json
from kvlingo_mlx.training.coordinates import lengthened
from kvlingo_mlx.training.plan import TrainingPlan, initial, make_config, provenance_of
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Model, Pair, Readings, pair_of
from kvlingo_mlx.version import __version__

SHORT = 16  # tokens of a continuation that serves to see whether there is a gradient
Progress = Callable[[str, distill.Report], None]
Start = tuple[TranslatorConfig, dict[str, np.ndarray], dict[str, Any]]  # with its provenance


@dataclass(frozen=True)
class Trainer:
    """Both stages of a plan, resumable, and the folder with the result.

    The result of stage 1 is kept, and stage 2 from time to time; a stage 1 that is stopped is made
    anew.
    """

    source: Model
    target: Model
    data: distill.Samples
    plan: TrainingPlan
    out: Path
    group: Group = field(default_factory=Group)
    progress: Progress = lambda stage, report: None
    settings: Mapping[str, Any] = field(default_factory=dict)  # more that a resumption must keep
    warn: Callable[[str], None] = lambda text: None
    keep_every: float = KEEP_EVERY  # the most seconds of work that a kill may lose
    notes: Sequence[str] = ()  # warnings to give before the work begins
    force: bool = False  # train again what is finished, and replace another translator
    start: Start | None = None  # the closed form of this plan and data, if it is made
    lengths: tuple[int, int] | None = None  # tokens of the longest prefix and continuation
    say: Callable[[str], None] = lambda text: None

    def finished(self) -> bool:
        """Whether ``out`` holds the finished result of this same training.

        With ``force`` the answer is always False.

        Raises:
            ValueError: ``out`` holds something else, and ``force`` is off.
        """
        return self.group.firsts(self._finished)

    def _finished(self) -> bool:
        translator_folder.check_destination(self.out)
        there = (self.out / translator_folder.CONFIG_FILE).exists()
        if self.force or not there:
            return False
        if not self._is_ours():
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
            KeyboardInterrupt, SystemExit: A signal asked to stop; the work of stage 2 is kept.
        """
        if self.finished():
            return self.out
        narrow = narrow_groups(self.config.source.layers, self.config.target.layers, self.plan.nu)
        for note in filter(None, (narrow, *self.notes)):
            self._tell(self.warn, note)
        try:
            return self._run()
        except (KeyboardInterrupt, SystemExit):
            if self.partial.exists():
                self._tell(
                    self.warn, f"stopped; {self.partial} keeps the work for the same command"
                )
            raise

    def _run(self) -> Path:
        recipe, config = self.plan.stage2, self.config
        curve: Sequence[Mapping[str, Any]] = ()
        settings = self._settings()
        versions = {"kvlingo-mlx": __version__, **self.pair.versions}
        facts = settings | dataclasses.asdict(recipe) | versions
        self.group.agree(lambda: {name: canonical_json({name: facts[name]}) for name in facts})
        kept = Checkpoint(self.partial / "initial.safetensors", settings)
        # Checked even if this plan has no stage 2: unfinished work on one must not be lost.
        for each in (kept, self.checkpoint("stage2", recipe)):
            self.group.firsts(each.facts)
        trains = bool(recipe.steps) or not config.spec.solved
        held_out = self._held_out() if trains else []
        if recipe.steps:
            self._tell(self.say, self.needed())
        if recipe.steps and (sample := _short(held_out)):
            self.pair.check_gradients(sample, config)
        config, arrays, provenance = self._first(kept, held_out)
        best = None
        if recipe.steps:
            best, curve = self.distilled("stage2", (config, arrays, {}), recipe, held_out)
            arrays = dict(best.tensors)
        if self.group.leads:
            names = ("data", "english", "apart_from")
            own = {name: self.settings[name] for name in names if name in self.settings}
            told = provenance_of(self.plan, self.pair, own | provenance, best, held_out, curve)
            arrays = {n: a for n, a in arrays.items() if "/" not in n}  # no coordinates
            self._write(config, arrays, told, held_out)
            if best is not None:
                write_json(log_of(self.out), "the log", curve)
            shutil.rmtree(self.partial)
        self.group.wait()
        return self.out

    def _tell(self, listener: Callable[[str], None], text: str) -> None:
        """Tell the user something, if there is anything to tell, in the leading process."""
        if text and self.group.leads:
            listener(text)

    def needed(self) -> str:
        """A line that says what the training takes; empty where that is not known.

        Raises:
            NotEnoughMemoryError: There is too little.
        """
        rates = len(self.plan.recipe.learning_rates)
        known = self.lengths
        return self.pair.check_memory(self.config, known, rates, self.plan) if known else ""

    @cached_property
    def config(self) -> TranslatorConfig:
        """The translator's config, by depth where stage 1 chooses the source layers."""
        return make_config(self.source, self.target, self.plan)

    @cached_property
    def pair(self) -> Pair:
        """Both models, on their runtime."""
        return pair_of(self.source, self.target)

    @cached_property
    def readings(self) -> Readings:
        """What the models have read, for all stages."""
        return Readings(self.pair, self.config, self.plan.recipe.reads)

    @property
    def partial(self) -> Path:
        """The folder of unfinished work."""
        return self.out.with_name(f"{self.out.name}.partial")

    def _held_out(self) -> list[Sample]:
        held_out = list(self.data.held_out(self.plan.held_out))
        if len(held_out) < self.plan.held_out:
            self._tell(
                self.warn,
                f"only {len(held_out)} of {self.plan.held_out} held-out conversations could be "
                "made; what training keeps is chosen on these; give more data for more",
            )
        return held_out

    # ---- what must not change ---------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """All that stage 1 depends on: the plan, the data and both models."""
        plan = dataclasses.asdict(self.plan)
        del plan["recipe"]
        if not self.plan.matching:  # so that a run's identity is that of before
            del plan["matching"]
        found = {**plan, **self.settings}
        for role, spec in (("source", self.config.source), ("target", self.config.target)):
            model: Model = getattr(self, role)
            own = {"name": spec.name, **spec.fingerprint, "precision": model.precision}
            facts: dict[str, Any] = {**own, "weights": model.weights_fingerprint}
            found |= {f"{role}'s {fact}": value for fact, value in facts.items()}
        return found

    def _identity(self) -> str:
        """The sha256 of all that the result depends on; its provenance keeps it as ``run``.

        It is the same on both runtimes.
        """
        facts = self._settings() | dataclasses.asdict(self.plan.recipe)
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()

    def _is_ours(self) -> bool:
        """Whether ``out`` holds the result of a training with these settings."""
        try:
            there = translator_folder.read_config(self.out).provenance
        except MalformedTranslatorError:
            return False
        return there.get("run") == self._identity()

    def checkpoint(self, stage: str, recipe: Recipe) -> Checkpoint:
        """The checkpoint of a stage."""
        settings = self._settings() | dataclasses.asdict(recipe)
        return Checkpoint(self.partial / f"{stage}.safetensors", settings)

    # ---- the stages -------------------------------------------------------------------

    def _first(self, kept: Checkpoint, held_out: Sequence[Sample]) -> Start:
        """The starting point of stage 2: computed once, and kept for resumed runs."""
        ready = self.group.firsts(kept.path.exists)
        self.group.wait()  # a late process must not see the file that the leading one writes next
        if not ready:
            made, arrays, provenance = self._stage1(held_out)
            if self.group.leads:
                tensors = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
                assignment = made.assignment.to_json()
                kept.write("stage 1", tensors, {"provenance": provenance, "assignment": assignment})
                for stage in ("stage1", "matching"):
                    (self.partial / f"{stage}.safetensors").unlink(missing_ok=True)
            self.group.wait()
        state = self.group.firsts(kept.read)
        assert state is not None, "it was written, or was there"
        arrays, facts = state
        assignment = read(Assignment, facts["assignment"])
        config = dataclasses.replace(self.config, assignment=assignment)
        return config, arrays, facts["provenance"]

    def _stage1(self, held_out: Sequence[Sample]) -> Start:
        plan, config, spec = self.plan, self.config, self.config.spec
        arrays: dict[str, np.ndarray] = {}
        provenance: dict[str, Any] = {}
        if spec.solved or plan.assignment in METHODS:
            fitted, arrays, provenance = self.start or self._closed_form()
            config = dataclasses.replace(config, assignment=fitted.assignment)
            arrays = dict(arrays) if spec.solved else {}
        arrays |= initial(config, plan.hidden, plan.seed, gated=plan.gated)
        if not spec.solved:
            start = config, arrays, provenance
            best, _ = self.distilled("stage1", start, plan.stage1_recipe, held_out)
            arrays = dict(best.tensors)
            provenance = {"stage1_rate": best.rate, "stage1_error": best.held_out}
        if recipe := plan.matched:
            arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
            start = config, arrays, provenance
            best, _ = self.distilled("matching", start, recipe, held_out)
            arrays |= best.tensors
            arrays |= lengthened(arrays, config)
            provenance = {**provenance, "matching": plan.matching, "matched": best.held_out}
        return config, arrays, provenance

    def _closed_form(self) -> Start:
        """The source layers chosen and the maps solved."""
        plan, config, group = self.plan, self.config, self.group.of_fits
        shared = plan.matched and norm_named(plan.norm) == "frobenius" and group.size == 1
        models: Any = self.readings if shared else self.pair

        def sample(number: int) -> Sample | None:
            return self.data.sample(number) if group.owns(number) else None

        fit = ClosedForm(
            dataclasses.replace(config, kind="linear"),
            models,
            lambda: map(sample, range(plan.fit_samples)),
            norm_named(plan.norm),
            plan.assignment,
            plan.nu,
            ridge=plan.ridge,
            group=group,
            count=plan.fit_samples,
            learns=plan.recipe.whitened and not config.spec.learnt,
        )
        fit.run()
        few = shortage(fit.config, fit.used, fit.tokens, fit.lowest)
        if few and config.spec.solved:
            self._tell(self.warn, few)
        return fit.result

    def distilled(
        self, stage: str, start: Start, recipe: Recipe, held_out: Sequence[Sample]
    ) -> tuple[distill.Best, Sequence[Mapping[str, Any]]]:
        """The best translator of a stage, over all learning rates, and the log's lines."""
        with distill.postponed() as stop:
            made = self.distillation(stage, start, recipe, held_out, recipe.learning_rates)
            made.stop, made.warn = stop, self.warn
            try:
                best = made.run(lambda report: self.progress(stage, report))
            except distill.DivergedError:
                if self.group.leads:  # so that a lower rate may begin here
                    self.checkpoint(stage, recipe).path.unlink(missing_ok=True)
                raise
        return best, made.curve

    def distillation(
        self,
        stage: str,
        start: Start,
        recipe: Recipe,
        held_out: Sequence[Sample],
        rates: Sequence[float],
    ) -> distill.Distillation:
        """The distillation of a stage that trains a translator at each of some rates."""
        config, arrays, _ = start
        runs = [distill.Run(rate, self.pair.trainable(config, arrays)) for rate in rates]
        kept = self.checkpoint(stage, recipe)
        return distill.Distillation(
            self.pair, runs, self.data, held_out, recipe, kept, self.group, self.keep_every,
            readings=self.readings,
        )  # fmt: skip

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
        receipt = {} if found is None else {"receipt": found}
        provenance = {**provenance, "run": self._identity(), **receipt}
        overwrite = self.force or self._is_ours()
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
