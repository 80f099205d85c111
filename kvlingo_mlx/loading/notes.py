"""Warnings about models and translators that may be used anyway; each is shown once a process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from kvlingo_mlx.errors import KVLingoWarning, printable
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.projections import ROUNDED, SAME
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.loading.grading import GRADES, UNGRADED, receipt_of
from kvlingo_mlx.models.language_model import LanguageModel

VERIFY = "`kvlingo-mlx verify TRANSLATOR --source {} --target {}`"

_told: set[str] = set()


def tell(key: str | None, text: str) -> None:
    """Warn with ``text``, unless a warning with the same ``key`` was given before; None: anyway."""
    if key is None or key not in _told:
        _told.update(() if key is None else (key,))
        warnings.warn(printable(text), KVLingoWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The stack level, counted from :func:`tell`, of the first caller outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "kvlingo_mlx":
        level, frame = level + 1, frame.f_back
    return level


def tell_of_pair(config: TranslatorConfig, source: LanguageModel, target: LanguageModel) -> None:
    """Warn of differences between a pair's models and those with which a translator was made.

    Warns:
        KVLingoWarning: A model is of another commit with the same norms, is quantised although the
            fit used another precision, or has other projections under the same norms.
    """
    measure = VERIFY.format(source.name, target.name) + " measures what that costs"
    ends = (("source", config.source, source), ("target", config.target, target))
    for role, spec, model in ends:
        fitted = config.fitted_on(role)
        for found in (
            _other_commit(spec, model),
            _other_bits(fitted, model),
            _other_projections(config.provenance.get("projections"), role, fitted, model),
        ):
            if found is not None:
                told = f"{config.title} is used, though {found}"
                tell(told, f"{told}; {measure}")


def tell_of_misreading(model: LanguageModel) -> None:
    """Warn of a window or of short factors of a model's training that mlx-lm ignores.

    Warns:
        KVLingoWarning: The message gives the length up to which, or from which, texts are run as
            in training.
    """
    text = model.config.get("text_config", model.config)
    short = misread.long_factors_from(model.family.text_type(model.facts), text)
    if short is not None:
        tell(
            f"factors of {model.name}",
            f"{model.name} was trained to rotate texts of at most {short} tokens by short_factor, "
            "and mlx-lm rotates every text by long_factor: answers to shorter ones may be worse "
            "than in other software",
        )
    window = model.ignored_window
    if window is not None:
        tell(
            f"window of {model.name}",
            f"{model.name} was trained to see the last {window} tokens in some or all of its "
            f"layers, and mlx-lm's {model.geometry.model_type} ignores this window: texts beyond "
            f"{window} tokens are refused, shorter ones are answered correctly",
        )


def tell_of_grade(config: TranslatorConfig) -> None:
    """Warn of a translator that does not work by its own receipt, or that has no grade.

    Warns:
        KVLingoWarning: The message gives the grade and its reasons, or says how to measure it.
            There is no warning if `tune` chose native layers, which the receipt does not count.
    """
    receipt = receipt_of(config)
    if receipt is None or receipt.grade == UNGRADED:
        ends = config.source.name, config.target.name
        told = f"{config.title} is {UNGRADED}, so nothing says how much the target will recall"
        tell(told, f"{told}; {VERIFY.format(*ends)} measures it")
    elif receipt.grade in GRADES[1:] and config.native_layers <= receipt.native_layers:
        told = f"{config.title} is {receipt}"
        tell(
            told,
            f"{told}; `kvlingo-mlx tune --min-recall 0.9` lets the target read its first layers "
            "itself, and `kvlingo-mlx train` or more data make a better one",
        )


def tell_of_length(config: TranslatorConfig, num_tokens: int) -> None:
    """Warn of a prompt longer than the longest prefix on which a translator was fitted or tested.

    Warns:
        KVLingoWarning: The message gives both lengths. There is no warning if the translator does
            not record the length.
    """
    longest = config.longest_prefix
    if longest is not None and num_tokens - 1 > longest:
        tell(
            f"{config.title}, {longest}",
            f"the prompt has {num_tokens} tokens, and {config.title} was fitted and tested on "
            f"prefixes of at most {longest}: beyond them its quality is unknown; fit it on longer "
            "conversations, or let the target read the prompt (strategy native)",
        )


def _other_commit(spec: ModelSpec, model: LanguageModel) -> str | None:
    """Another commit of the same repository; copies elsewhere have their own commits."""
    if spec.name != model.name or None in (spec.revision, model.revision):
        return None
    if spec.revision == model.revision:
        return None
    return (
        f"it was made with commit {spec.revision:.12} of {spec.name}, and this is "
        f"{model.revision:.12} (their norms are the same)"
    )


def _other_bits(fitted: str | None, model: LanguageModel) -> str | None:
    if model.bits is None or fitted in (None, model.precision):
        return None
    return f"it was fitted on {fitted} and {model.name} runs in {model.precision}"


def _other_projections(
    kept: Any, role: str, fitted: str | None, model: LanguageModel
) -> str | None:
    """Another fine-tune with the same norms; unknown if quantised, as rounding would hide it."""
    numbers = kept.get(role) if isinstance(kept, dict) else None
    if numbers is None or model.projections is None:
        return None
    found = model.projections.difference(numbers)
    if found is None or found <= (SAME if fitted == model.precision else ROUNDED):
        return None
    return (
        f"the key and value projections of {model.name} differ from those that it was fitted on "
        f"(by up to {found:.1%}; the norms are the same): another fine-tune, or a LoRA adapter "
        "fused in"
    )
