"""Translator kinds, one file each; ``build`` picks the one a config names."""

from __future__ import annotations

import importlib

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.tensor_file import Weights
from kvlingo_mlx.translator_config import TranslatorConfig
from kvlingo_mlx.translators.base import Translator

KINDS = {"linear": ("linear", "LinearTranslator")}


def build(config: TranslatorConfig, weights: Weights) -> Translator:
    """Make the translator that ``config`` and ``weights`` describe.

    Raises:
        IncompatibleTranslatorError: A sound translator of a kind this version lacks.
    """
    check_applicable(config)
    module, name = KINDS[config.kind]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name).build(config, weights)


def check_applicable(config: TranslatorConfig) -> None:
    """Refuse a sound translator that this version cannot apply.

    Raises:
        IncompatibleTranslatorError: Names what is beyond this version.
    """
    kind = "joint" if config.joint else config.kind
    if kind not in KINDS or config.capture == "latent" or config.alignment is not None:
        what = f"kind {kind}, capture {config.capture}, alignment {config.alignment}"
        raise IncompatibleTranslatorError(
            f"this version cannot apply a translator with {what}; "
            f"it applies kinds {', '.join(KINDS)} within one tokenizer: upgrade kvlingo-mlx"
        )
