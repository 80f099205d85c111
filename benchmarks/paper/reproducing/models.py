"""The paper's models by their names in its tables: where they are, and what stands for them.

A tiny run uses the zoo's models in their places: the same families where the zoo has them, the same
kinds of differences between the two models of a pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.reproducing.stand_ins import DEEPER, LATENTS, MAKERS, can_be_made
from benchmarks.paper.reproducing.tables import Pair
from kvlingo_mlx.embedded import zoo, zoo_names
from kvlingo_mlx.errors import MissingModelError
from kvlingo_mlx.format.fingerprints import files_fingerprint
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve

OWNERS = {"Qwen3": "Qwen", "gemma": "google", "Mistral": "mistralai"}
QWEN, UNEQUAL = ("tiny-qwen3-s", "tiny-qwen3-l"), ("tiny-qwen3-s", "tiny-qwen3-moe")
DEEPER_S, DEEPER_L = f"tiny-qwen3-s{DEEPER}", f"tiny-qwen3-l{DEEPER}"
# By the paper's pair; those that are in the package, and better ones if a folder has them.
TINY: dict[Pair, tuple[Pair, Pair | None]] = {
    ("Qwen3-0.6B", "Qwen3-1.7B"): (QWEN, None),
    ("Qwen3-4B", "Qwen3-8B"): (QWEN, None),
    ("Qwen3-0.6B", "Qwen3-8B"): (("tiny-qwen3-s", DEEPER_L), None),
    ("Qwen3-1.7B", "Qwen3-4B"): (("tiny-qwen3-l", DEEPER_S), None),
    ("Qwen3-4B", "Qwen3-30B-A3B"): (UNEQUAL, None),
    ("gemma-3-4b-it", "gemma-3-12b-it"): (UNEQUAL, ("tiny-gemma3-s", "tiny-gemma3-l")),
    ("gemma-4-E2B-it", "gemma-4-E4B-it"): (UNEQUAL, ("tiny-gemma4-s", "tiny-gemma4-l")),
    ("Mistral-7B-Instruct-v0.3", "Qwen3-8B"): (UNEQUAL, ("tiny-mistral", "tiny-qwen3-s")),
}
PAGE = "benchmarks/paper/made-models.md"
# Endings of models that nobody released, and where the page tells how they are made.
MADE = {"latents": "#latents", "baseline": "#latents", "scratch": "#pretrain-the-pair-from-scratch"}
PLAIN = ("-Base", "-scratch")  # endings of models without a chat template


# The most layers of one kind of a source that has fewer of them than a tiny run reads (four).
FEW = {"tiny-gemma3-s": 2}


def made_by(name: str) -> str:
    """The section of ``PAGE`` that tells how a model is made; empty for a released one."""
    return next((MADE[word] for word in name.split("-") if word in MADE), "")


def released(name: str) -> str:
    """The released model whose shape a model has."""
    return re.sub(rf"-(Base|{'|'.join(MADE)})\b.*", "", name)


@dataclass(frozen=True)
class Models:
    """Where the models of a run are.

    Attributes:
        folder: A folder with models by name; what it lacks is looked for on the Hub.
        tiny: Whether the zoo's models stand for the paper's.
        made: Where models are kept that are made to stand for others.
    """

    folder: Path | None = None
    tiny: bool = False
    made: Path = Path("models")

    def pair(self, pair: Pair) -> Pair:
        """Folders or Hub ids of the small and the large model."""
        small, large = self.names(pair)
        return self.place(small), self.place(large)

    def names(self, pair: Pair) -> Pair:
        """The names of the two models that stand for the paper's."""
        if not self.tiny:
            return pair
        packed, better = _stand_ins(pair)
        if better is None or not all(
            self._here(name) or name in zoo_names() or can_be_made(name) for name in better
        ):
            return packed
        return better

    def lacks(self, pair: Pair) -> list[str]:
        """Those of two models that nobody released and that are not here."""
        return [name for name in pair if made_by(name) and not (self.tiny or self._here(name))]

    def check(self, label: str, pairs: Sequence[Pair]) -> None:
        """Refuse, before anything is read, an entry of models that nobody released.

        Raises:
            MissingModelError: Some are not here; the message names them.
        """
        missing = dict.fromkeys(name for pair in pairs for name in self.lacks(pair))
        if not missing:
            return
        there = [n for n in dict.fromkeys(sum(pairs, ())) if made_by(n) and n not in missing]
        where = "no --models is given" if self.folder is None else f"--models {self.folder}"
        raise MissingModelError(
            f"{label} is of models that nobody released; found: {', '.join(there) or 'none'} "
            f"({where}), missing: {', '.join(missing)}; {PAGE}{made_by(next(iter(missing)))} tells "
            "how to make them; then give --models FOLDER that holds them by these names"
        )

    def place(self, name: str) -> str:
        """A model's folder, or its id on the Hub."""
        if self._here(name):
            return str(self._at(name))
        if self.tiny:
            make = next((make for ending, make in MAKERS.items() if name.endswith(ending)), None)
            return str(make(name, self.made) if make else zoo(name))
        owner = next((OWNERS[start] for start in OWNERS if name.startswith(start)), "")
        return f"{owner}/{name}" if owner else name

    def files(self, name: str) -> str | None:
        """What identifies a model's files; None if they are not on this machine."""
        try:
            found = resolve(self.place(name), None, MODEL_FILES, MissingModelError, offline=True)
        except MissingModelError:
            return None
        return files_fingerprint(found[0])

    def stands_in(self, pair: Pair) -> str:
        """What to tell of a tiny pair that is not of the paper's family; empty if it is."""
        better = _stand_ins(pair)[1] if self.tiny else None
        used = self.names(pair)
        if better is None or used == better:
            return ""
        return (
            f"{used[0]} and {used[1]} stand for {pair[0]} and {pair[1]}; a folder with "
            f"{better[0]} and {better[1]} (--models) would be nearer"
        )

    def _at(self, name: str) -> Path:
        return (self.folder or Path()) / name

    def _here(self, name: str) -> bool:
        return self.folder is not None and (self._at(name) / "config.json").exists()


def _stand_ins(pair: Pair) -> tuple[Pair, Pair | None]:
    """The pair of the package that stands for one, and a better one if there is any."""
    packed, better = TINY[released(pair[0]), released(pair[1])]
    if LATENTS in pair[0]:
        better = packed[0] + LATENTS, packed[1] + LATENTS
    return packed, better
