"""How each model takes over from each other one: by translation, or by reading anew, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvlingo_mlx.conversation.directions import Directions
from kvlingo_mlx.conversation.rules import Rules
from kvlingo_mlx.loading.grading import SOME, receipt_of, said_of
from kvlingo_mlx.models.language_model import LanguageModel

Pair = tuple[str, str]


@dataclass(frozen=True)
class Way:
    """How one model takes over from another.

    Attributes:
        strategy: "translate", "hybrid" (its first layers read the tokens), or "reread".
        why: The reason, in words for the server's log and its clients.
    """

    strategy: str
    why: str


class Policy:
    """The way of each ordered pair of models.

    A translator of the local store is used unless its receipt says that it is useless. One that
    was named by the user is always used.
    """

    def __init__(self, models: Mapping[str, LanguageModel], named: Iterable[str]) -> None:
        self.directions = Directions(models, named, Rules(on_missing="reprefill"))
        given = set(self.directions.loaded)
        self.ways = {
            pair: self._way(pair, pair in given) for pair in itertools.permutations(models, 2)
        }

    def _way(self, pair: Pair, given: bool) -> Way:
        translator = self.directions.translator(*pair)
        if translator is None:
            return Way("reread", "there is no translator for this pair")
        config = translator.config
        receipt, said = receipt_of(config), said_of(config)
        share = None if receipt is None else receipt.recovered
        if not given and share is not None and share < SOME:
            return Way("reread", f"the translator is {said}")
        way = "hybrid" if self.directions.native(config) else "translate"
        return Way(way, said)

    @property
    def nbytes(self) -> int:
        """The bytes of the translators in memory."""
        return sum({id(t): t.nbytes for t in self.directions.loaded.values()}.values())

    @property
    def barred(self) -> frozenset[Pair]:
        """The pairs between which nothing is translated."""
        return frozenset(pair for pair, way in self.ways.items() if way.strategy == "reread")
