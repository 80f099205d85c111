"""kvlingo-mlx serve: models behind the APIs of OpenAI and Anthropic, with one conversation."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from kvlingo_mlx.cli.command import NAMED, Configured, named_models, verb
from kvlingo_mlx.cli.output import keep, say
from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.group import leads
from kvlingo_mlx.options import option
from kvlingo_mlx.serving.settings import API_KEY, PairRule, ServerOptions, Settings


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerOptions, Configured):
    KEYS: ClassVar[str] = (
        "pairs sharded verbatim heal guard on_doubt queue_limit body_limit header_timeout "
        "body_timeout write_timeout keep_alive worker_timeout stop_timeout volatile"
    )
    models: Annotated[list[str] | None, NAMED] = None
    model: list[str] | None = None
    translator: list[str] | None = None
    route: str | None = option(
        None, "plan-build, or a TOML file of rules; the model `auto` goes by them."
    )
    pairs: list[str] | None = option(
        None, 'SOURCE:TARGET={"max_kl": 0.3}: a rule for one pair; in a file a table of them.'
    )


@verb(ServeOptions, long=True, waits=True)
def command(options: ServeOptions) -> None:
    """Serve models to any client of OpenAI or Anthropic (needs the [server] extra).

    A client that names another model in the middle of a conversation has its first token after one
    decoding step. The page at / is a small chat. --json writes the address and settings.
    """
    with needs_extra("server", "a server needs starlette and others"):
        from kvlingo_mlx.serving import server

    key = {"api_key": options.api_key or os.environ.get(API_KEY)}
    found = Settings(
        models=named_models(options.model or ()),
        translators=options.translator,
        routes=options.route,
        pairs=_rules(options.pairs or ()),
        **options.part(ServerOptions) | key,
    )
    server.log_to_stderr(found.log_level)
    if not leads():
        server.follow(found)
        return

    def listening(url: str) -> None:
        say(f"{', '.join(found.names)} at {url}/v1, and a chat at {url}/ (Ctrl-C stops)")
        config = {name: value for name, value in asdict(found).items() if name != "api_key"}
        keep(options.json_file, "serve", config, {"url": url})

    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        server.serve(found, listening=listening)


def _rules(texts: Sequence[str]) -> dict[str, PairRule]:
    """The rules of ``SOURCE:TARGET={...}`` texts; ValueError if one is none."""
    from kvlingo_mlx.format.typed import read

    found = {}
    for text in texts:
        pair, _, rule = text.partition("=")
        try:
            found[pair] = read(PairRule, json.loads(rule), f"pairs.{pair}")
        except json.JSONDecodeError as error:
            raise ValueError(f"pairs.{pair} is {rule!r:.80}, no JSON object ({error})") from None
    return found
