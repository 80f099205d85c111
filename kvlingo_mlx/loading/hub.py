"""Resolve a name to a folder: a local one, an embedded model's, or a snapshot from the Hub."""

import contextlib
import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from kvlingo_mlx.embedded import zoo, zoo_names
from kvlingo_mlx.errors import KVLingoError, MissingModelError, MissingTranslatorError, printable
from kvlingo_mlx.remote.address import address_of

# A model's files other than its weights, and all of its files.
SMALL_FILES = ("*.json", "tokenizer.model", "*.txt", "*.jinja")
MODEL_FILES = (*SMALL_FILES, "model*.safetensors")
UNREACHED = (
    "the Hub cannot be reached, and it is not in the cache; check the network, or run `hf download "
    "{name}` where there is one"
)
# What the name should have been, by the error raised; the last entry is for either kind.
WANTED = {
    MissingModelError: "a model's folder, or a Hub id such as Qwen/Qwen3-4B",
    MissingTranslatorError: "a translator's folder, a name that `list` shows, or a Hub id",
    KVLingoError: "a translator's or a model's folder or Hub id, or a name that `list` shows",
}
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The first match counts: the class for gated repositories is derived from that for missing ones.
REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (
        GatedRepoError,
        "it is gated; accept its licence at https://huggingface.co/{name}, then `hf auth login`",
    ),
    (
        RepositoryNotFoundError,
        "no such repository, or it is private; check the name, or `hf auth login`",
    ),
    (RevisionNotFoundError, "it has no such revision"),
    (
        OfflineModeIsEnabled,
        "offline (HF_HUB_OFFLINE), and it is not in the cache; run "
        "`hf download {name}` when online",
    ),
)


def resolve(
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    error: type[KVLingoError],
    *,
    offline: bool = False,
) -> tuple[Path, str | None]:
    """The folder that a name stands for, and its commit if it came from the Hub.

    Args:
        name: A folder, the name of an embedded model, or a Hub id.
        revision: A branch, tag or commit of a Hub id.
        patterns: Which of a repository's files are fetched.
        error: The error to raise if there is nothing, a key of ``WANTED``.
        offline: Use only a snapshot that is already on this machine; ``revision`` is then ignored
            for folders and embedded models.

    Raises:
        ValueError: A revision is given for a folder or an embedded model.
    """
    try:
        local = Path(name).expanduser()
        here = local.exists()
    except (RuntimeError, ValueError, OSError):  # ~nobody, a zero byte, a name too long
        raise error(f"{printable(name)} is no folder's name; give a folder or a Hub id") from None
    if here or name in zoo_names():
        if revision is not None and not offline:
            kind = "a folder" if here else "an embedded model"
            raise ValueError(
                f"revision is {revision!r}, but {printable(name)} is {kind}, which has none; leave "
                "it out (revision=, --revision), or give a Hub id"
            )
        return (local if here else zoo(name)), None
    if address_of(name) is not None:
        raise error(
            f"{name} is an address, and a model on another machine can only be the prefill model "
            "(--source) of generate, stream_generate and hand_over; give a folder or a Hub id"
        )
    if not REPO_ID.fullmatch(name):
        raise error(f"{printable(name)} does not exist{_near(local, error)}; give {WANTED[error]}")
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), local_files_only=offline
        )
    except (HFValidationError, RevisionResolutionError, OSError) as problem:
        wanted = name if revision is None else f"{name} at revision {revision}"
        raise error(
            f"there is no folder {name}{_near(local, error)}, and the Hub did not give {wanted}: "
            f"{_reason(name, problem)}"
        ) from None
    return Path(snapshot), Path(snapshot).name


def model_type(path: Path) -> str:
    """The ``model_type`` of the config in a model's folder.

    Raises:
        MissingModelError: There is no readable config that names one.
    """
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
    return config["model_type"]


def _near(local: Path, error: type[KVLingoError]) -> str:
    """What was probably meant: a folder beside one that is not there, or an embedded model."""
    found = {} if error is MissingTranslatorError else dict.fromkeys(zoo_names(), Path())
    with contextlib.suppress(OSError):
        found |= {path.parent.name: local.parent for path in local.parent.glob("*/*config.json")}
    close = difflib.get_close_matches(local.name, found, 1, 0.7)
    return f" (did you mean {printable(str(found[close[0]] / close[0]))}?)" if close else ""


def _reason(name: str, problem: BaseException) -> str:
    """Why the Hub gave nothing, and what to do; the cause may be a wrapped exception."""
    causes = [problem]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for kind, text in REASONS:
        if any(isinstance(cause, kind) for cause in causes):
            return text.format(name=name)
    answered = any(isinstance(cause, HfHubHTTPError) for cause in causes)
    if isinstance(problem, LocalEntryNotFoundError) and not answered:
        return UNREACHED.format(name=name)
    return " ".join(str(problem).split())[:200]
