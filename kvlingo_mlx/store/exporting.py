"""Write a translator's maps as another program reads them."""

from __future__ import annotations

import os
from pathlib import Path

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.loading.translators import folder_of
from kvlingo_mlx.store.formats import FORMATS, Format, unwritable, write_folder


def export(
    translator: str,
    to: str,
    out: str | os.PathLike[str],
    *,
    models: tuple[str, str] | None = None,
    force: bool = False,
) -> TranslatorConfig:
    """Write a translator for another program; the folder appears whole or not at all.

    Args:
        translator: A folder, a name that `kvlingo-mlx list` shows, or a Hub id.
        to: The format, one of ``FORMATS``.
        out: The folder to write.
        models: The source and target, which say how keys are rotated. Default: those that the
            translator names, if they are on this machine.
        force: Whether to replace another export in the folder.

    Raises:
        IncompatibleTranslatorError: The format cannot say what the translator computes; the message
            says why. Or it is not for ``models``.
        ValueError: ``to`` is unknown, or ``out`` exists and is no such export, or is one and
            ``force`` is off.
        MissingModelError: A model is not on this machine.
    """
    if to not in FORMATS:
        raise ValueError(f"--to is {to!r}; it must be one of {', '.join(FORMATS)}")
    row = FORMATS[to]
    config, weights = translator_folder.read(folder_of(translator), lazy=True)
    why = unwritable(row, config)
    if why is not None:
        raise IncompatibleTranslatorError(f"{config.title} cannot be exported to {to}: {why}")
    folder = atomic.followed(Path(out))
    _check_free(row, folder, force)
    if models is not None:
        source, target = (load(name, lazy=True) for name in models)
    else:
        source, target = (at_hand(end.name, end.revision) for end in (config.source, config.target))
    check_pair(config, source, target)
    with atomic.new_folder(folder, 2 * weights.nbytes) as place:
        assert place is not None
        write_folder(row, place, config, weights, (source, target))
    return config


def _check_free(row: Format, folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else None
    if names is None or not names <= {*row.files}:
        what = "is a file" if names is None else f"holds {min(names - {*row.files})}"
        raise ValueError(f"{folder} {what}, which is no part of such an export; give a new --out")
    if names and not force:
        raise ValueError(
            f"{folder} holds an export; replace it with --force, or give another --out"
        )
