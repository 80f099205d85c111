"""Models and translators from disk or the Hub, and the local translator store."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx_lm.utils import load_config, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from kvlingo_mlx import checkpoint
from kvlingo_mlx.checkpoint import CONFIG_FILE, OUR_FILES
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.errors import (
    KVLingoError,
    MalformedTranslatorError,
    MissingModelError,
    MissingTranslatorError,
)
from kvlingo_mlx.families import family_of
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.pairing import check_pair, matches
from kvlingo_mlx.tensor_file import DType
from kvlingo_mlx.translator_config import TranslatorConfig
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

MODEL_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


# ---- models ---------------------------------------------------------------------------


def load(
    path_or_hf_repo: str | os.PathLike[str] | LanguageModel, *, revision: str | None = None
) -> LanguageModel:
    """Load a model and its tokenizer; a model that is loaded already is returned as it is.

    Args:
        path_or_hf_repo: A folder, a Hub id, or a ``LanguageModel``.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        MissingModelError: No such folder or repository, or files are missing or damaged.
        UnsupportedModelError: The family is not supported.
    """
    if isinstance(path_or_hf_repo, LanguageModel):
        return path_or_hf_repo
    name = os.fspath(path_or_hf_repo)
    path, commit = _resolve(name, revision, MODEL_FILES, MissingModelError)
    _check_model_folder(path)
    config = load_config(path)
    family_of(config["model_type"])
    model, config = load_model(path, trust_remote_code=False)
    tokenizer = load_tokenizer(
        path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
    )
    embedded = path.parent.parent == TRANSLATORS.parent
    return LanguageModel(model, tokenizer, config, path.name if embedded else name, commit, path)


def _check_model_folder(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text())
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
        return [path / f for f in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise MissingModelError(f"{path} has no model*.safetensors; download the model again")
    return files


def _resolve(
    name: str, revision: str | None, patterns: list[str], error: type[KVLingoError]
) -> tuple[Path, str | None]:
    """A local folder as it is, a Hub id as its snapshot; the commit where known."""
    local = Path(name).expanduser()
    if local.exists():
        return local, None
    if not REPO_ID.fullmatch(name):
        raise error(f"{name} does not exist; give a folder or a Hub id such as Qwen/Qwen3-4B")
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        first_line = str(problem).strip().splitlines()[0]
        raise error(
            f"there is no folder {name}, and the Hub did not give it ({first_line}); "
            "check the name, or download it once and pass the folder"
        ) from None
    return Path(snapshot), Path(snapshot).name


# ---- translators -----------------------------------------------------------------------


def load_translator(path_or_hf_repo: str | os.PathLike[str]) -> Translator:
    """Load a translator folder, strictly; from disk or the Hub.

    Raises:
        MissingTranslatorError: No such folder or repository.
        MalformedTranslatorError: The folder breaks the format.
        IncompatibleTranslatorError: A kind that this version cannot apply.
    """
    name = os.fspath(path_or_hf_repo)
    path, _ = _resolve(name, None, list(OUR_FILES), MissingTranslatorError)
    return build(*checkpoint.read(path))


def store() -> Path:
    """The local translator store: ``KVLINGO_HOME``, else a folder in the user's cache."""
    home = os.environ.get("KVLINGO_HOME")
    root = Path(home) if home else Path.home() / ".cache" / "kvlingo-mlx"
    return root / "translators"


def stored_translators() -> Iterator[Path]:
    """Translator folders at hand: the user's store first, then those of the package."""
    for root in (store(), TRANSLATORS):
        yield from sorted(p.parent for p in root.glob(f"*/{CONFIG_FILE}"))


def find_translator(source: LanguageModel, target: LanguageModel) -> Path:
    """The stored translator of a pair.

    Raises:
        MissingTranslatorError: There is none; says how to make one.
    """
    for path in stored_translators():
        try:
            config = checkpoint.read_config(path)
        except MalformedTranslatorError:
            continue  # a damaged folder for some pair must not block all others
        if matches(config.source, source) and matches(config.target, target):
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
) -> Translator:
    """The translator to use: a loaded one, one by path or id, or the stored one of the pair.

    Raises:
        IncompatibleTranslatorError: It is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    if translator is None:
        translator = find_translator(source, target)
    if not isinstance(translator, Translator):
        translator = load_translator(translator)
    check_pair(translator.config, source, target, allow_mismatch=allow_mismatch)
    return translator


def import_translator(
    path_or_hf_repo: str,
    *,
    out: str | os.PathLike[str] | None = None,
    dtype: DType = "bfloat16",
    models: tuple[LanguageModel, LanguageModel] | None = None,
) -> Path:
    """Validate a translator and put it, cast to ``dtype``, into the local store.

    Args:
        path_or_hf_repo: Folder or Hub id.
        out: Folder to write instead of the store's own.
        dtype: What the weights are stored in.
        models: Source and target, to check that it is theirs.

    Returns:
        The folder written. Nothing is written before every check has passed.
    """
    path, _ = _resolve(path_or_hf_repo, None, list(OUR_FILES), MissingTranslatorError)
    config, weights = checkpoint.read(path)
    if models is not None:
        check_pair(config, *models)
    folder = Path(out) if out is not None else store() / _store_name(config)
    return checkpoint.write(folder, config, weights.cast(dtype))


def _store_name(config: TranslatorConfig) -> str:
    ends = (Path(config.source.name).name, Path(config.target.name).name)
    variant = "mix" if config.head_mixing else "headwise"
    name = f"{ends[0]}--{ends[1]}--{config.capture}-{variant}-nu{config.nu}"
    return re.sub(r"[^\w.-]", "_", name).lstrip(".")
