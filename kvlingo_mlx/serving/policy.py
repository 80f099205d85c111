"""How each model takes over from each other one: by translation, or by reading anew, and why."""

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from kvlingo_mlx.engine.directions import Directions
from kvlingo_mlx.engine.rules import Rules
from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.loading.grading import GRADES, grade_of, receipt_of, said_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving.settings import PairRule, Settings

Pair = tuple[str, str]


@dataclass(frozen=True)
class Way:
    """How one model takes over from another, and why, in words for the log and clients."""

    strategy: str  # "translate", "hybrid" (its first layers read the tokens), or "reread"
    why: str


class Policy:
    """The way of each ordered pair of models.

    A translator of the local store is used unless its receipt says that it is useless. One that
    was named by the user is always used, unless its receipt tells more than the user's ``max_kl``.
    """

    def __init__(self, models: Mapping[str, LanguageModel], settings: Settings) -> None:
        with warnings.catch_warnings():  # how good they are is in the reasons below
            warnings.simplefilter("ignore", KVLingoWarning)
            rules = Rules(on_missing="reprefill", guard=settings.guard)
            self.directions = Directions(models, settings.translators or (), rules)
        given = set(self.directions.loaded)
        told = {tuple(pair.split(":", 1)): rule for pair, rule in settings.pairs.items()}
        self._rules = {
            pair: told.get(pair, PairRule()) for pair in itertools.permutations(models, 2)
        }
        self._max_kl = settings.max_kl
        self.ways = {pair: self._way(pair, pair in given) for pair in self._rules}

    def ways_of(self, strategy: str | None, tokens: int) -> dict[Pair, Way]:
        """The ways for one request.

        Args:
            strategy: What the request asks for: "translate", "reread", or None.
            tokens: The length of its conversation until now.
        """
        if strategy == "reread":
            return dict.fromkeys(self.ways, Way("reread", "the request asked for it"))
        found = dict(self.ways)
        for pair, rule in self._rules.items():
            if strategy == "translate":
                found[pair] = self._best(pair)
            elif tokens < rule.shortest:
                found[pair] = Way(
                    "reread", f"the conversation is shorter than {rule.shortest} tokens"
                )
            elif rule.longest is not None and tokens > rule.longest:
                found[pair] = Way(
                    "reread", f"the conversation is longer than {rule.longest} tokens"
                )
        return found

    def sources_of(self, name: str, strategy: str | None) -> list[str]:
        """The models from which one takes over by translation, as a request's strategy says."""
        ways = self.ways if strategy is None else self.ways_of(strategy, 0)
        return [
            source
            for (source, target), way in ways.items()
            if target == name and way.strategy != "reread"
        ]

    def _best(self, pair: Pair) -> Way:
        """The way by the pair's translator, however good it is."""
        translator = self.directions.translator(*pair)
        if translator is None:
            return Way("reread", "there is no translator for this pair")
        config = translator.config
        native = self.directions.native(config)
        return Way("hybrid" if native else "translate", said_of(config))

    def _way(self, pair: Pair, given: bool) -> Way:
        best, rule = self._best(pair), self._rules[pair]
        translator = self.directions.translator(*pair)
        if translator is None or rule.strategy == "translate":
            return best
        if rule.strategy == "reread":
            return Way("reread", "the settings say so")
        receipt = receipt_of(translator.config)
        most = self._max_kl if rule.max_kl is None else rule.max_kl
        if most is not None and receipt is None:
            return Way("reread", "the translator has no receipt, and max_kl asks for one")
        if most is not None and receipt is not None and not receipt.kl <= most:
            return Way("reread", f"the translator's KL of {receipt.kl:.4f} is above max_kl {most}")
        if not given and grade_of(translator.config) == GRADES[-1]:
            return Way("reread", f"the translator is {best.why}")
        return best

    @property
    def nbytes(self) -> int:
        """The bytes of the translators in memory."""
        return sum({id(t): t.nbytes for t in self.directions.loaded.values()}.values())
