"""Whether a translator computes here what it was made to compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx import checkpoint
from kvlingo_mlx.embedded.bundled import NAME, bundled_samples
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.teacher_forcing import PerToken, log_probabilities, per_token
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.samples import Sample, other_tokenizer
from kvlingo_mlx.states import KVStates
from kvlingo_mlx.tensor_file import Weights
from kvlingo_mlx.translator_config import SIDES, Map, TranslatorConfig, maps_of
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class Agreement:
    """What a translated cache predicts on the bundled conversations, beside the native one.

    Attributes:
        kl: KL(native || translated), nats per token, mean over conversations.
        top1: Share of tokens at which both have the same first choice.
        hidden_kl: The same KL where the prefix is hidden: what a useless translator has.
        samples, tokens: How many conversations, and continuation tokens in all.
    """

    kl: float
    top1: float
    hidden_kl: float
    samples: int
    tokens: int


# ---- the maps alone -----------------------------------------------------------------------


def devices() -> list[mx.Device]:
    """The CPU, and the default device where that is another."""
    return list({str(d): d for d in (mx.Device(mx.cpu), mx.default_device())}.values())


def map_error(config: TranslatorConfig, weights: Weights, device: mx.Device) -> float:
    """Largest relative error of a map on its probe, MLX on ``device`` against NumPy in float64.

    Token t of the states holds the probe of target layer t's maps, so all are run together.
    """
    with mx.stream(device):
        found = build(config, weights)(_probe_states(config)).states(len(config.target.layers))
        mx.eval(found.arrays)
    expected = checkpoint.selftest(config, weights)
    errors = []
    for m in maps_of(config):
        sides = SIDES if config.joint else (m.name.split(".")[0],)
        ours = [np.array(found.side(side)[m.layer][0, m.layer]) for side in sides]
        errors.append(
            _relative_error(np.concatenate(ours), _expected(m, config, weights, expected))
        )
    return max(errors)


def _probe_states(config: TranslatorConfig) -> KVStates:
    """States in which each map finds its probe."""
    tokens = len(config.target.layers)
    arrays = {
        side: [
            np.zeros((1, tokens, layer.width(side)), np.float32) for layer in config.source.layers
        ]
        for side in SIDES
    }
    for m in maps_of(config):
        values, begin = checkpoint.probe(m.inputs), 0
        for side, s in _reads(m, config):
            layer = config.source.layers[s]
            copies = 1 if m.heads is None else layer.kv_heads
            width = layer.width(side) // copies
            part = values[begin : begin + width]
            arrays[side][s][0, m.layer] = np.tile(part, copies)
            begin += width
    keys, values_ = (tuple(map(mx.array, arrays[side])) for side in SIDES)
    return KVStates(keys, values_, config.capture, 0)


def _reads(m: Map, config: TranslatorConfig) -> Iterator[tuple[str, int]]:
    """Side and layer of the source that a map reads, in order."""
    sides = SIDES if config.joint else (m.name.split(".")[0],)
    for side in sides:
        yield from ((side, s) for s in config.assignment.side(side)[m.layer])


def _expected(
    m: Map, config: TranslatorConfig, weights: Weights, probes: dict[str, np.ndarray]
) -> np.ndarray:
    """A map's output on its probe; the format's own probes leave a linear map's bias out."""
    if config.kind != "linear":
        return probes[f"{m.name}.probe_out"].reshape(-1)
    out = probes[f"{m.name}.weight.probe_out"].reshape(-1)
    bias = f"{m.name}.bias"
    return out + weights.as_float32(bias) if bias in weights.arrays else out


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    one, other = found.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-30))


# ---- with both models -----------------------------------------------------------------------


def agreement(
    source: LanguageModel, target: LanguageModel, translator: Translator, native_layers: int = 0,
    *, allow_mismatch: bool = False,
) -> Agreement | None:  # fmt: skip
    """How well the target continues the bundled conversations from a translated cache.

    It reads its first ``native_layers`` itself, whatever a profile has chosen since: as many as
    the receipt was measured with. ``allow_mismatch`` is as in :func:`hand_over`. None where no
    conversation fits both models' contexts.
    """
    context = min(source.context_length, target.context_length)
    other = other_tokenizer(source.tokenizer, target.tokenizer)
    samples = bundled_samples(target.tokenizer, context, other)
    if not samples:
        return None
    make = conditions.translated(
        source, target, translator, native_layers, allow_mismatch=allow_mismatch
    )
    found = [_compared(target, make, sample) for sample in samples]
    kl, hidden = (float(np.mean([scores[i].kl.mean() for scores, _ in found])) for i in (0, 1))
    same = np.concatenate([scores[0].best == best for scores, best in found])
    return Agreement(kl, float(same.mean()), hidden, len(samples), same.size)


def _compared(
    target: LanguageModel, translated: conditions.CacheMaker, sample: Sample
) -> tuple[list[PerToken], np.ndarray]:
    """A conversation from a translated cache and from none; and the native first choices."""

    def predicted(make: conditions.CacheMaker) -> list[mx.array]:
        cache, last = make(sample.handover or sample.prefix), sample.prefix[-1]
        return list(log_probabilities(target, cache, last, sample.continuation))

    native = predicted(conditions.native(target))
    makers = translated, conditions.hidden(target)
    scores = [per_token(native, predicted(make), sample.continuation) for make in makers]
    return scores, np.concatenate([np.array(mx.argmax(block, axis=-1)) for block in native])


@dataclass(frozen=True)
class Receipt:
    """What a training measured on these very conversations, in PyTorch.

    Attributes:
        kl, top1: As in :class:`Agreement`.
        native_layers: How many layers the target read itself.
    """

    kl: float
    top1: float
    native_layers: int = 0


def receipt_of(config: TranslatorConfig) -> Receipt | None:
    """The receipt that its training left; None where it left none, or none for this text."""
    left: Any = config.provenance.get("receipt")
    if not isinstance(left, dict) or left.get("prompts") != NAME:
        return None
    numbers: list[Any] = [left.get(name) for name in ("kl", "top1")]
    layers: Any = left.get("native_layers", 0)
    if any(type(value) not in (int, float) for value in numbers) or type(layers) is not int:
        return None
    if not 0 <= layers <= len(config.target.layers):
        return None
    kl, top1 = numbers
    return Receipt(float(kl), float(top1), layers)


def verdict(found: Agreement, receipt: Receipt | None) -> tuple[bool, str]:
    """Whether all is well, and why, in a line.

    A KL may be a fifth, or 0.01 nats, above or below its receipt's.
    """
    if not found.kl < found.hidden_kl:
        return False, (
            f"useless: KL {found.kl:.4f}, and {found.hidden_kl:.4f} with the prefix hidden; is it "
            "for these models?"
        )
    if receipt is None:
        return True, "works, but its training left no receipt for these conversations to compare"
    allowed = max(0.2 * receipt.kl, 0.01)
    if not abs(found.kl - receipt.kl) <= allowed:
        return False, (
            f"differs from its receipt: KL {found.kl:.4f}, expected {receipt.kl:.4f} within "
            f"{allowed:.4f}; are the models those, in the precision, that it was trained with?"
        )
    return True, "as its training left it"
