"""One call's work: lengths, a start, stage 2, native layers, a place in the store."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import kvlingo_mlx.making.pace as pace
import kvlingo_mlx.making.starts as starts
from kvlingo_mlx.embedded.bundled import receipt_rows
from kvlingo_mlx.embedded.first_chats import first_chats
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.evaluation import probes, tuning
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.making.result import GENERATED, NO_DATA, Callbacks, PairResult
from kvlingo_mlx.making.state import FACTS, RunState
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store.importing import import_translator, place_of
from kvlingo_mlx.tokenization.samples import MAX_PREFIX, other_tokenizer
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.checkpoints import log_of, read_facts, read_log
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.distill import Report
from kvlingo_mlx.training.mixture import Mixture
from kvlingo_mlx.training.paper_pairs import rate_of
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, pair_of
from kvlingo_mlx.training.trainer import Trainer

CHATS_FILE = "chats.jsonl"
CHATS = 2000  # generated conversations, where the user has none
HELD_OUT = 32  # conversations that choose the closed form and the learning rate
TUNED_ON = 16  # dialogues that choose the native layers
RATES = (1e-4, 1e-3, 1e-2)  # learning rates, beside the pair's own
LEAST = 1.0  # seconds that stage 2 gets, however little time is left
WRITING = 0.03  # the share of the time for what is written
TALK = 750  # tokens that a dialogue costs with a number of native layers, read by both models


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
    """One call's work; see :func:`kvlingo_mlx.pair`."""

    ends: tuple[LanguageModel, LanguageModel]
    folder: Path
    work: RunState
    data: tuple[str, ...]
    seconds: float
    seed: int
    force: bool
    callbacks: Callbacks
    task: Task | None = None
    nu: int | None = None
    opening: float = 0.0  # the seconds in which the data were read

    def finished(self) -> bool:
        """Whether the folder holds a trained translator of these models, and no work is left."""
        there = (self.folder / translator_folder.CONFIG_FILE).exists()
        if not there or self.force or (self.work.folder / FACTS).exists():
            return False
        config = translator_folder.read_config(self.folder)
        made = [config.source.name, config.target.name]
        if made != [model.name for model in self.ends]:
            raise ValueError(
                f"{self.folder} holds a translator from {made[0]} to {made[1]}; give another "
                "--out, or replace it with --force"
            )
        self.callbacks.say(
            f"{self.folder} is finished already, and was left as it is; --force makes it anew"
        )
        return True

    def train(self) -> None:
        """Choose lengths and a start, and distil."""
        if not self.data:
            self.callbacks.say(NO_DATA)
        lengths = pace.Lengths(**self.work.find("lengths", self._lengths))
        options = self._options(lengths.max_prefix, lengths.max_continuation)
        stream = self._stream(options, lengths.steps * pace.BATCH)
        longest = self._mixture(lengths.max_prefix).max_prefix
        self.callbacks.say(
            f"prefixes of up to {longest:,} tokens, which leaves time for about "
            f"{lengths.steps:,} steps of {pace.BATCH} conversations"
        )
        chosen = self.work.find("chosen", lambda: self._chosen(stream, lengths))
        nu, norm = chosen["nu"], chosen["norm"]
        later = self._later(lengths.seconds_per_token)
        left = self.work.find("seconds", lambda: max(LEAST, self.seconds - self.work.spent - later))
        recipe = Recipe(
            batch=pace.BATCH,
            learning_rates=self._rates(nu),
            validate_every=10**9,  # by time
            seconds=left,
            halving=True,
        )
        fit, path = lengths.fit_samples, self._fit_path(nu, norm)
        plan = TrainingPlan(
            nu=nu, norm=norm, fit_samples=fit, held_out=HELD_OUT, seed=self.seed, recipe=recipe
        )
        Trainer(
            *self.ends,
            stream,
            plan,
            self.folder,
            progress=self._show,
            settings=options.settings(stream) | ({} if self.data else {"data": [GENERATED]}),
            warn=self.callbacks.warn,
            notes=[str(stream.survey)] if stream.survey.falls_short else [],
            force=self.force,
            start=(starts.configs(self._pair, nu)[nu], load_file(path), read_facts(path)),
            lengths=stream.longest,
            say=self.callbacks.say,
        ).run()

    def tune(self, task: Task, max_kl: float | None, min_recall: float | None) -> None:
        """Choose the fewest native layers of the quality asked for, and keep the number."""
        translator = tuning.translator_of(str(self.folder), *self.ends, False)[1]
        line = tuning.line_up(*self.ends, translator, self._numbers())
        total, done = len(task.items) * len(line), itertools.count(1)

        def step() -> None:
            self._tell("tuning", f"native layers, {next(done)} of {total}")

        self.work.folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(str(self.work.folder / "tune.jsonl"))
        points = tuning.measure(self.ends[1], task, line, journal, trials=1, progress=step)
        bounds = {"max_kl": max_kl, "min_recall": min_recall}
        chosen = tuning.smallest(points, **bounds)
        tuning.keep(self.folder, chosen, {**bounds, "items": len(task.items)}, points)

    def _numbers(self) -> list[int]:
        """The numbers of native layers to try: all up to 4, then ever fewer."""
        depth = len(self.ends[1].attentions)
        return [n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < depth]

    def _later(self, seconds_per_token: float) -> float:
        """The seconds of all that follows stage 2: the receipt, native layers, writing."""
        rows = receipt_rows(self.ends[1].tokenizer, self._context, self._other)
        if self.task is not None:
            rows += TUNED_ON * len(self._numbers()) * TALK
        return WRITING * self.seconds + rows * seconds_per_token

    def _besides(self, measured: pace.Pace) -> float:
        """The seconds of all but closed forms and stage 2, those that are over among them.

        The data are read once more, for the lengths that were chosen.
        """
        return self.work.spent + self.opening + self._later(measured.reading / measured.prefix)

    def done(self) -> PairResult:
        """Put the translator into the store, and report."""
        config = translator_folder.read_config(self.folder)
        place = place_of(config)
        there = translator_folder.read_config(place).provenance if place.exists() else None
        stored = None
        if there is None or self.force or there.get("run") == config.provenance.get("run"):
            stored = import_translator(str(self.folder), models=self.ends, force=True).folder
        tried, log = self.work.facts.get("starts", ()), log_of(self.folder)
        if self.work.folder.exists():
            shutil.rmtree(self.work.folder)
        curve = read_log(log) if log.exists() else ()
        generated = config.provenance.get("data") == [GENERATED]
        return PairResult(self.folder, stored, config, tried, curve, generated)

    # ---- data -----------------------------------------------------------------------------

    def _options(self, max_prefix: int, max_continuation: int) -> command_line.Options:
        chats = self.work.folder / CHATS_FILE
        if not self.data and not chats.exists():  # generated, as a file to be read and hashed
            lines = (json.dumps({"messages": chat}) for chat in first_chats(CHATS, seed=self.seed))
            chats.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return command_line.Options(
            source=self.ends[0].name,
            target=self.ends[1].name,
            data=self.data or (str(chats),),
            device="mlx",
            seed=self.seed,
            max_prefix=max_prefix,
            max_continuation=max_continuation,
            later_turns=True,
        )

    def _stream(self, options: command_line.Options, samples: int) -> Stream:
        return options.stream(self.ends[1].tokenizer, self._context, samples, self._other)

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

    # ---- choices --------------------------------------------------------------------------

    def _lengths(self) -> dict[str, Any]:
        """Measure the pace, and choose lengths."""
        before = self.work.spent
        stream = self._stream(self._options(MAX_PREFIX, pace.ANSWERS), pace.PROBES * pace.BATCH)
        self.opening = self.work.spent - before
        rates = len(self._rates(self.nu or max(starts.NUS)))
        configs = starts.configs(self._pair, self.nu)
        for nu in sorted(configs, reverse=True)[:-1]:
            if not self._fits(configs[nu], pace.SHORTEST, rates):
                del configs[nu]
        widest = configs[max(configs)]

        def pace_of(longest: int) -> pace.Pace | None:
            if not self._fits(widest, longest, rates, needed=longest == pace.SHORTEST):
                return None
            said = f"how fast this machine trains on prefixes of up to {longest:,} tokens"
            self._tell("looking", said)
            try:
                there = stream.at(self._mixture(longest))
                samples = [there.sample(number) for number in range(pace.PROBES)]
            except ValueError:  # all conversations are longer
                return None
            return pace.measured(self._pair, widest, samples, pace.PROBING * self.seconds)

        asked = self.seconds, self._context, rates, configs, self._besides
        try:
            return vars(pace.lengths(pace_of, *asked))
        except ValueError:
            shutil.rmtree(self.work.folder)  # so that what is advised is no other settings
            raise

    def _fits(
        self, config: TranslatorConfig, longest: int, rates: int, needed: bool = False
    ) -> bool:
        """Whether training on prefixes of a length fits into memory; raises where it is needed."""
        mixture = self._mixture(longest)
        try:
            lengths = mixture.max_prefix, mixture.max_continuation
            self._pair.check_memory(config, lengths, rates, 0)
        except NotEnoughMemoryError:
            if needed:
                raise
            return False
        return True

    def _mixture(self, longest: int) -> Mixture:
        whole = Mixture(later_turns=True)
        return whole.limited(longest, pace.ANSWERS).scaled(self._context)

    def _chosen(self, stream: Stream, lengths: pace.Lengths) -> dict[str, Any]:
        """Fit closed forms, and choose the one to begin with."""
        began, last = self.work.spent, 0.0
        samples = [stream.sample(number) for number in range(lengths.fit_samples)]
        held_out = list(stream.held_out(HELD_OUT))

        def judge(nu: int, norm: str) -> starts.Start:
            self._tell("trying closed forms", f"nu = {nu}, {norm}")
            nonlocal last
            now, path = self.work.spent, self._fit_path(nu, norm)
            kept = self.work.find(
                f"start {nu} {norm}",
                lambda: vars(starts.judged(self._pair, (nu, norm), samples, held_out, path)),
            )
            last = self.work.spent - now
            self.callbacks.say(f"closed form, held-out KL: {starts.Start(**kept)}")
            return starts.Start(**kept)

        def goes_on() -> bool:
            return self.work.spent + last - began < pace.STARTING * self.seconds

        nus = [nu for nu in starts.configs(self._pair, self.nu) if nu <= lengths.most]
        best, found = starts.choose(nus, judge, goes_on)
        self.work.facts["starts"] = list(map(vars, found))
        return vars(best)

    def _fit_path(self, nu: int, norm: str) -> Path:
        return self.work.folder / f"nu{nu}-{norm}.safetensors"

    def _rates(self, nu: int) -> tuple[float, ...]:
        source, target = self.ends
        return tuple(sorted({rate_of(source.name, target.name, {"nu": nu}), *RATES}))

    def _tell(self, stage: str, text: str) -> None:
        self.callbacks.progress(stage, self.work.spent / self.seconds, text)

    def _show(self, stage: str, report: Report) -> None:
        self._tell("distilling", f"KL {report.kl:.4f}, held out {report.held_out:.4f}")
