"""List the translators in the local store, and remove one from it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.errors import MalformedTranslatorError, MissingTranslatorError, printable
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.format.files import regular_file
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import UNGRADED, receipt_of, tuned_of
from kvlingo_mlx.loading.translators import store


@dataclass(frozen=True)
class Stored:
    """A folder of the store, or a translator that comes with the package."""

    path: Path
    embedded: bool  # whether it comes with the package
    nbytes: int  # of its files
    source: str = ""  # the models' names; empty if it cannot be read
    target: str = ""
    kind: str = ""  # what its maps compute and their capture point, in words
    grade: str = UNGRADED  # by its receipt
    recovered: float | None = None  # the share of the hidden prefix's KL that it removes
    recall: str | None = None  # the facts that it keeps, in words
    native_layers: int = 0  # that the target reads itself with it, by default
    tuned: str | None = None  # those that `tune` chose and what it measured with them, in words
    date: str | None = None  # at which it was made
    problem: str | None = None  # why it cannot be used


def stored(suits: Callable[[TranslatorConfig], bool] = lambda config: True) -> Iterator[Stored]:
    """Yield all translators of the user's store by name, then those that come with the package.

    They are described by their configs; the weights are not read. Those that cannot be read are
    yielded too, the others if their config ``suits``.
    """
    for root in (store(), TRANSLATORS):
        folders = sorted(p for p in root.glob("[!.]*") if p.is_dir()) if root.is_dir() else []
        described = (_described(folder, root == TRANSLATORS, suits) for folder in folders)
        yield from (one for one in described if one is not None)


def _described(
    folder: Path, embedded: bool, suits: Callable[[TranslatorConfig], bool]
) -> Stored | None:
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    try:
        config = translator_folder.read_config(folder)
        regular_file(folder / translator_folder.WEIGHTS_FILE)
    except (MalformedTranslatorError, OSError) as problem:
        return Stored(folder, embedded, size, problem=str(problem))
    if not suits(config):
        return None
    receipt, date = receipt_of(config), config.provenance.get("date")
    names = config.source.name, config.target.name
    return Stored(
        *(folder, embedded, size, *names, f"{config.form}, {config.capture}, nu {config.nu_told}"),
        grade=receipt.grade if receipt else UNGRADED,
        recovered=receipt.recovered if receipt else None,
        recall=receipt.recall.kept if receipt and receipt.recall else None,
        native_layers=config.native_layers,
        tuned=tuned_of(config),
        date=date if isinstance(date, str) else None,
    )


def find(name: str) -> Path:
    """The folder of the user's store that a name or a path stands for.

    Raises:
        MissingTranslatorError: It is not in the store, or it comes with the package.
        ValueError: It contains a file that does not belong to a translator.
    """
    root = store()
    given = Path(name).expanduser()
    folder = Path(os.path.abspath(root / name if given.name == name else given))
    ours = (TRANSLATORS / name).is_dir() and not folder.is_dir()
    if ours or TRANSLATORS.resolve() in folder.resolve().parents:
        raise MissingTranslatorError(
            f"{printable(name)} comes with the package and stays; put another translator of its "
            "models beside it, the one of the better receipt is used"
        )
    if folder.parent != root.absolute() or not folder.is_dir():
        raise MissingTranslatorError(
            f"{printable(name)} is not in the local store {root}; `kvlingo-mlx list` shows what is"
        )
    others = [] if folder.is_symlink() else sorted(os.listdir(folder))
    others = [n for n in others if n not in translator_folder.OUR_FILES]
    if others:
        raise ValueError(
            f"{folder} holds {printable(others[0])}, which is no file of a translator; move that "
            "elsewhere, or remove the folder by hand"
        )
    return folder


def remove(folder: Path) -> None:
    """Remove a folder that :func:`find` returned; no other process sees it half removed.

    Raises:
        OSError: Another process writes it, or the disk refuses.
    """
    if folder.is_symlink():  # the user made the link, so only the link is removed
        folder.unlink()
        return
    with atomic.alone(folder):
        aside = atomic.temporary_beside(folder)
        os.rename(folder, aside / "gone")
        shutil.rmtree(aside)
