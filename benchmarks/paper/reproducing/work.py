"""One run's room on disk, its models, its size, and who is told how it goes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paper.reproducing.models import Models
from kvlingo_mlx.embedded.dialogues import for_fitting
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.making.result import PAPERS_DATA
from kvlingo_mlx.training import has_cuda
from kvlingo_mlx.training.command_line import checked_place

TINY_CHATS = 200


@dataclass(frozen=True)
class Size:
    """How large a run is; None leaves a number to the paper.

    Attributes:
        steps: Steps of each training's second stage.
        items: The most items of a benchmark.
        seeds: The most seeds.
        training: Further options of a training's plan and recipe, by name.
        max_prefix: The longest prefix of a training sample.
        answer: The longest answer in tokens.
        nu: The most source layers that a target layer reads.
        sweeps: Whether rates that the paper does not state are swept, as it did.
        receipts: Whether translators keep a receipt, which no table reads.
    """

    steps: int | None = None
    items: int | None = None
    seeds: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    max_prefix: int | None = None
    answer: int | None = None
    nu: int | None = None
    sweeps: bool = True
    receipts: bool = True

    @property
    def told(self) -> dict[str, int]:
        """What is smaller than in the paper, by name."""
        sizes = {"steps": self.steps, "items": self.items, "seeds": self.seeds}
        return {name: number for name, number in sizes.items() if number is not None}


PAPERS = Size()
TINY = Size(
    steps=6,
    items=2,
    seeds=2,
    training={"batch": 2, "validate_every": 3, "fit_samples": 12, "held_out": 4, "hidden": 32},
    max_prefix=512,
    answer=64,
    nu=4,
    sweeps=False,
    receipts=False,
)


@dataclass(frozen=True)
class Heard:
    """Functions that hear how a run goes."""

    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Work:
    """A run of one or several entries, and what it keeps for the next one.

    Attributes:
        room: The folder of everything that is kept: translators, scores, results.
        models: Where the models are.
        size: How large the run is.
        data: Conversations to train on; empty for the paper's, or generated ones in a tiny run.
        texts: Plain texts to train base models' translators on; generated ones in a tiny run.
        given: A folder with translators that are used instead of trained ones.
        benchmarks: Options of the evaluation: local files, the judge and its prompts.
        device: ``mlx``, or PyTorch's name of one; None chooses.
        processes: How many of PyTorch's train together; None: one for each GPU of ``cuda``.
        heard: Who is told.
        decoder: What decodes, where that is not what trains.
        used: The translators that an entry's numbers are of, with their folders.
    """

    room: Path
    models: Models = field(default_factory=Models)
    size: Size = PAPERS
    data: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    given: Path | None = None
    benchmarks: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    processes: int | None = None
    heard: Heard = field(default_factory=Heard)
    decoder: str | None = None
    used: dict[Any, Path] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Whether the zoo's models stand for the paper's."""
        return self.models.tiny

    @property
    def trains(self) -> str:
        """The device that trains: ``mlx``, or PyTorch's name of one."""
        return checked_place(self.device or ("cuda" if has_cuda() else "mlx"))

    @property
    def place(self) -> str:
        """The device that decodes: the one that trains, unless an entry needs MLX."""
        return self.decoder or self.trains

    @property
    def journal(self) -> Journal:
        """The scores that are known already."""
        self.room.mkdir(parents=True, exist_ok=True)
        return Journal(self.room / "scores.jsonl")

    @property
    def responses(self) -> Path:
        """The file of lm-eval's responses."""
        return self.room / "responses.jsonl"

    def training_data(self, plain: bool = False) -> tuple[str, ...]:
        """What translators are trained on; ``plain`` asks for texts instead of conversations.

        Raises:
            ValueError: Texts are needed, and none were given.
        """
        if given := self.texts if plain else self.data:
            return given
        if self.tiny:
            return (str(self._generated(plain)),)
        if plain:
            raise ValueError(
                "translators of base models are trained on plain text (the paper's is of "
                'Nemotron-CC): give --text FILE, a JSONL file with records {"text": ...}'
            )
        return (PAPERS_DATA,)

    def _generated(self, plain: bool) -> Path:
        """A file of generated conversations, or of these as plain texts."""
        path = self.room / ("texts.jsonl" if plain else "chats.jsonl")
        if not path.exists():
            talks = [talk.conversation() for talk in for_fitting(TINY_CHATS)]
            records: list[Any] = [{"messages": talk} for talk in talks]
            if plain:
                lines = ["\n".join(m["content"] for m in talk) for talk in talks]
                fours = (lines[n : n + 4] for n in range(0, len(lines), 4))
                records = [{"text": "\n".join(four)} for four in fours]
            self.write(path.name, "".join(json.dumps(record) + "\n" for record in records))
        return path

    def write(self, name: str, text: str) -> Path:
        """Write a file of the room, whole or not at all."""
        path = self.room / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        return path

    def seeds(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """An entry's seeds, as many as this run has."""
        return seeds[: self.size.seeds]
