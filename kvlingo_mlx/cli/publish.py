"""kvlingo-mlx publish: upload a translator to the Hugging Face Hub."""

from dataclasses import dataclass

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import facts, keep, say, warn
from kvlingo_mlx.errors import PublishingError, printable
from kvlingo_mlx.options import option


@dataclass(frozen=True, kw_only=True)
class PublishOptions(VerbOptions):
    folder: str = option(..., "The translator's folder.", word=True)
    repo: str = option(..., "Where to: OWNER/NAME on the Hub.", word=True)
    private: bool = option(False, "Make a new repository private.", "--private")
    revision: str | None = option(None, "A branch; it is made where there is none.")
    dry_run: bool = option(False, "Only show what would be uploaded.", "--dry-run")


@verb(PublishOptions)
def command(options: PublishOptions) -> None:
    """Check a translator and upload it with its card."""
    from huggingface_hub import get_token

    from kvlingo_mlx.loading.grading import GRADES, receipt_of, said_of
    from kvlingo_mlx.store import publishing

    folder, repo, revision = options.folder, options.repo, options.revision
    upload = publishing.prepare(folder, repo)
    receipt = receipt_of(upload.config)
    if receipt is None or receipt.grade != GRADES[0]:
        warn(f"the grade of {folder} is {said_of(upload.config)}")
    if upload.left_out:
        warn(f"left out, since they are no files of a translator: {', '.join(upload.left_out)}")
    ready = get_token() is not None and not options.dry_run
    place = repo + (f", branch {revision}" if revision else "")
    say(printable(f"{'uploading' if ready else 'would upload'} to {place}:"))
    facts({name: f"{size:,} bytes" for name, size in upload.sizes().items()})
    if ready:
        say(publishing.publish(upload, repo, private=options.private, revision=revision))
        say(f"others get it with: kvlingo-mlx import {repo}")
    found = {"uploaded": ready, "digest": upload.digest, "bytes": upload.sizes()}
    keep(options.json_file, "publish", options.some("folder repo revision"), found)
    if not ready and not options.dry_run:
        raise PublishingError(
            "nothing was uploaded: there is no token; log in with `hf auth login`, or set HF_TOKEN"
        )
