"""The zoo: tiny trained models and their translators, shipped for the demo and the tests."""

from pathlib import Path

from kvlingo_mlx.arguments import checked

MODELS = Path(__file__).parent / "models"
TRANSLATORS = Path(__file__).parent / "translators"
# A question that every embedded pair answers; they understand few others.
EXAMPLE = (
    "I want you to remember a few things about my friends. The hotel of Emma is Lima. "
    "The code of Rosa is A4. The home of Paul is Oslo. What is the hotel of Emma?"
)


@checked
def zoo(name: str) -> Path:
    """The folder of an embedded tiny model, for ``load`` and ``generate``.

    Raises:
        ValueError: There is no such model; the message lists the models.
    """
    names = zoo_names()
    if name not in names:
        raise ValueError(f"there is no zoo model {name!r}; there are {', '.join(names)}")
    return MODELS / name


def is_embedded(model: Path | None) -> bool:
    """Whether a folder is an embedded model's own folder, not a copy of it."""
    return model is not None and model.resolve().parent == MODELS.resolve()


def zoo_names() -> list[str]:
    """The names of the embedded models."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def zoo_pairs() -> list[tuple[str, str]]:
    """The (source, target) of every embedded translator; its folder is named source--target."""
    folders = sorted(path.parent.name for path in TRANSLATORS.glob("*/translator_config.json"))
    pairs = [folder.split("--") for folder in folders]
    return [(source, target) for source, target in pairs]
