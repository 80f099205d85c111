"""kvlingo-mlx publish: upload a translator to the Hugging Face Hub."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import JSON_HELP, facts, keep_stdout_for_json, say, warn
from kvlingo_mlx.errors import printable


def command(
    folder: str = typer.Argument(..., help="The translator's folder."),
    repo: str = typer.Argument(..., help="Where to: OWNER/NAME on the Hub."),
    private: bool = typer.Option(False, "--private", help="Make a new repository private."),
    revision: str = typer.Option(None, help="A branch; it is made where there is none."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only show what would be uploaded."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Check a translator and upload it with its card; without a token, show what would be."""
    keep_stdout_for_json(json_file)
    from kvlingo_mlx.loading.grading import GRADES, receipt_of, said_of
    from kvlingo_mlx.store import publishing

    upload = publishing.prepare(folder, repo)
    receipt = receipt_of(upload.config)
    if receipt is None or receipt.grade != GRADES[0]:
        warn(f"{folder} is {said_of(upload.config)}")
    if upload.left_out:
        warn(f"left out, since they are no files of a translator: {', '.join(upload.left_out)}")
    ready = publishing.has_token() and not dry_run
    place = f"{repo}" + (f", branch {revision}" if revision else "")
    say(printable(f"{'uploading' if ready else 'would upload'} to {place}:"))
    facts({name: f"{size:,} bytes" for name, size in upload.sizes().items()})
    if ready:
        say(publishing.publish(upload, repo, private=private, revision=revision))
        say(f"others get it with: kvlingo-mlx import {repo}")
    elif not dry_run:
        say("nothing was uploaded: there is no token; log in with `hf auth login`, or set HF_TOKEN")
    if json_file:
        from kvlingo_mlx.reporting import measure

        found = {"uploaded": ready, "digest": upload.digest, "bytes": upload.sizes()}
        asked = {"folder": folder, "repo": repo, "revision": revision}
        measure.append_json(json_file, measure.record("publish", asked, found))
