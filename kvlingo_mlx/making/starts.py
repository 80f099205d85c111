"""Which closed form a training begins with: source layers a target layer reads, and the norm.

Each is fitted on the same conversations and judged by its KL on held-out ones. That KL says little
of what further source layers bring: self-distillation lowers it most where there are most of them
(paper/LOG.md, "what `pair` begins with"). So the most are taken, unless they do harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.checkpoints import write_state
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.runtime import Pair

NUS, NORM, OTHER_NORM = (1, 2, 3), "frobenius", "attention_mass"
HARM = 0.1  # a KL that is lower by this share with fewer source layers speaks against more


@dataclass(frozen=True)
class Start:
    """A closed form, and its held-out KL in nats per token; ``why_not`` where it has none."""

    nu: int
    norm: str
    kl: float | None
    why_not: str = ""

    def __str__(self) -> str:
        """For example ``nu = 2, frobenius: 0.105``."""
        return f"nu = {self.nu}, {self.norm}: {self.why_not or f'{self.kl:.4f}'}"

    def below(self, other: Start, share: float = 0.0) -> bool:
        """Whether its KL is lower, by more than a share of the other's."""
        return self.kl is not None and (other.kl is None or self.kl < (1 - share) * other.kl)


def configs(pair: Pair, nu: int | None = None) -> dict[int, TranslatorConfig]:
    """The config of each number of source layers that this pair allows, or of ``nu`` alone.

    Raises:
        ValueError: The source has fewer than ``nu`` layers of a kind.
    """
    found: dict[int, TranslatorConfig] = {}
    for each in NUS if nu is None else (nu,):
        try:
            found[each] = make_config(pair.source, pair.target, TrainingPlan(nu=each))
        except ValueError:
            if not found:
                raise
            break  # the source has fewer layers of a kind
    return found


def judged(
    pair: Pair, way: tuple[int, str], samples: Sequence[Sample], held_out: Sequence[Sample],
    path: Path,
) -> Start:  # fmt: skip
    """A closed form of a number of source layers and a norm, judged, and kept in ``path``."""
    nu, norm = way
    fit = ClosedForm(configs(pair, nu)[nu], pair, lambda: samples, norm, learns=True)
    try:
        fit.run()
    except ValueError as problem:
        return Start(nu, norm, None, str(problem))
    config, weights, provenance = fit.result
    write_state(path, f"the closed form of nu = {nu}", weights, provenance)
    arrays = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    made, kl = pair.trainable(config, arrays), objective_named("kl")
    mean = float(np.mean([pair.loss(made, pair.read(s, config), kl).kl for s in held_out]))
    return Start(nu, norm, mean) if np.isfinite(mean) else Start(nu, norm, None, "not finite")


def choose(
    nus: Sequence[int],
    judge: Callable[[int, str], Start],
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[Start, list[Start]]:
    """The start to train from, and all that were judged; ValueError if none can be fitted.

    Numbers of source layers are tried from the most down, while ``goes_on`` says that there is
    time. The most are kept unless fewer have a clearly lower KL; then the other norm is tried.
    """
    found: list[Start] = []
    best = Start(max(nus), NORM, None)
    for nu in sorted(nus, reverse=True):
        if best.kl is not None and not goes_on():
            break
        found.append(judge(nu, NORM))
        best = found[-1] if best.kl is None or found[-1].below(best, HARM) else best
    if goes_on():
        found.append(judge(best.nu, OTHER_NORM))
        best = found[-1] if found[-1].below(best) else best
    if best.kl is None:
        raise ValueError(f"no closed form can be made: {best.why_not}")
    return best, found
