"""Which translator serves which direction between a conversation's models."""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvlingo_mlx.engine.guarding import check_reference
from kvlingo_mlx.engine.healing import LAYERS
from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.engine.rules import Rules, by_tokenizer
from kvlingo_mlx.errors import (
    IncompatibleTranslatorError,
    MissingTranslatorError,
    UnsupportedModelError,
)
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.translator_folder import read_config
from kvlingo_mlx.loading.notes import tell, tell_of_grade, to_get
from kvlingo_mlx.loading.pairing import check_one_tokenizer, check_positions, matches
from kvlingo_mlx.loading.translators import (
    find_translator,
    known_by,
    load_translator,
    resolve_translator,
)
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator

Given = Translator | str | os.PathLike[str]


class Directions:
    """For each ordered pair of models, a translator or its path in the local store.

    Raises:
        ValueError: An option would have no effect on, or be invalid for, the stored translators.
        IncompatibleTranslatorError: A given translator fits no direction.
        UnsupportedModelError: A given translator is for a model that cannot take over from another
            tokenizer.

    Warns:
        KVLingoWarning: A switch will fail for lack of a translator, or a translator does not work.
    """

    def __init__(
        self, models: Mapping[str, LanguageModel], translators: Iterable[Given], rules: Rules
    ) -> None:
        self._models, self._rules = models, rules
        self._found: dict[tuple[str, str], Translator | Path | None] = {}
        translators = list(translators)
        opened = [
            g if isinstance(g, Translator) else load_translator(g, quantize=rules.quantize)
            for g in translators
        ]
        for exact in (True, False):
            for translator in opened:
                self._assign(translator, exact=exact)
        self._check_stored(any(not isinstance(given, Translator) for given in translators))
        if rules.switching != "reprefill":
            self._tell_of_stored()

    def _assign(self, translator: Translator, *, exact: bool) -> None:
        """Assign a translator to the directions that it serves; exact matches come first."""
        config = translator.config
        if len(by_tokenizer(self._models.values())) == 1:
            check_one_tokenizer(
                config, "a conversation of models of one tokenizer", "leave this translator out"
            )
        tolerance = self._rules.allow_mismatch and not exact
        pairs = [
            (a, b)
            for a, b in itertools.permutations(self._models, 2)
            if matches(config.source, self._models[a], allow_mismatch=tolerance)
            and matches(config.target, self._models[b], allow_mismatch=tolerance)
        ]
        if not pairs and not exact:
            raise IncompatibleTranslatorError(
                f"the translator from {config.source.name} to {config.target.name} fits no two "
                f"of this conversation's models: {', '.join(self._models)}"
            )
        for pair in pairs:
            if exact or pair not in self._found:
                self._use(translator, pair, allow_mismatch=tolerance)

    def _use(
        self, found: Translator | Path, pair: tuple[str, str], *, allow_mismatch: bool
    ) -> None:
        """Assign a translator to a direction, loaded, after checking that it fits."""
        source, target = (self._models[name] for name in pair)
        translator = resolve_translator(
            found, source, target, allow_mismatch=allow_mismatch, quantize=self._rules.quantize
        )
        config = translator.config
        if self._rules.guard:
            check_reference(config)
        self.native(config)  # refused here if it is not possible
        self._found[pair] = translator

    def stored(self, source: str, target: str) -> Translator | Path | None:
        """The translator of a direction, or its path in the local store, searched once.

        None where there is none, or where the target cannot take over from another tokenizer.
        """
        if (source, target) not in self._found:
            models = self._models[source], self._models[target]
            try:
                if models[0].tokenizer_fingerprint != models[1].tokenizer_fingerprint:
                    check_positions(models[1])
                path = find_translator(*models, allow_mismatch=self._rules.allow_mismatch)
            except (MissingTranslatorError, UnsupportedModelError):
                path = None
            self._found[source, target] = path
        return self._found[source, target]

    def missing(self, source: str, target: str) -> bool:
        """Whether a direction has no translator and needs one: two names of one model need none."""
        same = self._models[source].is_same(self._models[target])
        return not same and self.stored(source, target) is None

    def read_of(self, source: str) -> tuple[bool, bool]:
        """Whether translators from a model read what goes into recurrences, and the states."""
        if not self._models[source].geometry.recurrent or self._rules.switching == "reprefill":
            return True, False
        others = [name for name in self._models if name != source and self.stored(source, name)]
        kinds = {self.maps_states(source, name) for name in others}
        return kinds != {True}, True in kinds

    def maps_states(self, source: str, target: str) -> bool:
        """Whether there is a translator of a direction, and it maps recurrent states."""
        found = self.stored(source, target)
        if found is None:
            return False
        config = read_config(found) if isinstance(found, Path) else found.config
        return config.state_maps

    def translator(self, source: str, target: str) -> Translator | None:
        """The loaded translator of a direction, or None."""
        found = self.stored(source, target)
        if isinstance(found, Path):
            self._use(found, (source, target), allow_mismatch=self._rules.allow_mismatch)
        return self.loaded.get((source, target))

    def facts(self) -> dict[str, str]:
        """All translators by their directions, loaded now: alike on all machines."""
        told = {}
        for pair in itertools.permutations(self._models, 2):
            found = self.translator(*pair)
            told[f"translator from {' to '.join(pair)}"] = "none" if found is None else found.digest
        return told

    def native(self, config: TranslatorConfig) -> int:
        """The number of native layers with a translator's config, checked."""
        if config.alignment is not None:
            return 0
        rules = self._rules
        return native_part(config, rules.native_layers, at_once=rules.heal == LAYERS).layers

    def _check_stored(self, read: bool) -> None:
        """Check now what would otherwise fail at a switch to a stored translator (ValueError).

        ``read`` says whether a translator was loaded here.
        """
        quantize, guard = self._rules.quantize, self._rules.guard
        if self._rules.native_layers is None and not guard and (quantize is None or read):
            return
        pairs = itertools.permutations(self._models, 2)
        stored = [found for pair in pairs if isinstance(found := self.stored(*pair), Path)]
        for path in stored:
            config = read_config(path)
            self.native(config)
            if guard:
                check_reference(config)
        if quantize is not None and not read and not stored:
            raise ValueError(
                "quantize has no effect, since the translators given are loaded already and the "
                "local store has none for another direction; give quantize to load_translator"
            )

    def _tell_of_stored(self) -> None:
        """Warn now of what a later switch would bring up; only configs are read."""
        pairs = list(itertools.permutations(self._models, 2))
        for pair in pairs:
            if isinstance(found := self.stored(*pair), Path):
                tell_of_grade(read_config(found), *known_by(found))
        missing = [pair for pair in pairs if self.missing(*pair)]
        if missing and self._rules.on_missing == "error":
            listed = ", none ".join(f"from {a} to {b}" for a, b in missing)
            told = f"there is no translator {listed}: switching so will fail"
            first = to_get(*(self._models[name].name for name in missing[0]))
            tell(
                f"{told} {[model.name for model in self._models.values()]}",
                f"{told}; {first}, or let the model read what is missing with "
                "on_missing='reprefill' (-c on_missing=reprefill)",
            )

    @property
    def loaded(self) -> dict[tuple[str, str], Translator]:
        """The loaded translators, by direction."""
        return {names: t for names, t in self._found.items() if isinstance(t, Translator)}
