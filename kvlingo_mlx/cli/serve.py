"""kvlingo-mlx serve: models behind the APIs of OpenAI and Anthropic, with one conversation."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from kvlingo_mlx.cli.command import NAMED, Configured, VerbOptions, named_models, verb
from kvlingo_mlx.cli.output import keep, say
from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.group import launched, leads
from kvlingo_mlx.options import option


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(VerbOptions):
    """Options of every server; those that are not given are the file's, or the defaults."""

    host: str | None = option(None, "Address to listen at; default: localhost.")
    api_key: str | None = option(
        None, "What clients must send; better in the environment: KVLINGO_API_KEY."
    )
    allow_anyone: bool | None = option(
        None, "Listen at other hosts without a key.", "--allow-anyone"
    )
    write_timeout: float | None = option(
        None, "Seconds that a client may take nothing; default: 30."
    )
    log_level: str | None = option(None, "debug, info, warning or error; default: info.")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(NetworkOptions, Configured):
    KEYS: ClassVar[str] = (
        "sharded verbatim heal guard on_doubt queue_limit body_limit header_timeout "
        "body_timeout write_timeout keep_alive worker_timeout stop_timeout volatile"
    )
    models: Annotated[list[str] | None, NAMED] = None
    model: list[str] | None = None
    translator: list[str] | None = None
    port: int | None = option(None, "Port to listen at; 0 takes a free one; default: 8080.")
    cors: list[str] | None = option(None, "An origin whose web pages may ask; * for all.")
    max_kl: float | None = option(
        None, "Do not use translators whose receipt tells more than this many nats a token."
    )
    route: str | None = option(
        None, "plan-build, or a TOML file of rules; the model `auto` goes by them."
    )
    sharded: list[str] | None = None
    memory_limit: str | None = option(
        None, "Memory of weights, conversations and translators: 24GB; default: all there is."
    )
    max_tokens: int | None = option(
        None, "Longest answer where a request gives none; default: 4096."
    )
    verbatim: bool | None = option(
        None, "Go on from the tokens as written, even where a template changes earlier turns."
    )
    heal: str | None = option(
        None, "idle: while nothing is asked, models read what they hold translated, in its place."
    )
    guard: int | None = option(
        None, "At a switch, compare both models over so many tokens; default: 0, do not."
    )
    on_doubt: str | None = option(
        None, "If they are further apart than usual: warn in the log (default), or reread."
    )
    prefill_step_size: int | None = option(None, "Tokens per prefill chunk; default: 2048.")
    max_concurrent: int | None = option(None, "Answers that a model writes at once; default: 16.")
    queue_limit: int | None = option(
        None, "Requests that may wait for their first token; default: 64."
    )
    body_limit: str | None = option(None, "The largest request: 32MB, which is the default.")
    header_timeout: float | None = option(None, "Seconds for a request's headers; default: 10.")
    body_timeout: float | None = option(None, "Seconds for a request's body; default: 60.")
    keep_alive: float | None = option(
        None, "Seconds of silence before a stream is kept open; default: 10."
    )
    worker_timeout: float | None = option(
        None, "Seconds without a sign of the models before the server is restarted; default: 600."
    )
    stop_timeout: float | None = option(
        None, "Seconds that running answers have when the server stops; default: 20."
    )
    conversations: str | None = option(
        None, "Folder of conversations on disk; default: in the user's data folder."
    )
    keep_conversations: bool | None = option(None, "Keep conversations when the server ends.")
    volatile: list[str] | None = option(
        None, "How lines of system prompts begin that change with every request."
    )


@verb(ServeOptions, long=True, waits=True)
def command(options: ServeOptions) -> None:
    """Serve models to any client of OpenAI or Anthropic (needs the [server] extra).

    A client that names another model in the middle of a conversation has its first token after one
    decoding step. The page at / is a small chat. --json writes the address and settings.
    """
    with needs_extra("server", "a server needs starlette and others"):
        from kvlingo_mlx.serving import server, settings

    names = {name: settings.OPTIONS.get(name, name) for name in settings.NAMES}
    given = {name: getattr(options, option, None) for name, option in names.items()}
    given["models"] = named_models(options.model) if options.model else None
    files = options.config or []
    if len(files) > 1:
        raise ValueError(f"--config names {len(files)} files; give one")
    found = settings.read(next(iter(files), None), given)
    server.log_to_stderr(found.log_level)

    if launched() and found.keep_conversations and given["keep_conversations"]:
        raise ValueError(
            "--keep-conversations is for one process, and under mlx.launch conversations are kept "
            "in memory; leave it out"
        )
    if not leads():
        server.follow(found)
        return

    def listening(url: str) -> None:
        say(f"{', '.join(found.names)} at {url}/v1, and a chat at {url}/ (Ctrl-C stops)")
        config = {name: value for name, value in asdict(found).items() if name != "api_key"}
        keep(options.json_file, "serve", config, {"url": url})

    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        server.serve(found, listening=listening)
