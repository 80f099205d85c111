"""Lines of models with several tokenizers, and how they translate each other's contents."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence

from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.exchange import Exchange, Step, Switch, no_translator
from kvlingo_mlx.engine.line import Line, Steps
from kvlingo_mlx.engine.offers import (
    Known,
    Offer,
    Offers,
    best,
    character,
    must_wait,
    next_start,
    offered,
    recorded,
    wrote_itself,
)
from kvlingo_mlx.engine.positioned import PositionedLine
from kvlingo_mlx.engine.reading import Reading
from kvlingo_mlx.errors import MissingTranslatorError, UnsupportedModelError
from kvlingo_mlx.loading.pairing import check_positions
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit

Wanted = Mapping[str, Reading | None]  # by tokenizer; None where the reading is unknown


class CrossExchange(Exchange):
    """An exchange between models of several tokenizers.

    Lines of one tokenizer exchange whole tokens. Lines of two tokenizers share the messages'
    contents: each keeps its own model's rendering, whose boilerplate that model reads itself.

    Attributes:
        known: The readings with which a line was last brought up to date.
    """

    known: Known | None = None

    def _open(self, name: str, model: LanguageModel, records: bool) -> Line:
        try:
            check_positions(model)
        except UnsupportedModelError:
            return Line(name, model, records=records)  # it can still be a source
        return PositionedLine(name, model, records=records)

    def _alike(self, a: Line, b: Line) -> bool:
        return a.model.tokenizer_fingerprint == b.model.tokenizer_fingerprint

    # ---- switching ------------------------------------------------------------------------

    def bring(
        self,
        name: str,
        tokens: Sequence[int],
        mark: int | None = None,
        known: Known | None = None,
        then: int | None = None,
    ) -> Generator[None, None, Switch]:
        self.known = known
        return super().bring(name, tokens, mark, known, then)

    def _sources(self, line: Line) -> list[Line]:
        return [other for other in super()._sources(line) if self._alike(line, other)]

    def _offers(self, line: Line, begun: int, length: int, known: Known | None) -> Offers:
        given: list[Offer] = []
        missing: list[Offer] = []
        if known is None or self.rules.switching == "reprefill":
            return given, missing
        target = known.target.rendering(length)
        for other in self.lines.values():
            if self._alike(line, other) or (other.name, line.name) in self.barred:
                continue
            found = self.directions.stored(other.name, line.name) is not None
            for reading in known.others.get(self.key(other.name), ()):
                runs = recorded(other) if found else wrote_itself(other)
                more = offered(other, reading, target, begun, runs)
                (given if found else missing).extend(more)
        return given, missing if self.rules.on_missing == "error" else []

    def _next(self, line: Line, tokens: Sequence[int], begun: int, offers: Offers) -> Step:
        given, missing = offers
        refused: MissingTranslatorError | None = None
        step = Step(None, begun)
        try:
            step = super()._next(line, tokens, begun, offers)
        except MissingTranslatorError as error:
            refused = error
        if step.source is not None:
            return step
        if found := best(given, begun):
            offer, alignment = found
            return Step(offer.source, alignment.target[1], alignment)
        if refused is not None:
            raise refused
        for offer in missing:
            if offer.groups[0, 2] <= begun < offer.groups[-1, 3]:
                if not isinstance(line, PositionedLine):
                    check_positions(line.model)
                raise no_translator(offer.source, line)
        starts = [next_start(either, begun) for either in offers]
        return Step(None, min([step.stop, *(s for s in starts if s is not None)]))

    # ---- after an answer ------------------------------------------------------------------

    def follow_across(
        self, wanted: Wanted, others: Mapping[str, Sequence[Reading]], mark: int | None
    ) -> Steps:
        """Translate as much as possible of what each line lacks.

        The models read the text between translated contents themselves. Lines that were put away
        stay away.

        Args:
            wanted: The reading that the lines of each tokenizer are to hold.
            others: How each tokenizer's models have read the conversation.
            mark: A length to which a line with ring caches may have to return.
        """
        for line in self.lines.values():
            reading = wanted.get(self.key(line.name))
            if reading is None or line.away or line.name in self.asleep:
                continue
            tokens = reading.tokens
            if line.trim(line.common(tokens)) == len(tokens):
                continue
            known = Known(reading, others)
            try:
                plan = self._plan(line, tokens, len(line), known)
            except (MissingTranslatorError, UnsupportedModelError):
                continue
            steps = _followed(plan, len(line), known)
            yield from self._grow(line, steps, tokens, mark, Clock() if self.waits else None)

    def _forget(self) -> None:
        """Do nothing: what a line of another tokenizer lacks is known only after the answer."""

    @unit
    def forget(self, wanted: Wanted, others: Mapping[str, Sequence[Reading]]) -> None:
        """Drop the recorded states that every line that could take them has."""
        for line in self.lines.values():
            needed = []
            for other in self.lines.values():
                if other is line or self.directions.stored(line.name, other.name) is None:
                    continue
                if self._alike(line, other):
                    needed.append(other.kept(other.common(line.tokens)))
                else:
                    reading = wanted.get(self.key(other.name))
                    needed.append(
                        _lacked(line, other, reading, others.get(self.key(line.name), ()))
                    )
            line.native.forget(min(needed, default=len(line)))


def _followed(plan: Sequence[Step], begun: int, known: Known) -> list[Step]:
    """The steps up to the last translation before which no content must wait for another model."""
    at = [begun, *(step.stop for step in plan)]
    places = [character(known.target, length) for length in at]
    runs = list(itertools.pairwise(places))
    taken = [run for run, step in zip(runs, plan, strict=True) if step.source is not None]
    waiting = must_wait(known, [(0, places[0]), *taken])
    steps = 0
    for index, (run, step) in enumerate(zip(runs, plan, strict=True)):
        if step.source is not None:
            steps = index + 1
        elif any(a < run[1] and run[0] < b for a, b in waiting):
            break
    return list(plan[:steps])


def _lacked(source: Line, target: Line, wanted: Reading | None, readings: Sequence[Reading]) -> int:
    """The first position of the source that a target of another tokenizer still lacks."""
    if wanted is None:
        return 0
    begun = target.kept(target.common(wanted.tokens))
    rendering = wanted.rendering(len(wanted.tokens))
    runs = recorded(source)
    rows = [
        int(offer.groups[:, 0].min())
        for reading in readings
        for offer in offered(source, reading, rendering, begun, runs)
    ]
    return min(rows, default=max((source.common(r.tokens) for r in readings), default=0))
