"""The rules by which a conversation's models take over from one another, and what these can do."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.caches.limits import check_going_back, check_interleaving
from kvlingo_mlx.engine.guarding import HEAL, WARN, check_guard
from kvlingo_mlx.engine.healing import ANSWERING, HEAL_SHARE, LAYERS, check_way, first_layers
from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.engine.storage import PLACES
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.machines import group_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode

SWITCHING = ("alternated", "reprefill")
ON_MISSING = ("error", "reprefill")
SAMPLE = [
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three."},
]


@dataclass(frozen=True)
class Rules:
    """The arguments of a :class:`~.conversation.Conversation` for growing its lines."""

    switching: str = "alternated"
    on_missing: str = "error"
    offload: str | None = None
    step_size: int = 2048
    allow_mismatch: bool = False
    quantize: int | None = None
    native_layers: int | str | None = None
    heal: str | None = None
    heal_share: float = HEAL_SHARE
    guard: int = 0
    on_doubt: str = WARN

    @property
    def heals_answers(self) -> bool:
        """Whether a model may read behind its translation while it answers."""
        return self.heal is not None or (self.guard > 0 and self.on_doubt == HEAL)

    def layers(self, config: TranslatorConfig, tokens: int | None = None) -> int:
        """The native layers at a switch with a translator, checked.

        ``tokens`` is the length of what the line will hold, as in :func:`native_part`.
        """
        asked = self.native_layers
        if asked is None and self.heal == LAYERS:
            asked = first_layers(config, tokens)
        return native_part(config, asked, tokens=tokens).layers

    def check(self, models: Mapping[str, LanguageModel]) -> None:
        """Raise ValueError for rules that are invalid, in general or for these models."""
        for what, value, allowed in (
            ("switching", self.switching, SWITCHING),
            ("on_missing", self.on_missing, ON_MISSING),
            ("offload", self.offload, (None, *PLACES)),
        ):
            if value not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ValueError(f"{what} is {value!r}; it must be one of {listed}")
        check_way(self.heal, ANSWERING, self.heal_share)
        if self.heal == LAYERS and self.native_layers == 0:
            raise ValueError(
                "heal is 'layers', which reads first layers at a switch, and native_layers is 0, "
                "which reads none; leave one of them out, or give heal='interleaved'"
            )
        check_guard(self.guard, self.on_doubt)
        if self.heals_answers:
            check_all_can_heal(models.values())
            for model in models.values():
                check_interleaving(model)
        if self.guard:
            check_all_can_be_guarded(models.values())
        several = len(by_tokenizer(models.values())) > 1
        group_of(models.values()).refuse({"models of another tokenizer": several})
        if self.step_size < 1:
            raise ValueError(f"prefill_step_size is {self.step_size}; it must be at least 1")
        if several and self.native_layers not in (None, 0):
            raise ValueError("native_layers cannot be used between two tokenizers; leave it out")
        self._check_layers(models)

    def _check_layers(self, models: Mapping[str, LanguageModel]) -> None:
        layers = self.native_layers
        deep = max(models.values(), key=lambda model: len(model.geometry.layers))
        most = len(deep.geometry.layers)
        if isinstance(layers, int) and not 0 <= layers <= most:
            raise ValueError(
                f"native_layers is {layers}; give a number from 0 to {most}, the cache layers "
                f"of {deep.name}, or 'auto'"
            )


def by_tokenizer(models: Iterable[LanguageModel]) -> list[list[LanguageModel]]:
    """The models, grouped by tokenizer."""
    listed = list(models)
    if len(listed) < 2:
        return [listed]
    found: dict[str, list[LanguageModel]] = {}
    for model in listed:
        found.setdefault(model.tokenizer_fingerprint, []).append(model)
    return list(found.values())


def check_all_can_heal(models: Iterable[LanguageModel]) -> None:
    """Refuse models that cannot read in the place of their translated entries.

    Raises:
        UnsupportedModelError: They have several tokenizers.
    """
    if len(by_tokenizer(models)) > 1:
        raise UnsupportedModelError(
            "models of different tokenizers cannot be healed: their caches have not one entry a "
            "token; leave out heal (-c heal)"
        )


def check_all_can_be_guarded(models: Iterable[LanguageModel]) -> None:
    """Refuse models whose predictions a guard cannot compare in a conversation.

    Raises:
        UnsupportedModelError: They have several tokenizers, or a layer keeps a window or a state.
    """
    if len(by_tokenizer(models)) > 1:
        raise UnsupportedModelError(
            "models of different tokenizers cannot be guarded: they predict no tokens in common; "
            "leave out guard (-c guard)"
        )
    for model in models:
        check_going_back(model)


def tell_of_templates(models: Iterable[LanguageModel], switches: Mapping[str, Any]) -> None:
    """Warn where chat templates differ so that models of one tokenizer can hand nothing over."""
    for alike in by_tokenizer(models):
        if found := template_difference(alike, switches):
            one, other, position = found
            warnings.warn(
                f"the chat templates of {one.name} and {other.name} differ from token {position} "
                "of a conversation on, so each switch reads what follows anew and translates none "
                "of it; give verbatim=True (-c verbatim=true) to keep the tokens as written",
                stacklevel=6,
            )


def template_difference(
    models: Iterable[LanguageModel], switches: Mapping[str, Any]
) -> tuple[LanguageModel, LanguageModel, int] | None:
    """Two models whose chat templates render a sample differently, and the first such token.

    Tokens of one model's line beyond that position are of no use to the other, which reads anew.
    """
    first, *others = models
    try:
        expected = encode(first, SAMPLE, **switches)
        found = [(other, encode(other, SAMPLE, **switches)) for other in others]
    except ValueError:
        return None  # a template's error is reported when real messages are rendered
    for other, tokens in found:
        if tokens != expected:
            return first, other, common_prefix(expected, tokens)
    return None
