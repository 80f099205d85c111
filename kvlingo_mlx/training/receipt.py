"""What a translator reaches on the bundled conversations, for others to verify it by."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.embedded.bundled import NAME, bundled_samples
from kvlingo_mlx.samples import other_tokenizer
from kvlingo_mlx.training.gradients import conversation_loss, read
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.torch_model import TorchModel
from kvlingo_mlx.training.translator import TorchTranslator


def receipt(
    source: TorchModel, target: TorchModel, translator: TorchTranslator
) -> dict[str, Any] | None:
    """Mean KL (nats per token) and share of equal first choices; None if no prompt fits.

    Measured as the translator was trained: the target reads its own ``native_layers``, which the
    receipt names, since a profile may choose others later.
    """
    context = min(source.context_length, target.context_length)
    other = other_tokenizer(source.tokenizer, target.tokenizer)
    samples = bundled_samples(target.tokenizer, context, other)
    kl = objective_named("kl")
    capture, native_layers = translator.config.capture, translator.config.native_layers
    found = [
        conversation_loss(
            target, translator, read(source, target, sample, capture, native_layers), kl
        )
        for sample in samples
    ]
    if not found:
        return None
    tokens = [len(sample.continuation) for sample in samples]
    return {
        "prompts": NAME,
        "kl": sum(loss.kl for loss in found) / len(found),
        "top1": sum(loss.agreed for loss in found) / sum(tokens),
        "tokens": sum(tokens),
        "native_layers": native_layers,
        "dtype": str(target.dtype).rsplit(".", 1)[-1],
    }
