"""Folded decoding, and canonical positions between two tokenizers, beside translated caches."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvlingo_mlx import folding
from kvlingo_mlx.evaluation import lineup
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, target_ids
from kvlingo_mlx.evaluation.lineup import Action, Condition, identity_of
from kvlingo_mlx.folding.folds import check_whole
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.translators.base import Translator

NAMES = ("canonical", "folded")


def baseline(
    spec: str,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    native_layers: int | str | None = 0,
) -> Condition:
    """``canonical`` or ``folded``.

    ``canonical`` is between two tokenizers: translated keys at their entries' own places, not at
    assigned positions. ``folded`` translates nothing: the target reads the source's own cache.

    Raises:
        ValueError: ``canonical`` is asked for with one tokenizer.
        IncompatibleTranslatorError, UnsupportedModelError: Folding is not possible.
    """
    if spec == "folded":
        check_whole(translator.config, native_layers)
        return _folded(source, target, translator)
    if translator.config.alignment is None:
        raise ValueError("--baselines names 'canonical', which needs a pair of two tokenizers")
    found = lineup.translated(spec, source, target, [translator])
    make = canonical(found.makers[0])
    return Condition(spec, (make,), found.identity | {"canonical": True})


def canonical(make: CacheMaker) -> CacheMaker:
    """Control: rotate translated keys by their entries' order in the text, not as assigned."""
    return lambda prefix: make(in_order(prefix) if isinstance(prefix, AlignedPrefix) else prefix)


def in_order(aligned: AlignedPrefix) -> AlignedPrefix:
    """A prefix whose translated keys are rotated at their entries' order in the text, 0, 1, ...

    The next token keeps the target's own position. So its distance to the last entries is wrong
    by the number of tokens in which the two models differ (the mismatch of the paper's appendix).
    """
    order = np.argsort(np.concatenate([aligned.groups[:, 0], aligned.own]), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return replace(aligned, positions=place[: len(aligned.rows)])


def folded(source: LanguageModel, target: LanguageModel, translator: Translator) -> CacheMaker:
    """Make caches with which the target reads the source's own cache (folded decoding).

    The translator must be linear and post-RoPE. It serves every layer, whatever native layers it
    was tuned to.

    Raises:
        IncompatibleTranslatorError, UnsupportedModelError: Folding is not possible; the message
            says why.
    """
    folding.check_foldable(source, target, translator)
    given: Any = {"translator": translator, "native_layers": 0, "allow_mismatch": True}
    return lambda prefix: folding.folded_hand_over(source, target, target_ids(prefix), **given)


def _folded(source: LanguageModel, target: LanguageModel, translator: Translator) -> Condition:
    def at_switch(prefix: Prefix) -> Action:
        theirs = folding.prefill(source, [target_ids(prefix)[:-1]], 2048)
        return lambda: folding.fold_caches(theirs, source, target, translator)

    make = folded(source, target, translator)
    identity = {"source": identity_of(source), "translators": [translator.digest], "folded": True}
    return Condition("folded", (make,), identity, at_switch)
