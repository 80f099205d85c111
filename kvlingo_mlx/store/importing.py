"""Import a translator that was made elsewhere into the local store, in our format or another."""

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
    IncompatibleTranslatorError,
    MissingModelError,
    MissingTranslatorError,
    UnsupportedModelError,
    malformed,
)
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.geometry import RopeSpec
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig, capture_point
from kvlingo_mlx.loading.hub import resolve
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_end, check_pair
from kvlingo_mlx.loading.translators import by_name, store
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store import veloxquant
from kvlingo_mlx.store.described import read_description
from kvlingo_mlx.store.foreign import READERS, Foreign, converted

Model = LanguageModel | str
OURS, VELOXQUANT = "kvlingo", "veloxquant"
ROLES = "source", "target"
FORMATS = (OURS, VELOXQUANT, *(suffix[1:] for suffix in READERS))


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        folder: The translator's folder in the store.
        config: The translator's config.
        unchecked: The models against which it could not be checked, and why.
        replaced: Whether another translator of the same models and form was replaced.
        unchanged: Whether exactly this translator was there already, so that nothing was written.
        dtype: The dtype of its weights.
    """

    folder: Path
    config: TranslatorConfig
    unchecked: Mapping[str, str]
    replaced: bool
    unchanged: bool
    dtype: DType


def import_translator(
    path_or_hf_repo: str,
    *,
    revision: str | None = None,
    out: str | os.PathLike[str] | None = None,
    dtype: DType | None = None,
    models: tuple[Model, Model] | None = None,
    allow_mismatch: bool = False,
    force: bool = False,
    format: str | None = None,
    spec: str | os.PathLike[str] | None = None,
) -> Imported:
    """Validate a translator and write it into the local store, one tensor in memory at a time.

    Nothing is written before every check has passed. Only the files of the format are fetched from
    the Hub, and the commit is kept in the provenance.

    Args:
        path_or_hf_repo: A folder, a Hub id, or, with ``spec``, a file of tensors.
        revision: A branch, tag or commit of a Hub id.
        out: The folder to write, instead of one in the store.
        dtype: The dtype in which the weights are stored. Default: bfloat16 for a translator of
            ours, and for others the dtype they have, so that no number changes.
        models: The source and target against which it is checked, loaded or by name. Default: the
            models it names, if they are on this machine. Translators of others seldom name theirs.
        allow_mismatch: Whether to accept other checkpoints of the same shape.
        force: Whether to replace another translator in the folder.
        format: The format of the files, one of ``FORMATS``. Default: what the files say they are.
        spec: A TOML page that describes the files, for maps of any layout.

    Raises:
        MissingTranslatorError: There is no such folder or repository.
        MalformedTranslatorError: The folder breaks its format.
        IncompatibleTranslatorError: It does not fit the models it names, or those given.
        ValueError: ``out`` exists and is not a translator folder, or it holds another translator
            and ``force`` is off; ``allow_mismatch`` has no effect, as no model is at hand; the
            format is unknown, or models must be named.
        OSError: The disk is full, or another process writes the folder.
    """
    path, commit, name = _found(path_or_hf_repo, revision, format, spec)
    foreign = None
    if spec is not None:
        foreign = read_description(Path(spec), path, f".{format}" if format else None)
    elif name == VELOXQUANT:
        foreign = veloxquant.read_mapper(path)
    if foreign is not None:
        config, weights, unchecked = _converted(foreign, models, allow_mismatch)
    else:
        config, weights = translator_folder.read(path, lazy=True)
        unchecked = _unchecked(config, models, allow_mismatch)
        dtype = dtype or "bfloat16"
    translator_folder.check_sizes(path, config, weights)
    if commit is not None:
        origin = {"imported_from": f"{path_or_hf_repo}@{commit}"}
        config = dataclasses.replace(config, provenance={**config.provenance, **origin})
    folder = Path(out) if out is not None else place_of(config)
    weights = weights if dtype is None else weights.cast(dtype)
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
    return Imported(folder, config, unchecked, replaced and not unchanged, unchanged, weights.dtype)


def _found(
    name: str, revision: str | None, format: str | None, spec: str | os.PathLike[str] | None
) -> tuple[Path, str | None, str]:
    """The folder or file of a translator, its commit, and the name of its format."""
    if format is not None and format not in FORMATS:
        raise ValueError(
            f"--from (format=) is {format!r}; it must be one of {', '.join(FORMATS)}. Maps of any "
            "other layout are described by a page, --spec FILE.toml (spec=)"
        )
    of_any = format is not None and f".{format}" in READERS
    if of_any and spec is None:
        raise ValueError(
            f"--from {format} needs --spec FILE.toml (spec=), a page that says which tensor is "
            "which map; the guide on translators of others shows one"
        )
    if spec is not None and format is not None and not of_any:
        raise ValueError(f"--spec (spec=) is for files of any layout, and --from is {format}")
    patterns: tuple[str, ...] = (*translator_folder.OUR_FILES, *veloxquant.FILES)
    if spec is not None:
        patterns = tuple(f"*{suffix}" for suffix in READERS)
    path, commit = resolve(by_name(name), revision, patterns, MissingTranslatorError)
    if spec is None and path.suffix.lower() in READERS and path.is_file():
        raise ValueError(
            f"{path} is a file of arrays; say with --spec PAGE.toml which of them is which map"
        )
    kinds = _recognised(path) if spec is None and format is None and path.is_dir() else [OURS]
    if len(kinds) != 1:
        told = "both a translator of ours and a mapper" if kinds else "neither of them"
        raise malformed(
            path,
            f"holds {told} ({translator_folder.CONFIG_FILE}; {veloxquant.MANIFEST}); say what "
            f"it is with --from {' or '.join(FORMATS[:2])}, or describe its files with --spec FILE",
        )
    return path, commit, format or kinds[0]


def _recognised(folder: Path) -> list[str]:
    """The formats that a folder has files of."""
    ours = any((folder / name).exists() for name in translator_folder.OUR_FILES[:3])
    there = [(folder / name).is_file() for name in (veloxquant.MAPPER, veloxquant.MANIFEST)]
    return [OURS] * ours + [VELOXQUANT] * (there[0] or (there[1] and not ours))


def _converted(
    foreign: Foreign, models: tuple[Model, Model] | None, allow_mismatch: bool
) -> tuple[TranslatorConfig, Weights, dict[str, str]]:
    """Maps of others as a translator of ours, and the models that could not be looked at.

    A model that is on this machine says itself what it is. Of another one, what the files say is
    taken.
    """
    if allow_mismatch:
        raise ValueError(
            "--allow-mismatch (allow_mismatch=) has no effect on translators of others, which name "
            "no checkpoint; leave it out"
        )
    ends = [_end(foreign, place, models) for place in range(2)]
    specs, loaded, _ = zip(*ends, strict=True)
    for place, model in enumerate(loaded):
        if model is not None:
            _check_rotation(foreign, place, model)
    source, target = loaded
    if source is not None and target is not None:
        capture_point(source, target, foreign.capture)
    config, weights = converted(foreign, *specs)
    if source is not None and target is not None:
        check_pair(config, source, target)
    return config, weights, {spec.name: why for spec, _, why in ends if why}


def _end(
    foreign: Foreign, place: int, models: tuple[Model, Model] | None
) -> tuple[ModelSpec, LanguageModel | None, str]:
    """The source or the target: its layers, the model if it is here, and else why not."""
    told = foreign.ends[place]
    model = models[place] if models is not None else (told.name if told else "")
    if not model:
        raise ValueError(
            f"{foreign.path} does not name its {ROLES[place]}; give --source and --target (models=)"
        )
    if isinstance(model, str):
        try:
            model = at_hand(model)
        except (MissingModelError, UnsupportedModelError) as problem:
            if told is None:
                raise
            spec = dataclasses.replace(told, name=str(model))
            return spec, None, f"{problem}; its layers are taken as {foreign.path} says"
    if told is not None:
        _check_told(foreign, told, model, ROLES[place])
    return ModelSpec.of(model), model, ""


def _check_told(foreign: Foreign, told: ModelSpec, model: LanguageModel, role: str) -> None:
    """Refuse a model whose cache has another shape than the files say."""
    layers = model.geometry.layers
    for what, found, wanted in (
        ("model type", model.geometry.model_type, told.model_type),
        ("cache layers", len(layers), len(told.layers)),
        *(
            ("KV heads and their width", *((g.kv_heads, g.key_dim, g.value_dim) for g in both))
            for both in zip(layers, told.layers, strict=False)
        ),
    ):
        if found != wanted and wanted != "unknown":
            raise IncompatibleTranslatorError(
                f"the {role} {model.name} has {what} {found}, and {foreign.path} says {wanted}; "
                "give the model that it was made for"
            )


def _check_rotation(foreign: Foreign, place: int, model: LanguageModel) -> None:
    """Refuse keys that were rotated back otherwise than the model rotates them."""
    if foreign.rotations is None:
        return
    for layer, rope in enumerate(model.geometry.rope):
        if rope != foreign.rotations[place]:
            raise IncompatibleTranslatorError(
                f"keys of the {ROLES[place]} were rotated back by "
                f"{_rotation(foreign.rotations[place])}, "
                f"as {foreign.path} says, and layer {layer} of {model.name} rotates by "
                f"{_rotation(rope)}; the maps were made for other keys than this model's"
            )


def _rotation(rope: RopeSpec | None) -> str:
    if rope is None:
        return "nothing"
    way = "neighbouring numbers" if rope.traditional else "halves"
    return f"base {rope.base:g} over {rope.dims} numbers ({rope.type}, {way})"


def _unchecked(
    config: TranslatorConfig, models: tuple[Model, Model] | None, allow_mismatch: bool
) -> dict[str, str]:
    """Check the config against its models; those that are not here, and why."""
    if models is not None:
        source, target = (load(m, lazy=True) if isinstance(m, str) else m for m in models)
        check_pair(config, source, target, allow_mismatch=allow_mismatch)
        return {}
    unchecked = {}
    for role, spec in zip(ROLES, (config.source, config.target), strict=True):
        try:
            model = at_hand(spec.name, spec.revision)
        except (MissingModelError, UnsupportedModelError) as problem:
            unchecked[spec.name] = str(problem)
        else:
            check_end(config, role, model, allow_mismatch=allow_mismatch)
    if allow_mismatch and {config.source.name, config.target.name} <= set(unchecked):
        raise ValueError(
            "--allow-mismatch (allow_mismatch=) has no effect where neither of the models is "
            f"at hand, {config.source.name} and {config.target.name}: give --source and "
            "--target (models=), or leave it out"
        )
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
