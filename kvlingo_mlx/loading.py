"""Models and translators, loaded; and the local translator store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.utils import load_config, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from kvlingo_mlx import checkpoint
from kvlingo_mlx.checkpoint import CONFIG_FILE, OUR_FILES, WEIGHTS_FILE
from kvlingo_mlx.embedded import MODELS, TRANSLATORS
from kvlingo_mlx.errors import (
    MalformedTranslatorError,
    MissingModelError,
    MissingTranslatorError,
)
from kvlingo_mlx.families import family_of
from kvlingo_mlx.hub import MODEL_FILES, resolve
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.pairing import check_pair, matches
from kvlingo_mlx.translator_config import TranslatorConfig
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.quantised import check_bits

# ---- models ---------------------------------------------------------------------------


def load(
    path_or_hf_repo: str | os.PathLike[str] | LanguageModel,
    *,
    revision: str | None = None,
    lazy: bool = False,
) -> LanguageModel:
    """Load a model and its tokenizer; a model that is loaded already is returned as it is.

    Args:
        path_or_hf_repo: A folder, a Hub id, the name of an embedded model, or a ``LanguageModel``.
        revision: Branch, tag or commit of a Hub id.
        lazy: Read each weight when it is first needed.

    Raises:
        MissingModelError: No such folder or repository, or files are missing or damaged.
        UnsupportedModelError: The family is not supported.
    """
    if isinstance(path_or_hf_repo, LanguageModel):
        return path_or_hf_repo
    name = os.fspath(path_or_hf_repo)
    path, commit = resolve(name, revision, MODEL_FILES, MissingModelError)
    return _open(path, name, commit, lazy)


def at_hand(name: str, revision: str | None = None) -> LanguageModel:
    """A model that is on this machine already, its weights unread; the Hub is not asked.

    Args:
        name: As for :func:`load`.
        revision: The snapshot to prefer; another one will do where it is not here.

    Raises:
        MissingModelError: It is not here, or damaged.
        UnsupportedModelError: Its family is not supported.
    """
    for wanted in (revision, None):
        try:
            path, commit = resolve(name, wanted, MODEL_FILES, MissingModelError, offline=True)
        except MissingModelError:
            continue
        return _open(path, name, commit, lazy=True)
    raise MissingModelError(f"{name} is not on this machine")


def _open(path: Path, name: str, commit: str | None, lazy: bool) -> LanguageModel:
    _check_model_folder(path)
    config = load_config(path)
    family = family_of(config["model_type"])
    try:
        overrides = family.overrides(config)
        model, config = load_model(path, lazy=lazy, trust_remote_code=False, model_config=overrides)
        tokenizer = load_tokenizer(
            path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
        )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        # What mlx-lm and transformers say about a file that is cut off or lacks a field.
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingModelError(
            f"the model {path} cannot be loaded ({type(error).__name__}: {first_line:.200}); "
            "is its download complete?"
        ) from error
    embedded = path.parent == MODELS
    return LanguageModel(model, tokenizer, config, path.name if embedded else name, commit, path)


def _check_model_folder(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise MissingModelError(
            f"{path} has no config.json; a model folder needs one (incomplete download?)"
        ) from None
    except ValueError as error:
        raise MissingModelError(f"{path / 'config.json'} is not valid JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise MissingModelError(f"{path / 'config.json'} names no model_type")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise MissingModelError(f"{path} has no tokenizer.json; download the model again")
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise MissingModelError(
                f"{file} is missing or incomplete ({error}); download the model again"
            ) from None


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MissingModelError(
                f"{index} has no readable weight_map; download the model again"
            ) from None
        return [path / name for name in names]
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise MissingModelError(f"{path} has no model*.safetensors; download the model again")
    return files


# ---- translators -----------------------------------------------------------------------


def load_translator(
    path_or_hf_repo: str | os.PathLike[str], *, quantize: int | None = None
) -> Translator:
    """Load a translator folder, strictly; from disk or the Hub.

    Args:
        path_or_hf_repo: A folder or a Hub id.
        quantize: Keep its matrices in 8 or 4 bits, as mlx-lm quantises a model: affine, groups
            of 64 along each stored row. Those whose rows are no multiple of 64 long keep their
            floats, as do biases and gates. Such a translator cannot be saved. What it costs
            ``kvlingo-mlx eval --quantize 8,4`` tells: the embedded ones stand 8 bits, not 4.

    Raises:
        ValueError: ``quantize`` is something else, or would change no matrix.
        MissingTranslatorError: No such folder or repository.
        MalformedTranslatorError: The folder breaks the format.
    """
    check_bits(quantize)
    path = _translator_folder(path_or_hf_repo)
    config, weights = checkpoint.read(path)
    checkpoint.check_sizes(path, config, weights)
    return build(config, weights, quantize=quantize)


def _translator_folder(path_or_hf_repo: str | os.PathLike[str]) -> Path:
    name = os.fspath(path_or_hf_repo)
    return resolve(name, None, list(OUR_FILES), MissingTranslatorError)[0]


def home() -> Path:
    """Where we keep what is the user's: ``KVLINGO_HOME``, else a folder in the user's cache."""
    given = os.environ.get("KVLINGO_HOME")
    return Path(given) if given else Path.home() / ".cache" / "kvlingo-mlx"


def store() -> Path:
    """The local translator store."""
    return home() / "translators"


def stored_translators() -> Iterator[Path]:
    """Translator folders at hand: the user's store first, newest first, then the package's.

    A folder whose name starts with a dot is one that was never finished.
    """
    for root in (store(), TRANSLATORS):
        files = [p for p in root.glob(f"[!.]*/{CONFIG_FILE}") if (p.parent / WEIGHTS_FILE).exists()]
        yield from (p.parent for p in sorted(files, key=lambda p: -p.stat().st_mtime_ns))


def find_translator(
    source: LanguageModel, target: LanguageModel, *, allow_mismatch: bool = False
) -> Path:
    """The stored translator of a pair, one that this version can apply.

    Raises:
        MissingTranslatorError: There is none; says how to make one.
    """
    one = source.tokenizer_fingerprint == target.tokenizer_fingerprint
    for tolerance in (False, True) if allow_mismatch else (False,):  # their own first
        for path in stored_translators():
            try:
                config = checkpoint.read_config(path)
            except MalformedTranslatorError:
                continue  # a folder of no use to this pair must not block all others
            ends = ((config.source, source), (config.target, target))
            if (config.alignment is None) == one and all(
                matches(spec, model, allow_mismatch=tolerance) for spec, model in ends
            ):
                return path
    raise MissingTranslatorError(
        f"no translator from {source.name} to {target.name} is in the local store; make one "
        f"with `kvlingo-mlx fit --source {source.name} --target {target.name} --data FILE.jsonl "
        "--out DIR`, or get one with `kvlingo-mlx import PATH_OR_HUB_ID`"
    )


def resolve_translator(
    translator: Translator | str | os.PathLike[str] | None,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
    quantize: int | None = None,
) -> Translator:
    """The translator to use: a loaded one, one by path or id, or the stored one of the pair.

    ``quantize`` is for one that is loaded here, as in :func:`load_translator`.

    Raises:
        IncompatibleTranslatorError: It is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    if translator is None:
        translator = find_translator(source, target, allow_mismatch=allow_mismatch)
    if not isinstance(translator, Translator):
        translator = load_translator(translator, quantize=quantize)
    check_pair(translator.config, source, target, allow_mismatch=allow_mismatch)
    return translator


def translator_facts(
    translator: Translator | str | os.PathLike[str] | None,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
) -> tuple[TranslatorConfig, int | None]:
    """What :func:`resolve_translator` would find, its weights unread: its facts and its bits.

    Raises:
        MissingTranslatorError: None was given and none is stored.
    """
    if isinstance(translator, Translator):
        return translator.config, translator.bits
    if translator is None:
        translator = find_translator(source, target, allow_mismatch=allow_mismatch)
    return checkpoint.read_config(_translator_folder(translator)), None
