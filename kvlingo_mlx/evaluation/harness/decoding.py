"""What lm-eval's tasks need of a model that decodes, whichever library runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reading:
    """A prompt, and where its reader changes."""

    tokens: tuple[int, ...]  # the prompt's tokens; at least one
    # The index of the first token that the decoding model runs itself. A condition makes the cache
    # of the tokens before it.
    begin: int

    @classmethod
    def of(cls, tokens: Sequence[int], most: int, begin: int | None = None) -> Reading:
        """The last ``most`` tokens of a prompt; without ``begin`` the last one is run."""
        cut = max(0, len(tokens) - most)
        last = len(tokens) - 1
        begin = last if begin is None else min(begin, last)
        return cls(tuple(tokens[cut:]), max(0, begin - cut))


@dataclass(frozen=True, eq=False)
class Wanted:
    """A text to write."""

    reading: Reading  # what precedes it
    most: int  # the most tokens that it may have
    # Takes each token but the end of the turn; returns whether the text ends with it.
    take: Callable[[int], bool]


class Decoder(Protocol):
    """A model whose prompts are read by one condition."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, with ``think_start``, ``think_end`` and ``has_chat_template``."""

    @property
    def context_length(self) -> int:
        """The most tokens that the model was made for."""

    @property
    def identity(self) -> list[Any]:
        """The facts that tell the model from others."""

    def score(
        self, reading: Reading, continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-likelihood in nats, and whether greedy decoding gives it."""

    def score_alone(self, tokens: Sequence[int]) -> float:
        """The log-likelihood of the tokens after the first, read by the model itself."""

    def write(self, wanted: Sequence[Wanted]) -> Iterator[Wanted]:
        """Write texts greedily; each is yielded as soon as it has ended."""


def shared_start(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The number of first tokens that two sequences share."""
    both = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(tokens), len(others)))


def longest_first(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Texts in the order of their prompts' lengths.

    Those that are written together are then of like length, and what does not fit into memory is
    found out at once.
    """
    return sorted(wanted, key=lambda each: -len(each.reading.tokens))
