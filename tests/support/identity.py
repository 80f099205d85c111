"""The identity translator of a model, and the tokens it is tried on."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.format import assignment
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import Receipt
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.linear import LinearTranslator, identity

TOKENS = [(7 * i * i + 3 * i + 5) % 280 for i in range(50)]


def identity_of(
    model: LanguageModel, *, head_mixing: bool = True, **facts: Any
) -> LinearTranslator:
    """It is exact, and so its receipt says unless ``facts`` have another provenance."""
    same = assignment.identity(len(model.attentions))
    exact = {"receipt": Receipt(0.0, 1.0, 0, 1.0).to_json()}
    facts = {"provenance": exact, **facts}
    return identity(
        TranslatorConfig(model.spec(), model.spec(), same, head_mixing=head_mixing, **facts)
    )
