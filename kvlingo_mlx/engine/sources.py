"""What the target's line of a hand-over is filled from.

That is a line of the source's own, states that exist already, or those that arrive from another
machine; each is a :class:`~kvlingo_mlx.engine.line.Source`.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.line import Line, Source
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.engine.spans import Span
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, TranslatedStates
from kvlingo_mlx.remote import stream
from kvlingo_mlx.remote.model import RemoteModel
from kvlingo_mlx.threads import working

States = KVStates | TranslatedStates


class Given:
    """A source whose states exist already, or arrive from another machine, in order."""

    def __init__(self, model: LanguageModel, states: Iterable[States], tokens: int) -> None:
        self.name, self.model, self._states = "source", model, states
        self.spans = [Span(0, tokens, self.name)]

    def written(
        self, tokens: Sequence[int], start: int, step_size: int, config: TranslatorConfig
    ) -> Iterator[States]:
        """The states of ``tokens`` from ``start`` on; the chunks are those that are given."""
        for states in self._states:
            if isinstance(states, TranslatedStates):
                yield states
                continue
            begun, stop = max(states.start, start), min(states.end, len(tokens))
            if begun < stop:
                with working():
                    yield capture.move(states.part(begun, stop), self.model, config.capture)
            del states

    def close(self) -> None:
        """End what is arriving."""
        if isinstance(self._states, Generator):
            self._states.close()


def source_of(plan: Plan, clock: Clock) -> Source | None:
    """The source of a plan's states, empty yet; None where nothing is translated."""
    if plan.way != "accelerator" or plan.translator is None or not plan.prefix:
        return None
    if isinstance(plan.source, RemoteModel):
        return Given(plan.source, _sent(plan, clock), len(plan.prefix))
    return source_line(plan)


def source_line(plan: Plan) -> Line:
    """An empty line of a plan's source, whose states are dropped once the target has them."""
    assert plan.translator is not None
    config = plan.translator.config
    line = Line("source", plan.source, records=True)
    line.inputs, line.states, line.passes_on = not config.state_maps, config.state_maps, True
    return line


def _sent(plan: Plan, clock: Clock) -> stream.Spans:
    """The states of a source on another machine, as they arrive; ``clock`` gets their number."""
    assert isinstance(plan.source, RemoteModel) and plan.translator is not None
    target, span = plan.target, plan.span
    received = clock.received = stream.Received(plan.source.address, "", len(span))
    if span:
        firsts = target.geometry.first_kept(span.stop)
        dtype: Any = str(target.cache_dtype).rsplit(".", 1)[-1]
        layers, step_size = plan.native.layers, plan.step_size
        wanted = stream.SpanOrder(
            plan.read, step_size, span.start, plan.translator, layers, firsts, dtype
        )
        yield from stream.spans(plan.source, wanted, received)
    if received.lacking:
        title, address = plan.translator.config.title, plan.source.address
        tell(
            f"{title} on {address}",
            f"{address} lacks {title} and sent untranslated states, which are more bytes; start it "
            "with `serve-prefill --translator`",
        )
