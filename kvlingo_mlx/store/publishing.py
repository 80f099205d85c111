"""Upload a translator's folder to the Hub: only the files of the format."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from kvlingo_mlx.errors import MissingTranslatorError, PublishingError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.format.translator_folder import CARD_FILE, OUR_FILES
from kvlingo_mlx.loading.grading import said_of
from kvlingo_mlx.loading.hub import REPO_ID


@dataclass(frozen=True)
class Upload:
    """An upload that has passed every check."""

    folder: Path
    config: TranslatorConfig
    digest: str  # sha256 of what the translator computes
    files: Mapping[str, bytes | Path]  # by name; a card that nobody has changed says the grade
    left_out: tuple[str, ...]  # other files in the folder

    def sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        sizes = (len(c) if isinstance(c, bytes) else c.stat().st_size for c in self.files.values())
        return dict(zip(self.files, sizes, strict=True))


def prepare(folder: str | os.PathLike[str], repo: str) -> Upload:
    """Read and check a translator's folder, as an import does, for uploading.

    Raises:
        MissingTranslatorError: There is no such folder.
        MalformedTranslatorError: The folder breaks the format.
        ValueError: ``repo`` is not a Hub id.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise MissingTranslatorError(f"{folder} is no folder; give a translator's folder")
    if not REPO_ID.fullmatch(repo):
        raise ValueError(f"{repo!r} is no Hub id; give OWNER/NAME, such as me/qwen3-4b-to-30b")
    config, weights = translator_folder.read(path)
    translator_folder.check_sizes(path, config, weights)
    files: dict[str, bytes | Path] = {n: path / n for n in OUR_FILES if (path / n).is_file()}
    written = (path / CARD_FILE).read_bytes() if CARD_FILE in files else None
    if written in (None, translator_folder.model_card(config, weights).encode()):
        files[CARD_FILE] = translator_folder.model_card(config, weights, said_of(config)).encode()
    left_out = tuple(sorted(set(os.listdir(path)) - set(OUR_FILES)))
    return Upload(path, config, translator_folder.digest(config, weights), files, left_out)


def publish(
    upload: Upload, repo: str, *, private: bool = False, revision: str | None = None
) -> str:
    """Upload to a repository, which is made if it does not exist; return the commit's address.

    Args:
        upload: What :func:`prepare` returned.
        repo: OWNER/NAME.
        private: Whether a new repository is private; an existing one stays as it is.
        revision: A branch, which is made if it does not exist; None: the main branch.

    Raises:
        PublishingError: The Hub refuses or cannot be reached; the message says why.
    """
    api = HfApi()
    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in upload.files.items()
    ]
    title = f"{upload.config.source.name} to {upload.config.target.name}"
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.create_commit(
            repo,
            operations,
            revision=revision,
            commit_message=f"KV-Lingo translator, {title}",
            commit_description=f"sha256 {upload.digest}",
        )
    except (HTTPError, OSError, ValueError) as problem:
        raise PublishingError(f"the Hub did not take {repo}: {_reason(problem)}") from None
    return done.commit_url


def _reason(problem: Exception) -> str:
    if isinstance(problem, HTTPError) and not isinstance(problem, HfHubHTTPError):
        return "it cannot be reached; check the network"  # an error of the HTTP client itself
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status in (401, 403):
        return "the token may not write there; log in with one that may: `hf auth login`"
    return " ".join(str(problem).split())[:200]
