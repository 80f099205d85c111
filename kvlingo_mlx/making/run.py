"""One call's work: lengths, a start, stage 2, native layers, a place in the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from kvlingo_mlx.making.made import GENERATED, NO_DATA, Made, Told
from kvlingo_mlx.making.work import FACTS, Work
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.store.importing import import_translator, place_of
from kvlingo_mlx.tokenization.samples import MAX_PREFIX, other_tokenizer
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.checkpoints import log_of, read_facts
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.distill import Report
from kvlingo_mlx.training.mixture import Mixture
from kvlingo_mlx.training.paper_pairs import rate_of
from kvlingo_mlx.training.pipeline import Training
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, pair_of

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
    work: Work
    data: tuple[str, ...]
    seconds: float
    seed: int
    force: bool
    told: Told
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
        self.told.say(
            f"{self.folder} is finished already, and was left as it is; --force makes it anew"
        )
        return True

    def train(self) -> None:
        """Choose lengths and a start, and distil."""
        if not self.data:
            self.told.say(NO_DATA)
        lengths = pace.Lengths(**self.work.find("lengths", self._lengths))
        stream = self._stream(lengths.max_prefix, lengths.max_continuation, lengths.steps)
        longest = self._mixture(lengths.max_prefix).max_prefix
        self.told.say(
            f"prefixes of up to {longest:,} tokens, which leaves time for about "
            f"{lengths.steps:,} steps of {pace.BATCH} conversations"
        )
        chosen = self.work.find("chosen", lambda: self._chosen(stream, lengths))
        left = self.work.find("seconds", lambda: self._left(lengths.seconds_per_token))
        recipe = Recipe(
            batch=pace.BATCH,
            learning_rates=self._rates(chosen["nu"]),
            validate_every=10**9,  # by time
            seconds=left,
            halving=True,
        )
        plan = TrainingPlan(
            nu=chosen["nu"],
            norm=chosen["norm"],
            fit_samples=lengths.fit_samples,
            held_out=HELD_OUT,
            seed=self.seed,
            recipe=recipe,
        )
        Training(
            *self.ends,
            stream,
            plan,
            self.folder,
            progress=self._show,
            settings=self._options(lengths.max_prefix, lengths.max_continuation).settings(stream)
            | ({} if self.data else {"data": [GENERATED]}),
            warn=self.told.warn,
            notes=[str(stream.survey)] if stream.survey.falls_short else [],
            force=self.force,
            fit=self._fit(chosen["nu"], chosen["norm"]),
            lengths=stream.longest,
            say=self.told.say,
        ).run()

    def tune(self, task: Task, max_kl: float | None, min_recall: float | None) -> None:
        """Choose the fewest native layers of the quality asked for, and keep the number."""
        translator = tuning.translator_of(str(self.folder), *self.ends, False)[1]
        line = tuning.line_up(*self.ends, translator, self._numbers())
        total, done = len(task.items) * len(line), 0

        def step() -> None:
            nonlocal done
            done += 1
            self._tell("tuning", f"native layers, {done} of {total}")

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

    def _left(self, seconds_per_token: float) -> float:
        """The seconds for stage 2: what is left, but for what follows it."""
        return max(LEAST, self.seconds - self.work.spent - self._later(seconds_per_token))

    def _later(self, seconds_per_token: float) -> float:
        """The seconds of all that follows stage 2: the receipt, native layers, writing."""
        source, target = self.ends
        other = other_tokenizer(source.tokenizer, target.tokenizer)
        rows = receipt_rows(target.tokenizer, self._context, other)
        if self.task is not None:
            rows += TUNED_ON * len(self._numbers()) * TALK
        return WRITING * self.seconds + rows * seconds_per_token

    def _besides(self, measured: pace.Pace) -> float:
        """The seconds of all but closed forms and stage 2, those that are over among them.

        The data are read once more, for the lengths that were chosen.
        """
        return self.work.spent + self.opening + self._later(measured.reading / measured.prefix)

    def done(self) -> Made:
        """Put the translator into the store, and report."""
        config = translator_folder.read_config(self.folder)
        place = place_of(config)
        there = translator_folder.read_config(place).provenance if place.exists() else None
        stored = None
        if there is None or self.force or there.get("run") == config.provenance.get("run"):
            stored = import_translator(str(self.folder), models=self.ends, force=True).folder
        facts, log = self.work.facts, log_of(self.folder)
        if self.work.folder.exists():
            self.work.remove()
        return Made(
            self.folder,
            stored,
            config,
            facts.get("starts", ()),
            command_line.read_log(log) if log.exists() else (),
            config.provenance.get("data") == [GENERATED],
        )

    # ---- data -----------------------------------------------------------------------------

    def _options(self, max_prefix: int, max_continuation: int) -> command_line.Options:
        source, target = self.ends
        return command_line.Options(
            source=source.name,
            target=target.name,
            data=self.data or (str(self._chats()),),
            device="mlx",
            seed=self.seed,
            max_prefix=max_prefix,
            max_continuation=max_continuation,
            later_turns=True,
        )

    def _stream(self, max_prefix: int, max_continuation: int, steps: int) -> Stream:
        source, target = self.ends
        return self._options(max_prefix, max_continuation).stream(
            target.tokenizer,
            self._context,
            steps * pace.BATCH,
            other_tokenizer(source.tokenizer, target.tokenizer),
        )

    @property
    def _context(self) -> int:
        return min(model.context_length for model in self.ends)

    def _chats(self) -> Path:
        """The generated conversations, as a file that a training can read and hash."""
        path = self.work.folder / CHATS_FILE
        if not path.exists():
            lines = (json.dumps({"messages": chat}) for chat in first_chats(CHATS, seed=self.seed))
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    # ---- choices --------------------------------------------------------------------------

    def _lengths(self) -> dict[str, Any]:
        """Measure the pace, and choose lengths."""
        models, few = pair_of(*self.ends), pace.PROBES
        before = self.work.spent
        stream = self._stream(MAX_PREFIX, pace.ANSWERS, few)
        self.opening = self.work.spent - before
        rates = len(self._rates(self.nu or max(starts.NUS)))
        configs = self._configs(models, rates)
        widest = configs[max(configs)]

        def pace_of(longest: int) -> pace.Pace | None:
            mixture = self._mixture(longest)
            try:
                models.check_memory(
                    widest, (mixture.max_prefix, mixture.max_continuation), rates, 0
                )
            except NotEnoughMemoryError:
                if longest == pace.SHORTEST:
                    raise
                return None
            said = f"how fast this machine trains on prefixes of up to {longest:,} tokens"
            self._tell("looking", said)
            try:
                there = stream.at(mixture)
                samples = [there.sample(number) for number in range(few)]
            except ValueError:  # all conversations are longer
                return None
            most = pace.PROBING * self.seconds
            return pace.measured(models, widest, samples, most)

        asked = self.seconds, self._context, rates, configs, self._besides
        try:
            return pace.lengths(pace_of, *asked).as_json()
        except ValueError:
            self.work.remove()  # so that what the message advises is no other settings
            raise

    def _configs(self, models: Pair, rates: int) -> dict[int, TranslatorConfig]:
        """The configs to choose from, by source layers: those that fit into memory."""
        found, shortest = starts.configs(models, self.nu), self._mixture(pace.SHORTEST)
        for nu in sorted(found, reverse=True)[:-1]:
            try:
                lengths = shortest.max_prefix, shortest.max_continuation
                models.check_memory(found[nu], lengths, rates, 0)
            except NotEnoughMemoryError:
                del found[nu]
        return found

    def _mixture(self, longest: int) -> Mixture:
        whole = Mixture(later_turns=True)
        return whole.limited(longest, pace.ANSWERS).scaled(self._context)

    def _chosen(self, stream: Stream, lengths: pace.Lengths) -> dict[str, Any]:
        """Fit closed forms, and choose the one to begin with."""
        models, began = pair_of(*self.ends), self.work.spent
        samples = [stream.sample(number) for number in range(lengths.fit_samples)]
        held_out = list(stream.held_out(HELD_OUT))

        last = 0.0

        def judge(nu: int, norm: str) -> starts.Start:
            self._tell("trying closed forms", f"nu = {nu}, {norm}")
            nonlocal last
            now, fit = self.work.spent, starts.fit_of(models, nu, norm, samples)
            path = self._fit_path(nu, norm)
            made = lambda: vars(starts.judged(models, fit, nu, held_out, path))  # noqa: E731
            found = starts.Start(**self.work.find(f"start {nu} {norm}", made))
            last = self.work.spent - now
            self.told.say(f"closed form, held-out KL: {found}")
            return found

        def goes_on() -> bool:
            return self.work.spent + last - began < pace.STARTING * self.seconds

        nus = [nu for nu in starts.configs(models, self.nu) if nu <= lengths.most]
        best, found = starts.choose(nus, judge, goes_on)
        self.work.facts["starts"] = starts.as_json(found)
        return vars(best)

    def _fit_path(self, nu: int, norm: str) -> Path:
        return self.work.folder / f"nu{nu}-{norm}.safetensors"

    def _fit(self, nu: int, norm: str) -> ClosedForm:
        """The closed form that was chosen, as it was made."""
        fit, path = starts.fit_of(pair_of(*self.ends), nu, norm, ()), self._fit_path(nu, norm)
        fit.restore(load_file(path), read_facts(path))
        return fit

    def _rates(self, nu: int) -> tuple[float, ...]:
        source, target = self.ends
        return tuple(sorted({rate_of(source.name, target.name, {"nu": nu}), *RATES}))

    def _tell(self, stage: str, text: str) -> None:
        self.told.progress(stage, self.work.spent / self.seconds, text)

    def _show(self, stage: str, report: Report) -> None:
        self._tell("distilling", f"KL {report.kl:.4f}, held out {report.held_out:.4f}")
