"""Several lines over one context: which spans come from where, by how it switches."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.conversation.line import Line
from kvlingo_mlx.conversation.offers import Known
from kvlingo_mlx.conversation.spans import wrote
from kvlingo_mlx.conversation.storage import PLACES
from kvlingo_mlx.conversation.transcript import Transcript
from kvlingo_mlx.errors import IncompatibleTranslatorError, MissingTranslatorError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.translator_folder import read_config
from kvlingo_mlx.handover.hybrid import native_part
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.pairing import check_one_tokenizer, check_pair, matches
from kvlingo_mlx.loading.translators import find_translator, load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit, working
from kvlingo_mlx.tokenization.alignment import TokenAlignment
from kvlingo_mlx.translators.base import Translator

SWITCHING = ("alternated", "naive", "reprefill")
ON_MISSING = ("error", "reprefill")
Given = Translator | str | os.PathLike[str]


@dataclass(frozen=True)
class Switch:
    """What it took to bring a line up to date before its model's last step.

    Attributes:
        name: The model.
        kept: Tokens that its line held already.
        translated: Tokens translated.
        read: Tokens that it read itself, the last one of the prompt left out.
        seconds: How long that took.
        translate_s: How much of that translation took.
        read_s: How much of that reading took.
    """

    name: str
    kept: int
    translated: int
    read: int
    seconds: float
    translate_s: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """Part of a plan: the positions up to ``stop``, read, or translated from ``source``.

    ``alignment`` says which of the source's tokens stand for them, where it has others.
    """

    source: Line | None
    stop: int
    alignment: TokenAlignment | None = None


class Exchange:
    """The lines of a conversation, and how one gets what the others have.

    Attributes:
        lines: By name.
        last: What the last switch took, or None.
        active: Whose line was brought up to date last, or None.
    """

    def __init__(
        self, models: Mapping[str, LanguageModel], translators: Iterable[Given], *,
        switching: str, on_missing: str, offload: str | None, step_size: int, allow_mismatch: bool,
        quantize: int | None = None, native_layers: int | str | None = None,
    ) -> None:  # fmt: skip
        _check(models, switching, on_missing, offload, step_size, native_layers)
        records = len(models) > 1 and switching != "reprefill"
        self.lines = {name: self._open(name, m, records) for name, m in models.items()}
        self.switching, self.on_missing, self.offload = switching, on_missing, offload
        self.step_size, self.allow_mismatch, self.quantize = step_size, allow_mismatch, quantize
        self.native_layers = native_layers
        self.last: Switch | None = None
        self._brought: list[int] = []
        self.active: str | None = None
        self._from: str | None = None
        self._found: dict[tuple[str, str], Translator | Path | None] = {}
        translators = list(translators)
        loaded = [
            given if isinstance(given, Translator) else load_translator(given, quantize=quantize)
            for given in translators
        ]
        for translator in loaded:
            self._assign(translator, exact=True)
        for translator in loaded:
            self._assign(translator, exact=False)
        self._check_stored(any(not isinstance(given, Translator) for given in translators))

    @unit
    def copy(self) -> Exchange:
        """One that goes its own way; models, translators and numbers are shared."""
        made = copy.copy(self)
        made.lines = {name: line.copy() for name, line in self.lines.items()}
        return made

    def line(self, name: str) -> Line:
        """The line of a model; ValueError if there is none."""
        if name not in self.lines:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(self.lines)}")
        return self.lines[name]

    def _open(self, name: str, model: LanguageModel, records: bool) -> Line:
        """An empty line of a model."""
        return Line(name, model, records=records)

    def transcript(self, data: Mapping[str, Any]) -> Transcript:
        """The saved transcript of such a conversation.

        Raises:
            ValueError, KeyError, TypeError, IndexError: It is none.
        """
        return Transcript.from_json(data)

    # ---- translators ----------------------------------------------------------------------

    def _assign(self, translator: Translator, *, exact: bool) -> None:
        """Give a translator the directions that it serves; those made for them come first."""
        config = translator.config
        self._check_kind(translator)
        tolerance = self.allow_mismatch and not exact
        pairs = [
            (a.name, b.name)
            for a, b in itertools.permutations(self.lines.values(), 2)
            if matches(config.source, a.model, allow_mismatch=tolerance)
            and matches(config.target, b.model, allow_mismatch=tolerance)
        ]
        if not pairs and not exact:
            raise IncompatibleTranslatorError(
                f"the translator from {config.source.name} to {config.target.name} fits no two "
                f"of this conversation's models: {', '.join(self.lines)}"
            )
        for source, target in pairs:
            if exact or (source, target) not in self._found:
                self._use(translator, source, target, allow_mismatch=tolerance)

    def _use(
        self, translator: Translator, source: str, target: str, *, allow_mismatch: bool
    ) -> None:
        """Let a translator serve a direction, once it was found fit for that."""
        models = self.lines[source].model, self.lines[target].model
        check_pair(translator.config, *models, allow_mismatch=allow_mismatch)
        self._check_naive(translator)
        self._native(translator.config)
        self._found[source, target] = translator

    def _check_kind(self, translator: Translator) -> None:
        """Refuse a translator between two tokenizers, where all models share one."""
        check_one_tokenizer(translator.config, "a conversation of one tokenizer")

    def _check_naive(self, translator: Translator) -> None:
        """Refuse what naive switching cannot chain: a translation is translated again."""
        points = {t.config.capture for t in self.translators.values()} | {translator.config.capture}
        if self.switching == "naive" and len(points) > 1:
            raise IncompatibleTranslatorError(
                "switching is 'naive', but the translators read keys at "
                f"{' and '.join(sorted(points))}: what one makes another could not read; give "
                "translators of one capture point"
            )

    def _stored(self, source: str, target: str) -> Translator | Path | None:
        """The translator of a direction or where the local store, searched once, has it."""
        if (source, target) not in self._found:
            models = self.lines[source].model, self.lines[target].model
            try:
                path = find_translator(*models, allow_mismatch=self.allow_mismatch)
            except MissingTranslatorError:
                path = None
            self._found[source, target] = path
        return self._found[source, target]

    def translator(self, source: str, target: str) -> Translator | None:
        """The translator of a direction, loaded, or None."""
        found = self._stored(source, target)
        if isinstance(found, Path):
            found = load_translator(found, quantize=self.quantize)
            self._use(found, source, target, allow_mismatch=self.allow_mismatch)
        return found

    def _native(self, config: TranslatorConfig) -> int:
        """How many layers read what a translator brings; what means nothing is refused."""
        asked = 0 if self.switching == "naive" else self.native_layers
        return native_part(config, asked).layers

    def _check_stored(self, read: bool) -> None:
        """Refuse (ValueError) now what would mean nothing for a stored translator at a switch.

        ``read``: some translator was loaded here. The store is searched only for numbers given.
        """
        if self.native_layers is None and (self.quantize is None or read):
            return
        stored = [found for pair in itertools.permutations(self.lines, 2)
                  if isinstance(found := self._stored(*pair), Path)]  # fmt: skip
        for path in stored:
            self._native(read_config(path))
        if self.quantize is not None and not read and not stored:
            raise ValueError(
                "quantize has no effect, since no translator is read here: those given are loaded, "
                "and none is stored for another direction; give quantize to load_translator"
            )

    @property
    def translators(self) -> dict[tuple[str, str], Translator]:
        """Those in use, by direction."""
        return {names: t for names, t in self._found.items() if isinstance(t, Translator)}

    def used_by(self, name: str) -> tuple[Translator, ...]:
        """Those into a line that holds translated entries."""
        if not any(span.passes for span in self.line(name).spans):
            return ()
        return tuple(t for (_, target), t in self.translators.items() if target == name)

    # ---- switching ------------------------------------------------------------------------

    def bring(
        self, name: str, tokens: Sequence[int], mark: int | None = None, known: Known | None = None
    ) -> Switch:
        """Make a line hold ``tokens``: translate what others wrote, read the rest natively.

        ``mark`` is a length at which the line may have to be taken up again; ``known`` is what
        models of other tokenizers made of the same conversation.

        Raises:
            MissingTranslatorError: Others wrote a part that cannot be translated; nothing has
                changed.
        """
        started = time.perf_counter()
        line = self.line(name)
        switched = self.active not in (None, name)
        whole = switched and self.switching != "alternated"
        kept = line.kept(0 if whole else line.common(tokens))
        origin = self.active if switched else self._from
        plan = self._plan(line, tokens, kept, origin, known)
        with working():
            line.recall()
            line.trim(kept)
        translate_s, read_s = self._grow(line, plan, tokens, mark, wait=True)
        with working():
            mx.eval(caches.arrays(line.cache))
            validate_cache(line.cache, line.model, len(tokens))
            self.active, self._from = name, origin
            self._forget()
        starts = [kept, *(step.stop for step in plan)]
        lengths = [step.stop - start for step, start in zip(plan, starts, strict=False)]
        translated = sum(n for n, step in zip(lengths, plan, strict=True) if step.source)
        seconds = time.perf_counter() - started
        self._brought = list(tokens)
        read = sum(lengths) - translated
        self.last = Switch(name, kept, translated, read, seconds, translate_s, read_s)
        return self.last

    def _grow(
        self, line: Line, plan: Sequence[Step], tokens: Sequence[int], mark: int | None,
        *, wait: bool = False,
    ) -> tuple[float, float]:  # fmt: skip
        """Let a line grow by a plan, with marks where it begins and at ``mark``.

        ``wait`` for each step's results: the seconds of translation and of reading are true then.
        """
        line.mark()
        translate_s = read_s = 0.0
        for step in plan:
            started = time.perf_counter()
            # A line with rings takes over from no other tokenizer: there is nothing to mark.
            if mark is not None and len(line) < mark < step.stop and step.alignment is None:
                self._take(line, Step(step.source, mark), tokens)
                line.mark()
            self._take(line, step, tokens)
            if wait:
                mx.eval(caches.arrays(line.cache))
            took = time.perf_counter() - started
            translate_s += took if step.source else 0.0
            read_s += 0.0 if step.source else took
        return translate_s, read_s

    def _take(self, line: Line, step: Step, tokens: Sequence[int]) -> None:
        """Let a line grow by a step."""
        begun, source = len(line), step.source
        if source is None:
            line.read(tokens[begun : step.stop], self.step_size)
            return
        translator = self.translator(source.name, line.name)
        assert translator is not None
        tell_of_length(translator.config, step.stop + 1)
        states = source.native.read(begun, step.stop)
        line.take_over(
            tokens[begun : step.stop], states, source, translator, self.step_size,
            native_layers=self._native(translator.config), keep=self.switching == "naive",
        )  # fmt: skip

    def _plan(
        self, line: Line, tokens: Sequence[int], begun: int, origin: str | None,
        known: Known | None = None,
    ) -> list[Step]:  # fmt: skip
        """Where everything from position ``begun`` on comes from."""
        steps = []
        while begun < len(tokens):
            step = self._next(line, tokens, begun, origin)
            steps.append(step)
            begun = step.stop
        return steps

    def _next(self, line: Line, tokens: Sequence[int], begun: int, origin: str | None) -> Step:
        """Whose states to translate from position ``begun`` on, or none, and how far."""
        best, later = Step(None, begun), len(tokens)
        missing: Line | None = None
        for other in self._sources(line, origin):
            shared = other.common(tokens)
            reach = min(other.native.reach(begun), shared)
            if self._stored(other.name, line.name) is None:
                missing = other if wrote(other.spans, begun, shared) else missing
            elif reach > best.stop:
                best = Step(other, reach)
            elif (following := other.native.next_start(begun)) and following < shared:
                later = min(later, following)
        if best.source is not None:
            return best
        if missing is not None and self.on_missing == "error":
            raise no_translator(missing, line)
        return Step(None, later)

    def _sources(self, line: Line, origin: str | None) -> list[Line]:
        """The lines to translate from: all others, or the one that was active before."""
        if self.switching == "reprefill":
            return []
        others = [other for other in self.lines.values() if other is not line]
        return [o for o in others if self.switching == "alternated" or o.name == origin]

    @unit
    def follow(self, tokens: Sequence[int], mark: int | None = None) -> None:
        """Translate for every other line what it lacks of ``tokens``, as far as it can be.

        Nothing waits for the results. Lines that were put away stay there.
        """
        for line in self.lines.values():
            if line.away or line.trim(line.common(tokens)) == len(tokens):
                continue
            try:
                plan = self._plan(line, tokens, len(line), None)
            except MissingTranslatorError:
                continue
            steps = list(itertools.takewhile(lambda step: step.source is not None, plan))
            self._grow(line, steps, tokens, mark)
        self._forget()

    def _forget(self) -> None:
        """Let go of states that every line that could take them has."""
        if self.switching == "naive":
            return
        for line in self.lines.values():
            others = [
                other.kept(other.common(line.tokens))
                for other in self.lines.values()
                if other is not line and self._stored(line.name, other.name) is not None
            ]
            line.native.forget(min(others, default=len(line)))

    # ---- memory ---------------------------------------------------------------------------

    def put_away(self, name: str, where: str) -> int:
        """Put a line's arrays away, and wait until they are; returns the bytes it gives back.

        Raises:
            ValueError: No such model or place.
            OSError: They cannot be written; the line is as it was.
        """
        if where not in PLACES:
            raise ValueError(f"where is {where!r}; it must be one of {', '.join(PLACES)}")
        line = self.line(name)
        before = line.cache_bytes
        stored = line.put_away(where)
        if stored is not None:
            stored.settle()
        return before - line.cache_bytes

    def put_others_away(self, name: str) -> None:
        """Put away the lines that do not decode, if that was asked for; no disk is waited for.

        A disk that cannot be written is tried once more at the next switch.
        """
        if self.offload is None:
            return
        for line in self.lines.values():
            if line.name != name:
                line.put_away(self.offload)

    def measure_reprefill(self) -> float:
        """Seconds that the last switch's model takes to read all of its prompt anew, but one token.

        Raises:
            ValueError: There has been no switch.
        """
        if self.last is None:
            raise ValueError("nobody has answered since this was opened: nothing to compare with")
        fresh = Line(self.last.name, self.line(self.last.name).model, records=False)
        started = time.perf_counter()
        fresh.read(self._brought, self.step_size)
        return time.perf_counter() - started


def no_translator(source: Line, target: Line) -> MissingTranslatorError:
    return MissingTranslatorError(
        f"no translator from {source.name} ({source.model.name}) to {target.name} "
        f"({target.model.name}): pass one in translators, make one with `kvlingo-mlx fit`, "
        "or let the model read what is missing with on_missing='reprefill' "
        "(--on-missing reprefill)"
    )


def _check(
    models: Mapping[str, LanguageModel], switching: str, on_missing: str, offload: str | None,
    step_size: int, native_layers: int | str | None,
) -> None:  # fmt: skip
    for what, value, allowed in (
        ("switching", switching, SWITCHING),
        ("on_missing", on_missing, ON_MISSING),
        ("offload", offload, (None, *PLACES)),
    ):
        if value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ValueError(f"{what} is {value!r}; it must be one of {listed}")
    if switching == "naive" and native_layers not in (None, 0):
        raise ValueError(
            f"native_layers is {native_layers!r}, but switching 'naive' translates every layer; "
            "leave one of them out"
        )
    if step_size < 1:
        raise ValueError(f"prefill_step_size is {step_size}; it must be at least 1")
    deep = max(models.values(), key=lambda model: len(model.geometry.layers))
    most = len(deep.geometry.layers)
    if isinstance(native_layers, int) and not 0 <= native_layers <= most:
        raise ValueError(
            f"native_layers is {native_layers}; give a number from 0 to {most}, the cache layers "
            f"of {deep.name}, or 'auto'"
        )
    for model in models.values():
        if switching == "naive" and any(g.window is not None for g in model.geometry.layers):
            raise ValueError(
                f"switching is 'naive', but {model.name} has windows: its local layers keep too "
                "little of a translated prefix to be translated again; use alternated"
            )
