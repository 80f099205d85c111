"""Translator kinds, one file each; ``build`` picks the one a config names."""

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
        config: Its facts.
        weights: Its tensors, as the format stores them.
        batched: Cut its products as on a GPU (True) or a CPU; None asks the machine.
        quantize: Bits of its matrices, 8 or 4, in groups of 64; None leaves them as they are.

    Raises:
        ValueError: ``quantize`` is something else, or would change no matrix.
    """
    check_bits(quantize)
    if quantize is not None:
        check_fits(weights, quantize)
    module, name = config.spec.device
    kind = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return kind.build(config, weights, batched=batched, bits=quantize)
