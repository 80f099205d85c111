"""The kinds of translators, one file per kind; ``build`` makes the kind that a config names."""

from __future__ import annotations

import importlib

from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.quantised import check_bits, check_fits


def build(
    config: TranslatorConfig,
    weights: Weights,
    *,
    batched: bool | None = None,
    quantize: int | None = None,
) -> Translator:
    """Make the translator that ``config`` and ``weights`` describe.

    Args:
        config: The translator's config.
        weights: The translator's tensors, as the format stores them.
        batched: Split the products as for a GPU (True) or a CPU (False); None: as for this machine.
        quantize: The bits of the matrices, 8 or 4, in groups of 64; None: as stored.

    Raises:
        ValueError: ``quantize`` is neither 8, 4 nor None, or it would change no matrix.
    """
    check_bits(quantize)
    if quantize is not None:
        check_fits(weights, quantize)
    module, name = config.spec.device
    kind = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return kind.build(config, weights, batched=batched, bits=quantize)
