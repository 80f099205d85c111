"""One call's work: lengths, a closed form, training, native layers, a place in the store.

The folder ``OUT.pair`` stands beside the translator in the making. It keeps what was found out so
far, each fact once, for the same command.
"""

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import kvlingo_mlx.making.pace as pace
from kvlingo_mlx.caches.memory import free
from kvlingo_mlx.embedded.bundled import receipt_rows
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.errors import NotEnoughMemoryError, UnsupportedModelError
from kvlingo_mlx.evaluation import probes, tuning
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.evaluation.verification import receipt
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.fingerprints import facts_of_models
from kvlingo_mlx.format.maps import maps_of, shapes_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import GRADES, receipt_of, said_of
from kvlingo_mlx.making.result import AS_IT_IS, GENERATED, NO_DATA, Callbacks, PairResult
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store.importing import import_translator, place_of
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.tokenization.samples import MAX_PREFIX, Sample, other_tokenizer
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.checkpoints import check_settings, log_of, read_log, write_json
from kvlingo_mlx.training.coordinates import RATE
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.distill import Report
from kvlingo_mlx.training.mixture import Mixture
from kvlingo_mlx.training.on_mlx.memory import kept_bytes
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, pair_of
from kvlingo_mlx.training.trainer import Trainer
from kvlingo_mlx.translators import build

FACTS, CHATS_FILE = "facts.json", "chats.jsonl"
CHATS = 2000  # generated conversations, where the user has none
HELD_OUT = 32  # conversations that choose the step whose translator is kept
TUNED_ON = 16  # dialogues that choose the native layers
# Source layers that a target layer may read; the most there is time for are taken.
NUS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)
MATCHING = 0.5  # the share of the training in which attention is matched
LEAST = 1.0  # seconds that a training gets, however little time is left
KEPT = 0.4  # the share of free memory for what both models have read
WRITING = 0.03  # the share of the time for what is written
DIALOGUE = 750  # tokens that a dialogue costs with a number of native layers, read by both models


def dialogues(source: LanguageModel, target: LanguageModel, seed: int) -> Task:
    """Dialogues to choose native layers by.

    Raises:
        ValueError: They are longer than a model's context.
    """
    task = probes.recall(target, TUNED_ON, seed)
    longest = max(len(item.sample.prefix) + len(item.sample.continuation) for item in task.items)
    for model in (source, target):
        if model.context_length < longest:
            raise ValueError(
                f"native layers are chosen by dialogues of up to {longest} tokens, and the context "
                f"of {model.name} is {model.context_length}; leave --max-kl and --min-recall out"
            )
    return task


