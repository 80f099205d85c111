"""The zoo: tiny trained models and their translators, shipped for demo and tests."""

from __future__ import annotations

from pathlib import Path

from kvlingo_mlx.arguments import checked

MODELS = Path(__file__).parent / "models"
TRANSLATORS = Path(__file__).parent / "translators"


@checked
def zoo(name: str) -> Path:
    """The folder of an embedded tiny model, for ``load`` and ``generate``.

    Raises:
        ValueError: There is no such model; lists those there are.
    """
    names = zoo_names()
    if name not in names:
        raise ValueError(f"there is no zoo model {name!r}; there are {', '.join(names)}")
    return MODELS / name


def zoo_names() -> list[str]:
    """The embedded models."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def zoo_pairs() -> list[tuple[str, str]]:
    """Source and target of every embedded translator, whose folder is source--target."""
    folders = sorted(path.parent.name for path in TRANSLATORS.glob("*/translator_config.json"))
    pairs = [folder.split("--") for folder in folders]
    return [(source, target) for source, target in pairs]
