"""kvlingo-mlx serve-prefill: a model that reads prompts for another machine."""

import contextlib
import os
from dataclasses import dataclass

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, say
from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.options import option
from kvlingo_mlx.serving.settings import API_KEY, NetworkOptions, Settings


@dataclass(frozen=True, kw_only=True)
class ServePrefillOptions(NetworkOptions, VerbOptions):
    source: str
    port: int = option(8090, "Port to listen at; 0 takes a free one.")
    max_jobs: int = option(4, "Prompts that are read at once, in turns.")


@verb(ServePrefillOptions, long=True, waits=True)
def command(options: ServePrefillOptions) -> None:
    """Let a model read prompts for another machine (needs the [server] extra).

    There, `kvlingo-mlx generate --source HOST:PORT` answers from what this one read. Prompts,
    states and the key travel in plain text: see the guide on several machines.
    """
    with needs_extra("server", "a server needs starlette and others"):
        from kvlingo_mlx.serving import prefill, server

    from kvlingo_mlx.loading.models import load

    key = {"api_key": options.api_key or os.environ.get(API_KEY)}
    found = Settings(models={"source": options.source}, **options.part(NetworkOptions) | key)
    server.log_to_stderr(found.log_level)
    model = load(options.source)

    def listening(url: str) -> None:
        say(f"{model.name} reads for others at {url} (Ctrl-C stops)")
        config = {name: getattr(found, name) for name in ("host", "port", "allow_anyone")}
        keep(options.json_file, "serve-prefill", {"source": model.name, **config}, {"url": url})

    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        prefill.serve(model, found, options.max_jobs, listening)
