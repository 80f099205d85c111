"""Import a translator that was made elsewhere into the local store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx.errors import (
    MissingModelError,
    MissingTranslatorError,
    UnsupportedModelError,
)
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import DType
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.hub import resolve
from kvlingo_mlx.loading.models import at_hand
from kvlingo_mlx.loading.pairing import check_end, check_pair
from kvlingo_mlx.loading.translators import by_name, store
from kvlingo_mlx.models.language_model import LanguageModel


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        folder: The translator's folder in the store.
        config: The translator's config.
        unchecked: The models against which it could not be checked, and why.
        replaced: Whether another translator of the same models and form was replaced.
        unchanged: Whether exactly this translator was there already, so that nothing was written.
    """

    folder: Path
    config: TranslatorConfig
    unchecked: Mapping[str, str]
    replaced: bool
    unchanged: bool


def import_translator(
    path_or_hf_repo: str,
    *,
    revision: str | None = None,
    out: str | os.PathLike[str] | None = None,
    dtype: DType = "bfloat16",
    models: tuple[LanguageModel, LanguageModel] | None = None,
    allow_mismatch: bool = False,
    force: bool = False,
) -> Imported:
    """Validate a translator and write it, cast to ``dtype``, into the local store.

    Nothing is written before every check has passed. Only the files of the format are fetched from
    the Hub, and the commit is kept in the provenance.

    Args:
        path_or_hf_repo: A folder or a Hub id.
        revision: A branch, tag or commit of a Hub id.
        out: The folder to write, instead of one in the store.
        dtype: The dtype in which the weights are stored.
        models: The source and target against which it is checked. Default: the models it names,
            if they are on this machine.
        allow_mismatch: Whether to accept other checkpoints of the same shape.
        force: Whether to replace another translator in the folder.

    Raises:
        MissingTranslatorError: There is no such folder or repository.
        MalformedTranslatorError: The folder breaks the format.
        IncompatibleTranslatorError: It does not fit the models it names, or those given.
        ValueError: ``out`` exists and is not a translator folder, or it holds another translator
            and ``force`` is off; or ``allow_mismatch`` has no effect, as no model is at hand.
        OSError: The disk is full, or another process writes the folder.
    """
    path, commit = resolve(
        by_name(path_or_hf_repo), revision, translator_folder.OUR_FILES, MissingTranslatorError
    )
    config, weights = translator_folder.read(path)
    translator_folder.check_sizes(path, config, weights)
    unchecked = {}
    if models is not None:
        check_pair(config, *models, allow_mismatch=allow_mismatch)
    else:
        unchecked = _check_those_at_hand(config, allow_mismatch)
        if allow_mismatch and {config.source.name, config.target.name} <= set(unchecked):
            raise ValueError(
                "--allow-mismatch (allow_mismatch=) has no effect where neither of the models is "
                f"at hand, {config.source.name} and {config.target.name}: give --source and "
                "--target (models=), or leave it out"
            )
    if commit is not None:
        origin = {"imported_from": f"{path_or_hf_repo}@{commit}"}
        config = dataclasses.replace(config, provenance={**config.provenance, **origin})
    folder = Path(out) if out is not None else place_of(config)
    weights = weights.cast(dtype)
    translator_folder.check_destination(folder)
    replaced = folder.exists() and any(folder.iterdir())
    unchanged = replaced and translator_folder.is_same(folder, config, weights)
    if replaced and not unchanged and not force:
        raise ValueError(
            f"{folder} holds another translator of these models and this form; replace it with "
            "--force (force=True), or give another folder with --out (out=)"
        )
    if not unchanged:
        translator_folder.write(folder, config, weights, overwrite=force)
    return Imported(folder, config, unchecked, replaced and not unchanged, unchanged)


def _check_those_at_hand(config: TranslatorConfig, allow_mismatch: bool) -> dict[str, str]:
    unchecked = {}
    for role, spec in (("source", config.source), ("target", config.target)):
        try:
            model = at_hand(spec.name, spec.revision)
        except (MissingModelError, UnsupportedModelError) as problem:
            unchecked[spec.name] = str(problem)
        else:
            check_end(config, role, model, allow_mismatch=allow_mismatch)
    return unchecked


def place_of(config: TranslatorConfig) -> Path:
    """The folder in the store of a translator of these models and this form."""
    return store() / _store_name(config)


def _store_name(config: TranslatorConfig) -> str:
    """A folder name that no translator of other models or another form has."""
    ends = (Path(config.source.name).name, Path(config.target.name).name)
    facts = config.to_json() | {"provenance": {}}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{ends[0]}--{ends[1]}--{config.capture}-nu{config.nu}-{digest}"
    return re.sub(r"[^\w.-]", "_", name).lstrip(".")
