"""Lines from which an answer is decoded, and what brought one of them up to date."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.healing import Interleaved
from kvlingo_mlx.engine.line import Line, Steps
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.group import Group
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class Switch:
    """The work that brought a line up to date before its model's last step.

    ``kept``, ``translated``, ``read`` and the prompt's last token, which begins the answer and is
    counted in ``read_tokens`` of a response, are together the whole prompt.

    Attributes:
        name: The model.
        kept: Tokens that its line held from before: the model's own, and those that were
            translated for an earlier answer of this model.
        translated: Tokens that were translated for this answer: now, or since this model's last
            answer, as ``eager`` does it.
        read: Tokens that the model read itself now.
        seconds: Seconds for all of this.
        translate_s: The part of them that translation took.
        read_s: The part of them that reading took.
        ahead: Those of ``translated`` that were translated before the answer was asked for.
        native_layers: Cache layers in which the model read the translated tokens itself.
        guarded: What the guard found, if one was asked for and something is translated.
        sources: The models whose tokens these translated ones are.
        prefill_s: The part of the seconds in which another model read for it.
    """

    name: str
    kept: int
    translated: int
    read: int
    seconds: float
    translate_s: float = 0.0
    read_s: float = 0.0
    ahead: int = 0
    native_layers: int = 0
    guarded: Guarded | None = None
    sources: tuple[str, ...] = ()
    prefill_s: float = 0.0


class LineSet(ABC):
    """Lines by name: those of a conversation, or the two of a hand-over.

    Attributes:
        lines: The lines.
        group: The processes that hold some of the models together.
        keeps: Whether the lines go on after the answer.
        way: How a prompt is read, as responses name it.
        step_size: Tokens per prefill chunk.
    """

    keeps, way = True, "switch"
    lines: dict[str, Line]
    group: Group
    step_size: int

    def line(self, name: str) -> Line:
        """The line of a model; ValueError if there is none."""
        if name not in self.lines:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(self.lines)}")
        return self.lines[name]

    def key(self, name: str) -> str:
        """The fingerprint of a model's tokenizer."""
        return self.line(name).model.tokenizer_fingerprint

    @abstractmethod
    def bring(
        self,
        name: str,
        tokens: Sequence[int],
        mark: int | None = None,
        known: Any = None,
        then: int | None = None,
    ) -> Generator[None, None, Switch]:
        """Make a line hold ``tokens``; each chunk is a step."""

    def follow(self, wanted: Any, others: Any, mark: int | None) -> Steps:
        """Translate what the other lines lack after an answer; nobody follows a hand-over."""
        yield from ()

    def forget(self, wanted: Any, others: Any) -> None:  # noqa: B027
        """Drop what every line that could take it has."""

    @abstractmethod
    def healing(self, line: Line) -> Interleaved:
        """What a line reads between two steps of its answer."""

    @abstractmethod
    def used_by(self, name: str, sources: Collection[str]) -> tuple[Translator, ...]:
        """The translators from ``sources`` into a line."""

    def origin(self, name: str) -> LanguageModel:
        """The model from whose states a line's may be made, for messages."""
        return self.line(name).model

    def put_others_away(self, name: str) -> None:  # noqa: B027  (not all sets store lines)
        """Store the lines that do not decode, if that was asked for."""

    def chosen_together(self, choice: Choice) -> Choice:
        """How tokens are chosen, by the first process where several answer together."""
        return replace(choice, sampler=self.group.firsts_tokens(choice.sampler))

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """A context for mlx-lm's loop, which begins a step ahead."""
        try:
            yield
        finally:
            self.group.settle()
