"""Write a translator's maps as other programs read them."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format import atomic, translator_folder
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.loading.models import at_hand, load
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.loading.translators import folder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.store import veloxquant

MAPS, PAGE = "maps.npz", "spec.toml"
FILES = {"veloxquant": veloxquant.FILES, "npz": (MAPS, PAGE)}
MIXING, HEADWISE = "(heads dim) (sources source_heads source_dim)", "heads dim (sources source_dim)"


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
        to: ``veloxquant``, a mapper's folder; or ``npz``, arrays with a page that describes them,
            by which ``import --spec`` reads them again.
        out: The folder to write.
        models: The source and target, by which ``veloxquant`` tells how keys are rotated. Default:
            those that the translator names, if they are on this machine.
        force: Whether to replace another export in the folder.

    Raises:
        IncompatibleTranslatorError: The other format cannot say what the translator computes; the
            message says why. Or it is not for ``models``.
        ValueError: ``to`` is unknown, or ``out`` exists and is no such export, or is one and
            ``force`` is off; or ``models`` are given for ``npz``.
        MissingModelError: ``veloxquant`` needs a model that is not on this machine.
    """
    if to not in FILES:
        raise ValueError(f"--to is {to!r}; it must be one of {', '.join(FILES)}")
    if models is not None and to != "veloxquant":
        raise ValueError(f"--source and --target have no effect with --to {to}; leave them out")
    config, weights = translator_folder.read(folder_of(translator), lazy=True)
    why = veloxquant.why_not(config) if to == "veloxquant" else _why_not(config)
    if why is not None:
        raise IncompatibleTranslatorError(f"{config.title} cannot be exported to {to}: {why}")
    folder = atomic.followed(Path(out))
    _check_free(folder, FILES[to], force)
    if to == "veloxquant":
        ends = _ends(config, models)
        _write(folder, weights, lambda place: veloxquant.write_mapper(place, config, weights, ends))
    else:
        _write(folder, weights, lambda place: _write_npz(place, config, weights))
    return config


def _ends(
    config: TranslatorConfig, models: tuple[str, str] | None
) -> tuple[LanguageModel, LanguageModel]:
    if models is not None:
        source, target = (load(name, lazy=True) for name in models)
    else:
        source, target = (at_hand(end.name, end.revision) for end in (config.source, config.target))
    check_pair(config, source, target)
    return source, target


def _check_free(folder: Path, files: tuple[str, ...], force: bool) -> None:
    if not folder.exists():
        return
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else None
    if names is None or not names <= set(files):
        what = "is a file" if names is None else f"holds {min(names - set(files))}"
        raise ValueError(f"{folder} {what}, which is no part of such an export; give a new --out")
    if names and not force:
        raise ValueError(
            f"{folder} holds an export; replace it with --force, or give another --out"
        )


def _write(folder: Path, weights: Weights, fill: Callable[[Path], None]) -> None:
    atomic.check_room(folder, 2 * weights.nbytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic.alone(folder):
        temporary = atomic.temporary_beside(folder)
        try:
            temporary.chmod(0o755)
            fill(temporary)
            atomic.replace_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


# ---- arrays and a page ----------------------------------------------------------------------


def _why_not(config: TranslatorConfig) -> str | None:
    if config.kind != "linear" or config.joint:
        return f"it is {config.form}, and a page describes linear maps, keys and values apart"
    if config.capture == "latent":
        return "it is between latents, which a page does not describe"
    if config.alignment is not None:
        return "it is between two tokenizers"
    if config.state_maps:
        return "it maps recurrent states, which a page does not describe"
    if any({side for side, _ in m.reads} != set(m.writes) for m in maps_of(config)):
        return (
            "it is between layers of two kinds, whose maps read both sides of a source layer, and "
            "a page describes maps of keys and of values apart"
        )
    if config.head_map is not None:
        return "its target heads read source heads in an order of its own, which a page cannot tell"
    return None


def _write_npz(folder: Path, config: TranslatorConfig, weights: Weights) -> None:
    """NumPy has no bfloat16, so such weights are written as float32, which changes no number."""
    with zipfile.ZipFile(folder / MAPS, "w", zipfile.ZIP_STORED) as archive:
        for name in weights.shapes:
            array = weights.arrays[name]
            if weights.dtype == "bfloat16":
                array = weights.as_float32(name)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    (folder / PAGE).write_text(_page(config, "keys.0.bias" in weights.shapes), encoding="utf-8")


def _page(config: TranslatorConfig, biased: bool) -> str:
    lines = [
        f"# {config.source.name} to {config.target.name}: which array is which map".replace(
            "\n", " "
        ),
        f'files = ["{MAPS}"]',
        f'capture = "{config.capture}"',
        f"head_mixing = {str(config.head_mixing).lower()}",
    ]
    for side in SIDES:
        lines += [
            "",
            f"[{side}]",
            f'weight = "{side}.{{layer}}.weight"',
            f'axes = "{MIXING if config.head_mixing else HEADWISE}"',
            *([f'bias = "{side}.{{layer}}.bias"', 'bias_axes = "(heads dim)"'] if biased else []),
            f"sources = {[list(read) for read in config.assignment.side(side)]}",
        ]
    for role, end in (("source", config.source), ("target", config.target)):
        lines += _model_lines(role, end)
    return "\n".join(lines) + "\n"


def _model_lines(role: str, end: ModelSpec) -> list[str]:
    """A table of a model, where one number says the heads and their width in all layers."""
    first = end.layers[0]
    shape = (first.kv_heads, first.key_dim, first.key_dim, "full")
    if any((g.kv_heads, g.key_dim, g.value_dim, g.attention) != shape for g in end.layers):
        return []
    name = "".join(c for c in end.name if c.isprintable() and c not in '"\\')
    return [
        "",
        f"[{role}]",
        f'name = "{name}"',
        f'model_type = "{end.model_type}"',
        f"layers = {len(end.layers)}",
        f"kv_heads = {first.kv_heads}",
        f"head_dim = {first.key_dim}",
    ]
