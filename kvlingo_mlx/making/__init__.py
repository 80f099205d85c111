"""From two models to a translator worth using, in one call and in a given time."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.embedded.first_chats import first_chats
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.evaluation import probes, tuning
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import NO_RECEIPT, said_of
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.making import pace, starts
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
from kvlingo_mlx.training.pipeline import Training
from kvlingo_mlx.training.plan import TrainingPlan, default_rate, make_config
from kvlingo_mlx.training.recipe import Recipe, require
from kvlingo_mlx.training.runtime import pair_of
from kvlingo_mlx.training.watch import lowest, outlook

CHATS_FILE = "chats.jsonl"
GENERATED = "generated conversations"  # what a translator's provenance says of these
CHATS = 2000  # generated conversations, where the user has none
HELD_OUT = 32  # conversations that choose the closed form and the learning rate
TUNED_ON = 16  # dialogues that choose the native layers
RATES = (1e-4, 1e-3, 1e-2)  # learning rates, beside the pair's own
LEAST = 0.3  # the share of the time that stage 2 gets, however little is left
TALK = 750  # tokens that a dialogue costs with a number of native layers, read by both models


@dataclass(frozen=True)
class Made:
    """A finished translator.

    Attributes:
        folder: Its folder.
        stored: Its folder in the local store, in bfloat16; None where another translator of these
            models and this form is there, which is left as it is.
        config: Its config, with receipt and tuning in the provenance.
        starts: The closed forms that were tried, with their held-out KL.
        curve: The log of stage 2.
        bundled_data: Whether it was trained on the package's generated conversations.
    """

    folder: Path
    stored: Path | None
    config: TranslatorConfig
    starts: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    curve: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    bundled_data: bool = False

    @property
    def log(self) -> Path:
        """The file of the curve, if it is still there."""
        return log_of(self.folder)

    @property
    def lines(self) -> list[str]:
        """What was reached, and what to type next: five lines."""
        made, ends = self.config.provenance, (self.config.source.name, self.config.target.name)
        kls = [lowest(line["held_out"]) for line in self.curve] or [math.nan]
        data = f"{GENERATED}, for a first try" if self.bundled_data else "your data"
        told = outlook(self.curve) or "the curve is too short to say what more time would bring"
        native = self.config.native_layers
        chat = f"kvlingo-mlx chat --model small={ends[0]} --model large={ends[1]}"
        onward = (
            "the local store holds another one of this form, which was left as it is; to replace "
            f"it: kvlingo-mlx import {self.folder} --force"
            if self.stored is None
            else f"it is in the local store; next: {chat}"
        )
        return [
            f"{self.folder}: nu = {self.config.nu}, {native} native layers of "
            f"{len(self.config.target.layers)}, trained on {data}; prefixes of up to "
            f"{made.get('longest_prefix')} tokens",
            f"grade: {said_of(self.config) if 'receipt' in made else NO_RECEIPT}",
            f"held-out KL {kls[0]:.4f} with the closed form, {min(kls):.4f} at best",
            told,
            onward,
        ]


@dataclass(frozen=True)
class Told:
    """Functions that are told how the work proceeds.

    Attributes:
        say: A line of text.
        warn: A line about what may go wrong.
        progress: The stage, the share of it that is done if known, and a text.
    """

    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    progress: Callable[[str, float | None, str], None] = lambda stage, share, text: None


@checked
def pair(
    source: LanguageModel | str,
    target: LanguageModel | str,
    data: Sequence[str] | str | os.PathLike[str] = (),
    *,
    minutes: float = 60.0,
    out: str | os.PathLike[str] | None = None,
    max_kl: float | None = None,
    min_recall: float | None = None,
    seed: int = 0,
    force: bool = False,
    told: Told | None = None,
) -> Made:
    """Make a translator from ``source`` to ``target`` in the time there is, on MLX.

    It measures how fast this machine is and chooses lengths accordingly. It tries closed forms and
    keeps the best. It distils from that one at several learning rates, of which the better half
    goes on. If a quality is asked for, it chooses native layers. The result goes into the local
    store. The same call resumes after an interruption.

    Args:
        source: The model whose cache is translated.
        target: The model that decodes from it.
        data: JSONL files, folders or Hugging Face datasets of conversations, one or several; none
            for generated ones, which do for a first try.
        minutes: The time for everything.
        out: The folder to write; default: SOURCE-to-TARGET, their names, here.
        max_kl: Tune to the fewest native layers with at most this KL, in nats per token.
        min_recall: Tune to the fewest that recall this share of the dialogues' answers.
        seed: Chooses the samples.
        force: Whether to replace what is finished, here and in the store.
        told: Functions that are told how the work proceeds.

    Raises:
        ValueError: An argument or the data are bad, or ``out`` holds something else.
        KVLingoError: The models do not go together, no gradient reaches the target's cache, or
            training diverged.
        KeyboardInterrupt: A signal asked to stop; the work is kept.
    """
    require("minutes (--minutes)", minutes, 0, strict=True)
    require("the KL to tune to (--max-kl)", max_kl or 0.0, 0)
    require("the recall to tune to (--min-recall)", min_recall or 0.0, 0, 1)
    told = told or Told()
    named = (data,) if isinstance(data, str | os.PathLike) else data
    sources = tuple(os.fspath(each) for each in named)
    folder = Path(out or _folder_name(source, target))
    translator_folder.check_destination(folder)
    ends = load_pair(source, target)
    task = None
    if (max_kl, min_recall) != (None, None):
        check_one_tokenizer(make_config(*ends, TrainingPlan()), "choosing native layers")
        task = _dialogues(*ends, seed)
    names = {"source": ends[0].name, "target": ends[1].name}
    asked = {**names, "data": list(sources), "minutes": minutes, "seed": seed}
    work = Work(folder.with_name(f"{folder.name}.pair"), asked)
    making = Making(ends, folder, work, sources, 60.0 * minutes, seed, force, told, task)
    if not making.finished():
        work.open()
        making.train()
    if task is not None:
        making.tune(task, max_kl, min_recall)
    return making.done()


def _folder_name(source: LanguageModel | str, target: LanguageModel | str) -> str:
    """SOURCE-to-TARGET, without the owners of the models."""
    named = (m.name if isinstance(m, LanguageModel) else str(m) for m in (source, target))
    ends = (re.sub(r"[^\w.-]", "_", Path(name).name) for name in named)
    return "-to-".join(ends)


def _dialogues(source: LanguageModel, target: LanguageModel, seed: int) -> Task:
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
    """One call's work; see :func:`pair`."""

    ends: tuple[LanguageModel, LanguageModel]
    folder: Path
    work: Work
    data: tuple[str, ...]
    seconds: float
    seed: int
    force: bool
    told: Told
    task: Task | None = None

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
            learning_rates=self._rates(),
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
        line = tuning.line_up(*self.ends, translator, self._numbers(), droidspeak=False)
        total, done = len(task.items) * len(line), 0

        def step() -> None:
            nonlocal done
            done += 1
            self.told.progress("tuning", done / total, "native layers")

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
        """The seconds for stage 2: what is left, but for the choice of native layers."""
        later = TUNED_ON * len(self._numbers()) * TALK * seconds_per_token if self.task else 0.0
        return max(LEAST * self.seconds, self.seconds - self.work.spent - later)

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
        stream = self._stream(MAX_PREFIX, pace.ANSWERS, few)
        configs, rates = starts.configs(models), len(self._rates())
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
            self.told.progress("looking", None, said)
            try:
                there = stream.at(mixture)
                samples = [there.sample(number) for number in range(few)]
            except ValueError:  # all conversations are longer
                return None
            most = pace.PROBING * self.seconds
            return pace.measured(models, configs[min(configs)], samples, most)

        return pace.lengths(pace_of, self.seconds, self._context, rates, configs).as_json()

    def _mixture(self, longest: int) -> Mixture:
        return Mixture().limited(longest, pace.ANSWERS).scaled(self._context)

    def _chosen(self, stream: Stream, lengths: pace.Lengths) -> dict[str, Any]:
        """Fit closed forms, and choose the one to begin with."""
        models, began = pair_of(*self.ends), self.work.spent
        samples = [stream.sample(number) for number in range(lengths.fit_samples)]
        held_out = list(stream.held_out(HELD_OUT))

        last = 0.0

        def judge(nu: int, norm: str) -> starts.Start:
            self.told.progress("trying closed forms", None, f"nu = {nu}, {norm}")
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

        best, found = starts.choose(lengths.most, judge, goes_on)
        self.work.facts["starts"] = starts.as_json(found)
        return vars(best)

    def _fit_path(self, nu: int, norm: str) -> Path:
        return self.work.folder / f"nu{nu}-{norm}.safetensors"

    def _fit(self, nu: int, norm: str) -> ClosedForm:
        """The closed form that was chosen, as it was made."""
        fit, path = starts.fit_of(pair_of(*self.ends), nu, norm, ()), self._fit_path(nu, norm)
        fit.restore(load_file(path), read_facts(path))
        return fit

    def _rates(self) -> tuple[float, ...]:
        own = default_rate(*(model.name for model in self.ends))
        return tuple(sorted({own, *RATES}))

    def _show(self, stage: str, report: Report | int) -> None:
        if isinstance(report, Report):
            text = f"KL {report.kl:.4f}, held out {report.held_out:.4f}"
            self.told.progress("distilling", report.share, text)
        else:
            self.told.progress(stage, None, str(report))
