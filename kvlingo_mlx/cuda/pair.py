"""Two PyTorch models in a training, and the attention that weighs the rows of a closed form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch

from kvlingo_mlx.cuda import gradients
from kvlingo_mlx.cuda.attention import attention_mass
from kvlingo_mlx.cuda.gradients import conversation_loss, entries, loss_of, read
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.embedded.bundled import spelled
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import GUARD, MeasuredConversation, agreement, cuts
from kvlingo_mlx.stage1.passes import State
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.runtime import Pair


@dataclass(frozen=True)
class TorchPair(Pair):
    """Two models on PyTorch."""

    runtime: ClassVar[str] = "torch"
    gradients: ClassVar[Any] = gradients

    source: TorchModel
    target: TorchModel

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "transformers": version("transformers")}

    def trainable(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> TorchTranslator:
        return TorchTranslator.from_arrays(config, arrays, self.target.device)

    def entry(
        self, layer: int, sides: Sequence[torch.Tensor], capture: str, at: Any = None
    ) -> gradients.Entry:
        keys, values = sides
        at = 0 if at is None else self.array(at)
        return self.target.entry(layer, keys, values, capture, at)

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[States, States]]:
        yield gradients.paired_states(self.source, self.target, sample, capture)

    def rows(self, states: States, reads: Sequence[State]) -> torch.Tensor:
        arrays = (states.side(side)[layer].to(self.target.device) for side, layer in reads)
        return torch.cat([array.double() for array in arrays], dim=1)

    def array(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array).to(self.target.device)

    def attention_mass(self, sample: Sample) -> np.ndarray:
        return attention_mass(self.target, sample).cpu().numpy()

    def receipt(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], own: HeldOut | None = None
    ) -> dict[str, Any] | None:
        measure = partial(_measured, self, self.trainable(config, arrays))
        found = agreement(self.source, self.target, config.native_layers, measure, own)
        return None if found is None else found.to_json(self.target.precision)


@torch.no_grad()
def _measured(
    pair: TorchPair, translator: TorchTranslator, sample: Sample, value: tuple[int, ...] | None
) -> MeasuredConversation:
    """A conversation from the translated cache, the target's own cache, and no cache."""
    source, target = pair.source, pair.target
    kl, config = objective_named("kl"), translator.config
    reading = read(source, target, sample, config.capture, config.native_layers)
    alone = target.hidden((sample.prefix[-1], *sample.continuation[:-1]))
    teacher, labels = reading.teacher, sample.continuation
    losses = [
        conversation_loss(target, translator, reading, kl),
        *(
            loss_of(kl, target.logits, student, teacher, labels, with_gradient=False)
            for student in (teacher, alone)
        ),
    ]
    stops = (
        cuts(len(sample.prefix) - 1)
        if value is not None and sample.source_prefix is sample.prefix
        else []
    )
    return MeasuredConversation(
        [loss.kl for loss in losses],
        losses[0].agreed,
        len(labels),
        [spelled(loss.best, sample, value) for loss in losses] if value else (),
        [_apart(source, target, translator, sample.prefix[: stop + 1]) for stop in stops],
    )


@torch.no_grad()
def _apart(
    source: TorchModel, target: TorchModel, translator: TorchTranslator, tokens: Sequence[int]
) -> float:
    """KL(source || target) over a prompt's last tokens, the target's from the translated cache."""
    last = len(tokens) - 1 - GUARD
    config, following = translator.config, tokens[last:-1]
    # A sample's last prefix token is run by the target, so it is the first of those compared.
    sample = Sample(tuple(tokens[: last + 1]), ())
    reading = read(source, target, sample, config.capture, config.native_layers)
    cache = target.cache(entries(target, translator, reading), last)
    own = source.logits(source.hidden(tokens[:-1])[last:])
    other = target.logits(target.hidden(following, cache)).to(own.device)
    rows = min(own.shape[-1], other.shape[-1])
    p, q = (torch.log_softmax(each[:, :rows].double(), dim=-1) for each in (own, other))
    return float((p.exp() * (p - q)).sum(-1).mean())