@dataclass
class Making:
    """One call's work; see :func:`kvlingo_mlx.pair`. Other ``settings`` refuse a kept folder."""

    ends: tuple[LanguageModel, LanguageModel]
    folder: Path
    settings: Mapping[str, Any]
    data: tuple[str, ...]
    seconds: float
    force: bool
    callbacks: Callbacks
    started: float
    task: Task | None = None
    opening: float = 0.0  # the seconds in which the data were read
    facts: dict[str, Any] = field(default_factory=dict)

    # ---- what is kept ---------------------------------------------------------------------

    @property
    def kept(self) -> Path:
        """The folder of what was found out."""
        return self.folder.with_name(f"{self.folder.name}.pair")

    @property
    def spent(self) -> float:
        """The seconds of this run and of those before."""
        return time.monotonic() - self.started

    def resume(self) -> None:
        """Read what an earlier run of the same command kept.

        Raises:
            ValueError: The folder is of a command with other settings.
        """
        if (self.kept / FACTS).exists():
            (self.facts,) = read_log(self.kept / FACTS)
            check_settings(self.kept, self.facts["asked"], self.settings)
            self.started -= self.facts["spent"]
        self.keep()

    def find(self, name: str, find: Callable[[], Any]) -> Any:
        """The result of ``find``, or the kept one of an earlier run."""
        if name not in self.facts:
            self.facts[name] = find()
            self.keep()
        return self.facts[name]

    def keep(self) -> None:
        facts = {**self.facts, "asked": dict(self.settings), "spent": self.spent}
        write_json(self.kept / FACTS, "what was found out so far", [facts])

    def finished(self) -> bool:
        """Whether the folder holds a trained translator of these models, and no work is left."""
        there = (self.folder / translator_folder.CONFIG_FILE).exists()
        if not there or self.force or (self.kept / FACTS).exists():
            return False
        config, capture = translator_folder.read_config(self.folder), self.settings["capture"]
        made = [config.source.name, config.target.name]
        if made != [model.name for model in self.ends] or capture not in (None, config.capture):
            raise ValueError(
                f"{self.folder} holds a translator of {config.capture} keys from {made[0]} to "
                f"{made[1]}; give another --out, or replace it with --force"
            )
        self.callbacks.say(
            f"{self.folder} is finished already, and was left as it is; --force makes it anew"
        )
        return True

    # ---- the steps ------------------------------------------------------------------------

    def as_it_is(self) -> bool:
        """Write a translator that changes nothing, where it works: between a model and its LoRA.

        It is tried where both have one shape and vocabulary and no ``nu`` is asked for; how good it
        is is told in either case. Its maps are the identity of each head.
        """
        alike = {(m.geometry.fingerprint, m.tokenizer_fingerprint) for m in self.ends}
        if len(alike) > 1 or self.settings["nu"] is not None or self.kept.exists():
            return False
        try:
            config, arrays = make_config(*self.ends, replace(self._form, head_mixing=False)), {}
        except ValueError:  # no maps of single heads: a hybrid's layers have several numbers
            return False
        self._tell("looking", "whether the source's cache does as it is")
        for m in maps_of(config):
            shape = shapes_of(config, m, ("weight",))["weight"]
            arrays[f"{m.name}.weight"] = np.broadcast_to(np.eye(shape[-1], dtype=np.float32), shape)
        weights = Weights("float32", arrays)
        translator = build(config, weights)
        facts = facts_of_models({"source": self.ends[0], "target": self.ends[1]})
        facts |= {"stage": 1, "data": [AS_IT_IS], "run": translator.digest}
        config = replace(config, provenance=facts | {"receipt": receipt(*self.ends, translator)})
        self.callbacks.say(f"{AS_IT_IS}: {said_of(config)}")
        left = receipt_of(config)
        if left is None or left.grade != GRADES[0]:
            return False
        translator_folder.write(self.folder, config, weights, overwrite=self.force)
        return True

    def train(self) -> None:
        """Choose lengths, and train."""
        self.resume()
        if not self.data:
            self.callbacks.say(NO_DATA)
        lengths = pace.Lengths(**self.find("lengths", self._lengths))
        options = self._options(lengths.max_prefix, lengths.max_continuation)
        stream = self._stream(options, lengths.steps * pace.BATCH)
        self.callbacks.say(
            f"prefixes of up to {self._mixture(lengths.max_prefix).max_prefix:,} tokens, which "
            f"leaves time for about {lengths.steps:,} steps of {pace.BATCH} conversations"
        )
        later, usual, samples = (
            self._later(lengths.seconds_per_token), self._plan, lengths.fit_samples
        )  # fmt: skip
        left = self.find("left", lambda: self.seconds - self.spent - later)
        reads = self.find("reads", lambda: self._reads(lengths, left - samples * lengths.reading))
        if reads and usual.matching and not self._other:
            samples = reads  # the closed form has what is read anyway
        seconds = max(LEAST, left - samples * lengths.reading)
        recipe = replace(usual.recipe, reads=reads, seconds=seconds)
        plan = replace(usual, recipe=recipe, nu=lengths.most, fit_samples=samples)
        Trainer(
            *self.ends,
            stream,
            plan,
            self.folder,
            progress=self._show,
            settings=options.settings(stream) | ({} if self.data else {"data": [GENERATED]}),
            warn=self.callbacks.warn,
            notes=stream.notes,
            force=self.force,
            lengths=stream.longest,
            say=self.callbacks.say,
        ).run()

    def tune(self, task: Task, max_kl: float | None, min_recall: float | None) -> None:
        """Choose the fewest native layers of the quality asked for, and keep the number."""
        translator = tuning.translator_of(str(self.folder), *self.ends, False)[1]
        line = tuning.line_up(*self.ends, translator, self._depths)
        total, done = len(task.items) * len(line), itertools.count(1)

        def step() -> None:
            self._tell("tuning", f"native layers, {next(done)} of {total}")

        self.kept.mkdir(parents=True, exist_ok=True)
        journal = Journal(str(self.kept / "tune.jsonl"))
        points = tuning.measure(self.ends[1], task, line, journal, trials=1, progress=step)
        bounds = {"max_kl": max_kl, "min_recall": min_recall}
        chosen = tuning.smallest(points, **bounds)
        tuning.keep(self.folder, chosen, {**bounds, "items": len(task.items)}, points)

    def done(self) -> PairResult:
        """Put the translator into the store, and report."""
        config = translator_folder.read_config(self.folder)
        place = place_of(config)
        there = translator_folder.read_config(place).provenance if place.exists() else None
        stored = None
        if there is None or self.force or there.get("run") == config.provenance.get("run"):
            stored = import_translator(str(self.folder), models=self.ends, force=True).folder
        if self.kept.exists():
            shutil.rmtree(self.kept)
        log = log_of(self.folder)
        curve = read_log(log) if log.exists() else ()
        generated = config.provenance.get("data") == [GENERATED]
        return PairResult(self.folder, stored, config, curve, generated)

    # ---- choices --------------------------------------------------------------------------

    def _lengths(self) -> dict[str, Any]:
        """Measure the pace, and choose lengths."""
        before = self.spent
        stream = self._stream(self._options(MAX_PREFIX, pace.ANSWERS), pace.PROBES * pace.BATCH)
        self.opening = self.spent - before
        configs = self._configs()
        for each in sorted(configs, reverse=True)[:-1]:
            if not self._fits(configs[each], pace.SHORTEST):
                del configs[each]
        widest = configs[max(configs)]

        def pace_of(longest: int) -> pace.ConversationCost | None:
            if not self._fits(widest, longest, needed=longest == pace.SHORTEST):
                return None
            said = f"how fast this machine trains on prefixes of up to {longest:,} tokens"
            self._tell("looking", said)
            try:
                there = stream.at(self._mixture(longest))
                samples = [there.sample(number) for number in range(pace.PROBES)]
            except ValueError:  # all conversations are longer
                return None
            return pace.measured(self._pair, widest, samples, pace.PROBING * self.seconds)

        asked = self.seconds, self._context, configs, self._besides
        try:
            return vars(pace.lengths(pace_of, *asked))
        except ValueError:
            shutil.rmtree(self.kept)  # so that what is advised is no other settings
            raise

    def _reads(self, lengths: pace.Lengths, seconds: float) -> int | None:
        """Conversations that all steps take in turn; None: new ones each, or they do not fit."""
        plan, longest = self._plan, self._mixture(lengths.max_prefix)
        text = longest.max_prefix + longest.max_continuation
        kept = kept_bytes(*self.ends, text, matches=plan.matching > 0)
        reads = lengths.reads(seconds, KEPT * (free() or math.inf) / kept)
        plan = replace(plan, recipe=replace(plan.recipe, reads=reads))
        fits = self._fits(self._configs()[lengths.most], lengths.max_prefix, plan=plan)
        return reads if fits else None

    @property
    def _plan(self) -> TrainingPlan:
        """The plan but for what depends on the pace."""
        recipe = Recipe(
            batch=pace.BATCH, learning_rates=(RATE,), whitened=True,
            validate_every=10**9,  # by time
        )  # fmt: skip
        seed, matching = self.settings["seed"], self.find("matching", self._matching)
        own = {"recipe": recipe, "held_out": HELD_OUT, "seed": seed, "matching": matching}
        return replace(self._form, **own)

    @property
    def _form(self) -> TrainingPlan:
        """What every map of this call has in common."""
        return TrainingPlan(capture=self.settings["capture"])

    def _matching(self) -> float:
        """The share of the training in which attention is matched; 0 where it cannot be."""
        config = next(iter(self._configs().values()))
        sample = Sample(tuple(range(8)), (8, 9))  # any tokens show it
        try:
            reading = self._pair.read(sample, config, attends=True)
            self._pair.match(self._pair.trainable(config, random_maps(config)), reading)
        except UnsupportedModelError:  # `check_gradients` refuses what cannot be trained at all
            return 0.0
        return MATCHING

    def _configs(self) -> dict[int, TranslatorConfig]:
        """The config of each number of source layers that this pair allows, or of the one asked.

        Raises:
            ValueError: The source has fewer layers of a kind.
        """
        found: dict[int, TranslatorConfig] = {}
        for nu in NUS if self.settings["nu"] is None else (self.settings["nu"],):
            try:
                found[nu] = make_config(*self.ends, replace(self._form, nu=nu))
            except ValueError:
                if not found:
                    raise
                break  # the source has fewer layers of a kind
        return found

    def _later(self, seconds_per_token: float) -> float:
        """The seconds of all that follows the training: the receipt, native layers, writing."""
        rows = receipt_rows(self.ends[1].tokenizer, self._context, self._other)
        if self.task is not None:
            rows += TUNED_ON * len(self._depths) * DIALOGUE
        return WRITING * self.seconds + rows * seconds_per_token

    def _besides(self, measured: pace.ConversationCost) -> float:
        """The seconds of all but the closed form and training, those that are over among them.

        The data are read once more, for the lengths that were chosen.
        """
        return self.spent + self.opening + self._later(measured.reading / measured.prefix)

    def _fits(
        self, config: TranslatorConfig, longest: int, needed: bool = False,
        plan: TrainingPlan | None = None,
    ) -> bool:  # fmt: skip
        """Whether training on prefixes of a length fits into memory; raises where it is needed."""
        mixture = self._mixture(longest)
        try:
            lengths = mixture.max_prefix, mixture.max_continuation
            self._pair.check_memory(config, lengths, 1, plan or self._plan)
        except NotEnoughMemoryError:
            if needed:
                raise
            return False
        return True

    @property
    def _depths(self) -> list[int]:
        """The numbers of native layers to try: all up to 4, then ever fewer."""
        depth = len(self.ends[1].attentions)
        return [n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < depth]

    # ---- data -----------------------------------------------------------------------------

    def _options(self, max_prefix: int, max_continuation: int) -> command_line.Options:
        chats = self.kept / CHATS_FILE
        seed = self.settings["seed"]
        if not self.data and not chats.exists():  # generated, as a file to be read and hashed
            lines = (json.dumps({"messages": chat}) for chat in lookback(CHATS, seed=seed))
            chats.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return command_line.Options(
            source=self.ends[0].name,
            target=self.ends[1].name,
            data=self.data or (str(chats),),
            device="mlx",
            seed=seed,
            max_prefix=max_prefix,
            max_continuation=max_continuation,
            later_turns=True,
        )

    def _stream(self, options: command_line.Options, samples: int) -> Stream:
        return options.stream(self.ends[1].tokenizer, self._context, samples, self._other)

    def _mixture(self, longest: int) -> Mixture:
        whole = Mixture(later_turns=True)
        return whole.limited(longest, pace.ANSWERS).scaled(self._context)

    @property
    def _other(self) -> Any:
        """The source's tokenizer, where it differs from the target's."""
        return other_tokenizer(*(model.tokenizer for model in self.ends))

    @property
    def _context(self) -> int:
        return min(model.context_length for model in self.ends)

    @cached_property
    def _pair(self) -> Pair:
        return pair_of(*self.ends)

    # ---- progress -------------------------------------------------------------------------

    def _tell(self, stage: str, text: str) -> None:
        self.callbacks.progress(stage, self.spent / self.seconds, text)

    def _show(self, stage: str, report: Report) -> None:
        if stage == "matching":
            self._tell("matching attention", f"{report.kl:.0%} of what it gathers is wrong")
        else:
            self._tell("distilling", f"KL {report.kl:.4f}, held out {report.held_out:.4f}")
