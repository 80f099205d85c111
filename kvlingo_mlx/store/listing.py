"""What the local store holds, and taking something out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.errors import MalformedTranslatorError, MissingTranslatorError, printable
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.loading.grading import UNGRADED, receipt_of
from kvlingo_mlx.loading.translators import store


@dataclass(frozen=True)
class Stored:
    """A folder of the store, or a translator that comes with the package.

    Attributes:
        path: The folder.
        embedded: Whether it comes with the package.
        nbytes: What its files take.
        source, target: Its models' names; empty where it cannot be read.
        kind: What its maps compute and where they read, in words.
        grade: By its receipt; ``ungraded`` where it has none that tells.
        recovered: The share of the hidden prefix's KL that it removes, by its receipt.
        date: Of its making, as it says itself; None where it does not.
        problem: Why it cannot be used; None where it can.
    """

    path: Path
    embedded: bool
    nbytes: int
    source: str = ""
    target: str = ""
    kind: str = ""
    grade: str = UNGRADED
    recovered: float | None = None
    date: str | None = None
    problem: str | None = None


def stored() -> Iterator[Stored]:
    """All of the user's store by name, then what comes with the package.

    Its config says what a translator is; its weights are not read.
    """
    for root in (store(), TRANSLATORS):
        folders = sorted(p for p in root.glob("[!.]*") if p.is_dir()) if root.is_dir() else []
        yield from (_described(folder, root == TRANSLATORS) for folder in folders)


def _described(folder: Path, embedded: bool) -> Stored:
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    try:
        config = translator_folder.read_config(folder)
        translator_folder.check_complete(folder)
    except (MalformedTranslatorError, OSError) as problem:
        return Stored(folder, embedded, size, problem=str(problem))
    receipt, date = receipt_of(config), config.provenance.get("date")
    return Stored(
        folder,
        embedded,
        size,
        config.source.name,
        config.target.name,
        f"{config.form}, {config.capture}, nu {config.nu}",
        UNGRADED if receipt is None else receipt.grade,
        None if receipt is None else receipt.recovered,
        date if isinstance(date, str) else None,
    )


def find(name: str) -> Path:
    """The folder of the user's store that a name or a path stands for.

    Raises:
        MissingTranslatorError: It is not in the store, or it comes with the package.
        ValueError: It holds something that is no file of a translator.
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
    """Take a folder that :func:`find` gave out of the store; nobody sees a part of it.

    Raises:
        OSError: Another process writes it, or the disk refuses.
    """
    if folder.is_symlink():  # the user's own; what it leads to is not ours
        folder.unlink()
        return
    with atomic.alone(folder):
        aside = atomic.temporary_beside(folder)
        os.rename(folder, aside / "gone")
        shutil.rmtree(aside)
