"""Import a translator that was made elsewhere into the local store, in our format or another."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import (
    IncompatibleTranslatorError,
    MissingModelError,
    MissingTranslatorError,
    UnsupportedModelError,
    malformed,
)
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.geometry import LayerGeometry, RopeSpec
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import TIERS, ModelSpec, TranslatorConfig, capture_point
from kvlingo_mlx.loading.hub import resolve
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_end, check_pair
from kvlingo_mlx.loading.translators import by_name, store
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store.formats import FORMATS, ROLES, ForeignMaps, converted, read_folder

Model = LanguageModel | str
UNKNOWN = dict.fromkeys(TIERS)
OURS = "kvlingo"
NAMES = (OURS, *FORMATS)


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    folder: Path  # in the store
    config: TranslatorConfig
    unchecked: Mapping[str, str]  # the models against which it could not be checked, and why
    replaced: bool  # whether another translator of the same models and form was replaced
    unchanged: bool  # whether exactly this one was there, so that nothing was written
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
) -> Imported:
    """Validate a translator and write it into the local store, one tensor in memory at a time.

    Nothing is written before every check has passed. Only the files of the format are fetched from
    the Hub, and the commit is kept in the provenance.

    Args:
        path_or_hf_repo: A folder or a Hub id.
        revision: A branch, tag or commit of a Hub id.
        out: The folder to write, instead of one in the store.
        dtype: The dtype in which the weights are stored. Default: bfloat16 for a translator of
            ours, and for others the dtype they have, so that no number changes.
        models: The source and target against which it is checked, loaded or by name. Default: the
            models it names, if they are on this machine. Translators of others seldom name theirs.
        allow_mismatch: Whether to accept other checkpoints of the same shape.
        force: Whether to replace another translator in the folder.
        format: The format of the files, one of ``NAMES``. Default: what the files say they are.

    Raises:
        MissingTranslatorError: There is no such folder or repository.
        MalformedTranslatorError: The folder breaks its format.
        IncompatibleTranslatorError: It does not fit the models it names, or those given.
        ValueError: ``out`` exists and is not a translator folder, or it holds another translator
            and ``force`` is off; ``allow_mismatch`` has no effect, as no model is at hand; the
            format is unknown, or models must be named.
        OSError: The disk is full, or another process writes the folder.
    """
    if format is not None and format not in NAMES:
        raise ValueError(f"--from (format=) is {format!r}; it must be one of {', '.join(NAMES)}")
    theirs = (name for kind in FORMATS.values() for name in kind.FILES)
    patterns = [*translator_folder.OUR_FILES, *theirs]
    name = by_name(path_or_hf_repo)
    path, commit = resolve(name, revision, patterns, MissingTranslatorError)
    format = format or _recognised(path)
    if format == OURS:
        config, weights = translator_folder.read(path, lazy=True)
        unchecked = _checked(config, models, allow_mismatch)
        dtype = dtype or "bfloat16"
    else:
        maps = read_folder(format, path)
        config, weights, unchecked = _converted(maps, models, allow_mismatch)
    translator_folder.check_sizes(path, config, weights)
    if commit is not None:
        origin = {"imported_from": f"{path_or_hf_repo}@{commit}"}
        config = replace(config, provenance={**config.provenance, **origin})
    folder = Path(out) if out is not None else place_of(config)
    weights = weights if dtype is None else weights.cast(dtype)
    translator_folder.check_destination(folder)
    there = folder.exists() and any(folder.iterdir())
    unchanged = there and translator_folder.is_same(folder, config, weights)
    if there and not unchanged and not force:
        raise ValueError(
            f"{folder} holds another translator of these models and this form; replace it with "
            "--force (force=True), or give another folder with --out (out=)"
        )
    if not unchanged:
        translator_folder.write(folder, config, weights, overwrite=force)
    return Imported(folder, config, unchecked, there and not unchanged, unchanged, weights.dtype)


def _recognised(folder: Path) -> str:
    """The format of which a folder has files."""
    ours = any((folder / name).exists() for name in translator_folder.OUR_FILES[:3])
    found = [OURS] if ours or not folder.is_dir() else []
    theirs = {n: [(folder / file).is_file() for file in kind.FILES] for n, kind in FORMATS.items()}
    whole = [name for name, there in theirs.items() if there[1]]  # manifests are alike by name
    found += whole or [name for name, there in theirs.items() if there[0] and not ours]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{name}: {' and '.join(kind.FILES)}" for name, kind in FORMATS.items())
    which = f"files of {' and of '.join(found)}; say which with --from" if found else "none of them"
    expected = f"expected {translator_folder.CONFIG_FILE}, or files of others ({known})"
    raise malformed(folder, f"{expected}; found {which}")


def _converted(
    maps: ForeignMaps, models: tuple[Model, Model] | None, allow_mismatch: bool
) -> tuple[TranslatorConfig, Weights, dict[str, str]]:
    """Maps of others as a translator of ours, and the models that could not be looked at.

    A model that is on this machine says itself what it is. Of another one, the manifest's word is
    taken.
    """
    if allow_mismatch:
        raise ValueError(
            "--allow-mismatch (allow_mismatch=) has no effect on translators of others, which have "
            "no fingerprint of a checkpoint; leave it out"
        )
    ends = [maps.manifest.end(role) for role in ROLES]
    if models is None and ends[0].name is None:
        raise ValueError(
            f"{maps.path} does not name its source; give --source and --target (models=)"
        )
    specs, loaded, unchecked = [], [], {}
    given: list[Any] = [end.name for end in ends] if models is None else [*models]
    for role, end, model in zip(ROLES, ends, given, strict=True):
        commit = end.commit if models is None else None
        try:
            found = at_hand(model, commit) if isinstance(model, str) else model
        except (MissingModelError, UnsupportedModelError) as problem:
            if end.layers is None or end.model_type is None:
                told = f"{problem}, and {maps.path} does not describe it; `hf download` it first"
                raise type(problem)(told) from None
            shape = end.kv_heads, end.dim, end.dim
            layers = tuple(LayerGeometry(i, *shape) for i in range(end.layers))
            specs.append(ModelSpec(str(model), None, end.model_type, UNKNOWN, layers))
            unchecked[str(model)] = f"{problem}; its layers are taken as {maps.path} says"
        else:
            if commit not in (None, found.revision):
                raise IncompatibleTranslatorError(
                    f"{maps.path} is for commit {commit} of {model}, and this machine has "
                    f"{found.revision}; `hf download` that one, or give --source and --target"
                )
            _check_model(maps, role, found)
            specs.append(ModelSpec.of(found))
            loaded.append(found)
    if unchecked:
        return *converted(maps, specs[0], specs[1]), unchecked
    capture_point(loaded[0], loaded[1], maps.manifest.capture)
    config, weights = converted(maps, specs[0], specs[1])
    check_pair(config, loaded[0], loaded[1])
    return config, weights, unchecked


def _check_model(maps: ForeignMaps, role: str, model: LanguageModel) -> None:
    """Refuse a model whose cache has another shape, or whose keys are rotated otherwise."""
    end, geometry = maps.manifest.end(role), model.geometry
    cached = ((g.kv_heads, g.key_dim, g.value_dim) for g in geometry.layers)
    for what, found, expected in (
        ("model type", geometry.model_type, end.model_type),
        ("cache layers", len(geometry.layers), end.layers),
        *(("KV heads and their width", c, (end.kv_heads, end.dim, end.dim)) for c in cached),
    ):
        if expected not in (None, found):
            raise IncompatibleTranslatorError(
                f"the {role} {model.name} has {what} {found}, and {maps.path} says {expected}; "
                "give the model that it was made for"
            )
    for layer, rope in enumerate(geometry.rope):
        if end.rope not in (None, rope):
            raise IncompatibleTranslatorError(
                f"keys of the {role} were rotated back by {_words(end.rope)}, as {maps.path} says, "
                f"and layer {layer} of {model.name} rotates by {_words(rope)}; the maps were made "
                "for other keys than this model's"
            )


def _words(rope: RopeSpec | None) -> str:
    if rope is None:
        return "nothing"
    way = "neighbouring numbers" if rope.traditional else "halves"
    return f"base {rope.base:g} over {rope.dims} numbers ({rope.type}, {way})"


def _checked(
    config: TranslatorConfig, models: tuple[Model, Model] | None, allow_mismatch: bool
) -> dict[str, str]:
    """Check a config against its models; return those that are not here, and why."""
    if models is not None:
        source, target = (load(m, lazy=True) if isinstance(m, str) else m for m in models)
        check_pair(config, source, target, allow_mismatch=allow_mismatch)
        return {}
    unchecked: dict[str, str] = {}
    for role, spec in zip(ROLES, (config.source, config.target), strict=True):
        try:
            model = at_hand(spec.name, spec.revision)
        except (MissingModelError, UnsupportedModelError) as problem:
            unchecked[spec.name] = str(problem)
        else:
            check_end(config, role, model, allow_mismatch=allow_mismatch)
    if allow_mismatch and {config.source.name, config.target.name} <= {*unchecked}:
        raise ValueError(
            "--allow-mismatch (allow_mismatch=) has no effect where neither of the models is "
            f"at hand, {config.source.name} and {config.target.name}: give --source and "
            "--target (models=), or leave it out"
        )
    return unchecked


def place_of(config: TranslatorConfig) -> Path:
    """The folder in the store that no translator of other models or another form has."""
    ends = (Path(config.source.name).name, Path(config.target.name).name)
    facts = config.to_json() | {"provenance": {}}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{ends[0]}--{ends[1]}--{config.capture}-nu{config.nu}-{digest}"
    return store() / re.sub(r"[^\w.-]", "_", name).lstrip(".")
