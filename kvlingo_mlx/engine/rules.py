"""The rules by which a conversation's models take over from one another, and what these can do."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.caches.limits import check_going_back, check_interleaving
from kvlingo_mlx.engine.guarding import HEAL
from kvlingo_mlx.engine.healing import LAYERS
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.machines import group_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.options import GuardOptions, HealOptions

SAMPLE = [
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three."},
]


@dataclass(frozen=True, kw_only=True)
class Rules(HealOptions, GuardOptions):
    """The arguments of a :class:`~.conversation.Conversation` for growing its lines."""

    switching: str = "alternated"
    on_missing: str = "error"
    offload: str | None = None
    prefill_step_size: int = 2048
    allow_mismatch: bool = False
    quantize: int | None = None
    native_layers: int | str | None = None

    @property
    def heals_answers(self) -> bool:
        """Whether a model may read behind its translation while it answers."""
        return self.heal is not None or (self.guard > 0 and self.on_doubt == HEAL)

    def check(self, models: Mapping[str, LanguageModel]) -> None:
        """Raise ValueError for rules that are invalid, in general or for these models."""
        if self.heal == LAYERS and self.native_layers == 0:
            raise ValueError(
                "heal is 'layers', which reads first layers at a switch, and native_layers is 0, "
                "which reads none; leave one of them out, or give heal='interleaved'"
            )
        if self.heals_answers:
            check_all_can_heal(models.values())
            for model in models.values():
                check_interleaving(model)
        if self.guard:
            check_one_tokenizer(
                models.values(), "guard", "guarded: they predict no tokens in common"
            )
            for model in models.values():
                check_going_back(
                    model,
                    "cannot be guarded in a conversation",
                    "cannot go back to what came before; leave out guard (-c guard)",
                )
        several = len(by_tokenizer(models.values())) > 1
        group_of(models.values()).refuse({"models of another tokenizer": several})
        if several and self.native_layers not in (None, 0):
            raise ValueError("native_layers cannot be used between two tokenizers; leave it out")


def by_tokenizer(models: Iterable[LanguageModel]) -> list[list[LanguageModel]]:
    """The models, grouped by tokenizer."""
    found: dict[str, list[LanguageModel]] = {}
    for model in models:
        found.setdefault(model.tokenizer_fingerprint, []).append(model)
    return list(found.values())


def check_one_tokenizer(models: Iterable[LanguageModel], option: str, why: str) -> None:
    """Refuse (UnsupportedModelError) an option of models of several tokenizers."""
    if len(by_tokenizer(models)) > 1:
        raise UnsupportedModelError(
            f"models of different tokenizers cannot be {why}; leave out {option} (-c {option})"
        )


def check_all_can_heal(models: Iterable[LanguageModel]) -> None:
    """Refuse (UnsupportedModelError) models that cannot read in the place of translated entries."""
    check_one_tokenizer(models, "heal", "healed: their caches have not one entry a token")


def tell_of_templates(models: Iterable[LanguageModel], switches: Mapping[str, Any]) -> None:
    """Warn where chat templates differ so that models of one tokenizer can hand nothing over.

    Tokens of one model's line beyond the first that differs are of no use to the other.
    """
    for first, *others in by_tokenizer(models):
        try:
            expected = encode(first, SAMPLE, **switches)
            found = [(other, encode(other, SAMPLE, **switches)) for other in others]
        except ValueError:
            continue  # a template's error is reported when real messages are rendered
        other, tokens = next((each for each in found if each[1] != expected), (first, expected))
        if tokens != expected:
            warnings.warn(
                f"the chat templates of {first.name} and {other.name} differ from token "
                f"{common_prefix(expected, tokens)} of a conversation on, so each switch reads "
                "what follows anew and translates none of it; give verbatim=True (-c "
                "verbatim=true) to keep the tokens as written",
                stacklevel=6,
            )
