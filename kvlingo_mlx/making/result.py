"""What a call of :func:`kvlingo_mlx.pair` makes, and what it tells on the way."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import NO_RECEIPT, said_of
from kvlingo_mlx.training.checkpoints import log_of
from kvlingo_mlx.training.watch import lowest, outlook

GENERATED = "generated conversations"  # what a translator's provenance says of these
AS_IT_IS = "both models have one shape and vocabulary; the source's cache as it is"
PAPERS_DATA = "nvidia/Nemotron-SFT-Instruction-Following-Chat-v2"  # paper: "Training data"
NO_DATA = (
    f"no --data: it trains on {GENERATED}, for a first try; for a translator to keep, give your "
    f"own chats, or a dataset of the Hub such as the paper's, {PAPERS_DATA}"
)


@dataclass(frozen=True)
class PairResult:
    """A finished translator."""

    folder: Path
    # Its folder in the local store, in bfloat16; None where another translator of these models and
    # this form is there, which is left as it is.
    stored: Path | None
    config: TranslatorConfig  # with receipt and tuning in the provenance
    curve: Sequence[Mapping[str, Any]] = field(default=(), repr=False)  # the log of stage 2
    bundled_data: bool = False  # trained on the package's generated conversations

    @property
    def log(self) -> Path:
        """The file of the curve, if it is still there."""
        return log_of(self.folder)

    @property
    def lines(self) -> list[str]:
        """What was reached, and what to type next: five lines, or three if nothing was learnt."""
        made, ends = self.config.provenance, (self.config.source.name, self.config.target.name)
        kls = [lowest(line["held_out"]) for line in self.curve] or [math.nan]
        data = f"{GENERATED}, for a first try" if self.bundled_data else "your data"
        native = self.config.native_layers
        chat = f"kvlingo-mlx chat --model small={ends[0]} --model large={ends[1]}"
        onward = (
            "the local store holds another one of this form, which was left as it is; to replace "
            f"it: kvlingo-mlx import {self.folder} --force"
            if self.stored is None
            else f"it is in the local store; next: {chat}"
        )
        grade = f"grade: {said_of(self.config) if 'receipt' in made else NO_RECEIPT}"
        if AS_IT_IS in made.get("data", ()):
            asked = "nothing needs to be learnt first; --nu 1 --force learns all the same"
            return [f"{self.folder}: {AS_IT_IS}: {asked}", grade, onward]
        more = outlook(self.curve) or "the curve is too short to say what more time would bring"
        return [
            f"{self.folder}: nu = {self.config.nu}, {native} native layers of "
            f"{len(self.config.target.layers)}, trained on {data}; prefixes of up to "
            f"{made.get('longest_prefix')} tokens",
            grade,
            f"held-out KL {kls[0]:.4f} before self-distillation, {min(kls):.4f} at best",
            more,
            onward,
        ]


@dataclass(frozen=True)
class Callbacks:
    """Functions that hear how the work proceeds."""

    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    # Called with the stage, the share of the time for everything that is over, and a text.
    progress: Callable[[str, float, str], None] = lambda stage, share, text: None
