"""Warnings about models and translators that may be used anyway; each is shown once a process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from kvlingo_mlx.errors import KVLingoWarning, printable
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.fingerprints import ROUNDED, SAME
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.loading import advice
from kvlingo_mlx.loading.grading import GRADES, UNGRADED, grade_of, receipt_of
from kvlingo_mlx.models.language_model import LanguageModel

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

    That is another commit with the same norms, few bits although the fit used another precision, or
    other projections under the same norms.
    """
    measure = f"{advice.to_measure(config, None)} measures what that costs"
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

    The message gives the length up to which, or from which, texts are run as in training.
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


def tell_of_grade(config: TranslatorConfig, name: str | None = None, own: bool = False) -> None:
    """Warn of a translator that does not work by its own receipt, or that has no grade.

    ``name`` is what commands call it, and ``own`` whether `tune` may write to its folder.

    There is no warning if `tune` chose native layers, which the receipt does not count.
    """
    receipt, grade, it = receipt_of(config), grade_of(config), advice.called(config, name)
    if receipt is None or receipt.grade == UNGRADED:
        told = f"nobody has measured how much {it} keeps"
        tell(told, f"{told}; {advice.to_measure(config, name)} does")
    elif grade in GRADES[1:]:
        told = f"{it} {'is useless' if grade == GRADES[2] else 'loses a part'}: {receipt.reasons}"
        tell(told, f"{told}; {advice.to_improve(config, name, own)}")


def tell_of_length(config: TranslatorConfig, num_tokens: int, name: str | None = None) -> None:
    """Warn of a prompt longer than the longest prefix on which a translator was fitted or tested.

    There is no warning if the translator does not record that.
    """
    longest, it = config.longest_prefix, advice.called(config, name)
    if longest is not None and num_tokens - 1 > longest:
        tell(
            f"{it}, {longest}",
            f"the prompt has {num_tokens} tokens, and {it} was fitted and tested on prefixes of at "
            f"most {longest}: beyond them its quality is unknown; fit it on longer conversations, "
            f"or let {config.target.name} read such prompts itself",
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
