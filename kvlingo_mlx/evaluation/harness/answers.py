"""Answers of a model that decodes, whichever library runs it: what is asked, and where they end."""

import abc
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.errors import KVLingoError

MARGIN = 8  # tokens that may decode to nothing, or to a part of a character


@dataclass(frozen=True, eq=False)
class TextToWrite:
    """A text to write."""

    tokens: tuple[int, ...]  # what precedes it; at least one
    most: int  # the most tokens that it may have
    # Takes each token but the end of the turn; returns whether the text ends with it.
    take: Callable[[int], bool]


def longest_first(wanted: Iterable[TextToWrite]) -> list[TextToWrite]:
    """Texts in the order of their prompts' lengths.

    Those that are written together are then of like length, and what does not fit into memory is
    found out at once.
    """
    return sorted(wanted, key=lambda each: -len(each.tokens))


class Decoder(abc.ABC):
    """A model whose prompts are read by one condition, whichever library runs it.

    ``tokenizer`` has ``think_start``, ``think_end`` and ``has_chat_template``. ``make_cache``
    reads a prompt but for its last token. At most ``batch_size`` answers are written at once
    (ValueError below 1).
    """

    def __init__(self, target: Any, make_cache: Callable[..., Any], batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self._target, self.tokenizer, self.make_cache = target, target.tokenizer, make_cache
        self._size, self.name, self.context_length = batch_size, target.name, target.context_length
        self.identity = target.weights_fingerprint  # tells the model from others

    def score(
        self, tokens: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-likelihood in nats, and whether greedy decoding gives it."""
        cache = self.make_cache(list(tokens))
        first = self._next(tokens[-1], cache)
        best, scored = int(first.argmax()), []
        for following in continuations:
            score, greedy = float(first[following[0]]), following[0] == best
            if len(following) > 1:
                rest, rest_greedy = self._follow(following, copy.deepcopy(cache))
                score, greedy = score + rest, greedy and rest_greedy
            scored.append((score, greedy))
        return scored

    def score_alone(self, tokens: Sequence[int]) -> float:
        """The log-likelihood of the tokens after the first, read by the model itself."""
        return self._follow(tokens, self._empty())[0] if len(tokens) > 1 else 0.0

    @abc.abstractmethod
    def write(self, wanted: Sequence[TextToWrite]) -> Iterator[TextToWrite]:
        """Write texts greedily; each is yielded as soon as it has ended."""

    @abc.abstractmethod
    def read_on(self, cache: Any, tokens: Sequence[int]) -> None:
        """Let the model itself read more tokens into a cache."""

    @abc.abstractmethod
    def _empty(self) -> Any:
        """The model's cache of nothing."""

    @abc.abstractmethod
    def _next(self, token: int, cache: Any) -> Any:
        """The log probabilities (V,) after a token, which were checked."""

    @abc.abstractmethod
    def _follow(self, tokens: Sequence[int], cache: Any) -> tuple[float, bool]:
        """The log-likelihood of the tokens after the first, and whether all are first choices."""

    def _check_numbers(self, bad: object) -> None:
        """Refuse (KVLingoError) predictions some of which are no numbers, if ``bad`` says so."""
        if bad:
            raise KVLingoError(
                f"a prediction of {self.name} is not a number: the translator's output "
                "overflows, or the model's weights are damaged"
            )


@dataclass(frozen=True)
class Ends:
    """Finds the end of the reasoning and the end of the answer in a generated text."""

    stops: Sequence[str]  # the texts before which an answer ends
    start: str  # the mark that opens reasoning; empty if there is none
    end: str  # the mark that closes it
    opened: bool  # whether the prompt has opened reasoning already

    def reasons(self, text: str) -> bool:
        """Whether the text begins with reasoning."""
        return self.opened or (bool(self.start) and text.lstrip().startswith(self.start))

    def stopped(self, text: str) -> bool:
        """Whether a stop string ends the answer."""
        if self.reasons(text):
            _, closed, text = text.partition(self.end)
            return bool(closed) and self._first_stop(text.lstrip()) is not None
        return self._first_stop(text) is not None

    def cut(self, text: str) -> str:
        """The answer alone.

        An unfinished trace is returned as MLXLM does, but with the mark that the prompt opened it
        with, so that it can be told from an answer.
        """
        if self.reasons(text) and self.end in text:
            text = text.partition(self.end)[2]
            blank = len(text) - len(text.lstrip())
            return text[:blank] + text[blank:][: self._first_stop(text[blank:])]
        text = text[: self._first_stop(text)]
        _, closed, answer = text.partition(self.end) if self.end else ("", "", "")
        return answer if closed else (self.start if self.opened else "") + text

    def _first_stop(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self.stops]
        return min((place for place in places if place >= 0), default=None)


class WrittenAnswer:
    """An answer that is being written, after the tokens of a ``trace`` by another model.

    ``tokens`` are those so far, the trace's among them, without the end of the turn.
    """

    def __init__(self, tokenizer: Any, ends: Ends, trace: Sequence[int] = ()) -> None:
        self.tokens, self.ends = list(trace), ends
        self._decode = tokenizer.decode
        self._tail = max(len(mark.encode()) for mark in (*ends.stops, ends.end)) + MARGIN

    @property
    def text(self) -> str:
        """All of the text so far."""
        return self._decode(self.tokens) if self.tokens else ""

    def take(self, token: int) -> bool:
        """Add a token; returns whether it ends the answer.

        The last tokens alone are decoded, which is a hint: the whole text decides.
        """
        tail = self._taken(token)
        return any(stop in tail for stop in self.ends.stops) and self.ends.stopped(self.text)

    def _taken(self, token: int) -> str:
        """Add a token; returns the text of the last ones."""
        self.tokens.append(token)
        return self._decode(self.tokens[-self._tail :])

    def found(self) -> str:
        """The answer, without reasoning and without what follows a stop string."""
        return self.ends.cut(self.text)
